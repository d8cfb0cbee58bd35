"""The fairness knob: one public number between everybody at the same influence (0) and all that they allow (1).

To first order a person's influence on the model is their budget: rate times clipping norm over noise. So full
correction of what personalization does to strict people is uniform DP-SGD, and anything between is a trade.
"""

from __future__ import annotations

import numpy as np

from pdpsgd.accounting.gaussian import gaussian_epsilon, gaussian_mu
from pdpsgd.errors import check_positive, fail
from pdpsgd.planning.levels import Levels


def evened_out(levels: Levels, gamma: float, gamma_from: float | None = None) -> Levels:
    """Lower what is planned for generous levels: mu_c^(1-gamma) mu_l^gamma where mu_l is above mu_c.

    mu_l is the Gaussian mechanism's at (epsilon_l, delta_l), mu_c the smallest of them, or that of `gamma_from` at the
    smallest delta. Gamma 0 plans everybody above mu_c at mu_c: uniform, or a threshold. Gamma 1 changes nothing.

    Guarantee: no level's epsilon grows, and only public things are looked at; so every promise that a plan keeps to
    these levels it keeps to the given ones.

    Args:
        levels: the levels.
        gamma: from 0 to 1.
        gamma_from: the epsilon above which budgets are drawn together; by default the smallest.

    Returns:
        The same people with what is to be planned for them.

    Raises:
        PdpsgdError: gamma is not from 0 to 1, or gamma_from is given without it.

    >>> three = Levels(np.array([1.0, 2.0, 3.0]), np.full(3, 1e-5), np.ones(3), ((),) * 3)
    >>> evened_out(three, 0.5).epsilon.round(3).tolist()
    [1.0, 1.412, 1.724]
    """
    if not 0 <= gamma <= 1:
        fail(
            f"Expected gamma from 0 (the same influence for all) to 1 (all that people allow). Got {gamma!r}."
        )
    if gamma_from is not None:
        check_positive(gamma_from=gamma_from)
        if gamma == 1:
            fail(
                f"Expected gamma below 1 with gamma_from={gamma_from:g}: at 1 nothing is drawn together. Got 1."
            )
    finite = levels.usable() & np.isfinite(levels.epsilon)
    if gamma == 1 or not finite.any():
        return levels
    mu, delta = gaussian_mu(levels.epsilon[finite], levels.delta[finite]), levels.delta[finite]
    center = float(mu.min() if gamma_from is None else gaussian_mu(gamma_from, delta.min()))
    planned = np.where(mu > center, center ** (1 - gamma) * mu**gamma, mu)
    epsilon = levels.epsilon.copy()
    epsilon[finite] = np.minimum(epsilon[finite], gaussian_epsilon(planned, delta))
    return levels.up_to(epsilon)
