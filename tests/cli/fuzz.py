"""Commands on damaged files and with odd options: one sentence and exit code 2, or success, and nothing left behind.

`python -m tests.cli.fuzz 10000` (or `make fuzz`) tries many; `test_fuzz.py` a few hundred. Each case is known by its
number: `python -m tests.cli.fuzz --only 4711` shows it again, with its traceback.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import io
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from typer.main import get_command
from typer.testing import CliRunner

from pdpsgd.cli import app

SECONDS = 30
"""After which a case counts as one that hangs."""

TABLE = ("--label", "income", "--id-column", "person", "--delta-column", "delta")
SMALL = ("--steps", "2", "--batch-size", "6", "--quiet")
TRAIN = (
    "train",
    "people.csv",
    *TABLE,
    *SMALL,
    "--no-report",
    "--no-ledger",
    "--seed",
    "1",
    "--run-folder",
    "new",
)
RESUME = (*TRAIN[:-1], "begun", "--checkpoint-every", "1", "--resume")
PLAN = ("plan", "people.csv", "--id-column", "person", "--delta-column", "delta", *SMALL)
AUDIT = ("--canaries", "10", "--example-canaries", "0", "--seed", "1", "--quiet")


@dataclass(frozen=True)
class Case:
    """A command in a folder in which one thing is wrong."""

    what: str
    command: tuple[str, ...]
    damage: Callable[[Path], None]
    fine: tuple[int, ...] = (0, 2)


@dataclass(frozen=True)
class Outcome:
    """How a case ended; `problem` is None if it ended well."""

    case: Case
    code: int | None
    output: str
    problem: str | None


# --- the folder ---------------------------------------------------------------------------------------------


def make_folder(folder: Path) -> None:
    """Fill a folder with one sound file of every kind."""
    rng = random.Random(3)
    lines = ["person,age,job,epsilon,delta,income"]
    for number in range(24):
        age = rng.randint(18, 80)
        income = "high" if age > 45 else "low"
        lines.append(f"p{number},{age},{rng.choice(['nurse', 'teacher'])},{number % 3 + 1},1e-5,{income}")
    (folder / "people.csv").write_text("\n".join(lines) + "\n")
    import polars

    polars.read_csv(folder / "people.csv").write_parquet(folder / "people.parquet")
    (folder / "run.toml").write_text(
        'label = "income"\nid-column = "person"\nsteps = 2\nbatch-size = 6.0\noptimizer = "sgd"\nlearning-rate = 0.5\n'
        'momentum = 0.5\nweight-decay = 0.1\nschedule = "linear"\nseed = 3\ncheckpoint-every = 1\nquiet = true\n'
        'report = false\nno-ledger = true\nrun-folder = "new"\noptimizer-option = ["nesterov=true"]\n'
    )
    arrays = {"inputs": np.zeros((8, 3, 3), dtype=np.uint8), "targets": np.arange(8) % 2, "ids": np.arange(8)}
    np.savez(folder / "images.npz", **arrays, classes=np.array(["a", "b"]))
    (folder / "list.csv").write_text("person,epsilon\n" + "".join(f"{i},{1 + i % 2}\n" for i in range(8)))
    schema = (
        "data",
        "schema",
        "people.csv",
        *TABLE[:4],
        "--epsilon-column",
        "epsilon",
        "--delta-column",
        "delta",
    )
    plan = (*PLAN, "--json", "plan.json")
    done = (*TRAIN[:-1], "done", "--test-share", "0.3", "--yes", "--evaluate-every", "1")
    for command in ((*schema, "-o", "schema.toml"), plan, done, ("audit", "done", *AUDIT)):
        _expect_success(command)
    with _stopped_after(1), contextlib.suppress(_Stopped):
        CliRunner().invoke(app, (*TRAIN[:-1], "begun", "--checkpoint-every", "1"), catch_exceptions=False)
    assert (folder / "begun/private/checkpoint.journal").exists()


class _Stopped(BaseException):
    pass


@contextlib.contextmanager
def _stopped_after(steps: int) -> Iterator[None]:
    """Let training end, as if killed, after so many steps."""
    from pdpsgd.engine.optimizer import PrivateOptimizer

    original, left = PrivateOptimizer.step, [None] * steps

    def step(self: Any, closure: Any = None) -> Any:
        if not left:
            raise _Stopped
        left.pop()
        return original(self, closure)

    PrivateOptimizer.step = step  # type: ignore[method-assign]
    try:
        yield
    finally:
        PrivateOptimizer.step = original  # type: ignore[method-assign]


def _expect_success(command: tuple[str, ...]) -> None:
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, (command, result.output, result.exception)


# --- what is wrong ------------------------------------------------------------------------------------------

NUMBERS = [
    "-1",
    "0",
    "nan",
    "inf",
    "-inf",
    "1e400",
    "1e-400",
    "9" * 400,
    "0x10",
    "1.5",
    "-0.0",
    "2e9",
    str(2**63),
]
TEXTS = [
    "",
    "x",
    " ",
    "two words",
    "é\u200b",
    "a" * 300,
    "../..",
    ".",
    "people.csv",
    "none/there.csv",
    "null",
    "[]",
]
VALUES: list[Any] = [
    None,
    True,
    False,
    -1,
    0,
    1,
    2.5,
    -0.5,
    1e308,
    -1e308,
    2**31,
    2**63,
    10**400,
    "",
    "x",
    "inf",
    "nan",
    "1",
    "\ud800",
    "\0",
    "x" * 5000,
    [],
    {},
    [[]],
    [1, "a"],
    {"a": 1},
    [None],
]


def _deep() -> Any:
    value: Any = []
    for _ in range(500):
        value = [value]
    return value


def damaged_bytes(content: bytes, rng: random.Random) -> bytes:
    """Return a file's content, damaged without regard to its kind."""
    at = rng.randrange(len(content) + 1)
    return rng.choice(
        [
            lambda: b"",
            lambda: content[:at],
            lambda: content[at:],
            lambda: content[:at] + bytes([rng.randrange(256)]) + content[at + 1 :],
            lambda: content[:at] + rng.randbytes(rng.randint(1, 40)) + content[at:],
            lambda: content[:at] + content[at // 2 :],
            lambda: gzip.compress(content),
            lambda: content.decode("latin1").encode("utf-16"),
            lambda: b"\xef\xbb\xbf" + content,
            lambda: content + content,
            lambda: rng.choice([b"[", b"{", b'{"a":', b"a = ["]) * 100_000,
            lambda: b"\0" * 100,
            lambda: rng.randbytes(1000),
            lambda: content.replace(b"\n", b"\r"),
        ]
    )()


def damaged_json(document: Any, rng: random.Random) -> Any:
    """Return a JSON document in which one value is missing, another, or too many."""
    places = list(_places(document))
    if not places:
        return rng.choice(VALUES)
    holder, key = rng.choice(places)
    how = rng.randrange(6)
    if how == 0:
        del holder[key]
    elif how == 1 and isinstance(holder, list):
        holder.append(holder[key])
    elif how == 1:
        holder[f"{key}2"] = holder.pop(key)
    elif how == 2:
        holder[key] = _deep()
    else:
        holder[key] = rng.choice(VALUES)
    return document


def _places(document: Any) -> Iterator[tuple[Any, Any]]:
    keys = (
        document if isinstance(document, dict) else range(len(document)) if isinstance(document, list) else ()
    )
    for key in keys:
        yield document, key
        yield from _places(document[key])


def damaged_toml(text: str, rng: random.Random) -> str:
    """Return TOML in which one line is missing, twice, or has another value."""
    lines = text.splitlines()
    at = rng.choice([i for i, line in enumerate(lines) if line.strip() and not line.startswith("#")])
    name = lines[at].partition("=")[0]
    literals = [
        "-1",
        "0",
        "nan",
        "inf",
        "1e400",
        "9" * 400,
        "9" * 5000,
        '""',
        '"x"',
        '"\\u0000"',
        "[]",
        "{}",
        "true",
    ]
    literals += [
        "1979-05-27",
        "[[1]]",
        '["a", "a"]',
        "{a = 1}",
        "'" + "x" * 400 + "'",
        "[" * 200 + "]" * 200,
        "2.5",
    ]
    lines[at : at + 1] = rng.choice(
        [[], [lines[at], lines[at]], [f"{name}2 = 1"], *([[f"{name}= {rng.choice(literals)}"]] * 6)]
    )
    return "\n".join(lines) + "\n"


def damaged_table(text: str, rng: random.Random) -> str:
    """Return a CSV table in which a cell, a row or a column is not what it was."""
    rows = [line.split(",") for line in text.splitlines()]
    at, column = rng.randrange(len(rows)), rng.randrange(len(rows[0]))
    cells = [*NUMBERS, *TEXTS, '"', '"a', "a\nb", "1,2", "1e-5", "0", "high", "p1", "2020-01-01", "true"]
    how = rng.randrange(8)
    if how == 0:
        rows = rows[:1]
    elif how == 1:
        rows = [row[:column] + row[column + 1 :] for row in rows]
    elif how == 2:
        rows = [[*row, row[column]] for row in rows]
    elif how == 3:
        rows.append(rows[at])
    elif how == 4:
        value = rng.choice(cells)
        rows = [rows[0], *([*row[:column], value, *row[column + 1 :]] for row in rows[1:])]
    else:
        rows[at][column] = rng.choice(cells)
    return "\n".join(",".join(row) for row in rows) + rng.choice(["", "\n", "\n\n"])


def damaged_arrays(content: bytes, rng: random.Random) -> bytes:
    """Return an .npz file in which one array is missing, or of another type, shape or range."""
    arrays = dict(np.load(io.BytesIO(content)))
    name = rng.choice(list(arrays))
    array = arrays.pop(name)
    changes: list[Callable[[], Any]] = [
        lambda: None,
        lambda: array[:0],
        lambda: array[:-1],
        lambda: array[..., None],
        lambda: np.array(5),
        lambda: array.astype(str),
        lambda: array.astype(object),
        lambda: np.full(array.shape, np.nan),
        lambda: np.full(array.shape, -1),
        lambda: np.full(array.shape, 2_000_000_000),
        lambda: np.full(array.shape, 2**63, dtype=np.uint64),
        lambda: np.full(array.shape, 1 + 2j),
        lambda: np.full(array.shape, "2020-01-01", dtype="datetime64[D]"),
        lambda: np.zeros(array.shape, dtype=[("a", "i4")]),
        lambda: np.full(array.shape, True),
    ]
    changed = rng.choice(changes)()
    if changed is not None:
        arrays[name] = changed
    if rng.random() < 0.3:
        arrays.pop("classes", None)
    made = io.BytesIO()
    np.savez(made, **arrays)
    return made.getvalue()


def damaged_parquet(content: bytes, rng: random.Random) -> bytes:
    """Return a Parquet table in which one column is of another type."""
    import polars as pl

    frame = pl.read_parquet(io.BytesIO(content))
    name, rows = rng.choice(frame.columns), len(frame)
    types: list[Any] = [
        pl.Boolean,
        pl.Int128,
        pl.Decimal(20, 2),
        pl.Date,
        pl.Datetime,
        pl.Duration,
        pl.Time,
        pl.Null,
    ]
    types += [pl.Categorical, pl.Binary, pl.List(pl.Int64), pl.Struct({"a": pl.Int64}), pl.UInt64, pl.Float32]
    value: Any = rng.choice([None, 1, 0, -1])
    with contextlib.suppress(Exception):
        column = pl.Series(name, [value] * rows, dtype=pl.Int64).cast(rng.choice(types), strict=False)
        frame = frame.with_columns(column)
    if rng.random() < 0.2:
        frame = frame[:0]
    made = io.BytesIO()
    frame.write_parquet(made)
    return made.getvalue()


def damage_checkpoint(path: Path, rng: random.Random) -> None:
    """Damage a checkpoint so that its checksum is right."""
    import torch

    from pdpsgd.engine import checkpoints

    saved = checkpoints.load(path)
    tensors, state = (
        dict(saved.tensors),
        json.loads(json.dumps(checkpoints._to_json(dict(saved.state), "state"))),
    )
    key = saved.key
    how = rng.randrange(5)
    if how == 0:
        name = rng.choice(sorted(tensors))
        shapes = [(), (0,), (2, 2), (1,)]
        options = [
            None,
            *(torch.zeros(shape) for shape in shapes),
            tensors[name].double(),
            tensors[name].int(),
        ]
        chosen = rng.choice(options)
        if chosen is None:
            del tensors[name]
        else:
            tensors[name] = chosen
    elif how == 1:
        key = rng.choice([b"", b"x", bytes(33)])
    else:
        state = damaged_json(state, rng)
    to_json = checkpoints._to_json
    checkpoints._to_json = lambda value, *_: state  # type: ignore[assignment]
    try:
        checkpoints.save(path, tensors, {}, key)
    finally:
        checkpoints._to_json = to_json


# --- cases --------------------------------------------------------------------------------------------------


def edit(name: str, change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    """Change the content of a file."""

    def damage(folder: Path) -> None:
        path = folder / name
        path.write_bytes(change(path.read_bytes()))

    return damage


def _as_text(change: Callable[[str, random.Random], str]) -> Callable[[bytes, random.Random], bytes]:
    return lambda content, rng: change(content.decode(), rng).encode()


def _json(content: bytes, rng: random.Random) -> bytes:
    return json.dumps(damaged_json(json.loads(content), rng)).encode()


def _lines(content: bytes, rng: random.Random) -> bytes:
    lines = content.splitlines()
    at = rng.randrange(len(lines))
    lines[at] = _json(lines[at], rng)
    return b"\n".join(lines) + b"\n"


_table, _toml = _as_text(damaged_table), _as_text(damaged_toml)
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
        _json,
        [
            ("plan", "plan.json", "--quiet"),
            ("plan", "plan.json", "--verify"),
            (*TRAIN, "--plan", "plan.json"),
            (*PLAN, "--history", "plan.json"),
            ("audit", "plan.json", *AUDIT),
        ],
    ),
    "done/public/plan.json": (
        _json,
        [("report", "done", "-q"), ("audit", "done", *AUDIT), (*PLAN, "--history", "done")],
    ),
    "done/public/settings.json": (_json, [("report", "done", "-q"), ("audit", "done", *AUDIT)]),
    "done/public/result.json": (_json, [("report", "done", "-q", "--json", "figures.json")]),
    "done/public/history.jsonl": (_lines, [("report", "done", "-q")]),
    "done/public/audit.json": (_json, [("report", "done", "-q")]),
    "done/people/promises.csv": (_table, [(*PLAN, "--history", "done")]),
    "begun/public/settings.json": (_json, [RESUME]),
    "begun/private/checkpoint.journal": (damaged_bytes, [RESUME]),
    "begun/private/checkpoint.safetensors": (damaged_bytes, [RESUME]),
}
BASES = {
    "plan": PLAN,
    "train": TRAIN,
    "audit": ("audit", "plan.json", *AUDIT),
    "report": ("report", "done", "-q"),
}
NOT_TRIED = {"help", "config", "resume", "data_folder", "ledger", "spend", "no_ledger", "reservation"}
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
    if kind < 0.55:
        return _file_case(rng)
    if kind < 0.65:
        return Case(
            "begun/private/checkpoint.safetensors: crafted",
            RESUME,
            lambda folder: damage_checkpoint(folder / "begun/private/checkpoint.safetensors", rng),
        )
    return _option_case(rng)


