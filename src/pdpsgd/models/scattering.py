"""Features that need no training: the wavelet scattering transform of an image.

An image is filtered by wavelets of two scales and eight directions, the absolute values are taken, filtered
again, and averaged (Bruna and Mallat, "Invariant scattering convolution networks", arXiv:1203.1513).
Nothing is learned, so the features cost no privacy, and a linear model on them needs few, well-conditioned
parameters: the best known way to train privately on few, simple images (Tramer and Boneh, "Differentially
private learning needs better features", arXiv:2011.11660). The filters are Morlet wavelets with the usual
constants.
"""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor, nn

from pdpsgd.errors import fail

SCALES = 2
DIRECTIONS = 8
STRIDE = 2**SCALES  # features are averages over patches of this width
PATHS = 1 + SCALES * DIRECTIONS + DIRECTIONS * DIRECTIONS  # 81 features a channel and place
GROUPS = 27
LUMA = (0.299, 0.587, 0.114)


class ScatteringFeatures(nn.Module):
    """From images (people, channels, height, width) to (people, 81 * channels, height / 4, width / 4).

    Each image's features are then normalized in groups of neighboring ones (over that image alone), so that
    all of them have a like scale. There is nothing to train.

    Guarantee: each image's features are a fixed function of that image, so training on features gives every
    person the same promise as training on images.
    """

    fine: Tensor
    coarse: Tensor
    rows: Tensor
    columns: Tensor

    def __init__(self, height: int, width: int, *, groups: int | None = GROUPS) -> None:
        super().__init__()
        if height % STRIDE or width % STRIDE:
            fail(f"Expected images whose height and width are multiples of {STRIDE}. Got {height} x {width}.")
        self.groups = groups
        size = (height + 2 * STRIDE, width + 2 * STRIDE)  # room for the filters at the edges
        self.register_buffer("fine", wavelets(size, scale=0), persistent=False)
        self.register_buffer("coarse", wavelets(size, scale=1), persistent=False)
        self.register_buffer("rows", averages(size[0]), persistent=False)
        self.register_buffer("columns", averages(size[1]), persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        """Return the features of a batch of images."""
        padded = nn.functional.pad(images, (STRIDE,) * 4, mode="reflect")[:, :, None]
        spectrum = torch.fft.fft2(padded)
        first_fine = torch.fft.ifft2(spectrum * self.fine).abs()
        first_coarse = _at_half_size(spectrum * self.coarse)
        second = _at_half_size(torch.fft.fft2(first_fine)[:, :, :, None] * self.coarse).flatten(2, 3)
        paths = [self._averaged(path) for path in (padded, first_fine, first_coarse, second)]
        features = torch.cat(paths, dim=2).flatten(1, 2)
        return features if self.groups is None else nn.functional.group_norm(features, self.groups)

    def _averaged(self, values: Tensor) -> Tensor:
        """Averages around each patch of the image; at half the size every value stands for two by two."""
        rows, columns = self.rows, self.columns
        if values.shape[-1] != columns.shape[1]:
            rows, columns = 2 * rows[:, ::2], 2 * columns[:, ::2]
        return rows @ values @ columns.T


def scattering_features(
    images: Tensor, *, groups: int = GROUPS, batch: int = 64, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Return the features of many images, a few at a time: about 1.5 ms for an image.

    Images in color are made gray first: three times the features say little more, and a private model has to
    pay for every parameter.

    Guarantee: an image's features depend on that image alone, to the bit: each few go through one thread, as several
    that share them round by how many there are.
    """
    transform = ScatteringFeatures(*images.shape[2:], groups=groups)

    def features_of(part: Tensor) -> Tensor:
        with torch.no_grad():  # which each thread has for itself
            return transform(gray(part)).to(dtype)

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            return torch.cat(list(pool.map(features_of, torch.split(images, batch))))
    finally:
        torch.set_num_threads(threads)


def gray(images: Tensor) -> Tensor:
    """Red, green and blue weighted by how bright they look; gray images stay as they are."""
    if images.shape[1] != len(LUMA):
        return images
    return (images * torch.tensor(LUMA, device=images.device).view(1, -1, 1, 1)).sum(1, keepdim=True)


def wavelets(size: tuple[int, int], scale: int) -> Tensor:
    """Return the spectra of Morlet wavelets in eight directions: waves under a Gaussian, with mean zero."""
    angles = [math.pi * index / DIRECTIONS for index in range(DIRECTIONS)]
    spread, slant = 0.8 * 2**scale, 4 / DIRECTIONS
    frequency = 0.75 * math.pi / 2**scale
    spectra = []
    for angle in angles:
        wave = gabor(size, spread, angle=angle, frequency=frequency, slant=slant)
        bump = gabor(size, spread, angle=angle, frequency=0.0, slant=slant)
        spectra.append(torch.fft.fft2(wave - bump * (wave.sum() / bump.sum())).real)
    return torch.stack(spectra).to(torch.float32)


def averages(size: int) -> Tensor:
    """Return the matrix that averages along one side with a Gaussian, one row for each patch without the margins."""
    spread = 0.8 * 2 ** (SCALES - 1)
    centres = torch.arange(STRIDE, size - STRIDE, STRIDE, dtype=torch.float64)
    distance = torch.arange(size, dtype=torch.float64) - centres[:, None]
    weights = torch.exp(-(distance**2) / (2 * spread**2))
    return torch.div(weights, weights.sum(1, keepdim=True)).to(torch.float32)


def gabor(
    size: tuple[int, int], spread: float, *, angle: float = 0.0, frequency: float = 0.0, slant: float = 1.0
) -> Tensor:
    """Return a wave under a Gaussian, 1 / slant times longer across than along it, on a torus of that size."""
    # Several turns around the torus are summed: a wide filter overlaps itself.
    rows, columns = (torch.arange(-2 * n, 3 * n, dtype=torch.float64) for n in size)
    along = rows[:, None] * math.cos(angle) + columns * math.sin(angle)
    across = columns * math.cos(angle) - rows[:, None] * math.sin(angle)
    envelope = torch.exp(-(along**2 + (slant * across) ** 2) / (2 * spread**2))
    values = torch.polar(envelope * slant / (2 * math.pi * spread**2), frequency * along)
    return values.reshape(5, size[0], 5, size[1]).sum((0, 2))


def _at_half_size(spectrum: Tensor) -> Tensor:
    """Return the absolute value of every other pixel in both directions, from the spectrum: what aliases adds up."""
    height, width = (n // 2 for n in spectrum.shape[-2:])
    folded = spectrum[..., :height, :] + spectrum[..., height:, :]
    return torch.abs(torch.fft.ifft2((folded[..., :width] + folded[..., width:]) / 4))
