"""The ledger that `pdpsgd train` keeps: which one, and what is said of it before a run starts."""

from __future__ import annotations

import math
import os
import sqlite3
import tempfile
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from pdpsgd.cli.shared import PEOPLE, LedgerOptions, Screen
from pdpsgd.errors import PdpsgdError
from pdpsgd.training.options import option

if TYPE_CHECKING:
    from pdpsgd.budgets.budgets import Budgets
    from pdpsgd.ledger import Ledger, ReservedRun
    from pdpsgd.ledger.values import TierShare
    from pdpsgd.training.inputs import TrainingInputs
    from pdpsgd.training.run_folder import RunFolder

DEFAULT_PLACE = "people.ledger"
"""Where `pdpsgd train` and `pdpsgd ledger` look, unless --ledger or PDPSGD_LEDGER name another place."""
VARIABLE = "PDPSGD_LEDGER"


def default_place() -> str:
    """Return the place of the ledger that nobody has to name."""
    return os.environ.get(VARIABLE) or DEFAULT_PLACE


@dataclass(frozen=True, kw_only=True)
class TrainingLedger(LedgerOptions):
    """The ledger of a training run: kept by default for one's own data."""

    no_ledger: bool = option(
        False,
        "no ledger: the run is not counted later, and not for release",
        panel=PEOPLE,
        kind=bool,
        names=("--no-ledger",),
        shown=False,
    )
    reservation: int | None = option(
        None, "number of a run that is reserved in the ledger already", panel=PEOPLE, kind=int
    )

    def __post_init__(self, from_file: Collection[str]) -> None:
        super().__post_init__(from_file)
        for name in ("ledger", "reservation"):
            self._only_one_of(name, "no_ledger", "Expected --ledger (or --reservation), or --no-ledger.")

    def place(self, *, own_data: bool, counted_otherwise: bool) -> str | None:
        """Find the ledger's place; None where none is to be kept.

        Args:
            own_data: Whether the records are people's own, rather than a benchmark's.
            counted_otherwise: Whether runs are counted by their plans (--history, --plan), or what people allow is
                made up (--tiers): nobody is enrolled for that unless --ledger says so.
        """
        if self.ledger is not None:
            return self.ledger
        if self.no_ledger or (counted_otherwise and self.reservation is None):
            return None
        return default_place() if own_data or self.reservation is not None else None

    @property
    def listed(self) -> Callable[[], Budgets] | None:
        """Read the list of people from the ledger, where one is named that may have it."""
        if self.ledger is None and self.reservation is None:
            return None
        return self._read_list

    def _read_list(self) -> Budgets:
        from pdpsgd.ledger import Ledger

        ledger = Ledger(self.ledger or default_place())
        return ledger.everybody() if self.reservation is None else ledger.consents_of(self.reservation)


def knows_some(place: str, people: Budgets | None) -> bool:
    """Tell whether the ledger at a place, if there is one, has any of these people in it."""
    from pdpsgd.ledger import Ledger

    if people is None or not people.named or ("://" not in place and not Path(place).exists()):
        return False
    return Ledger(place).knows_some(people.ids)


def ledger_of(
    inputs: TrainingInputs,
    place: str | None,
    asked: TrainingLedger,
    screen: Screen,
    *,
    own_data: bool,
    by_files: bool,
    by_plan: bool = False,
) -> tuple[str | None, TrainingInputs]:
    """Say where the ledger of these people is, or note that none is kept where one should be.

    Args:
        inputs: Records and people of the run.
        place: Where the ledger is, if one is to be kept.
        asked: What was said of a ledger.
        screen: Where to say it.
        own_data: Whether the records are people's own.
        by_files: Whether earlier runs are counted by --history, in this command or when the plan was made.
        by_plan: Whether the run follows a ready plan that counts no earlier run and was not made from a ledger.
    """
    if place is None:
        named = inputs.budgets is not None and inputs.budgets.named
        alone = by_plan and named
        off = own_data and (asked.no_ledger or alone or knows_some(default_place(), inputs.budgets))
        if own_data and alone and not asked.no_ledger:
            screen.say(
                "Note: This plan was not made from a ledger, and none was named: the run is not counted later, and not "
                "for release. Plan from the ledger of these people (pdpsgd plan --ledger), or name it here (--ledger)."
            )
        elif own_data and by_files and not asked.no_ledger:
            screen.say(
                "Note: A history in files is counted by itself: this run is entered in no ledger. What people "
                "allow is promised for it alone, and a later run has to be planned with it as --history."
            )
        return None, replace(inputs, ledger_off=off)
    if inputs.budgets is not None and not inputs.budgets.named and asked.ledger is None:
        screen.say(
            "Note: People have no ids, so no ledger is kept: another run on them would not be counted."
        )
        return None, inputs
    return place, inputs


