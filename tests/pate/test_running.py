"""`run_pate` from records to a student on digits: its verdict, its repetition, and what it refuses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pdpsgd import Budgets, Ledger, PdpsgdError
from pdpsgd.data.benchmarks import load
from pdpsgd.engine.distributed import Ranks
from pdpsgd.pate import (
    MECHANISMS,
    VotePlan,
    VoteSettings,
    assign_people,
    plan_votes,
    run_pate,
    train_student,
)

DIGITS = load("digits")
PEOPLE = DIGITS.train_inputs[:1000], DIGITS.train_targets[:1000]
PUBLIC = DIGITS.train_inputs[1000:]
BUDGETS = Budgets.from_tiers({4.0: 0.5, 8.0: 0.5}, 1000, shuffle=0)
FEATURES = PUBLIC[0].numel()
SETTINGS = VoteSettings().enlarged(100 / 250)


def vote(mechanism: str = "i-pate-weight") -> VotePlan:
    return plan_votes(BUDGETS, mechanism, settings=SETTINGS)


def few_teachers() -> VotePlan:
    return plan_votes(
        BUDGETS, "pate", settings=VoteSettings(teachers=20, threshold=5, check_noise=5, answer_noise=2)
    )


def run(**changed: Any) -> Any:
    given = {"data": PEOPLE, "budgets": BUDGETS, "public": PUBLIC, "classes": 10, "planned": vote()}
    return run_pate(**{"progress": False, **given, **changed})


def accuracy(student: torch.nn.Module) -> float:
    return float((student(DIGITS.test_inputs).argmax(1) == DIGITS.test_targets).float().mean())


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_a_student_learns_and_the_promise_holds(mechanism: str) -> None:
    result = run(planned=vote(mechanism))
    assert result.verdict.is_for_release
    assert "holds for all 1,000 people" in result.verdict.headline
    assert len(result.answers.labels) <= result.planned.answers
    repeatable = run(planned=vote(mechanism), seed=0)
    assert accuracy(repeatable.student) > 0.2  # chance is 0.1


def test_a_seed_repeats_the_run_and_is_not_for_release() -> None:
    one, other, third = run(seed=3), run(seed=3), run(seed=4)
    assert one.answers.labels.tolist() == other.answers.labels.tolist()
    weights = [torch.cat([p.flatten() for p in r.student.parameters()]) for r in (one, other, third)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    assert not one.verdict.is_for_release
    assert "seeded" in [reason.code for reason in one.verdict.reasons]


def test_the_student_may_be_any_network_and_learn_from_answered_examples_alone() -> None:
    torch.manual_seed(0)
    own = torch.nn.Sequential(
        torch.nn.Flatten(), torch.nn.Linear(64, 32), torch.nn.Tanh(), torch.nn.Linear(32, 10)
    )
    result = run(student=own, spread=False, seed=0)
    assert result.student is own
    assert accuracy(own) > 0.3


def test_progress_is_shown_where_it_is_wanted(capsys: pytest.CaptureFixture[str]) -> None:
    run(seed=0)
    assert capsys.readouterr().err == ""
    run(seed=0, progress=True)
    shown = capsys.readouterr()
    assert "Teachers" in shown.err
    assert "Student" in shown.err
    assert shown.out == ""


def test_people_without_a_usable_record_are_left_out_without_a_word() -> None:
    inputs = PEOPLE[0].clone()
    inputs[0], inputs[1, 0, 0, 0] = torch.nan, torch.inf
    assert run(data=(inputs, PEOPLE[1])).verdict.is_for_release


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"data": (PEOPLE[0][:9], PEOPLE[1])}, "one record for each of 1,000 people. Got 9"),
        ({"data": (PEOPLE[0], PEOPLE[1] + 1)}, "from 0 to 9"),
        ({"data": (PEOPLE[0], PEOPLE[1].float())}, "int64"),
        ({"public": PUBLIC.flatten(1)}, r"shape \(1, 8, 8\)"),
        ({"public": PUBLIC[:0]}, r"shape \(1, 8, 8\)"),
        ({"public": PUBLIC * torch.inf}, "finite public"),
        ({"planned": "i-pate"}, "i-pate-weight"),
        ({"budgets": Budgets([1.0] * 1000)}, "other people"),
    ],
)
def test_what_does_not_fit_is_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(PdpsgdError, match=message):
        run(**changed)


@pytest.mark.parametrize(
    "changed",
    [
        {"answers": 1000},
        {"questions": 10_000},
        {"settings": replace(SETTINGS, answer_noise=1.0)},
        {"settings": replace(SETTINGS, check_noise=1.0)},
        {"copies": (2, 2)},
        {"weights": (1.0, 3.0)},
    ],
)
def test_a_vote_that_its_plan_does_not_pay_for_cannot_be_made(changed: dict[str, Any]) -> None:
    with pytest.raises(PdpsgdError, match="as its plan has it"):
        replace(vote(), **changed)


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    made = Ledger.create(tmp_path / "people.ledger")
    made.enroll(Budgets(BUDGETS.epsilon, ids=np.arange(1000)))
    return made


def held(ledger: Ledger, teachers: int) -> dict[str, Any]:
    offer, settings = ledger.offer("all").budgets, VoteSettings().enlarged(teachers / 250)
    planned = plan_votes(offer, settings=settings, accountant="certificate")
    planned = replace(planned, plan=ledger.mark(planned.plan))
    reserved = ledger.hold(ledger.reserve(planned.plan).number)
    return {"budgets": offer, "planned": replace(planned, plan=reserved.plan), "reservation": reserved}


@pytest.mark.filterwarnings("error")
def test_a_vote_of_few_labels_is_warned_of_while_its_run_can_be_canceled(ledger: Ledger) -> None:
    few = held(ledger, 10)
    with pytest.raises(
        UserWarning, match=r"Expect hardly more than a guess: .* \(teachers of VoteSettings\)"
    ):
        run(**few)
    assert few["reservation"].state == "reserved"
    ledger.cancel(few["reservation"].number)
    result = run(**held(ledger, 100))  # without a word
    assert result.verdict.is_for_release


@pytest.mark.parametrize("anew", [False, True])
def test_a_charge_pays_for_one_vote(ledger: Ledger, anew: bool) -> None:
    """Two votes have noise of their own each: together they cost twice what was charged."""
    given = held(ledger, 100)
    first, number = run(**given), given["reservation"].number
    assert first.verdict.is_for_release
    again = given | ({"reservation": ledger.hold(number)} if anew else {})  # as another process would
    with pytest.raises(PdpsgdError, match=f"Run {number} was begun before, and has released steps"):
        run(**again)
    again["reservation"].finish()
    assert ledger.check().passed


def test_several_processes_do_not_vote_each_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdpsgd.pate.running.Ranks.join", lambda: Ranks(1, 2))
    with pytest.raises(PdpsgdError, match=r"Expected one process: .* Got several"):
        run()


def test_a_student_without_examples_is_refused() -> None:
    with pytest.raises(PdpsgdError, match="Got 0 and 0"):
        train_student(torch.nn.Linear(2, 2), torch.zeros(0, 2), torch.zeros(0, 2))


def test_teachers_and_student_may_be_networks_and_a_seed_repeats_them() -> None:
    def network() -> torch.nn.Module:
        return torch.nn.Sequential(
            torch.nn.Flatten(), torch.nn.Linear(64, 16), torch.nn.Tanh(), torch.nn.Linear(16, 10)
        )

    one, other = (run(planned=few_teachers(), network=network, seed=0) for _ in range(2))
    assert [type(layer) for layer in one.student] == [type(layer) for layer in network()]
    for a, b in zip(one.student.parameters(), other.student.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_network_of_other_classes_is_refused_before_anything_is_begun() -> None:
    with pytest.raises(PdpsgdError, match="gives 10 numbers"):
        run(network=lambda: torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 3)))


@pytest.mark.parametrize("shares", ["all", "a layer", "statistics"])
def test_networks_that_share_what_they_learn_are_refused(shares: str) -> None:
    """One network for all teachers has everybody's records in it, and so has the student that it then is."""
    whole = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(FEATURES, 10))
    norm = torch.nn.BatchNorm1d(FEATURES).requires_grad_(False)

    def make() -> torch.nn.Module:
        if shares == "all":
            return whole
        first = whole[1] if shares == "a layer" else torch.nn.Linear(FEATURES, 10)
        parts = [torch.nn.Flatten(), *([norm] if shares == "statistics" else []), first]
        return torch.nn.Sequential(*parts)

    with pytest.raises(PdpsgdError, match="makes a new network each time"):
        run(network=make)


