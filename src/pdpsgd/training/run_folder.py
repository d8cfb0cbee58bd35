"""What a run leaves behind, in three folders whose names say who may see them.

| file | what it holds |
|---|---|
| **`public/`** | **what may be published** |
| `plan.json` | the plan, without the people |
| `settings.json` | every option of the run |
| `schema.toml` | the schema of the records, if somebody confirmed it |
| `history.jsonl` | figures over the steps, on test people |
| `model.safetensors` | the trained model; loads without pdpsgd |
| `model.json` | network, preprocessing and classes, also in the metadata of the model |
| `result.json` | the summary, with the verdict |
| `report.html` | the page |
| `audit.json` | what an audit measured, as far as it is public |
| **`people/`** | **what each person may be told, and nobody else** |
| `promises.csv` | for each person: what was asked, what is proven, the level |
| `plan.json` | only where budgets do not say who is on which level: the plan with its people |
| `letters/` | only if asked for: a letter to each person, in plain words |
| **`private/`** | **the operator's own** |
| `checkpoint.safetensors` | where to resume; holds the secret key until the run ends |
| `lock` | while a process works on the run |
| `checkpoint.journal` | digests of the sums since the checkpoint; as secret as the key |
| `command.json` | what `pdpsgd train` was asked for, with digests of files: for `--like` |
| `reservation.json` | only with a ledger: the token under which the run is reserved in it |
| `steps.jsonl` | only if asked for: batch sizes, training losses |
| `norms.safetensors` | only if asked for: what each person's gradient norms add up to |
| `individual.csv` | what these norms have cost each person, after `pdpsgd audit --individual` |
| `schema-draft.toml` | a schema that was read from the records, until somebody confirms it |
| `model.json` | here, where ranges, categories or classes were read from the records |
| `audit.json` | what an audit computed from people's records |

Never written unless asked for: who was sampled, sizes of batches, training losses. What belongs to a plan that is not
for release (its page, its promises, the plan itself) is in `private/`.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pdpsgd.budgets.files import check_shape, parse_json, read_text
from pdpsgd.errors import fail
from pdpsgd.training.file_shapes import AUDIT, COMMAND, HISTORY, RESERVATION, RESULT, SETTINGS
from pdpsgd.training.lock import locked
from pdpsgd.training.promises import Promise, promise_lines, read_promises

if TYPE_CHECKING:
    from torch import Tensor, nn

    from pdpsgd.accounting.individual import IndividualSums
    from pdpsgd.budgets.budgets import Budgets
    from pdpsgd.data.schema import Schema
    from pdpsgd.planning.plans import Plan
    from pdpsgd.training.model_description import ModelDescription

PUBLIC, PEOPLE, PRIVATE = "public", "people", "private"
OF_0_1 = ("result.json", "checkpoint.safetensors", "plan.json", "SENSITIVE-do-not-publish-plan.json")
"""Files that version 0.1 left beside each other."""


class RunFolder:
    """The files of one run: the only place that knows their names."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    @classmethod
    def named_by(cls, path: Path) -> RunFolder | None:
        """Find the run that a path stands for, which is its folder or its plan; None for any other file."""
        if path.is_dir():
            return cls(path)
        its_plan = path.name == "plan.json" and path.resolve().parent.name in (PUBLIC, PEOPLE, PRIVATE)
        return cls(path.resolve().parents[1]) if its_plan else None

    def make(self) -> RunFolder:
        """Make the folders, unless they are there; only their owner may look into people/ and private/."""
        self.check_layout()
        try:
            for name, mode in ((PUBLIC, 0o777), (PEOPLE, 0o700), (PRIVATE, 0o700)):
                (self.path / name).mkdir(mode=mode, parents=True, exist_ok=True)
        except OSError as error:
            fail(
                f"Expected a folder that can be written at run_folder={str(self.path)!r}. Got: "
                f"{error.strerror}."
            )
        return self

    def check_layout(self) -> None:
        """Refuse a folder of version 0.1, in which public and secret files lie side by side."""
        if (self.path / PUBLIC).is_dir() or not any((self.path / name).exists() for name in OF_0_1):
            return
        fail(
            f"Expected the folders {PUBLIC}/, {PEOPLE}/ and {PRIVATE}/ in {str(self.path)!r}. Got a run of version "
            "0.1, whose files lie side by side. If it has ended, make the three folders in it and move promises.csv to "
            f"{PEOPLE}/, checkpoint.* and SENSITIVE-* to {PRIVATE}/, and everything else to {PUBLIC}/. If it has not "
            "ended, finish it with version 0.1, or begin a new run."
        )

    # --- where a run stands -----------------------------------------------------------------------------

    @property
    def public(self) -> Path:
        """The folder of what may be published."""
        return self.path / PUBLIC

    @property
    def checkpoint(self) -> Path:
        """Where the run can be resumed from."""
        return self.path / PRIVATE / "checkpoint.safetensors"

    @property
    def journal(self) -> Path:
        """Digests of the sums that noise was added to since the checkpoint; as secret as the key."""
        return self.path / PRIVATE / "checkpoint.journal"

    @property
    def model(self) -> Path:
        """The weights of the trained model."""
        return self.public / "model.safetensors"

    def model_descriptions(self) -> list[Path]:
        """Say where the description of the model may be: in public/, or in private/ if some of it is."""
        return (
            [self.path / folder / "model.json" for folder in (PUBLIC, PRIVATE)]
            if self.public.is_dir()
            else []
        )

    def claim(self) -> bool:
        """Make the folder, unless it is there; of two processes that try at once, one succeeds."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.mkdir()
        except FileExistsError:
            return False
        except OSError as error:
            fail(f"Expected to be able to make the run folder {str(self.path)!r}. Got: {error.strerror}.")
        return True

    @contextmanager
    def removed_if_empty(self) -> Iterator[None]:
        """Remove a folder that was claimed, and the one around it, if nothing was put there."""
        try:
            yield
        finally:
            for folder in (self.path, self.path.parent):
                with contextlib.suppress(OSError):  # there is something in it
                    folder.rmdir()

    @contextmanager
    def in_use(self, *, again: bool = False) -> Iterator[None]:
        """Keep other processes out of the folder, which is made if need be; one that is still empty is removed.

        With `again`, whoever called may have it in use already, as has who books a run before training it.
        """
        self.check_layout()
        new = [path for path in (self.path, *self.path.parents) if not path.exists()]
        try:
            with locked(self.make().path / PRIVATE / "lock", again=again):
                yield
        finally:
            for folder in (*(self.path / name for name in (PUBLIC, PEOPLE, PRIVATE)), *new):
                with contextlib.suppress(OSError):  # there is something in it
                    folder.rmdir()

    @property
    def finished(self) -> bool:
        """Whether a run ended here."""
        return (self.public / "result.json").exists()

    @property
    def begun(self) -> bool:
        """Whether a run began here."""
        return self.checkpoint.exists()

    def check_is_free(self, *, resume: bool, folder: str, go_on: str) -> None:
        """Refuse a folder with a finished run, or with one that was begun and is not to be resumed.

        Args:
            resume: Whether the run in the folder is to go on.
            folder: How the caller named the folder.
            go_on: What the caller has to say to resume.

        Raises:
            PdpsgdError: If another run is in the folder.
        """
        self.check_layout()
        if self.finished:
            fail(f"Expected a folder without a finished run. Got {folder}.")
        if self.begun and not resume:
            fail(f"Expected a new folder, or {go_on} to continue the run that was begun in it. Got {folder}.")

    # --- written by the run -----------------------------------------------------------------------------

    def write_plan(self, plan: Plan) -> None:
        """Write the plan: what is public of it, and where its people have to be written down, those apart."""
        shown = without_people(plan)
        write_atomically(self._place("plan.json", plan), (shown if public(plan) else plan).to_json() + "\n")
        if public(plan) and plan.to_json() != shown.to_json():
            write_atomically(self.path / PEOPLE / "plan.json", plan.to_json() + "\n")

    def write_settings(self, settings: Mapping[str, Any]) -> None:
        """Write every option of the run, and what it knows of data and model."""
        self._write_json("settings.json", {"version": version("pdpsgd"), **settings})

    def write_schema(self, schema: Schema) -> None:
        """Write the schema of the records; a draft, which was read from them, is not public."""
        place = (PUBLIC, "schema.toml") if schema.confirmed else (PRIVATE, "schema-draft.toml")
        write_atomically(self.path.joinpath(*place), schema.to_toml())

    def write_history(self, history: Iterable[Mapping[str, Any]]) -> None:
        """Write public figures over the steps, one line each."""
        lines = (json.dumps(to_jsonable(record)) + "\n" for record in history)
        write_atomically(self.public / "history.jsonl", "".join(lines))

    def write_promises(self, plan: Plan, budgets: Budgets) -> None:
        """Write for each person on the list what they asked for, and what is proven for them.

        With a ledger, what they asked for is over all runs together, and what is proven is of this run.
        """
        from pdpsgd.planning.levels import match_ids

        if (
            plan.ledger is not None and plan.roster is not None
        ):  # budgets are over all runs, levels of this one
            levels = match_ids(plan.roster, budgets)
        else:
            levels = plan.level_of_person(budgets)
        write_atomically(
            self._place("promises.csv", plan, folder=PEOPLE), promise_lines(plan, budgets, levels)
        )

    def write_model(
        self,
        model: nn.Module,
        description: ModelDescription | None = None,
        *,
        name: str = "model.safetensors",
    ) -> None:
        """Write the model's state, under the names that the bare model has, and what has to be known to use it."""
        import safetensors.torch

        state: dict[str, Tensor] = {
            key: value.detach().cpu().contiguous().clone() for key, value in model.state_dict().items()
        }
        # One key: safetensors writes several in no certain order.
        known = None if description is None else {"pdpsgd": description.public_part().to_json()}
        write_atomically(self.public / name, safetensors.torch.save(state, metadata=known))
        if description is not None:
            folder = PUBLIC if description.confirmed else PRIVATE
            write_atomically(self.path / folder / "model.json", description.to_json())

    def write_result(self, result: Mapping[str, Any]) -> None:
        """Write the summary; its presence means that the run has ended."""
        self._write_json("result.json", result)

    def write_reservation(self, ledger: str, token: str) -> None:
        """Note the reservation of this run, before it is made."""
        self.make()
        self._write_json("reservation.json", {"ledger": ledger, "token": token}, folder=PRIVATE)

    def write_command(self, record: Mapping[str, Any]) -> None:
        """Write what the command was asked for; digests of files depend on the records in them, so it is private."""
        self._write_json("command.json", record, folder=PRIVATE)

    def read_command(self) -> dict[str, Any] | None:
        """Read what the command was asked for; None where it was not written."""
        if not (self.path / PRIVATE / "command.json").exists():
            return None
        return self._read_json("command.json", COMMAND, folder=PRIVATE)

    def forget_reservation(self) -> None:
        """Remove the note of a reservation that was taken back before the run began."""
        (self.path / PRIVATE / "reservation.json").unlink(missing_ok=True)

    def read_reservation(self) -> dict[str, str] | None:
        """Read under which token the run is reserved in which ledger; None where there is none."""
        if not (self.path / PRIVATE / "reservation.json").exists():
            return None
        return self._read_json("reservation.json", RESERVATION, folder=PRIVATE)

    def add_sensitive(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Append what must not be published, readable by its owner only."""
        path = self.path / PRIVATE / "steps.jsonl"
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "a") as file:
            file.writelines(json.dumps(to_jsonable(record)) + "\n" for record in records)

    def write_norms(self, sums: IndividualSums, plan: Plan) -> None:
        """Write what each person's gradient norms add up to, by their place on the list. Sensitive."""
        import safetensors.numpy

        columns = {"squares": sums.squares, "seen": sums.seen, "saved": sums.saved}
        content = safetensors.numpy.save(
            {**columns, "level": sums.level_of_person}, metadata={"plan": without_people(plan).digest}
        )
        write_atomically(self.norms, content)

    # --- written about the run --------------------------------------------------------------------------

    def write_audit(self, public: Mapping[str, Any], sensitive: Mapping[str, Any] | None) -> None:
        """Write what an audit found; what was computed from people's records goes into a file of its own."""
        self.make()
        self._write_json("audit.json", public)
        if sensitive is not None:
            self._write_json("audit.json", sensitive, folder=PRIVATE)

    def page(self, plan: Plan) -> Path:
        """Say where the report page goes; that of a plan that is not for release is not public."""
        return self._place("report.html", plan)

    # --- read -------------------------------------------------------------------------------------------

    def read_plan(self, *, verify: bool = True, with_people: bool = False) -> Plan:
        """Read the plan.

        Args:
            verify: Whether to check what the plan claims.
            with_people: Whether to read who is on which level, too, where that was written down.

        Returns:
            The plan.

        Raises:
            PdpsgdError: If there is none, or one that is damaged or, with `verify`, claims too little.
        """
        from pdpsgd.planning.plans import Plan

        self.check_layout()
        folders = (PEOPLE, PUBLIC, PRIVATE) if with_people else (PUBLIC, PRIVATE)
        path = self._found("plan.json", *folders)
        if path is None:
            fail(f"Expected a run folder with a plan.json in it. Got {str(self.path)!r}, which has none.")
        return Plan.read(path, verify=verify)

    def read_settings(self) -> dict[str, Any]:
        """Read the options of the run that was begun here; none where they were not written."""
        return self._read_json("settings.json", SETTINGS) if (self.public / "settings.json").exists() else {}

    def read_result(self) -> dict[str, Any]:
        """Read the summary of a finished run."""
        return self._read_json("result.json", RESULT)

    def read_audit(self) -> dict[str, Any] | None:
        """Read what an audit found, where there was one."""
        return self._read_json("audit.json", AUDIT) if (self.public / "audit.json").exists() else None

    def read_history(self) -> list[dict[str, Any]]:
        """Read the public figures over the steps."""
        path = self.public / "history.jsonl"
        if not path.exists():
            return []
        records = []
        for number, line in enumerate(read_text(path, "figures (a line of JSON each)").splitlines(), start=1):
            record = parse_json(line, f"line {number} of {str(path)!r}", "an object")
            check_shape(f"{path}, line {number}", record, HISTORY)
            records.append(record)
        return records

    def version_note(self) -> str | None:
        """Say that another version wrote the folder, if one did: what it says may be meant otherwise there."""
        here = version("pdpsgd")
        found = self.read_settings().get("version")
        if found is None and self.finished:
            found = (self.read_result().get("versions") or {}).get("pdpsgd")
        if found == here or not (self.begun or self.finished):
            return None
        wrote = "a version that does not say which" if found is None else f"version {found}"
        return f"{self.path} was written by {wrote} of pdpsgd, and is read by version {here}."

    @property
    def norms(self) -> Path:
        """What each person's gradient norms add up to, where the run kept them."""
        return self.path / PRIVATE / "norms.safetensors"

    @property
    def individual(self) -> Path:
        """What the run has cost each person by these norms, where it was computed."""
        return self.path / PRIVATE / "individual.csv"

    @property
    def promises(self) -> Path | None:
        """Each person's promise, where it was written."""
        return self._found("promises.csv", PEOPLE, PRIVATE)

    def read_promises(self, plan: Plan) -> Iterator[Promise]:
        """Read who was promised what, line by line; who is on which level has to fit the plan."""
        if self.promises is None:
            fail(
                f"Expected people/promises.csv in {str(self.path)!r}, to know who was promised what. Got none: it may "
                "have been moved away, or the run knew no list of people."
            )
        return read_promises(self.promises, plan)

    @property
    def schema(self) -> Path | None:
        """The schema of the records, confirmed or a draft, where there is one."""
        return self._found("schema.toml", PUBLIC) or self._found("schema-draft.toml", PRIVATE)

    @property
    def letters(self) -> Path:
        """The folder of letters to people."""
        return self.path / PEOPLE / "letters"

    def _found(self, name: str, *folders: str) -> Path | None:
        paths = [self.path / folder / name for folder in folders]
        return next((path for path in paths if path.exists()), None)

    def _place(self, name: str, plan: Plan, *, folder: str = PUBLIC) -> Path:
        return self.path / (folder if public(plan) else PRIVATE) / name

    def _write_json(self, name: str, value: Mapping[str, Any], *, folder: str = PUBLIC) -> None:
        write_atomically(self.path / folder / name, json.dumps(to_jsonable(value), indent=1) + "\n")

    def _read_json(self, name: str, shape: Any, *, folder: str = PUBLIC) -> dict[str, Any]:
        path = self.path / folder / name
        read: dict[str, Any] = parse_json(read_text(path, "a JSON file"), repr(str(path)))
        check_shape(str(path), read, shape)
        return read


def public(plan: Plan) -> bool:
    """Whether files that follow from the plan may be published."""
    return plan.not_for_release is None


def without_people(plan: Plan) -> Plan:
    """Make a plan that says how many people are on each level, but not who."""
    return replace(plan, roster=None, stated_people=plan.people_digest)


def write_atomically(path: Path, content: str | bytes | Iterator[str]) -> None:
    """Write a file whole or not at all: complete it beside the old one, then let it take the name."""
    parts: Iterable[str | bytes] = (content,) if isinstance(content, (str, bytes)) else content
    data = (part.encode() if isinstance(part, str) else part for part in parts)
    if path.is_dir() or not path.name:
        fail(f"Expected a file to write. Got {str(path)!r}, which is a folder.")
    if path.exists() and not path.is_file():  # a device or a pipe, which must not be replaced by a file
        path.write_bytes(b"".join(data))
        return
    beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with open(beside, "wb") as file:
            file.writelines(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except OSError as error:
        fail(
            f"Expected to be able to write {str(path)!r}. Got: {error.strerror}. What stood there is "
            "unchanged."
        )
    finally:
        with contextlib.suppress(OSError):  # it is gone where all went well
            beside.unlink()


def to_jsonable(value: Any) -> Any:
    """Turn a value into what JSON can hold; infinities become text, as in a plan's JSON."""
    if isinstance(value, Mapping):
        return {str(key): to_jsonable(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_jsonable(part) for part in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    if hasattr(value, "item"):
        return to_jsonable(value.item())
    return str(value)
