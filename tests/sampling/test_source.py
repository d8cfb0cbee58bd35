"""A key and a step's number make everything, and nothing is made twice."""

from __future__ import annotations

import copy
import hashlib
import itertools
import os
import pickle
import subprocess
import sys
from collections.abc import Callable

import numpy as np
import pytest
import torch
from scipy import stats

from pdpsgd.errors import PdpsgdError
from pdpsgd.sampling.generators import AES, SFC64, SHAKE, generator_of
from pdpsgd.sampling.source import RandomSource
from pdpsgd.sampling.step_noise import AHEAD

KEY = bytes(range(32))
SOURCES = {
    SFC64: {"secure": False},
    SHAKE: {"algorithm": SHAKE},
    AES: {"algorithm": AES},
}


@pytest.fixture(params=SOURCES)
def options(request: pytest.FixtureRequest) -> dict:
    return SOURCES[request.param]


def noise_of(source: RandomSource, *, step: int, size: int = 1000) -> torch.Tensor:
    totals = torch.zeros(size, dtype=torch.int64)
    return source.release([totals], clipping_norm=1.0, noise_multiplier=1.0, step=step)[0]


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
        for purpose in ("noise", "tails"):
            words.extend(source._generator(purpose, number=number, rank=rank).random_raw(4).tolist())
    assert len(set(words)) == len(words)


def test_reading_words_in_parts_goes_on_and_does_not_repeat(options: dict) -> None:
    generator = RandomSource.from_key(KEY, **options).draw_generator(step=0)
    words = np.concatenate([generator.random_raw(size) for size in (1, 0, 3, 1000, 1)])
    assert len(np.unique(words)) == 1005
    at_once = RandomSource.from_key(KEY, **options).draw_generator(step=0).random_raw(1005)
    np.testing.assert_array_equal(words, at_once)


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


def test_a_seed_is_reproducible_and_marked_as_not_for_release() -> None:
    one, other = RandomSource.from_seed(5), RandomSource.from_seed(5)
    assert one.seeded
    assert "not for release" in repr(one)
    assert one.key_bytes() == other.key_bytes() != RandomSource.from_seed(6).key_bytes()
    # torch's generator for CPUs cannot tell these two apart.
    assert one.key_bytes() != RandomSource.from_seed(5 + 2**32).key_bytes()


def test_the_operating_systems_keys_are_new_each_time_and_secret() -> None:
    sources = [RandomSource.from_operating_system() for _ in range(3)]
    assert len({source.key_bytes() for source in sources}) == 3
    assert not any(source.seeded for source in sources)


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


def test_an_erased_key_leaves_nothing_of_later_noise(options: dict) -> None:
    source = RandomSource.from_key(KEY, **options)
    noise_of(source, step=0)
    source.erase()
    with pytest.raises(PdpsgdError, match="Its key was erased when its run ended"):
        noise_of(source, step=1)


def test_the_noise_of_a_step_does_not_depend_on_the_steps_before(options: dict) -> None:
    source = RandomSource.from_key(KEY, **options)
    for step in (0, 1, 5, AHEAD - 1, AHEAD, 3 * AHEAD, 3 * AHEAD + 1, 7 * AHEAD):
        alone = noise_of(RandomSource.from_key(KEY, **options), step=step)
        assert torch.equal(noise_of(source, step=step), alone)


def test_the_key_is_never_shown(options: dict) -> None:
    source = RandomSource.from_key(KEY, **options)
    assert KEY.hex() not in repr(source)
    assert str(KEY) not in repr(source)


@pytest.mark.parametrize("seed", [-1, 1.5, "1", True, None])
def test_seeds_that_are_no_whole_numbers_are_refused(seed: object) -> None:
    with pytest.raises(PdpsgdError, match="whole number >= 0"):
        RandomSource.from_seed(seed)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"secure": False, "algorithm": SHAKE}, f"algorithm='{SFC64}' for a source that is not secure"),
        ({"algorithm": SFC64}, f"algorithm to be one of '{AES}', '{SHAKE}'"),
        (
            {"algorithm": "aes-256-ctr"},
            "Got algorithm='aes-256-ctr'",
        ),  # of version 0.1.0, whose noise was another one
    ],
)
def test_a_run_does_not_go_on_with_another_generator(options: dict, message: str) -> None:
    with pytest.raises(PdpsgdError, match=message):
        RandomSource.from_key(KEY, **options)


