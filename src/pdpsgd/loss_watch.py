"""Looks at the user's own loop, once: do the examples of a batch mix, before the model, in it, or in the loss?

Nobody hands the engine the loss: it happens in the loop, between the model's outputs and `backward()`, and so does
whatever is done to the batch before the model is called. So while the first batch is under way, every torch function
that touches the batch or the outputs is written down (`replay`). When the model is called, what was written down is
done again with one example exchanged for another: what the model gets of the others must be the same. When
`backward()` is called, it is done again for exchanged and for single examples, and the gradients of the outputs are
compared: an example's gradient alone must be its gradient in the batch. The model is probed by itself when it is first
called, with a loss that does not mix. Afterwards nothing is watched any more.
"""

from __future__ import annotations

import math
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode
from torch.utils import _pytree as pytree

from pdpsgd.errors import PdpsgdError, fail
from pdpsgd.examples import exchanged, has_rows, map_tensors, same_but_for, tensors
from pdpsgd.probe import check_examples_do_not_mix
from pdpsgd.replay import CannotTellError, Change, Replay

EXAMPLES = 4
EXCHANGED = 8
TOLERANCE = 2e-3
_SCALING = ("div", "true_divide", "divide", "truediv", "rdiv", "rtruediv", "mul", "multiply", "rmul")


