"""What no attack can be made with is refused with the value, and its neighbor is taken."""

from __future__ import annotations

import numpy as np
import pytest

from pdpsgd import Budgets, PdpsgdError, plan
from pdpsgd.audit.auditing import audit
from pdpsgd.audit.bounds import bonferroni, clopper_pearson_upper
from pdpsgd.audit.canaries import add_canaries
from pdpsgd.audit.many_runs import many_run_bounds
from pdpsgd.audit.targets import target_of


def test_a_plan_with_a_filter_has_no_attack() -> None:
    filtered = plan(Budgets([1.0] * 60), mechanism="pdp-gd-filter", steps=5)
    with pytest.raises(PdpsgdError, match=r"Got one with a filter.*there is no attack here yet"):
        audit(filtered)


@pytest.mark.parametrize(
    ("significance", "comparisons", "message"),
    [
        (0.0, 3, "significance=0.0"),
        (1.0, 3, "significance=1.0"),
        (float("nan"), 3, "significance=nan"),
        (0.05, 0, "comparisons=0"),
    ],
)
def test_shares_of_a_significance(significance: float, comparisons: int, message: str) -> None:
    with pytest.raises(PdpsgdError, match=message):
        bonferroni(significance, comparisons)
    assert bonferroni(0.05, 1) == 0.05


@pytest.mark.parametrize(("successes", "trials"), [(-1, 5), (6, 5)])
def test_successes_are_some_of_the_trials(successes: int, trials: int) -> None:
    with pytest.raises(PdpsgdError, match=f"successes={successes}, trials=5"):
        clopper_pearson_upper(successes, trials, 0.05)
    assert 0 < clopper_pearson_upper(0, trials, 0.05) < clopper_pearson_upper(5, trials, 0.05) == 1


def test_canaries_and_their_coins_and_scores() -> None:
    made = plan(Budgets([1.0] * 60 + [4.0] * 60), steps=5, batch_size=10)
    with pytest.raises(PdpsgdError, match=r"at least one canary a tier\. Got per_tier=0"):
        add_canaries(made, 0, np.random.default_rng(0))
    assert add_canaries(made, 1, np.random.default_rng(0)).plan.people == made.people + 2
    coins = np.arange(20).reshape(10, 2) % 3 == 0
    for scores in (np.zeros((10, 1)), np.zeros((9, 2)), np.zeros(20)):
        with pytest.raises(PdpsgdError, match=r"shape \(runs, 2\). Got"):
            many_run_bounds(made, coins, scores, thresholds=np.zeros(2))
    assert len(many_run_bounds(made, coins, np.zeros((10, 2)), thresholds=np.zeros(2))) == 2


def test_a_benchmark_takes_its_levels_from_the_plan_where_a_run_has_no_promises(tmp_path) -> None:
    made = plan(Budgets([1.0] * 400 + [4.0] * 1037), steps=5, batch_size=10)
    (tmp_path / "public").mkdir()
    target = target_of(made, "digits", run_folder=tmp_path)
    assert np.bincount(target.level_of_person).tolist() == [400, 1037]
