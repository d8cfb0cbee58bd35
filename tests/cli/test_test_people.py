"""Who is tested on is chosen from the list, and nobody loses a promise without a word."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from pdpsgd.budgets.budgets import Budgets
from pdpsgd.cli import app
from pdpsgd.data.people import hold_out, load_people
from pdpsgd.errors import PdpsgdError

SMALL = ("--steps", "4", "--batch-size", "30", "--no-report")
TABLE = ("--label", "income", "--id-column", "person")


def said(result: Any) -> str:
    return " ".join(result.output.split())


def write_list(path: str, epsilon_of: dict[str, float]) -> None:
    Path(path).write_text(
        "person,epsilon\n" + "".join(f"{name},{value:g}\n" for name, value in epsilon_of.items())
    )


def promised() -> set[str]:
    return {row["id"] for row in csv.DictReader(Path("run/people/promises.csv").read_text().splitlines())}


def test_who_is_set_aside_does_not_show_who_supplied_a_record(run: Callable[..., Any], people: Path) -> None:
    """A third of the list supplied nothing: the promises name the same people as if all had."""
    header, *lines = people.read_text().splitlines()
    write_list("list.csv", {line.split(",")[0]: 2 for line in lines})
    share = ("--budgets", "list.csv", "--test-share", "0.25", "--yes", "--run-folder", "run", *SMALL)
    assert run("train", people, *TABLE, *share).exit_code == 0
    with_all = promised()
    people.write_text("\n".join([header, *lines[40:]]) + "\n")
    Path("run").rename("before")
    assert run("train", people, *TABLE, *share).exit_code == 0
    assert promised() == with_all
    assert any(line.split(",")[0] not in with_all for line in lines[:40]), (
        "some without a record are set aside"
    )


def test_who_allows_nothing_is_not_tested_on(run: Callable[..., Any], people: Path) -> None:
    lines = people.read_text().splitlines()[1:]
    names = [line.split(",")[0] for line in lines]
    write_list("list.csv", {name: 0 if place % 2 else 2 for place, name in enumerate(names)})
    share = ("--budgets", "list.csv", "--test-share", "0.5", "--yes", "--run-folder", "run", *SMALL)
    result = run("train", people, *TABLE, *share, "--json", "f.json")
    assert result.exit_code == 0, result.output
    assert set(names[1::2]) <= promised()
    assert json.loads(Path("f.json").read_text())["evaluation"]["people"] == 120 - len(promised())


def test_a_table_of_test_people_who_allow_nothing_is_refused(run: Callable[..., Any], people: Path) -> None:
    Path("test.csv").write_text(
        "person,age,job,epsilon,delta,income\nt1,30,nurse,0,1e-5,low\nt2,60,nurse,1,1e-5,high\n"
    )
    result = run("train", people, *TABLE, "--delta-column", "delta", "--test-file", "test.csv", *SMALL)
    assert result.exit_code == 2
    assert "Got 1 at epsilon or delta 0" in said(result)


@pytest.mark.parametrize("command", ["train", "compare"])
def test_a_command_that_leaves_people_without_a_promise_wants_agreement(
    run: Callable[..., Any], people: Path, command: str
) -> None:
    share = ("--delta-column", "delta", "--test-share", "0.25", *SMALL)
    refused = run(command, people, *TABLE, *share)
    assert refused.exit_code == 2
    assert "Expected --yes" in said(refused)
    assert "nothing is promised to them" in said(refused)
    assert not Path("runs").exists(), "nothing was trained"


@pytest.mark.parametrize(("answer", "code"), [("y", 0), ("n", 2), ("", 2)])
def test_at_a_terminal_it_is_asked_and_only_yes_goes_on(
    monkeypatch: pytest.MonkeyPatch, people: Path, tmp_path: Path, answer: str, code: int
) -> None:
    monkeypatch.chdir(tmp_path)
    terminal = SimpleNamespace(stdin=SimpleNamespace(isatty=lambda: True))
    monkeypatch.setattr("pdpsgd.cli.agreement.sys", terminal)
    share = ("--delta-column", "delta", "--test-share", "0.25", *SMALL, "--run-folder", "run")
    arguments = [str(each) for each in ("train", people, *TABLE, *share)]
    result = CliRunner().invoke(app, arguments, input=f"{answer}\n")
    assert result.exit_code == code, result.output
    assert "nothing is promised to them" in said(result)
    assert Path("run").exists() == (code == 0)


def test_a_command_that_leaves_nobody_without_a_promise_asks_nothing(
    run: Callable[..., Any], people: Path
) -> None:
    result = run("train", people, *TABLE, "--delta-column", "delta", *SMALL, "--run-folder", "run")
    assert result.exit_code == 0, result.output
    assert "Go on?" not in result.output


def test_the_result_says_how_many_have_no_promise(run: Callable[..., Any], people: Path) -> None:
    share = ("--delta-column", "delta", "--test-share", "0.25", "--yes", "--run-folder", "run", *SMALL)
    run(
        "data",
        "schema",
        people,
        *TABLE,
        "--epsilon-column",
        "epsilon",
        "--delta-column",
        "delta",
        "-o",
        "s.toml",
    )
    Path("s.toml").write_text(Path("s.toml").read_text().replace("confirmed = false", "confirmed = true"))
    result = run("train", people, "--schema", "s.toml", *share)
    assert result.exit_code == 0, result.output
    found = json.loads(Path("run/public/result.json").read_text())["verdict"]
    assert found["outcome"] == "holds, except"
    assert f"The promise holds for {len(promised())} of 120 people." in said(result)


def test_ranges_learned_from_the_data_are_not_for_release_wherever_the_verdict_is_shown(
    run: Callable[..., Any], people: Path
) -> None:
    options = tuple(option for option in SMALL if option != "--no-report")
    result = run("train", people, *TABLE, "--delta-column", "delta", *options, "--run-folder", "run")
    assert result.exit_code == 0, result.output
    found = json.loads(Path("run/public/result.json").read_text())
    assert found["verdict"]["outcome"] == "not for release"
    assert [reason["code"] for reason in found["verdict"]["reasons"]] == ["schema-from-data"]
    assert "Not for release." in said(result)
    assert "This run is not for release." in Path("run/public/report.html").read_text()


def test_a_number_of_classes_that_was_read_from_the_targets_is_not_for_release(
    run: Callable[..., Any], tmp_path: Path
) -> None:
    arrays = {"inputs": np.zeros((60, 6, 6), np.uint8), "targets": np.arange(60) % 3}
    options = ("--tiers", "1:0.5,4:0.5", "--model", "linear", *SMALL)
    for name, more in (("learned", {}), ("declared", {"classes": ["a", "b", "c"]})):
        np.savez(tmp_path / f"{name}.npz", **arrays, **more)
        assert run("train", f"{name}.npz", *options, "--run-folder", name).exit_code == 0
    learned, declared = (
        json.loads(Path(name, "public", "result.json").read_text())["verdict"]["outcome"]
        for name in ("learned", "declared")
    )
    assert (learned, declared) == ("not for release", "holds for all")


def test_rows_without_ids_have_to_be_said_to_be_one_person_each(
    run: Callable[..., Any], people: Path
) -> None:
    options = ("--label", "income", "--delta-column", "delta", *SMALL, "--run-folder", "run")
    refused = run("train", people, *options)
    assert refused.exit_code == 2
    assert "--one-row-per-person" in said(refused)
    assert run("train", people, *options, "--one-row-per-person").exit_code == 0


def test_another_column_of_budgets_or_ids_is_no_feature(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text(
        "person,customer_id,age,Epsilon_2024,epsilon,aid,income\n"
        + "".join(
            f"p{i},{1000 + i},{20 + i},{i % 3},1,{i % 5},{'low' if i % 2 else 'high'}\n" for i in range(30)
        )
    )
    data = load_people(tmp_path / "t.csv", label="income", id_column="person", leave_out=["epsilon"])
    assert data.schema is not None
    assert data.schema.features == ("age", "aid")
    assert any("'customer_id', 'Epsilon_2024'" in note for note in data.notes)


def test_a_confirmed_schema_may_say_that_such_a_column_is_a_feature(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("person,delta_t,income\na,1,low\nb,2,high\n")
    (tmp_path / "s.toml").write_text(
        'label = "income"\nclasses = ["low", "high"]\nid_column = "person"\nconfirmed = true\n'
        '[columns.delta_t]\nkind = "numeric"\nlow = 0\nhigh = 5\n'
    )
    data = load_people(tmp_path / "t.csv", schema=tmp_path / "s.toml")
    assert data.input_shape == (1,)
    assert data.notes == ()
    assert not data.learned_from_data


def test_a_share_that_leaves_nobody_on_one_side_is_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "i.npz", inputs=np.zeros((9, 2, 2)), targets=np.arange(9) % 2, ids=np.arange(9))
    data = load_people(tmp_path / "i.npz")
    with pytest.raises(PdpsgdError, match="both sides"):
        hold_out(data, Budgets([1.0] + [0.0] * 8, ids=np.arange(9)), 0.9)
    parted, left, tested = hold_out(data, Budgets([1.0] * 9, ids=np.arange(9)), 0.5)
    assert len(left) + len(tested) == 9
    assert sorted(parted.ids.tolist()) == sorted(left.ids.tolist())
