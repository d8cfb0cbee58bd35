"""Why the result of a run is not for release: every reason in one place."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from pdpsgd.accounting.registry import accountant

if TYPE_CHECKING:
    from pdpsgd.planning.plans import Plan


GUESSABLE = "reproducible, guessable: not for release"


AS_PUBLISHED = "as-published bookkeeping, the plan tells who was drawn: not for release"


UNPROVEN = "nothing is proven, the plan's accountant only approximates: not for release"


def release_note(plan: Plan, *, guessable: bool) -> str | None:
    """Why results are not for release: the plan tells who was drawn or proves nothing, or the randomness can
    be guessed."""
    unproven = lacks_proof(plan) and not accountant(plan.accountant).proves
    notes = [AS_PUBLISHED] * plan.sensitive + [UNPROVEN] * unproven + [GUESSABLE] * guessable
    return "; ".join(notes) or None


def needs_to_be_verified(plan: Plan) -> bool:
    """Whether a plan says that something is proven, or should, and this process has neither made nor verified it."""
    claims = accountant(plan.accountant).proves or any(x.proven_epsilon is not None for x in plan.levels)
    return claims and not plan.sensitive and not plan.is_proven_here


def lacks_proof(plan: Plan) -> bool:
    """Whether a sound plan promises something to people whom it draws, and does not say what it proves."""
    return not plan.sensitive and any(
        level.proven_epsilon is None
        and math.isfinite(level.epsilon)
        and not all(r.exposure(index).costs_nothing for r in plan.rounds)
        for index, level in enumerate(plan.levels)
    )
