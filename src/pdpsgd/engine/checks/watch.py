"""Watches the first batches of the user's own loop: do examples mix before the model, in it, or in the loss?

The loss is computed in the loop, between the model's outputs and `backward()`, where the engine does not see it; so is
what happens to a batch before the model is called. So during the first batch every torch function that touches the
batch or the outputs is recorded (`replay`), and checked (`loop`) when the model and `backward()` are called. The model
is probed by itself when it is first called, with a loss that does not mix. Later batches are not watched.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from pdpsgd.engine._torch import pop_function_modes, push_function_mode
from pdpsgd.engine.batches import Arguments, map_tensors, tensors
from pdpsgd.engine.checks.loop import LossCheck, check_inputs, check_parameters
from pdpsgd.engine.checks.probe import check_model
from pdpsgd.engine.checks.replay import CannotTellError, Replay
from pdpsgd.errors import PdpsgdError, warn

if TYPE_CHECKING:
    from pdpsgd.gradients.clipping import ClippedGradients


class LossWatch(TorchFunctionMode):
    """Watch of one batch of the user's loop, from its loader to its backward pass.

    With `criterion_is_checked` the model and the loss were probed already: how the loss is reduced is not looked at.
    """

    def __init__(
        self,
        gradients: ClippedGradients,
        batch: Any,
        size: int,
        *,
        owner: object,
        loss_reduction: str = "mean",
        views: int = 1,
        criterion_is_checked: bool = False,
        sizes_divided_by: Iterable[int] = (),
    ) -> None:
        super().__init__()
        self.owner = weakref.ref(owner)  # once the run is gone, so is the reason to watch
        self.size = size
        self.loss_reduction = None if criterion_is_checked else loss_reduction
        self.done = False
        self.concluded = False  # whether there is no need to look at another batch
        self.findings: list[str] = []  # what could not be told, and why
        self.sizes_divided_by = set(sizes_divided_by)  # of this batch and of those before it
        self._views = views
        self._criterion_is_checked = criterion_is_checked
        self._own = {id(parameter) for parameter in gradients.module.parameters()} | {id(gradients.anchor)}
        self._replay: Replay | None = Replay(batch, size)
        self._outputs: dict[int, tuple[Tensor, Tensor]] = {}  # and as they were when the model gave them
        self._inside = 0
        self._called = False
        self._probed = criterion_is_checked
        self._hooks = [
            gradients.module.register_forward_pre_hook(self._enter_model, with_kwargs=True),
            gradients.module.register_forward_hook(self._leave_model),
        ]

    def __deepcopy__(self, memo: Any) -> LossWatch:
        """Return itself: a copy of the module is not another run."""
        return self

    def start(self) -> None:
        """Start watching below all function modes that the loop is in, which keep their order."""
        above = _taken_off()
        push_function_mode(self)
        _put_back(above)

    def stop(self, *, report: bool = True) -> None:
        """Stop watching, and warn about what could not be checked."""
        if not self.done:
            unseen = "Whether examples mix in the loss could not be checked: backward() was not seen"
            self._end(None if self._criterion_is_checked else unseen)
        _put_back(_taken_off())
        self.concluded |= report and not self.sizes_divided_by
        for finding in self.findings if report else ():
            warn(
                f"{finding}. What is not as it should be there ends the guarantee. Give make_private the loss as "
                "criterion=, or try engine.check(); and do to examples one by one, in torch, what is done before the "
                "model.",
            )

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._replay is None or self._inside:
            return function(*args, **kwargs)
        if function is Tensor.backward and args and id(args[0]) in self._replay.known:
            self._check(self._replay, *args, **kwargs)
            return function(*args, **kwargs)  # type: ignore[no-untyped-call]
        return self._replay.run(function, args, kwargs)

    def _enter_model(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._inside += 1
        if self._replay is None or self._inside > 1 or not _training(module):
            return
        self._called = True
        with self._finding("Whether examples mix before the model"), _paused(self):
            check_inputs(self._replay, (args, kwargs), views=self._views)
        if not self._probed:
            self._probed = True
            with self._finding("Whether examples mix in the model"):
                self._probe(module, Arguments(args, kwargs))

    def _leave_model(self, module: nn.Module, args: Any, outputs: Any) -> None:
        self._inside -= 1
        if self._replay is None or self._inside or not _training(module):
            return
        self._replay.add(*tensors(outputs))
        self._outputs |= {id(leaf): (leaf, leaf.detach().clone()) for leaf in tensors(outputs)}

    def _probe(self, module: nn.Module, inputs: Arguments) -> None:
        try:
            given = map_tensors(torch.detach, inputs)  # a graph before the model is the loop's own
            size = self.size * self._views
            check_model(module, given, size=size)
        except (RuntimeError, ValueError, IndexError, TypeError) as error:
            if isinstance(error, PdpsgdError):
                raise
            raise CannotTellError(f"it cannot be tried on a few examples ({type(error).__name__})") from error

    def _check(self, replay: Replay, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        if not self._called:
            self.findings.append(
                "Whether examples mix before the model could not be checked: the module itself was not called, as "
                "module(inputs)"
            )
        check, say = LossCheck(replay, loss, self._outputs), not self._criterion_is_checked
        with self._finding("Whether examples mix in the loss", say=say), _paused(self):
            check_parameters(loss, replay, self._own)
            if loss.numel() != 1 or any(part is not None for part in (*args, kwargs.get("gradient"))):
                raise CannotTellError("backward() was given a gradient")
            if self._views == 1:
                check.examples_do_not_mix()
                with self._finding("Whether the loss is a mean or a sum over the batch", say=say):
                    if not check.is_reduced_by(self.loss_reduction):
                        self.sizes_divided_by.add(self.size)
        self.concluded = len(self.sizes_divided_by) != 1  # one size is not enough to tell
        self._end(None)

    @contextmanager
    def _finding(self, where: str, *, say: bool = True) -> Iterator[None]:
        """What cannot be told becomes a finding; what is refused ends the watch, and the next batch has another."""
        try:
            yield
        except CannotTellError as reason:
            self.findings += [f"{where} could not be checked: {reason}"] if say else []
        except PdpsgdError:
            self._end(None)
            raise

    def _end(self, finding: str | None) -> None:
        self.done = True
        self.findings += [] if finding is None else [finding]
        for hook in self._hooks:
            hook.remove()
        self._replay = None
        self._outputs = {}


def _taken_off() -> list[TorchFunctionMode]:
    """Take all modes off torch's stack, the top one first; watches that have ended are dropped."""
    return [
        mode
        for mode in pop_function_modes()
        if not (isinstance(mode, LossWatch) and (mode.done or mode.owner() is None))
    ]


def _put_back(modes: list[TorchFunctionMode]) -> None:
    for mode in reversed(modes):
        push_function_mode(mode)


def _training(module: nn.Module) -> bool:
    return module.training and torch.is_grad_enabled()


@contextmanager
def _paused(watch: LossWatch) -> Iterator[None]:
    """Do not watch what the check itself does, nor let it change the random state."""
    watch._inside += 1
    try:
        with torch.random.fork_rng(range(torch.cuda.device_count())), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with torch.enable_grad():
                yield
    finally:
        watch._inside -= 1
