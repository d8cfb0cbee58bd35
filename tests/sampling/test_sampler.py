"""What a sampler promises its callers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdpsgd.errors import PdpsgdError
from pdpsgd.planning.plans import Plan
from pdpsgd.planning.rounds import Level, Round
from pdpsgd.sampling import sampler as sampling
from pdpsgd.sampling.sampler import PoissonSampler
from pdpsgd.sampling.source import RandomSource


def make_round(
    people: tuple[int, ...], rates: tuple[float, ...], *, steps: int = 5, participation=None
) -> Round:
    chances = participation or (1.0,) * len(rates)
    batch = sum(n * p * q for n, p, q in zip(people, chances, rates, strict=True))
    return Round(steps, 1.0, max(batch, 1e-12), chances, rates, (1.0,) * len(rates))


def make_plan(people: tuple[int, ...], *rounds: Round) -> Plan:
    levels = tuple(Level(epsilon=1.0 + i, delta=1e-5, people=n) for i, n in enumerate(people))
    return Plan(mechanism="sampling", levels=levels, rounds=rounds)


def test_rates_of_zero_and_one_are_exact() -> None:
    people = (50, 50, 50)
    plan = make_plan(people, make_round(people, (0.0, 1.0, 0.01), steps=300))
    levels = np.arange(150) % 3
    sampler = PoissonSampler(plan, levels, RandomSource.from_seed(0))
    for step in range(300):
        drawn = levels[sampler.draw(step)]
        assert not (drawn == 0).any()
        assert (drawn == 1).sum() == 50


def test_a_participation_of_zero_or_one_is_exact() -> None:
    people = (30, 30)
    plan = make_plan(people, make_round(people, (1.0, 1.0), participation=(0.0, 1.0)))
    sampler = PoissonSampler(plan, np.arange(60) % 2, RandomSource.from_seed(0))
    assert sorted(sampler.draw(3)) == list(range(1, 60, 2))


def test_an_empty_batch_is_delivered_as_an_empty_array() -> None:
    plan = make_plan((10,), make_round((10,), (1e-9,)))
    batch = PoissonSampler(plan, np.zeros(10, dtype=int), RandomSource.from_seed(0)).draw(0)
    assert batch.dtype == np.int64
    assert batch.shape == (0,)


def test_a_plan_that_draws_nobody_and_a_rank_without_people_give_empty_batches() -> None:
    nobody = make_plan((2,), make_round((2,), (0.0,)))
    assert len(PoissonSampler(nobody, np.zeros(2, dtype=int), RandomSource.from_seed(0)).draw(0)) == 0
    plan = make_plan((2,), make_round((2,), (1.0,)))
    alone = PoissonSampler(plan, np.zeros(2, dtype=int), RandomSource.from_seed(0), rank=2, world_size=3)
    assert len(alone.draw(0)) == 0


def test_a_step_drawn_again_gives_the_same_people_in_whatever_order_steps_are_drawn() -> None:
    people = (200, 300)
    rounds = [
        make_round(people, (0.1, 0.3), steps=4, participation=(0.5, 0.7)),
        make_round(people, (0.2, 0.05), steps=3),
        make_round(people, (0.1, 0.3), steps=4, participation=(0.5, 0.7)),
    ]
    plan, levels = make_plan(people, *rounds), np.repeat([0, 1], people)
    forward = PoissonSampler(plan, levels, RandomSource.from_seed(9))
    batches = [forward.draw(step) for step in range(len(forward))]
    for step in reversed(range(len(forward))):
        resumed = PoissonSampler(plan, levels, RandomSource.from_seed(9))
        np.testing.assert_array_equal(resumed.draw(step), batches[step])
        np.testing.assert_array_equal(forward.draw(step), batches[step])
    assert len({batch.tobytes() for batch in batches}) == len(batches)


def test_two_rounds_have_different_participants_and_a_round_keeps_its_own() -> None:
    people = (1000,)
    one = make_round(people, (1.0,), steps=2, participation=(0.5,))
    sampler = PoissonSampler(
        make_plan(people, one, one), np.zeros(1000, dtype=int), RandomSource.from_seed(1)
    )
    first, again, other = (set(sampler.draw(step)) for step in (0, 1, 2))
    assert first == again
    assert first != other


def test_another_key_draws_other_people() -> None:
    plan = make_plan((1000,), make_round((1000,), (0.5,)))
    levels = np.zeros(1000, dtype=int)
    one, other = (set(PoissonSampler(plan, levels, RandomSource.from_seed(s)).draw(0)) for s in (1, 2))
    assert one != other


@given(
    people=st.lists(st.integers(0, 40), min_size=1, max_size=8),
    data=st.data(),
    world_size=st.integers(1, 3),
    seed=st.integers(0, 2**32),
)
@settings(deadline=None, max_examples=100)
def test_ranks_share_the_people_and_nobody_is_drawn_twice(people, data, world_size, seed) -> None:
    rates = tuple(data.draw(st.sampled_from((0.0, 1e-12, 0.01, 0.1, 0.149, 0.2, 0.9, 1.0))) for _ in people)
    plan = make_plan(tuple(people), make_round(tuple(people), rates, steps=2))
    levels = np.random.default_rng(seed).permutation(np.repeat(np.arange(len(people)), people))
    source = RandomSource.from_seed(seed)
    for step in (0, 1):
        union: list[int] = []
        for rank in range(world_size):
            batch = PoissonSampler(plan, levels, source, rank=rank, world_size=world_size).draw(step)
            assert (batch % world_size == rank).all()
            union.extend(batch)
        assert len(union) == len(set(union))
        drawn = np.isin(np.arange(len(levels)), union)
        chance = np.array(rates)[levels]
        assert not drawn[chance == 0].any()
        assert drawn[chance == 1].all()


@given(st.lists(st.tuples(st.integers(1, 10**6), st.floats(1e-9, 1.0)), min_size=1, max_size=40))
@settings(deadline=None)
def test_bands_hold_every_level_once_and_cost_no_more_than_one_band_or_a_band_each(levels) -> None:
    levels = sorted(levels, key=lambda level: level[1])
    sizes, rates = np.array([n for n, _ in levels]), np.array([q for _, q in levels])
    parts = list(sampling._cheapest_split(sizes, rates))
    assert sorted(i for part in parts for i in range(part.start, part.stop)) == list(range(len(levels)))

    def cost(part: slice) -> float:
        return sampling._BAND_COST + sizes[part].sum() * min(rates[part].max(), sampling._MASK_COST)

    singles = [slice(i, i + 1) for i in range(len(levels))]
    best = sum(map(cost, parts)) * (1 - 1e-9)
    assert best <= cost(slice(0, len(levels)))
    assert best <= sum(map(cost, singles))


def test_many_levels_of_similar_rates_share_a_band() -> None:
    rates = tuple(np.linspace(0.001, 0.002, 256).tolist())
    assert len(sampling._bands(np.full(256, 4000), rates)) <= 3


@pytest.mark.parametrize(
    ("levels", "message"),
    [
        (np.zeros((2, 5), dtype=int), "one-dimensional array of whole numbers. Got shape (2, 5)"),
        (np.zeros(10), "whole numbers. Got shape (10,) of float64"),
        (np.full(10, 2), "in 0 ... 1, the plan's levels. Got 2"),
        (np.full(10, -1), "in 0 ... 1, the plan's levels. Got -1"),
        (np.zeros(10, dtype=int), "Expected 4 people on level 0, as in the plan. Got 10"),
        (np.zeros(0, dtype=int), "Expected 4 people on level 0, as in the plan. Got 0"),
    ],
)
def test_people_other_than_the_plans_are_refused(levels, message) -> None:
    people = (4, 6)
    with pytest.raises(PdpsgdError) as error:
        PoissonSampler(make_plan(people, make_round(people, (0.1, 0.1))), levels, RandomSource.from_seed(0))
    assert message in str(error.value)


@pytest.mark.parametrize("step", [-1, 5])
def test_steps_beyond_the_plan_are_refused(step: int) -> None:
    sampler = PoissonSampler(
        make_plan((3,), make_round((3,), (0.5,))), np.zeros(3, dtype=int), RandomSource.from_seed(0)
    )
    assert len(sampler) == 5
    with pytest.raises(PdpsgdError, match=r"0 <= step < 5, the plan's steps\. Got step="):
        sampler.draw(step)


@pytest.mark.parametrize(("rank", "world_size"), [(2, 2), (-1, 1)])
def test_a_rank_outside_the_world_is_refused(rank: int, world_size: int) -> None:
    plan = make_plan((3,), make_round((3,), (0.5,)))
    with pytest.raises(PdpsgdError, match="0 <= rank < world_size"):
        PoissonSampler(
            plan, np.zeros(3, dtype=int), RandomSource.from_seed(0), rank=rank, world_size=world_size
        )


def test_a_batch_is_never_skewed_by_a_word_that_does_not_fit() -> None:
    class LargeWords:
        """Words from the last, incomplete stretch first, then a count down."""

        def __init__(self) -> None:
            self.calls = 0

        def random_raw(self, size: int) -> np.ndarray:
            self.calls += 1
            last = np.uint64(2**64 - 1)
            return np.full(size, last) if self.calls == 1 else np.arange(size, dtype=np.uint64)

    words = LargeWords()
    np.testing.assert_array_equal(sampling._distinct(words, 10**6, 3), [0, 1, 2])
    assert words.calls == 2


def test_nothing_that_was_drawn_ahead_outlives_the_key() -> None:
    plan, source = make_plan((500,), make_round((500,), (0.05,))), RandomSource.from_seed(0)
    sampler = PoissonSampler(plan, np.zeros(500, dtype=int), source)
    sampler.draw(0)
    sampler.forget()
    source.erase()
    with pytest.raises(PdpsgdError, match="erased"):
        sampler.draw(1)
