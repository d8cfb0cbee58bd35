"""What a finished run left behind in its folder."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pdpsgd.errors import PdpsgdError, fail

if TYPE_CHECKING:
    from pdpsgd.planning.plans import Plan

PLAN_FILES = ("plan.json", "SENSITIVE-do-not-publish-plan.json")


@dataclass(frozen=True)
class Run:
    """What a finished run left behind."""

    name: str
    plan: Plan
    settings: Mapping[str, Any]
    result: Mapping[str, Any]
    history: Sequence[Mapping[str, Any]]
    audit: Mapping[str, Any] | None = None

    @property
    def evaluation(self) -> Mapping[str, Any]:
        """Figures on test people; empty where there were none."""
        return self.result.get("evaluation") or {}


def read_run(folder: str | Path) -> Run:
    """The files of a finished run."""
    from pdpsgd.planning.plans import Plan

    root = Path(folder)
    if not root.is_dir():
        fail(f"Expected the folder of a run. Got {str(root)!r}, which is not a folder.")
    if not (root / "result.json").exists():
        begun = (root / "checkpoint.safetensors").exists()
        state = "a run that has not ended: go on with --resume" if begun else "no run"
        fail(f"Expected a finished run (result.json) in {str(root)!r}. There is {state}.")
    plan_file = next((root / name for name in PLAN_FILES if (root / name).exists()), root / PLAN_FILES[0])
    try:
        plan = Plan.from_json(plan_file.read_text(encoding="utf-8"), verify=False)
        settings, result = (
            json.loads((root / name).read_text()) for name in ("settings.json", "result.json")
        )
        lines = (root / "history.jsonl").read_text().splitlines() if (root / "history.jsonl").exists() else []
        history = [json.loads(line) for line in lines]
        audit = json.loads((root / "audit.json").read_text()) if (root / "audit.json").exists() else None
    except (OSError, json.JSONDecodeError, PdpsgdError) as error:
        fail(f"Expected the files of a run in {str(root)!r}. {error}")
    return Run(root.resolve().name, plan, settings, result, history, audit)
