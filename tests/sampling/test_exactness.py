"""Draws against the definition: everybody on their own, at their own level's rate, at every step.

Every statistical test here compares frequencies with exactly computed probabilities by a chi-square
statistic and fails below p = 1e-9, so its false-alarm rate is below 1e-6 with ample room for the statistic
being only approximately chi-square. Seeds are fixed so that a failure can be repeated.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from fractions import Fraction
from itertools import product

import numpy as np
import numpy.typing as npt
import pytest
from scipy import stats

from pdpsgd.planning.plans import Plan
from pdpsgd.planning.rounds import Level, Round
from pdpsgd.sampling import sampler as sampling
from pdpsgd.sampling.sampler import PoissonSampler
from pdpsgd.sampling.source import RandomSource

FALSE_ALARM = 1e-9
Counts = npt.NDArray[np.int64]
Chances = npt.NDArray[np.float64]


def make_plan(
    people: Sequence[int],
    rates: Sequence[float],
    *,
    participation: Sequence[float] | None = None,
    steps: int = 1,
    rounds: int = 1,
) -> Plan:
    chances = tuple(participation or (1.0,) * len(rates))
    batch = float(sum(n * p * q for n, p, q in zip(people, chances, rates, strict=True)))
    one = Round(steps, 1.0, max(batch, 1e-12), chances, tuple(rates), (1.0,) * len(rates))
    levels = tuple(Level(epsilon=1.0 + i, delta=1e-5, people=n) for i, n in enumerate(people))
    return Plan(mechanism="sampling", levels=levels, rounds=(one,) * rounds)


def levels_of(plan: Plan) -> Counts:
    """People of the levels in turn, so that a level's people are not neighbours in the list."""
    order = np.repeat(np.arange(len(plan.levels)), [level.people for level in plan.levels])
    return np.random.default_rng(0).permutation(order)


def probability_of(counts: Counts, chances: Chances) -> float:
    """The p-value of the counts under the chances, with rare cells put together."""
    expected = chances * counts.sum()
    rare = expected < 20
    assert counts[chances == 0].sum() == 0
    seen = np.append(counts[~rare], counts[rare].sum())
    wanted = np.append(expected[~rare], expected[rare].sum())
    if wanted[-1] < 20:
        seen, wanted = seen[:-1], wanted[:-1] * (seen[:-1].sum() / wanted[:-1].sum())
    return float(stats.chisquare(seen, wanted).pvalue)


def subset_counts(samplers: Sequence[PoissonSampler], people: int, steps: int) -> Counts:
    """How often each subset of the people was drawn; a subset is a number whose bits are its members."""
    counts = np.zeros(2**people, dtype=np.int64)
    for step in range(steps):
        counts[sum(int((1 << s.draw(step)).sum()) for s in samplers)] += 1
    return counts


def subset_chances(rates: Chances) -> Chances:
    return np.array(
        [
            np.prod([q if subset >> person & 1 else 1 - q for person, q in enumerate(rates)])
            for subset in range(2 ** len(rates))
        ]
    )


STEPS = 30_000
CASES = {
    "one level": ((6,), (0.1,)),
    "levels thinned from a common rate": ((2, 2, 2), (0.05, 0.08, 0.14)),
    "levels under a mask": ((2, 2, 2), (0.3, 0.5, 0.9)),
    "rates of all sizes": ((1, 2, 1, 1, 1), (0.0, 0.02, 0.15, 0.6, 1.0)),
}


@pytest.mark.parametrize("band_cost", [0.0, 1e9], ids=["a band each", "one band"])
@pytest.mark.parametrize("case", CASES)
def test_every_subset_of_people_is_drawn_as_often_as_by_definition(
    case: str, band_cost: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampling, "_BAND_COST", band_cost)
    people, rates = CASES[case]
    plan = make_plan(people, rates, steps=STEPS)
    levels = levels_of(plan)
    counts = subset_counts([PoissonSampler(plan, levels, RandomSource.from_seed(1))], 6, STEPS)
    assert probability_of(counts, subset_chances(np.array(rates)[levels])) > FALSE_ALARM


