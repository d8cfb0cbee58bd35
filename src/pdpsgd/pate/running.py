"""One call from people's records and public examples to a student: `run_pate`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from rich.progress import Progress
from torch import Tensor, nn

from pdpsgd.budgets.budgets import Budgets
from pdpsgd.engine.distributed import Ranks
from pdpsgd.engine.reservation import circumstances_of
from pdpsgd.errors import check_positive, fail, warn
from pdpsgd.models.networks import linear_model
from pdpsgd.models.pretraining import start_at_zero
from pdpsgd.pate.new_networks import NewNetworks
from pdpsgd.pate.outlook import doubt_about_vote
from pdpsgd.pate.plans import VotePlan, plan_votes
from pdpsgd.pate.student import ask_about, spread_labels, train_student
from pdpsgd.pate.teachers import (
    assign_people,
    train_network_teachers,
    train_ridge_teachers,
    vote_counts,
)
from pdpsgd.pate.votes import Answers, answer_queries
from pdpsgd.planning.plans import Plan
from pdpsgd.planning.verdict import Verdict, verdict
from pdpsgd.sampling.source import RandomSource

if TYPE_CHECKING:
    from pdpsgd.ledger import ReservedRun


@dataclass(frozen=True, eq=False)
class PateResult:
    """A student, and what may be said of it. All of it is public if the verdict is for release."""

    student: nn.Module
    planned: VotePlan
    answers: Answers
    verdict: Verdict

    @property
    def plan(self) -> Plan:
        """The plan that was executed, for a file, or as history of a later one."""
        return self.planned.plan


def run_pate(
    data: tuple[Tensor, Tensor],
    budgets: Budgets,
    public: Tensor,
    *,
    classes: int,
    planned: VotePlan | str = "i-pate-weight",
    network: Callable[[], nn.Module] | None = None,
    student: nn.Module | None = None,
    spread: bool = True,
    seed: int | None = None,
    progress: bool = True,
    reservation: ReservedRun | None = None,
    doubt_said: bool = False,
    **circumstances: Any,
) -> PateResult:
    """Train teachers on people's records, let them label public examples, and train a student on the labels.

    Guarantee: each person gets what `planned` promises them, for labels and student together, if the result's verdict
    says so. Teachers and their votes stay in here. `public`, `classes`, `student` and `spread` must not be chosen by
    looking at people's records.

    Args:
        data: inputs and classes of the records, one for each person, in the order of the list. A row of NaN is somebody
            who has not supplied one.
        budgets: what each person allows.
        public: examples that nobody needs protection for, without labels.
        classes: number of classes.
        planned: the plan of the vote, or the name of a mechanism with usual settings (see `plan_votes`).
        network: makes the network of each teacher, and that of the student; by default teachers are ridge classifiers
            and the student is linear. Public, as the student is.
        student: trained in place, instead of one of these.
        spread: whether the student also learns from public examples near to those that were answered. That helps
            where near examples are mostly alike, and harms where they are not (docs/results/table-3.md).
        seed: to repeat a run, which then is not for release.
        progress: whether to show progress bars on the error stream.
        reservation: the run of a ledger that this is; it is begun before any record is used, and pays for one vote: a
            second one under it is refused.
        doubt_said: whether somebody has been told already what speaks against this vote; otherwise that is warned of
            before this begins the run of a ledger: one from `Ledger.hold` can be canceled until then.
        circumstances: what else only the caller knows, as for `pdpsgd.planning.verdict.verdict`.

    Returns:
        The student, its plan, the labels, and the verdict.

    Raises:
        PdpsgdError: the data do not fit the list, the budgets allow no answer, or the teachers gave none.
    """
    inputs, targets = data
    if Ranks.join().world_size > 1:
        fail(
            "Expected one process: each would vote with noise of its own. Got several: run without torchrun."
        )
    _check(inputs, targets, budgets, public, classes)
    new = None if network is None else _checked_network(network, student, public, classes)
    if isinstance(planned, str):
        planned = plan_votes(budgets, planned)
    planned.plan.verify()
    if reservation is not None:
        reservation.check_plan(planned.plan)
        if not doubt_said:
            _warn_before_beginning(planned, classes)
        reservation.begin()
    teachers = assign_people(planned, planned.plan.level_of_person(budgets), seed=seed)
    with _bars(progress) as bar, _seeded(seed):
        order = ask_about(public, min(planned.questions, len(public)), seed=seed or 0)
        told = bar("Teachers")
        if new is None:
            labels = train_ridge_teachers(teachers, inputs, targets, public, classes=classes, progress=told)
        else:
            labels = train_network_teachers(new, teachers, inputs, targets, public, progress=told)
        source = RandomSource.from_operating_system() if seed is None else RandomSource.from_seed(seed)
        if reservation is not None:
            reservation.tie(source.name)  # a charge pays for one vote
        answers = answer_queries(
            vote_counts(teachers, labels, classes=classes), planned, order, source=source
        )
        if not len(answers.labels):
            fail(
                f"Expected an answer to one of {answers.asked} questions at least. Got none: the teachers do not agree "
                "well enough for this threshold. What the plan allows is spent all the same."
            )
        if student is None and new is not None:
            student = new()
        elif student is None:
            student = linear_model(public[0].numel(), classes)
            start_at_zero(student)
        if spread:
            shown = public
            wanted = spread_labels(public, answers.examples, answers.labels, classes=classes)
        else:
            shown = public[torch.from_numpy(answers.examples)]
            wanted = nn.functional.one_hot(torch.from_numpy(answers.labels), classes).float()
        train_student(student, shown, wanted, progress=bar("Student"))
    found = verdict(
        planned.plan,
        seeded=answers.not_for_release is not None,
        **circumstances_of(reservation),
        **circumstances,
    )
    return PateResult(student, planned, answers, found)


def _warn_before_beginning(planned: VotePlan, classes: int) -> None:
    """Say what speaks against a vote before its run is begun; where warnings are errors, it is not."""
    doubt = doubt_about_vote(planned, classes)
    if doubt is not None:
        warn(f"{doubt.text} People are charged for this run whatever becomes of it, once it is begun.")


def _check(inputs: Tensor, targets: Tensor, budgets: Budgets, public: Tensor, classes: int) -> None:
    check_positive(classes=classes)
    if not len(budgets) == len(inputs) == len(targets):
        fail(
            f"Expected one record for each of {len(budgets):,} people. Got {len(inputs):,} inputs and {len(targets):,} "
            "targets."
        )
    if public.shape[1:] != inputs.shape[1:] or not len(public):
        fail(
            f"Expected public examples of shape {tuple(inputs.shape[1:])}, as people's. Got {tuple(public.shape)}."
        )
    if not bool(public.isfinite().all()):
        fail("Expected finite public examples. Got some that are not.")
    if targets.dtype != torch.int64 or not bool(((targets >= 0) & (targets < classes)).all()):
        fail(f"Expected targets of type int64 from 0 to {classes - 1}. Got others ({targets.dtype}).")


def _checked_network(
    network: Callable[[], nn.Module], student: nn.Module | None, public: Tensor, classes: int
) -> NewNetworks:
    """Refuse a network that does not fit, or is one that was there before, before anything is begun."""
    new = NewNetworks(network)
    if student is not None:
        new.note(student)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        found = new.try_out().eval()(public[:1])
    if tuple(found.shape) != (1, classes):
        fail(
            f"Expected a network that gives {classes} numbers, one for each class. Got {tuple(found.shape)}."
        )
    return new


@contextmanager
def _seeded(seed: int | None) -> Iterator[None]:
    """Let torch's generator begin at the seed, if there is one, and go on afterwards where it was."""
    with torch.random.fork_rng(devices=[], enabled=seed is not None):
        if seed is not None:
            torch.manual_seed(seed)
        yield


@contextmanager
def _bars(show: bool) -> Iterator[Callable[[str], Callable[[int, int], None]]]:
    """Yield what makes a progress bar for a name."""
    with Progress(console=Console(stderr=True), disable=not show) as shown:

        def bar(name: str) -> Callable[[int, int], None]:
            task = shown.add_task(name)
            return lambda done, total: shown.update(task, completed=done, total=total)

        yield bar
