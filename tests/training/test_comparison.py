"""A comparison says what all its runs together cost."""

from __future__ import annotations

import pytest

import pdpsgd
from pdpsgd.accounting import Exposure, accountant
from pdpsgd.reporting import comparison_page
from pdpsgd.training.comparison import cost_together


@pytest.fixture
def compared(problem):
    def compare(mechanisms, seeds):
        return pdpsgd.compare(
            mechanisms,
            make_model=lambda seed: problem.model(),
            data=problem.data,
            budgets=problem.budgets,
            test_data=problem.test,
            record_ids=problem.budgets.ids,
            seeds=seeds,
            plan_options={"steps": 5, "batch_size": 20},
        )

    return compare


def test_through_python_too_all_runs_together_are_counted(compared):
    made = compared(["dp-sgd", "pdp-sgd-exact"], (0, 1))
    assert made.runs == 4
    for tier in made.together:
        alone = [t.proven for outcome in made.outcomes for t in outcome.tiers if t.name == tier.name]
        assert max(alone) < tier.epsilon <= 2 * sum(alone)
    assert not made.within_budgets
    assert "All 4 runs on these people together cost epsilon" in " ".join(made.notes)
    page = comparison_page(made)
    assert "Each of the 4 runs keeps its promise by itself; all together, they do not." in page
    assert made.to_dict()["together"][0]["epsilon"] == made.together[0].epsilon


def test_one_run_costs_what_its_plan_proves_and_nothing_more_is_said(compared):
    made = compared(["pdp-sgd-exact"], (0,))
    for tier, proven in zip(made.together, made.outcomes[0].tiers, strict=True):
        assert tier.epsilon == pytest.approx(proven.proven, rel=1e-3)
    assert made.notes == ()
    assert "The run keeps its promise to all 100 people." in comparison_page(made)


def test_all_runs_together_are_composed_by_the_accountant(problem):
    plan = problem.plan(steps=(7,), noise=2.0)
    one, other = cost_together([(plan, 3)])
    for tier, rate in ((one, 0.2), (other, 0.4)):
        assert tier.epsilon == accountant("pld").epsilon((Exposure(1, rate, 2.0, 21),), 1e-5)
