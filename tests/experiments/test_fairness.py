"""The study of fairness: budgets by class, what is publicly known of them, and a page made from its record alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from experiments.fairness import known_counts, page_of, run_fairness
from pdpsgd import Budgets, PdpsgdError, plan
from pdpsgd.training.class_counts import logit_adjustment


def test_the_page_shows_tiers_classes_and_every_remedy_that_was_run() -> None:
    shown = {"accuracy": 0.9, "by_tier": {"strict": 0.8, "others": 0.925}}
    shown["by_class"] = {str(c): 0.8 if c in (8, 9) else 0.925 for c in range(10)}
    runs = [
        {"dataset": "mnist", "list": [1.0, 3.0], "seed": seed, "evaluations": {"gamma 1, known": shown}}
        for seed in range(2)
    ]
    page = page_of(runs)
    assert "## MNIST: classes 8 and 9 at epsilon 1, all others at 3" in page
    assert "| gamma 1, logits adjusted by public knowledge | 90.00 ± 0.00 | 80.00 | 92.50 | 92.5 |" in page
    assert "gamma 0.5 |" not in page
    assert "Fashion-MNIST:" not in page


def test_what_is_known_lifts_the_logits_of_the_strict_classes_alone() -> None:
    labels = np.arange(1000) % 10
    budgets = Budgets(np.where(labels >= 8, 1.0, 3.0), 1e-5)
    adjusted = logit_adjustment(plan(budgets, steps=20, batch_size=100), known_counts("mnist"))
    assert (adjusted[8:] > 0).all()
    assert (adjusted[:8] < 0).all()


def test_a_data_set_that_is_not_in_the_study_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PdpsgdError, match="svhn"):
        run_fairness(tmp_path, datasets=["svhn"])
