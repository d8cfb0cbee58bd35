"""What holds for all commands: help that teaches, consistent names, exit codes, Ctrl-C."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer.main

from pdpsgd.cli import COMMANDS, app

GROUP: Any = typer.main.get_command(app)


def commands() -> list[tuple[str, Any]]:
    found = []
    for name, command in GROUP.commands.items():
        inner = getattr(command, "commands", None)
        found += [(name, command)] if inner is None else [(f"{name} {k}", c) for k, c in inner.items()]
    return found


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_is_there_and_teaches_by_example(run: Callable[..., Any], name: str) -> None:
    result = run(name, "--help")
    assert result.exit_code == 0
    assert "Example" in result.output or name in ("data", "ledger")
    assert name in run("--help").output


@pytest.mark.parametrize(("name", "command"), commands(), ids=[name for name, _ in commands()])
def test_options_are_spelled_alike_and_explained(name: str, command: Any) -> None:
    for parameter in command.params:
        for option in parameter.opts:
            if option.startswith("-") and not re.fullmatch(r"-[a-zA-Z]", option):
                assert re.fullmatch(r"--[a-z]+(-[a-z]+)*", option), option
        assert getattr(parameter, "help", "x"), f"{name}: {parameter.name} is not explained"


@pytest.mark.parametrize(("name", "command"), commands(), ids=[name for name, _ in commands()])
def test_help_is_short_and_fits_a_terminal_of_eighty_columns(
    run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, name: str, command: Any
) -> None:
    for parameter in command.params:
        said = getattr(parameter, "help", None) or ""
        assert len(said) < 70, f"{name}: {parameter.name} has {len(said)} characters of help"
        assert not said.endswith(".") or said.endswith("..."), f"{name}: {parameter.name} is a noun phrase"
    for line in command.help.splitlines():
        if line.startswith(" "):  # an example: it must not be wrapped
            assert len(line) <= 78, line
        else:
            assert "  " not in line, "a paragraph is one line, wrapped where the screen ends"
    monkeypatch.setenv("COLUMNS", "80")
    shown = run(*name.split(), "--help")
    assert max(map(len, shown.output.splitlines())) <= 80


def test_the_version_is_the_package_s(run: Callable[..., Any]) -> None:
    import pdpsgd

    assert run("--version").output.strip() == pdpsgd.__version__


def test_an_unknown_command_or_option_ends_with_2(run: Callable[..., Any]) -> None:
    assert run("plot").exit_code == 2
    assert run("plan", "--stepz", "3").exit_code == 2


def test_reproduce_names_the_command_that_took_its_place(run: Callable[..., Any]) -> None:
    result = run("reproduce", "table-1", "--seeds", "3")
    assert result.exit_code == 2
    assert "python -m experiments table-1 --seeds 3" in result.output
    assert "Traceback" not in result.output


def test_the_shell_can_complete_commands(tmp_path: Path) -> None:
    environment = {"_PDPSGD_COMPLETE": "complete_bash", "COMP_WORDS": "pdpsgd pl", "COMP_CWORD": "1"}
    script = "from pdpsgd.cli import main; main()"
    result = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=False,
    )
    assert result.stdout.split() == ["plan"]


def test_help_loads_neither_torch_nor_scipy() -> None:
    script = (
        "import sys; from pdpsgd.cli import app\n"
        "app(['--help'], standalone_mode=False)\n"
        "assert not {'torch', 'scipy', 'altair'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", script], check=True, stdout=subprocess.DEVNULL)


def test_ctrl_c_saves_the_run_and_says_how_to_go_on(
    command: Callable[..., subprocess.Popen[str]], people: Path, tmp_path: Path
) -> None:
    arguments = ("train", people, "--label", "income", "--id-column", "person", "--batch-size", "30")
    options = ("--steps", "50000", "--delta-column", "delta", "--run-folder", "run", "--no-report")
    process = command(*arguments, *options, cwd=tmp_path)
    checkpoint = tmp_path / "run" / "private" / "checkpoint.safetensors"
    deadline = time.monotonic() + 120
    while not checkpoint.exists() and process.poll() is None:
        assert time.monotonic() < deadline, "the run did not begin"
        time.sleep(0.1)
    time.sleep(1)
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 130, (output, errors)
    assert "--resume" in errors
    assert "Traceback" not in errors
    assert checkpoint.exists()


@pytest.mark.parametrize(
    ("words", "proposed"),
    [
        (("plan", "--id-colum", "x"), "--id-column"),
        (("ledger", "show", "--legder", "x"), "--ledger"),
        (("plan", "--optimizer", "x"), None),
    ],
)
def test_an_option_is_proposed_only_if_it_is_close(
    run: Callable[..., Any], words: tuple[str, ...], proposed: str | None
) -> None:
    result = run(*words)
    assert result.exit_code == 2
    assert "No such option" in result.output
    assert ("Possible" in result.output) == (proposed is not None)
    assert proposed is None or proposed in result.output.split("No such option")[1]


def test_a_list_without_the_column_of_budgets_names_the_option(
    run: Callable[..., Any], tmp_path: Path
) -> None:
    file = tmp_path / "people.csv"
    file.write_text("person,region,privacy\na,north,1\n")
    missing = " ".join(run("plan", file, "--id-column", "person").output.split())
    assert "--epsilon-column" in missing
    assert "Is it" not in missing
    named = run("plan", file, "--id-column", "person", "--epsilon-column", "privcy").output
    assert "Is it 'privacy'?" in " ".join(named.split())
