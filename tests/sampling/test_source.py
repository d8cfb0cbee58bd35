"""A key and a step's number make everything, and nothing is made twice."""

from __future__ import annotations

import itertools
import subprocess
import sys

import numpy as np
import pytest
import torch

from pdpsgd.errors import PdpsgdError
from pdpsgd.planning.verdict import GUESSABLE
from pdpsgd.sampling.generators import AES, SHAKE
from pdpsgd.sampling.noise import blocks
from pdpsgd.sampling.source import RandomSource

KEY = bytes(range(32))
SOURCES = {
    "sfc64": {},
    SHAKE: {"secure": True, "algorithm": SHAKE},
    AES: {"secure": True, "algorithm": AES},
}


@pytest.fixture(params=SOURCES)
def options(request: pytest.FixtureRequest) -> dict:
    if request.param == AES:
        pytest.importorskip("cryptography", reason="AES comes with pdpsgd[secure]")
    return SOURCES[request.param]


def noise_of(source: RandomSource, *, step: int, size: int = 1000) -> torch.Tensor:
    noise = torch.zeros(size)
    source.noise_([noise], standard_deviation=1.0, step=step)
    return noise


def test_key_and_step_decide_everything(options: dict) -> None:
    one, other = (RandomSource.from_key(KEY, **options) for _ in range(2))
    for _ in range(10):
        other.draw_generator(step=7).random_raw(5)  # what was drawn before leaves no trace
    assert torch.equal(noise_of(one, step=3), noise_of(other, step=3))
    for draw in ("draw_generator", "round_generator"):
        number = {"step" if draw == "draw_generator" else "round": 3}
        first, second = (getattr(source, draw)(**number, rank=1).random_raw(9) for source in (one, other))
        np.testing.assert_array_equal(first, second)


def test_no_two_purposes_steps_ranks_or_keys_share_words(options: dict) -> None:
    sources = [RandomSource.from_key(key, **options) for key in (KEY, KEY[::-1])]
    words: list[int] = []
    for source, number, rank in itertools.product(sources, (0, 1, 2**40), (0, 1)):
        words.extend(source.draw_generator(step=number, rank=rank).random_raw(4).tolist())
        words.extend(source.round_generator(round=number, rank=rank).random_raw(4).tolist())
        words.extend(source._generator("noise", number=number, rank=rank).random_raw(4).tolist())
    assert len(set(words)) == len(words)


def test_reading_words_in_parts_goes_on_and_does_not_repeat(options: dict) -> None:
    generator = RandomSource.from_key(KEY, **options).draw_generator(step=0)
    words = np.concatenate([generator.random_raw(size) for size in (1, 0, 3, 1000, 1)])
    assert len(np.unique(words)) == 1005


def test_the_noise_of_a_step_is_given_out_once(options: dict) -> None:
    source = RandomSource.from_key(KEY, **options)
    noise_of(source, step=4)
    for step in (4, 3):
        with pytest.raises(
            PdpsgdError, match=rf"Expected step >= 5.*reveal their difference. Got step={step}"
        ):
            noise_of(source, step=step)
    noise_of(source, step=5)


def test_steps_have_unrelated_noise(options: dict) -> None:
    source = RandomSource.from_key(KEY, **options)
    one, two = (noise_of(source, step=step, size=100_000) for step in (0, 1))
    # Correlation of independent normals: standard deviation 1/sqrt(n). Beyond 6 of them: chance 2e-9.
    assert abs(float((one * two).mean())) < 6 / 100_000**0.5


def test_a_seed_is_reproducible_and_marked_as_guessable() -> None:
    one, other = RandomSource.from_seed(5), RandomSource.from_seed(5)
    assert one.guessable
    assert GUESSABLE in repr(one)
    assert one.key_bytes() == other.key_bytes() != RandomSource.from_seed(6).key_bytes()
    # torch's generator for CPUs cannot tell these two apart.
    assert one.key_bytes() != RandomSource.from_seed(5 + 2**32).key_bytes()


