"""Example canaries: records as the model sees them (mislabeled ones, say), on a real network.

Their gradients change as the model trains, so before every step each canary's contribution is worked out by
plain autograd on a copy of the network, which shares no code with the gradients that training uses.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from pdpsgd._typing import FloatArray, IntArray
from pdpsgd.audit.canaries import NO_RECORD, Canaries
from pdpsgd.audit.conformance import Observation
from pdpsgd.audit.observed_run import Criterion, ObservedStep, Optimization, Tamper, observe_run
from pdpsgd.engine.batches import PhysicalBatch
from pdpsgd.engine.observers import StepObserver
from pdpsgd.gradients.weights import clip_limits
from pdpsgd.planning.plans import Plan
from pdpsgd.sampling.source import RandomSource

NUMBERS_AT_ONCE = 2**24
"""Numbers in per-example gradients of other people that are held at a time."""


@dataclass(frozen=True, eq=False)
class AttackedStep:
    """What an attacker has of one step: a noisy sum from which all is taken away that is known of others.

    `dots` are its products with each canary's contribution, `products` those of the contributions with each other.
    """

    round: int
    dots: FloatArray
    products: FloatArray


@dataclass(frozen=True, eq=False)
class OtherPeople:
    """The records of everybody who is no canary: inputs, targets, and the place on the list of each one's person."""

    inputs: Tensor
    targets: Tensor
    person: IntArray
    records_per_person: int | None = None

    @classmethod
    def in_order(cls, inputs: Tensor, targets: Tensor) -> OtherPeople:
        """Take record i as that of person i."""
        return cls(inputs, targets, np.arange(len(inputs)))


def mislabeled(
    inputs: Tensor, targets: Tensor, *, classes: int, generator: np.random.Generator
) -> tuple[Tensor, Tensor]:
    """Return the same records with a wrong label each, which only somebody who trained on them would expect.

    A label that is a number from -1 to 1 (`classes` is 0) becomes the far end of that range.
    """
    if classes == 0:
        return inputs, torch.where(targets > 0, -torch.ones_like(targets), torch.ones_like(targets))
    shift = torch.from_numpy(generator.integers(1, classes, size=len(targets)))
    return inputs, (targets + shift) % classes


def example_steps(
    canaries: Canaries,
    *,
    module: nn.Module,
    criterion: Criterion,
    examples: tuple[Tensor, Tensor],
    learning_rate: float | Optimization = 0.1,
    seed: int | None = None,
    source: RandomSource | None = None,
    tamper: Tamper | None = None,
) -> Iterator[Observation]:
    """Train `module` with a canary for each of the `examples` and nobody else's record; yield what each step shows.

    Everything else in a noisy sum is then noise, as the conformance test needs it. `module` is trained in place.
    """
    inputs, targets = examples
    drawn = torch.from_numpy(np.flatnonzero(canaries.has_record))
    gradients = _Contributions(canaries.plan, copy.deepcopy(module), criterion, dtype=torch.float64)
    of_round = _rounds_of(canaries.plan)
    current: list[tuple[Tensor, ...]] = [()]

    def before_step(number: int) -> None:
        current[0] = gradients(module, inputs, targets, canaries.level, of_round[number])

    for step in observe_run(
        module=module,
        criterion=criterion,
        records=(inputs[drawn], targets[drawn]),
        record_of_person=canaries.record_of_person(),
        plan=canaries.plan,
        learning_rate=learning_rate,
        seed=seed,
        source=source,
        before_step=before_step,
        tamper=tamper,
    ):
        yield _observe(step, current[0], drawn)


def attacked_steps(
    canaries: Canaries,
    *,
    module: nn.Module,
    criterion: Criterion,
    examples: tuple[Tensor, Tensor],
    others: OtherPeople,
    learning_rate: float | Optimization = 0.1,
    seed: int | None = None,
) -> Iterator[AttackedStep]:
    """Train `module` on other people's records and the canaries', and yield what an attacker has of each step.

    The attacker knows every record, and who of the others was sampled. What they contribute is taken away from the
    noisy sum; of canaries and noise nothing is known. `module` is trained in place.

    Guarantee: given the others' records and samples, whatever they are, the run is (epsilon_l, delta_l)-DP towards each
    canary of level l: a person's loss is that of their own rate and noise, whatever else is in the sums.
    """
    inputs, targets = examples
    plan, copied = canaries.plan, copy.deepcopy(module)
    gradients = _Contributions(plan, copied, criterion, dtype=torch.float32)
    level = _levels_by_place(plan)
    drawn = np.flatnonzero(canaries.has_record)
    places = len(level) - len(canaries) + drawn
    sampled = _Sampled(len(level) - len(canaries))
    of_round = _rounds_of(plan)
    own: list[Tensor] = [torch.empty(0)]
    known: list[Tensor] = [torch.empty(0)]

    def before_step(number: int) -> None:
        index = of_round[number]
        own[0] = torch.cat(gradients(module, inputs, targets, canaries.level, index), dim=1)
        known[0] = _sum_of_others(gradients, module, others, sampled, level, index)

    for step in observe_run(
        module=module,
        criterion=criterion,
        records=(torch.cat([others.inputs, inputs[drawn]]), torch.cat([others.targets, targets[drawn]])),
        person_of_record=np.concatenate([others.person, places]),
        records_per_person=others.records_per_person,
        plan=plan,
        learning_rate=learning_rate,
        seed=seed,
        before_step=before_step,
        observers=(sampled,),
    ):
        noisy = torch.cat([noisy.flatten() for noisy in step.noisy_sums])
        rows = own[0]
        yield AttackedStep(
            round=step.round,
            dots=(rows @ (noisy - known[0])).double().numpy(),
            products=(rows @ rows.T).double().numpy(),
        )


