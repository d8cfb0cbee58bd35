"""Which runs each table and figure consists of, in the order in which they are worth having."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import lru_cache

from experiments.published import DATASETS, IDP_CASES, TABLE_1_SYSTEMS, TABLE_2
from experiments.readings import READINGS
from experiments.record import Record
from experiments.search import EXCLUDE, GRIDS, chosen_recipe, kind_of, recipe_for, trials
from experiments.settings import PAPERS_RECIPE, Population, Recipe, Setting
from pdpsgd.accounting import Exposure
from pdpsgd.accounting.registry import accountant
from pdpsgd.planning.levels import make_levels
from pdpsgd.planning.mechanisms.excluding import strongest_threshold

LEAVE_OUT_BELOW = 0.75
"""The system `leave-out` leaves out half of the people at k = 0."""

SOUND_SYSTEMS = (
    "pdp-sgd-exact",
    "dp-sgd",
    EXCLUDE,
    "pdp-sgd-adaptive",
    "pdp-sgd-fixed",
    "adapdp",
    "sampling",
    "idp-sample",
    "idp-scale",
    "stretching",
    "partitioning",
    "proper",
    "leave-out",
    "one-after-another",
)
SKEWED_SYSTEMS = ("pdp-sgd-exact", EXCLUDE, "pdp-sgd-adaptive")
"""Uniform DP-SGD goes by the smallest budget, 0.5 at any skew: it is the same at all of them."""

EXACT_AND_UNIFORM = ("pdp-sgd-exact", "dp-sgd")
FEATURE_KINDS = ("scattering", "scattering-large")
NETWORK_KINDS = ("relu", "best", "large", "drawn")
STEPS_AS_PUBLISHED = (1_000, 2_500, 5_000, 10_000, 20_000)
NOISE_AS_PUBLISHED = (1.3, 1.0, 0.8, 0.7, 0.6)
INPUTS_AS_PUBLISHED = ("unit-pixels", "signed-pixels")
PEOPLE = {"mnist": 60_000, "fashion-mnist": 60_000, "svhn": 73_257, "digits": 1_437}
IDP_SYSTEMS = ("pdp-sgd-exact", "dp-sgd", EXCLUDE, "idp-sample", "idp-scale")
IDP_NETWORK_SYSTEMS = {"mnist": (*EXACT_AND_UNIFORM, EXCLUDE), "svhn": EXACT_AND_UNIFORM}
"""With IDP-SGD's own networks, whose runs take minutes each."""
IDP_KINDS = ("scattering", "pixels", "idp")
W1 = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
ALPHA = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)


@dataclass(frozen=True)
class Study:
    """A table or figure: what it shows, the search it needs first, and its settings once that is done."""

    title: str
    datasets: tuple[str, ...]
    searches: Callable[[str], list[list[Setting]]]
    settings: Callable[[str, Record], list[Setting]]


def table_1_settings(dataset: str, search: Record) -> list[Setting]:
    """Every system at k = 0, and two of them at the other skews, each with the recipe its search chose."""
    settings = []
    for k, systems in ((0.0, SOUND_SYSTEMS), (-0.2, SKEWED_SYSTEMS), (0.2, SKEWED_SYSTEMS)):
        people = Population(k=k)
        settings += [
            _tuned(dataset, system, search, people)
            for system in systems
            if system != EXCLUDE or excludes(people)
        ]
    return _known(settings)


@lru_cache
def excludes(population: Population) -> bool:
    """Return whether `dp-sgd-exclude` leaves anybody out: where it does not, it is uniform DP-SGD, and not run."""
    levels, _ = make_levels(population.budgets(10_000, shuffle=0))
    return strongest_threshold(levels) > float(levels.epsilon.min())


def as_published_settings(dataset: str, search: Record) -> list[Setting]:
    """The paper's own set-up; DP-SGD needs no bookkeeping of its own, and does not depend on k."""
    settings = [Setting(dataset, "dp-sgd", PAPERS_RECIPE, accountant="rdp")]
    for k in (0.0, -0.2, 0.2):
        settings += [
            Setting(dataset, system, PAPERS_RECIPE, Population(k=k), "as-published", "rdp")
            for system in reversed(TABLE_1_SYSTEMS)
            if system != "dp-sgd"
        ]
    return settings


