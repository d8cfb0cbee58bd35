"""An own loop leaves the run folder that `fit` leaves, and everything that reads one reads it."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import pdpsgd
from pdpsgd.audit.individual import audit_individual
from pdpsgd.cli import app
from pdpsgd.engine.checks.row_rounding import NOT_TRIED, Settled
from pdpsgd.engine.layout import Layout

PEOPLE = 40
INPUTS = torch.randn(PEOPLE, 4, generator=torch.Generator().manual_seed(0))
TARGETS = (INPUTS.sum(1) > 0).long()
BUDGETS = pdpsgd.Budgets([1.0, 4.0] * (PEOPLE // 2), 1e-3, ids=[f"p{i}" for i in range(PEOPLE)])


def loop(*, steps: int = 4, taken: int | None = None, model: nn.Module | None = None, **private: Any) -> Any:
    """Train as a user would, and return the engine."""
    module = model or nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))
    plan = private.pop("plan", None) or pdpsgd.plan(BUDGETS, steps=steps, batch_size=10)
    engine = pdpsgd.PrivacyEngine()
    sgd = torch.optim.SGD(module.parameters(), lr=0.5)
    module, optimizer, loader = engine.make_private(
        module=module, optimizer=sgd, data_loader=(INPUTS, TARGETS), plan=plan, budgets=BUDGETS, **private
    )
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(sgd, steps)
    for number, (inputs, targets) in enumerate(loader):
        if number == taken:
            break
        optimizer.zero_grad()
        nn.functional.cross_entropy(module(inputs), targets).backward()
        optimizer.step()
        scheduler.step()
    return engine


@pytest.mark.parametrize("assumed", [None, NOT_TRIED])
def test_the_page_says_what_is_assumed_of_the_model(tmp_path, monkeypatch, assumed):
    monkeypatch.setattr("pdpsgd.engine.assembly.settle_layout", lambda *_, **__: Settled(Layout(), assumed))
    result = pdpsgd.write_run(loop(), tmp_path / "own", classes=["no", "yes"])
    assert result.verdict.outcome == "holds for all"
    page = (tmp_path / "own" / "public" / "report.html").read_text()
    assert ("It is assumed that kernels round a row" in page) == (assumed is not None)
    assert pdpsgd.load_run(tmp_path / "own") is not None


def files_of(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_the_folder_is_that_of_fit_and_report_letter_predict_and_load_run_read_it(tmp_path):
    engine = loop()
    told = {"classes": ["no", "yes"], "data": "records", "operator": "Us", "contact": "a@example.org"}
    test = (-INPUTS[:10], 1 - TARGETS[:10])
    result = pdpsgd.write_run(engine, tmp_path / "own", test_data=test, settings={"epochs": 2}, **told)
    assert result.verdict.outcome == "holds for all"
    fitted = pdpsgd.fit(
        nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)), (INPUTS, TARGETS), BUDGETS, steps=4,
        batch_size=10, run_folder=tmp_path / "fit", progress=False,
    )  # fmt: skip
    assert fitted.run_folder is not None
    ours = files_of(tmp_path / "own")
    assert files_of(tmp_path / "fit") - ours == {"private/checkpoint.safetensors"}
    assert ours - files_of(tmp_path / "fit") == {"public/report.html"}
    settings = json.loads((tmp_path / "own" / "public" / "settings.json").read_text())
    assert (settings["epochs"], settings["learning_rate"], settings["optimizer"]) == (2, 0.5, "sgd")
    rows = list(csv.DictReader((tmp_path / "own" / "people" / "promises.csv").read_text().splitlines()))
    assert [float(row["asked_epsilon"]) for row in rows] == BUDGETS.epsilon.tolist()
    found = pdpsgd.load_run(tmp_path / "own").predict(INPUTS[:3].numpy())
    with torch.no_grad():
        expected = [("no", "yes")[i] for i in result.model(INPUTS[:3]).argmax(1).tolist()]
    assert list(found) == expected
    for command in (
        ("report", "own"),
        ("report", "own", "--person", "p3"),
        ("plan", "own/public/plan.json", "--verify"),
    ):
        done = CliRunner().invoke(app, [command[0], str(tmp_path / command[1]), *command[2:]])
        assert done.exit_code == 0, done.output


def test_a_reserved_run_is_finished_in_the_ledger_with_what_it_took(tmp_path):
    ledger = pdpsgd.Ledger.create(tmp_path / "people.ledger")
    ledger.enroll(BUDGETS)
    plan = ledger.plan(spend="1 of 4", steps=3, batch_size=10)
    with ledger.running(plan, name="spring") as run:
        engine = loop(steps=3, plan=run.plan, reservation=run, record_ids=BUDGETS.ids)
        result = pdpsgd.write_run(engine, tmp_path / "own")
        assert ledger.run(run.number).state == "finished"
    assert result.ledger is not None
    assert result.ledger["run"] == run.number
    assert "Over all runs" in (tmp_path / "own" / "public" / "report.html").read_text()


def test_a_reserved_run_does_not_begin_where_it_is_not_said_whose_record_is_whose(tmp_path):
    """The ledger's people stand in another order: everybody would be trained on at somebody else's budget."""
    ledger = pdpsgd.Ledger.create(tmp_path / "people.ledger")
    ledger.enroll(BUDGETS)
    run = ledger.hold(ledger.reserve(ledger.plan(spend="1 of 4", steps=3, batch_size=10)).number)
    module = nn.Linear(4, 2)
    things = {
        "module": module,
        "optimizer": torch.optim.SGD(module.parameters(), lr=0.5),
        "data_loader": (INPUTS, TARGETS),
        "plan": run.plan,
        "reservation": run,
    }
    with pytest.raises(pdpsgd.PdpsgdError, match=r"Expected record_ids .*in an order of its own\. Got none"):
        pdpsgd.PrivacyEngine().make_private(**things)
    assert ledger.run(run.number).state == "reserved"
    engine = pdpsgd.PrivacyEngine()
    engine.make_private(**things, record_ids=BUDGETS.ids)
    assert ledger.run(run.number).state == "running"
    engine.close()


def test_a_run_with_steps_left_is_refused_unless_it_is_said_and_nothing_is_written(tmp_path):
    engine = loop(taken=2)
    with pytest.raises(pdpsgd.PdpsgdError, match=r"2 left.*stopped_early=True"):
        pdpsgd.write_run(engine, tmp_path / "own")
    assert not (tmp_path / "own").exists()
    result = pdpsgd.write_run(engine, tmp_path / "own", stopped_early=True)
    assert [spent.epsilon for spent in result.spent] == [level.proven_epsilon for level in result.plan.levels]
    with pytest.raises(pdpsgd.PdpsgdError, match=r"erased|closed"):
        next(iter(engine.loader))


def test_a_folder_with_a_run_in_it_is_refused_and_the_engine_goes_on(tmp_path):
    pdpsgd.write_run(loop(), tmp_path / "own")
    engine = loop()
    with pytest.raises(pdpsgd.PdpsgdError, match="without a finished run"):
        pdpsgd.write_run(engine, tmp_path / "own")
    pdpsgd.write_run(engine, tmp_path / "other")


def test_test_people_who_are_trained_on_are_refused_and_nothing_is_written(tmp_path):
    engine = loop()
    with pytest.raises(pdpsgd.PdpsgdError, match="20 of 20 records that are among the records trained on"):
        pdpsgd.write_run(engine, tmp_path / "own", test_data=(INPUTS[:20].clone(), TARGETS[:20].clone()))
    assert not (tmp_path / "own" / "public").exists()
    pdpsgd.write_run(engine, tmp_path / "own", test_data=(-INPUTS[:20], TARGETS[:20]))


def test_a_seeded_loop_is_not_for_release_in_its_folder_either(tmp_path):
    result = pdpsgd.write_run(loop(seed=1), tmp_path / "own")
    assert not result.verdict.is_for_release
    assert json.loads((tmp_path / "own" / "public" / "result.json").read_text())["release_note"]


def test_norms_that_an_own_loop_kept_are_private_and_can_be_audited(tmp_path):
    pdpsgd.write_run(loop(keep_norms=True), tmp_path / "run")
    assert "keep_norms" not in json.loads((tmp_path / "run" / "public" / "settings.json").read_text())
    found = audit_individual(tmp_path / "run")
    rows = list(csv.DictReader(found.path.read_text().splitlines()))
    assert [row["id"] for row in rows] == [f"p{i}" for i in range(PEOPLE)]
    assert all(float(row["individual_epsilon"]) <= float(row["proven_epsilon"]) for row in rows)
    pdpsgd.write_run(loop(), tmp_path / "usual")
    assert "private/norms.safetensors" not in files_of(tmp_path / "usual")
