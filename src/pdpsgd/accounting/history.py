"""What one person is exposed to, round by round: the only thing that accountants look at."""

from __future__ import annotations

from typing import NamedTuple


class Exposure(NamedTuple):
    """One person's part in one round.

    With probability `participation` the person is in the round at all (sampled once, hidden); if so, each of
    the `steps` steps samples them independently with rate `sample_rate` and adds Gaussian noise of
    `noise_multiplier` times the norm to which their own gradient is clipped.

    Guarantee: under the add-or-remove relation of `docs/promise.md`, the round as seen by this person is
    exactly a Poisson-subsampled Gaussian mechanism composed `steps` times, mixed with "not there" at rate
    1 - `participation`, for any rates of the others.
    """

    participation: float
    sample_rate: float
    noise_multiplier: float
    steps: int

    @property
    def costs_nothing(self) -> bool:
        """Whether the person is never sampled, so that the round cannot depend on them."""
        return self.participation == 0 or self.sample_rate == 0 or self.steps == 0


History = tuple[Exposure, ...]


def is_gaussian(history: History) -> bool:
    """Return whether every step of every round samples the person: then the run is one Gaussian mechanism.

    >>> is_gaussian((Exposure(1, 1.0, 20.0, 25), Exposure(1, 1.0, 30.0, 5)))
    True
    """
    return all(e.participation == 1 and e.sample_rate == 1 for e in history)


class EarlierRun(NamedTuple):
    """A run whose results may have been seen before the next was chosen: one Gaussian, but for `d`.

    `exposures` are what (mu, d) was computed from, so that anyone can compute it again.
    """

    mu: float
    d: float
    exposures: History

    @property
    def costs_nothing(self) -> bool:
        """Whether the person was never sampled."""
        return all(exposure.costs_nothing for exposure in self.exposures)


Past = tuple[Exposure | EarlierRun, ...]
"""Earlier runs, of which each is settled by itself, and exposures that are fixed together."""


def split(past: Past) -> tuple[tuple[EarlierRun, ...], History]:
    """Return the earlier runs that are settled, and the exposures that are fixed together."""
    runs = tuple(entry for entry in past if isinstance(entry, EarlierRun))
    return runs, tuple(entry for entry in past if isinstance(entry, Exposure))


def exposures_of(past: Past) -> History:
    """Return all exposures in their order, those of earlier runs included."""
    found: list[Exposure] = []
    for entry in past:
        found += entry.exposures if isinstance(entry, EarlierRun) else (entry,)
    return tuple(found)


def simplify(history: History) -> History:
    """Drop what costs nothing and merge rounds that are the same mechanism.

    Rounds with participation 1 merge by adding steps; others are sampled once each and stay apart.

    >>> simplify((Exposure(1, 0.01, 2.0, 10), Exposure(1, 0.0, 2.0, 10), Exposure(1, 0.01, 2.0, 5)))
    (Exposure(participation=1, sample_rate=0.01, noise_multiplier=2.0, steps=15),)
    """
    steps: dict[tuple[float, float], int] = {}
    drawn_once: list[Exposure] = []
    for exposure in history:
        if exposure.costs_nothing:
            continue
        if exposure.participation < 1:
            drawn_once.append(exposure)
        else:
            mechanism = (exposure.sample_rate, exposure.noise_multiplier)
            steps[mechanism] = steps.get(mechanism, 0) + exposure.steps
    return (*(Exposure(1, q, sigma, t) for (q, sigma), t in steps.items()), *drawn_once)
