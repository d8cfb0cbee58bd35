"""Damaged files and odd options end in one sentence and exit code 2, and leave nothing behind (`make fuzz`: more)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.fuzz.cases import Case, edit, make_case
from tests.cli.fuzz.folder import AUDIT, PLAN, RESUME, TRAIN, make_folder
from tests.cli.fuzz.runner import run_case

CASES, CHUNK = 240, 30


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with one sound file of every kind."""
    folder, before = tmp_path_factory.mktemp("sound"), os.getcwd()
    os.chdir(folder)
    try:
        make_folder(folder)
        yield folder
    finally:
        os.chdir(before)


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("first", range(0, CASES, CHUNK))
def test_nothing_breaks_a_command(sound: Path, first: int) -> None:
    outcomes = {number: run_case(make_case(number), sound) for number in range(first, first + CHUNK)}
    bad = {number: f"{o.problem}: {o.case.what}" for number, o in outcomes.items() if o.problem}
    assert bad == {}, "python -m tests.cli.fuzz --only NUMBER shows more"


@pytest.mark.parametrize("command", [PLAN, TRAIN, RESUME, ("audit", "done", *AUDIT), ("report", "done")])
def test_the_sound_folder_is_accepted(sound: Path, command: tuple[str, ...]) -> None:
    outcome = run_case(Case("nothing", command, lambda folder: None, fine=(0,)), sound)
    assert outcome.problem is None, outcome.output


def file(name: str, content: bytes, *command: str) -> Case:
    """A command on a file whose content is this."""
    return Case(name, command, edit(name, lambda _: content), fine=(2,))


def config(line: str) -> Case:
    return Case(
        line,
        (*TRAIN, "--config", "odd.toml"),
        lambda folder: (folder / "odd.toml").write_text(line) and None,
        fine=(2,),
    )


DEEP = b"[" * 100_000
NAMED = {
    "a list with a header only": file("people.csv", b"person,epsilon,delta\n", *PLAN),
    "hardly any noise": Case("noise", (*PLAN[:6], "--noise-multiplier", "0.0001"), lambda folder: None, (2,)),
    "a plan nested without end": file("plan.json", DEEP, "plan", "plan.json"),
    "settings nested without end": file("done/public/settings.json", DEEP, "report", "done"),
    **{
        f"settings that are {content[:9]!r}, for {command[0]}": file(
            f"{folder}/public/settings.json", content, *command
        )
        for content in (b"null", b"[]", b"", b"\xff\xfe{}", b"3")
        for folder, command in (
            ("done", ("report", "done")),
            ("done", ("audit", "done", *AUDIT)),
            ("begun", RESUME),
        )
    },
    "an optimizer that is a list": file(
        "done/public/settings.json", b'{"optimizer": []}', "audit", "done", *AUDIT
    ),
    "a schema bound of 400 digits": Case(
        "schema.toml",
        ("train", "people.csv", "--schema", "schema.toml", *TRAIN[6:]),
        edit("schema.toml", lambda content: content.replace(b"high = ", b"high = " + b"9" * 400)),
        (2,),
    ),
    **{
        line: config(line)
        for line in ("weight-decay = -1", "momentum = -1", "checkpoint-every = 0", 'optimizer = "x"')
    },
}


@pytest.mark.parametrize("what", NAMED)
def test_what_once_broke_a_command_ends_in_a_sentence(sound: Path, what: str) -> None:
    outcome = run_case(NAMED[what], sound)
    assert outcome.problem is None, outcome.output
    assert outcome.output.count("Error:") == 1


def test_a_traceback_is_shown_to_whoever_asks(sound: Path) -> None:
    case = NAMED["a list with a header only"]
    asked = run_case(Case("asked", (*case.command, "--traceback"), case.damage), sound)
    assert "Error: Expected at least one row" in asked.output
    assert asked.problem == "a traceback in the output"
