"""Composition by dp-accounting: the only file that knows its classes and their private fields.

dp-accounting has no public way to the masses of a composed distribution. Written for release 0.6; a release
that changes the fields ends in an error that says so, and `tests/accounting/test_dp_accounting.py` fails.
"""

from __future__ import annotations

from dataclasses import dataclass

from pdpsgd._typing import FloatArray
from pdpsgd.errors import PdpsgdError

WRITTEN_FOR = "0.6"
TRUNCATED_MASS = 1e-15
"""What a composition may cut off on either side; what is cut off above counts as infinite loss."""


@dataclass(frozen=True, eq=False)
class Losses:
    """A discrete privacy loss distribution: `mass[i]` at (`first` + i) * `interval`, `infinite` at infinity."""

    interval: float
    first: int
    mass: FloatArray
    infinite: float


def compose(one: Losses, other: Losses) -> Losses:
    """Return the distribution of the sum of two independent losses on the same grid.

    Guarantee: upper bounds stay upper bounds; what is cut off counts as infinite loss.
    """
    from dp_accounting.pld import pld_pmf

    try:
        first, second = (
            pld_pmf.DensePLDPmf(x.interval, x.first, x.mass, x.infinite, True) for x in (one, other)
        )
        both = pld_pmf.compose_pmfs(first, second, TRUNCATED_MASS)
        return Losses(both._discretization, both._lower_loss, both._probs, both._infinity_mass)
    except (AttributeError, TypeError) as error:
        raise PdpsgdError(
            f"Expected dp-accounting {WRITTEN_FOR}. Got {_release()}, whose distributions have changed: {error}. "
            f"Install the one that fits: pip install 'dp-accounting=={WRITTEN_FOR}.*'."
        ) from error


def _release() -> str:
    from importlib.metadata import version

    return version("dp-accounting")
