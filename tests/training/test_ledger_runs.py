"""Runs in a ledger: reserved, started before records are read, resumed under their reservation, finished."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from pdpsgd import Budgets, PdpsgdError, PrivacyEngine, fit
from pdpsgd import plan as make_plan
from pdpsgd.ledger import Ledger, LedgerUnavailable
from pdpsgd.ledger import reserved_run as waiting

PEOPLE = 60
RNG = np.random.default_rng(0)
DATA = (RNG.normal(size=(PEOPLE, 4)).astype(np.float32), RNG.integers(0, 2, PEOPLE))
LISTED = Budgets([1.0, 2.0, 4.0] * 20, ids=[f"p{i}" for i in range(PEOPLE)])
SETTINGS: dict[str, Any] = {"steps": 6, "batch_size": 10, "learning_rate": 0.1, "progress": False}


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger.create(tmp_path / "people.ledger")


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(4, 2)


def test_a_run_is_entered_and_says_what_it_took(ledger: Ledger, tmp_path: Path) -> None:
    result = fit(network(), DATA, LISTED, ledger=ledger, run_folder=tmp_path / "january", **SETTINGS)
    (run,) = ledger.runs()
    assert (run.state, run.attempt, run.name, run.people) == ("finished", 1, "january", PEOPLE)
    assert result.verdict.is_for_release
    assert result.ledger is not None
    assert (result.ledger["id"], result.ledger["run"]) == (ledger.id, 1)
    assert ledger.check(head=result.ledger["head"]).passed  # the head of a moment of this ledger
    tiers = result.ledger["tiers"]
    assert [tier["epsilon"] for tier in tiers] == [1, 2, 4]
    assert all(tier["spent_before"] == 0 < tier["this_run"] < tier["left"] for tier in tiers)
    written = json.loads((tmp_path / "january/public/result.json").read_text())
    assert written["ledger"]["run"] == 1
    assert json.loads((tmp_path / "january/public/settings.json").read_text())["ledger"]["head"]
    assert json.loads((tmp_path / "january/public/plan.json").read_text())["ledger"] == {
        "id": ledger.id,
        "run": 1,
    }


def test_the_whole_is_taken_if_asked_and_the_next_run_finds_nothing(ledger: Ledger) -> None:
    fit(network(), DATA, LISTED, ledger=ledger, spend="all", **SETTINGS)
    assert all(tier.mean_share_left < 0.01 for tier in ledger.tiers())
    ledger.consent(Budgets([0.0] * PEOPLE, ids=LISTED.ids))
    nothing = Budgets([0.0] * PEOPLE, ids=LISTED.ids)
    with pytest.raises(PdpsgdError, match="Expected people who have something left in the ledger"):
        fit(network(), DATA, nothing, ledger=ledger, **SETTINGS)


def test_the_place_of_a_ledger_is_enough_and_newcomers_are_enrolled(ledger: Ledger, tmp_path: Path) -> None:
    first = Budgets(LISTED.epsilon[:30], ids=LISTED.ids[:30])
    some = (DATA[0][:30], DATA[1][:30])
    fit(network(), some, first, ledger=tmp_path / "people.ledger", **SETTINGS)
    fit(network(), DATA, LISTED, ledger=tmp_path / "people.ledger", **SETTINGS)
    assert len(ledger) == PEOPLE
    assert [len(ledger.person(name).charges) for name in ("p0", "p59")] == [2, 1]


@pytest.mark.filterwarnings("error:Expect")
def test_too_much_noise_is_warned_of_before_anybody_is_enrolled_or_charged(
    ledger: Ledger, tmp_path: Path
) -> None:
    head, strict = ledger.head, Budgets([0.1] * PEOPLE, ids=LISTED.ids)
    with pytest.raises(UserWarning, match="People are charged for this run"):
        fit(nn.Linear(4, 2), DATA, strict, ledger=ledger, run_folder=tmp_path / "january", **SETTINGS)
    assert ledger.head == head
    assert not ledger.runs()
    assert not (tmp_path / "january" / "private" / "reservation.json").exists()


@pytest.mark.filterwarnings("error:Expect")
def test_of_a_plan_with_enough_signal_nothing_is_said(ledger: Ledger) -> None:
    many = Budgets([8.0] * PEOPLE, ids=LISTED.ids)
    fit(nn.Linear(4, 2), DATA, many, ledger=ledger, **{**SETTINGS, "batch_size": PEOPLE}, spend="all")


def test_a_list_never_changes_what_somebody_allowed(ledger: Ledger) -> None:
    ledger.enroll(LISTED)
    ledger.consent(Budgets([0.5], ids=["p2"]))
    with pytest.raises(
        PdpsgdError, match=r"'p2' allows epsilon 0\.5 .* there, and 4 .* pdpsgd ledger consent"
    ):
        fit(network(), DATA, LISTED, ledger=ledger, **SETTINGS)
    assert ledger.runs() == []


def test_records_are_matched_by_place_in_the_order_of_the_list_not_of_the_ledger(ledger: Ledger) -> None:
    """The ledger knows these people in another order; whose record is whose must not follow it."""
    ledger.enroll(Budgets(LISTED.epsilon[::-1].copy(), ids=LISTED.ids[::-1].copy()))
    seen = {}
    engine = PrivacyEngine(watch_loop=False)
    from pdpsgd.training.booking import book
    from pdpsgd.training.options import TrainingOptions

    held = book(ledger, budgets=LISTED, options=TrainingOptions(steps=6, batch_size=10))
    model = network()
    engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=[torch.from_numpy(part) for part in DATA],
        plan=held.plan,
        reservation=held,
    )
    seen = dict(zip(held.plan.roster.ids.tolist(), engine.record_of_person.tolist(), strict=True))  # type: ignore[union-attr]
    assert seen == {f"p{i}": i for i in range(PEOPLE)}
    engine.close()


def test_running_is_committed_before_records_are_read(ledger: Ledger) -> None:
    states = []

    class Records(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return PEOPLE

        def __getitem__(self, index: int) -> Any:
            states.append(Ledger(ledger.place).run(1).state)
            return torch.from_numpy(DATA[0][index]), int(DATA[1][index])

    fit(network(), Records(), LISTED, ledger=ledger, **SETTINGS)
    assert states
    assert set(states) == {"running"}


def test_what_fails_before_the_start_is_cancelled_and_later_stays_charged(ledger: Ledger) -> None:
    with pytest.raises(PdpsgdError, match="mixes the examples"):
        fit(
            nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)),
            DATA,
            LISTED,
            ledger=ledger,
            **SETTINGS,
        )
    assert (len(ledger), ledger.runs()) == (0, [])  # nobody was there before: nobody is now
    ledger.enroll(LISTED)
    with pytest.raises(PdpsgdError, match="mixes the examples"):
        fit(nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2)), DATA, LISTED, ledger=ledger, **SETTINGS)
    assert [run.state for run in ledger.runs()] == ["cancelled"]
    assert ledger.person("p0").spent_epsilon == 0

    class Failing(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        fit(Failing(4, 2), DATA, LISTED, ledger=ledger, **SETTINGS)
    assert [run.state for run in ledger.runs()] == ["cancelled", "killed"]
    assert ledger.person("p0").spent_epsilon > 0


def stop_after(monkeypatch: pytest.MonkeyPatch, steps: int) -> None:
    from pdpsgd.training.trainer import Trainer

    real, taken = Trainer._set_learning_rate, []

    def count(self: Trainer, step: int) -> None:
        taken.append(step)
        if len(taken) > steps:
            raise KeyboardInterrupt
        real(self, step)

    monkeypatch.setattr(Trainer, "_set_learning_rate", count)


def test_an_interrupted_run_resumes_under_its_own_reservation(
    ledger: Ledger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    how = {**SETTINGS, "run_folder": tmp_path / "run", "checkpoint_every": 1, "ledger": ledger}
    with monkeypatch.context() as patch:
        stop_after(patch, 3)
        with pytest.raises(KeyboardInterrupt):
            fit(network(), DATA, LISTED, **how)
    spent = ledger.person("p1").spent_epsilon
    assert ledger.runs()[0].state == "killed"
    result = fit(network(), DATA, LISTED, resume=True, **how)
    (run,) = ledger.runs()
    assert (run.state, run.attempt) == ("finished", 2)
    assert ledger.person("p1").spent_epsilon == spent
    assert result.ledger is not None
    assert result.ledger["attempt"] == 2
    whole = fit(network(), DATA, LISTED, plan=ledger.hold(1).plan, **SETTINGS)
    assert [reason.code for reason in whole.verdict.reasons] == [
        "ledger-off"
    ]  # the plan without its reservation


@pytest.mark.parametrize("moment", ["reserve", "begin"])
def test_a_process_killed_before_its_first_checkpoint_leaves_a_reservation_that_the_next_one_finds(
    ledger: Ledger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """As SIGKILL does it: nothing is told to the ledger after `moment`."""

    class Killed(BaseException):
        pass

    how = {**SETTINGS, "run_folder": tmp_path / "run", "ledger": ledger}
    with monkeypatch.context() as patch:
        real = getattr(Ledger, moment)

        def kill(self: Ledger, *given: Any, **named: Any) -> Any:
            real(self, *given, **named)
            raise Killed

        patch.setattr(Ledger, moment, kill)
        patch.setattr(waiting.ReservedRun, "give_up", lambda self: None)
        with pytest.raises(Killed):
            fit(network(), DATA, LISTED, **how)
    (run,) = ledger.runs()
    assert run.state == {"reserve": "reserved", "begin": "running"}[moment]
    fit(network(), DATA, LISTED, **how)
    (run,) = ledger.runs()
    assert (run.state, run.attempt) == ("finished", {"reserve": 1, "begin": 2}[moment])


def test_a_run_killed_after_its_last_file_is_finished_by_the_next_look(
    ledger: Ledger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    how = {**SETTINGS, "run_folder": tmp_path / "run", "ledger": ledger}
    with monkeypatch.context() as patch:
        patch.setattr(waiting.ReservedRun, "finish", lambda self: None)
        fit(network(), DATA, LISTED, **how)
    assert ledger.runs()[0].state == "running"
    with pytest.raises(PdpsgdError, match="without a finished run"):
        fit(network(), DATA, LISTED, **how)
    assert [run.state for run in ledger.runs()] == ["finished"]


def test_the_older_process_stops_by_itself(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "SECONDS_BETWEEN_CHECKS", 0.0)

    class TakenOver(nn.Linear):
        calls = 0

        def forward(self, input: torch.Tensor) -> torch.Tensor:
            type(self).calls += 1
            if self.calls == 8:
                ledger.resume(1)  # another process
            return super().forward(input)

    with pytest.raises(PdpsgdError, match="nother process has taken it over"):
        fit(TakenOver(4, 2), DATA, LISTED, ledger=ledger, **{**SETTINGS, "steps": 20})
    assert (ledger.runs()[0].state, ledger.runs()[0].attempt) == ("running", 2)


def test_a_ledger_out_of_reach_does_not_stop_a_run_that_is_charged(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting, "SECONDS_BETWEEN_CHECKS", 0.0)

    def lost(self: Ledger, run: int, attempt: int) -> None:
        raise LedgerUnavailable("The ledger cannot be used: the connection was lost.")

    monkeypatch.setattr(Ledger, "check_attempt", lost)
    with pytest.warns(UserWarning, match="The run is charged, and goes on"):
        fit(network(), DATA, LISTED, ledger=ledger, **SETTINGS)
    assert ledger.runs()[0].state == "finished"


def test_own_loops_train_under_a_reservation(ledger: Ledger) -> None:
    ledger.enroll(LISTED)
    made = ledger.plan(steps=6, batch_size=10)
    with ledger.running(made, name="January") as run:
        model, engine = network(), PrivacyEngine()
        module, optimizer, loader = engine.make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data_loader=[torch.from_numpy(part) for part in DATA],
            plan=made,
            reservation=run,
            record_ids=LISTED.ids,
        )
        for inputs, targets in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(module(inputs), targets).backward()
            optimizer.step()
        assert engine.verdict().is_for_release
        engine.close()
    assert ledger.run(run.number).state == "finished"


def test_another_plan_than_the_reserved_one_is_refused(ledger: Ledger) -> None:
    ledger.enroll(LISTED)
    reserved = ledger.hold(ledger.reserve(ledger.plan(steps=6, batch_size=10)).number)
    model = network()
    with pytest.raises(PdpsgdError, match="as they were reserved in the ledger"):
        PrivacyEngine().make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data_loader=[torch.from_numpy(part) for part in DATA],
            plan=ledger.plan(steps=7, batch_size=10),
            reservation=reserved,
        )
    assert ledger.run(reserved.number).state == "reserved"


def test_every_run_has_randomness_of_its_own(ledger: Ledger) -> None:
    """Two runs from the same weights, on the same records: only samples and noise differ."""
    first, second = (
        fit(network(), DATA, LISTED, ledger=ledger, spend="1 of 4", **SETTINGS).model for _ in range(2)
    )
    assert not torch.equal(first.weight, second.weight)  # type: ignore[arg-type]


def test_a_plan_of_its_own_needs_no_ledger() -> None:
    made = make_plan(LISTED, steps=6, batch_size=10)
    assert fit(network(), DATA, LISTED, plan=made, **SETTINGS).verdict.is_for_release


def test_who_lowered_below_what_was_spent_is_an_exception_and_not_used(ledger: Ledger) -> None:
    fit(network(), DATA, LISTED, ledger=ledger, spend=0.5, **SETTINGS)
    ledger.consent(Budgets([0.1], ids=["p1"]))
    listed = Budgets(np.where(LISTED.ids == "p1", 0.1, LISTED.epsilon), ids=LISTED.ids)
    result = fit(network(), DATA, listed, ledger=ledger, **SETTINGS)
    assert [(reason.code, reason.people) for reason in result.verdict.reasons] == [("above-budget", 1)]
    assert "p1" in result.plan.people_with_nothing_left()


def test_who_withdrew_after_being_used_is_an_exception_and_not_used(ledger: Ledger) -> None:
    """The headline was "holds for all" over people from whom earlier runs had taken what they no longer allow."""
    ledger.enroll(LISTED)
    ledger.consent(Budgets([0.0], ids=["p2"]))  # before any run: nothing was taken from p2
    listed = Budgets(np.where(LISTED.ids == "p2", 0.0, LISTED.epsilon), ids=LISTED.ids)
    first = fit(network(), DATA, listed, ledger=ledger, spend=0.5, **SETTINGS)
    assert (first.verdict.outcome, first.verdict.reasons) == ("holds for all", ())
    ledger.consent(Budgets([0.0], ids=["p1"]))
    listed = Budgets(np.where(LISTED.ids == "p1", 0.0, listed.epsilon), ids=LISTED.ids)
    result = fit(network(), DATA, listed, ledger=ledger, **SETTINGS)
    assert result.verdict.outcome == "holds, except"
    assert [(reason.code, reason.people) for reason in result.verdict.reasons] == [("withdrawn", 1)]
    assert result.verdict.headline == f"The promise holds for {PEOPLE - 1} of {PEOPLE} people."
    assert "p1" in result.plan.people_with_nothing_left()


def test_a_ledger_knows_no_people_without_ids(ledger: Ledger) -> None:
    with pytest.raises(PdpsgdError, match="Expected people with ids"):
        fit(network(), DATA, Budgets([1.0] * PEOPLE), ledger=ledger, **SETTINGS)


def test_a_charge_pays_for_one_set_of_noise(ledger: Ledger, tmp_path: Path) -> None:
    ledger.enroll(LISTED)
    made = ledger.plan(steps=6, batch_size=10)
    run = ledger.reserve(made).number

    def begin(checkpoint: Path | None = None) -> tuple[PrivacyEngine, nn.Module]:
        engine, model = PrivacyEngine(), network()
        engine.make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data_loader=[torch.from_numpy(part) for part in DATA],
            plan=made,
            reservation=ledger.hold(run),
            record_ids=LISTED.ids,
        )
        if checkpoint is not None:
            engine.resume(checkpoint)
        return engine, model

    def take(engine: PrivacyEngine, model: nn.Module, steps: int) -> None:
        for _, (inputs, targets) in zip(range(steps), engine.loader, strict=False):
            engine.optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), targets).backward()
            engine.optimizer.step()

    begin()  # a process that ends before it has released anything leaves the charge for the next one
    engine, model = begin()
    engine.save(tmp_path / "checkpoint")
    take(engine, model, 2)
    engine, model = begin()
    with pytest.raises(PdpsgdError, match="Run 1 was begun before, and has released steps"):
        take(engine, model, 1)
    assert torch.equal(model.state_dict()["weight"], network().state_dict()["weight"])
    engine, model = begin(tmp_path / "checkpoint")
    take(engine, model, 6)
    assert engine.steps_left == 0
    engine.close()
    assert ledger.check().passed


def test_a_reserved_run_never_matches_records_by_the_order_of_the_ledger(ledger: Ledger) -> None:
    """Somebody strict would be sampled at the rate of somebody lax."""
    ledger.enroll(Budgets(LISTED.epsilon[::-1].copy(), ids=LISTED.ids[::-1].copy()))
    strict = {}
    for given in ({"budgets": LISTED}, {"record_ids": LISTED.ids}):
        run = ledger.hold(ledger.reserve(ledger.plan(steps=6, batch_size=10)).number)
        fit(network(), DATA, reservation=run, **given, **{**SETTINGS, "steps": None, "batch_size": None})
        strict[next(iter(given))] = run.plan.roster
    assert strict["budgets"].ids.tolist() == LISTED.ids.tolist()  # type: ignore[union-attr]
    run = ledger.hold(ledger.reserve(ledger.plan(steps=6, batch_size=10)).number)
    with pytest.raises(PdpsgdError, match=r"Expected record_ids \(the person of each record\)"):
        fit(network(), DATA, reservation=run, progress=False)
    assert ledger.run(run.number).state == "cancelled"


@pytest.mark.parametrize("again", [False, True])
def test_a_run_is_not_trained_twice(ledger: Ledger, again: bool) -> None:
    ledger.enroll(LISTED)
    number = ledger.reserve(ledger.plan(steps=6, batch_size=10)).number
    run = ledger.hold(number)
    fit(network(), DATA, LISTED, reservation=run, progress=False)
    with pytest.raises(PdpsgdError, match="finished"):
        fit(network(), DATA, LISTED, reservation=ledger.hold(number) if again else run, progress=False)
