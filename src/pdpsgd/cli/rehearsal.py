"""`pdpsgd train --rehearse`: the whole pipeline on made-up rows, before anything is spent. No record is read."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING

import numpy as np

from pdpsgd.cli import shared
from pdpsgd.cli.own_ledger import TrainingLedger, copy_of, ledger_of
from pdpsgd.cli.shared import Screen
from pdpsgd.cli.training_options import (
    LORA_TOKENS,
    CommandOptions,
    DataOptions,
    ListOptions,
    in_tiers,
    is_own_data,
    tier_names,
)
from pdpsgd.cli.training_run import (
    check_folder,
    completed,
    fit_by_plan,
    fit_in_ledger,
    network_of,
    show_result,
)
from pdpsgd.errors import fail

if TYPE_CHECKING:
    from torch import nn

    from pdpsgd.budgets.budgets import Budgets
    from pdpsgd.data.people import PeopleData
    from pdpsgd.training.fitting import TrainingResult
    from pdpsgd.training.inputs import TrainingInputs

TIMED_TEXTS = 8
OTHERS = 1000
"""Made-up people in place of those in --test-file and --calibrate."""
NOTE = (
    "REHEARSAL on made-up rows: no record was read, nothing was spent, nobody was promised anything. Figures on test "
    "people are chance; time, memory and the plan are as they will be."
)


def rehearse_run(
    data: str,
    records: DataOptions,
    people: ListOptions,
    options: CommandOptions,
    ledger: TrainingLedger,
    screen: Screen,
    *,
    report: bool,
) -> None:
    """Do all of a run on made-up rows, in a folder of its own, and say what it takes; nothing is booked.

    The plan is the run's: from the same people, and from what they have left in a copy of the ledger.
    """
    from pdpsgd._cache import size_text
    from pdpsgd.models.networks import count_parameters
    from pdpsgd.planning.mechanisms.least_squares import NAME as LEAST_SQUARES

    began = monotonic()
    own_data = is_own_data(data)
    place = ledger.place(own_data=own_data, counted_otherwise=people.tiers is not None)
    listed = None if ledger.no_ledger else ledger.listed
    inputs = rehearsed_inputs(data, records, people, options, listed=listed)
    screen.say(NOTE)
    inputs = _with_made_up_embeddings(inputs, records, screen)
    place, inputs = ledger_of(inputs, place, ledger, screen, own_data=own_data, by_files=False)
    if options.run_folder is not None:
        options = options.changed(run_folder=Path(f"{options.run_folder}-rehearsal"))
    check_folder(options, None)
    stem = str(Path(data).with_name(f"{Path(data).stem}-rehearsal"))
    options, claimed = completed(options, None, inputs, stem, quiet=screen.quiet)
    with claimed:
        network = network_of(inputs, options, screen)
        if options.mechanism != LEAST_SQUARES:
            options = options.with_defaults(parameters=count_parameters(network))
        result = _fit_as_the_run_will(network, inputs, options, ledger, screen, place)
    show_result(result, screen, inputs.classes, rehearsed=True)
    page = None
    if report:
        from pdpsgd.reporting import write_run_report

        page = write_run_report(str(options.run_folder))
        screen.say(f"Report:  {page} (as the page will look, on made-up rows)")
    memory, seconds = peak_memory(), monotonic() - began
    said = "" if memory is None else f", at most {size_text(memory)} of memory"
    screen.say(
        f"Rehearsed: {result.plan.steps:,} steps in {result.seconds:.1f} s, {seconds:.1f} s in all{said}. The run will "
        "have this plan, unless the list or the ledger changes before."
    )
    figures = {"seconds": round(seconds, 1), "training_seconds": result.seconds, "peak_memory_bytes": memory}
    screen.write_json(
        shared.dump({**figures, "rehearsal": True, "report": None if page is None else str(page)})
    )


def _fit_as_the_run_will(
    network: nn.Module,
    inputs: TrainingInputs,
    options: CommandOptions,
    asked: TrainingLedger,
    screen: Screen,
    place: str | None,
) -> TrainingResult:
    """Train by the plan that the run will have; a ledger is copied, and what is booked in the copy is lost."""
    if place is None:
        return fit_by_plan(network, inputs, options, options.plan_or(None, inputs.budgets), screen)
    if "://" in place:  # is not copied: only what the run may take is read
        from pdpsgd.ledger import Ledger

        ids = None if inputs.budgets is None else inputs.budgets.ids
        offer = Ledger(place).offer(asked.spend, people=ids).budgets
        made = options.changed(accountant="certificate").plan_or(None, offer)
        return fit_by_plan(network, replace(inputs, budgets=offer), options, made, screen)
    with copy_of(place) as copy:
        return fit_in_ledger(network, inputs, options, None, copy, asked, screen, yes=True, place=place)


def rehearsed_inputs(
    source: str,
    how: DataOptions,
    whose: ListOptions,
    options: CommandOptions,
    *,
    listed: Callable[[], Budgets] | None,
) -> TrainingInputs:
    """Make up the inputs of a run from its schema, or the shape of its images, and its list of people.

    Guarantee: of people, ids and budgets are read; a table of records is opened for its columns of budgets only if the
    list is in it, and not at all if it is in --budgets or in a ledger. Of a folder of images the names of the folders
    of classes are read, and of an .npz file the header of `inputs` and the names of the classes.

    Args:
        source: The data that is rehearsed for.
        how: With the schema or the size of images, and who is to be tested on.
        whose: Where budgets are.
        options: The options of the run.
        listed: Reads the list of a ledger.

    Returns:
        Made-up records of the people on the list, by whose ids test people are set aside as in the run. Where people
        have many records, everybody gets as many as take part at a time at most.
    """
    from pdpsgd.budgets.budgets import Budgets
    from pdpsgd.data.people import hold_out
    from pdpsgd.training.inputs import TrainingInputs

    make, id_column = _maker(source, how)
    each = options.records_per_person or 1
    known = _list_of(source, whose, id_column, listed, many=options.records_per_person is not None)
    budgets = Budgets(known.epsilon, known.delta, ids=known.ids, allow_infinite=True)
    budgets = budgets if known.named else budgets.without_names()
    tested = OTHERS if how.test_file is not None else 0
    if each > 1 and not known.named:
        fail(
            "Expected ids of people with --records-per-person (id_column in the schema, or --id-column). Got a list "
            "without."
        )
    data = make(
        each * len(budgets),
        ids=np.repeat(known.ids, each) if known.named else None,
        test_people=tested,
        name=Path(source).name,
    )
    tiers = None
    if how.test_share is not None:
        data, budgets, aside = hold_out(data, budgets, how.test_share)
        assert data.test_ids is not None  # those who were set aside
        tier_of = dict(zip(aside.ids.tolist(), tier_names(aside.epsilon), strict=True))
        tiers = [tier_of[name] for name in data.test_ids.tolist()]
    inputs = TrainingInputs.from_people(replace(data, notes=(NOTE,)), budgets, tiers)
    inputs = replace(inputs, rehearsal=True)
    if options.calibrate is None or options.calibrate == "steps":
        return inputs
    others = make(OTHERS)
    numbers = others.inputs + (len(inputs.texts) if others.texts else 0)
    return replace(inputs, calibration_data=(numbers, others.targets), texts=(*inputs.texts, *others.texts))


def _maker(source: str, how: DataOptions) -> tuple[Callable[..., PeopleData], str | None]:
    """Find what makes records up for this data, and the column of ids where a schema names it."""
    from pdpsgd.data.images import class_folders, npz_declares
    from pdpsgd.data.made_up import made_up_images, made_up_people
    from pdpsgd.data.schema import Schema

    path = Path(source)
    if how.schema is not None:
        schema = Schema.read(how.schema)
        return partial(made_up_people, schema), schema.id_column
    if path.is_dir():
        classes = class_folders(path / "train" if (path / "train").is_dir() else path)
        shape = (1 if how.gray else 3, how.image_size, how.image_size)
        return partial(made_up_images, shape, classes), None
    if path.suffix.lower() == ".npz":
        declared, pixels, classes = npz_declares(path)
        return partial(made_up_images, declared, classes, pixels=pixels), None
    text = "" if how.text is None else f" --text {how.text}"
    fail(
        "Expected --schema with --rehearse: rows are made up from it, and no record is read. Got none. A first one "
        f"comes from `pdpsgd data schema {source} --label {how.label or '...'}{text} -o schema.toml`."
    )


def _with_made_up_embeddings(inputs: TrainingInputs, how: DataOptions, screen: Screen) -> TrainingInputs:
    """Stand in for what an encoder makes of texts, and say how long it takes: nobody's text is read."""
    import torch

    from pdpsgd.models.adapters import LAST_LAYER, finetuned
    from pdpsgd.models.encoders import load_encoder
    from pdpsgd.models.last_layer import no_states

    if how.finetune is not None and not inputs.texts:
        fail("Expected texts (--schema with a column of kind 'text') with --finetune. Got a schema without.")
    if not inputs.texts:
        return inputs
    generator = torch.Generator().manual_seed(0)
    adapted = how.finetune is not None
    encoder = load_encoder(how.encoder, max_tokens=how.max_tokens or (LORA_TOKENS if adapted else None))
    count = len(inputs.texts)
    if adapted:
        description = finetuned(encoder)
        if description["finetune"] == LAST_LAYER:
            made = no_states(encoder, count).normal_(generator=generator)
        else:
            shape = (count, encoder.max_tokens)
            made = torch.randint(encoder.tokenizer.vocab_size, shape, generator=generator).int()
        return inputs.with_tokens(lambda texts: made, description)
    encoder.embed([f"first {'1 ' * encoder.max_tokens}"])  # the first one takes longer
    began = monotonic()
    encoder.embed([f"{number} " * encoder.max_tokens for number in range(TIMED_TEXTS)])
    seconds = 1000 * (monotonic() - began) / TIMED_TEXTS
    screen.say(
        f"A thousand texts of {encoder.max_tokens} tokens take {how.encoder} about {seconds:,.0f} s here, "
        "once: embeddings are kept, and shorter texts take less. In their place are vectors that are made up."
    )
    vectors = torch.nn.functional.normalize(torch.randn(count, encoder.size, generator=generator), dim=1)
    return inputs.with_embeddings(lambda texts: vectors, encoder.description())


