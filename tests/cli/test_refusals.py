"""What a command refuses is named with what would be accepted, leaves nothing behind, and its neighbor is accepted."""

from __future__ import annotations

import random
import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from pdpsgd.cli import app
from pdpsgd.ledger import Ledger

COLUMNS = "person,alias,age,job,epsilon,income,height,weight"
IGNORED = ("person", "alias", "epsilon", "income", "height", "weight", "job")


def table(path: str, prefix: str, people: int) -> None:
    """Write people who are known by two names, with labels of both kinds."""
    rng = random.Random(prefix)
    rows = [COLUMNS]
    for number in range(people):
        age = rng.randint(18, 80)
        job, income = rng.choice("xy"), "high" if age > 50 else "low"
        budget = rng.choice([1, 2, 4])
        rows.append(
            f"{prefix}{number},a{prefix}{number},{age},{job},{budget},{income},{2.5 * age},{120 - age}"
        )
    Path(path).write_text("\n".join(rows) + "\n")


def schema(path: str, label: str, of_label: str, *, id_column: str | None = "person") -> None:
    """Write a schema in which age alone tells of the label."""
    ignored = [f'[columns.{name}]\nkind = "ignored"' for name in IGNORED if name not in (label, id_column)]
    named = [] if id_column is None else [f'id_column = "{id_column}"']
    age = '[columns.age]\nkind = "numeric"\nlow = 0\nhigh = 120'
    lines = [f'label = "{label}"', of_label, *named, "confirmed = true", age, *ignored]
    Path(path).write_text("\n".join(lines) + "\n")


INCOME = 'classes = ["low", "high"]'
SCHEMAS: dict[str, tuple[str, str, str | None]] = {
    "person": ("income", INCOME, "person"),
    "alias": ("income", INCOME, "alias"),
    "unnamed": ("income", INCOME, None),
    "job": ("job", 'classes = ["x", "y"]', "person"),
    "height": ("height", "label_range = [0, 250]", "person"),
    "shorter": ("height", "label_range = [0, 200]", "person"),
    "weight": ("weight", "label_range = [0, 250]", "person"),
}
SHORT = "--steps 2 --batch-size 20 --no-report --quiet"


def call(command: str) -> Any:
    return CliRunner().invoke(app, shlex.split(command), env={"COLUMNS": "200"})


def words(result: Any) -> str:
    return " ".join(result.output.split())


