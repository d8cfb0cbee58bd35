"""Several augmented views of a record count as one record: averaged first, then clipped."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from pdpsgd.errors import PdpsgdError
from pdpsgd.gradients.clipping import ClippedGradients
from pdpsgd.gradients.weights import clip_limits

MODELS = {
    "linear": lambda: (nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)), torch.randn(12, 6)),
    "convolution": lambda: (
        nn.Sequential(
            nn.Conv2d(2, 4, 3, stride=2), nn.ReLU(), nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(36, 3)
        ),
        torch.randn(12, 2, 8, 8),
    ),
    "grouped convolution": lambda: (
        nn.Sequential(nn.Conv2d(4, 8, 3, groups=2), nn.Flatten(), nn.Linear(72, 3)),
        torch.randn(12, 4, 5, 5),
    ),
    "embedding": lambda: (
        nn.Sequential(nn.Embedding(9, 4), nn.LayerNorm(4), nn.Flatten(), nn.Linear(12, 3)),
        torch.randint(0, 9, (12, 3)),
    ),
}


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("name", MODELS)
def test_gradients_of_views_are_averaged_before_clipping(name, reduction):
    torch.manual_seed(1)
    model, inputs = MODELS[name]()
    targets = torch.arange(12) % 3
    norms = torch.tensor([0.05, 0.5, 2.0, 0.3])
    expected = torch.zeros(sum(p.numel() for p in model.parameters()), dtype=torch.float64)
    model.double()
    exact = inputs.double() if inputs.is_floating_point() else inputs
    for person in range(4):
        rows = slice(3 * person, 3 * person + 3)
        loss = functional.cross_entropy(model(exact[rows]), targets[rows])
        gradient = torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss, list(model.parameters()))])
        expected += gradient * min(1.0, float(clip_limits(norms, 2.0)[person]) / float(gradient.norm()))
    model.float()
    watched = ClippedGradients(model)
    functional.cross_entropy(model(inputs), targets, reduction=reduction).backward()
    watched.clipped_sum(norms, largest_clip_norm=2.0, loss_reduction=reduction, views=3)
    found = torch.cat([watched.sums[p].reshape(-1) for p in model.parameters()])
    torch.testing.assert_close(found.double(), expected, rtol=2e-3, atol=2e-4)


def test_equal_views_train_like_one(private, flat):
    one, three = private(), private(views=3, criterion=functional.cross_entropy)
    one.train()
    for inputs, targets in three.loader:
        three.step(inputs.repeat_interleave(3, 0), targets.repeat_interleave(3, 0))
    torch.testing.assert_close(flat(three.module), flat(one.module), rtol=1e-4, atol=1e-6)


def test_a_wrong_number_of_views_is_refused(private):
    run = private(views=3, criterion=functional.cross_entropy)
    inputs, targets = next(iter(run.loader))
    with pytest.raises(PdpsgdError, match="batch as the loader gave it"):
        run.step(inputs.repeat_interleave(2, 0), targets.repeat_interleave(2, 0))


def test_views_need_to_know_the_loss(private):
    with pytest.raises(PdpsgdError, match="Expected criterion"):
        private(views=2)


def test_a_view_that_is_not_finite_silences_its_record_alone():
    model = nn.Linear(4, 2)
    inputs = torch.randn(6, 4)
    inputs[3] = torch.nan
    watched = ClippedGradients(model)
    functional.cross_entropy(model(inputs), torch.zeros(6, dtype=torch.int64)).backward()
    assert watched.clipped_sum(torch.ones(3), views=2) == 1
    assert all(total.isfinite().all() and total.abs().sum() > 0 for total in watched.sums.values())
