from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from pdpsgd.data import benchmarks as datasets
from pdpsgd.errors import PdpsgdError
from pdpsgd.models.scattering import PATHS, ScatteringFeatures, averages, scattering_features, wavelets
from pdpsgd.training.presets import preset


def test_an_image_becomes_81_features_for_each_channel_and_patch() -> None:
    assert PATHS == 81
    assert ScatteringFeatures(28, 28)(torch.rand(2, 1, 28, 28)).shape == (2, 81, 7, 7)
    assert ScatteringFeatures(32, 32)(torch.rand(2, 3, 32, 32)).shape == (2, 243, 8, 8)


def test_images_in_colour_are_made_grey_first() -> None:
    colour = torch.randint(256, (2, 3, 32, 32), dtype=torch.uint8)
    red, green, blue = colour.float().unbind(1)
    brightness = (0.299 * red + 0.587 * green + 0.114 * blue)[:, None]
    torch.testing.assert_close(scattering_features(colour), scattering_features(brightness))


def test_there_is_nothing_to_train() -> None:
    transform = ScatteringFeatures(28, 28)
    assert list(transform.parameters()) == []
    assert transform.state_dict() == {}


def test_an_images_features_do_not_depend_on_other_images() -> None:
    transform = ScatteringFeatures(28, 28)
    images = torch.rand(5, 1, 28, 28)
    torch.testing.assert_close(transform(images)[3:4], transform(images[3:4]), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_an_image_s_features_have_the_same_bits_whoever_else_is_there(threads: int) -> None:
    """Threads that share a batch round by how many images it has: whether one is there would move all others."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for count in (2, 65, 129):
            images = torch.rand(count, 1, 28, 28, generator=torch.Generator().manual_seed(count))
            assert torch.equal(scattering_features(images[1:]), scattering_features(images)[1:])
            assert torch.equal(scattering_features(images[:-1]), scattering_features(images)[:-1])
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)


def test_wavelets_do_not_see_a_constant_and_averages_keep_it() -> None:
    features = ScatteringFeatures(28, 28, groups=None)(torch.full((1, 1, 28, 28), 3.0))
    torch.testing.assert_close(features[:, 0], torch.full((1, 7, 7), 3.0), rtol=1e-5, atol=1e-5)
    assert features[:, 1:].abs().max() < 1e-4


def test_averages_are_averages() -> None:
    torch.testing.assert_close(averages(36).sum(1), torch.ones(7))


def test_each_wavelet_answers_most_to_waves_in_its_own_direction() -> None:
    transform = ScatteringFeatures(32, 32, groups=None)
    rows, columns = torch.meshgrid(torch.arange(32.0), torch.arange(32.0), indexing="ij")
    for direction in range(8):
        angle = torch.tensor(torch.pi * direction / 8)
        wave = torch.cos(0.75 * torch.pi * (rows * angle.cos() + columns * angle.sin()))
        strengths = transform(wave[None, None])[0, 1:9, 2:6, 2:6].mean((1, 2))
        assert int(strengths.argmax()) == direction


def test_wavelets_of_the_coarser_scale_have_half_the_frequency() -> None:
    peak = [int(wavelets((64, 64), scale)[0, :32, 0].argmax()) for scale in (0, 1)]
    assert peak == pytest.approx([24, 12], abs=1)  # 3/8 and 3/16 of a wave a pixel


def test_features_are_normalised_image_by_image() -> None:
    features = ScatteringFeatures(28, 28, groups=27)(torch.rand(3, 1, 28, 28) * 100)
    grouped = features.reshape(3, 27, -1)
    torch.testing.assert_close(grouped.mean(2), torch.zeros(3, 27), rtol=0, atol=1e-4)
    torch.testing.assert_close(grouped.std(2, correction=0), torch.ones(3, 27), rtol=1e-2, atol=1e-2)


def test_sizes_that_do_not_divide_into_patches_are_refused() -> None:
    with pytest.raises(PdpsgdError, match=r"multiples of 4. Got 30 x 28"):
        ScatteringFeatures(30, 28)


def test_a_data_set_keeps_everything_but_its_inputs() -> None:
    digits = datasets.load("digits")
    features = replace(preset("mnist-scattering"), dataset="digits").prepare(digits)
    assert features.input_shape == (81, 2, 2)
    assert torch.equal(features.train_targets, digits.train_targets)
    assert features.classes == digits.classes
