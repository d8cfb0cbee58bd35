"""From records to figures: mean and standard deviation of the seeds of a setting, beside what was printed."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from scipy.stats import t

from experiments.published import Printed
from experiments.record import Record
from experiments.settings import Recipe, Setting


@dataclass(frozen=True)
class Cell:
    """What the runs of one setting came to, accuracies in percent; no runs, no figures."""

    setting: Setting
    by_seed: dict[int, float]
    seconds: float | None
    processor_seconds: float | None
    iterations: int | None
    parameters: int | None
    largest_proven: float | None
    printed: Printed | None = None
    searched: bool = True

    @property
    def seeds(self) -> int:
        """How many runs there are."""
        return len(self.by_seed)

    @property
    def mean(self) -> float | None:
        """The mean accuracy."""
        return statistics.fmean(self.by_seed.values()) if self.by_seed else None

    @property
    def deviation(self) -> float | None:
        """The standard deviation over seeds; None for fewer than two."""
        return statistics.stdev(self.by_seed.values()) if self.seeds > 1 else None

    def text(self) -> str:
        """Return mean, deviation, number of seeds for a table; empty without runs, * with a borrowed recipe.

        >>> Cell(Setting("mnist", "dp-sgd", Recipe()), {0: 95.0, 1: 96.0}, 1.0, 1.0, 1, 1, 0.5).text()
        '95.50 ± 0.71 (2)'
        """
        if self.mean is None:
            return ""
        spread = "" if self.deviation is None else f" ± {self.deviation:.2f}"
        return f"{self.mean:.2f}{spread} ({self.seeds})" + ("" if self.searched else " *")

    def row(self) -> dict[str, Any]:
        """Return a row for a CSV file or JSON."""
        setting, recipe = self.setting, self.setting.recipe
        return {
            "dataset": setting.dataset,
            "system": setting.system,
            "k": setting.population.k,
            "tiers": " ".join(f"{epsilon:g}:{share:g}" for epsilon, share in setting.population.tiers),
            "bookkeeping": setting.bookkeeping,
            "accountant": setting.accountant,
            "features": recipe.features,
            "activation": "" if recipe.features == "scattering" else recipe.activation,
            "steps": recipe.steps,
            "batch_size": recipe.batch_size,
            "max_grad_norm": recipe.max_grad_norm,
            "learning_rate": recipe.learning_rate,
            "momentum": recipe.momentum,
            "weight_average": recipe.weight_average,
            "views": recipe.views,
            "start": recipe.start,
            "rounds": recipe.rounds,
            "recipe_searched": self.searched,
            "seeds": self.seeds,
            "accuracy": _rounded(self.mean),
            "standard_deviation": _rounded(self.deviation),
            "printed_accuracy": None if self.printed is None else self.printed.mean,
            "printed_deviation": None if self.printed is None else self.printed.deviation,
            "iterations": self.iterations,
            "seconds": _rounded(self.seconds),
            "processor_seconds": _rounded(self.processor_seconds),
            "parameters": self.parameters,
        }


def cell(setting: Setting, record: Record, printed: Printed | None = None, *, searched: bool = True) -> Cell:
    """Return the runs of a setting that are on record."""
    runs = sorted(record.of(setting), key=lambda run: int(run["seed"]))
    proven = [level["proven_epsilon"] for run in runs for level in run["levels"] if level["proven_epsilon"]]
    return Cell(
        setting=setting,
        by_seed={run["seed"]: 100 * run["accuracy"] for run in runs},
        seconds=_mean(run["seconds"] for run in runs),
        processor_seconds=_mean(run["processor_seconds"] for run in runs if "processor_seconds" in run),
        iterations=round(statistics.fmean(run["iterations"] for run in runs)) if runs else None,
        parameters=max(run["parameters"] for run in runs) if runs else None,
        largest_proven=max(proven, default=None),
        printed=printed,
        searched=searched,
    )


def differences(one: Cell, other: Cell) -> list[float]:
    """Return how many points one is above the other, for each seed that both have."""
    return [one.by_seed[seed] - other.by_seed[seed] for seed in one.by_seed if seed in other.by_seed]


def gain(found: Cell | None, uniform: Cell | None) -> str:
    """Return the gain over uniform DP-SGD, seed by seed: mean ± standard error; empty without common seeds.

    >>> from dataclasses import replace
    >>> made = Setting("mnist", "dp-sgd", Recipe())
    >>> uniform = Cell(made, {0: 95.0, 1: 96.0}, 1.0, 1.0, 1, 1, 0.5)
    >>> gain(replace(uniform, by_seed={0: 96.0, 1: 99.0}), uniform)
    '+2.00 ± 1.00'
    """
    pairs = [] if found is None or uniform is None else differences(found, uniform)
    if not pairs:
        return ""
    error = f" ± {statistics.stdev(pairs) / math.sqrt(len(pairs)):.2f}" if len(pairs) > 1 else ""
    return f"{statistics.fmean(pairs):+.2f}{error}"


def is_alike(found: Cell, exact: Cell | None) -> bool:
    """Return whether a paired t test at 5 % over seeds finds no difference; it takes two seeds at least."""
    pairs = [] if exact is None else differences(found, exact)
    if len(pairs) < 2:
        return False
    error = statistics.stdev(pairs) / math.sqrt(len(pairs))
    return abs(statistics.fmean(pairs)) <= float(t.ppf(0.975, len(pairs) - 1)) * error


def alike_text(found: Cell | None, exact: Cell | None) -> str:
    """Return that two cells are not to be told apart, for a sentence; empty where they are."""
    return " (not to be told apart)" if found is not None and is_alike(found, exact) else ""


STARTED = {
    "drawn": ", started from drawn digits",
    "normalized": ", layers normalized by generated images",
    "processes": ", started from images of random processes",
}


def network_of(recipe: Recipe) -> str:
    """Return the model and what is not as in the paper about it, for a table.

    >>> network_of(Recipe(activation="tanh", views=4))
    "the paper's CNN with tanh, 4 views"
    """
    if recipe.features == "scattering":
        return "linear on scattering features"
    differences = [
        "" if recipe.activation == "relu" else f" with {recipe.activation}",
        ", images standardized" if recipe.features == "standardised-pixels" else "",
        ", images standardized locally" if recipe.features == "locally-standardised-pixels" else "",
        f", {recipe.views} views" if recipe.views > 1 else "",
        STARTED.get(recipe.start, ""),
    ]
    return ("IDP-SGD's CNN" if recipe.network == "idp" else "the paper's CNN") + "".join(differences)


def printed_text(printed: Printed | None) -> str:
    """Return a printed figure for a table; empty where nothing was printed."""
    if printed is None:
        return ""
    return f"{printed.mean:.2f}" + ("" if printed.deviation is None else f" ± {printed.deviation:.2f}")


def _mean(values: Iterable[float]) -> float | None:
    found = list(values)
    return statistics.fmean(found) if found else None


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)
