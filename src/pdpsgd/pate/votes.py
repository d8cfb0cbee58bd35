"""The noisy vote: Confident-GNMax, within the questions and answers of its plan."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pdpsgd._typing import IntArray
from pdpsgd.errors import fail
from pdpsgd.pate.plans import VotePlan
from pdpsgd.sampling.noise import quantize
from pdpsgd.sampling.source import RandomSource


@dataclass(frozen=True, eq=False)
class Answers:
    """What a vote releases: which questions were answered, and how. Public."""

    examples: IntArray
    """The public examples that were answered, by number, in the order in which they were asked."""
    labels: IntArray
    asked: int
    not_for_release: str | None = None


def answer_queries(
    counts: Tensor, planned: VotePlan, order: IntArray | None = None, *, source: RandomSource | None = None
) -> Answers:
    """Ask about public examples until the plan's questions or answers are used up.

    Guarantee: the promise of `planned`, if the noise is from a fresh key (the default). A question adds noise to the
    largest count and goes on if that reaches the threshold; then noise is added to every count, and the largest is
    the label. Both are done on a public grid, as in training. Sums of weights are rounded by less than 2^-40, which the
    plan's margin covers.

    Args:
        counts: the teachers' votes, (examples, classes).
        planned: the plan of the vote.
        order: which examples to ask about, in this order, from public things only; all in their own order by default.
        source: of the noise; a seeded one is not for release.

    Returns:
        The answers.

    Raises:
        PdpsgdError: an example is asked about that is not there.
    """
    source = (RandomSource.from_operating_system() if source is None else source).take()
    asked = np.arange(len(counts)) if order is None else np.asarray(order)
    if asked.size and not (asked.min() >= 0 and asked.max() < len(counts)):
        fail(
            f"Expected questions about the {len(counts):,} public examples. Got {asked.min()} to {asked.max()}."
        )
    settings = planned.settings
    examples: list[int] = []
    labels: list[int] = []
    step = questions = 0
    for example in asked[: planned.questions].tolist():
        if len(labels) == planned.answers:
            break
        questions += 1
        largest = _noised(source, counts[example].max().reshape(1), settings.check_noise, step)
        step += 1
        if float(largest) < settings.threshold:
            continue
        labels.append(int(_noised(source, counts[example], settings.answer_noise, step).argmax()))
        examples.append(example)
        step += 1
    source.erase()
    seeded = "The noise was made from a seed: whoever knows it can take it off." if source.seeded else None
    return Answers(np.array(examples, dtype=np.int64), np.array(labels, dtype=np.int64), questions, seeded)


def _noised(source: RandomSource, values: Tensor, deviation: float, step: int) -> Tensor:
    whole = quantize([values.to(torch.float64)], clipping_norm=1.0)
    out = [torch.empty(values.shape, dtype=torch.float64)]
    return source.release(whole, clipping_norm=1.0, noise_multiplier=deviation, step=step, out=out)[0]