def files() -> dict[Path, bytes | None]:
    """Read all that is in the working directory."""
    return {path: path.read_bytes() if path.is_file() else None for path in Path().rglob("*")}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tables, schemas, plans and a ledger, and a short run with each schema, which all tests share."""
    folder = tmp_path_factory.mktemp("refusals")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        table("people.csv", "p", 60)
        table("test.csv", "t", 30)
        table("old.csv", "p", 50)
        rng = np.random.default_rng(0)
        for name, people in (("images", 40), ("others", 12)):
            ids = np.array([f"{name}{number}" for number in range(people)])
            inputs = rng.random((people, 8, 8), dtype=np.float32)
            np.savez(
                f"{name}.npz", inputs=inputs, ids=ids, targets=np.arange(people) % 2, classes=["no", "yes"]
            )
        np.savez("one-class.npz", inputs=inputs, ids=ids, targets=np.zeros(people, int), classes=["no"])
        commands = [
            "plan old.csv --id-column person --steps 5 --batch-size 20 --quiet --json old.json",
            "ledger init --ledger other.ledger",
            f"train images.npz --tiers 4:1 --run-folder images {SHORT}",
            f"train people.csv --schema person.toml --run-folder counted --keep-norms {SHORT}",
        ]
        for name, (label, of_label, id_column) in SCHEMAS.items():
            schema(f"{name}.toml", label, of_label, id_column=id_column)
            alone = "--one-row-per-person" if id_column is None else ""
            commands.append(
                f"train people.csv --schema {name}.toml --run-folder {name} --no-ledger {alone} {SHORT}"
            )
        for command in commands:
            result = call(command)
            assert result.exit_code == 0, (command, result.output)
        shutil.copytree("counted", "without-people", ignore=shutil.ignore_patterns("people"))
        Path("views.py").write_text("def shift(inputs):\n    return inputs\n\nbroken = 3\n")
        Path("dangling").symlink_to("nowhere")
    return folder


@pytest.fixture
def place(made: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(made)
    monkeypatch.syspath_prepend(made)
    return made


ONE_OF_TWO = "Expected --ledger (or --reservation), or --no-ledger. Got both."
PLAN = "plan people.csv --id-column person --steps 5 --batch-size 20 --quiet"
TRAIN = "train people.csv --schema person.toml"
PATE = "pate people.csv --tiers 32:1 --teachers 5 --no-ledger"
REHEARSE = f"train people.csv --rehearse --records-per-person 2 {SHORT}"
COMPARE = "--test-file test.csv --no-report --quiet"
TIERS = "plan --people 50 --steps 5 --batch-size 10 --quiet"


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("audit old.json --confidence 1", "Expected --confidence above 0 and below 1. Got 1.0."),
        ("audit old.json --chart x.gif", "ends in .svg, .png or .html. Got 'x.gif'."),
        ("advise people.csv --id-column person --chart x.gif", "ends in .svg, .png or .html. Got 'x.gif'."),
        ("ledger show --chart x.gif", "ends in .svg, .png or .html. Got 'x.gif'."),
        (
            "audit old.json --individual",
            "Expected the folder of a run, for --individual. Got 'old.json': norms are kept there alone.",
        ),
        (
            "compare people.csv --by job",
            "Expected --by with two runs, whose models are compared by subgroup.",
        ),
        ("compare people.csv --finetune lora", "Expected --finetune with train"),
        (
            f"compare person alias {COMPARE}",
            "Expected two runs whose people have ids in the same column. Got 'person' and 'alias'",
        ),
        (
            f"compare person job {COMPARE}",
            "Expected two runs with the same classes. Got ['low', 'high'] and ['x', 'y'].",
        ),
        (
            f"compare height weight {COMPARE}",
            "Expected two runs that predict the same label. Got 'height' and",
        ),
        (
            f"compare height shorter {COMPARE}",
            "the same label range, to know what is right. Got (0, 250) and (0, 200)",
        ),
        (
            "compare images images --test-file others.npz --by job",
            "Expected a table as --test-file, for subgroups by 'job'. Got 'others.npz'.",
        ),
        ("ledger enroll people.csv --tiers 1:1", "Expected a list of people, each with an id. Got --tiers"),
        ("ledger consent people.csv --tiers 1:1", "Expected a list of people, each with an id. Got --tiers"),
        (f"{TRAIN} --no-ledger --ledger people.ledger", ONE_OF_TWO),
        (f"{TRAIN} --no-ledger --reservation 1", ONE_OF_TWO),
        (
            f"{PATE} --label height --task regression --id-column person --public test.csv",
            "Expected records with classes, as numbers or images. Got a label that is a number: use pdpsgd train.",
        ),
        (
            f"{PATE} --label income --text job --id-column person --public test.csv",
            "Expected records with classes, as numbers or images. Got texts: use pdpsgd train.",
        ),
        (
            "pate one-class.npz --tiers 32:1 --teachers 5 --no-ledger --public others.npz",
            "Expected at least two classes to vote on. Got ['no'].",
        ),
        (
            f"{PATE} --schema person.toml --public last:20",
            "Expected a file of examples of nobody who has to be",
        ),
        (
            f"{REHEARSE} --schema unnamed.toml --one-row-per-person",
            "Expected ids of people with --records-per-person (id_column in the schema, or --id-column).",
        ),
        (
            f"{TRAIN} --rehearse --finetune lora",
            "Expected texts (--schema with a column of kind 'text') with --finetune. Got a schema without.",
        ),
        (f"{TRAIN} --finetune lora", "Expected texts (--text COLUMN) with --finetune. Got data without."),
        (
            "report counted -o no/such/x.html",
            "Expected a folder that is there, to write 'no/such/x.html' into.",
        ),
        ("report counted --letters l --output x.html", "Expected --letters without --output"),
        ("report counted --person p1 --ledger nowhere", "Got none at 'nowhere': name it with --ledger."),
        ("report counted --person p1 --ledger other.ledger", "Got another one, other.ledger: name it with"),
        (f"{PLAN} --history-budgets old.csv", "Expected --history with --history-budgets."),
        (
            f"{PLAN} --history-budgets old.csv --history-budgets old.csv",
            "Expected --history with --history-budgets.",
        ),
        (
            f"{PLAN} --history old.json {3 * '--history-budgets old.csv '}",
            "Expected --history-budgets once, or once for each of the 1 --history. Got 3.",
        ),
        (
            f"{PLAN} --history without-people",
            "Expected people/promises.csv in 'without-people', to know who was on which level.",
        ),
        (
            f"{TIERS} --tiers 1:0.3,2:0.7,1:0.3",
            "each epsilon once, for example 1:0.34,2:0.43,3:0.23. Got '1:0.3'",
        ),
        (f"{TIERS} --tiers 1:1 --json {'x' * 300}", "(302 characters): File name too long."),
        (f"{TIERS} --tiers 1:1 --json counted", "Got 'counted', which is a folder."),
        (f"{TIERS} --tiers 1:1 --json /", "Got '/', which is a folder."),
        (f"{TIERS} --tiers 1:1 --json people.csv/x.json", "people.csv' is no folder."),
        (f"{TIERS} --tiers 1:1 --json dangling/x.json", "dangling' is no folder."),
        (
            f"{TRAIN} --augment views:none",
            "Expected augment 'views:none' to name a function in module 'views'.",
        ),
        (f"{TRAIN} --augment views:broken", "to name a function in module 'views'. Found none."),
        (f"{TRAIN} --augment nowhere:shift", "to name a module that can be imported from"),
        (f"{TRAIN} --augment .views:shift", "as 'module:function', for example 'my_views:shift'."),
        (f"{TRAIN} --augment views:", "as 'module:function', for example 'my_views:shift'. Got 'views:'."),
        (f"{TRAIN} --model .views:shift", "as 'module:function', for example 'my_networks:small_cnn'."),
        (
            f"{PLAN} --json people.csv",
            "Expected a new file for --json. Got 'people.csv', which this command reads.",
        ),
        (
            f"compare person person {COMPARE} --page test.csv",
            "Expected a new file for --page. Got 'test.csv'",
        ),
        (
            "ledger show --chart people.csv --ledger people.csv",
            "Expected a new file for --chart. Got 'people.csv'",
        ),
        (
            "data schema people.csv --label income -o people.csv --force",
            "Expected another file for the schema than the table itself. Got 'people.csv' for both.",
        ),
        (
            "data schema people.csv --label income -o people.csv/schema.toml",
            "Expected a file to write for --output. Got 'people.csv/schema.toml'",
        ),
    ],
)
def test_what_is_refused_is_named_and_leaves_nothing_behind(place: Path, command: str, message: str) -> None:
    before = files()
    result = call(command)
    assert result.exit_code == 2, (result.output, result.exception)
    assert message in words(result)
    assert files() == before


@pytest.mark.parametrize(
    "command",
    [
        "audit counted --individual",
        f"compare person unnamed {COMPARE}",
        f"compare person person {COMPARE} --by job",
        f"compare height height {COMPARE}",
        "compare images images --test-file others.npz --no-report --quiet",
        "ledger enroll test.csv --ledger other.ledger",
        "report counted --person p1 -o {new}.html",
        f"{PLAN} --history old.json --history-budgets old.csv --batch-size 5",
        f"{PLAN} --history counted",
        f"{TIERS} --tiers 1:0.3,2:0.7 --json {{new}}/in/it/x.json",
        f"{TRAIN} --augment views:shift --run-folder {{new}} --no-ledger {SHORT}",
        f"{REHEARSE} --schema person.toml --run-folder {{new}}",
        "data schema people.csv --label income -o {new}/schema.toml",
        "plan old.json --verify --quiet --json old.json",
    ],
)
def test_its_neighbor_is_accepted_without_a_word(place: Path, command: str, tmp_path: Path) -> None:
    result = call(command.format(new=tmp_path / "new"))
    assert result.exit_code == 0, (result.output, result.exception)
    assert "Expected" not in result.output


def test_two_labels_with_the_same_classes_are_not_compared(place: Path, tmp_path: Path) -> None:
    for name, column in (("smokes", 3), ("coughs", 5)):
        rows = [row.split(",") for row in Path("people.csv").read_text().splitlines()]
        for row in rows[1:]:
            row[3], row[5] = ("yes" if each in ("x", "high") else "no" for each in (row[3], row[5]))
        rows[0][3], rows[0][5] = "smokes", "coughs"
        text = "\n".join(",".join(row) for row in rows) + "\n"
        (tmp_path / "people.csv").write_text(text)
        (tmp_path / "test.csv").write_text(text.replace("\np", "\nt"))
        assert rows[0][column] == name
        how = f"--label {name} --id-column person --run-folder {tmp_path / name}"
        assert call(f"train {tmp_path / 'people.csv'} {how} --no-ledger {SHORT}").exit_code == 0
    tested = f"--test-file {tmp_path / 'test.csv'} --no-report --quiet"
    refused = call(f"compare {tmp_path / 'smokes'} {tmp_path / 'coughs'} {tested}")
    assert refused.exit_code == 2
    assert "Expected two runs that predict the same label. Got 'smokes' and 'coughs'." in words(refused)
    assert call(f"compare {tmp_path / 'smokes'} {tmp_path / 'smokes'} {tested}").exit_code == 0


@pytest.mark.parametrize("runs", ["person unnamed", "unnamed person"])
def test_a_list_with_ids_is_looked_at_whichever_run_has_it(place: Path, runs: str) -> None:
    refused = call(f"compare {runs} --test-file people.csv --no-report")
    assert refused.exit_code == 2
    assert "60 test people are on the list of person, such as 'p0'" in words(refused)
    agreed = call(f"compare {runs} --test-file people.csv --no-report --yes")
    assert agreed.exit_code == 0
    assert "on the list of unnamed cannot be told: the test people have no ids" in words(agreed)


def test_a_reservation_on_the_command_line_comes_before_a_file_that_says_no_ledger(
    place: Path, tmp_path: Path
) -> None:
    where = tmp_path / "people.ledger"
    for command in (
        f"ledger init --ledger {where}",
        f"ledger enroll people.csv --ledger {where}",
        f"plan --ledger {where} --reserve spring --steps 2 --batch-size 20 --quiet",
    ):
        assert call(command).exit_code == 0
    (tmp_path / "usual.toml").write_text('no-ledger = true\nschema = "person.toml"\n')
    result = call(
        f"train people.csv --config {tmp_path / 'usual.toml'} --reservation 1 --run-folder {tmp_path / 'run'} "
        f"--ledger {where} --quiet --no-report"
    )
    assert result.exit_code == 0, result.output
    assert [run.state for run in Ledger(where).runs()] == ["finished"]


def test_the_published_accounting_of_votes_wants_one_delta(place: Path, tmp_path: Path) -> None:
    rows = [f"{i},{4 + 4 * (i % 2)},{1e-5 if i % 3 else 1e-6}" for i in range(1437)]
    (tmp_path / "list.csv").write_text("\n".join(["id,epsilon,delta", *rows]) + "\n")
    listed = f"--budgets {tmp_path / 'list.csv'} --id-column id"
    how = f"pate digits --public last:400 --teachers 100 --bookkeeping as-published --seed 0 {listed}"
    before = files()
    refused = call(f"{how} --delta-column delta")
    assert refused.exit_code == 2
    assert "Expected one delta for all, for the published accounting. Got several: 1e-06, 1e-05." in words(
        refused
    )
    assert call(how).exit_code == 0
    assert files() == before


def level_of_p5(level: str) -> Callable[[str], str]:
    return lambda text: re.sub(r"(?m)^(p5,.*),\d+$", rf"\1,{level}", text)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda text: text.replace("level", "floor"),
            "Expected id, asked_epsilon, asked_delta and a level from",
        ),
        (lambda text: text.replace("\np3,", "\np3,x,"), "in line 5 of"),
        (level_of_p5("-1"), "a level from 0 to 2 in line 7 of"),
        (level_of_p5("3"), "a level from 0 to 2 in line 7 of"),
        (lambda text: re.sub(r",\d\n", ",0\n", text), "of them on level 0. Got 60, 60 of them on it"),
        (lambda text: "".join(text.splitlines(keepends=True)[:30]), "Expected the plan's 60 people in"),
        (lambda text: "", "Expected the plan's 60 people in"),
        (lambda text: "\xff\x00" + text, "Expected what each person was promised, as text (CSV)"),
    ],
)
def test_promises_that_are_not_the_plans_are_told_to_nobody_and_audited_for_nobody(
    place: Path, tmp_path: Path, damage: Callable[[str], str], message: str
) -> None:
    run = shutil.copytree("counted", tmp_path / "run")
    promises = run / "people" / "promises.csv"
    promises.write_text(damage(promises.read_text()), encoding="latin-1")
    before = set(tmp_path.rglob("*"))
    for command in (
        f"audit {run} --data people.csv",
        f"audit {run} --individual",
        f"report {run} --person p1",
        f"report {run} --letters {tmp_path / 'letters'}",
    ):
        result = call(command)
        assert result.exit_code == 2, (command, result.output, result.exception)
        assert message in words(result), (command, words(result))
        assert "promises.csv" in words(result)
        assert set(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(("name", "code", "runs"), [("plan.gif", 2, []), ("plan.SVG", 0, ["reserved"])])
def test_nothing_is_reserved_for_a_plan_whose_chart_cannot_be_drawn(
    place: Path, tmp_path: Path, name: str, code: int, runs: list[str]
) -> None:
    where = tmp_path / "people.ledger"
    assert call(f"ledger init --ledger {where}").exit_code == 0
    assert call(f"ledger enroll people.csv --ledger {where}").exit_code == 0
    chart = tmp_path / "charts" / name
    result = call(f"plan --ledger {where} --reserve spring --steps 2 --batch-size 20 --quiet --chart {chart}")
    assert result.exit_code == code, result.output
    assert [run.state for run in Ledger(where).runs()] == runs
    assert chart.exists() == (code == 0)


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="a folder in which nobody can make one")
def test_a_folder_that_cannot_be_made_is_named(place: Path) -> None:
    refused = call(f"{TIERS} --tiers 1:1 --json /proc/nowhere/x.json")
    assert refused.exit_code == 2
    assert "Expected to be able to make the folder '/proc/nowhere'." in words(refused)


@pytest.mark.parametrize(("rate", "code"), [("0.9999", 1), ("1e-9", 0)])
def test_an_audit_with_an_alarm_ends_with_1(place: Path, rate: str, code: int) -> None:
    result = call(f"audit old.json --canaries 10 --seed 0 --quiet --false-alarm-rate {rate}")
    assert result.exit_code == code, result.output


@pytest.mark.parametrize("kept", [True, False])
def test_whoever_interrupts_the_reading_of_texts_is_told_what_is_kept(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: bool
) -> None:
    class Slow:
        size = 3

        def embed(self, *_: Any, **__: Any) -> Any:
            raise KeyboardInterrupt

        def description(self) -> dict[str, Any]:
            return {}

    monkeypatch.setattr("pdpsgd.models.encoders.load_encoder", lambda *_, **__: Slow())
    monkeypatch.setenv("PDPSGD_CACHE", str(tmp_path))
    if not kept:
        monkeypatch.setattr("pdpsgd.models.embedding_cache.EmbeddingCache.of_user", lambda: None)
    before = files()
    result = call(f"train people.csv --text job --label income --id-column person --run-folder texts {SHORT}")
    assert result.exit_code == 130, result.output
    assert ("Texts embedded so far are kept" in words(result)) == kept
    assert files() == before
