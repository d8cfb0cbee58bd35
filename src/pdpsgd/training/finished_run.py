"""What a finished run left behind in its folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pdpsgd.errors import fail
from pdpsgd.training.run_folder import RunFolder

if TYPE_CHECKING:
    from pdpsgd.planning.plans import Plan


@dataclass(frozen=True)
class Run:
    """Plan, settings, result and figures of a finished run."""

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
    """Read the files of a finished run."""
    place = RunFolder(folder)
    root = place.path
    if not root.is_dir():
        fail(f"Expected the folder of a run. Got {str(root)!r}, which is not a folder.")
    place.check_layout()
    if not place.finished:
        state = "a run that has not ended: continue it with --resume" if place.begun else "no run"
        fail(f"Expected a finished run in {str(root)!r}. There is {state}.")
    return Run(
        name=root.resolve().name,
        plan=place.read_plan(verify=False),
        settings=place.read_settings(),
        result=place.read_result(),
        history=place.read_history(),
        audit=place.read_audit(),
    )
