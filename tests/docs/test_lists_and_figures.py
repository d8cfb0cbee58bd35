"""Lists in the documentation are complete, commands on its pages can be parsed, and its figures are on record."""

from __future__ import annotations

import json
import pkgutil
import re
import shlex
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import typer.main

import experiments
from experiments.__main__ import app as experiments_app
from experiments.reproduce import OWN_RECORDS, WHAT
from pdpsgd.cli import COMMANDS, app

ROOT = Path(__file__).parents[2]
AUDIT = ROOT / "docs" / "results" / "audit"
GROUP: Any = typer.main.get_command(app)
EXPERIMENTS: Any = typer.main.get_command(experiments_app)
PAGES = sorted(path.relative_to(ROOT).as_posix() for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")))


def page(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def modules(folder: Path) -> list[str]:
    """Modules in a folder and below, without the ending."""
    found = (path.relative_to(folder).with_suffix("") for path in folder.rglob("*.py"))
    return sorted(path.as_posix() for path in found if not path.name.startswith("__"))


def patterns(text: str) -> list[str]:
    """Names of files in the first column of a table: `a`, `b/*` and `c/{d,e}`, the latter taken apart."""
    found = []
    for name in re.findall(r"`([^`]+)`", " ".join(re.findall(r"^\| (`.*?) \|", text, re.M))):
        folder, brace, names = name.partition("{")
        found += [folder + one for one in names.rstrip("}").split(",")] if brace else [name]
    return found


def test_the_experiments_list_their_files() -> None:
    names, there = patterns(experiments.__doc__ or ""), modules(ROOT / "experiments")
    assert [module for module in there if not any(fnmatch(module, name) for name in names)] == []
    assert [name for name in names if not any(fnmatch(module, name) for module in there)] == []


@pytest.mark.parametrize("name", PAGES)
def test_commands_on_the_page_have_the_options_that_are_shown(name: str) -> None:
    for line in shown_commands(page(name), "pdpsgd"):
        command, (_, *words) = GROUP, shlex.split(line, comments=True)
        while words and (inner := getattr(command, "commands", {}).get(words[0])) is not None:
            command, words = inner, words[1:]
        assert command is not GROUP, f"{name}: {line}"
        if not hasattr(command, "commands"):
            parse(command, words)
    for line in shown_commands(page(name), "python -m experiments"):
        _, _, _, *words = shlex.split(line, comments=True)
        if words:
            assert words[0] in (*WHAT, *OWN_RECORDS, "WHAT"), f"{name}: {line}"
            parse(EXPERIMENTS, words)


@pytest.mark.parametrize("name", PAGES)
def test_the_page_has_no_traces_of_a_merge(name: str) -> None:
    assert re.findall(r"^(?:<{7}|>{7}).*", page(name), re.M) == []


def shown_commands(text: str, program: str) -> list[str]:
    """Find the commands on a page: lines of their own, and in backticks."""
    return re.findall(rf"^ *({program} [a-z].*)$", text, re.M) + re.findall(
        rf"`({program} [a-zA-Z][^`\n]*)`", text
    )


def parse(command: Any, words: list[str]) -> None:
    """Refuse options that the command does not know."""
    command.make_parser(command.context_class(command, info_name=command.name)).parse_args(args=words)


def test_the_changelog_names_new_places_that_are_there() -> None:
    rows = re.findall(r"^  \| (`pdpsgd.*) \| (`pdpsgd.*) \|$", page("CHANGELOG.md"), re.M)
    assert len(rows) > 5
    for _, now in rows:
        for name in re.findall(r"`([\w.]+)`", now):
            pkgutil.resolve_name(name)


def test_the_page_says_which_commands_have_the_common_options() -> None:
    text = page("docs/command-line.md")
    for option in ("--quiet", "--config"):
        (line,) = re.findall(rf"^- `{option}[^`]*`.*$", text, re.M)
        having = [name for name in COMMANDS if option in options(name)]
        assert re.findall(r"`(\w+)`", line) == having, option
    assert [name for name in COMMANDS if "--json" not in options(name)] == ["ledger", "data"]
    assert all("--json" in options("ledger", name) for name in GROUP.commands["ledger"].commands)
    having = [name for name in GROUP.commands["data"].commands if "--json" in options("data", name)]
    assert having == ["list", "get", "check", "cache"]


def options(*names: str) -> set[str]:
    command = GROUP
    for name in names:
        command = command.commands[name]
    return {option for parameter in command.params for option in parameter.opts}


def test_the_help_explains_everything_that_can_be_reproduced() -> None:
    (argument,) = (p for p in EXPERIMENTS.params if p.name == "what")
    assert set(WHAT) <= set(re.findall(r"[\w-]+", argument.help))


def test_the_audit_on_the_page_is_on_record() -> None:
    rows = json.loads((AUDIT / "digits.json").read_text(encoding="utf-8"))["rows"]
    shown = re.findall(r"^    (\d+ .* white box .*)$", page("docs/audit.md"), re.M)
    expected = [
        [
            *(f"{row[key]:.4g}" for key in ("promised", "promised", "proven")),
            f"{row['measured']:.3g}",
            *("95%", "Dirac,", "white", "box"),
            f"{row['attack_success']:.0%}",
            f"{row['auc']:.3f}",
            f"{row['true_positive_rate_at_1_percent']:.2%}",
        ]
        for row in rows
    ]
    assert [line.split() for line in shown] == expected


def test_how_tight_the_audit_is_is_on_record() -> None:
    rows = json.loads((AUDIT / "tightness.json").read_text(encoding="utf-8"))["rows"]
    everybody, sampled = rows[:4], rows[4:]
    text = page("docs/audit.md")
    for label, key, value in (
        ("one run, 1,000 canaries (mean of ten)", "one run, 1000 canaries", "mean"),
        ("one run, 5,000 canaries (mean of ten)", "one run, 5000 canaries", "mean"),
        ("one run, 5,000 canaries (largest of ten)", "one run, 5000 canaries", "largest"),
        (
            "one run, 5,000 canaries, only the noise in doubt (mean of ten)",
            "one run, 5000 canaries",
            "mean_if_gaussian",
        ),
        ("1,500 runs, assuming nothing", "1500 runs", "measured"),
        ("1,500 runs, only the noise in doubt", "1500 runs", "assumed"),
        ("a million simulated runs, assuming nothing", "1000000 simulated runs", "measured"),
        ("a million simulated runs, only the noise in doubt", "1000000 simulated runs", "assumed"),
    ):
        assert f"| {label} | {' | '.join(f'{row[key][value]:.2f}' for row in everybody)} |" in text
    flat = " ".join(text.split())
    for key, value in (
        ("one run, 5000 canaries", "mean"),
        ("1000000 simulated runs", "measured"),
        ("1000000 simulated runs", "assumed"),
    ):
        assert ", ".join(f"{row[key][value]:.2f}" for row in sampled) in flat

    def shares(key: str, value: str) -> list[float]:
        return [row[key][value] / row["proven"] for row in rows]

    assumed, measured = (shares("1000000 simulated runs", value) for value in ("assumed", "measured"))
    assert f"within about {1 - min(assumed):.0%} of what is proven".replace("%", " %") in flat
    assert f"{min(measured):.2f} to {max(measured):.2f} of what is proven" in flat
    assert "less than half of the truth on average and six tenths at best" in flat
    assert max(shares("one run, 5000 canaries", "mean")) < 0.5
    assert round(max(shares("one run, 5000 canaries", "largest")), 1) == 0.6


def test_how_often_alarms_go_off_is_on_record() -> None:
    found = json.loads((AUDIT / "false_alarms.json").read_text(encoding="utf-8"))
    text = page("docs/results/audit/false_alarms.md")
    allowed = round(found["runs"] * found["rate"])
    assert f"| conformance test | {allowed} | {found['conformance_alarms']} |" in text
    assert f"| lower bound above what is proven | {allowed} | {found['lower_bound_alarms']} |" in text
