"""Noise that is made for several steps together is the noise of each step, by bit, and nothing of it is left behind."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pdpsgd.errors import PdpsgdError
from pdpsgd.sampling import grid, step_noise
from pdpsgd.sampling.box_muller import normals
from pdpsgd.sampling.generators import AES, SFC64, SHAKE, generator_of
from pdpsgd.sampling.grid import BLOCK, Scale
from pdpsgd.sampling.native import dispatch
from pdpsgd.sampling.source import RandomSource
from pdpsgd.sampling.step_noise import TOGETHER
from pdpsgd.sampling.words import PIECE, read_into

KEY = bytes(range(32))
SOURCES = {SFC64: {"secure": False}, SHAKE: {"algorithm": SHAKE}, AES: {"algorithm": AES}}


@pytest.fixture(autouse=True)
def nothing_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "library", lambda: None)


@pytest.fixture
def source() -> RandomSource:
    pytest.importorskip("cryptography")
    return RandomSource.from_key(KEY)


def noise_of(
    source: RandomSource, *, step: int, sizes: Sequence[int] = (1000,), sigma: float = 1.0
) -> list[np.ndarray]:
    totals = [torch.arange(size) * 2**29 for size in sizes]
    outs = [torch.empty(size, dtype=torch.float64) for size in sizes]
    source.release(totals, clipping_norm=1.3, noise_multiplier=sigma, step=step, out=outs)
    return [out.numpy() for out in outs]


def alone(source: RandomSource, *, step: int, sizes: Sequence[int], sigma: float) -> list[np.ndarray]:
    """The definition: words of the step, a normal number for each, added and rounded in whole numbers."""
    scale = Scale.of(clipping_norm=1.3, noise_multiplier=sigma)
    padded = [-(-size // 16) * 16 for size in sizes]
    noise = normals(*source._noise_generators(step), sum(padded), scale=scale.deviation)
    parts, half = np.split(noise, np.cumsum(padded)), (1 << scale.shift) >> 1
    return [
        ((np.arange(size) * 2**29 + np.rint(part[:size]).astype(np.int64) + half) >> scale.shift) * scale.step
        for size, part in zip(sizes, parts[:-1], strict=True)
    ]


def assert_equal(found: Sequence[np.ndarray], wanted: Sequence[np.ndarray]) -> None:
    assert all(map(np.array_equal, found, wanted))


@pytest.mark.parametrize("algorithm", SOURCES)
@pytest.mark.parametrize(
    "sizes",
    [(1,), (16,), (7, 100, 33), (2410,), (BLOCK // 3 + 5,), (BLOCK, 1), (BLOCK + 1, 17), (3 * BLOCK + 3,)],
    ids=str,
)
def test_a_row_of_steps_has_the_noise_of_each(algorithm: str, sizes: tuple[int, ...]) -> None:
    source = RandomSource.from_key(KEY, **SOURCES[algorithm])  # type: ignore[arg-type]
    steps = 40 if sum(sizes) < 3000 else 6
    for step in range(steps):
        wanted = alone(source, step=step, sizes=sizes, sigma=1.0)
        assert_equal(noise_of(source, step=step, sizes=sizes), wanted)


@given(
    steps=st.lists(
        st.tuples(
            st.integers(1, 20),
            st.sampled_from([(40,), (40,), (40,), (16, 24), (30, 10), (41,), (0, 40), ()]),
            st.sampled_from([1.0, 1.0, 1.0, 0.7, 1e-4, 5e4]),
        ),
        max_size=30,
    )
)
@settings(max_examples=60, deadline=None)
def test_steps_that_are_left_out_and_figures_and_sizes_that_change_make_no_difference(
    steps: list[tuple[int, tuple[int, ...], float]],
) -> None:
    source, step = RandomSource.from_key(KEY, secure=False), 0
    for further, sizes, sigma in steps:
        step += further if further > 12 else 1
        wanted = alone(source, step=step, sizes=sizes, sigma=sigma)
        assert_equal(noise_of(source, step=step, sizes=sizes, sigma=sigma), wanted)


def test_models_too_large_to_be_made_ahead_have_the_noise_of_each_step() -> None:
    source, sizes = RandomSource.from_key(KEY, secure=False), (TOGETHER // 2 + 1, 5)
    for step in range(2):
        wanted = alone(source, step=step, sizes=sizes, sigma=1.0)
        assert_equal(noise_of(source, step=step, sizes=sizes), wanted)
    assert len(source._noise._memory) == 0


def test_more_and_more_steps_are_made_together_and_only_one_when_figures_change(
    source: RandomSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []

    def count(block: np.ndarray, further: Sequence[object], **options: object) -> np.ndarray:
        made.append(len(further))
        return plain(block, further, **options)  # type: ignore[arg-type]

    plain = step_noise.normals_of
    monkeypatch.setattr(step_noise, "normals_of", count)
    for step in range(31):
        noise_of(source, step=step)
    assert made == [1, 2, 4, 8, 16]
    made.clear()
    for step in range(31, 37):
        noise_of(source, step=step, sigma=1.0 + step)
    assert made == [1] * 6


# --- nothing is left, nothing is given out twice -------------------------------------------------------------


def test_of_noise_that_was_given_out_only_what_was_released_is_left(source: RandomSource) -> None:
    for step in range(5):
        (released,) = noise_of(source, step=step, sizes=(64,))
        places = [
            n for n in range(len(source._noise._memory) - 63) if source._noise._memory[n] == released[0]
        ]
        assert any(np.array_equal(source._noise._memory[n : n + 64], released) for n in places)


def test_an_erased_key_leaves_no_noise_of_later_steps(source: RandomSource) -> None:
    for step in range(4):
        noise_of(source, step=step)
    assert source._noise._made
    assert source._noise._memory.any()
    source.erase()
    assert not source._noise._made
    assert not source._noise._keyed
    assert not source._noise._memory.any()
    with pytest.raises(PdpsgdError, match="Its key was erased when its run ended"):
        noise_of(source, step=4)


def test_noise_that_was_made_before_is_given_out_once(source: RandomSource) -> None:
    for step in range(5):
        noise_of(source, step=step)
    for earlier in range(5):
        with pytest.raises(PdpsgdError, match=r"Expected step >= 5: earlier noise was given out"):
            noise_of(source, step=earlier)


def test_noise_that_was_made_before_is_not_given_out_by_another_process(
    source: RandomSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in range(4):
        noise_of(source, step=step)
    assert 4 in source._noise._made
    monkeypatch.setattr("os.getpid", lambda: -1)
    with pytest.raises(PdpsgdError, match="given out by the process that made the run private"):
        noise_of(source, step=4)


# --- words and whole numbers ---------------------------------------------------------------------------------


@given(
    sizes=st.lists(st.sampled_from([0, 1, 2, 3, 5, 16, 61, 64, 65, 200, PIECE - 1, PIECE + 3, 2 * PIECE + 2]))
)
@settings(max_examples=60, deadline=None)
def test_words_written_into_memory_are_the_words_of_the_stream(sizes: list[int]) -> None:
    pytest.importorskip("cryptography")
    wanted = generator_of(AES, KEY).random_raw(sum(sizes))
    generator, found = generator_of(AES, KEY), np.full(sum(sizes) + 9, 7, dtype=np.uint64)
    begin = 0
    for number, size in enumerate(sizes):
        if number % 3 == 2:
            found[begin : begin + size] = generator.random_raw(size)
        else:
            read_into(found[begin : begin + size], generator)
        assert (found[begin + size :] == 7).all()  # and nothing beyond
        begin += size
    assert np.array_equal(found[:begin], wanted)


@pytest.mark.parametrize("kind", [np.float32, np.float64])
def test_sums_become_the_nearest_integers_of_two_the_even_one(kind: type[np.floating]) -> None:
    halves = np.arange(-40, 41) / 2.0
    parts = [
        halves,
        halves / 3,
        halves * 2.0**40 + 0.5,
        [2.0**51 - 0.5, -(2.0**51) + 0.5],
        [0.0, -0.0, 1e-300],
    ]
    for numbers in (*parts, [*halves, 2.0**51], [*halves, -(2.0**55) + 8], [*halves, 2.0**56]):
        sums = (np.array(numbers) / 8).astype(kind)
        multiples = np.empty(len(sums), dtype=np.int64)
        assert grid.quantize(sums, multiples, unit=0.125, largest=2.0**57)
        assert multiples.tolist() == [
            round(float(number) * 8) for number in sums
        ]  # round() takes the even one


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf, 2.0**57, -(2.0**57), 1e300, -1e300])
@pytest.mark.parametrize("place", [0, 3, BLOCK, BLOCK + 8])
def test_sums_that_are_too_large_are_told(wrong: float, place: int) -> None:
    sums = np.zeros(BLOCK + 9)
    multiples = np.empty(len(sums), dtype=np.int64)
    sums[place] = math.nextafter(2.0**57, 0) / 8
    assert grid.quantize(sums, multiples, unit=0.125, largest=2.0**57)
    sums[place] = wrong / 8
    assert not grid.quantize(sums, multiples, unit=0.125, largest=2.0**57)
