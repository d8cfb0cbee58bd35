"""What a run of the paper's set-up takes, without running it whole: its plan, and the time of a few steps."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, field
from typing import Any

import torch

from experiments.inputs import data_of, model_of
from experiments.record import Record
from experiments.settings import Setting
from experiments.systems import plan_of
from pdpsgd.planning.plans import Plan
from pdpsgd.training.fitting import fit
from pdpsgd.training.versions import versions

TURNS = 7
STEPS_A_TURN = 200


def measure_all(settings: list[Setting], record: Record, *, seed: int = 0, quick: bool = False) -> None:
    """Measure the settings that are not on record yet; those of a data set in turns.

    `quick` ones are short, and recorded as if they were the real ones: give them a record of their own.
    """
    for dataset in dict.fromkeys(setting.dataset for setting in settings):
        missing = [s for s in settings if s.dataset == dataset and not record.has(s, seed)]
        found = (
            measure([s.quick() for s in missing], turns=1, steps=5) if quick else measure(missing, seed=seed)
        )
        for setting, measured in zip(missing, found, strict=True):
            record.add(measured | {"key": setting.key(seed), "setting": setting.to_dict(), "quick": quick})


def measure(
    settings: list[Setting], *, seed: int = 0, turns: int = TURNS, steps: int = STEPS_A_TURN
) -> list[dict[str, Any]]:
    """Measure iterations and models by the plan, and processor time per iteration: the median of some turns.

    Processor time rather than the clock's, and in turns, so that other work on the machine counts for less and
    meets all alike.
    """
    contenders = [_Contender(setting, seed) for setting in settings]
    for _ in range(turns):
        for contender in contenders:
            contender.take_turn(steps)
    return [contender.measured() for contender in contenders]


@dataclass
class _Contender:
    setting: Setting
    seed: int
    milliseconds: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        people = len(data_of(self.setting)[0][1])
        self.budgets = self.setting.population.budgets(people, shuffle=self.seed)
        self.planned: Plan = plan_of(self.setting, self.budgets, seed=self.seed)
        self._seconds(1)  # what is done once in a process

    def take_turn(self, steps: int) -> None:
        """Train for this many steps, and for one: the difference is without what is done once."""
        one, all_of_them = (self._seconds(count) for count in (1, steps))
        self.milliseconds.append(1000 * (all_of_them - one) / (steps - 1))

    def measured(self) -> dict[str, Any]:
        """Return a line of the record."""
        models = 1 + sum(r.fresh_model for r in self.planned.rounds[1:])
        return {
            "key": self.setting.key(self.seed),
            "setting": self.setting.to_dict(),
            "seed": self.seed,
            "iterations": self.planned.steps,
            "rounds": [[r.steps, r.noise_multiplier, r.threshold] for r in self.planned.rounds],
            "models": models,
            "parameters": models
            * sum(parameter.numel() for parameter in model_of(self.setting).parameters()),
            "processor_milliseconds": round(statistics.median(self.milliseconds), 3),
            "turns": [round(each, 3) for each in self.milliseconds],
            "versions": versions(),
        }

    def _seconds(self, steps: int) -> float:
        torch.manual_seed(self.seed)
        model = model_of(self.setting)
        recipe, train = self.setting.recipe, data_of(self.setting)[0]
        began = time.process_time()
        fit(
            model,
            train,
            self.budgets,
            plan=self.planned.prefix(steps),
            learning_rate=recipe.learning_rate / recipe.max_grad_norm,
            schedule=recipe.schedule,
            seed=self.seed,
            progress=False,
        )
        return time.process_time() - began
