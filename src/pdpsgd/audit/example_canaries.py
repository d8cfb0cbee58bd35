"""Example canaries: records as the model sees them (mislabeled ones, say), on a real network.

Their gradients change as the model trains, so before every step each canary's contribution is worked out by
plain autograd on a copy of the network, which shares no code with the gradients that training uses.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from pdpsgd.audit.canaries import Canaries
from pdpsgd.audit.conformance import Observation
from pdpsgd.audit.observed_run import Criterion, ObservedStep, Tamper, observe_run
from pdpsgd.gradients.weights import clip_limits
from pdpsgd.sampling.source import RandomSource


def mislabeled(
    inputs: Tensor, targets: Tensor, *, classes: int, generator: np.random.Generator
) -> tuple[Tensor, Tensor]:
    """Return the same records with a wrong label each, which only somebody who trained on them would expect."""
    shift = torch.from_numpy(generator.integers(1, classes, size=len(targets)))
    return inputs, (targets + shift) % classes


def example_steps(
    canaries: Canaries,
    *,
    module: nn.Module,
    criterion: Criterion,
    examples: tuple[Tensor, Tensor],
    others: tuple[Tensor, Tensor] | None = None,
    record_of_other: npt.ArrayLike | None = None,
    learning_rate: float = 0.1,
    momentum: float = 0.0,
    seed: int | None = None,
    source: RandomSource | None = None,
    tamper: Tamper | None = None,
) -> Iterator[Observation]:
    """Train `module` with a canary for each of the `examples`, and yield what each step shows of them.

    Without `others` the canaries are the only records: then everything else in a noisy sum is noise, as the
    conformance test needs it. With others there is nothing exact to compare with, and an observation holds
    what attacks need only: dots, and the squared lengths of contributions. `module` is trained in place.
    """
    inputs, targets = examples
    drawn = torch.from_numpy(np.flatnonzero(canaries.has_record))
    records = (inputs[drawn], targets[drawn])
    if others is not None:
        records = (torch.cat([others[0], records[0]]), torch.cat([others[1], records[1]]))
        record_of_other = np.arange(len(others[0])) if record_of_other is None else record_of_other
    exact = others is None
    contributions = _Contributions(canaries, copy.deepcopy(module), criterion, inputs, targets, exact=exact)
    ends = np.cumsum([r.steps for r in canaries.plan.rounds])
    current: list[tuple[Tensor, ...]] = [()]

    def before_step(number: int) -> None:
        current[0] = contributions(module, round_index=int(np.searchsorted(ends, number, side="right")))

    for step in observe_run(
        module=module,
        criterion=criterion,
        records=records,
        record_of_person=canaries.record_of_person(record_of_other),
        plan=canaries.plan,
        learning_rate=learning_rate,
        momentum=momentum,
        seed=seed,
        source=source,
        before_step=before_step,
        tamper=tamper,
    ):
        yield _observe(step, current[0], drawn) if exact else _observe_attacked(step, current[0])


def losses(
    module: nn.Module, criterion: Criterion, examples: tuple[Tensor, Tensor]
) -> npt.NDArray[np.float64]:
    """Return the loss of each example: what is left to an attacker who sees the final model only."""
    was_training = module.training
    module.eval()
    with torch.no_grad():
        outputs = module(examples[0])
        each = torch.stack(
            [
                criterion(output[None], target[None])
                for output, target in zip(outputs, examples[1], strict=True)
            ]
        )
    module.train(was_training)
    return each.to(torch.float64).numpy()


class _Contributions:
    """The contribution of each canary to the sum when it is sampled, by plain autograd.

    One matrix per tensor, with a row per canary.
    """

    def __init__(
        self,
        canaries: Canaries,
        module: nn.Module,
        criterion: Criterion,
        inputs: Tensor,
        targets: Tensor,
        *,
        exact: bool,
    ) -> None:
        self.canaries = canaries
        self.dtype = torch.float64 if exact else torch.float32
        self.inputs, self.targets = inputs, targets

        def loss(parameters: dict[str, Tensor], one: Tensor, target: Tensor) -> Tensor:
            return criterion(functional_call(module, parameters, (one[None],)), target[None])

        self.gradients = vmap(grad(loss), in_dims=(None, 0, 0))

    def __call__(self, module: nn.Module, *, round_index: int) -> tuple[Tensor, ...]:
        parameters = {name: p.detach() for name, p in module.named_parameters() if p.requires_grad}
        found = self.gradients(parameters, self.inputs, self.targets)
        rows = [found[name].flatten(1).to(self.dtype) for name in parameters]
        norms = torch.stack([row.square().sum(1) for row in rows]).sum(0).sqrt()
        plan = self.canaries.plan
        of_levels = (
            torch.tensor(plan.rounds[round_index].clip_scales, dtype=torch.float64) * plan.max_grad_norm
        )
        limits = clip_limits(of_levels, float(of_levels.max()))[torch.from_numpy(self.canaries.level)]
        weights = (limits.to(norms) / norms.clamp(min=1e-16)).clamp(max=1)[:, None]
        return tuple(row * weights for row in rows)


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


def _observe_attacked(step: ObservedStep, contributions: tuple[Tensor, ...]) -> Observation:
    pairs = list(zip(step.noisy_sums, contributions, strict=True))
    none = np.zeros(len(pairs), dtype=np.int64)
    return Observation(
        round=step.round,
        dots=torch.stack([rows @ noisy.flatten().to(rows.dtype) for noisy, rows in pairs]).double().numpy(),
        products=torch.stack([rows.square().sum(1) for _, rows in pairs]).double().numpy(),
        noise_energy=none.astype(np.float64),
        noise_dimensions=none,
        noise_only=none.astype(bool),
    )
