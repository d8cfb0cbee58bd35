"""Cases by number: a command in a folder in which one thing is wrong, always the same."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from typer.main import get_command

from pdpsgd.cli import app
from tests.cli.fuzz.folder import (
    AUDIT,
    BOOKED,
    BOOKED_RESUME,
    LEDGER,
    PLAN,
    PLANNED,
    RESUME,
    SMALL,
    TABLE,
    TRAIN,
)
from tests.cli.fuzz.ledgers import damage_ledger, damaged_pages
from tests.cli.fuzz.mutators import (
    NUMBERS,
    TEXTS,
    as_text,
    damage_checkpoint,
    damaged_arrays,
    damaged_bytes,
    damaged_json_file,
    damaged_json_lines,
    damaged_parquet,
    damaged_table,
    damaged_toml,
)


@dataclass(frozen=True)
class Case:
    """A command in a folder in which one thing is wrong."""

    what: str
    command: tuple[str, ...]
    damage: Callable[[Path], None]
    fine: tuple[int, ...] = (0, 2)
    may_change: tuple[str, ...] = ()
    """Beginnings of names: a damaged ledger, above all, cannot always be told that a run was given up."""


def edit(name: str, change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    """Change the content of a file."""

    def damage(folder: Path) -> None:
        path = folder / name
        path.write_bytes(change(path.read_bytes()))

    return damage


_table, _toml = as_text(damaged_table), as_text(damaged_toml)
Change = Callable[[bytes, random.Random], bytes]
FILES: dict[str, tuple[Change, list[tuple[str, ...]]]] = {
    "people.csv": (_table, [PLAN, TRAIN, RESUME, ("data", "schema", "people.csv", *TABLE[:4])]),
    "people.parquet": (
        damaged_parquet,
        [(PLAN[0], "people.parquet", *PLAN[2:]), ("train", "people.parquet", *TRAIN[2:])],
    ),
    "list.csv": (
        _table,
        [
            (
                "train",
                "images.npz",
                "--budgets",
                "list.csv",
                "--id-column",
                "person",
                *SMALL,
                "--no-ledger",
                "--run-folder",
                "new",
            )
        ],
    ),
    "images.npz": (
        damaged_arrays,
        [("train", "images.npz", "--tiers", "1:0.5,2:0.5", *SMALL, "--run-folder", "new")],
    ),
    "schema.toml": (
        _toml,
        [("train", "people.csv", "--schema", "schema.toml", "--delta-column", "delta", *TRAIN[8:])],
    ),
    "run.toml": (_toml, [("train", "people.csv", "--config", "run.toml")]),
    "plan.json": (
        damaged_json_file,
        [
            ("plan", "plan.json", "--quiet"),
            ("plan", "plan.json", "--verify"),
            (*TRAIN, "--plan", "plan.json"),
            (*PLAN, "--history", "plan.json"),
            ("audit", "plan.json", *AUDIT),
        ],
    ),
    "done/public/plan.json": (
        damaged_json_file,
        [("report", "done", "-q"), ("audit", "done", *AUDIT), (*PLAN, "--history", "done")],
    ),
    "done/public/settings.json": (damaged_json_file, [("report", "done", "-q"), ("audit", "done", *AUDIT)]),
    "done/public/result.json": (damaged_json_file, [("report", "done", "-q", "--json", "figures.json")]),
    "done/public/history.jsonl": (damaged_json_lines, [("report", "done", "-q")]),
    "done/public/audit.json": (damaged_json_file, [("report", "done", "-q")]),
    "done/people/promises.csv": (_table, [(*PLAN, "--history", "done")]),
    "begun/public/settings.json": (damaged_json_file, [RESUME]),
    "begun/private/checkpoint.journal": (damaged_bytes, [RESUME]),
    "begun/private/checkpoint.safetensors": (damaged_bytes, [RESUME]),
    "more.csv": (_table, [("ledger", "enroll", "more.csv", "--delta-column", "delta", *LEDGER)]),
    "changes.csv": (_table, [("ledger", "consent", "changes.csv", "--delta-column", "delta", *LEDGER)]),
    "booked/private/reservation.json": (damaged_json_file, [BOOKED_RESUME]),
}
ON_LEDGER: list[tuple[str, ...]] = [
    *(("ledger", name, *LEDGER) for name in ("show", "runs", "head", "check")),
    ("ledger", "show", "p3", *LEDGER),
    ("ledger", "cancel", "2", *LEDGER),
    ("ledger", "enroll", "more.csv", "--delta-column", "delta", *LEDGER),
    ("ledger", "consent", "changes.csv", "--delta-column", "delta", *LEDGER),
    PLANNED,
    BOOKED,
    (*BOOKED, "--reservation", "2"),
    BOOKED_RESUME,
]
BASES: list[tuple[str, ...]] = [
    PLAN,
    TRAIN,
    ("audit", "plan.json", *AUDIT),
    ("report", "done", "-q"),
    BOOKED,
    PLANNED,
    ("data", "schema", "people.csv", *TABLE[:4]),
    *ON_LEDGER[:8],
]
"""Commands whose options are tried, each a fifteenth of the cases of options."""
NOT_TRIED = {"help", "config", "resume", "data_folder"}
LONG = {
    "steps",
    "runs",
    "shadow_models",
    "canaries",
    "example_canaries",
    "views",
    "people",
    "rounds",
    "max_levels",
}
"""Numbers of which a large one is no mistake, but takes its time."""


def make_case(number: int) -> Case:
    """Make the case of this number, always the same."""
    rng = random.Random(number)
    kind = rng.random()
    if kind < 0.45:
        return _file_case(rng)
    if kind < 0.55:
        return Case(
            "begun/private/checkpoint.safetensors: crafted",
            RESUME,
            lambda folder: damage_checkpoint(folder / "begun/private/checkpoint.safetensors", rng),
        )
    if kind < 0.7:
        return _ledger_case(rng)
    return _option_case(rng)


OF_DAMAGED_LEDGER = ("kept.ledger",)


def _ledger_case(rng: random.Random) -> Case:
    """A command on a ledger whose rows, tables or bytes are not what they were."""
    command = rng.choice(ON_LEDGER)
    if rng.random() < 0.3:
        change = rng.choice([damaged_bytes, damaged_pages])
        return Case(
            "kept.ledger: bytes",
            command,
            edit("kept.ledger", lambda old: change(old, rng)),
            _fine(command),
            OF_DAMAGED_LEDGER,
        )
    return Case(
        "kept.ledger: rows",
        command,
        lambda folder: damage_ledger(folder / "kept.ledger", rng),
        _fine(command),
        OF_DAMAGED_LEDGER,
    )


def _fine(command: tuple[str, ...]) -> tuple[int, ...]:
    """Exit codes that are no mistake: 1 is the answer of audits and checks that found something."""
    return (0, 1, 2) if command[0] == "audit" or command[:2] == ("ledger", "check") else (0, 2)


def _file_case(rng: random.Random) -> Case:
    name = rng.choice(list(FILES))
    change, commands = FILES[name]
    command = rng.choice(commands)
    fine = _fine(command)
    if rng.random() < 0.06:
        gone = rng.random() < 0.5
        return Case(
            f"{name}: {'gone' if gone else 'a folder'}", command, lambda f: _replace(f / name, gone), fine
        )
    plain = rng.random() < 0.35
    return Case(
        f"{name}: {'bytes' if plain else 'content'}",
        command,
        edit(name, lambda content: (damaged_bytes if plain else change)(content, rng)),
        fine,
    )


def _replace(path: Path, gone: bool) -> None:
    path.unlink()
    if not gone:
        path.mkdir()


def _option_case(rng: random.Random) -> Case:
    command = rng.choice(BASES)
    offered = _options_of(command)
    option = rng.choice(offered)
    if option.is_flag:
        value: tuple[str, ...] = ()
    else:
        numbers = [n for n in NUMBERS if option.name not in LONG or n != "2e9"]
        value = (rng.choice(numbers + TEXTS if _is_number(option) else TEXTS + numbers[:6]),)
    spelling = rng.choice(option.opts)
    if command[0] == "train" and _is_number(option) and rng.random() < 0.4:
        literal = value[0] if value and value[0] and rng.random() < 0.8 else json.dumps("".join(value))
        line = f"{option.opts[0].lstrip('-')} = {literal}\n"
        kept = _without(command, option.opts)
        return Case(
            f"config: {line.strip()[:80]}",
            (*kept, "--config", "odd.toml"),
            lambda folder: (folder / "odd.toml").write_text(line) and None,
        )
    what = f"{' '.join(command[:2])} {spelling} {value}"[:120]
    return Case(what, (*command, spelling, *value), lambda folder: None, _fine(command))


@cache
def _options_of(command: tuple[str, ...]) -> list[Any]:
    """The options that a command offers and that are tried."""
    found: Any = get_command(app)
    for word in command:
        if word not in getattr(found, "commands", {}):
            break
        found = found.commands[word]
    return [p for p in found.params if p.name not in NOT_TRIED and p.opts[0].startswith("-")]


def _is_number(option: Any) -> bool:
    return option.bare_type in (int, float)


def _without(command: tuple[str, ...], options: list[str]) -> tuple[str, ...]:
    at = next((i for i, word in enumerate(command) if word in options), None)
    return command if at is None else (*command[:at], *command[at + 2 :])
