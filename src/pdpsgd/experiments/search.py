"""The same small hyper-parameter search for every system: a few learning rates, a validation split, one seed.

The last 5,000 training people are held out and the rest trained on (a plan of its own). The choice itself is
not accounted for: it looks at people's data. That is the custom for such comparisons, and it favours nobody,
because every system gets the same grid.
"""

from __future__ import annotations

from dataclasses import replace

from pdpsgd.experiments.record import Record
from pdpsgd.experiments.settings import Population, Recipe, Setting

SEARCH_SEED = 0

LONG = Recipe(steps=1000, batch_size=2048)

GRIDS: dict[tuple[str, str], tuple[Recipe, tuple[float, ...]]] = {
    ("mnist", "pixels"): (Recipe(steps=300, activation="tanh"), (2.0, 4.0, 6.0)),
    ("fashion-mnist", "pixels"): (Recipe(steps=300, activation="relu"), (4.0, 8.0)),
    ("svhn", "pixels"): (Recipe(steps=400, activation="relu", max_grad_norm=1.0), (2.0, 4.0)),
    ("mnist", "scattering"): (Recipe(steps=400, batch_size=2048, features="scattering"), (2.0, 4.0)),
    ("fashion-mnist", "scattering"): (
        Recipe(steps=400, batch_size=2048, features="scattering"),
        (2.0, 4.0),
    ),
    ("svhn", "scattering"): (Recipe(steps=400, batch_size=2048, features="scattering"), (2.0, 4.0)),
    ("fashion-mnist", "long"): (replace(LONG, activation="relu"), (2.0, 3.0)),
    ("svhn", "long"): (replace(LONG, activation="relu", max_grad_norm=1.0), (3.0,)),
    ("digits", "pixels"): (Recipe(steps=100, batch_size=128, activation="tanh"), (1.0, 2.0)),
}
"""For each data set and kind of training: the recipe, and the learning rates that are tried.

The kinds: the paper's network on `pixels`, short enough for many systems; the same, `long`; and a linear model
on `scattering` features.
"""


SOUND_ROUNDS = 3
THRESHOLDED = ("adapdp", "pdp-sgd-fixed", "pdp-sgd-adaptive")


def recipe_for(system: str, recipe: Recipe) -> Recipe:
    """The recipe as a system can use it.

    Where everybody pays, systems with thresholds have spent all that people allow after three or four rounds,
    and a plan drops the rounds after that. Of ten rounds most would be dropped, with their steps; with three,
    these systems take about as many steps as the others.
    """
    return replace(recipe, rounds=SOUND_ROUNDS) if system in THRESHOLDED else recipe


def kind_of(setting: Setting) -> str | None:
    """The kind of training whose grid a setting's recipe is from; None if it is from no grid."""
    for (dataset, kind), (recipe, _) in GRIDS.items():
        alike = replace(setting.recipe, learning_rate=recipe.learning_rate, rounds=recipe.rounds)
        if dataset == setting.dataset and alike == recipe:
            return kind
    return None


def trials(
    dataset: str, system: str, kind: str = "pixels", *, threshold: float | None = None
) -> list[Setting]:
    """The settings that the search tries, all at k = 0."""
    recipe, rates = GRIDS[dataset, kind]
    return [
        Setting(
            dataset,
            system,
            replace(recipe_for(system, recipe), learning_rate=rate),
            Population(),
            threshold=threshold,
            split="validation",
        )
        for rate in rates
    ]


def chosen_recipe(record: Record, candidates: list[Setting]) -> Recipe | None:
    """The recipe that was best on the validation split; None until all candidates have been tried.

    Where there is one candidate only, nothing has to be tried.
    """
    if len(candidates) == 1:
        return candidates[0].recipe
    accuracies = []
    for setting in candidates:
        tried = [run["accuracy"] for run in record.of(setting) if run["seed"] == SEARCH_SEED]
        if not tried:
            return None
        accuracies.append(tried[-1])
    return candidates[accuracies.index(max(accuracies))].recipe
