"""`pdpsgd plan`: from people's budgets to a plan, as a table, as JSON, as a chart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pdpsgd.cli import shared
from pdpsgd.cli.option_parameters import with_options
from pdpsgd.cli.shared import PEOPLE, BudgetOptions, HistoryOptions, LedgerOptions, option, parse_tiers
from pdpsgd.errors import check_positive, fail
from pdpsgd.training.options import OUTPUT, Options, PlanOptions
from pdpsgd.training.options import option as option_field

if TYPE_CHECKING:
    from pdpsgd.budgets.budgets import Budgets
    from pdpsgd.ledger import Ledger
    from pdpsgd.planning.plans import Plan

File = Annotated[
    Path | None,
    typer.Argument(
        help="list of people (.csv, .parquet), or plan (.json) to show and verify", show_default=False
    ),
]
Verify = Annotated[
    bool, option("--verify", help="check by an accountant that shares no code with the planner", panel=OUTPUT)
]
Chart = Annotated[
    Path | None,
    option(
        "--chart",
        help="chart of budgets, rates and spending (.svg, .png, .html)",
        panel=OUTPUT,
        show_default=False,
    ),
]


@dataclass(frozen=True, kw_only=True)
class PeopleOptions(BudgetOptions):
    """Budgets of a list of people without records."""

    people: int | None = option_field(None, "number of people, with --tiers", panel=PEOPLE, kind=int)

    def read_list(
        self, file: Path | None, *, id_column: str | None = None, repeated_ids: bool = False
    ) -> Budgets:
        """Read the list, or make one from tiers."""
        from pdpsgd.budgets.budgets import Budgets

        if self.tiers is None:
            return self.read(file, id_column=id_column, repeated_ids=repeated_ids)
        if self.people is None:
            fail("Expected --people with --tiers: the number of people on the list. Got --tiers alone.")
        check_positive(people=self.people)
        return Budgets.from_tiers(parse_tiers(self.tiers), self.people, self.delta)


@dataclass(frozen=True, kw_only=True)
class RunOptions(Options):
    """How the run will read its people: as there, so that plan and run have the same."""

    schema: Path | None = option_field(
        None, "schema of the run, whose id column names people", panel=PEOPLE, kind=Path
    )
    records_per_person: int | None = option_field(
        None, "as in train, where people have several rows", panel=PEOPLE, kind=int, least=1
    )
    test_share: float | None = option_field(
        None, "share of people that train --test-share will set aside", panel=PEOPLE, kind=float
    )

    def read(self, file: Path | None, people: PeopleOptions) -> Budgets:
        """Read the list of people as the run will, without those who will be tested on."""
        id_column = None
        if self.schema is not None and people.id_column is None:
            from pdpsgd.data.schema import Schema

            id_column = Schema.read(self.schema).id_column
        many = self.records_per_person is not None
        return self._part(people.read_list(file, id_column=id_column, repeated_ids=many))

    def _part(self, budgets: Budgets) -> Budgets:
        if self.test_share is None:
            return budgets
        from pdpsgd.data.people import part_list

        return part_list(budgets, self.test_share)[0]


@dataclass(frozen=True, kw_only=True)
class ReserveOptions(Options):
    """Whether a plan from a ledger is reserved there at once."""

    reserve: str | None = option_field(None, "name under which the run is reserved in --ledger", panel=PEOPLE)
    series: int = option_field(
        1, "number of runs that are fixed together, with --reserve", panel=PEOPLE, kind=int, least=1
    )


@with_options
def plan(
    people: PeopleOptions,
    run: RunOptions,
    options: PlanOptions,
    earlier: HistoryOptions,
    ledger: LedgerOptions,
    reserve: ReserveOptions,
    file: File = None,
    verify: Verify = False,
    chart: Chart = None,
    json_file: shared.JsonFile = None,
    quiet: shared.Quiet = False,
    config: shared.Config = None,
) -> None:
    """Compute a plan: each level's sampling rate, the noise multiplier, and what each person will have spent.

    Nothing but the list of people and what they allow is needed: no data, no model. The plan is public.

    \b
    Examples:
      pdpsgd plan people.csv --id-column person --json plan.json
      pdpsgd plan --tiers 1:0.34,2:0.43,3:0.23 --people 60000 --chart plan.svg
      pdpsgd plan people.csv --mechanism pdp-sgd-adaptive --rounds 10

    \b
    For a run with test people (train --plan plan.json --test-share 0.2):
      pdpsgd plan people.csv --schema s.toml --test-share 0.2 --json plan.json

    \b
    What is left after a run; what people have left, over many runs:
      pdpsgd plan people.csv --id-column person --history runs/first
      pdpsgd plan --ledger people.ledger --spend "1 of 12"

    \b
    Four runs that are fixed together:
      pdpsgd plan --ledger people.ledger --reserve spring --series 4

    \b
    Somebody else's plan, checked:
      pdpsgd plan plan.json --verify
    """
    from pdpsgd.planning.levels import ranges_by_level

    screen = shared.Screen(quiet=quiet, json_file=json_file)
    allows = None
    if chart is not None:
        shared.check_chart(chart)
    if file is not None and file.suffix.lower() == ".json":
        made = shared.read_plan(file)
    elif ledger.ledger is not None:
        if file is not None or earlier.history or people.tiers is not None or options.accountant is not None:
            fail(
                "Expected --ledger without a list, --tiers, --history and --accountant: people, what they have left "
                "and how it is counted come from the ledger. Got both."
            )
        from pdpsgd.ledger import Ledger

        opened = Ledger(ledger.ledger)
        made = _in_ledger(opened, ledger, reserve, options, screen)
        if made.roster is not None:
            allows = ranges_by_level(made.roster, opened.everybody(), len(made.levels))
    else:
        budgets = run.read(file, people)
        made = options.make_plan(
            budgets, history=earlier.plans(budgets, people), history_fixed=earlier.history_fixed
        )
    show(made, screen, allows=allows)
    if verify:
        _verify(made, screen)
    if chart is not None:
        from pdpsgd.reporting.charts import save_plan_chart

        save_plan_chart(made, chart)
        screen.say(f"Chart: {chart}")
    screen.write_json(made.to_json())


def _in_ledger(
    opened: Ledger, asked: LedgerOptions, how: ReserveOptions, options: PlanOptions, screen: shared.Screen
) -> Plan:
    """Plan from what people have left, and reserve the run, or a series of runs, if a name for it is given."""
    from pdpsgd.ledger.series import split
    from pdpsgd.planning.defaults import STEPS

    offer = opened.offer(asked.spend).budgets
    if how.series > 1:
        if how.reserve is None:
            fail(
                "Expected --reserve NAME with --series: runs are fixed together by being reserved together. Got none."
            )
        made = options.changed(steps=how.series * (options.steps or STEPS)).make_plan(
            offer, accountant="certificate"
        )
        plans = split(opened.mark(made), how.series)
        runs = opened.reserve_series(plans, name=how.reserve)
    else:
        plans = [opened.mark(options.make_plan(offer, accountant="certificate"))]
        runs = [] if how.reserve is None else [opened.reserve(plans[0], name=how.reserve)]
    for run in runs:
        screen.say(
            f"Reserved: run {run.number} ({run.name}), charged to {run.people:,} people. Train it with "
            f"pdpsgd train DATA --ledger {asked.ledger} --reservation {run.number}"
        )
    return opened.plan_of(runs[0].number) if runs else plans[0]


def show(made: Plan, screen: shared.Screen, *, allows: Sequence[tuple[float, float]] | None = None) -> None:
    """Show the plan's table and what belongs under it; `allows` is what its levels' people allow over all runs."""
    if screen.quiet:
        return
    from pdpsgd.planning.plan_table import table

    screen.table(
        table(
            made.mechanism,
            made.levels,
            made.rounds,
            accountant=made.accountant,
            of_ledger=made.ledger is not None,
            allows=allows,
        )
    )
    for line in made.summary():
        screen.say(line)


def _verify(made: Plan, screen: shared.Screen) -> None:
    found = made.verify()
    screen.say(
        f"Verified: an independent accountant finds at most {max(found.epsilon):.4g} of "
        f"{max(found.promised):.4g}, "
        f"and every one of the {len(made.levels)} levels within its promise."
    )
