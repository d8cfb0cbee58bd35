"""Leaving the strict people out: who is left, and that it is DP-SGD for them."""

from __future__ import annotations

import numpy as np
import pytest

from pdpsgd import Budgets, PdpsgdError, plan
from pdpsgd.planning.levels import make_levels
from pdpsgd.planning.mechanisms.excluding import strongest_threshold

FEW_STRICT = Budgets([0.1] * 10 + [2.0] * 700 + [3.0] * 290)


def test_few_strict_people_are_left_out_and_the_others_have_what_dp_sgd_gives_them() -> None:
    made = plan(FEW_STRICT, "dp-sgd-exclude", steps=50, batch_size=99)
    alone = plan(Budgets([2.0] * 700 + [3.0] * 290), "dp-sgd", steps=50, batch_size=99)
    rates = dict(zip((level.epsilon for level in made.levels), made.rounds[0].sample_rates, strict=True))
    assert rates == {0.1: 0.0, 2.0: pytest.approx(0.1), 3.0: pytest.approx(0.1)}
    assert made.rounds[0].noise_multiplier == alone.rounds[0].noise_multiplier
    assert made.rounds[0].threshold == 2.0
    made.verify()


def test_the_threshold_may_be_given() -> None:
    made = plan(FEW_STRICT, "dp-sgd-exclude", steps=50, batch_size=99, exclude_below=2.5)
    assert made.rounds[0].sample_rates == (0.0, 0.0, pytest.approx(99 / 290))


def test_the_threshold_with_the_most_signal_keeps_many_strict_people() -> None:
    levels, _ = make_levels(Budgets([1.0] * 900 + [1.5] * 100), 10)
    assert strongest_threshold(levels) == 1.0
    levels, _ = make_levels(Budgets([0.1] * 500 + [np.inf] * 500, allow_infinite=True), 10)
    assert strongest_threshold(levels) == 0.1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mechanism": "dp-sgd", "exclude_below": 1.0}, "Expected mechanism='dp-sgd-exclude'"),
        ({"mechanism": "dp-sgd-exclude", "exclude_below": 5.0}, "up to the largest epsilon left, 3"),
        ({"mechanism": "dp-sgd-exclude", "exclude_below": -1.0}, "exclude_below"),
    ],
)
def test_a_threshold_that_makes_no_sense_is_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(PdpsgdError, match=message):
        plan(FEW_STRICT, steps=50, batch_size=99, **options)  # type: ignore[arg-type]
