"""Where strictness goes with a class: class counts per level, and logits that make up for what a plan sees too rarely.

A plan samples strict people more rarely, so training sees the classes that they have more rarely than they are. From
the number of people per level and class, known or released with noise, follows by how much; adding the logarithm of
that ratio to the logits (logit adjustment) gives the classes their own shares back. That repairs the shares, and no
more: people whom training hardly sees stay harder to get right.

    counted = plan_counts(budgets)
    training = pdpsgd.plan(budgets, history=[counted], history_fixed=True, steps=400)
    counts = release_counts(counted, budgets, labels, classes=10)
    result = pdpsgd.fit(model, (inputs, labels), budgets, plan=training)
    model = adjust_logits(result.model, logit_adjustment(training, counts.counts))
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import nn

from pdpsgd._typing import AnyIntArray, FloatArray
from pdpsgd.accounting.gaussian import gaussian_mu
from pdpsgd.accounting.registry import accountant
from pdpsgd.budgets.budgets import Budgets
from pdpsgd.engine.distributed import Ranks
from pdpsgd.errors import check_positive, fail
from pdpsgd.planning.levels import Roster, make_levels
from pdpsgd.planning.planner import prove
from pdpsgd.planning.plans import Plan
from pdpsgd.planning.rounds import Round
from pdpsgd.sampling.noise import LARGEST_SUM, quantize
from pdpsgd.sampling.source import RandomSource

MECHANISM = "class-counts"
SHARE = 0.01
"""Of everybody's B = mu^2; the noise on a count is then 10 / mu people."""
SCALE_BITS = 20
"""Clipping scales are multiples of 2^-20, so that sums of them are exact and rounding moves nothing."""


_RELEASED: set[tuple[str, int]] = set()
"""Plans whose counts this process has released, with the people."""


@dataclass(frozen=True, eq=False)
class ClassCounts:
    """People per level (rows, as in the plan) and class (columns), with noise. Public, unless the noise was seeded."""

    counts: FloatArray
    noise: FloatArray
    """The standard deviation of the noise on each level's counts; infinite for levels that allow nothing."""
    not_for_release: str | None = None


def plan_counts(budgets: Budgets, *, share: float = SHARE) -> Plan:
    """Plan the release of class counts per level: one step at rate 1, with noise 1 / (sqrt(share) mu_l) on a count.

    Guarantee: one person is one count of one level's histogram, so adding or removing them moves the counts, each
    level's times its clipping scale, by at most that scale; with Gaussian noise this costs a level share * mu_l^2 of
    its mu_l^2. Give the plan to `pdpsgd.plan` as `history` with `history_fixed=True`, before looking at any
    count: then training and counts together keep everybody's promise.

    >>> made = plan_counts(Budgets.from_tiers({1: 0.5, 3: 0.5}, 100))
    >>> made.steps, round(made.levels[0].proven_epsilon, 3)
    (1, 0.081)
    """
    check_positive(share=share)
    if not share < 1:
        fail(f"Expected a share of what people allow, below 1, for the counts. Got {share!r}.")
    levels, of_person = make_levels(budgets)
    if np.isinf(levels.epsilon).any():
        fail("Expected finite budgets for class counts. Got people who ask for no protection.")
    usable = levels.usable()
    if not usable.any():
        fail("Expected somebody who allows something, for class counts. Got nobody.")
    mu = np.where(usable, gaussian_mu(levels.epsilon, levels.delta), 0.0)
    scales = np.floor(mu / mu.max() * 2**SCALE_BITS) / 2**SCALE_BITS
    counted = Round(
        steps=1,
        noise_multiplier=1 / (math.sqrt(share) * float(mu.max())),
        expected_batch_size=float(levels.people[usable].sum()),
        participation=(1.0,) * len(mu),
        sample_rates=tuple(usable.astype(float).tolist()),
        clip_scales=tuple(scales.tolist()),
    )
    proven = prove(Plan(MECHANISM, levels.unproven(), (counted,), "pld"), accountant("pld"))
    return replace(proven, roster=Roster(budgets.ids, of_person, budgets.named))