def settle_folder(place: str, folder: RunFolder) -> None:
    """Finish the run of a finished folder in its ledger, if its process was killed before it did."""
    from pdpsgd.ledger import Ledger
    from pdpsgd.training.booking import settle

    if folder.read_reservation() is not None:
        settle(Ledger(place), folder)


@contextmanager
def open_or_create(place: str, screen: Screen) -> Iterator[Ledger]:
    """Open the ledger; a file that is not there yet is made, announced, and removed again if the command is refused."""
    from pdpsgd.ledger import Ledger

    if "://" in place or Path(place).exists():
        yield Ledger(place)
        return
    made = Ledger.create(place)
    screen.say(
        f"New ledger: {place}. It keeps what people allow over all runs, and what each run takes of it; keep it "
        "with the data (`pdpsgd ledger show`)."
    )
    try:
        yield made
    except BaseException:
        with suppress(PdpsgdError):
            made.remove_if_unused()
        raise


@contextmanager
def copy_of(place: str) -> Iterator[Ledger]:
    """Give a copy of a ledger in a file, or a new one, for the time of the block: what is written to it is lost."""
    from pdpsgd.ledger import Ledger

    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy.ledger"
        if not Path(place).is_file():
            yield Ledger.create(str(copy))
            return
        Ledger(place)  # refused, if it is none
        with (
            closing(sqlite3.connect(f"{Path(place).resolve().as_uri()}?mode=ro", uri=True)) as old,
            closing(sqlite3.connect(copy)) as new,
        ):
            old.backup(new)
        yield Ledger(str(copy))


def announce(
    reserved: ReservedRun,
    place: str,
    spend: str,
    screen: Screen,
    *,
    rehearsed: bool = False,
    resumed: bool = False,
) -> None:
    """Say, before the run starts or goes on, what it takes of what people have left."""
    if screen.quiet:
        return
    from rich.table import Table

    said = reserved.statement
    people = sum(tier.people for tier in said.tiers)
    takes = "would take" if rehearsed else "takes"
    if resumed:
        screen.say(f"Run {said.run} goes on, at no further charge.")
    screen.say(
        f"Run {said.run} in the ledger {place} {takes}, of what {people:,} people allow over all runs:"
    )
    table = Table(
        "allow over all runs",
        "at delta",
        "people",
        "spent before (mean)",
        "this run takes (mean)",
        "left after it (mean)",
    )
    for tier in said.tiers:
        table.add_row(
            f"{tier.epsilon:g}",
            f"{tier.delta:g}",
            f"{tier.people:,}",
            f"{tier.spent_before:.3g}",
            f"{tier.this_run:.3g}",
            f"{tier.left:.3g}",
        )
    screen.table(table)
    stays = "" if rehearsed else "It stays charged whatever becomes of the run. "
    screen.say(f"(Epsilons do not add up: their mu^2 do.) {stays}{_left_for_later(said.tiers, spend)}")


def _left_for_later(tiers: Sequence[TierShare], spend: str) -> str:
    if spend not in ("all", "1", "1.0"):
        return "--spend all takes everything."
    most = max((tier.left for tier in tiers if math.isfinite(tier.left)), default=0.0)
    if most == 0:
        return "Nothing is left for later runs on these people."
    return f"Next to nothing is left for later runs on these people: up to epsilon {most:.2g}, by tier."
