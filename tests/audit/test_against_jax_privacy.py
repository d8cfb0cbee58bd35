"""Same scores in, same bound out, as in jax_privacy's auditor (skipped where that package is absent)."""

from __future__ import annotations

import numpy as np
import pytest

from pdpsgd.audit import bounds

auditing = pytest.importorskip("jax_privacy.auditing", exc_type=ImportError)

pytestmark = pytest.mark.filterwarnings("ignore")


def scores(*, canaries: int, separation: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(seed)
    coins = generator.random(canaries) < 0.5
    values = generator.normal(size=canaries) + separation * coins
    return values[coins], values[~coins]


@pytest.mark.parametrize("separation", [0.0, 0.5, 1.0, 3.0])
@pytest.mark.parametrize("canaries", [200, 1000, 5000])
@pytest.mark.parametrize("threshold", [0.0, 1.0, 2.5])
@pytest.mark.parametrize("delta", [1e-5, 1e-3])
def test_bounds_at_a_threshold_are_the_same(separation, canaries, threshold, delta):
    inside, outside = scores(canaries=canaries, separation=separation, seed=canaries)
    auditor = auditing.CanaryScoreAuditor(inside, outside)
    explicit = auditing.Explicit(threshold)
    hits, alarms = int((inside >= threshold).sum()), int((outside >= threshold).sum())
    guessed = {
        "canaries": canaries,
        "guesses": hits + alarms,
        "correct": hits,
        "delta": delta,
        "significance": 0.05,
    }
    runs = {
        "true_positives": hits,
        "positives": inside.size,
        "false_positives": alarms,
        "negatives": outside.size,
        "significance": 0.05,
    }
    assert bounds.one_run_epsilon(**guessed) == pytest.approx(
        auditor.epsilon_one_run(0.05, delta, threshold_strategy=explicit), abs=1e-5
    )
    assert bounds.many_runs_epsilon(**runs, delta=delta) == pytest.approx(
        auditor.epsilon_clopper_pearson(0.05, delta, one_sided=False, threshold_strategy=explicit), abs=1e-5
    )
    assert bounds.one_run_gaussian_epsilon(**guessed) == pytest.approx(
        auditor.epsilon_one_run_fdp(0.05, delta, threshold_strategy=explicit), abs=1e-4
    )


@pytest.mark.parametrize("separation", [1.0, 2.0])
def test_the_bound_through_gaussian_dp_over_all_thresholds_is_the_same(separation):
    inside, outside = scores(canaries=3000, separation=separation, seed=5)
    auditor = auditing.CanaryScoreAuditor(inside, outside)
    # Theirs looks at the Pareto frontier of thresholds and pays for as many looks as it has points.
    looks = len(auditor._fn_counts)
    mu = max(
        bounds.gaussian_mu(
            true_positives=int(inside.size - misses),
            positives=inside.size,
            false_positives=int(outside.size - passes),
            negatives=outside.size,
            significance=bounds.bonferroni(0.05, looks),
        )
        for misses, passes in zip(auditor._fn_counts, auditor._tn_counts, strict=True)
    )
    assert bounds.epsilon_of_gaussian(mu, 1e-5) == pytest.approx(
        auditor.epsilon_from_gdp(0.05, 1e-5), abs=1e-4
    )
