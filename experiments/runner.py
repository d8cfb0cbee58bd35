"""One run: data, people, plan, training, and everything worth keeping of it."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from experiments.inputs import data_of, model_of
from experiments.record import Record
from experiments.settings import Setting
from experiments.systems import plan_of, published_of
from pdpsgd.planning.as_published import BOOKKEEPING, Claim
from pdpsgd.planning.plans import Plan
from pdpsgd.training.augmentation import Shifts
from pdpsgd.training.fitting import fit


def run_all(
    runs: Iterable[tuple[Setting, int]],
    record: Record,
    *,
    quick: bool = False,
    say: Callable[[str], None] = print,
    progress: bool = False,
) -> int:
    """Do the runs (settings with seeds) that the record does not have yet; return how many there were.

    `quick` runs are short, and recorded as if they were the real ones: give them a record of their own. `progress`
    shows a bar for the run in hand. Interrupted, it says where the finished runs are.
    """
    asked = list(runs)
    missing = [(setting, seed) for setting, seed in asked if not record.has(setting, seed)]
    if len(missing) < len(asked):
        say(f"{len(asked) - len(missing)} of {len(asked)} runs are on record in {record.path}")
    done = 0
    for number, (setting, seed) in enumerate(missing, start=1):
        if record.has(setting, seed):  # read anew each time: other processes may write too
            continue
        say(f"run {number} of {len(missing)}: {title(setting.to_dict(), seed)}")
        try:
            finished = run(setting.quick() if quick else setting, seed, progress=progress)
        except KeyboardInterrupt:
            raise KeyboardInterrupt(
                f"This run is lost; the {done} that were finished before it are kept in {record.path}, and the same "
                "command goes on after them."
            ) from None
        finished |= {"key": setting.key(seed), "setting": setting.to_dict(), "quick": quick}
        record.add(finished)
        done += 1
        say(describe(finished))
    return done


def run(setting: Setting, seed: int, *, progress: bool = False) -> dict[str, Any]:
    """Train and evaluate once. The seed decides who has which budget, the first weights, samples and noise."""
    commit = commit_of_this_code()  # asked before training: the clone may move on meanwhile
    train, test = data_of(setting)
    budgets = setting.population.budgets(len(train[1]), shuffle=seed)
    planned, claimed = _plan(setting, len(train[1]), seed)
    torch.manual_seed(seed)
    model = model_of(setting)
    began, busy = time.monotonic(), time.process_time()
    result = fit(
        model,
        train,
        budgets,
        plan=planned,
        learning_rate=setting.recipe.learning_rate / setting.recipe.max_grad_norm,
        momentum=setting.recipe.momentum,
        schedule=setting.recipe.schedule,
        weight_average=setting.recipe.weight_average,
        augment=Shifts(2) if setting.recipe.views > 1 else None,
        views=setting.recipe.views,
        test_data=test,
        seed=seed,
        progress=progress,
    )
    return {
        "key": setting.key(seed),
        "setting": setting.to_dict(),
        "seed": seed,
        "accuracy": result.accuracy,
        "iterations": planned.steps,
        "seconds": round(time.monotonic() - began, 1),
        "processor_seconds": round(time.process_time() - busy, 1),
        "models": len(result.models),
        "parameters": sum(parameter.numel() for parameter in result.model.parameters()),
        "finished": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "versions": dict(result.versions),
        "commit": commit,
        "levels": summary_of_levels(planned, claimed),
        "rounds": [
            {
                "steps": r.steps,
                "noise_multiplier": r.noise_multiplier,
                "expected_batch_size": r.expected_batch_size,
                "threshold": r.threshold,
            }
            for r in planned.rounds
        ],
    }


def title(setting: dict[str, Any], seed: int) -> str:
    """Return which run it is.

    >>> from experiments.settings import Recipe
    >>> title(Setting("mnist", "dp-sgd", Recipe()).to_dict(), 0)
    'mnist dp-sgd k=0 sound by pld pixels, learning rate 2 cosine, batch 1024, seed 0'
    """
    recipe = setting["recipe"]
    reading = "" if setting.get("reading") is None else f" ({setting['reading']})"
    start = f" from a {recipe['start']} start" if "start" in recipe else ""
    return (
        f"{setting['dataset']} {setting['system']}{reading} k={setting['population']['k']:g} "
        f"{setting['bookkeeping']} by {setting['accountant']} {recipe['features']}{start}, "
        f"learning rate {recipe['learning_rate']:g} "
        f"{recipe['schedule']}, batch {recipe['batch_size']:g}, seed {seed}"
    )


def describe(run: dict[str, Any]) -> str:
    """Return a finished run in one line."""
    return (
        f"{title(run['setting'], run['seed'])}: {run['setting']['split']} accuracy {100 * run['accuracy']:.2f} % "
        f"after {run['iterations']:,} steps, {run['seconds']:.0f} s"
    )


@lru_cache(maxsize=1)
def commit_of_this_code() -> str | None:
    """Return the commit of the running code, "+" if it was changed since; None outside a clone."""
    root = Path(__file__).parents[1]
    if not (root / ".git").exists():
        return None
    command = ["git", "describe", "--always", "--abbrev=12", "--exclude=*", "--dirty=+"]
    try:
        described = subprocess.run(command, cwd=root, capture_output=True, text=True)
    except OSError:  # no Git here
        return None
    return described.stdout.strip() or None


def summary_of_levels(planned: Plan, claimed: Sequence[Claim] = ()) -> list[dict[str, Any]]:
    """Return promised and proven epsilon, one entry for each budget.

    As-published plans have a level for every history of draws, which is sensitive: people of one budget are
    put together, and the worst of them counts.
    """
    summary: dict[tuple[float, float], dict[str, Any]] = {}
    for index, level in enumerate(planned.levels):
        entry = summary.setdefault(
            (level.epsilon, level.delta),
            {"epsilon": level.epsilon, "delta": level.delta, "people": 0, "proven_epsilon": None},
        )
        entry["people"] += level.people
        figures = {"proven_epsilon": level.proven_epsilon, **(asdict(claimed[index]) if claimed else {})}
        for name, value in figures.items():
            if value is not None:
                entry[name] = max(value, entry.get(name) or 0.0)
    return list(summary.values())


@lru_cache(maxsize=64)
def _sound_plan(setting: Setting, people: int) -> Plan:
    """A sound plan knows how many people have which budget, not who; so all seeds share it."""
    made = plan_of(setting, setting.population.budgets(people, shuffle=0), seed=0)
    return replace(made, roster=None)


def _plan(setting: Setting, people: int, seed: int) -> tuple[Plan, tuple[Claim, ...]]:
    if setting.bookkeeping == BOOKKEEPING:
        return published_of(setting, setting.population.budgets(people, shuffle=seed), seed=seed)
    return _sound_plan(setting, people), ()
