"""The adapter to dp-accounting fits the release that is installed."""

from __future__ import annotations

from importlib.metadata import version

import numpy as np
import pytest
from dp_accounting.pld import pld_pmf

from pdpsgd import PdpsgdError
from pdpsgd.accounting._dp_accounting import WRITTEN_FOR, Losses, compose

COIN = Losses(0.5, -1, np.array([0.25, 0.0, 0.65]), 0.1)


def test_the_private_fields_are_those_of_the_release_that_is_installed() -> None:
    """If this fails, dp-accounting has changed: adapt accounting/_dp_accounting.py and the bound in pyproject.toml."""
    installed = version("dp-accounting")
    made = pld_pmf.DensePLDPmf(COIN.interval, COIN.first, COIN.mass, COIN.infinite, True)
    missing = {"_discretization", "_lower_loss", "_probs", "_infinity_mass"} - vars(made).keys()
    assert not missing, f"dp-accounting {installed} has no {missing}; the adapter is for {WRITTEN_FOR}"


def test_two_tosses_are_composed_as_by_hand() -> None:
    both = compose(COIN, COIN)
    assert (both.interval, both.first) == (0.5, -2)
    assert both.infinite == pytest.approx(0.19)
    assert both.mass == pytest.approx([0.0625, 0, 2 * 0.25 * 0.65, 0, 0.4225], abs=1e-15)


def test_a_release_with_other_fields_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class Renamed:
        pass

    monkeypatch.setattr(pld_pmf, "compose_pmfs", lambda *_: Renamed())
    with pytest.raises(
        PdpsgdError, match=rf"Expected dp-accounting {WRITTEN_FOR}\. Got {version('dp-accounting')}"
    ):
        compose(COIN, COIN)
