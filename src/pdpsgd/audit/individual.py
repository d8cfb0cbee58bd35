"""Individual accounting after a run: what its own gradients' norms have cost each person. Private, and no promise."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pdpsgd._typing import FloatArray, IntArray
from pdpsgd.accounting.individual import IndividualEpsilons, IndividualSums
from pdpsgd.audit.result import empty_table
from pdpsgd.engine.norms import KEPT, check_norms_can_be_kept, shares_of
from pdpsgd.errors import fail
from pdpsgd.training.run_folder import RunFolder, without_people, write_atomically

if TYPE_CHECKING:
    from rich.table import Table

    from pdpsgd.planning.plans import Plan

WARNING = (
    "Computed from people's records, and counted in nobody's budget: neither this table nor the file may be published. "
    "Nobody may be told their own figure either: it depends on what others' records made of the model. What is "
    "promised is the plan's."
)
COLUMNS = (
    "id",
    "level",
    "epsilon",
    "delta",
    "proven_epsilon",
    "individual_epsilon",
    "by_papers_conversion",
    "by_tighter_conversion",
    "estimate",
)


@dataclass(frozen=True)
class IndividualTier:
    """What the people of a level have spent by the norms that occurred. Sensitive."""

    epsilon: float
    delta: float
    people: int
    proven: float | None
    exact: bool
    median: float
    largest: float
    median_by_paper: float
    median_by_tighter: float
    median_estimate: float | None


@dataclass(frozen=True, eq=False)
class IndividualResult:
    """What was found, by tier; each person's figures are in the file. Sensitive."""

    tiers: tuple[IndividualTier, ...]
    path: Path

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        tiers = [asdict(tier) for tier in self.tiers]
        return {"version": 1, "sensitive": True, "warning": WARNING, "tiers": tiers, "file": str(self.path)}

    def table(self) -> Table:
        """Return the table for people to read."""
        table = empty_table(
            "PRIVATE: what the run has cost people by their own gradients' norms, as epsilon",
            "at most: bound, median and largest; the paper's and the tighter conversion of individual RDP: medians",
        )
        for column in (
            "allowed",
            "people",
            "proven",
            "at most",
            "largest",
            "paper's",
            "tighter",
            "estimate",
            "how",
        ):
            table.add_column(column, no_wrap=True)
        for tier in self.tiers:
            table.add_row(
                f"{tier.epsilon:.4g}",
                f"{tier.people:,}",
                "nothing" if tier.proven is None else f"{tier.proven:.4g}",
                *(
                    f"{x:.4g}"
                    for x in (tier.median, tier.largest, tier.median_by_paper, tier.median_by_tighter)
                ),
                "" if tier.median_estimate is None else f"{tier.median_estimate:.4g}",
                "exact" if tier.exact else "RDP",
            )
        return table

    def sentences(self) -> list[str]:
        """Say what the figures are and are not."""
        said = []
        if any(not tier.exact for tier in self.tiers):
            said.append(
                "A step in which somebody was not sampled counts at their clipping norm, because nobody knows what "
                "their gradient would have been; the estimate counts it as those that were seen, and bounds nothing."
            )
        by_paper, tighter = (
            [getattr(tier, f"median_by_{name}") for tier in self.tiers] for name in ("paper", "tighter")
        )
        if any(one > other for one, other in zip(by_paper, tighter, strict=True)):
            said.append(
                "The tighter conversion (Canonne, Kamath and Steinke 2020) is below the paper's; where all is "
                "Gaussian, the exact figure is below both."
            )
        return [*said, WARNING, f"Each person's figures: {self.path}"]


def audit_individual(run: str | Path) -> IndividualResult:
    """Compute what a run has cost each person, and write it into the run's `private/`.

    Guarantee: none is given to anybody. For each person, the figure is an epsilon (at their delta) that a run with
    these norms costs, rounded up and never above what is proven; norms are themselves outcomes of training.

    Args:
        run: The folder of a finished run that was asked to keep norms.

    Returns:
        The figures by tier, and where each person's are.

    Raises:
        PdpsgdError: The run kept no norms, or they are not this plan's.
    """
    folder = RunFolder(run)
    plan = folder.read_plan()
    check_norms_can_be_kept(plan)
    sums = _read_sums(folder, plan)
    proven = np.array([np.inf if x.proven_epsilon is None else x.proven_epsilon for x in plan.levels])
    found = _capped(
        sums.epsilons(np.array([level.delta for level in plan.levels])), proven[sums.level_of_person]
    )
    write_atomically(folder.individual, _lines(folder, plan, sums.level_of_person, found))
    tiers = (_tier(plan, sums, found, index) for index in range(len(plan.levels)))
    return IndividualResult(tuple(tier for tier in tiers if tier.people), folder.individual)


