"""The plan of a run: the mechanisms by name, and the two simple systems that any reviewer asks for.

`leave-out` leaves out everybody who allows less than a threshold and trains DP-SGD at the threshold on the
rest. `one-after-another` merges people into four tiers, strictest first, and trains one model on each
tier alone, at the tier's smallest budget: nobody is in two of its rounds.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from experiments.readings import READINGS, keeps_thresholds, provable_for_anybody
from experiments.settings import Setting
from pdpsgd.accounting.registry import accountant
from pdpsgd.accounting.smallest_noise import smallest_noise_multiplier
from pdpsgd.budgets.budgets import Budgets
from pdpsgd.errors import check_one_of, fail
from pdpsgd.planning.as_published import BOOKKEEPING, Claim, claims, plan_as_published
from pdpsgd.planning.mechanisms.registry import MECHANISMS
from pdpsgd.planning.planner import plan, prove
from pdpsgd.planning.plans import Plan
from pdpsgd.planning.rounds import Round

SIMPLE = ("leave-out", "one-after-another")
SYSTEMS = (*MECHANISMS, *SIMPLE)
TIERS = 4


def plan_of(setting: Setting, budgets: Budgets, *, seed: int) -> Plan:
    """Compute the plan by which a setting is trained, for these people.

    Guarantee: as for `pdpsgd.plan`; the two simple systems are proven by the same accountant, level by level.
    """
    recipe = setting.recipe
    if setting.system == "leave-out":
        if setting.threshold is None:
            fail("Expected a threshold for the system 'leave-out'. Got None.")
        return _uniform_rounds(setting, budgets, [setting.threshold], last=np.inf)
    if setting.system == "one-after-another":
        first = [-(-len(budgets) * tier // TIERS) for tier in range(TIERS)]  # rounded up
        edges = np.sort(budgets.epsilon)[first]
        return _uniform_rounds(setting, budgets, sorted(set(edges.tolist())))
    if setting.system not in MECHANISMS:
        fail(f"Expected a system out of {', '.join(SYSTEMS)}. Got {setting.system!r}.")
    if setting.bookkeeping == BOOKKEEPING:
        return published_of(setting, budgets, seed=seed)[0]
    if setting.reading is not None:
        fail(
            f"Expected as-published bookkeeping with another reading of the paper. Got {setting.bookkeeping!r}."
        )
    return plan(
        budgets,
        setting.system,
        steps=recipe.steps,
        batch_size=recipe.batch_size,
        accountant=None if MECHANISMS[setting.system].accountant else setting.accountant,
        max_grad_norm=recipe.max_grad_norm,
        noise_multiplier=recipe.noise_multiplier,
        rounds=recipe.rounds,
        weights=setting.weights,
        loss=setting.loss,
    )


def published_of(setting: Setting, budgets: Budgets, *, seed: int) -> tuple[Plan, tuple[Claim, ...]]:
    """An as-published plan, and beside it what the paper would claim for each level and what is provable."""
    made = _as_published(setting, budgets, seed)
    found = claims(made.levels, made.rounds)
    if setting.reading is None:
        return made, found
    check_one_of(tuple(READINGS), reading=setting.reading)
    made = READINGS[setting.reading](made, setting.recipe.batch_size)
    if not keeps_thresholds(setting.reading):
        provable = provable_for_anybody(made)
        found = tuple(
            replace(c, provable_epsilon=provable, provable_delta=made.levels[0].delta) for c in found
        )
    return made, found


def _as_published(setting: Setting, budgets: Budgets, seed: int) -> Plan:
    recipe = setting.recipe
    if recipe.steps is not None and recipe.noise_multiplier is not None:
        fail(
            "Expected steps or a noise multiplier: one follows from the other. "
            f"Got {recipe.steps} and {recipe.noise_multiplier}."
        )
    return plan_as_published(
        budgets,
        setting.system,
        steps=1000 if recipe.steps is None else recipe.steps,
        batch_size=recipe.batch_size,
        accountant=setting.accountant,
        seed=seed,
        max_grad_norm=recipe.max_grad_norm,
        rounds=recipe.rounds,
        noise_multiplier=recipe.noise_multiplier,
        weights=setting.weights,
        loss=setting.loss,
    )


def _uniform_rounds(setting: Setting, budgets: Budgets, edges: list[float], last: float = np.inf) -> Plan:
    """Return rounds of DP-SGD for each segment of budgets [edge, next edge), at the edge; others are left out."""
    recipe = setting.recipe
    if recipe.steps is None:
        fail(f"Expected a number of steps for the system {setting.system!r}. Got None.")
    by = accountant(setting.accountant)
    # The levels of any plan for these people will do.
    pattern = plan(budgets, "dp-sgd", steps=1, batch_size=1, accountant=setting.accountant)
    epsilon = np.array([level.epsilon for level in pattern.levels])
    people = np.array([level.people for level in pattern.levels], dtype=float)
    rounds = []
    for index, (low, high) in enumerate(zip(edges, [*edges[1:], last], strict=True)):
        inside = (epsilon >= low) & (epsilon < high)
        rate = min(1.0, recipe.batch_size / float(people[inside].sum()))
        steps = recipe.steps // len(edges) + (index < recipe.steps % len(edges))
        delta = min(level.delta for level, used in zip(pattern.levels, inside, strict=True) if used)
        sigma = smallest_noise_multiplier(
            float(epsilon[inside].min()), delta, sample_rate=rate, steps=steps, accounting=by
        )
        rates = np.where(inside, rate, 0.0)
        ones = (1.0,) * len(epsilon)
        rounds.append(
            Round(
                steps=steps,
                noise_multiplier=sigma,
                expected_batch_size=float(people @ rates),
                participation=ones,
                sample_rates=tuple(rates.tolist()),
                clip_scales=ones,
            )
        )
    draft = replace(
        pattern, mechanism="dp-sgd", rounds=tuple(rounds), max_grad_norm=recipe.max_grad_norm, notes=()
    )
    return prove(draft, by)
