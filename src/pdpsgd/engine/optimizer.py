"""The optimizer of a private run: clipped sum, noise once, a public divisor, then the user's optimizer."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor
from torch.optim import Optimizer

from pdpsgd.engine._torch import share_step_hooks
from pdpsgd.engine.earlier_training import TakenSteps
from pdpsgd.engine.noising import Noise, NoisedSums, dequantized
from pdpsgd.errors import fail
from pdpsgd.gradients.clipping import ADDED_TWICE
from pdpsgd.sampling.noise import quantize

if TYPE_CHECKING:
    from pdpsgd.engine.batches import PhysicalBatch
    from pdpsgd.engine.distributed import Ranks
    from pdpsgd.engine.execution import Execution
    from pdpsgd.engine.noising import Release
    from pdpsgd.engine.norms import NormKeeper
    from pdpsgd.engine.observers import Observers
    from pdpsgd.engine.spending import SpendingFilter
    from pdpsgd.gradients.clipping import ClippedGradients


class PrivateOptimizer(Optimizer):
    """Any torch optimizer, wrapped; it shares its groups and state, so schedulers may be built on either.

    (A scheduler that looks at training losses, as ReduceLROnPlateau may, makes the rate depend on them without
    noise.)

    `step()` adds the batch's clipped sum to the step's. At the step's last batch it adds noise to the sum,
    once, divides by the plan's expected batch size, puts the result where gradients are, and lets the wrapped
    optimizer step. `took_step` says whether the last `step()` did that, or only added (where physical batches
    are limited).

    Guarantee: what reaches the wrapped optimizer, and the parameters, is the Poisson-subsampled Gaussian
    mechanism of the plan's round: sum of gradients clipped to C_l = max_grad_norm * clip_scale of the person's level
    (in a filtered round, to what the person may still give if that is less), plus Gaussian noise of standard deviation
    noise_multiplier * max_grad_norm, times a public constant. Whatever else lies in `grad` of its parameters, also of
    frozen ones, is cleared and never used. What the wrapped optimizer's state holds before the first step is not
    covered: a warning names it.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        gradients: ClippedGradients,
        execution: Execution,
        observers: Observers,
        ranks: Ranks,
        loss_reduction: str,
        views: int = 1,
        release: Release,
        spending: SpendingFilter | None = None,
        norms: NormKeeper | None = None,
        count_unseen: Callable[[], int] = lambda: 0,
    ) -> None:
        # On purpose not Optimizer.__init__: groups, state and defaults are the wrapped optimizer's own.
        self.original = optimizer
        share_step_hooks(self, optimizer)
        self.took_step = False
        self.non_finite_gradients = 0  # sensitive: never written anywhere by default
        self._execution = execution
        self._gradients = gradients
        self._observers = observers
        self.release = release
        self._spending = spending
        self._norms = norms
        self._count_unseen = count_unseen  # how much this rank's guards could not see through so far
        self.unseen_on_all_ranks = 0  # how much that is on all ranks
        self._noised = NoisedSums(gradients.sums, gradients.flat_sums)
        self._figures: dict[int, tuple[float, float]] = {}  # of each round's noise
        # By identity, and once: this is asked at every step.
        self._shapes = {id(parameter): total.shape for parameter, total in gradients.sums.items()}
        self._taken = TakenSteps(gradients.module, optimizer)
        self._ranks = ranks
        self._loss_reduction = loss_reduction
        self._views = views
        self._additions = 0  # to the step's sums, by batches that were added and noted as added
        self._expected: tuple[PhysicalBatch, dict[str, Any]] | None = None  # and whose its rows are
        self._check_parameters()

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The wrapped optimizer's groups."""
        return self.original.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.original.param_groups = groups

    @property
    def state(self) -> Any:
        """The wrapped optimizer's state."""
        return self.original.state

    @state.setter
    def state(self, state: Any) -> None:
        self.original.state = state

    @property
    def defaults(self) -> dict[str, Any]:
        """The wrapped optimizer's defaults."""
        return self.original.defaults

    @defaults.setter
    def defaults(self, defaults: dict[str, Any]) -> None:
        self.original.defaults = defaults

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Add the batch's clipped sum; at the step's last batch release it with noise and move the model."""
        self.took_step = False
        batch = self._execution.batch_to_step()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for check in reversed(batch.when_stepped):
            check()
        self._add(batch)
        batch.added, self._additions = True, self._gradients.additions
        if batch.last:
            if self._spending is not None:
                self._spending.settle()  # before the release: whatever interrupts this, nothing leaves uncharged
            self._release_step(batch.step)
            self._execution.released()
            if self._norms is not None:
                self._norms.settle(batch.step)
            self.original.step()
            self.took_step = True
            self._taken.count()
        for note in batch.when_taken:
            note()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients, and drop a backward pass that was not stepped."""
        self.original.zero_grad(set_to_none)
        if self._gradients.recorded_batch_size is not None:
            self._gradients.forget()

    def state_dict(self) -> dict[str, Any]:
        """Return the wrapped optimizer's state, which loads without pdpsgd."""
        return self.original.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load into the wrapped optimizer."""
        self.original.load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters of the private module; any others would be moved without noise and are refused."""
        self.original.add_param_group(param_group)
        self._check_parameters()

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """What a GradScaler asks an optimizer before it steps."""
        fail(
            "Expected no GradScaler: its scale follows the data, and gradients are clipped and noised per example. "
            "Call loss.backward() and optimizer.step() without it; bfloat16 needs no scaling."
        )

    def __repr__(self) -> str:
        return f"Private{self.original!r}"

    def expect(self, batch: PhysicalBatch) -> None:
        """Get ready for the batch that the loop is about to get."""
        if batch.first:
            self._additions = 0
        self._gradients.expect(**self._owners_of(batch))

    def _owners_of(self, batch: PhysicalBatch) -> dict[str, Any]:
        """Return whose the rows of a batch are, in the same tensors whenever it is asked."""
        if self._expected is None or self._expected[0] is not batch:
            owners: dict[str, Any] = {"views": self._views}
            if batch.starts is not None:
                owners |= {"starts": torch.from_numpy(batch.starts), "whose": torch.from_numpy(batch.people)}
            self._expected = batch, owners
        return self._expected[1]

    def _add(self, batch: PhysicalBatch) -> None:
        recorded = self._gradients.recorded_batch_size
        if batch.size == 0:
            # Mean over nothing: no gradient, or NaN. Nobody was sampled, so the sum is zero.
            self._gradients.forget()
            return
        if self._gradients.additions != self._additions:
            fail(ADDED_TWICE)  # an interruption came after the batch was added, and before that was noted
        if recorded is None:
            fail(
                "Expected loss.backward() on the batch before optimizer.step(). Got none. (Was the model in "
                "evaluation mode, or under torch.no_grad()?)"
            )
        if recorded != batch.size * self._views:
            fail(
                "Expected the loss of the batch as the loader gave it. Got a backward pass over more or "
                "fewer examples. Batches must go through the model whole and once: do not cut, filter, "
                "repeat or extend them."
            )
        if self._loss_reduction == "mean" and self._gradients.recorded_in_half_precision:
            refuse_half_precision_mean()
        spending = self._spending if self._spending is not None and self._spending.is_on(batch.step) else None
        norms = batch.clip_norms if spending is None else spending.clip_norms(batch)
        norms = norms.to(self._gradients.flat_sums[0].device)
        self.non_finite_gradients += self._gradients.clipped_sum(
            norms,
            largest_clip_norm=self._noise_of(batch.step).clipping_norm,
            loss_reduction=self._loss_reduction,
            note=self._note_of(batch, spending),
            **self._owners_of(batch),
        )

    def _note_of(
        self, batch: PhysicalBatch, spending: SpendingFilter | None
    ) -> Callable[[Tensor], None] | None:
        """Return who is told what each person gives: the filter of the round, and the keeper of norms."""
        if spending is None and self._norms is None:
            return None
        told = [] if spending is None else [partial(spending.charge, batch)]
        if self._norms is not None:
            told.append(partial(self._norms.note, batch))

        def tell(given: Tensor) -> None:
            for each in told:
                each(given)

        return tell

    def _release_step(self, step: int) -> None:
        self._check_parameters()
        planned = self._execution.round_of(step)
        noise = self._noise_of(step)
        if self._ranks.world_size == 1:
            self._observers.step_releases(step, self._gradients.flat_sums)
            totals = self._quantized(noise)
            self.unseen_on_all_ranks = self._ranks.gather_sums(totals, step=step, unseen=self._count_unseen())
            self.release(totals, noise, source=self._execution.source, out=self._noised.flat)
        else:
            self._release_on_ranks(noise)
        # The public divisor: never the sampled size, never the number of records.
        for noised in self._noised.flat:
            noised.mul_(1 / planned.expected_batch_size)  # to divide takes several times as long
        # Nothing else may lie there: a gradient left in a frozen parameter would move it without noise.
        for group in self.original.param_groups:
            for parameter in group["params"]:
                parameter.grad = None
        self._noised.put_into_gradients()

    def _release_on_ranks(self, noise: Noise) -> None:
        """Add up the sums of all ranks, let rank 0 add noise, and give everybody its result."""
        unseen = self._noised.flat[0].new_zeros(1)
        with self._ranks.result_of_first([*self._noised.flat, unseen]):
            totals = self._quantized(noise)
            unseen.fill_(self._ranks.gather_sums(totals, step=noise.step, unseen=self._count_unseen()))
            if self._ranks.first:
                self._observers.step_releases(noise.step, dequantized(totals, noise.clipping_norm))
                self.release(totals, noise, source=self._execution.source, out=self._noised.flat)
        self.unseen_on_all_ranks = int(unseen)

    def _quantized(self, noise: Noise) -> list[Tensor]:
        """Turn this rank's sums into integers, in their own memory: nothing reads them before the next step."""
        return quantize(self._gradients.flat_sums, clipping_norm=noise.clipping_norm, out=self._noised.totals)

    def _noise_of(self, step: int) -> Noise:
        """Return the step's noise, as multiples of the largest clipping norm that anybody has in its round.

        The margins that cover rounding are parts of that norm, so the unit of integer sums is, too.
        """
        index, plan = self._execution.round_index(step), self._execution.plan
        if index not in self._figures:
            planned = plan.rounds[index]
            largest = max(planned.clip_scales) or 1.0  # 0: nobody is used, and there is nothing to round
            self._figures[index] = largest * plan.max_grad_norm, planned.noise_multiplier / largest
        return Noise(step, *self._figures[index])

    def _check_parameters(self) -> None:
        for index, group in enumerate(self.original.param_groups):
            for parameter in group["params"]:
                shape = self._shapes.get(id(parameter))
                if shape is None and parameter.requires_grad:
                    fail(
                        "Expected the optimizer to hold trainable parameters of the private module only. Got "
                        f"one of shape {tuple(parameter.shape)} in param_groups[{index}] that the module "
                        "does not have (or did not have when it was made private): it would be moved by a "
                        "gradient without noise."
                    )
                if shape is not None and parameter.shape != shape:
                    fail(
                        f"Expected parameters in the shapes they had when they were made private: "
                        f"{tuple(shape)}. Got {tuple(parameter.shape)} in param_groups[{index}]."
                    )


def refuse_half_precision_mean() -> NoReturn:
    """Refuse a mean loss in 16 bits: divided by the batch's size, gradients of others are rounded differently."""
    fail(
        'Expected a summed loss in half precision. Got loss_reduction="mean" with float16 or bfloat16: the size of the '
        'batch then decides how everybody\'s gradient is rounded. Sum the loss (reduction="sum") and say '
        'make_private(..., loss_reduction="sum").'
    )
