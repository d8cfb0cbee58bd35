"""A run folder keeps apart what is public, what belongs to each person, and what is the operator's own."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

import pdpsgd
from pdpsgd.errors import PdpsgdError
from pdpsgd.training.finished_run import read_run
from pdpsgd.training.run_folder import RunFolder, write_atomically


def everything_in(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file())


def test_promises_say_in_plain_numbers_what_the_plan_proves(problem, tmp_path):
    budgets = pdpsgd.Budgets([1.0] * 60 + [4.0] * 40, ids=[f"p{index}" for index in range(100)])
    plan = pdpsgd.plan(budgets, steps=3, batch_size=10)
    problem.fit(plan=plan, budgets=budgets, record_ids=budgets.ids, run_folder=tmp_path)
    with (tmp_path / "people" / "promises.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert [line["id"] for line in lines] == budgets.ids.tolist()
    for line in lines:
        level = plan.levels[int(line["level"])]
        assert float(line["proven_epsilon"]) == level.proven_epsilon <= float(line["asked_epsilon"])
        assert float(line["proven_delta"]) == level.delta <= float(line["asked_delta"])


def test_nothing_half_written_stays_behind_where_the_content_ends_with_an_error(tmp_path):
    def lines():
        yield "one\n"
        raise PdpsgdError("no more")

    (tmp_path / "file").write_text("before")
    with pytest.raises(PdpsgdError, match="no more"):
        write_atomically(tmp_path / "file", lines())
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"file": "before"}


def test_nobody_is_named_in_public_though_the_plan_has_to_say_who_is_on_which_level(problem, tmp_path):
    """A plan with a history holds a list of ids: people of like budgets may have spent differently."""
    names = [f"person-{index}" for index in range(100)]
    first = pdpsgd.plan(pdpsgd.Budgets([1.0] * 60, ids=names[:60]), steps=3, batch_size=5)
    budgets = pdpsgd.Budgets([2.0] * 100, ids=names)
    plan = pdpsgd.plan(budgets, steps=3, batch_size=10, history=[first], history_fixed=True)
    assert "person-7" in plan.to_json()
    problem.fit(plan=plan, budgets=budgets, record_ids=names, run_folder=tmp_path)
    assert b"person-" not in everything_in(tmp_path / "public")
    assert b"person-7" in (tmp_path / "people" / "promises.csv").read_bytes()
    again = RunFolder(tmp_path).read_plan(with_people=True)
    assert again.level_of_person(budgets).tolist() == plan.level_of_person(budgets).tolist()
    settings = json.loads((tmp_path / "public" / "settings.json").read_text())
    assert settings["plan"] == RunFolder(tmp_path).read_plan().digest


def test_an_ordinary_plan_is_written_once(problem, tmp_path):
    problem.fit(run_folder=tmp_path)
    assert [path.name for path in (tmp_path / "people").iterdir()] == ["promises.csv"]


def test_the_key_is_in_private_alone(problem, tmp_path):
    from pdpsgd.engine import checkpoints

    def stop_late(done):
        if done > 0.8:
            raise RuntimeError("the machine goes down")
        return 1.0

    with pytest.raises(RuntimeError, match="goes down"):
        problem.fit(
            run_folder=tmp_path, seed=None, schedule=stop_late, test_data=problem.test, evaluate_every=5
        )
    key = checkpoints.load(tmp_path / "private" / "checkpoint.safetensors").key
    assert key is not None
    shown = everything_in(tmp_path / "public") + everything_in(tmp_path / "people")
    assert key not in shown
    assert key.hex().encode() not in shown


@pytest.mark.parametrize("name", ["result.json", "checkpoint.safetensors"])
def test_a_folder_of_version_0_1_is_refused_with_what_to_do(problem, tmp_path, name):
    (tmp_path / name).write_text("{}")
    for use in (lambda: problem.fit(run_folder=tmp_path, resume=True), lambda: read_run(tmp_path)):
        with pytest.raises(PdpsgdError, match=r"of version 0\.1.* move promises\.csv to people/"):
            use()
    assert not (tmp_path / "public").exists()


def test_what_the_message_says_makes_an_old_folder_readable(problem, tmp_path):
    problem.fit(run_folder=tmp_path / "run")
    old = tmp_path / "old"
    old.mkdir()
    for path in (tmp_path / "run").rglob("*.*"):
        path.rename(old / path.name)
    with pytest.raises(PdpsgdError, match="public/"):
        read_run(old)
    for name in ("public", "people", "private"):
        (old / name).mkdir()
    (old / "promises.csv").rename(old / "people" / "promises.csv")
    (old / "checkpoint.safetensors").rename(old / "private" / "checkpoint.safetensors")
    for path in [path for path in old.iterdir() if path.is_file()]:
        path.rename(old / "public" / path.name)
    assert read_run(old).plan.people == 100


def test_a_folder_with_other_files_in_it_is_taken_without_a_word(problem, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    problem.fit(run_folder=tmp_path)
    assert read_run(tmp_path).plan.people == 100


def test_a_folder_that_another_version_wrote_is_named(problem, tmp_path):
    problem.fit(run_folder=tmp_path)
    folder = RunFolder(tmp_path)
    assert folder.version_note() is None
    settings, result = (
        json.loads((tmp_path / "public" / name).read_text()) for name in ("settings.json", "result.json")
    )
    (tmp_path / "public" / "settings.json").write_text(json.dumps(settings | {"version": "7.0"}))
    assert "was written by version 7.0 of pdpsgd" in folder.version_note()
    (tmp_path / "public" / "settings.json").write_text(json.dumps(settings | {"version": None}))
    assert folder.version_note() is None  # the result says it, too
    (tmp_path / "public" / "result.json").write_text(json.dumps(result | {"versions": {}}))
    assert "by a version that does not say which" in folder.version_note()


def test_of_two_that_claim_one_folder_one_has_it_and_an_empty_one_goes(tmp_path):
    folder = RunFolder(tmp_path / "runs" / "people")
    assert folder.claim()
    assert not RunFolder(tmp_path / "runs" / "people").claim()
    with folder.removed_if_empty():
        pass
    assert not (tmp_path / "runs").exists()
    folder.claim()
    with folder.removed_if_empty():
        (folder.path / "result").touch()
    assert folder.path.exists()
