"""What a finished run left behind in its folder."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pdpsgd.errors import fail, shown
from pdpsgd.planning.verdict import EXCEPT, HOLDS, NOT_FOR_RELEASE, verdict
from pdpsgd.training.run_folder import RunFolder, without_people

if TYPE_CHECKING:
    from pdpsgd.planning.plans import Plan

_OUTCOMES = (HOLDS, EXCEPT, NOT_FOR_RELEASE)


@dataclass(frozen=True)
class Run:
    """Plan, settings, result and figures of a finished run."""

    name: str
    plan: Plan
    settings: Mapping[str, Any]
    result: Mapping[str, Any]
    history: Sequence[Mapping[str, Any]]
    audit: Mapping[str, Any] | None = None
    weights_say: str | None = None
    """What the file of the model says against its release."""

    @property
    def evaluation(self) -> Mapping[str, Any]:
        """Figures on test people; empty where there were none."""
        return self.result.get("evaluation") or {}

    @property
    def verdict(self) -> Mapping[str, Any] | None:
        """The worst of what the result, the plan with the settings, and the weights say; None before verdicts were."""
        found: Mapping[str, Any] | None = self.result.get("verdict")
        if found is None:
            return None
        of_plan = verdict(
            self.plan,
            verified=True,
            seeded=self.settings.get("seed") is not None,
            weak_generator="a generator that is not secure" if self.settings.get("secure") is False else None,
            in_ledger=(self.result.get("ledger") or {}).get("id"),
        )
        if self.weights_say is not None:
            of_plan = of_plan.with_reason(
                "weights", f"The model's file speaks against it: {self.weights_say}"
            )
        is_worse = _OUTCOMES.index(of_plan.outcome) > _OUTCOMES.index(found["outcome"])
        return of_plan.to_dict() if is_worse else found


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
    run = Run(
        name=root.resolve().name,
        plan=place.read_plan(verify=False),
        settings=place.read_settings(),
        result=place.read_result(),
        history=place.read_history(),
        audit=place.read_audit(),
        weights_say=_said_by_weights(place.model),
    )
    _check_one_run(run, str(root))
    return run


def _said_by_weights(weights: Path) -> str | None:
    """Read what the file of a model says against its release; nothing where it cannot be read, or says nothing."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(weights, framework="numpy") as file:
            said = json.loads((file.metadata() or {}).get("pdpsgd", "{}")).get("not_for_release")
    except (OSError, SafetensorError, ValueError, AttributeError, RecursionError):
        return None
    return None if said is None else str(said)


def _check_one_run(run: Run, place: str) -> None:
    """Refuse files of several runs in one folder: what is proven by one plan is nothing that another run keeps."""
    own = without_people(run.plan).digest
    stated = {"settings.json": run.settings.get("plan"), "audit.json": (run.audit or {}).get("plan")}
    for name, digest in stated.items():
        if digest is not None and digest != own:
            fail(
                f"Expected files of one run in {place!r}. Got a plan.json with the digest {own[:12]}, and {name} is of "
                f"a run with the plan {shown(str(digest)[:12])}: put back the files of this run, or audit it again."
            )
    known = [
        [_said(each) for each in (x.epsilon, x.delta, x.people, x.proven_epsilon)] for x in run.plan.levels
    ]
    names = ("epsilon", "delta", "people", "proven_epsilon")
    levels = run.result.get("levels")
    if levels is not None and [[_said(level.get(name)) for name in names] for level in levels] != known:
        fail(
            f"Expected files of one run in {place!r}. Got a result.json whose levels are not those of plan.json: put "
            "back the files of this run."
        )


def _said(value: object) -> str:
    """Write a number as a run's files do, infinities included."""
    return str(float(value)) if isinstance(value, int | float) else str(value)
