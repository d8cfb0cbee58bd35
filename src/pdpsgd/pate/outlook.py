"""What can be expected of a vote, from its plan alone: said before anybody is charged for it."""

from __future__ import annotations

from dataclasses import dataclass

from pdpsgd.pate.plans import VotePlan

ENOUGH_LABELS = 5
"""Labels per class that a student should be told at least: a road sign, no theorem."""
GUESS, ROUGH = "hardly more than a guess", "a rough model at best"


@dataclass(frozen=True)
class Doubt:
    """What speaks against a vote; `is_guess` if hardly more than a guess can come of it."""

    text: str
    is_guess: bool


def doubt_about_vote(
    planned: VotePlan, classes: int, *, knob: str = "teachers of VoteSettings"
) -> Doubt | None:
    """Say what can be had of a vote with few labels, or of teachers with few people; None if nothing speaks against it.

    Args:
        planned: The plan of the vote.
        classes: The number of classes.
        knob: What the number of teachers is called where this is read.

    Returns:
        Sentences to be said before anything is spent, or None. All of it is public.
    """
    levels = zip(planned.plan.levels, planned.copies, strict=True)
    per_teacher = sum(level.people * copies for level, copies in levels) / planned.settings.teachers
    labels = f"these people allow {planned.answers:,} {'label' if planned.answers == 1 else 'labels'} in all"
    more = f"larger budgets, or more people for more teachers ({knob})"
    if planned.answers < classes:
        return Doubt(f"Expect {GUESS}: {labels}, for {classes} classes. What would help: {more}.", True)
    if per_teacher < classes:
        return Doubt(
            f"Expect {ROUGH}: each of {planned.settings.teachers:,} teachers has {per_teacher:.2g} people to learn "
            f"{classes} classes from. What would help: fewer teachers ({knob}), or more people.",
            False,
        )
    if planned.answers < ENOUGH_LABELS * classes:
        return Doubt(f"Expect {ROUGH}: {labels}, for {classes} classes. What would help: {more}.", False)
    return None