def test_a_key_of_another_length_is_refused() -> None:
    with pytest.raises(PdpsgdError, match=r"key of 32 bytes\. Got 3 bytes"):
        RandomSource.from_key(b"abc")


def test_a_source_is_taken_by_one_run_and_never_copied(options: dict) -> None:
    source = RandomSource.from_key(KEY, **options)
    assert source.take() is source
    with pytest.raises(PdpsgdError, match="that a run has taken before"):
        source.take()
    for copied in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(PdpsgdError, match="a request for a copy"):
            copied(source)


def test_steps_and_ranks_below_zero_are_refused(options: dict) -> None:
    source = RandomSource.from_key(KEY, **options)
    people = np.arange(3)
    assert source.place_words(step=0, rank=0, count=3).shape == (3,)
    for step, rank in ((-1, 0), (0, -1)):
        with pytest.raises(PdpsgdError, match="number and rank to be >= 0"):
            source.place_words(step=step, rank=rank, count=3)
    with pytest.raises(PdpsgdError, match=r"Expected step >= 0\. Got step=-1"):
        source.record_words(people=people, step=-1, count=2)


def test_keys_and_draws_do_not_need_torch() -> None:
    code = (
        "import sys; from pdpsgd.sampling.source import RandomSource; import pdpsgd.sampling.sampler; "
        "RandomSource.from_seed(1).draw_generator(step=0).random_raw(3); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# --- generators --------------------------------------------------------------------------------------------


def test_the_default_is_cryptographic_and_says_so() -> None:
    assert RandomSource.from_operating_system().cryptographic
    assert RandomSource.from_seed(0).cryptographic
    assert RandomSource.from_key(KEY).cryptographic
    assert RandomSource.from_key(KEY).algorithm == AES
    assert not RandomSource.from_operating_system(secure=False).cryptographic


@pytest.mark.parametrize("algorithm", [AES, SHAKE])
def test_cryptographic_words_are_uniform_in_every_byte(algorithm: str) -> None:
    # Chi-square over the 256 values of each of the 8 bytes of a word; false-alarm rate 1e-8.
    words = generator_of(algorithm, bytes(32)).random_raw(100_000)
    for byte in words.view(np.uint8).reshape(-1, 8).T:
        assert stats.chisquare(np.bincount(byte, minlength=256)).pvalue > 1e-8 / 8


def test_aes_words_are_those_of_the_standard() -> None:
    # The published answer for a key and a block of zeros; counter mode encrypts its counter, zero at first.
    words = generator_of(AES, bytes(32)).random_raw(2)
    assert words.astype("<u8").tobytes().hex() == "dc95c078a2408989ad48a21492842087"


def test_shake_words_are_those_of_the_standard_library() -> None:
    words = generator_of(SHAKE, KEY).random_raw(300).astype("<u8").tobytes()
    assert words[:1088] == hashlib.shake_256(KEY + bytes(8)).digest(1088)
    assert words[1088:2176] == hashlib.shake_256(KEY + b"\1" + bytes(7)).digest(1088)


def _in_a_copy_of_this_process(act: Callable[[], object]) -> str:
    """Return what a forked process says of an act: nothing, or the error's first words."""
    reading, writing = os.pipe()
    process = os.fork()
    if process == 0:
        try:
            act()
        except BaseException as error:
            os.write(writing, str(error)[:60].encode())
        os._exit(0)
    os.close(writing)
    os.waitpid(process, 0)
    with os.fdopen(reading) as said:
        return said.read()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system copies no processes")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_copy_of_the_process_gives_out_no_noise() -> None:
    source = RandomSource.from_operating_system()
    totals = [torch.zeros(4, dtype=torch.int64)]

    def release() -> None:
        source.release(totals, clipping_norm=1.0, noise_multiplier=1.0, step=0)

    assert _in_a_copy_of_this_process(release).startswith("Expected noise to be given out by the process")
    release()
    assert _in_a_copy_of_this_process(lambda: source.draw_generator(step=1)) == ""