def linear(weight: torch.nn.Parameter) -> torch.nn.Module:
    layer = torch.nn.Linear(FEATURES, 10)
    layer.weight = weight
    return layer


def alternating() -> Any:
    """Every other network has the layer that the first one had."""
    first, made = torch.nn.Linear(FEATURES, 10), iter(range(10**6))
    return lambda: first if next(made) % 2 == 0 else torch.nn.Linear(FEATURES, 10)


def alternating_late() -> Any:
    """As above, but not among the networks that are tried before anything is begun; laid out anew by training."""
    first, made = torch.nn.Conv2d(1, 10, 8), iter(range(10**6))
    return lambda: first if next(made) in (4, 7) else torch.nn.Conv2d(1, 10, 8)


def of_one_memory() -> Any:
    """New parameters each time, over the same memory, which nothing but the function holds in between."""
    memory = torch.zeros(10, FEATURES)
    return lambda: linear(torch.nn.Parameter(memory))


def kept_beside() -> Any:
    """A tensor that is no weight, written to by each network in turn."""

    class Counting(torch.nn.Linear):
        seen = torch.zeros(FEATURES)

        def __init__(self) -> None:
            super().__init__(FEATURES, 10)
            self.own = self.seen

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            if self.training:
                self.own.add_(inputs.detach().mean(0))
            return super().forward(inputs + self.own)

    return Counting