def table_2_settings(dataset: str, search: Record) -> list[Setting]:
    """The runs of table 1 as published whose effort the paper's table 2 compares."""
    return [
        setting
        for setting in as_published_settings(dataset, search)
        if setting.population.k == 0 and setting.system in ("sampling", "adapdp", "pdp-sgd-adaptive")
    ]


def feature_settings(dataset: str, search: Record) -> list[Setting]:
    """A linear model on scattering features, another model than the paper's: the preset, and larger batches."""
    return _known(
        _tuned(dataset, system, search, kind=kind) for kind in FEATURE_KINDS for system in EXACT_AND_UNIFORM
    )


def network_settings(dataset: str, search: Record, kinds: tuple[str, ...] = NETWORK_KINDS) -> list[Setting]:
    """The paper's network with its own activation where table 1 has another, and with the best recipe found."""
    return _known(
        _tuned(dataset, system, search, kind=kind) for kind in kinds for system in EXACT_AND_UNIFORM
    )


def step_settings(dataset: str, search: Record) -> list[Setting]:
    """One round as published that costs what it does in table 1, in fewer steps with the noise that fits."""
    return [
        Setting(
            dataset,
            "pdp-sgd-adaptive",
            replace(PAPERS_RECIPE, steps=steps, noise_multiplier=None, rounds=1),
            bookkeeping="as-published",
            accountant="rdp",
        )
        for steps in STEPS_AS_PUBLISHED
    ]


def round_settings(dataset: str, search: Record) -> list[Setting]:
    """Algorithm 1 to the letter: ten rounds, the paper's number of steps in all, noise searched for each round."""
    recipe = replace(PAPERS_RECIPE, steps=TABLE_2["pdp-sgd"].iterations, noise_multiplier=None)
    adaptive = Setting(dataset, "pdp-sgd-adaptive", recipe, bookkeeping="as-published", accountant="rdp")
    return [
        adaptive,
        replace(adaptive, loss="adaptive-as-printed"),
        replace(adaptive, system="pdp-sgd-fixed"),
        *(replace(adaptive, reading=reading) for reading in READINGS),
        replace(adaptive, reading="epochs, sum", recipe=replace(recipe, features="unit-pixels")),
    ]


def rate_settings(dataset: str, search: Record) -> list[Setting]:
    """As published, with a learning rate that falls to nothing: Algorithm 1 has one for each round, the text one.

    PDP-SGD at all skews, with the noise of table 1 and with the reading of the noise search that comes nearest;
    Sampling, for comparison; and less and less noise, whatever it costs.
    """
    table = as_published_settings(dataset, search)
    pdp_sgd = [s for s in table if s.system.startswith("pdp-sgd")]
    return [
        *map(with_falling_rate, pdp_sgd),
        *(with_falling_rate(s) for s in table if s.system == "sampling" and s.population.k == 0),
        *(with_falling_rate(with_noise_for_the_sum(s)) for s in pdp_sgd),
        *map(with_falling_rate, noise_settings(dataset, search)),
    ]


def accountant_settings(dataset: str, search: Record) -> list[Setting]:
    """As published, PDP-SGD with noise for the sum of thresholds, searched by PLD instead of RDP."""
    pdp_sgd = [s for s in as_published_settings(dataset, search) if s.system.startswith("pdp-sgd")]
    stays = [by_pld(with_noise_for_the_sum(setting)) for setting in pdp_sgd]
    return [*stays, *map(with_falling_rate, stays)]


def by_pld(setting: Setting) -> Setting:
    """The same with noise that is searched by PLD, which is tighter than RDP."""
    return replace(setting, accountant="pld")


def with_falling_rate(setting: Setting) -> Setting:
    """The same with a learning rate that falls to nothing, along half a cosine."""
    return replace(setting, recipe=replace(setting.recipe, schedule="cosine"))


def with_inputs(setting: Setting, features: str) -> Setting:
    """The same on other inputs."""
    return replace(setting, recipe=replace(setting.recipe, features=features))


def with_noise_for_the_sum(setting: Setting, reading: str = "epochs, sum") -> Setting:
    """The same with rounds by epochs, as many steps as the paper reports, and noise for the sum of thresholds."""
    recipe = replace(setting.recipe, steps=TABLE_2["pdp-sgd"].iterations, noise_multiplier=None)
    return replace(setting, recipe=recipe, reading=reading)


