"""`pdpsgd pate`: teachers on people's records, a student from public examples that they label by a noisy vote."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pdpsgd.cli import shared
from pdpsgd.cli.agreement import confirm_doubt, confirm_without_promise, warn_of_release
from pdpsgd.cli.option_parameters import with_options
from pdpsgd.cli.own_ledger import TrainingLedger, announce, open_or_create
from pdpsgd.cli.pate_data import check_public, split
from pdpsgd.cli.shared import option
from pdpsgd.cli.training_options import (
    DataOptions,
    ListOptions,
    Source,
    is_own_data,
    read_inputs,
)
from pdpsgd.errors import check_one_of, fail
from pdpsgd.training.options import OUTPUT, PLAN, TRAINING

if TYPE_CHECKING:
    from torch import Tensor, nn

    from pdpsgd.budgets.budgets import Budgets
    from pdpsgd.ledger import Ledger, ReservedRun
    from pdpsgd.pate import PateResult, VotePlan
    from pdpsgd.training.fitting import TrainingResult
    from pdpsgd.training.inputs import TrainingInputs
    from pdpsgd.training.run_folder import RunFolder

AS_PUBLISHED, LINEAR = "as-published", "linear"

Public = Annotated[
    str | None,
    option(
        "--public",
        help="unlabeled examples of nobody on the list: a file, or last:N",
        panel=TRAINING,
        show_default=False,
    ),
]
MechanismName = Annotated[
    str, option("--mechanism", help="pate, i-pate-upsample or i-pate-weight", panel=PLAN)
]
Weights = Annotated[
    str,
    option(
        "--weights", help="for i-pate-weight: by mu, epsilon (published), epsilon-times-share", panel=PLAN
    ),
]
Bookkeeping = Annotated[
    str,
    option(
        "--bookkeeping",
        help="sound, or as-published (on a benchmark; never for release)",
        panel=PLAN,
    ),
]
Teachers = Annotated[int, option("--teachers", min=1, help="number of teachers, for plain PATE", panel=PLAN)]
Model = Annotated[
    str,
    option(
        "--model",
        help="network of teachers and student, by name, or module:function",
        panel=TRAINING,
    ),
]
Spread = Annotated[
    bool, option("--spread/--no-spread", help="labels spread to near public examples", panel=TRAINING)
]
Seed = Annotated[
    int | None,
    option("--seed", help="seed for a repeatable run; not for release", panel=TRAINING, show_default=False),
]
Folder = Annotated[
    Path | None, option("--run-folder", help="output folder", panel=OUTPUT, show_default="a new one in runs/")
]


@dataclass(frozen=True, eq=False)
class _Vote:
    """What a vote needs: records in the order of the list, the list, public examples, and how to vote."""

    data: tuple[Tensor, Tensor]
    budgets: Budgets
    public: Tensor
    mechanism: str
    weights: str
    teachers: int
    spread: bool
    seed: int | None
    model: str

    def planned(self, budgets: Budgets, *, accountant: str = "pld") -> VotePlan:
        """Compute the plan of the vote for these budgets."""
        from pdpsgd.pate import VoteSettings, plan_votes

        usual = VoteSettings()
        settings = usual.enlarged(self.teachers / usual.teachers)
        return plan_votes(
            budgets, self.mechanism, settings=settings, weights=self.weights, accountant=accountant
        )

    def network(self, classes: int) -> Callable[[], nn.Module] | None:
        """Return what makes the network of each teacher and of the student; None for linear ones."""
        from pdpsgd.models.networks import by_name

        if self.model == LINEAR:
            return None
        shape = tuple(self.public.shape[1:])
        return partial(by_name, self.model, input_shape=shape, classes=classes)


@with_options
def pate(
    data: Source,
    records: DataOptions,
    people: ListOptions,
    ledger: TrainingLedger,
    public: Public = None,
    mechanism: MechanismName = "i-pate-weight",
    weights: Weights = "mu",
    bookkeeping: Bookkeeping = "sound",
    teachers: Teachers = 250,
    model: Model = LINEAR,
    spread: Spread = True,
    seed: Seed = None,
    run_folder: Folder = None,
    yes: shared.Yes = False,
    json_file: shared.JsonFile = None,
    quiet: shared.Quiet = False,
    config: shared.Config = None,
) -> None:
    """Let teachers, trained on people's records, label public examples by a noisy vote; train a student on the labels.

    Needs examples that nobody has to be protected for, without labels (--public): an .npz file, a table or a folder of
    images like the data; of a benchmark, last:N takes the last N training records off the list. How many questions and
    answers there are is a plan that is fixed before any record is read. Public are plan, labels and student; teachers
    and votes are kept nowhere. See docs/pate.md for when this is worth it: rarely.

    \b
    Examples:
      pdpsgd pate images.npz --budgets people.csv --id-column person \\
          --public others.npz
      pdpsgd pate digits --tiers 4:0.5,8:0.5 --public last:400 --teachers 100
      pdpsgd pate mnist --tiers 1:0.34,2:0.43,3:0.23 --public last:10000 \\
          --model mnist-cnn
      pdpsgd pate digits --tiers 4:0.5,8:0.5 --public last:400 --teachers 100 \\
          --bookkeeping as-published
    """
    from pdpsgd.pate import MECHANISMS
    from pdpsgd.pate.plans import WEIGHTS

    screen = shared.Screen(quiet=quiet, json_file=json_file)
    if public is None:
        fail(
            "Expected --public: examples like people's, of nobody who has to be protected, without labels (an .npz "
            "file, a table, a folder of images, or last:N of a benchmark). Teachers label them, and the student learns "
            "from these labels alone. Got none. Without such examples, use pdpsgd train."
        )
    check_one_of(MECHANISMS, mechanism=mechanism)
    check_one_of(WEIGHTS, weights=weights)
    check_one_of(("sound", AS_PUBLISHED), bookkeeping=bookkeeping)
    own_data = is_own_data(data)
    if bookkeeping == AS_PUBLISHED and (own_data or mechanism != "i-pate-weight" or run_folder is not None):
        fail(
            f"Expected a benchmark, i-pate-weight and no run folder for --bookkeeping {AS_PUBLISHED}: it shows what "
            f"the published accounting gives, which promises nobody anything. Got {data}, {mechanism}."
        )
    place = ledger.place(own_data=own_data, counted_otherwise=people.tiers is not None)
    inputs = read_inputs(data, records, people, listed=ledger.listed)
    confirm_without_promise(inputs, yes=yes)
    if inputs.task != "classification" or inputs.texts:
        got = "texts" if inputs.texts else "a label that is a number"
        fail(f"Expected records with classes, as numbers or images. Got {got}: use pdpsgd train.")
    if len(inputs.classes) < 2:
        fail(f"Expected at least two classes to vote on. Got {list(inputs.classes)}.")
    for note in inputs.notes:
        screen.say(f"Note: {note}")
    inputs = replace(inputs, ledger_off=own_data and ledger.no_ledger)
    check_public(public, data, inputs)
    held, budgets, shown = split(inputs, public, own_data=own_data)
    vote = _Vote(held, budgets, shown, mechanism, weights, teachers, spread, seed, model)
    if bookkeeping == AS_PUBLISHED:
        from pdpsgd.cli.pate_as_published import show_as_published

        planned = replace(vote, weights="epsilon-times-share").planned(budgets)
        show_as_published(
            planned, budgets, held, shown, classes=len(inputs.classes), seed=seed, screen=screen
        )
        return
    with _folder_of(run_folder, f"{Path(data).stem}-{mechanism}") as folder:
        if place is None or not budgets.named:
            planned = vote.planned(budgets)
            _confirm(planned, inputs, yes=yes, charges=False)
            result = _run(vote, planned, budgets, inputs, folder, None, quiet=quiet)
        else:
            with open_or_create(place, screen) as kept:
                result = _run_in_ledger(vote, inputs, folder, kept, ledger, screen, yes=yes)
    _show(result, screen)
    from pdpsgd.reporting import write_run_report

    screen.say(f"Report:  {write_run_report(folder.path)}")
    screen.write_json(shared.dump({**result.to_dict(), "run_folder": str(folder.path)}))


@contextmanager
def _folder_of(given: Path | None, name: str) -> Iterator[RunFolder]:
    """Claim the run folder, and keep other processes out of it; one that stays empty is removed."""
    from pdpsgd.cli.training_run import new_folder
    from pdpsgd.training.run_folder import RunFolder

    if given is None:
        folder = new_folder(name)
        claimed: Any = folder.removed_if_empty()
    else:
        folder, claimed = RunFolder(given), nullcontext()
        folder.check_is_free(resume=False, folder=f"--run-folder {str(given)!r}", go_on="another folder")
    with claimed, folder.in_use():
        yield folder


def _run_in_ledger(
    vote: _Vote,
    inputs: TrainingInputs,
    folder: RunFolder,
    ledger: Ledger,
    asked: TrainingLedger,
    screen: shared.Screen,
    *,
    yes: bool,
) -> TrainingResult:
    """Plan with what people have left, reserve the run, and vote under the reservation."""
    from pdpsgd.training.booking import book, under
    from pdpsgd.training.options import TrainingOptions

    before = ledger.head
    try:
        ledger.admit(vote.budgets)
        offer = ledger.offer(asked.spend, people=vote.budgets.ids).budgets
        planned = vote.planned(offer, accountant="certificate")
        planned = replace(planned, plan=ledger.mark(planned.plan))
        warn_of_release(inputs, seeded=vote.seed is not None)
        _confirm(planned, inputs, yes=yes, charges=True)
        options = TrainingOptions(spend=asked.spend)
        reserved = book(ledger, budgets=vote.budgets, options=options, plan=planned.plan, folder=folder)
    except BaseException:
        ledger.undo(before)
        raise
    with under(reserved, folder):
        announce(reserved, ledger.place, asked.spend, screen)
        planned = replace(planned, plan=reserved.plan)
        return _run(vote, planned, offer, inputs, folder, reserved, quiet=screen.quiet)


def _confirm(planned: VotePlan, inputs: TrainingInputs, *, yes: bool, charges: bool) -> None:
    """Say before anything is spent what speaks against a vote."""
    from pdpsgd.pate.outlook import doubt_about_vote

    doubt = doubt_about_vote(planned, len(inputs.classes), knob="--teachers")
    if doubt is not None:
        confirm_doubt(doubt.text, asks=charges and doubt.is_guess, yes=yes)


def _run(
    vote: _Vote,
    planned: VotePlan,
    budgets: Budgets,
    inputs: TrainingInputs,
    folder: RunFolder,
    reserved: ReservedRun | None,
    *,
    quiet: bool,
) -> TrainingResult:
    """Vote, train the student, and leave a run folder as any run does."""
    from pdpsgd.pate import run_pate

    began = time.monotonic()
    found = run_pate(
        vote.data,
        budgets,
        vote.public,
        classes=len(inputs.classes),
        planned=planned,
        network=vote.network(len(inputs.classes)),
        spread=vote.spread,
        seed=vote.seed,
        progress=not quiet,
        reservation=reserved,
        doubt_said=True,
        schema_from_data=inputs.learned_from_data,
        without_promise=inputs.without_promise,
        ledger_off=inputs.ledger_off,
    )
    result = _result(found, vote, inputs, folder, reserved, seconds=time.monotonic() - began)
    _write(folder, result, inputs, vote.budgets if reserved is None else reserved.promises())
    return result


def _result(
    found: PateResult,
    vote: _Vote,
    inputs: TrainingInputs,
    folder: RunFolder,
    reserved: ReservedRun | None,
    *,
    seconds: float,
) -> TrainingResult:
    from pdpsgd.engine.privacy_engine import Spent
    from pdpsgd.training.components import loss_of
    from pdpsgd.training.evaluation import evaluate
    from pdpsgd.training.fitting import TrainingResult
    from pdpsgd.training.versions import versions

    found.student.eval()
    evaluation = None
    if inputs.test_data is not None:
        evaluation = evaluate(
            found.student, inputs.test_data, loss_of("cross-entropy"), tiers=inputs.test_tiers
        )
    settings = {
        "teachers": found.planned.settings.teachers,
        "threshold": found.planned.settings.threshold,
        "check_noise": found.planned.settings.check_noise,
        "answer_noise": found.planned.settings.answer_noise,
        "questions": found.planned.questions,
        "answers": found.planned.answers,
        "weights": vote.weights if vote.mechanism == "i-pate-weight" else None,
        "public_examples": len(vote.public),
        "answered": len(found.answers.labels),
        "spread": vote.spread,
        "model": vote.model,
        "seed": vote.seed,
    }
    return TrainingResult(
        model=found.student,
        plan=found.plan,
        spent=tuple(Spent(level.proven_epsilon or 0.0, level.delta) for level in found.plan.levels),
        evaluation=evaluation,
        history=(),
        models=((1.0, found.student),),
        settings=settings,
        versions=versions(),
        seconds=round(seconds, 1),
        verdict=found.verdict,
        run_folder=folder.path,
        ledger=None if reserved is None else reserved.description(),
    )


def _write(folder: RunFolder, result: TrainingResult, inputs: TrainingInputs, promised: Budgets) -> None:
    from pdpsgd.training.fitting import describe_model
    from pdpsgd.training.run_folder import without_people

    folder.make()
    folder.write_plan(result.plan)
    digest = without_people(result.plan).digest
    place = {} if result.ledger is None else {"ledger": result.ledger}
    folder.write_settings({**result.settings, "plan": digest, **inputs.description(), **place})
    if inputs.schema is not None:
        folder.write_schema(inputs.schema)
    folder.write_history(())
    described = describe_model(result.models, inputs, {"model": result.settings["model"]})
    folder.write_model(result.model, replace(described, not_for_release=result.verdict.against_release))
    folder.write_promises(result.plan, promised)
    folder.write_result(result.to_dict())


def _show(result: TrainingResult, screen: shared.Screen) -> None:
    from pdpsgd.cli.plan import show

    show(result.plan, screen)
    asked = result.settings
    screen.say(
        f"{asked['answered']} of at most {asked['answers']} answers, by {asked['teachers']} teachers, on "
        f"{asked['public_examples']:,} public examples."
    )
    if result.accuracy is not None and result.evaluation is not None:
        tested = result.evaluation.people
        screen.say(f"Accuracy of the student on {tested:,} test people: {result.accuracy:.1%}.")
    else:
        screen.say("No test people, so no accuracy: give --test-file or --test-share.")
    for sentence in result.verdict.sentences:
        screen.say(sentence)
    screen.say(f"Folder:  {result.run_folder} (public/ may be published; people/ and private/ may not)")