@pytest.mark.parametrize("make", [alternating, alternating_late, of_one_memory, kept_beside])
def test_networks_are_new_each_time_and_not_only_at_the_beginning(make: Any) -> None:
    layer = make()
    convolves = make is alternating_late

    def network() -> torch.nn.Module:
        shape = (1, 8, 8) if convolves else (FEATURES,)
        return torch.nn.Sequential(
            torch.nn.Flatten(), torch.nn.Unflatten(1, shape), layer(), torch.nn.Flatten()
        )

    with pytest.raises(PdpsgdError, match="makes a new network each time"):
        run(network=network, planned=few_teachers())


def test_a_student_is_no_part_of_a_teacher() -> None:
    student = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(FEATURES, 10))
    networks = iter([student])
    with pytest.raises(PdpsgdError, match="makes a new network each time"):
        run(
            network=lambda: (
                next(networks, None) or torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(FEATURES, 10))
            ),
            student=student,
            planned=few_teachers(),
        )


def test_networks_may_share_what_nobody_writes_to() -> None:
    constant = torch.full((FEATURES,), 0.5)

    class Shifted(torch.nn.Linear):
        def __init__(self) -> None:
            super().__init__(FEATURES, 10)
            self.constant = constant

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return super().forward(inputs - self.constant)

    found = run(network=lambda: torch.nn.Sequential(torch.nn.Flatten(), Shifted()), planned=few_teachers())
    assert found.verdict.outcome == "holds for all"


def test_networks_may_share_what_is_frozen() -> None:
    frozen = torch.nn.Linear(FEATURES, FEATURES).requires_grad_(False)
    found = run(
        network=lambda: torch.nn.Sequential(torch.nn.Flatten(), frozen, torch.nn.Linear(FEATURES, 10))
    )
    assert found.verdict.outcome == "holds for all"


def test_teachers_who_agree_on_nothing_leave_no_student(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(run(seed=0).answers.labels)
    monkeypatch.setattr(
        "pdpsgd.pate.running.vote_counts", lambda *_, **__: torch.full((len(PUBLIC), 10), -1e6)
    )
    with pytest.raises(PdpsgdError, match=r"questions at least. Got none: the teachers do not agree"):
        run(seed=0)


def test_nobody_is_with_one_teacher_twice() -> None:
    planned = plan_votes(BUDGETS, "i-pate-upsample", settings=SETTINGS)
    most = max(planned.copies)
    level = planned.plan.level_of_person(BUDGETS)
    fewer = replace(planned, settings=replace(planned.settings, teachers=most - 1))
    with pytest.raises(PdpsgdError, match=rf"Expected at least {most} teachers\. Got {most - 1}\."):
        assign_people(fewer, level, seed=0)
    just = replace(planned, settings=replace(planned.settings, teachers=most))
    for teacher in assign_people(just, level, seed=0):
        assert len(np.unique(teacher.people)) == len(teacher.people)