class _Sampled(StepObserver):
    """Keeps the records of those who were sampled for the current step, canaries left out, person by person."""

    def __init__(self, others: int) -> None:
        self.others = others
        self.records: list[IntArray] = []
        self.people: list[int] = []

    def step_begins(self, step: int, round: int) -> None:
        """Forget the step before."""
        self.records, self.people = [], []

    def batch_yielded(self, batch: PhysicalBatch) -> None:
        """Note whose records go through the model."""
        starts = np.arange(batch.size + 1) if batch.starts is None else batch.starts
        for person, first, end in zip(batch.people.tolist(), starts[:-1], starts[1:], strict=False):
            records = batch.records[first:end]
            if 0 <= person < self.others and len(records) and records[0] != NO_RECORD:
                self.people.append(person)
                self.records.append(records)


def _sum_of_others(
    gradients: _Contributions,
    module: nn.Module,
    others: OtherPeople,
    sampled: _Sampled,
    level: IntArray,
    round_index: int,
) -> Tensor:
    """Return what the others who were sampled contribute, some people at a time."""
    numbers = sum(p.numel() for p in module.parameters() if p.requires_grad)
    total = torch.zeros(numbers)
    most = max(1, max((len(each) for each in sampled.records), default=1))
    at_once = max(1, NUMBERS_AT_ONCE // (numbers * most))
    for start in range(0, len(sampled.people), at_once):
        records = sampled.records[start : start + at_once]
        flat = np.concatenate(records)
        rows = gradients(
            module,
            others.inputs[flat],
            others.targets[flat],
            level[sampled.people[start : start + at_once]],
            round_index,
            sizes=[len(each) for each in records],
        )
        total += torch.cat([row.sum(0) for row in rows])
    return total


class _Contributions:
    """The contribution of each person to the sum when they are sampled, by plain autograd.

    One matrix per tensor, with a row per person. `sizes` counts the records of each, whose gradients are averaged.
    """

    def __init__(self, plan: Plan, module: nn.Module, criterion: Criterion, *, dtype: torch.dtype) -> None:
        self.plan = plan
        self.dtype = dtype

        def loss(parameters: dict[str, Tensor], one: Tensor, target: Tensor) -> Tensor:
            return criterion(functional_call(module, parameters, (one[None],)), target[None])

        self.gradients = vmap(grad(loss), in_dims=(None, 0, 0))

    def __call__(
        self,
        module: nn.Module,
        inputs: Tensor,
        targets: Tensor,
        level: IntArray,
        round_index: int,
        *,
        sizes: list[int] | None = None,
    ) -> tuple[Tensor, ...]:
        parameters = {name: p.detach() for name, p in module.named_parameters() if p.requires_grad}
        found = self.gradients(parameters, inputs, targets)
        rows = [found[name].flatten(1).to(self.dtype) for name in parameters]
        if sizes is not None and max(sizes, default=1) > 1:
            rows = [torch.stack([part.mean(0) for part in torch.split(row, sizes)]) for row in rows]
        norms = torch.stack([row.square().sum(1) for row in rows]).sum(0).sqrt()
        of_levels = (
            torch.tensor(self.plan.rounds[round_index].clip_scales, dtype=torch.float64)
            * self.plan.max_grad_norm
        )
        limits = clip_limits(of_levels, float(of_levels.max()))[torch.from_numpy(level)]
        weights = (limits.to(norms) / norms.clamp(min=1e-16)).clamp(max=1)[:, None]
        return tuple(row * weights for row in rows)


def _rounds_of(plan: Plan) -> IntArray:
    """Return the round of each step."""
    return np.repeat(np.arange(len(plan.rounds)), [r.steps for r in plan.rounds])


def _levels_by_place(plan: Plan) -> IntArray:
    assert plan.roster is not None  # canaries are on it
    return plan.roster.level


def _observe(step: ObservedStep, contributions: tuple[Tensor, ...], drawn: Tensor) -> Observation:
    dots, products, energies, dimensions, room = [], [], [], [], []
    for noisy, rows in zip(step.noisy_sums, contributions, strict=True):
        flat = noisy.flatten().to(torch.float64)
        dots.append(rows @ flat)
        products.append(rows @ rows.T)
        energy = flat.square().sum()
        outside = flat.numel() - len(drawn)
        if outside > 0:
            basis, _ = torch.linalg.qr(rows[drawn].T)
            energy = energy - (basis.T @ flat).square().sum()
        energies.append(float(energy))
        dimensions.append(outside if outside > 0 else flat.numel())
        room.append(outside > 0)
    return Observation(
        round=step.round,
        dots=torch.stack(dots).numpy(),
        products=torch.stack(products).numpy(),
        noise_energy=np.array(energies),
        noise_dimensions=np.array(dimensions),
        noise_only=np.array(room),
    )
