"""Steps, batch size and clipping norm that nobody named: from what people allow and how many they are."""

from __future__ import annotations

import math

import numpy as np

from pdpsgd.planning.levels import Levels
from pdpsgd.planning.signal import mus

STEPS = 300
"""Steps, unless others are asked for: a choice, not a result; other numbers were not compared."""
NOISE_MULTIPLIER = 2.0
"""Wanted at least: above it, a plan makes 93 % and more of what people allow (1 / (s sqrt(exp(1/s^2) - 1)) at s)."""
SMALLEST_BATCH, LARGEST_BATCH = 256, 16_384
"""Smaller batches save no time; larger ones take long, and so many people have signal enough."""
SATURATION = 0.95
"""The largest sampling rate to plan for: people at rate 1 could give more than they are asked for."""
CLIPPING_NORM, LARGEST_NORM = 1.0, 8.0
"""The clipping norm where little is known, and the largest that was tried."""
NORM_GROWS_FROM = 10.0
"""The signal-to-noise ratio above which clipping less is better than less noise: its bias is then what hurts."""


def default_clipping_norm(levels: Levels, parameters: int) -> float:
    """Choose a clipping norm, to two digits: the square root of a tenth of the signal-to-noise ratio, from 1 to 8.

    Clipping makes large gradients count less, and those of a rare class are the largest: with many people, at a norm of
    1, a model ends by always answering the frequent one. A larger norm costs noise, which matters where there is little
    signal. Privacy is the same for every norm.

    Args:
        levels: What people allow, and how many they are.
        parameters: The number of parameters of the network.

    Returns:
        The clipping norm of per-example gradients.
    """
    ratio = float(mus(levels.epsilon, levels.delta) @ levels.people) / math.sqrt(parameters)
    norm = math.sqrt(ratio / NORM_GROWS_FROM)
    return float(f"{min(max(norm, CLIPPING_NORM), LARGEST_NORM):.2g}")


def default_batch_size(levels: Levels, steps: int) -> int:
    """Choose an expected batch size, to two digits.

    It is such that the noise multiplier is about `NOISE_MULTIPLIER` or above: smaller batches waste what people allow,
    larger ones time. It stays where nearly nobody would have to be in every step; on a short list that is nearly
    everybody, in proportion to what they allow.

    Args:
        levels: What people allow, and how many they are.
        steps: The number of steps.

    Returns:
        A batch size; plans are solved for any.
    """
    each = mus(levels.epsilon, levels.delta)
    order = np.argsort(each)
    each, people = each[order], levels.people[order]
    if not each.any():
        return SMALLEST_BATCH  # nobody allows anything: the plan will say so
    summed = np.cumsum(each * people)
    total = float(summed[-1])
    wanted = NOISE_MULTIPLIER * total / math.sqrt(steps)  # signal = sqrt(steps) * batch / noise multiplier
    # Rates are about in proportion to mu. Of the signal, 2 % may come from people who reach the largest rate.
    top = float(each[min(int(np.searchsorted(summed, 0.98 * total)), each.size - 1)])
    batch = min(max(wanted, SMALLEST_BATCH), LARGEST_BATCH, SATURATION * total / top)
    return max(1, round(float(f"{batch:.2g}")))
