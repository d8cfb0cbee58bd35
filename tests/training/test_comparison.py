"""A comparison says what all its runs together cost."""

from __future__ import annotations

import dataclasses

import pytest

import pdpsgd
from pdpsgd.accounting import Exposure, accountant
from pdpsgd.reporting import comparison_page
from pdpsgd.training.comparison import _bound, cost_together


@pytest.fixture
def compared(problem):
    def compare(mechanisms, seeds, **options):
        return pdpsgd.compare(
            mechanisms,
            make_model=lambda seed: problem.model(),
            data=problem.data,
            budgets=problem.budgets,
            test_data=problem.test,
            record_ids=problem.budgets.ids,
            seeds=seeds,
            plan_options={"steps": 5, "batch_size": 20},
            **options,
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


def test_people_whom_a_mechanism_leaves_out_are_counted_and_said(compared):
    threshold = {"dp-sgd-exclude": {"exclude_below": 1.5}}
    made = compared(["dp-sgd-exclude", "pdp-sgd-exact"], (0,), options_of=threshold)
    exclude, exact = made.outcomes
    unused = sum(tier.people for tier in exclude.tiers if tier.proven == 0)
    assert 0 < unused < made.people
    (said,) = [note for note in made.notes if "leaves out" in note]
    assert said.startswith(f"dp-sgd-exclude leaves out {unused:,} of {made.people:,} people")
    assert all(tier.proven > 0 for tier in exact.tiers)


def test_a_second_list_has_a_part_of_its_own_on_the_page(compared):
    first, second = compared(["dp-sgd"], (0,)), compared(["dp-sgd", "pdp-sgd-exact"], (0,))
    page = comparison_page(first, dataclasses.replace(second, data="another list"))
    assert ">another list</h2>" in page
    assert "another list" not in comparison_page(first)


@pytest.mark.parametrize(
    ("epsilon", "shown"),
    [(0.99817, "0.999"), (2.9949, "3"), (2.981, "2.99"), (0.0, "0"), (1.0, "1"), (0.09983, "0.0999")],
)
def test_a_proven_figure_is_never_shown_smaller_than_it_is(epsilon, shown):
    assert _bound(epsilon) == shown


def test_all_runs_together_are_composed_by_the_accountant(problem):
    plan = problem.plan(steps=(7,), noise=2.0)
    one, other = cost_together([(plan, 3)])
    for tier, rate in ((one, 0.2), (other, 0.4)):
        assert tier.epsilon == accountant("pld").epsilon((Exposure(1, rate, 2.0, 21),), 1e-5)