def test_the_operating_systems_keys_are_new_each_time_and_not_guessable() -> None:
    sources = [RandomSource.from_operating_system() for _ in range(3)]
    assert len({source.key_bytes() for source in sources}) == 3
    assert not any(source.guessable for source in sources)


def test_global_seeds_neither_change_noise_nor_are_changed() -> None:
    torch.manual_seed(1)
    expected, state = noise_of(RandomSource.from_seed(0), step=0), torch.get_rng_state()
    torch.manual_seed(2)
    assert torch.equal(noise_of(RandomSource.from_seed(0), step=0), expected)
    torch.manual_seed(1)
    noise_of(RandomSource.from_seed(0), step=0)
    assert torch.equal(torch.get_rng_state(), state)


def test_an_erased_key_is_gone_and_every_use_refused(options: dict) -> None:
    source = RandomSource.from_key(KEY, **options)
    source.erase()
    assert bytes(source._key) == bytes(32)
    uses = (
        source.key_bytes,
        lambda: source.draw_generator(step=0),
        lambda: source.round_generator(round=0),
        lambda: noise_of(source, step=0),
    )
    for use in uses:
        with pytest.raises(PdpsgdError, match="Its key was erased when its run ended"):
            use()


def test_the_key_is_never_shown(options: dict) -> None:
    source = RandomSource.from_key(KEY, **options)
    assert KEY.hex() not in repr(source)
    assert str(KEY) not in repr(source)


@pytest.mark.parametrize("seed", [-1, 1.5, "1", True, None])
def test_seeds_that_are_no_whole_numbers_are_refused(seed: object) -> None:
    with pytest.raises(PdpsgdError, match="whole number >= 0"):
        RandomSource.from_seed(seed)  # type: ignore[arg-type]


@pytest.mark.parametrize("deviation", [0.0, -1.0, float("nan"), float("inf")])
def test_noise_of_no_size_is_refused(deviation: float) -> None:
    with pytest.raises(PdpsgdError, match="standard_deviation > 0 and finite"):
        RandomSource.from_seed(0).noise_([torch.zeros(1)], standard_deviation=deviation, step=0)


def test_whole_number_tensors_are_refused_before_any_noise_is_spent() -> None:
    source, good = RandomSource.from_seed(0), torch.zeros(3)
    with pytest.raises(PdpsgdError, match=r"tensors\[1\] to hold floating-point numbers. Got torch.int64"):
        source.noise_([good, torch.zeros(3, dtype=torch.int64)], standard_deviation=1.0, step=0)
    assert not good.any()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"algorithm": SHAKE}, "algorithm='sfc64' for a source that is not secure"),
        ({"secure": True, "algorithm": "sfc64"}, "algorithm to be one of 'aes-256-ctr', 'shake-256'"),
    ],
)
def test_a_run_does_not_go_on_with_another_generator(options: dict, message: str) -> None:
    with pytest.raises(PdpsgdError, match=message):
        RandomSource.from_key(KEY, **options)


def test_a_key_of_another_length_is_refused() -> None:
    with pytest.raises(PdpsgdError, match=r"key of 32 bytes\. Got 3 bytes"):
        RandomSource.from_key(b"abc")


def test_keys_and_draws_do_not_need_torch() -> None:
    code = (
        "import sys; from pdpsgd.sampling.source import RandomSource; import pdpsgd.sampling.sampler; "
        "RandomSource.from_seed(1).draw_generator(step=0).random_raw(3); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_blocks_hold_every_element_once_and_are_bounded() -> None:
    tensors = [torch.zeros(shape) for shape in ((3, 5), (), (0,), (100,), (7, 7), (1,))]
    for block in blocks(tensors, size=32):
        assert sum(part.numel() for part in block) <= 32
        for part in block:
            part += 1
    assert all((tensor == 1).all() for tensor in tensors)
