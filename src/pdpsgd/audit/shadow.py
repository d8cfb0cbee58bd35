"""Shadow models: many small models trained by the same plan at once, each with its own coins for records.

All models are one stack of parameters. A step draws every model's own Poisson batch, takes all per-example
gradients with torch.func, clips each to its person's norm, adds every model's own noise and moves all models
together. This is the mechanism of the plan, written a second time for speed; a test holds it against the real
engine. It is for attacks only: its randomness is not secret, so nothing it trains is for release.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, stack_module_state, vmap

from pdpsgd._typing import BoolArray, IntArray
from pdpsgd.audit.observed_run import Criterion
from pdpsgd.gradients.weights import clip_weights
from pdpsgd.planning.plans import Plan
from pdpsgd.planning.rounds import Round

GRADIENTS_AT_ONCE = 2**24
"""Numbers in per-example gradients that are held at a time; larger stacks are trained in slices of models."""


@dataclass(frozen=True, eq=False)
class ShadowModels:
    """A stack of trained models and whose records each of them had (models x people)."""

    template: nn.Module
    parameters: dict[str, Tensor]
    members: BoolArray

    def outputs(self, inputs: Tensor) -> Tensor:
        """Return every model's outputs for the same inputs: models x inputs x classes."""

        def one(parameters: dict[str, Tensor]) -> Tensor:
            return torch.as_tensor(functional_call(self.template, parameters, (inputs,)))

        with torch.no_grad():
            return torch.stack(
                [
                    one({name: value[k] for name, value in self.parameters.items()})
                    for k in range(len(self.members))
                ]
            )


def train_shadow_models(
    make_model: Callable[[], nn.Module],
    criterion: Criterion,
    inputs: Tensor,
    targets: Tensor,
    *,
    plan: Plan,
    level_of_person: npt.ArrayLike,
    models: int,
    learning_rate: float | Callable[[float], float],
    seed: int = 0,
    each_step: Callable[[int], None] | None = None,
) -> ShadowModels:
    """Train this many models by the plan; person i has record i in a model by a fair coin.

    `learning_rate` is a number, or a function of the share of steps done. Without its record a person keeps
    the place on the list, is drawn and contributes nothing.
    """
    generator = np.random.default_rng(seed)
    noise_generator = torch.Generator().manual_seed(int(generator.integers(2**31)))
    level = np.asarray(level_of_person, dtype=np.int64)
    members = generator.random((models, len(level))) < 0.5
    made = [make_model() for _ in range(models)]
    template = made[0]
    initial, _ = stack_module_state(made)
    parameters = {name: value.detach().clone() for name, value in initial.items()}
    rate_at = learning_rate if callable(learning_rate) else (lambda _: learning_rate)

    def loss(own: dict[str, Tensor], one: Tensor, target: Tensor) -> Tensor:
        return criterion(functional_call(template, own, (one[None],)), target[None])

    per_example = vmap(vmap(grad(loss), in_dims=(None, 0, 0)))
    step = 0
    for number, planned in enumerate(plan.rounds):
        if planned.fresh_model and number > 0:
            parameters = {name: value.detach().clone() for name, value in initial.items()}
        taking_part = members & (generator.random(members.shape) < np.asarray(planned.participation)[level])
        for _ in range(planned.steps):
            drawn = taking_part & (generator.random(members.shape) < np.asarray(planned.sample_rates)[level])
            sums = clipped_sums(per_example, parameters, inputs, targets, drawn, level, planned, plan)
            deviation = planned.noise_multiplier * plan.max_grad_norm
            scale = rate_at(step / plan.steps) / planned.expected_batch_size
            for name, value in parameters.items():
                noise = torch.randn(value.shape, generator=noise_generator) * deviation
                value.sub_(scale * (sums[name] + noise))
            step += 1
            if each_step is not None:
                each_step(step)
    return ShadowModels(template, parameters, members)


def clipped_sums(
    per_example: Callable[..., dict[str, Tensor]],
    parameters: dict[str, Tensor],
    inputs: Tensor,
    targets: Tensor,
    drawn: BoolArray,
    level: IntArray,
    planned: Round,
    plan: Plan,
) -> dict[str, Tensor]:
    """Return every model's sum of clipped gradients over its own sampled people (models x people)."""
    size = int(drawn.sum(axis=1).max())
    if size == 0:
        return {name: torch.zeros_like(value) for name, value in parameters.items()}
    # Everybody drawn comes first in each row; rows are padded to the largest batch with people of weight 0.
    people = np.argsort(~drawn, axis=1, kind="stable")[:, :size]
    weights = np.take_along_axis(drawn, people, axis=1)
    norms = np.asarray(planned.clip_scales, dtype=np.float32)[level[people]] * np.float32(plan.max_grad_norm)
    largest = max(planned.clip_scales) * plan.max_grad_norm
    numbers = sum(value[0].numel() for value in parameters.values())
    at_once = max(1, GRADIENTS_AT_ONCE // (numbers * size))
    parts = []
    for first in range(0, len(drawn), at_once):
        some = slice(first, first + at_once)
        index = torch.from_numpy(people[some])
        found = per_example(
            {name: value[some] for name, value in parameters.items()}, inputs[index], targets[index]
        )
        squares = torch.stack([g.flatten(2).square().sum(2) for g in found.values()]).sum(0)
        clipping = clip_weights(squares.sqrt(), torch.from_numpy(norms[some]), largest)
        factor = clipping * torch.from_numpy(weights[some])
        parts.append({name: torch.einsum("kb,kb...->k...", factor, g) for name, g in found.items()})
    return {name: torch.cat([part[name] for part in parts]) for name in parameters}