def _list_of(
    source: str,
    whose: ListOptions,
    id_column: str | None,
    listed: Callable[[], Budgets] | None,
    *,
    many: bool,
) -> Budgets:
    """Read what people allow, without their records."""
    from pdpsgd.budgets.readers import count_rows, read_columns
    from pdpsgd.data.people import TABLES
    from pdpsgd.sampling.record_choice import HOW_TO_HAVE_MANY

    id_column = whose.id_column or id_column
    if whose.budgets is not None:
        return whose.read(whose.budgets, id_column=id_column)
    if whose.tiers is None and listed is not None:
        return listed()
    if Path(source).suffix.lower() not in TABLES:
        fail(f"Expected a list of people, to rehearse {source!r}: --budgets, or a ledger. Got neither.")
    if whose.tiers is not None:
        ids = None if id_column is None else read_columns(source, [id_column])[0][id_column]
        return in_tiers(
            np.arange(count_rows(Path(source))) if ids is None else ids,
            whose,
            named=ids is not None,
            many=many,
        )
    found = whose.read(Path(source), id_column=id_column, repeated_ids=True)
    if not many and len(found) != count_rows(Path(source)):
        fail(f"Expected one record per person in {source}. Got fewer ids than rows. {HOW_TO_HAVE_MANY}")
    return found


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
