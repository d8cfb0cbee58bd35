"""`pdpsgd train --rehearse`: the whole pipeline on made-up rows, before anything is spent. No record is read."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from pdpsgd.cli.training_options import CommandOptions, DataOptions, ListOptions, tier_names
from pdpsgd.errors import fail

if TYPE_CHECKING:
    from pdpsgd.budgets.budgets import Budgets
    from pdpsgd.data.schema import Schema
    from pdpsgd.training.inputs import TrainingInputs

OTHERS = 1000
"""Made-up people in place of those in --test-file and --calibrate."""
NOTE = (
    "REHEARSAL on made-up rows: no record was read, nothing was spent, nobody was promised anything. Figures on test "
    "people are chance; time, memory and the plan are as they will be."
)


def rehearsed_inputs(
    source: str,
    how: DataOptions,
    whose: ListOptions,
    options: CommandOptions,
    *,
    listed: Callable[[], Budgets] | None,
) -> TrainingInputs:
    """Make up the inputs of a run from its schema and its list of people.

    Guarantee: of people, ids and budgets are read; a file of records is opened for its columns of budgets only if the
    list is in it, and not at all if it is in --budgets or in a ledger.

    Args:
        source: The data that is rehearsed for.
        how: With the schema, and who is to be tested on.
        whose: Where budgets are.
        options: The options of the run.
        listed: Reads the list of a ledger.

    Returns:
        Made-up records of made-up people who allow what the real ones do.
    """
    from dataclasses import replace

    from pdpsgd.budgets.budgets import Budgets
    from pdpsgd.data.made_up import made_up_people
    from pdpsgd.data.people import hold_out
    from pdpsgd.data.schema import Schema
    from pdpsgd.training.inputs import TrainingInputs

    if how.schema is None:
        fail("Expected --schema with --rehearse: rows are made up from it, and no record is read. Got none.")
    if options.records_per_person is not None:
        fail("Expected one record per person, to rehearse. Got --records-per-person.")
    schema = Schema.read(how.schema)
    known = _list_of(source, whose, schema, listed)
    budgets = Budgets(known.epsilon, known.delta, allow_infinite=True).without_names()
    tested = OTHERS if how.test_file is not None else 0
    data = made_up_people(schema, len(budgets), test_people=tested, name=Path(source).name)
    tiers = None
    if how.test_share is not None:
        data, budgets, aside = hold_out(data, budgets, how.test_share)
        tiers = tier_names(aside.epsilon)
    inputs = TrainingInputs.from_people(replace(data, notes=(NOTE,)), budgets, tiers)
    inputs = replace(inputs, rehearsal=True)
    if options.calibrate is None or options.calibrate == "steps":
        return inputs
    others = made_up_people(schema, OTHERS)
    return replace(inputs, calibration_data=(others.inputs, others.targets))


def _list_of(
    source: str, whose: ListOptions, schema: Schema, listed: Callable[[], Budgets] | None
) -> Budgets:
    """Read what people allow, without their records."""
    id_column = whose.id_column or schema.id_column
    if whose.budgets is not None:
        return whose.read(whose.budgets, id_column=id_column)
    if whose.tiers is not None:
        fail(
            "Expected a list of people, to rehearse: --budgets, a ledger, or columns of the data. Got --tiers."
        )
    if listed is not None:
        return listed()
    return whose.read(Path(source), id_column=id_column)


def peak_memory() -> float | None:
    """Return the largest amount of memory that this process has had, in bytes; None where it is not known."""
    try:
        import resource
    except ImportError:
        return None
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return float(most if sys.platform == "darwin" else most * 1024)


def check_rehearsal(*, plan: object, history: object, resume: bool) -> None:
    """Refuse what belongs to a real run."""
    for given, name in ((plan, "--plan"), (history, "--history"), (resume, "--resume")):
        if given:
            fail(f"Expected --rehearse without {name}, which belongs to people's records. Got both.")
