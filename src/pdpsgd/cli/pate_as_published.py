"""`pdpsgd pate --bookkeeping as-published`: what the published accounting gives on a benchmark; nothing is kept."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdpsgd.cli import shared
from pdpsgd.errors import fail

if TYPE_CHECKING:
    from torch import Tensor

    from pdpsgd.budgets.budgets import Budgets
    from pdpsgd.pate import VotePlan


def show_as_published(
    planned: VotePlan,
    budgets: Budgets,
    data: tuple[Tensor, Tensor],
    public: Tensor,
    *,
    classes: int,
    seed: int | None,
    screen: shared.Screen,
) -> None:
    """Show how many labels the published accounting gives, and what they really cost each level."""
    from rich.table import Table

    from pdpsgd.pate import assign_people, train_ridge_teachers, vote_counts
    from pdpsgd.pate.as_published import CHARGES, WHY_NOT, vote_as_published

    used = [index for index, copies in enumerate(planned.copies) if copies]
    levels = [planned.plan.levels[index] for index in used]
    weights = [planned.weights[index] for index in used]
    epsilons = [level.epsilon for level in levels]
    deltas = sorted({level.delta for level in levels})
    if len(deltas) > 1:
        several = ", ".join(f"{delta:g}" for delta in deltas)
        fail(f"Expected one delta for all, for the published accounting. Got several: {several}.")
    teachers = assign_people(planned, planned.plan.level_of_person(budgets), seed=seed)
    labels = train_ridge_teachers(teachers, *data, public, classes=classes)
    counts = vote_counts(teachers, labels, classes=classes)
    found = {
        charge: vote_as_published(
            counts,
            weights,
            epsilons,
            delta=levels[0].delta,
            settings=planned.settings,
            charge=charge,
            seed=seed or 0,
        )
        for charge in CHARGES
    }
    table = Table(
        "charged",
        "labels",
        "allowed",
        "weight",
        "spent",
        "exact",
        title="Not for release",
        title_justify="left",
    )
    for charge, vote in found.items():
        for row in zip(epsilons, weights, vote.own.tolist(), vote.exact.tolist(), strict=True):
            table.add_row(charge, str(len(vote.labels)), *(f"{x:.3g}" for x in row))
    screen.table(table)
    screen.say(f"Soundly, these weights allow {planned.answers} answers. {WHY_NOT}")
    votes = {
        charge: {
            "labels": len(vote.labels),
            "questions": vote.asked,
            **{name: getattr(vote, name).tolist() for name in ("charged", "own", "exact")},
        }
        for charge, vote in found.items()
    }
    document = {"not_for_release": WHY_NOT, "sound_answers": planned.answers, "epsilons": epsilons}
    screen.write_json(shared.dump({**document, "weights": weights, **votes}))
