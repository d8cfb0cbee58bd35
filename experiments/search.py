"""The same small hyper-parameter search for every system: a few learning rates, a validation split, one seed.

The last 5,000 training people are held out and the rest trained on (a plan of its own). The choice itself is
not accounted for: it looks at people's data. That is the custom for such comparisons, and it favours nobody,
because every system gets the same grid.
"""

from __future__ import annotations

from dataclasses import replace

from experiments.published import IDP_CASES
from experiments.record import Record
from experiments.settings import Population, Recipe, Setting

SEARCH_SEED = 0

SCATTERING = Recipe(steps=400, batch_size=2048, features="scattering")
LARGE_SCATTERING = replace(SCATTERING, batch_size=4096)
"""Twice the work, for a plan with more of the signal that the budgets allow."""

GRIDS: dict[tuple[str, str], tuple[Recipe, tuple[float, ...]]] = {
    ("mnist", "pixels"): (Recipe(steps=300, activation="tanh"), (2.0, 4.0, 6.0)),
    ("fashion-mnist", "pixels"): (Recipe(steps=300, activation="relu"), (2.0, 4.0, 8.0)),
    ("svhn", "pixels"): (Recipe(steps=400, activation="relu", max_grad_norm=1.0), (2.0, 4.0, 6.0)),
    ("mnist", "scattering"): (SCATTERING, (1.0, 2.0, 4.0)),
    ("fashion-mnist", "scattering"): (SCATTERING, (1.0, 2.0, 4.0)),
    ("svhn", "scattering"): (SCATTERING, (1.0, 2.0, 4.0)),
    ("mnist", "scattering-large"): (LARGE_SCATTERING, (1.0, 2.0, 4.0)),
    ("fashion-mnist", "scattering-large"): (LARGE_SCATTERING, (1.0, 2.0, 4.0)),
    ("svhn", "scattering-large"): (LARGE_SCATTERING, (1.0, 2.0, 4.0)),
    ("mnist", "relu"): (Recipe(steps=300, activation="relu"), (2.0, 4.0, 8.0)),
    ("mnist", "best"): (Recipe(steps=600, activation="tanh", views=4), (2.0, 3.0)),
    ("fashion-mnist", "best"): (Recipe(steps=1000, batch_size=2048, activation="relu"), (2.0, 3.0)),
    ("svhn", "best"): (
        Recipe(steps=400, activation="tanh", features="standardised-pixels"),
        (2.0, 4.0),
    ),
    ("mnist", "large"): (Recipe(steps=1000, batch_size=4096, activation="tanh"), (2.0, 4.0)),
    ("mnist", "drawn"): (Recipe(steps=300, activation="tanh", start="drawn"), (2.0, 4.0)),
    ("svhn", "drawn"): (
        Recipe(
            steps=800,
            activation="tanh",
            features="locally-standardised-pixels",
            views=4,
            start="drawn",
        ),
        (2.0, 3.0),
    ),
    ("mnist", "idp"): (
        Recipe(steps=1000, batch_size=4096, activation="tanh", network="idp"),
        (4.0,),
    ),
    ("svhn", "idp"): (
        Recipe(
            steps=300,
            batch_size=2048,
            activation="tanh",
            network="idp",
            features="locally-standardised-pixels",
            start="drawn",
        ),
        (4.0,),
    ),
    ("digits", "pixels"): (Recipe(steps=100, batch_size=128, activation="tanh"), (1.0, 2.0)),
}
"""For each data set and kind of training: the recipe, and the learning rates that are tried.

The kinds: the paper's network on `pixels`, short enough for many systems; the `best` for it that was found, for
`pdp-sgd-exact` and uniform DP-SGD, from random weights; the same in `large` batches, whose plans have more of the
signal that the budgets allow; the best from weights that have seen `drawn` digits; with `relu`, as printed, where
`pixels` is not; a linear model on `scattering` features, also in `large` batches; and, for the budgets of IDP-SGD's
benchmark, the network of its public code (`idp`).
"""

POPULATIONS = {"idp": Population(tiers=IDP_CASES["34/43/23"])}
"""Whose budgets a kind of training is tuned for, where it is not the paper's at k = 0."""


EXCLUDE = "dp-sgd-exclude"
SOUND_ROUNDS = {"adapdp": 2, "pdp-sgd-fixed": 3, "pdp-sgd-adaptive": 3}


def recipe_for(system: str, recipe: Recipe) -> Recipe:
    """Return the recipe as a system can use it.

    Where everybody pays, systems with thresholds have spent all that people allow after two to four rounds, and
    a plan drops the rounds after that. Of ten rounds most would be dropped, with their steps; with two or three,
    these systems take as many steps as the others.
    """
    return replace(recipe, rounds=SOUND_ROUNDS[system]) if system in SOUND_ROUNDS else recipe


def kind_of(setting: Setting) -> str | None:
    """Return the kind of training whose grid a setting's recipe is from; None if it is from no grid."""
    for (dataset, kind), (recipe, _) in GRIDS.items():
        alike = replace(setting.recipe, learning_rate=recipe.learning_rate, rounds=recipe.rounds)
        if dataset == setting.dataset and alike == recipe:
            return kind
    return None


def trials(
    dataset: str, system: str, kind: str = "pixels", *, threshold: float | None = None
) -> list[Setting]:
    """Return the settings that the search tries, all at k = 0 but for those that have other budgets.

    At k = 0 the most signal is where nobody is left out, so excluding is uniform DP-SGD, and its search the same.
    """
    recipe, rates = GRIDS[dataset, kind]
    if system == EXCLUDE and kind not in POPULATIONS:
        system = "dp-sgd"
    return [
        Setting(
            dataset,
            system,
            replace(recipe_for(system, recipe), learning_rate=rate),
            POPULATIONS.get(kind, Population()),
            threshold=threshold,
            split="validation",
        )
        for rate in rates
    ]


def chosen_recipe(record: Record, candidates: list[Setting]) -> Recipe | None:
    """Return the best recipe on the validation split; None until all candidates have been tried.

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
