"""No tensor of a run is made on torch's default device instead of the model's, as far as CPUs can tell.

With `meta` as the default device, whatever is made without saying where is on `meta`, where there are no numbers: so
the CPU plays the part of a GPU. Every call of torch is looked at, as some checks go on without what they cannot
compute. Tensors that are made from arrays, which are on the CPU wherever the model is, are not seen by this, nor are
those of which the code says that they belong on the CPU; the tests in test_gpu.py are for those, where there is a GPU.
"""

from __future__ import annotations

from contextlib import ExitStack

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from pdpsgd.engine.batches import tensors
from pdpsgd.engine.privacy_engine import PrivacyEngine

OPTIONS = {
    "ordinary": {},
    "criterion": {"criterion": functional.cross_entropy},
    "physical batches": {"max_physical_batch_size": 8},
    "views": {"views": 2, "criterion": functional.cross_entropy},
    "sum": {"loss_reduction": "sum"},
}


class Scaled(nn.Module):
    """A parameter of its own, which takes the general rule."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x):
        return x * self.weight


class Last(nn.Module):
    def forward(self, found):
        return found[0][:, -1]


def networks():
    return {
        "linear": nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)),
        "norms": nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.ReLU(), nn.Linear(6, 3)),
        "convolution": nn.Sequential(
            nn.Unflatten(1, (1, 2, 2)), nn.Conv2d(1, 4, 2), nn.Flatten(), nn.Tanh(), nn.Linear(4, 3)
        ),
        "general": nn.Sequential(Scaled(), nn.Linear(4, 3)),
        "recurrent": nn.Sequential(
            nn.Unflatten(1, (2, 2)), nn.LSTM(2, 4, batch_first=True), Last(), nn.Linear(4, 3)
        ),
        "dropout": nn.Sequential(nn.Linear(4, 6), nn.Dropout(), nn.Linear(6, 3)),
    }


class Elsewhere(TorchFunctionMode):
    """Remembers the calls that made a tensor on `meta`."""

    def __init__(self):
        super().__init__()
        self.made = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        if any(leaf.is_meta for leaf in tensors(found)):
            self.made.append(getattr(function, "__name__", str(function)))
        return found


def trained(private, network, *modes, watch_loop=False, **options):
    torch.manual_seed(0)
    module = networks()[network]
    generator = torch.Generator().manual_seed(1)
    data = torch.randn(40, 4, generator=generator), torch.randint(3, (40,), generator=generator)
    views, reduction = options.get("views", 1), options.get("loss_reduction", "mean")
    with ExitStack() as stack:
        for mode in modes:
            stack.enter_context(mode)
        run = private(module=module, data=data, engine=PrivacyEngine(watch_loop=watch_loop), **options)
        for inputs, targets in run.loader:
            run.optimizer.zero_grad()
            if len(targets):
                inputs, targets = inputs.repeat_interleave(views, 0), targets.repeat_interleave(views, 0)
                functional.cross_entropy(run.module(inputs), targets, reduction=reduction).backward()
            run.optimizer.step()
    return torch.cat([parameter.detach().reshape(-1) for parameter in run.module.parameters()])


@pytest.mark.parametrize("watch_loop", [False, True])
@pytest.mark.parametrize("network", sorted(networks()))
@pytest.mark.parametrize("how", sorted(OPTIONS))
def test_a_run_makes_no_tensor_on_the_default_device(private, network, how, watch_loop):
    elsewhere = Elsewhere()
    here = trained(private, network, watch_loop=watch_loop, **OPTIONS[how])
    there = trained(private, network, torch.device("meta"), elsewhere, watch_loop=watch_loop, **OPTIONS[how])
    assert elsewhere.made == []
    assert torch.equal(here, there)


def test_the_test_would_notice():
    elsewhere = Elsewhere()
    with torch.device("meta"), elsewhere:
        torch.ones(3)
        torch.ones(3, device="cpu")
    assert elsewhere.made == ["ones"]
