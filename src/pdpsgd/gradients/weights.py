"""The weights that clip: what each gradient is multiplied by, with room for rounding."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pdpsgd.errors import fail
from pdpsgd.gradients.native import dispatch as native

# Room for rounding in norms and weights: a part of one's own clipping norm C_i.
NORM_MARGIN = 2**-11
# Room for rounding in sums, where others are: a part of the largest clipping norm (see `sums`).
SUM_MARGIN = 2**-10
# Below this, squares of float32 numbers lose digits or vanish: such a norm counts as this large.
SMALLEST_NORM = 1e-16
# A gradient so much too large is dropped: times such a weight, numbers vanish that others would have blown up again.
SMALLEST_WEIGHT = 1e-16
# So much more than the largest clipping norm may be one that was rounded to single precision.
ROUNDED = 1 + 2**-20


@dataclass(frozen=True)
class Weighed:
    """Norms of gradients (sensitive), and what they are clipped by.

    Attributes:
        norms: Before clipping, in float64.
        weights: At most 1: clipping norm over norm.
        scaled: The same times what turns a recorded gradient into the example's own, in float64.
        narrow: The same in float32.
        non_finite: How many norms are not finite; their weights are 0.
    """

    norms: Tensor
    weights: Tensor
    scaled: Tensor
    narrow: Tensor
    non_finite: int


def weigh(
    squares: Tensor,
    clip_norms: Tensor,
    largest_clip_norm: float,
    scale: float,
    starts: Tensor | None = None,
) -> Weighed:
    """Return norms and weights (`clip_weights`) for squared norms of gradients that are off by a factor.

    Args:
        squares: Squared norms of recorded gradients, in float64.
        clip_norms: C_i, the clipping norm of each example.
        largest_clip_norm: The largest clipping norm that anybody has, C.
        scale: The factor.
        starts: For people with rows starts[i] to starts[i + 1] (on the processor), whose gradient is the mean over
            them: their factor is the scale, over how many rows they have.
    """
    if native.has_clipping(squares, clip_norms):
        return Weighed(*native.weigh(squares, clip_norms, figures_of(scale, largest_clip_norm), starts))
    factor: float | Tensor = scale
    if starts is not None:
        factor = scale / (starts[1:] - starts[:-1]).to(squares)
    norms = squares.sqrt() * factor
    weights = clip_weights(norms, clip_norms, largest_clip_norm)
    scaled = weights * factor
    return Weighed(norms, weights, scaled, scaled.float(), int((~norms.isfinite()).sum()))


def figures_of(scale: float, largest_clip_norm: float) -> tuple[float, ...]:
    """Return what compiled code makes weights with."""
    return scale, 1 - NORM_MARGIN, SUM_MARGIN * largest_clip_norm, SMALLEST_NORM, SMALLEST_WEIGHT


def clip_weights(norms: Tensor, clip_norms: Tensor, largest_clip_norm: float) -> Tensor:
    """Return min(1, limit_i / norm_i) with the limits of `clip_limits`, and 0 where the norm is not finite.

    Guarantee: weight times norm is at most the limit, also where it is rounded to float32, and for norms whose squares
    vanish there.
    """
    limits = clip_limits(clip_norms.to(norms), largest_clip_norm)
    weights = limits.div_(norms.clamp(min=SMALLEST_NORM)).clamp_(max=1)
    # A norm of inf gives 0 (or inf / inf), one of NaN gives NaN.
    return torch.hardshrink(weights.nan_to_num_(nan=0.0), SMALLEST_WEIGHT)


def clip_limits(clip_norms: Tensor, largest_clip_norm: float) -> Tensor:
    """Return what gradients are clipped to, so that with rounding nobody moves the sum by more than C_i.

    That is C_i (1 - 2^-11) - 2^-10 C, at least 0, with C the largest clipping norm anybody has: norms and weights are
    off by a part of C_i, sums by a part of C.
    """
    return (clip_norms * (1 - NORM_MARGIN) - SUM_MARGIN * largest_clip_norm).clamp_(min=0)


def charged_norms(norms: Tensor, weights: Tensor, largest_clip_norm: float) -> Tensor:
    """Return the most by which each part moves the sum: `clip_limits` read backwards, and 0 where the weight is 0.

    Guarantee: adding or removing an example of this norm and weight, in a row that is kept, moves the sum by at most
    this, rounding included. For weights of `clip_weights` it is at most C_i, but for rounding in float64.
    """
    given = (weights * norms.clamp(min=SMALLEST_NORM)).nan_to_num_(nan=0.0, posinf=0.0)
    return torch.where(weights > 0, (given + SUM_MARGIN * largest_clip_norm) / (1 - NORM_MARGIN), 0.0)


def checked_largest(clip_norms: Tensor, largest_clip_norm: float | None) -> float:
    """Return the largest clipping norm, which must not depend on who is in the batch."""
    largest = float(clip_norms.max())
    if largest_clip_norm is None:
        smallest = float(clip_norms.min())
        if smallest < largest:
            fail(
                "Expected largest_clip_norm, the largest that anybody has, where clipping norms differ. Got None, and "
                f"clipping norms from {smallest!r} to {largest!r}."
            )
        return largest
    if largest > largest_clip_norm * ROUNDED:
        fail(f"Expected clip_norms <= largest_clip_norm = {largest_clip_norm!r}. Got {largest!r}.")
    return largest_clip_norm
