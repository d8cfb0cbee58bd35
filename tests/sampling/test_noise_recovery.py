"""Noise cannot be found from other noise: what an attacker sees of a step does not lead to the generator's state.

In version 0.1.0 it did. Weights of features that nobody has move by noise alone, so the parameters before and after a
step show that noise. Its angles gave 24 bits of each 32-bit half of the words of SFC64, whose state of 192 bits follows
from a few words; then all noise of the step could be made again, and subtracted from everybody's gradients.
"""

from __future__ import annotations

import inspect

import numpy as np
import torch

import pdpsgd
from pdpsgd.sampling.generators import AES, SFC64, generator_of
from pdpsgd.sampling.source import RandomSource
from pdpsgd.training.options import TrainingOptions

KEY = bytes(range(32))


def test_by_default_no_word_comes_from_a_generator_that_can_be_solved() -> None:
    for source in (
        RandomSource.from_operating_system(),
        RandomSource.from_seed(1),
        RandomSource.from_key(KEY),
    ):
        assert source.cryptographic
        for words in (
            source.draw_generator(step=0),
            source.round_generator(round=0),
            *source._noise_generators(0),
        ):
            assert not isinstance(words, np.random.BitGenerator)


def test_every_way_in_is_cryptographic_unless_told_otherwise() -> None:
    parameters = inspect.signature(pdpsgd.PrivacyEngine.make_private).parameters
    assert parameters["secure"].default is True
    assert TrainingOptions().secure is True  # of fit and of the command


def test_sfc64_goes_on_from_three_words_and_aes_does_not() -> None:
    # The state of SFC64 is three words and a counter; each step can be run backwards. Somebody who knows it has all
    # noise that follows. Of AES, words seen are of no use without the key: there is no state in them.
    def state_after(words: list[int], start: dict[str, np.ndarray]) -> np.ndarray:
        a, b, c, counter = (int(part) for part in start["state"])
        mask = 2**64 - 1
        for word in words:
            assert word == (a + b + counter) & mask  # nothing is hidden between state and word
            a, b, c = b ^ (b >> 11), (c + (c << 3)) & mask, (((c << 24) | (c >> 40)) + word) & mask
            counter = (counter + 1) & mask
        return np.array([a, b, c, counter], dtype=np.uint64)

    fast = generator_of(SFC64, KEY)
    before = fast.state["state"]  # type: ignore[attr-defined]
    words = fast.random_raw(3).tolist()
    after = fast.state["state"]["state"]  # type: ignore[attr-defined]
    assert np.array_equal(state_after(words, before), after)
    secret = generator_of(AES, KEY)
    assert not isinstance(secret, np.random.BitGenerator)


def test_the_noise_that_is_seen_leaves_most_bits_of_every_word_open() -> None:
    # Sums of features that nobody has are 0, so their release is noise alone. A pair's angle, which gave 24 bits away,
    # is seen on a grid of 2^-10 standard deviations: more than 2^48 words are left for each angle and for each radius.
    source = RandomSource.from_key(KEY)
    totals = torch.zeros(40_000, dtype=torch.int64)
    (noise,) = source.release([totals], clipping_norm=1.0, noise_multiplier=1.0, step=0)
    first, second = noise.double().numpy().reshape(-1, 2, 8).swapaxes(0, 1).reshape(2, -1)
    words = RandomSource.from_key(KEY)._noise_generators(0)[0].random_raw(40_000).reshape(-1, 2, 8)
    radius_words, angle_words = words.swapaxes(0, 1).reshape(2, -1)

    part = (angle_words & np.uint64(2**61 - 1)).astype(
        np.float64
    )  # of an eighth of a turn, in units of 2^-61
    smaller, larger = np.sort(np.abs([first, second]), axis=0)
    seen = np.arctan2(smaller, larger) / (np.pi / 4) * 2.0**61
    assert np.median(np.abs(seen - part)) > 2.0**48
    seen = np.exp(-(first**2 + second**2) / 2) * 2.0**64
    assert np.median(np.abs(seen - radius_words.astype(np.float64))) > 2.0**48
