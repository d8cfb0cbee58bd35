"""`pdpsgd advise`: what to choose before anything is spent, from public things alone."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pdpsgd.cli import shared
from pdpsgd.cli.option_parameters import Only, with_options
from pdpsgd.cli.own_ledger import TrainingLedger, copy_of
from pdpsgd.cli.plan import PeopleOptions
from pdpsgd.cli.shared import option
from pdpsgd.cli.training_options import DATA, is_own_data
from pdpsgd.errors import check_positive, fail
from pdpsgd.training.options import OUTPUT, PLAN, TRAINING, Options
from pdpsgd.training.options import option as option_field

if TYPE_CHECKING:
    from pdpsgd.budgets.budgets import Budgets
    from pdpsgd.planning.advice import Advice, Outlook

File = Annotated[
    Path | None,
    typer.Argument(help="list of people (.csv, .parquet), with or without their data", show_default=False),
]
Chart = Annotated[
    Path | None, option("--chart", help="chart (.svg, .png, .html)", panel=OUTPUT, show_default=False)
]
Time = Annotated[
    bool, option("--time/--no-time", help="measured time of a step on this machine", panel=OUTPUT)
]


@dataclass(frozen=True, kw_only=True)
class AdviceOptions(Options):
    """What is known of the data and the network in public, and what is fixed already."""

    label: str | None = option_field(None, "column to be predicted", panel=DATA)
    schema: Path | None = option_field(None, "public ranges and categories", panel=DATA, kind=Path)
    task: str | None = option_field(None, "classification or regression", panel=DATA, shown="by the label")
    features: int | None = option_field(None, "number of inputs, without a table", panel=DATA, kind=int)
    classes: int = option_field(2, "number of classes, without a table", panel=DATA, kind=int)
    test_share: float | None = option_field(
        None, "share of people to be set aside to test on", panel=DATA, kind=float
    )
    model: str | None = option_field(None, "network by name, or module:function", panel=TRAINING)
    steps: int | None = option_field(None, "number of steps, if it is fixed", panel=PLAN, kind=int)
    batch_size: float | None = option_field(None, "batch size, if it is fixed", panel=PLAN, kind=float)


@with_options
def advise(
    people: PeopleOptions,
    options: AdviceOptions,
    ledger: Annotated[TrainingLedger, Only("ledger", "spend", "no_ledger")],
    file: File = None,
    chart: Chart = None,
    time: Time = True,
    json_file: shared.JsonFile = None,
    quiet: shared.Quiet = False,
    config: shared.Config = None,
) -> None:
    """Say what to choose, and what to expect, before anything is spent.

    Looked at are what people allow, how many they are, and the size of the network: public things. The number of
    features comes from --schema or --features; with --label alone it is read from the table, as `train` would.

    \b
    Examples:
      pdpsgd advise people.csv --label income --id-column person --test-share 0.2
      pdpsgd advise people.csv --schema schema.toml --spend all --chart advice.svg
      pdpsgd advise --tiers 0.5:0.3,2:0.5,8:0.2 --people 30000 --features 100
    """
    from pdpsgd.models.networks import by_name, count_parameters, default_network
    from pdpsgd.planning.advice import advise as advise_on

    screen = shared.Screen(quiet=quiet, json_file=json_file)
    if chart is not None:
        shared.check_chart(chart)
    shape, classes, id_column = _shape(file, options, people)
    budgets = replace(people, id_column=id_column).read_list(file) if id_column else people.read_list(file)
    if options.test_share is not None:
        from pdpsgd.data.people import part_list

        budgets, _ = part_list(budgets, options.test_share)
    offered, said = _offer(budgets, ledger, own_data=file is not None and is_own_data(str(file)))
    network = by_name(options.model or default_network(shape), input_shape=shape, classes=classes)
    found = advise_on(offered, count_parameters(network), steps=options.steps, batch_size=options.batch_size)
    seconds = None
    if time:
        from pdpsgd.training.timing import seconds_per_step

        seconds = seconds_per_step(network, shape, classes, found.best.batch_size) * found.best.steps
    _show(found, said, seconds, screen)
    if chart is not None:
        from pdpsgd.reporting.charts.advice import save_advice_chart

        save_advice_chart(found, chart)
        screen.say(f"Chart: {chart}")
    screen.write_json(shared.dump({**found.to_dict(), "seconds_on_this_machine": seconds}))


def _shape(
    file: Path | None, options: AdviceOptions, people: PeopleOptions
) -> tuple[tuple[int, ...], int, str | None]:
    """Find the shape of an example, the number of classes, and the id column if the schema names it."""
    from pdpsgd.data.drafting import draft_schema
    from pdpsgd.data.schema import Schema

    if options.features is not None:
        check_positive(features=options.features, classes=options.classes)
        return (options.features,), options.classes, None
    if options.schema is not None:
        schema = Schema.read(options.schema)
    elif file is not None and options.label is not None:
        columns = (people.epsilon_column, people.delta_column)
        leave_out = [name for name in columns if name is not None]
        schema = draft_schema(
            file,
            label=options.label,
            id_column=people.id_column,
            leave_out=leave_out,
            task=options.task,
        )
    else:
        fail(
            "Expected --features N (and --classes), --schema FILE, or a table with --label, to know the size of the "
            "network. Got none of them."
        )
    return (schema.width,), schema.outputs, schema.id_column


def _offer(budgets: Budgets, asked: TrainingLedger, *, own_data: bool) -> tuple[Budgets, str | None]:
    """Take the share of what people have left that `train` would take; the ledger stays as it is."""
    place = asked.place(own_data=own_data, counted_otherwise=not budgets.named)
    if place is None:
        return budgets, None
    from pdpsgd.ledger import Ledger

    said = f"For a run that takes --spend {asked.spend} of what people have left, as train does ({place})."
    if "://" in place:
        return Ledger(place).offer(asked.spend, people=budgets.ids).budgets, said
    with copy_of(place) as ledger:
        ledger.admit(budgets)
        return ledger.offer(asked.spend, people=budgets.ids).budgets, said


def _show(found: Advice, said: str | None, seconds: float | None, screen: shared.Screen) -> None:
    if screen.quiet:
        return
    able = found.people_who_allow_something
    screen.say(
        f"{found.people:,} people, {able:,} of whom allow something; a network of {found.parameters:,} parameters."
    )
    if said is not None:
        screen.say(said)
    chosen = found.recommended
    rows = [
        (f"{each.batch_size:,.0f}", f"{each.steps:,}", each, each.steps == chosen.steps
         and abs(each.batch_size - chosen.batch_size) < 0.02 * chosen.batch_size)
        for each in found.settings
    ]  # fmt: skip
    screen.table(
        _table(
            "Batch size and steps",
            ("batch", "steps"),
            [((b, s), e, "<" if here else "") for b, s, e, here in rows],
        )
    )
    screen.table(
        _table(
            "The same batch and steps by other mechanisms",
            ("mechanism", "people used"),
            [((each.mechanism, f"{each.people_used:,}"), each, "") for each in found.mechanisms],
        )
    )
    screen.say(
        f"Recommended: --batch-size {chosen.batch_size} --steps {chosen.steps} --max-grad-norm "
        f"{chosen.max_grad_norm:g} --learning-rate {chosen.learning_rate:g}"
    )
    for sentence in found.reasons():
        screen.say(f"- {sentence}")
    if seconds is not None:
        took = f"{seconds:.0f} seconds" if seconds < 120 else f"{seconds / 60:.0f} minutes"
        screen.say(f"- Training takes about {took} on this machine.")


def _table(title: str, names: tuple[str, str], rows: list[tuple[tuple[str, str], Outlook, str]]) -> Any:
    """Lay plans out in a table that fits 80 columns."""
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for name in (*names, "noise", "used", "signal/noise", ""):
        table.add_column(name, justify="right")
    for first, each, mark in rows:
        table.add_row(
            *first,
            f"{each.noise_multiplier:.3g}",
            f"{each.efficiency:.0%}",
            f"{each.signal_to_noise:.3g}",
            mark,
        )
    return table
