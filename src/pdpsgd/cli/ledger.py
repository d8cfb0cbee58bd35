"""`pdpsgd ledger`: what everybody allows and what every run has spent, over time."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pdpsgd.cli import shared
from pdpsgd.cli.option_parameters import with_options
from pdpsgd.cli.own_ledger import DEFAULT_PLACE
from pdpsgd.cli.prose import cell
from pdpsgd.cli.shared import BudgetOptions, HistoryOptions
from pdpsgd.errors import fail

if TYPE_CHECKING:
    from pdpsgd.budgets.budgets import Budgets
    from pdpsgd.ledger import Person

ID_COLUMN = "person"
MOST_NAMED = 20
"""People whom `consent` names on the screen."""
MOST_LOOKED_UP = 1000
"""Changes that `consent` looks up one by one, to say who is out by them."""

app = typer.Typer(
    no_args_is_help=True,
    help="What everybody allows and what every run has spent, over time.",
)

Place = Annotated[
    str,
    typer.Option(
        "--ledger",
        help="file of the ledger, or postgresql://... URL",
        envvar="PDPSGD_LEDGER",
        metavar="PLACE",
    ),
]
People = Annotated[Path, typer.Argument(help="list of people with what they allow (.csv, .parquet)")]
Number = Annotated[int, typer.Argument(help="number of the run, see `pdpsgd ledger runs`")]
Kappa = Annotated[
    float, typer.Option("--kappa", help="share of delta for what certificates leave over; fixed")
]
SetAside = Annotated[float, typer.Option("--set-aside", help="epsilon kept for other systems' runs; fixed")]
Head = Annotated[
    str | None, typer.Option("--head", help="head that was noted before, to compare", show_default=False)
]
Quick = Annotated[bool, typer.Option("--quick", help="without recomputing certificates")]
Chart = Annotated[
    Path | None,
    typer.Option("--chart", help="chart by tier and over time (.svg, .png, .html)", show_default=False),
]
Who = Annotated[str | None, typer.Argument(help="id of one person", show_default=False)]


@app.command()
def init(ledger: Place = DEFAULT_PLACE, json_file: shared.JsonFile = None) -> None:
    """Create an empty ledger, in a file or in a PostgreSQL database.

    \b
    Examples:
      pdpsgd ledger init
      pdpsgd ledger init --ledger postgresql://me@server/people
    """
    from pdpsgd.ledger import Ledger

    made = Ledger.create(ledger)
    screen = _screen(json_file)
    screen.say(f"An empty ledger: {made.place}. Next: pdpsgd ledger enroll people.csv")
    screen.write_json(shared.dump({"ledger": made.place, "head": made.head}))


@app.command()
@with_options
def enroll(
    file: People,
    people: BudgetOptions,
    earlier: HistoryOptions,
    kappa: Kappa = 0.1,
    set_aside: SetAside = 0.0,
    ledger: Place = DEFAULT_PLACE,
    json_file: shared.JsonFile = None,
) -> None:
    """Add people who are not in the ledger yet, with what they allow over all runs together.

    With --history, runs from before the ledger began are entered as well, in the order of time; people are matched by
    id.

    \b
    Examples:
      pdpsgd ledger enroll people.csv --id-column person --delta-column delta
      pdpsgd ledger enroll people.csv --history runs/jan --history runs/feb
    """
    from pdpsgd.ledger import Ledger

    opened, screen = Ledger(ledger), _screen(json_file)
    budgets = _read(people, file)
    plans = earlier.plans(budgets, people) if earlier.history else []
    total = opened.enroll(budgets, kappa=kappa, set_aside=set_aside)
    screen.say(f"Enrolled {len(budgets):,} people; {total:,} in all.")
    entered = [
        opened.enter_history(plan, name=name, token=token)
        for plan, name, token in zip(plans, *_names_and_tokens(earlier), strict=True)
    ]
    for run in entered:
        screen.say(f"Entered run {run.number} ({run.name}), as finished.")
    document = {
        "enrolled": len(budgets),
        "people": total,
        "entered": [asdict(run) for run in entered],
        "head": opened.head,
    }
    screen.write_json(shared.dump(document))


@app.command()
@with_options
def consent(
    file: People, people: BudgetOptions, ledger: Place = DEFAULT_PLACE, json_file: shared.JsonFile = None
) -> None:
    """Change what people allow, for every run that starts from now on; epsilon 0 withdraws.

    \b
    Examples:
      pdpsgd ledger consent changes.csv
    """
    from pdpsgd.ledger import Ledger

    opened, screen = Ledger(ledger), _screen(json_file)
    changes = _read(people, file)
    changed = opened.consent(changes)
    told = [opened.person(name) for name in changes.ids.tolist()] if len(changes) <= MOST_LOOKED_UP else []
    out = [person for person in told if not person.consents[-1].kept]
    screen.say(f"Changed what people allow: {changed:,} (unchanged: {len(changes) - changed:,}).")
    if len(changes) > MOST_LOOKED_UP:
        screen.say("How many have nothing left by that: pdpsgd ledger show")
    for person in out[:MOST_NAMED]:
        why = "more was spent before than is allowed now" if person.epsilon else "withdrawn"
        screen.say(
            f"{person.id}: {why}. Out from now on; what was spent before stays spent: pdpsgd ledger show {person.id}"
        )
    if len(out) > MOST_NAMED:
        screen.say(f"So it is for {len(out) - MOST_NAMED:,} more; --json FILE names them all.")
    screen.write_json(
        shared.dump({"changed": changed, "out": [person.id for person in out], "head": opened.head})
    )


@app.command()
def show(
    person: Who = None,
    chart: Chart = None,
    ledger: Place = DEFAULT_PLACE,
    json_file: shared.JsonFile = None,
) -> None:
    """Show what is allowed, spent and left: of one person, or of everybody by tier and over time.

    \b
    Examples:
      pdpsgd ledger show
      pdpsgd ledger show --chart ledger.svg
      pdpsgd ledger show ann --json -
    """
    from pdpsgd.ledger import Ledger

    opened, screen = Ledger(ledger), _screen(json_file)
    if chart is not None:
        shared.check_chart(chart)
    if person is not None:
        found = opened.person(person)
        _show_person(found, screen)
        screen.write_json(shared.dump(asdict(found)))
        return
    tiers, timeline = opened.tiers(), opened.timeline()
    _show_tiers(tiers, screen)
    _show_timeline(timeline, screen)
    if chart is not None:
        from pdpsgd.reporting.charts import save_ledger_chart

        save_ledger_chart([asdict(tier) for tier in tiers], timeline, chart)
        screen.say(f"Chart: {chart}")
    screen.write_json(
        shared.dump({"tiers": [asdict(tier) for tier in tiers], "over_time": timeline, "head": opened.head})
    )


@app.command()
def runs(ledger: Place = DEFAULT_PLACE, json_file: shared.JsonFile = None) -> None:
    """List all runs and their states; all but the cancelled ones are charged in full.

    \b
    Examples:
      pdpsgd ledger runs
    """
    from rich.table import Table

    from pdpsgd.ledger import Ledger

    opened, screen = Ledger(ledger), _screen(json_file)
    found = opened.runs()
    table = Table("run", "name", "state", "attempt", "people", "reserved", title="Runs", title_justify="left")
    for run in found:
        table.add_row(
            str(run.number),
            cell(run.name),
            run.state,
            str(run.attempt),
            f"{run.people:,}",
            _minute(run.time),
        )
    screen.table(table)
    for run in found:
        if run.state == "running":
            screen.say(
                f"Run {run.number} is running. If its process is gone, the command that began it goes on with it, at "
                "no further charge, if it says --resume as well."
            )
    screen.write_json(shared.dump([asdict(run) for run in found]))


@app.command()
def cancel(run: Number, ledger: Place = DEFAULT_PLACE, json_file: shared.JsonFile = None) -> None:
    """Give back what a run has reserved, as long as it has not started.

    \b
    Examples:
      pdpsgd ledger cancel 4
    """
    from pdpsgd.ledger import Ledger

    opened, screen = Ledger(ledger), _screen(json_file)
    opened.cancel(run)
    screen.say(f"Run {run} is cancelled: nobody is charged for it.")
    screen.write_json(shared.dump({"run": run, "state": "cancelled", "head": opened.head}))


@app.command()
def head(ledger: Place = DEFAULT_PLACE, json_file: shared.JsonFile = None) -> None:
    """Print the head, to be noted elsewhere: an older copy of the ledger lacks it.

    \b
    Examples:
      pdpsgd ledger head >> notes.txt
    """
    from pdpsgd.ledger import Ledger

    opened, screen = Ledger(ledger), _screen(json_file)
    screen.say(opened.head)
    screen.write_json(shared.dump({"head": opened.head}))


@app.command()
def check(
    noted: Head = None, quick: Quick = False, ledger: Place = DEFAULT_PLACE, json_file: shared.JsonFile = None
) -> None:
    """Compute the ledger again, and find what was edited, deleted or put back; exit code 1 if anything was.

    \b
    Examples:
      pdpsgd ledger check
      pdpsgd ledger check --head 3f0c...
    """
    from pdpsgd.ledger import Ledger

    opened, screen = Ledger(ledger), _screen(json_file)
    with screen.bars(after=2.0) as progress:
        found = opened.check(head=noted, certificates=not quick, progress=progress)
    for problem in found.problems:
        screen.say(f"FOUND: {problem}")
    if found.passed:
        certificates = "" if quick else f", {found.certificates:,} charges by an independent computation"
        screen.say(
            f"Nothing found: {found.entries:,} entries, {found.people:,} people, {found.runs:,} runs{certificates}."
        )
    screen.say(found.cannot_tell)
    screen.write_json(shared.dump({**asdict(found), "passed": found.passed}))
    if not found.passed:
        raise typer.Exit(1)


def _names_and_tokens(earlier: HistoryOptions) -> tuple[list[str], list[str]]:
    """Name each run that is entered by its folder or file: two runs of one plan are two runs."""
    names = [path.name for path in earlier.files]
    return names, [f"{name} {names[:place].count(name)}" for place, name in enumerate(names)]


def _screen(json_file: str | None) -> shared.Screen:
    return shared.Screen(quiet=False, json_file=json_file)


def _read(how: BudgetOptions, file: Path) -> Budgets:
    if how.tiers is not None:
        fail("Expected a list of people, each with an id. Got --tiers, which names nobody.")
    return how.read(file, id_column=how.id_column or ID_COLUMN)


def _minute(time: str) -> str:
    """Write a time for a narrow table, to the minute; `--json` has all of it.

    >>> _minute("2026-11-18T20:11:49+00:00")
    '2026-11-18 20:11'
    """
    return time[:16].replace("T", " ")


def _show_person(person: Person, screen: shared.Screen) -> None:
    from rich.table import Table

    screen.say(
        f"{person.id} allows epsilon {person.epsilon:g} at delta {person.delta:g}. Spent: {person.spent_epsilon:.4g}. "
        f"Left: {person.left_epsilon:.4g} (a run of that size by itself)."
    )
    promises = Table(
        "since", "epsilon", "delta", "spent by its end", "kept", title="Promises", title_justify="left"
    )
    for each in person.consents:
        kept = "yes" if each.kept else "no: spent before it was lowered"
        promises.add_row(
            _minute(each.time), f"{each.epsilon:g}", f"{each.delta:g}", f"{each.spent_epsilon:.4g}", kept
        )
    screen.table(promises)
    charges = Table(
        "run", "name", "state", "reserved", "kind", "mu", "d", title="Charges", title_justify="left"
    )
    for charge in person.charges:
        kind = charge.kind if not charge.pure_epsilon else f"{charge.kind}, epsilon {charge.pure_epsilon:.3g}"
        charges.add_row(
            str(charge.run),
            cell(charge.name),
            charge.state,
            _minute(charge.time),
            kind,
            f"{charge.mu:.4g}",
            f"{charge.d:.3g}",
        )
    screen.table(charges)


def _show_tiers(tiers: list[Any], screen: shared.Screen) -> None:
    from rich.table import Table

    table = Table(
        "epsilon", "delta", "people", "spent (mean)", "spent (most)", "left of mu^2 (mean)", "nothing left",
        title="People", title_justify="left",
    )  # fmt: skip
    for tier in tiers:
        table.add_row(
            f"{tier.epsilon:g}", f"{tier.delta:g}", f"{tier.people:,}", f"{tier.mean_spent_epsilon:.3g}",
            f"{tier.largest_spent_epsilon:.3g}", f"{tier.mean_share_left:.0%}", f"{tier.out:,}",
        )  # fmt: skip
    screen.table(table)


def _show_timeline(timeline: list[dict[str, Any]], screen: shared.Screen) -> None:
    """The share of mu^2 that is left after each run, as a bar."""
    for point in timeline:
        full = round(30 * point["share_left"])
        bar = "█" * full + "·" * (30 - full)
        screen.say(
            f"after run {point['run']:>3} {point['name'][:20]:<20} {bar} {point['share_left']:.0%} left on average"
        )
