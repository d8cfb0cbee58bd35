"""`--like RUN`: the options of an earlier run again, on other data, and what differs from it.

What was chosen is in `private/command.json` of a run, not in `public/`: digests of files depend on the records in them,
and no noise covers that.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pdpsgd.errors import fail
from pdpsgd.training.options import OUTPUT, Options

if TYPE_CHECKING:
    from pdpsgd.training.run_folder import RunFolder

OF_ONE_RUN = ("run_folder", "resume", "reservation", "budgets", "cache_folder", "data_folder")
"""Options that belong to a run, its people or its machine alone: a run that is like it does not take them."""


def _read_like(ctx: Any, value: Path | None) -> Path | None:
    """Take defaults from an earlier run: the command line comes first, then --config."""
    if value is None or ctx.resilient_parsing:
        return value
    chosen = _read(value)["options"]
    names = {parameter.name for parameter in ctx.command.params}
    taken = {name: text for name, text in chosen.items() if name in names and name not in OF_ONE_RUN}
    schema = value / "public" / "schema.toml"
    if "schema" in taken and schema.exists():
        taken["schema"] = str(schema)  # as it was then, whatever became of the file
    ctx.default_map = {**taken, **(ctx.default_map or {})}
    return value


Like = Annotated[
    Path | None,
    typer.Option(
        "--like",
        help="earlier run whose options are taken, but for its data",
        is_eager=True,
        callback=_read_like,
        show_default=False,
        rich_help_panel=OUTPUT,
    ),
]


def command_record(data: str, options: Sequence[Options], versions: Mapping[str, str]) -> dict[str, Any]:
    """Say what was chosen for a run, so that it can be repeated: options, files with digests, versions.

    Args:
        data: The data, as it was named.
        options: All options of the command.
        versions: What the run was made with.

    Returns:
        Plain data, for `private/` of the run folder.
    """
    from pdpsgd.training.start import digest_of

    said = {
        name: getattr(each, name)
        for each in options
        for name, known in each.declared().items()
        if known.kind is not None and each.said(name)
    }
    paths = {"data": Path(data)}
    for name, value in said.items():
        listed = value if isinstance(value, list) else [value]
        paths |= {
            f"{name} {place}" if len(listed) > 1 else name: Path(place)
            for place in listed
            if isinstance(place, Path) or (name == "calibrate" and place != "steps")
        }
    files = {
        name: {"path": str(path.resolve()), "sha256": digest_of(path) if path.is_file() else None}
        for name, path in paths.items()
        if path.exists()
    }
    texts = {name: _text(name, value) for name, value in said.items()}
    return {"data": data, "options": texts, "files": files, "versions": dict(versions)}


def spelled(record: Mapping[str, Any]) -> str:
    """Write the command that a record is of, as it is given on the command line."""
    given = [
        part
        for name, value in record["options"].items()
        if name not in ("run_folder", "resume") and value is not False
        for each in (value if isinstance(value, list) else [value])
        for part in ([_option(name)] if each is True else [_option(name), shlex.quote(str(each))])
    ]
    return " ".join(["pdpsgd train", shlex.quote(record["data"]), *given])


def differences(like: Path, now: Mapping[str, Any]) -> list[str]:
    """Say in what a run differs from the one that it is like.

    Args:
        like: The folder of the earlier run.
        now: The record of this command.

    Returns:
        A sentence for each difference; the first names the data.
    """
    before = _read(like)
    said = [f"Like {like}, on {now['data']} instead of {before['data']}."]
    if now["data"] == before["data"]:
        said = [f"Like {like}, on the same data, {now['data']}."]
    for name in sorted({*before["options"], *now["options"]} - {"run_folder", "resume", "cache_folder"}):
        old, new = before["options"].get(name), now["options"].get(name)
        if name == "schema" and new is not None and str(like) in str(new):
            continue  # the run's own
        if old != new:
            said.append(f"Differs: {_option(name)} {_shown(new)} instead of {_shown(old)}.")
    start = now["options"].get("start")
    if start is not None and start == before["options"].get("start"):
        said.append(f"As then: --start {start}. To begin with that run's own model, give --start {like}.")
    for name, file in before["files"].items():
        new = now["files"].get(name)
        if name != "data" and new and new["path"] == file["path"] and new["sha256"] != file["sha256"]:
            said.append(f"Differs: {file['path']} ({_option(name)}) has changed since.")
    for name, version in before["versions"].items():
        if now["versions"].get(name) != version:
            said.append(f"Differs: {name} {now['versions'].get(name)} instead of {version}.")
    return said


def _read(run: Path) -> dict[str, Any]:
    from pdpsgd.training.run_folder import RunFolder

    folder: RunFolder = RunFolder(run)
    if not folder.finished:
        fail(f"Expected the folder of a finished run with --like. Got {str(run)!r}, which has none.")
    found = folder.read_command()
    if found is None:
        fail(
            f"Expected private/command.json in {str(run)!r}, to train like it. Got none: an earlier version, or "
            "Python, made the run, or private/ was removed."
        )
    return found


def _text(name: str, value: Any) -> Any:
    """Write a value as it is given on the command line."""
    from pdpsgd.training.components import name_of

    if isinstance(value, list):
        return [_text(name, each) for each in value]
    if isinstance(value, Path):
        return str(value.resolve())
    if name == "calibrate" and isinstance(value, str) and value != "steps":
        return str(Path(value).resolve())
    if isinstance(value, Mapping):
        return [f"{key}={json.dumps(each)}" for key, each in value.items()]
    if isinstance(value, tuple):
        return ",".join(f"{each!r}" for each in value)
    return name_of(value) if callable(value) else value


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def _shown(value: Any) -> str:
    if value is None:
        return "(not given)"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