class LossWatch(TorchFunctionMode):
    """Watches one batch of the user's loop, from when it is handed out until its backward pass.

    Without `check_loss` the loss is not compared (it was probed already), and only what comes before the model is.
    """

    def __init__(
        self,
        module: nn.Module,
        batch: Any,
        size: int,
        *,
        owner: object,
        loss_reduction: str = "mean",
        views: int = 1,
        check_loss: bool = True,
        forget: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__()
        self.owner = weakref.ref(owner)  # once the run is gone, so is the reason to watch
        self.size = size
        self.loss_reduction = loss_reduction
        self.done = False
        self.concluded = False  # whether there is no need to look at another batch
        self.findings: list[str] = []  # what could not be told, and why
        self._forget = forget
        self._views = views
        self._check_loss = check_loss
        self._own = {id(parameter) for parameter in module.parameters()}
        self._replay: Replay | None = Replay(batch, size)
        self._outputs: list[Tensor] = []
        self._inside = 0
        self._probed = not check_loss
        self._random_state: Tensor | None = None
        self._hooks = [
            module.register_forward_pre_hook(self._enter_model, with_kwargs=True),
            module.register_forward_hook(self._leave_model),
        ]

    def start(self) -> None:
        """Begin to watch."""
        _drop_idle_watches()
        self.__enter__()  # type: ignore[no-untyped-call]

    def stop(self, *, warn: bool = True) -> None:
        """Stop watching, and warn about what could not be checked."""
        if not self.done:
            self._end(
                "in the loss could not be checked: backward() was not seen" if self._check_loss else None
            )
        _drop_idle_watches()
        self.concluded |= warn
        for finding in self.findings if warn else ():
            warnings.warn(
                f"Whether examples mix {finding}. If they do, nothing is proven. Give make_private the loss as "
                "criterion=, or try engine.check(); and do to examples one by one, in torch, what is done before the "
                "model.",
                stacklevel=4,
            )

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._replay is None or self._inside:
            return function(*args, **kwargs)
        if function is Tensor.backward and args and id(args[0]) in self._replay.known:
            self._check(self._replay, args[0])
            return function(*args, **kwargs)  # type: ignore[no-untyped-call]
        return self._replay.run(function, args, kwargs)

    def _enter_model(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._inside += 1
        if self._replay is None or self._inside > 1 or not _training(module):
            return
        try:
            with _paused(self):
                self._check_inputs(self._replay, (args, kwargs))
        except CannotTellError as reason:
            self.findings.append(f"before the model could not be checked: {reason}")
        except PdpsgdError:
            self._end(None)
            raise
        if not self._probed:
            self._probed = True
            if not (args and kwargs):
                inputs = map_tensors(
                    torch.detach, args or kwargs
                )  # a graph before the model is the loop's own
                check_examples_do_not_mix(module, _harmless_loss, inputs)

    def _leave_model(self, module: nn.Module, args: Any, outputs: Any) -> None:
        self._inside -= 1
        if self._replay is None or self._inside or not _training(module):
            return
        leaves = tensors(outputs)
        self._outputs += [leaf for leaf in leaves if leaf.requires_grad]
        self._replay.add(*leaves)
        self._random_state = torch.get_rng_state()

    def _end(self, finding: str | None) -> None:
        self.done = True
        self.findings += [] if finding is None else [finding]
        for hook in self._hooks:
            hook.remove()
        self._replay = None
        self._outputs.clear()

    def _check_inputs(self, replay: Replay, inputs: Any) -> None:
        """Refuse where exchanging an example changes what the model is called with for others."""
        known = [
            leaf
            for leaf in tensors(inputs)
            if id(leaf) in replay.known and has_rows(leaf, self.size * self._views)
        ]
        if not known:
            raise CannotTellError(
                "the model is called with what does not come from the batch by torch's functions"
            )
        if replay.left_torch:
            raise CannotTellError("values of the batch are taken out of torch before the model is called")
        if not replay.calls:
            return
        if not self._are_same(self.size, known, replay.again(lambda leaf: leaf, known)):
            raise CannotTellError("it does not come out alike when it is done again")
        for row in self._spread(EXCHANGED):
            if not self._are_same(row, known, replay.again(self._exchange(row), known)):
                fail(
                    "Examples mix before the model in this loop: exchanging one example of the batch changes what the "
                    "model is called with for others. What is done to a batch must be done to each example by itself: "
                    "no statistics of the batch (use public constants), no mixup, and with several views the rows of "
                    "an example one after the other (inputs.repeat_interleave(views, 0))."
                )

    def _are_same(self, but_for: int, before: list[Tensor], after: list[Tensor]) -> bool:
        pairs = zip(before, after, strict=True)
        return all(same_but_for(but_for, one, other, self.size) for one, other in pairs)

    def _check(self, replay: Replay, loss: Tensor) -> None:
        self.concluded = True
        finding = None
        try:
            self._check_parameters(loss)
            if self._check_loss:
                self._compare(replay, loss)
        except CannotTellError as reason:
            finding = f"in the loss could not be checked: {reason}"
        finally:
            self._end(finding)

    def _check_parameters(self, loss: Tensor) -> None:
        """Refuse a loss that depends on trainable parameters which are not the private module's."""
        for leaf in _leaves_of_graph(loss):
            if isinstance(leaf, nn.Parameter) and id(leaf) not in self._own:
                fail(
                    "Expected a loss that depends on trainable parameters of the private module only. Got one of "
                    f"shape {tuple(leaf.shape)} beside it: its gradient is exact, and whatever it moves tells about "
                    "people without noise. Make it a part of the module, or freeze it (requires_grad_(False))."
                )

    def _compare(self, replay: Replay, loss: Tensor) -> None:
        if not self._outputs:
            raise CannotTellError("the model was not called")
        if any(leaf.dim() == 0 or leaf.shape[0] != self.size for leaf in self._outputs):
            raise CannotTellError("the first dimension of the model's outputs is not the batch")
        with _paused(self):
            together = _gradients(loss, self._outputs, retain=True)
            self._forget()  # the watched layers heard of it, and the true backward pass is yet to come
            self._compare_exchanged(replay, loss, together)
            if self._random_state is not None and not torch.equal(self._random_state, torch.get_rng_state()):
                raise CannotTellError("it draws random numbers")
            rows = self._spread(EXAMPLES)
            batch = torch.stack([_row(together, index) for index in rows])
            alone = torch.stack([_row(self._alone(replay, loss, index), 0) for index in rows])
        is_mean, is_sum = not _differ(batch * self.size, alone), not _differ(batch, alone)
        if not (is_mean or is_sum):
            _refuse_loss()
        # A sum divided by len(batch), a number, is a mean that looks like a sum when it is done again alone.
        divided = is_sum and not is_mean and self._divides_by_size(replay)
        found = ["mean"] if divided else ["mean"] * is_mean + ["sum"] * is_sum
        if self.loss_reduction not in found:
            other = found[0]
            fail(
                f'Expected a loss reduced over the batch as loss_reduction="{self.loss_reduction}". Got one that '
                f"is a {other}, so that gradients would be clipped at a norm that depends on the batch's size. "
                f'Reduce the loss by reduction="{self.loss_reduction}", or say '
                f'make_private(..., loss_reduction="{other}").'
            )

    def _compare_exchanged(self, replay: Replay, loss: Tensor, together: list[Tensor]) -> None:
        """Refuse where exchanging an example changes the gradients that others' outputs get."""
        everybody = range(self.size)
        before = torch.stack([_row(together, index) for index in everybody])
        for row in self._spread(EXAMPLES):
            try:
                found = self._done_again(replay, loss, self._exchange(row))
            except CannotTellError:
                return  # the comparison with single examples says why
            others = [index for index in everybody if index != row]
            after = torch.stack([_row(found, index) for index in everybody])
            finite = before.isfinite().all(1)[others]
            if not torch.equal(finite, after.isfinite().all(1)[others]) or _differ(
                before[others][finite], after[others][finite]
            ):
                _refuse_loss()

    def _alone(self, replay: Replay, loss: Tensor, index: int) -> list[Tensor]:
        """The gradients of the outputs of one example, with the loss done again for it alone."""
        return self._done_again(replay, loss, lambda leaf: leaf[index : index + 1], alone=True)

    def _done_again(
        self, replay: Replay, loss: Tensor, change: Change, *, alone: bool = False
    ) -> list[Tensor]:
        """The gradients of the outputs, with the loss done again for a changed batch and its changed outputs."""
        outputs = [change(leaf.detach()).clone().requires_grad_() for leaf in self._outputs]
        instead = {id(leaf): new.clone() for leaf, new in zip(self._outputs, outputs, strict=True)}
        (result,) = replay.again(change, [loss], instead=instead, alone=alone)
        if result.numel() != 1 or not result.requires_grad:
            raise CannotTellError("its last operation does not give the loss")
        return _gradients(result.reshape(()), outputs, retain=False)

    def _divides_by_size(self, replay: Replay) -> bool:
        """Whether something is divided by the batch's size, or multiplied by its inverse, as a number."""
        for call in replay.calls:
            if getattr(call.function, "__name__", "").strip("_") in _SCALING:
                for leaf in pytree.tree_leaves((call.args, call.kwargs)):
                    if isinstance(leaf, Tensor) and leaf.dim() == 0 and id(leaf) not in replay.known:
                        leaf = leaf.item()
                    if isinstance(leaf, (int, float)) and (
                        leaf == self.size or math.isclose(leaf * self.size, 1.0, rel_tol=1e-6)
                    ):
                        return True
        return False

    def _exchange(self, row: int) -> Change:
        """Put the next example in the place of this one."""
        return lambda leaf: exchanged(leaf, self.size, row, (row + 1) % self.size)

    def _spread(self, most: int) -> list[int]:
        """Up to so many places in the batch, spread over it."""
        return sorted({round(place) for place in torch.linspace(0, self.size - 1, most).tolist()})


def _refuse_loss() -> None:
    fail(
        "Examples mix in the loss of this loop: the gradient that it gives an example's outputs in a batch is not the "
        "one it gives them alone, or among others. Every example's loss must depend on that example only, and the "
        "batch's loss be their plain mean or sum: no class weights or ignored targets normalised over the batch, no "
        "mixed targets, no contrastive terms, no statistics of the batch."
    )


def _leaves_of_graph(loss: Tensor) -> Iterator[Tensor]:
    """The tensors that autograd would give a gradient to."""
    nodes, seen = [loss.grad_fn], set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            yield node.variable
        nodes += [following for following, _ in node.next_functions]


def _drop_idle_watches() -> None:
    """Take watches that have ended off the top of torch's stack; one below another has to wait for it."""
    while True:
        top = _get_current_function_mode()  # type: ignore[no-untyped-call]
        if not isinstance(top, LossWatch) or not (top.done or top.owner() is None):
            return
        top.__exit__(None, None, None)  # type: ignore[no-untyped-call]


def _training(module: nn.Module) -> bool:
    return module.training and torch.is_grad_enabled()


def _harmless_loss(outputs: Any) -> Tensor:
    """A mean over examples in which every output of an example counts, and nothing of the others."""
    total = torch.zeros(())
    for leaf in tensors(outputs):
        if leaf.requires_grad:
            flat = leaf.flatten(1) if leaf.dim() > 1 else leaf.reshape(-1, 1)
            total = total + (flat * torch.arange(1, flat.shape[1] + 1).to(flat).cos()).sum(1).mean()
    return total


@contextmanager
def _paused(watch: LossWatch) -> Iterator[None]:
    """Do not watch what the check itself does, nor let it change the random state."""
    watch._inside += 1
    try:
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        watch._inside -= 1


def _gradients(loss: Tensor, outputs: list[Tensor], *, retain: bool) -> list[Tensor]:
    found = torch.autograd.grad(loss, outputs, retain_graph=retain, allow_unused=True)
    return [
        torch.zeros_like(leaf) if part is None else part for leaf, part in zip(outputs, found, strict=True)
    ]


def _row(gradients: list[Tensor], index: int) -> Tensor:
    return torch.cat([part[index].reshape(-1).double() for part in gradients])


def _differ(one: Tensor, other: Tensor) -> bool:
    sizes = torch.maximum(one.norm(dim=1), other.norm(dim=1))
    return not bool(((one - other).norm(dim=1) <= TOLERANCE * (sizes + 1e-3 * sizes.max())).all())