def _file_case(rng: random.Random) -> Case:
    name = rng.choice(list(FILES))
    change, commands = FILES[name]
    command = rng.choice(commands)
    fine = (0, 1, 2) if command[0] == "audit" else (0, 2)
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
    name = rng.choice(list(BASES))
    group: Any = get_command(app)
    offered = [
        p for p in group.commands[name].params if p.name not in NOT_TRIED and p.opts[0].startswith("-")
    ]
    option = rng.choice(offered)
    if option.is_flag:
        value: tuple[str, ...] = ()
    else:
        numbers = [n for n in NUMBERS if option.name not in LONG or n != "2e9"]
        value = (rng.choice(numbers + TEXTS if _is_number(option) else TEXTS + numbers[:6]),)
    spelling = rng.choice(option.opts)
    command = BASES[name]
    if name == "train" and _is_number(option) and rng.random() < 0.4:
        literal = value[0] if value and value[0] and rng.random() < 0.8 else json.dumps("".join(value))
        line = f"{option.opts[0].lstrip('-')} = {literal}\n"
        kept = _without(command, option.opts)
        return Case(
            f"config: {line.strip()[:80]}",
            (*kept, "--config", "odd.toml"),
            lambda folder: (folder / "odd.toml").write_text(line) and None,
        )
    fine = (0, 1, 2) if name == "audit" else (0, 2)
    return Case(f"{name} {spelling} {value}"[:120], (*command, spelling, *value), lambda folder: None, fine)