def _read_sums(folder: RunFolder, plan: Plan) -> IndividualSums:
    import safetensors

    if not folder.norms.exists():
        fail(
            f"Expected {folder.norms}, the norms of a finished run. Got none: norms are kept by "
            "pdpsgd train --keep-norms, or fit(keep_norms=True)."
        )
    try:
        with safetensors.safe_open(folder.norms, framework="numpy") as file:
            digest = (file.metadata() or {}).get("plan")
            columns = {name: file.get_tensor(name) for name in (*KEPT, "level")}
    except (safetensors.SafetensorError, OSError) as error:
        fail(f"Expected the norms of a run in {folder.norms}. Got a file that cannot be read: {error}.")
    sums = IndividualSums(shares_of(plan), _levels(columns["level"], len(plan.levels), folder))
    fits = all(
        (columns[name].shape, columns[name].dtype) == (getattr(sums, name).shape, getattr(sums, name).dtype)
        for name in KEPT
    )
    if digest != without_people(plan).digest or not fits:
        fail(f"Expected the norms of this run's plan in {folder.norms}. Got those of another one.")
    for name in KEPT:
        setattr(sums, name, columns[name])
    return sums


def _levels(found: IntArray, levels: int, folder: RunFolder) -> IntArray:
    if (
        found.dtype != np.int64
        or found.ndim != 1
        or (found.size and not 0 <= found.min() <= found.max() < levels)
    ):
        fail(f"Expected the level of each person, from 0 to {levels - 1}, in {folder.norms}. Got others.")
    return found


def _capped(found: IndividualEpsilons, proven: FloatArray) -> IndividualEpsilons:
    """What is proven holds whatever the norms are."""
    return IndividualEpsilons(
        np.minimum(found.at_most, proven), found.by_paper, found.tighter, np.minimum(found.estimate, proven)
    )


def _tier(plan: Plan, sums: IndividualSums, found: IndividualEpsilons, index: int) -> IndividualTier:
    level, own = plan.levels[index], sums.level_of_person == index
    seen = found.estimate[own][~np.isnan(found.estimate[own])]
    median = {
        name: float(np.median(getattr(found, name)[own])) if own.any() else 0.0
        for name in ("at_most", "by_paper", "tighter")
    }
    return IndividualTier(
        epsilon=level.epsilon,
        delta=level.delta,
        people=int(own.sum()),
        proven=level.proven_epsilon,
        exact=bool(sums.exact[index]),
        median=median["at_most"],
        largest=float(found.at_most[own].max(initial=0.0)),
        median_by_paper=median["by_paper"],
        median_by_tighter=median["tighter"],
        median_estimate=float(np.median(seen)) if seen.size and not sums.exact[index] else None,
    )


def _lines(folder: RunFolder, plan: Plan, levels: IntArray, found: IndividualEpsilons) -> Iterator[str]:
    """Yield the lines of the file, some at a time."""
    yield ",".join(COLUMNS) + "\n"
    columns = (found.at_most, found.by_paper, found.tighter, found.estimate)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    for place, (name, level) in enumerate(zip(_ids(folder, plan, len(levels)), levels.tolist(), strict=True)):
        known = plan.levels[level]
        figures = ["" if np.isnan(column[place]) else repr(float(column[place])) for column in columns]
        writer.writerow((name, level, known.epsilon, known.delta, known.proven_epsilon, *figures))
        if place % 2**16 == 0:
            yield text.getvalue()
            text.seek(0)
            text.truncate()
    yield text.getvalue()


def _ids(folder: RunFolder, plan: Plan, people: int) -> list[str]:
    """Return people's ids in the order of the list, as their promises have them; numbers where there are none."""
    if folder.promises is None:
        return [str(number) for number in range(people)]
    return [promise.id for promise in folder.read_promises(plan)]