def experiments_on(setting: Setting) -> dict[str, Setting]:
    """What was tried on a cell of table 1 as published to see why it is not the printed one, the simplest first."""
    tried = {
        "pixels from 0 to 1": with_inputs(setting, "unit-pixels"),
        "pixels from -1 to 1": with_inputs(setting, "signed-pixels"),
        "a rate that falls": with_falling_rate(setting),
        "a rate that falls, pixels from 0 to 1": with_falling_rate(with_inputs(setting, "unit-pixels")),
    }
    if not setting.system.startswith("pdp-sgd"):
        return tried
    searched, weighted = (
        with_noise_for_the_sum(setting),
        with_noise_for_the_sum(setting, "epochs, sum, weights"),
    )
    return tried | {
        "noise for the sum": searched,
        "noise for the sum, pixels from 0 to 1": with_inputs(searched, "unit-pixels"),
        "noise for the sum, a rate that falls": with_falling_rate(searched),
        "noise for the sum, by PLD": by_pld(searched),
        "noise for the sum, by PLD, a rate that falls": by_pld(with_falling_rate(searched)),
        "noise for the sum, weighted batches": weighted,
        "noise for the sum, weighted batches, a rate that falls": with_falling_rate(weighted),
    }


def weight_settings(dataset: str, search: Record) -> list[Setting]:
    """PDP-SGD with fixed weights, w1 from 0.3 to 0.9."""
    tuned = _tuned(dataset, "pdp-sgd-fixed", search)
    return [] if tuned is None else [replace(tuned, weights=(w1, round(1 - w1, 3))) for w1 in W1]


def interval_settings(dataset: str, search: Record) -> list[Setting]:
    """Budgets in [0.5, 0.5 + alpha], alpha from 0.1 to 0.9, for PDP-SGD adaptive and exact."""
    settings = []
    for alpha in ALPHA:
        people = Population(highest=round(0.5 + alpha, 3))
        settings += [
            _tuned(dataset, system, search, people) for system in ("pdp-sgd-exact", "pdp-sgd-adaptive")
        ]
    return _known(settings)


def idp_settings(dataset: str, search: Record) -> list[Setting]:
    """IDP-SGD's own benchmark, three tiers 1, 2 and 3: scattering features, the paper's network, and IDP-SGD's own."""
    settings = []
    for tiers in IDP_CASES.values():
        people = Population(tiers=tiers)
        for kind in IDP_KINDS:
            settings += [
                _tuned(dataset, system, search, people, kind=kind)
                for system in (
                    IDP_NETWORK_SYSTEMS.get(dataset, EXACT_AND_UNIFORM) if kind == "idp" else IDP_SYSTEMS
                )
                if _is_run(system, people, kind)
            ]
    return _known(settings)


def _is_run(system: str, people: Population, kind: str) -> bool:
    """Return whether a system is run by itself: not where it is, or would be, uniform DP-SGD at epsilon 1 again."""
    if system == EXCLUDE:
        return excludes(people)
    return system != "dp-sgd" or kind != "idp" or people.tiers == IDP_CASES["34/43/23"]


def noise_settings(dataset: str, search: Record) -> list[Setting]:
    """As many steps as the paper reports for PDP-SGD, with less and less noise, whatever that costs by RDP."""
    rate, steps = PAPERS_RECIPE.batch_size / PEOPLE[dataset], TABLE_2["pdp-sgd"].iterations
    settings = []
    for noise in NOISE_AS_PUBLISHED:
        epsilon = accountant("rdp").epsilon((Exposure(1.0, rate, noise, steps),), Population().delta)
        people = Population(tiers=((math.ceil(1000 * epsilon) / 1000, 1.0),))
        recipe = replace(PAPERS_RECIPE, noise_multiplier=noise, rounds=None)
        settings.append(Setting(dataset, "dp-sgd", recipe, people, accountant="rdp"))
    return settings


def input_settings(
    dataset: str, search: Record, features: tuple[str, ...] = INPUTS_AS_PUBLISHED
) -> list[Setting]:
    """As published, on pixels from 0 to 1 or from -1 to 1 instead of normalized ones: the paper does not say."""
    return [
        with_inputs(setting, inputs)
        for inputs in features
        for setting in as_published_settings(dataset, search)
    ]


def search_for(*systems: str, kinds: tuple[str, ...] = ("pixels",)) -> Callable[[str], list[list[Setting]]]:
    """The searches on a data set, one for each system and kind of training that there is for it."""

    def searches(dataset: str) -> list[list[Setting]]:
        return [
            trials(dataset, system, kind, threshold=_threshold(system))
            for kind in kinds
            for system in systems
            if (dataset, kind) in GRIDS
        ]

    return searches