def _is_number(option: Any) -> bool:
    return option.bare_type in (int, float)


def _without(command: tuple[str, ...], options: list[str]) -> tuple[str, ...]:
    at = next((i for i, word in enumerate(command) if word in options), None)
    return command if at is None else (*command[:at], *command[at + 2 :])


# --- running them -------------------------------------------------------------------------------------------


class Hangs(BaseException):
    """A case that takes too long."""


def run_case(case: Case, sound: Path) -> Outcome:
    """Run a case in a copy of the sound folder, and look at how it ended and what it left."""
    with tempfile.TemporaryDirectory() as place, _in_folder(Path(place) / "work", sound) as folder:
        case.damage(folder)
        before = contents(folder)
        try:
            with _limited_to(SECONDS):
                result = CliRunner().invoke(app, list(case.command))
        except Hangs:
            return Outcome(case, None, "", f"hangs: more than {SECONDS} seconds")
        problem = _problem_of(result, case, before, contents(folder))
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            shown = "".join(traceback.format_exception(result.exception))
            return Outcome(case, result.exit_code, result.output + shown, problem)
        return Outcome(case, result.exit_code, result.output, problem)


def _problem_of(result: Any, case: Case, before: dict[str, bytes], after: dict[str, bytes]) -> str | None:
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        if isinstance(result.exception, Hangs):
            return f"hangs: more than {SECONDS} seconds"
        return f"traceback: {type(result.exception).__name__}: {str(result.exception)[:100]}"
    if result.exit_code not in case.fine:
        return f"exit code {result.exit_code}"
    if "Traceback" in result.output:
        return "a traceback in the output"
    if result.exit_code != 2:
        return None
    if "Error" not in result.output:
        return "no sentence"
    if len(result.output) > 4000:
        return f"{len(result.output)} characters of output"
    changed = sorted(name for name in {*before, *after} if before.get(name) != after.get(name))
    return f"left behind: {changed[:5]}" if changed else None


