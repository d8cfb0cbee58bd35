"""Makes the network of each teacher, and refuses one that has a share in what an earlier one has learned."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from pdpsgd.engine._torch import version
from pdpsgd.errors import fail

TRIED = 3  # networks made before anything is begun: also of a function that gives an old one every other time


class NewNetworks:
    """A function that makes networks, none of which may share what training moves with an earlier one.

    Guarantee: no network shares memory of weights that are trained, or of statistics that layers keep, with one that
    was made or noted before; nor another tensor of its modules (frozen, or in a plain attribute) that was written to
    since it was first seen, as far as torch counts writes.
    """

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        self._make = make
        self._networks: list[weakref.ref[nn.Module]] = []
        # Weak, so that nothing is kept; while they are there, no new memory is taken for the old one.
        self._moved: set[StorageWeakRef] = set()
        self._tensors: list[weakref.ref[Tensor]] = []  # training may lay them elsewhere, as channels last
        self._others: dict[StorageWeakRef, tuple[weakref.ref[Tensor], int]] = {}

    def __call__(self) -> nn.Module:
        """Make a network, and refuse it if it is not a new one."""
        network = self._make()
        self.note(network)
        return network

    def note(self, network: nn.Module) -> None:
        """Refuse a network that is not a new one, and remember it."""
        earlier = (tensor() for tensor in self._tensors)
        self._moved |= {_memory_of(tensor) for tensor in earlier if tensor is not None}
        tensors = _moved_by_training(network)
        moved = set(map(_memory_of, tensors))
        if any(network is one() for one in self._networks) or moved & self._moved or self._was_written_to():
            _refuse()
        self._networks.append(weakref.ref(network))
        self._moved |= moved
        self._tensors += map(weakref.ref, tensors)
        for tensor in _others_of(network):
            self._others.setdefault(_memory_of(tensor), (weakref.ref(tensor), version(tensor)))

    def try_out(self) -> nn.Module:
        """Make some networks without moving torch's generator, and return one of them."""
        with torch.random.fork_rng(devices=[]):
            tried = [self() for _ in range(TRIED)]
        return tried[0]

    def _was_written_to(self) -> bool:
        """Tell whether a tensor that an earlier network had, and that somebody still holds, was written to."""
        alive = ((tensor(), writes) for tensor, writes in self._others.values())
        return any(tensor is not None and version(tensor) != writes for tensor, writes in alive)


def _memory_of(tensor: Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


def _moved_by_training(network: nn.Module) -> list[Tensor]:
    """Return the weights that are trained, and the statistics that layers keep."""
    trained = [parameter for parameter in network.parameters() if parameter.requires_grad]
    kept = [buffer for buffer in network.buffers() if buffer.is_floating_point()]
    return [tensor for tensor in (*trained, *kept) if tensor.numel()]


def _others_of(network: nn.Module) -> Iterator[Tensor]:
    """Yield frozen weights, whole numbers in buffers, and tensors in plain attributes."""
    yield from (parameter for parameter in network.parameters() if not parameter.requires_grad)
    yield from (buffer for buffer in network.buffers() if not buffer.is_floating_point())
    for module in network.modules():
        yield from (value for value in vars(module).values() if isinstance(value, Tensor))


def _refuse() -> None:
    fail(
        "Expected a function that makes a new network each time, so that no teacher, nor the student, has what "
        "another has learned. Got the same network, or shared weights, twice: build it inside, as in "
        "network=lambda: Network(), not network=lambda: network."
    )