def idp_searches(dataset: str) -> list[list[Setting]]:
    """Those of table 1 for its recipes, and one with IDP-SGD's own network, by which all systems go."""
    systems = (system for system in IDP_SYSTEMS if system != EXCLUDE)
    return [*search_for(*systems)(dataset), *search_for("pdp-sgd-exact", kinds=("idp",))(dataset)]


STUDIES: dict[str, Study] = {
    "table-1": Study(
        "Table 1 under equal and sound conditions",
        DATASETS,
        search_for(*(system for system in SOUND_SYSTEMS if system != EXCLUDE)),
        table_1_settings,
    ),
    "features": Study(
        "A linear model on scattering features",
        DATASETS,
        search_for(*EXACT_AND_UNIFORM, kinds=FEATURE_KINDS),
        feature_settings,
    ),
    "networks": Study(
        "The paper's networks, as printed and at their best",
        DATASETS,
        search_for(*EXACT_AND_UNIFORM, kinds=NETWORK_KINDS),
        network_settings,
    ),
    "table-1-as-published": Study(
        "Table 1 as the paper set it up", DATASETS, search_for(), as_published_settings
    ),
    "steps-as-published": Study(
        "Accuracy as published against the number of steps", ("mnist",), search_for(), step_settings
    ),
    "rounds-as-published": Study(
        "Accuracy of Algorithm 1 to the letter", DATASETS, search_for(), round_settings
    ),
    "noise-as-published": Study(
        "Accuracy against noise, at the paper's number of steps", DATASETS, search_for(), noise_settings
    ),
    "inputs-as-published": Study(
        "Accuracy as published, with other inputs", DATASETS, search_for(), input_settings
    ),
    "rates-as-published": Study(
        "Accuracy as published, with a learning rate that falls", DATASETS, search_for(), rate_settings
    ),
    "accountants-as-published": Study(
        "Accuracy as published, with noise by another accountant", DATASETS, search_for(), accountant_settings
    ),
    "table-2": Study("Table 2: run time, iterations, parameters", DATASETS, search_for(), table_2_settings),
    "weights": Study("Accuracy against w1", ("mnist",), search_for("pdp-sgd-fixed"), weight_settings),
    "intervals": Study(
        "Accuracy against the interval of budgets",
        ("mnist",),
        search_for("pdp-sgd-exact", "pdp-sgd-adaptive"),
        interval_settings,
    ),
    "idp-benchmark": Study(
        "IDP-SGD's own benchmark",
        ("mnist", "svhn"),
        idp_searches,
        idp_settings,
    ),
}
SHOWN_ON = dict.fromkeys(
    (
        "steps-as-published",
        "rounds-as-published",
        "noise-as-published",
        "inputs-as-published",
        "rates-as-published",
        "accountants-as-published",
    ),
    "table-1-as-published",
)
"""Studies that have no page of their own."""

WITHOUT_TRAINING = ("distributions", "rounds")


def was_searched(setting: Setting, search: Record) -> bool:
    """Whether the setting's recipe comes from a finished search for its own system."""
    kind = kind_of(setting)
    return kind is not None and _own_recipe(setting.dataset, setting.system, search, kind) is not None


def _tuned(
    dataset: str,
    system: str,
    search: Record,
    population: Population | None = None,
    *,
    kind: str = "pixels",
) -> Setting | None:
    """The setting with the recipe that the search chose for the system; None if no search is finished.

    As long as a system's own search is not finished, it borrows the recipe of `pdp-sgd-exact`.
    """
    if (dataset, kind) not in GRIDS:
        return None
    recipe = _own_recipe(dataset, system, search, kind)
    recipe = recipe or _own_recipe(dataset, "pdp-sgd-exact", search, kind)
    if recipe is None:
        return None
    recipe = recipe_for(system, recipe)
    return Setting(dataset, system, recipe, population or Population(), threshold=_threshold(system))


def _own_recipe(dataset: str, system: str, search: Record, kind: str) -> Recipe | None:
    return chosen_recipe(search, trials(dataset, system, kind, threshold=_threshold(system)))


def _threshold(system: str) -> float | None:
    return LEAVE_OUT_BELOW if system == "leave-out" else None


def _known(settings: Iterable[Setting | None]) -> list[Setting]:
    return [setting for setting in settings if setting is not None]
