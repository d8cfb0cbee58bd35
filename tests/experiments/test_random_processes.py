"""First weights from generated images: which images, and what normalizing by them does."""

from __future__ import annotations

import torch

from experiments.random_processes import contrastive_loss, images, normalize_layers, view
from pdpsgd.models.networks import mnist_cnn


def test_images_are_from_0_to_1_differ_and_come_from_the_seed() -> None:
    made, again = (images(16, torch.Generator().manual_seed(0)) for _ in range(2))
    assert made.shape == (16, 1, 28, 28)
    assert 0 <= float(made.min()) <= float(made.max()) <= 1
    assert float(made.flatten(1).std(0).mean()) > 0.05
    torch.testing.assert_close(made, again)
    assert view(made, torch.Generator().manual_seed(0)).shape == made.shape


def test_every_layer_but_the_last_has_mean_0_and_deviation_1_on_the_images() -> None:
    torch.manual_seed(0)
    network, shown = mnist_cnn(), images(64, torch.Generator().manual_seed(0))
    last = network[-1].weight.clone()
    normalize_layers(network, shown)
    out = network[:-2](shown)  # before the last activation
    torch.testing.assert_close(out.mean(0), torch.zeros(32), atol=1e-4, rtol=0)
    torch.testing.assert_close(out.std(0), torch.ones(32), atol=1e-3, rtol=0)
    torch.testing.assert_close(network[-1].weight, last)


def test_the_loss_is_small_if_views_of_an_image_are_alike_and_others_are_not() -> None:
    apart = torch.eye(8)
    assert float(contrastive_loss(apart, apart)) < 0.1
    assert float(contrastive_loss(apart, apart.roll(1, 0))) > 2