def contents(folder: Path) -> dict[str, bytes]:
    """Return the content of every file, and a mark for every folder."""
    return {
        str(path.relative_to(folder)): b"a folder" if path.is_dir() else path.read_bytes()
        for path in sorted(folder.rglob("*"))
    }


@contextlib.contextmanager
def _in_folder(folder: Path, sound: Path) -> Iterator[Path]:
    shutil.copytree(sound, folder)
    before = os.getcwd()
    os.chdir(folder)
    try:
        yield folder
    finally:
        os.chdir(before)


@contextlib.contextmanager
def _limited_to(seconds: int) -> Iterator[None]:
    def stop(*_: Any) -> None:
        raise Hangs

    clocks = {signal.ITIMER_PROF: signal.SIGPROF, signal.ITIMER_REAL: signal.SIGALRM}
    before = {number: signal.signal(number, stop) for number in clocks.values()}
    signal.setitimer(signal.ITIMER_PROF, seconds)  # of the processor: others may be busy, too
    signal.setitimer(signal.ITIMER_REAL, 20 * seconds)
    try:
        yield
    finally:
        for clock in clocks:
            signal.setitimer(clock, 0)
        for number, handler in before.items():
            signal.signal(number, handler)


def main() -> int:
    """Try cases, print those that end badly, and count how all of them ended."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("count", nargs="?", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--only", type=int)
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    os.environ.setdefault("COLUMNS", "200")
    import torch

    torch.set_num_threads(1)
    found: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as place:
        sound = Path(place)
        before = os.getcwd()
        os.chdir(sound)
        make_folder(sound)
        os.chdir(before)
        numbers = range(asked.first, asked.first + asked.count) if asked.only is None else [asked.only]
        for number in numbers:
            outcome = run_case(make_case(number), sound)
            found["problem" if outcome.problem else f"exit code {outcome.code}"] += 1
            if outcome.problem or asked.only is not None:
                command = " ".join(word[:60] for word in outcome.case.command)
                print(f"case {number}: {outcome.problem}: {outcome.case.what}: {command}", flush=True)
            if asked.only is not None:
                print(outcome.output)
    print(", ".join(f"{name}: {count:,}" for name, count in sorted(found.items())))
    return 1 if found["problem"] else 0


if __name__ == "__main__":
    sys.exit(main())