def release_counts(
    planned: Plan,
    budgets: Budgets,
    labels: ArrayLike,
    *,
    classes: int,
    source: RandomSource | None = None,
) -> ClassCounts:
    """Count people per level and class, and add the noise of the plan.

    Guarantee: the promise of `planned`, for one release, if the noise is from a fresh key (the default). A second one
    of the same plan for the same people, which nothing would count, is refused as long as the process lasts, and so
    are several processes, each of which would release counts with noise of its own.

    Args:
        planned: what `plan_counts` made for these people.
        budgets: what each person allows.
        labels: the class of each person, in the same order; everybody has one.
        classes: the number of classes, which is public.
        source: of the noise; a seeded one is not for release.

    Returns:
        The counts, below 0 where the noise makes them so.

    Raises:
        PdpsgdError: labels do not fit, the plan is for something else or for other people, or was released already.
    """
    if Ranks.join().world_size > 1:
        fail(
            "Expected one process: each would release counts with noise of its own. Got several: run without torchrun."
        )
    if planned.mechanism != MECHANISM or len(planned.rounds) != 1 or planned.steps != 1:
        fail(f"Expected a plan made by plan_counts. Got one of {planned.mechanism!r}, {planned.steps} steps.")
    given = np.asarray(labels)
    if given.shape != (len(budgets),) or given.dtype.kind not in "iu":
        fail(
            f"Expected one whole-number class for each of the {len(budgets):,} people. "
            f"Got shape {given.shape} of {given.dtype}."
        )
    if given.size and not (given.min() >= 0 and given.max() < classes):
        fail(f"Expected classes from 0 to {classes - 1}. Got another one.")  # which one is private
    if not planned.is_proven_here:
        planned.verify()
    level = planned.level_of_person(budgets)
    if len(budgets) >= LARGEST_SUM:
        fail(f"Expected fewer than {LARGEST_SUM:,} people. Got {len(budgets):,}.")
    (step,) = planned.rounds
    scales = np.array(step.clip_scales) * np.array(step.sample_rates)
    found = np.zeros((len(planned.levels), classes))
    np.add.at(found, (level, given), 1.0)
    source = (RandomSource.from_operating_system() if source is None else source).take()
    if not source.seeded:
        _count_release(planned, budgets, given)
    sums = quantize([torch.from_numpy(found * scales[:, None])], clipping_norm=1.0)
    out = [torch.empty(found.shape, dtype=torch.float64)]
    noisy = source.release(sums, clipping_norm=1.0, noise_multiplier=step.noise_multiplier, step=0, out=out)[
        0
    ].numpy()
    source.erase()
    with np.errstate(divide="ignore", invalid="ignore"):
        counts = np.where(scales[:, None] > 0, noisy / scales[:, None], 0.0)
        noise = np.where(scales > 0, step.noise_multiplier / scales, np.inf)
    seeded = "The noise was made from a seed: whoever knows it can take it off." if source.seeded else None
    return ClassCounts(counts, noise, seeded)


def _count_release(planned: Plan, budgets: Budgets, labels: AnyIntArray) -> None:
    """Refuse a second release; without ids, people with the same labels in the same order are the same."""
    people = budgets.ids.tolist() if budgets.named else labels.tolist()
    whose = planned.digest, hash(tuple(map(str, people)))
    if whose in _RELEASED:
        fail(
            "Expected one release of class counts for each plan. Got a second one for the same people, whom the plan "
            "charges for one: keep the first counts, or plan another release (plan_counts with another share) and give "
            "both plans as history."
        )
    _RELEASED.add(whose)


def logit_adjustment(planned: Plan, counts: ArrayLike) -> FloatArray:
    """Return what to add to each class's logit: ln of its share of people over its share of what training sees.

    A person of level l shapes the model by the sum over rounds of steps * q_l * c_l / sigma. Counts below 0, which
    noise makes, count as 0.

    Args:
        planned: the plan of training.
        counts: people, or shares of them, per level of that plan and class: released, or from public knowledge.

    Returns:
        One number for each class, the mean weighted by people being about 0.

    Raises:
        PdpsgdError: counts do not fit the plan's levels, or a class is one that training never sees.

    >>> from pdpsgd import plan
    >>> made = plan(Budgets.from_tiers({1: 0.5, 2: 0.5}, 1000), steps=10, batch_size=100)
    >>> logit_adjustment(made, [[500, 0], [0, 500]]).round(2).tolist()
    [0.43, -0.3]
    """
    known = np.asarray(counts, dtype=float)
    if known.ndim != 2 or len(known) != len(planned.levels) or not np.isfinite(known).all():
        fail(
            f"Expected finite counts with a row for each of the plan's {len(planned.levels)} levels and a column for "
            f"each class. Got shape {known.shape}."
        )
    influence = sum(
        (
            r.steps
            / r.noise_multiplier
            * np.array(r.participation)
            * np.array(r.sample_rates)
            * np.array(r.clip_scales)
            for r in planned.rounds
        ),
        np.zeros(len(planned.levels)),
    )
    known = np.maximum(known, 0.0)
    people, seen = known.sum(axis=0), influence @ known
    if not (seen > 0).all():
        unseen = int((seen <= 0).argmax())
        fail(
            f"Expected every class to have people whom the plan samples. Got none for class {unseen}: what training "
            "never sees, no adjustment brings back."
        )
    ratio: FloatArray = np.log(people / people.sum()) - np.log(seen / seen.sum())
    return ratio


def adjust_logits(model: nn.Module, adjustment: ArrayLike) -> nn.Module:
    """Return a copy of the model whose last layer's bias has the adjustment added: post-processing, at no cost.

    >>> adjusted = adjust_logits(nn.Sequential(nn.Linear(3, 2)), [0.5, -0.5])
    """
    added = torch.as_tensor(np.asarray(adjustment, dtype=np.float32))
    changed = copy.deepcopy(model)
    last = list(changed.modules())[-1]
    if not isinstance(last, nn.Linear) or last.bias is None or last.bias.shape != added.shape:
        fail(
            f"Expected a model that ends in a linear layer with a bias for each of {added.numel()} classes. "
            f"Got {type(last).__name__}."
        )
    with torch.no_grad():
        last.bias.add_(added.to(last.bias))
    return changed
