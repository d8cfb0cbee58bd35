"""Watches the first batches of the user's own loop: do examples mix before the model, in it, or in the loss?

The loss is computed in the loop, between the model's outputs and `backward()`, where the engine does not see it; so is
what happens to a batch before the model is called. So during the first batch every torch function that touches the
batch or the outputs is recorded (`replay`), and checked (`loop`) when the model and `backward()` are called. The model
is probed by itself when it is first called, with losses that do not mix, and when its own loss is used, with that. A
second batch, of another size, is compared with the first. Later batches are not watched.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from pdpsgd.engine._torch import pop_function_modes, push_function_mode
from pdpsgd.engine.batches import Arguments, RandomStates, map_tensors, tensors
from pdpsgd.engine.checks.loop import (
    LossCheck,
    check_arrived,
    check_inputs,
    check_inputs_of_two_sizes,
    check_parameters,
)
from pdpsgd.engine.checks.probe import check_model, check_own_loss
from pdpsgd.engine.checks.replay import CannotTellError, Replay
from pdpsgd.engine.checks.sizes import (
    UNSETTLED,
    Course,
    Recorded,
    SizeOrScheduleError,
    check_nothing_is_kept,
    numbers_of,
)
from pdpsgd.errors import PdpsgdError, warn

if TYPE_CHECKING:
    from pdpsgd.gradients.clipping import ClippedGradients

# So many batches of one size are watched, waiting for one of another.
MOST_BATCHES = 8


class LossWatch(TorchFunctionMode):
    """Watch of one batch of the user's loop, from its loader to its backward pass.

    With `criterion_is_checked` the model and the loss were probed already: how the loss is reduced is not looked at.
    `last` is the watch of the batch before, if that was not enough to conclude.
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
        is_cut: bool = False,
        last: LossWatch | None = None,
    ) -> None:
        super().__init__()
        self.owner = weakref.ref(owner)  # once the run is gone, so is the reason to watch
        self.size = size
        self.done = False
        self.concluded = False  # whether there is no need to look at another batch
        self.findings: list[str] = []  # what could not be told, and why
        self.recorded: Recorded | None = None if last is None else last.recorded
        self.batches: int = 1 if last is None else last.batches + 1
        self._undecided: bool = last is not None and last._undecided  # whether the loss is a mean or a sum
        self._said: set[str] = set() if last is None else last._said | set(last.findings)
        self._loss_reduction = loss_reduction
        self._views = views
        self._is_cut = is_cut  # whether steps may be cut into physical batches
        self._criterion_is_checked = criterion_is_checked
        self._own = {id(parameter) for parameter in gradients.module.parameters()} | {id(gradients.anchor)}
        self._gradients = gradients
        self._module = gradients.module
        self._replay: Replay | None = Replay(batch, size)
        self._random = RandomStates.now()  # where random numbers stood when the loop went on
        self._inputs: list[Tensor] = []  # of the model, by row
        self._course = Course(size, [])  # of the numbers that the loop used on the way there
        self._arguments: Arguments | None = None  # of the model, as they were
        self._outputs: dict[int, tuple[Tensor, Tensor]] = {}  # and as they were when the model gave them
        self._expected: dict[int, Tensor] = {}  # their gradients, by what was recorded
        self._arrived: dict[int, Tensor] = {}  # and by the backward pass
        self._inside = 0
        self._calls = 0
        self._probed = criterion_is_checked or last is not None
        self._hooks = [
            gradients.module.register_forward_pre_hook(self._enter_model, with_kwargs=True),
            gradients.module.register_forward_hook(self._leave_model),
        ]

    def __deepcopy__(self, memo: Any) -> LossWatch:
        """Return itself: a copy of the module is not another run."""
        return self

    @property
    def waits(self) -> bool:
        """Whether a number of the loop went with the size so far, and further batches have to tell."""
        return self.recorded is not None and self.recorded.waits

    def start(self) -> None:
        """Start watching below all function modes that the loop is in, which keep their order."""
        above = _taken_off()
        push_function_mode(self)
        _put_back(above)

    def stop(self, *, report: bool = True) -> None:
        """Stop watching; refuse gradients that the loss does not explain, warn about what could not be checked."""
        if not self.done:
            unseen = "Whether examples mix in the loss could not be checked: backward() was not seen"
            self._end(None if self._criterion_is_checked else unseen)
            self.concluded |= report
        _put_back(_taken_off())
        expected, arrived = self._expected, self._arrived
        self._expected, self._arrived = {}, {}
        if not report:
            return
        check_arrived(expected, arrived)
        self.concluded |= self.batches >= MOST_BATCHES and not (self._undecided or self.waits)
        if self.concluded and self.waits:
            self.findings.append(UNSETTLED)
        if self.concluded:
            self.recorded = None
        for finding in self.findings:
            if finding not in self._said:
                say_unseen(finding)

    def _is_training_pass(self) -> bool:
        return self._gradients.in_training_mode and torch.is_grad_enabled()

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
        if self._replay is None or self._inside > 1 or not self._is_training_pass():
            return
        self._calls += 1
        with self._finding("Whether examples mix before the model"), _paused(self):
            rows = check_inputs(self._replay, (args, kwargs), views=self._views)
            if self.recorded is not None:
                check_nothing_is_kept(self._replay, rows, self.recorded)
            if (
                self.recorded is not None
                and (self.recorded.tells_from(self.size) or self.recorded.before.waits)
                and self._random.same_as(RandomStates.now())
            ):
                with self._quietly(False):
                    check_inputs_of_two_sizes(self._replay, rows, self.recorded, views=self._views)
            if self._calls == 1:
                self._inputs = [leaf.detach().clone() for leaf in rows]
                self._course = Course(self.size, numbers_of(self._replay, rows))
        # A graph before the model is the loop's own.
        self._arguments = map_tensors(lambda leaf: leaf.detach().clone(), Arguments(args, kwargs))
        if not self._probed:
            self._probed = True
            with self._finding("Whether examples mix in the model"), self._told():
                size = self.size * self._views
                check_model(
                    module,
                    self._arguments,
                    size=size,
                    loss_reduction=self._loss_reduction,
                    is_cut=self._is_cut,
                )

    def _leave_model(self, module: nn.Module, args: Any, outputs: Any) -> None:
        self._inside -= 1
        if self._replay is None or self._inside or not self._is_training_pass():
            return
        self._random = RandomStates.now()
        leaves = tensors(outputs)
        self._replay.add(*leaves)
        self._outputs |= {id(leaf): (leaf, leaf.detach().clone()) for leaf in leaves}
        for leaf in _last_ones(leaves):
            if leaf.grad_fn is not None:
                leaf.grad_fn.register_prehook(_Arrival(self._arrived, id(leaf), leaf.output_nr))

    def _check(self, replay: Replay, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        if not self._calls:
            self.findings.append(
                "Whether examples mix before the model could not be checked: the module itself was not called, as "
                "module(inputs)"
            )
        check, say = LossCheck(replay, loss, self._outputs), not self._criterion_is_checked
        self.concluded = True
        with self._finding("Whether examples mix in the loss", say=say), _paused(self):
            check_parameters(loss, replay, self._own)
            given = any(part is not None for part in (*args, kwargs.get("gradient")))
            if loss.numel() != 1 or (given and self._gradients.times == 1):
                raise CannotTellError("backward() was given a gradient")
            if self._views == 1:
                self._check_loss(check)
        self._end(None)

    def _check_loss(self, check: LossCheck) -> None:
        said = None if self._criterion_is_checked else self._loss_reduction
        if self.recorded is None:
            check.examples_do_not_mix(self._check_own_loss)
            self._expected = self._expected_of(check)
            with self._finding(
                "Whether the loss is a mean or a sum over the batch", say=not self._criterion_is_checked
            ):
                self._undecided = not check.is_reduced_by(said)
            with self._quietly():
                self.recorded = check.record(self._inputs, self._course)
                self.concluded = False  # until a batch of another size has come
            return
        self.concluded = False
        with self._quietly():
            check_nothing_is_kept(check.replay, [check.loss], self.recorded)
            self._expected = self._expected_of(check)
            tells = self.recorded.tells_from(self.size)
            if tells and self._undecided and self.recorded.own_reduction is None:
                check.settles_reduction(self._loss_reduction)
            if (tells or self.recorded.after.waits) and self._random.same_as(RandomStates.now()):
                check.agrees_with(self.recorded, said=self._loss_reduction)
            self.concluded = tells and not self.recorded.waits

    def _expected_of(self, check: LossCheck) -> dict[int, Tensor]:
        """Return the outputs' gradients as they are to arrive, where the engine itself passes a mean back as a sum."""
        times = self._gradients.times
        return {key: gradient * times for key, gradient in check.expected().items()}

    def _check_own_loss(self, place: int) -> str | None:
        """Probe a number that the model computes itself; how it is reduced over the batch."""
        if self._calls != 1 or self._arguments is None:
            raise CannotTellError("the model computes it, and is called more than once")
        with self._told():
            return check_own_loss(self._module, self._arguments, place, size=self.size)

    @contextmanager
    def _told(self) -> Iterator[None]:
        """Turn errors of a model that is tried on a few examples into what cannot be told."""
        inside = self._inside
        try:
            yield
        except (RuntimeError, ValueError, IndexError, TypeError) as error:
            if isinstance(error, PdpsgdError):
                raise
            raise CannotTellError(f"it cannot be tried on a few examples ({type(error).__name__})") from error
        finally:
            self._inside = inside  # a model that raises an error is not left by its hook

    @contextmanager
    def _finding(self, where: str, *, say: bool = True) -> Iterator[None]:
        """Turn what cannot be told into a finding; end the watch where something is refused."""
        try:
            yield
        except CannotTellError as reason:
            self.findings += [f"{where} could not be checked: {reason}"] if say else []
        except PdpsgdError:
            self._end(None)
            self.concluded, self.recorded = False, None  # the next batch is watched as if it were the first
            raise

    @contextmanager
    def _quietly(self, conclude: bool = True) -> Iterator[None]:
        """Leave out a comparison that cannot be made: what cannot be told was said at the first batch."""
        try:
            yield
        except SizeOrScheduleError as reason:
            self.findings.append(f"{reason}")
            self.concluded = True
        except CannotTellError:
            self.concluded |= conclude

    def _end(self, finding: str | None) -> None:
        self.done = True
        self.findings += [] if finding is None else [finding]
        for hook in self._hooks:
            hook.remove()
        self._replay = self._arguments = None
        self._inputs = []
        self._outputs = {}


def say_unseen(finding: str) -> None:
    """Warn of what could not be checked."""
    warn(
        f"{finding}. What is not as it should be there ends the guarantee. Give make_private the loss as criterion=, "
        "or try engine.check(); and do to examples one by one, in torch, what is done before the model."
    )


def _last_ones(outputs: list[Tensor]) -> list[Tensor]:
    """Return the outputs from which no other output is computed: those get gradients from the loop alone."""
    before: set[Any] = {None}
    waiting: list[Any] = [leaf.grad_fn for leaf in outputs if leaf.grad_fn is not None]
    waiting = [node for start in waiting for node, _ in start.next_functions]
    while waiting and len(outputs) > 1:
        node = waiting.pop()
        if node not in before:
            before.add(node)
            waiting += [following for following, _ in node.next_functions]
    return [leaf for leaf in outputs if leaf.grad_fn not in before]


class _Arrival:
    """Hook that keeps the gradient which reaches an output of the model, after all hooks of the loop."""

    def __init__(self, arrived: dict[int, Tensor], key: int, place: int) -> None:
        self._arrived, self._key, self._place = arrived, key, place

    def __call__(self, gradients: tuple[Tensor | None, ...]) -> None:
        gradient = gradients[self._place]
        if gradient is not None and self._key not in self._arrived:
            self._arrived[self._key] = gradient.detach().clone()


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
