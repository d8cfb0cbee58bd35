"""Loops from the shelf: models in evaluation mode, frozen batch norm, parametrizations, two optimizers."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations

import pdpsgd
from pdpsgd.errors import PdpsgdError


def run_steps(run) -> None:
    for inputs, targets in run.loader:
        run.optimizer.zero_grad()
        functional.cross_entropy(run.module(inputs), targets).backward()
        run.optimizer.step()


def test_a_model_that_is_made_private_in_evaluation_mode_is_trained_as_it_is(private):
    module = nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.9), nn.Linear(8, 3)).eval()
    before = [parameter.clone() for parameter in module.parameters()]
    run_steps(private(module=module))
    assert not module.training
    assert all(not torch.equal(old, new) for old, new in zip(before, module.parameters(), strict=True))


@pytest.mark.parametrize("train", [False, True])
def test_a_frozen_batch_norm_stays_as_it_is(private, train):
    norm = nn.BatchNorm1d(8).requires_grad_(False).eval()
    module = nn.Sequential(nn.Linear(5, 8), norm, nn.Linear(8, 3))
    run = private(module=module)
    if train:
        module.train()  # as many loops do at every epoch
    run_steps(run)
    assert torch.equal(norm.running_mean, torch.zeros(8))
    assert int(norm.num_batches_tracked) == 0


def test_fit_leaves_a_frozen_batch_norm_alone():
    norm = nn.BatchNorm1d(4).requires_grad_(False).eval()
    module = nn.Sequential(nn.Linear(3, 4), norm, nn.Linear(4, 2))
    data = torch.randn(60, 3), torch.randint(2, (60,))
    pdpsgd.fit(module, data, [5.0] * 60, steps=3, batch_size=20, seed=0, progress=False)
    assert int(norm.num_batches_tracked) == 0


PARAMETRIZATIONS = [parametrizations.spectral_norm, parametrizations.weight_norm, parametrizations.orthogonal]


@pytest.mark.parametrize("wrap", PARAMETRIZATIONS)
def test_parametrizations_are_trained(private, wrap):
    module = nn.Sequential(wrap(nn.Linear(5, 8)), nn.Tanh(), nn.Linear(8, 3))
    before = module[0].parametrizations.weight.state_dict()
    before = {name: value.clone() for name, value in before.items()}
    run_steps(private(module=module))
    after = module[0].parametrizations.weight.state_dict()
    assert any(not torch.equal(before[name], value) for name, value in after.items())


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning")
@pytest.mark.parametrize(
    ("wrap", "names"),
    [(nn.utils.weight_norm, "0.weight_g, 0.weight_v"), (nn.utils.spectral_norm, "0.weight_orig")],
)
def test_weights_that_a_hook_computes_outside_the_forward_are_refused_by_name(private, wrap, names):
    module = nn.Sequential(wrap(nn.Linear(5, 8)), nn.Tanh(), nn.Linear(8, 3))
    before = [parameter.detach().clone() for parameter in module.parameters()]
    with pytest.raises(PdpsgdError, match=f"Parameters {names} were used outside their own module's forward"):
        run_steps(private(module=module))
    assert all(torch.equal(*pair) for pair in zip(before, module.parameters(), strict=True))


def test_of_two_networks_with_an_optimizer_each_one_may_be_private(private):
    """A GAN: the discriminator sees people's records, the generator sees the discriminator alone."""
    torch.manual_seed(0)
    discriminator = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1))
    generator = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 5))
    of_generator = torch.optim.Adam(generator.parameters(), lr=1e-2)
    run = private(module=discriminator)
    starts = [parameter.clone() for parameter in (*generator.parameters(), *discriminator.parameters())]
    for inputs, _ in run.loader:
        made = generator(torch.randn(len(inputs), 2)).detach()
        run.optimizer.zero_grad()
        # A real and a made-up record in one row each: the pair is the example.
        scores = run.module(torch.stack([inputs, made], 1))[..., 0]
        loss = functional.softplus(-scores[:, 0]) + functional.softplus(scores[:, 1])
        loss.mean().backward()
        run.optimizer.step()

        discriminator.eval().requires_grad_(False)
        of_generator.zero_grad()
        functional.softplus(-discriminator(generator(torch.randn(16, 2)))).mean().backward()
        of_generator.step()
        discriminator.train().requires_grad_(True)
    ends = (*generator.parameters(), *discriminator.parameters())
    assert all(not torch.equal(old, new) for old, new in zip(starts, ends, strict=True))
    assert run.engine.steps_left == 0