@pytest.mark.parametrize("secure", [False, True])
def test_the_union_over_ranks_is_the_poisson_sample(secure: bool) -> None:
    plan = make_plan((3, 3), (0.12, 0.4), steps=STEPS // 3)
    levels = levels_of(plan)
    source = RandomSource.from_seed(2, secure=secure)
    ranks = [PoissonSampler(plan, levels, source, rank=rank, world_size=3) for rank in range(3)]
    counts = subset_counts(ranks, 6, STEPS // 3)
    assert probability_of(counts, subset_chances(np.array([0.12, 0.4])[levels])) > FALSE_ALARM


def test_a_level_drawn_at_another_levels_rate_is_detected() -> None:
    plan = make_plan((2, 2, 2), (0.05, 0.08, 0.14), steps=STEPS)
    levels = levels_of(plan)
    swapped = np.array([0, 2, 1])[levels]
    counts = subset_counts([PoissonSampler(plan, swapped, RandomSource.from_seed(1))], 6, STEPS)
    assert probability_of(counts, subset_chances(np.array([0.05, 0.08, 0.14])[levels])) < FALSE_ALARM


def test_steps_are_independent_of_one_another() -> None:
    plan = make_plan((1, 1, 1), (0.14, 0.3, 0.7), steps=STEPS)
    sampler = PoissonSampler(plan, np.arange(3), RandomSource.from_seed(3))
    subsets = np.array([(1 << sampler.draw(step)).sum() for step in range(STEPS)])
    one = subset_chances(np.array([0.14, 0.3, 0.7]))
    for distance in (1, 2):
        # Pairs that do not overlap are independent of each other, as the test needs them to be.
        starts = np.arange(0, STEPS - distance, 2 * distance)
        pairs = subsets[starts] * 8 + subsets[starts + distance]
        assert probability_of(np.bincount(pairs, minlength=64), np.outer(one, one).ravel()) > FALSE_ALARM


ROUNDS = 4_000


@pytest.mark.parametrize("world_size", [1, 2])
def test_participation_is_drawn_once_a_round_and_batches_among_the_participants(world_size: int) -> None:
    participation, rates = (0.1, 0.5, 1.0), (0.9, 0.6, 0.1)
    plan = make_plan((1, 1, 1), rates, participation=participation, steps=2, rounds=ROUNDS)
    source = RandomSource.from_seed(4)
    ranks = [
        PoissonSampler(plan, np.arange(3), source, rank=rank, world_size=world_size)
        for rank in range(world_size)
    ]
    counts = np.zeros(64, dtype=np.int64)
    for index in range(ROUNDS):
        first, second = (
            sum(int((1 << rank.draw(2 * index + step)).sum()) for rank in ranks) for step in (0, 1)
        )
        counts[first * 8 + second] += 1
    chances = np.zeros(64)
    for present in product((0, 1), repeat=3):
        chance = np.prod([p if here else 1 - p for here, p in zip(present, participation, strict=True)])
        one = subset_chances(np.array(present) * np.array(rates))
        chances += chance * np.outer(one, one).ravel()
    assert probability_of(counts, chances) > FALSE_ALARM


# --- the size of a real run ----------------------------------------------------------------------

PEOPLE, LEVELS, DRAWS = 60_000, 20, 4_000


@functools.cache
def real_run(fault: bool = False) -> tuple[Plan, Counts, Counts, Counts]:
    """Plan, level of each person, size of each batch, and how often each person was drawn."""
    rates = np.linspace(0.5, 1.0, LEVELS) * 0.02
    plan = make_plan((PEOPLE // LEVELS,) * LEVELS, tuple(rates.tolist()), steps=DRAWS)
    levels = levels_of(plan)
    believed = np.where(levels == 7, 8, np.where(levels == 8, 7, levels)) if fault else levels
    sampler = PoissonSampler(plan, believed, RandomSource.from_seed(5))
    sizes, drawn = np.empty(DRAWS, dtype=np.int64), np.zeros(PEOPLE, dtype=np.int64)
    for step in range(DRAWS):
        batch = sampler.draw(step)
        sizes[step] = len(batch)
        drawn[batch] += 1
    return plan, levels, sizes, drawn


def test_batch_sizes_have_the_distribution_of_a_sum_of_binomials() -> None:
    plan, _, sizes, _ = real_run()
    chances = np.array([1.0])
    for level, rate in zip(plan.levels, plan.rounds[0].sample_rates, strict=True):
        chances = np.convolve(chances, stats.binom.pmf(np.arange(200), level.people, rate))
    counts = np.bincount(sizes, minlength=len(chances))
    chances = np.clip(np.append(chances, 1 - chances.sum()), 0, None)
    assert probability_of(np.append(counts, 0), chances) > FALSE_ALARM


def test_everybody_is_drawn_equally_often_within_their_level() -> None:
    plan, levels, _, drawn = real_run()
    rates = np.array(plan.rounds[0].sample_rates)[levels]
    # Exactly chi-square only in the limit; counts near 60 are close to it, and the bound is far out.
    statistic = ((drawn - DRAWS * rates) ** 2 / (DRAWS * rates * (1 - rates))).sum()
    assert stats.chi2.sf(statistic, PEOPLE) > FALSE_ALARM
    assert stats.chi2.cdf(statistic, PEOPLE) > FALSE_ALARM


def level_probabilities(fault: bool) -> list[float]:
    plan, levels, _, drawn = real_run(fault)
    return [
        float(stats.binomtest(int(drawn[levels == level].sum()), PEOPLE // LEVELS * DRAWS, rate).pvalue)
        for level, rate in enumerate(plan.rounds[0].sample_rates)
    ]


def test_each_level_is_drawn_at_its_own_rate() -> None:
    assert min(level_probabilities(fault=False)) > FALSE_ALARM / LEVELS


def test_two_neighbouring_levels_that_changed_places_are_detected() -> None:
    probabilities = level_probabilities(fault=True)
    assert [p < FALSE_ALARM / LEVELS for p in probabilities] == [level in (7, 8) for level in range(LEVELS)]


# --- how many ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("people", "rate"), [(40, 0.1), (200, 0.001), (7, 0.1499), (3, 2.0**-80), (200, 0.14)]
)
def test_the_number_sampled_has_its_binomial_probabilities_to_the_last_bit(people: int, rate: float) -> None:
    table = sampling._CountTable.of(people, Fraction(rate))
    limits = [0, *limits_of(table), 2**128]
    assert limits == sorted(limits)
    cumulative, below, mean = Fraction(0), Fraction(0), Fraction(0)
    term = Fraction(1 - Fraction(rate)) ** people
    for count in range(people + 1):
        cumulative += term
        place = min(max(count - table.lowest + 1, 0), len(limits) - 1)
        now = Fraction(limits[place], 2**128)
        assert abs(now - cumulative) <= Fraction(1, 2**128) + Fraction(1, 2**130)
        mean += count * (now - below)
        below = now
        term = term * (people - count) * Fraction(rate) / ((count + 1) * (1 - Fraction(rate)))
    assert mean <= people * Fraction(rate) * (1 + Fraction(1, 2**130))


def limits_of(table: sampling._CountTable) -> list[int]:
    return [int(upper) << 64 | int(lower) for upper, lower in zip(table.upper, table.lower, strict=True)]


class Words:
    """A generator of given words, which counts them."""

    def __init__(self, *words: int) -> None:
        self.words = list(words)

    def random_raw(self, size: int) -> npt.NDArray[np.uint64]:
        return np.array([self.words.pop(0) for _ in range(size)], dtype=np.uint64)


def test_a_second_word_decides_where_the_first_is_on_a_limit() -> None:
    table = sampling._CountTable.of(40, Fraction(0.1))
    limits = limits_of(table)
    for limit in limits:
        upper, lower = divmod(limit, 2**64)
        for second in {max(lower - 1, 0), lower}:
            # As many as there are limits at or below the number that both words make.
            wanted = sum(other <= (upper << 64 | second) for other in limits)
            assert table.draw(Words(upper, second)) == table.lowest + wanted
    words = Words(2**63 + 12345, 7)
    table.draw(words)
    assert words.words == [7]  # nearly always one word is enough


def test_a_kept_probability_is_never_rounded_up() -> None:
    for rate in (0.1, 1 / 3, 0.7, 1 - 2.0**-53, 2.0**-60):
        (limit,) = sampling._limits([Fraction(rate)])
        assert 0 <= Fraction(rate) - Fraction(int(limit), 2**63) < Fraction(1, 2**63)
