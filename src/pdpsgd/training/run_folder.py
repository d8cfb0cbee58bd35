"""What a run leaves behind: a folder that can be published, apart from what its name says.

| file | what it holds |
|---|---|
| `plan.json` | the plan |
| `settings.json` | every option of the run, and versions |
| `history.jsonl` | public figures over the steps (on test people) |
| `promises.csv` | for each person: what was asked, what is proven, the level |
| `model.safetensors` | the trained model; loads without pdpsgd |
| `result.json` | the summary |
| `checkpoint.safetensors` | where to resume; holds the secret key until the run ends |
| `SENSITIVE-do-not-publish.jsonl` | only if asked for: batch sizes, training losses |

Never written unless asked for: who was drawn, sizes of batches, training losses. A plan that is
not for release goes, with the promises made from it, into files whose names begin with SENSITIVE-do-not-publish.
"""

from __future__ import annotations

import csv
import io
import json
import math
import os
import secrets
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pdpsgd.errors import fail

if TYPE_CHECKING:
    from torch import Tensor, nn

    from pdpsgd.budgets.budgets import Budgets
    from pdpsgd.planning.plans import Plan

SENSITIVE = "SENSITIVE-do-not-publish"


class RunFolder:
    """The files of one run."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            fail(
                f"Expected a folder that can be written at run_folder={str(self.path)!r}. Got: "
                f"{error.strerror}."
            )

    @property
    def checkpoint(self) -> Path:
        """Where the run can be resumed from."""
        return self.path / "checkpoint.safetensors"

    @property
    def journal(self) -> Path:
        """What the noise of steps since the checkpoint has met; as secret as the key."""
        return self.path / "checkpoint.journal"

    @property
    def finished(self) -> bool:
        """Whether a run ended here."""
        return (self.path / "result.json").exists()

    @property
    def begun(self) -> bool:
        """Whether a run began here."""
        return self.checkpoint.exists()

    def write_plan(self, plan: Plan) -> None:
        """The plan; under a telling name if it tells who was drawn."""
        write_atomically(self._named("plan.json", plan), plan.to_json() + "\n")

    def write_settings(self, settings: Mapping[str, Any]) -> None:
        """Every option of the run."""
        self._write_json("settings.json", settings)

    def read_settings(self) -> dict[str, Any]:
        """The options of the run that was begun here; none if they cannot be read."""
        try:
            settings: dict[str, Any] = json.loads((self.path / "settings.json").read_text(encoding="utf-8"))
        except (OSError, json.JSONDecodeError):
            return {}
        return settings

    def write_history(self, history: Iterable[Mapping[str, Any]]) -> None:
        """Public figures over the steps, one line each."""
        lines = (json.dumps(plain(record)) + "\n" for record in history)
        write_atomically(self.path / "history.jsonl", "".join(lines))

    def write_promises(self, plan: Plan, budgets: Budgets) -> None:
        """For each person on the list: what they asked for, and what is proven for them."""
        levels = plan.level_of_person(budgets).tolist()
        text = io.StringIO()
        rows = csv.writer(text, lineterminator="\n")
        rows.writerow(("id", "asked_epsilon", "asked_delta", "proven_epsilon", "proven_delta", "level"))
        proven = [(level.proven_epsilon, level.delta) for level in plan.levels]
        rows.writerows(
            (
                name,
                _number(epsilon),
                _number(delta),
                _number(proven[level][0]),
                _number(proven[level][1]),
                level,
            )
            for name, epsilon, delta, level in zip(
                budgets.ids.tolist(), budgets.epsilon.tolist(), budgets.delta.tolist(), levels, strict=True
            )
        )
        write_atomically(self._named("promises.csv", plan), text.getvalue())

    def write_model(self, model: nn.Module, *, name: str = "model.safetensors") -> None:
        """The model's state, under the names that the bare model has."""
        import safetensors.torch

        state: dict[str, Tensor] = {
            key: value.detach().cpu().contiguous().clone() for key, value in model.state_dict().items()
        }
        write_atomically(self.path / name, safetensors.torch.save(state))

    def write_result(self, result: Mapping[str, Any]) -> None:
        """The summary; its presence means that the run has ended."""
        self._write_json("result.json", result)

    def add_sensitive(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Append what must not be published, readable by its owner only."""
        path = self.path / f"{SENSITIVE}.jsonl"
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "a") as file:
            file.writelines(json.dumps(plain(record)) + "\n" for record in records)

    def _named(self, name: str, plan: Plan) -> Path:
        return self.path / (f"{SENSITIVE}-{name}" if plan.not_for_release else name)

    def _write_json(self, name: str, value: Mapping[str, Any]) -> None:
        write_atomically(self.path / name, json.dumps(plain(value), indent=1) + "\n")


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a file whole or not at all: complete it beside the old one, then let it take the name."""
    data = content.encode() if isinstance(content, str) else content
    beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with open(beside, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except OSError as error:
        beside.unlink(missing_ok=True)
        fail(
            f"Expected to be able to write {str(path)!r}. Got: {error.strerror}. What stood there is "
            "unchanged."
        )


def plain(value: Any) -> Any:
    """As JSON can hold it: infinities are written as text, as in a plan's JSON."""
    if isinstance(value, Mapping):
        return {str(key): plain(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(part) for part in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    if hasattr(value, "item"):
        return plain(value.item())
    return str(value)


def _number(value: float | None) -> str:
    return "" if value is None else repr(value)
