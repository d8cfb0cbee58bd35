"""Earlier runs on the same people count, and are matched to the right ones or refused."""

from __future__ import annotations

import json

import numpy as np
import pytest

from pdpsgd import Budgets, PdpsgdError, Plan, PromiseBroken, plan
from pdpsgd.accounting import accountant
from pdpsgd.accounting.certificates import KAPPA, allowance
from pdpsgd.accounting.history import EarlierRun, exposures_of, split
from pdpsgd.planning.as_published import plan_as_published


def test_earlier_plans_count_and_say_who_has_nothing_left() -> None:
    first = plan(Budgets(np.repeat([1.0, 2.0], 100), ids=np.arange(200)), steps=50, batch_size=10)
    later_people = Budgets(np.repeat([2.0, 2.0, 1.0], 60), ids=np.arange(100, 280))
    second = plan(later_people, steps=50, batch_size=10, history=[first])
    assert second.verify().kept
    assert all(level.proven_epsilon <= level.epsilon for level in second.levels)
    spent = second.people_with_nothing_left()
    assert spent == list(range(100, 200))
    assert any("nothing left after earlier runs" in note for note in second.notes)
    assert Plan.from_json(second.to_json()) == second
    again = Plan.from_json(second.to_json())
    assert np.array_equal(again.level_of_person(later_people), second.level_of_person(later_people))


def test_half_a_budget_spent_leaves_more_than_half_of_the_rate() -> None:
    # Losses add in squares, roughly: half the epsilon leaves the square root of three quarters.
    people = Budgets(np.full(500, 1.0))
    half = plan(Budgets(np.full(500, 0.5)), steps=100, batch_size=25)
    rest = plan(people, steps=100, batch_size=25, history=[half])
    fresh = plan(people, steps=100, batch_size=25)
    assert rest.verify().kept
    assert rest.levels[0].proven_epsilon >= 0.995
    assert (
        fresh.rounds[0].noise_multiplier
        < rest.rounds[0].noise_multiplier
        < 1.4 * fresh.rounds[0].noise_multiplier
    )


def test_a_plan_listed_twice_counts_twice() -> None:
    people = Budgets(np.full(500, 2.0))
    before = plan(Budgets(np.full(500, 0.5)), steps=100, batch_size=25)
    once = plan(people, steps=100, batch_size=25, history=[before])
    twice = plan(people, steps=100, batch_size=25, history=[before, before])
    assert twice.rounds[0].noise_multiplier > once.rounds[0].noise_multiplier


def test_each_earlier_plan_counts_once_however_they_are_chained() -> None:
    people = Budgets(np.full(80, 2.0), ids=np.arange(80))
    part = Budgets(np.full(80, 0.5), ids=np.arange(80))
    january = plan(part, steps=20, batch_size=8)
    february = plan(Budgets(np.full(80, 1.0), ids=np.arange(80)), steps=20, batch_size=8, history=[january])
    chained = plan(people, steps=20, batch_size=8, history=[february])
    both = plan(people, steps=20, batch_size=8, history=[january, february])
    assert (both.levels, both.rounds) == (chained.levels, chained.rounds)
    assert both.counted == chained.counted == tuple(sorted([january.identity, february.identity]))
    read = Plan.from_json(january.to_json()).with_people(part)
    assert plan(people, steps=20, batch_size=8, history=[read, february]).levels == both.levels
    again = plan(
        people, steps=20, batch_size=8, history=[january, january, february]
    )  # January was run twice
    assert len(again.levels[0].history) == len(both.levels[0].history) + 1
    assert all(isinstance(run, EarlierRun) for run in again.levels[0].history)
    assert Plan.from_json(both.to_json()).counted == both.counted


def test_whoever_was_absent_from_one_list_keeps_their_past() -> None:
    """Person 0 was there in January, not in February, and is back."""
    everybody = Budgets(np.full(80, 2.0), ids=np.arange(80))
    january = plan(Budgets(np.full(80, 0.5), ids=np.arange(80)), steps=20, batch_size=8)
    without = Budgets(np.full(79, 1.0), ids=np.arange(1, 80))
    february = plan(without, steps=20, batch_size=8, history=[january])
    march = plan(everybody, steps=20, batch_size=8, history=[january, february])
    levels = march.level_of_person(everybody)
    assert exposures_of(march.levels[levels[0]].history) == (january.rounds[0].exposure(0),)
    assert len(march.levels[levels[1]].history) == 2
    with pytest.raises(
        PdpsgdError, match="1 people on this list are not on that plan's, and what they spent"
    ):
        plan(everybody, steps=20, batch_size=8, history=[february])


def test_history_that_cannot_be_matched_or_counted_is_refused() -> None:
    numbers = Budgets(np.full(50, 1.0), ids=np.arange(50))
    text = Budgets(np.full(50, 1.0), ids=[str(i) for i in range(50)])
    before = plan(numbers, steps=10, batch_size=5)
    with pytest.raises(PdpsgdError, match="ids of the same kind"):
        plan(text, steps=10, batch_size=5, history=[before])
    with pytest.raises(PdpsgdError, match="Nobody of history"):
        plan(Budgets(np.full(50, 1.0), ids=np.arange(100, 150)), steps=10, batch_size=5, history=[before])
    published = plan_as_published(numbers, "pdp-sgd-fixed", steps=10, batch_size=5, seed=0)
    with pytest.raises(PdpsgdError, match="no sound total"):
        plan(numbers, steps=10, batch_size=5, history=[published])


def test_people_without_ids_are_matched_only_on_a_list_of_the_same_length() -> None:
    budgets = np.array([0.2] * 100 + [2.0] * 300)
    before = plan(Budgets(budgets), steps=10, batch_size=20)
    assert plan(Budgets(budgets), steps=10, batch_size=20, history=[plan_of_little(budgets)]).verify().kept
    with pytest.warns(UserWarning, match="matched by the place on the list"):
        assert plan(Budgets(budgets + 1), steps=10, batch_size=20, history=[before]).verify().kept
    with pytest.raises(PdpsgdError, match="known by their position only"):
        plan(Budgets(budgets[50:]), steps=10, batch_size=20, history=[before])


def plan_of_little(budgets: np.ndarray) -> Plan:
    """A plan for the same people that leaves them something."""
    made = plan(Budgets(budgets), steps=1000, batch_size=20)
    return made.prefix(10)


def test_places_are_not_taken_for_ids() -> None:
    """Number 1 of a list that counts from 1 is not the person at place 1."""
    before = plan(Budgets([0.2] * 20 + [2.0] * 20), steps=10, batch_size=5)
    numbered = Budgets([3.0] * 40, ids=np.arange(1, 41))
    with pytest.raises(PdpsgdError, match="somebody's id is not their place"):
        plan(numbered, steps=10, batch_size=5, history=[before])
    with pytest.raises(PdpsgdError, match="somebody's id is not their place"):
        plan(Budgets([3.0] * 40), steps=10, batch_size=5, history=[plan(numbered, steps=10, batch_size=5)])


IDS = [f"p{i}" for i in range(40)]
THEN = [1.0] * 20 + [4.0] * 20
EXCHANGED = [4.0] + [1.0] * 19 + [1.0] + [4.0] * 19  # p0 and p20 have changed their minds since


@pytest.fixture(scope="module")
def read_back() -> Plan:
    """A plan for people with ids, read from its file."""
    return Plan.from_json(plan(Budgets(THEN, ids=IDS), steps=20, batch_size=10).to_json())


def test_a_plan_s_file_says_for_whom_it_was_made(read_back: Plan) -> None:
    assert read_back.people_digest.startswith("ids:")
    assert read_back.with_people(Budgets(THEN, ids=IDS)).people_digest == read_back.people_digest
    backwards = Budgets(THEN[::-1], ids=IDS[::-1])
    assert read_back.with_people(backwards).people_digest == read_back.people_digest


@pytest.mark.parametrize(
    "others",
    [
        Budgets(EXCHANGED, ids=IDS),
        Budgets(THEN, ids=["somebody new", *IDS[1:]]),
        Budgets(THEN, ids=[*IDS[1:], IDS[0]]),
        Budgets(THEN),
    ],
    ids=["budgets changed", "somebody else", "budgets shifted", "no ids"],
)
def test_a_plan_is_not_attached_to_a_list_that_was_revised_since(read_back: Plan, others: Budgets) -> None:
    """What p20 spent at 4 would be counted as what people spent at 1."""
    with pytest.raises(PdpsgdError, match="This plan was made for"):
        read_back.with_people(others)


def test_people_without_ids_are_told_that_the_plan_needs_them(read_back: Plan) -> None:
    with pytest.raises(PdpsgdError, match=r"made for people with ids, and these have none.*Give the ids"):
        read_back.with_people(Budgets(THEN))
    assert read_back.with_people(Budgets(THEN, ids=IDS)).roster is not None


def test_a_revised_list_is_matched_by_id_with_the_list_as_it_was(read_back: Plan) -> None:
    known = read_back.with_people(Budgets(THEN, ids=IDS))
    revised = Budgets(np.array(EXCHANGED) + 4, ids=IDS)
    later = plan(revised, steps=20, batch_size=10, history=[known])
    spent = {e: known.history_of(i) for i, e in enumerate((1.0, 4.0))}
    level_of = dict(zip(IDS, later.level_of_person(revised), strict=True))
    assert exposures_of(later.levels[level_of["p20"]].history) == spent[4.0]
    assert exposures_of(later.levels[level_of["p0"]].history) == spent[1.0]


def test_people_without_ids_are_attached_in_the_same_order_only() -> None:
    made = plan(Budgets(THEN), steps=20, batch_size=10)
    again = Plan.from_json(made.to_json())
    assert again.people_digest.startswith("places:")
    assert again.with_people(Budgets(THEN)).people_digest == made.people_digest
    assert again.with_people(Budgets(THEN, ids=IDS)).roster.named
    with pytest.raises(PdpsgdError, match="order and levels do not have the digest"):
        again.with_people(Budgets(EXCHANGED))


def test_a_plan_with_a_history_is_run_on_the_people_it_was_made_for_only() -> None:
    """Each level has a history of its own: at its budget, somebody else's would be another."""
    half = plan(Budgets(np.array(THEN) / 2, ids=IDS), steps=20, batch_size=10)
    second = plan(Budgets(THEN, ids=IDS), steps=20, batch_size=10, history=[half])
    again = Plan.from_json(second.to_json())
    assert again.roster is None
    assert again.level_of_person(Budgets(THEN, ids=IDS)).tolist() == [0] * 20 + [1] * 20
    with pytest.raises(PdpsgdError, match="some of them allowed something else then"):
        again.level_of_person(Budgets(EXCHANGED, ids=IDS))


def test_files_of_earlier_versions_are_read_and_attached_with_a_warning(read_back: Plan) -> None:
    document = json.loads(read_back.to_json())
    del document["people_digest"]
    older = Plan.from_json(json.dumps(document))
    assert older.people_digest is None
    assert older.digest == read_back.digest
    with pytest.warns(UserWarning, match="does not say for whom it was made"):
        older.with_people(Budgets(EXCHANGED, ids=IDS))


def test_the_people_of_an_as_published_plan_have_no_public_digest() -> None:
    published = plan_as_published(Budgets(THEN), "adapdp", steps=10, batch_size=5, seed=0)
    assert published.people_digest is None
    assert "people_digest" not in published.to_json()
    assert not Plan.from_json(published.to_json()).roster.named


def test_large_ids_of_another_width_are_still_the_same_people() -> None:
    ids = 10**18 + np.arange(400)
    before = plan(Budgets(np.full(400, 1.0), ids=ids), steps=10, batch_size=20)
    permuted = np.random.default_rng(0).permutation(ids).astype(np.uint64)
    with pytest.raises(PdpsgdError, match="nobody to train on"):
        plan(Budgets(np.full(400, 1.0), ids=permuted), steps=10, batch_size=20, history=[before])


def test_people_of_an_earlier_plan_who_are_not_on_the_list_are_counted_in_a_note() -> None:
    before = plan(Budgets([0.5] * 40, ids=[f"p{i}" for i in range(40)]), steps=10, batch_size=5)
    later = plan(
        Budgets([2.0] * 40, ids=[f"p{i}" for i in range(5, 45)]), steps=10, batch_size=5, history=[before]
    )
    assert any("5 of the 40 people of history[0] are not on this list" in note for note in later.notes)


def test_shuffling_the_ids_afterwards_moves_nobody() -> None:
    ids = np.arange(100)
    budgets = Budgets(np.repeat([0.5, 2.0], 50), ids=ids)
    made = plan(budgets, steps=10, batch_size=10)
    ids[:] = ids[::-1].copy()
    assert made.roster.ids[0] == 0


def test_history_without_people_is_refused_with_the_remedy() -> None:
    people = Budgets(np.full(50, 1.0))
    read_back = Plan.from_json(plan(people, steps=10, batch_size=5).to_json())
    with pytest.raises(PdpsgdError, match="with_people"):
        plan(people, steps=10, batch_size=5, history=[read_back])
    assert (
        plan(Budgets(np.full(50, 2.0)), steps=10, batch_size=5, history=[read_back.with_people(people)])
        .verify()
        .kept
    )


@pytest.fixture(scope="module")
def three_months() -> tuple[Plan, Plan, Plan]:
    """Plans that each count the ones before, whose results were seen; half of the people are stricter."""
    lists = [Budgets(np.repeat([a, 2 * a], 200), ids=np.arange(400)) for a in (0.5, 0.75, 1.0)]
    january = plan(lists[0], steps=40, batch_size=40)
    february = plan(lists[1], steps=40, batch_size=40, history=[january])
    return january, february, plan(lists[2], steps=40, batch_size=40, history=[january, february])


def test_earlier_runs_add_up_within_what_the_filter_allows(three_months: tuple[Plan, Plan, Plan]) -> None:
    """Squares of mu within B and d within D of the promise, whatever was seen in between (design of the ledger)."""
    march = three_months[2]
    for index, level in enumerate(march.levels):
        runs = split(level.history)[0]
        assert len(runs) == 2
        # What the next plan would count for March, which is what March was planned with.
        after = plan(
            Budgets(np.repeat([5.0, 6.0], 200), ids=np.arange(400)), steps=5, batch_size=40, history=[march]
        )
        total = split(after.levels[index].history)[0]
        assert total[:2] == runs
        allowed = allowance(level.epsilon, level.delta)
        assert 0.99 * allowed.b < sum(run.mu**2 for run in total) <= allowed.b * (1 + 1e-9)
        assert sum(run.d for run in total) <= allowed.d
        shares = [run.d / (KAPPA * level.delta) for run in total]
        np.testing.assert_allclose(shares, [0.25, 0.1875, 0.140625])


def test_certificates_cost_a_few_percent_beside_plans_that_were_fixed_beforehand(
    three_months: tuple[Plan, Plan, Plan],
) -> None:
    january, _, march = three_months
    for index, level in enumerate(march.levels):
        exact = accountant("pld").epsilon(exposures_of(march.history_of(index)), level.delta)
        assert 0.85 * level.proven_epsilon < exact < level.proven_epsilon <= level.epsilon
    later = Budgets(np.repeat([0.75, 1.5], 200), ids=np.arange(400))
    fixed = plan(later, steps=40, batch_size=40, history=[january], history_fixed=True)
    assert fixed.accountant == "pld"
    assert fixed.rounds[0].noise_multiplier < three_months[1].rounds[0].noise_multiplier


def test_whoever_has_spent_everything_in_one_run_is_told_what_that_run_cost() -> None:
    """Not its certificate, which lies above what they allow: one run alone is proven exactly."""
    ids = np.arange(100)
    first = plan(Budgets(np.repeat([1.0, 2.0], 50), ids=ids), steps=50, batch_size=10)
    second = plan(Budgets(np.repeat([1.0, 4.0], 50), ids=ids), steps=50, batch_size=10, history=[first])
    assert second.levels[0].proven_epsilon == first.levels[0].proven_epsilon <= 1
    assert second.people_with_nothing_left() == list(range(50))
    assert second.verify().kept


def test_a_plan_s_file_cannot_understate_what_earlier_runs_cost(
    three_months: tuple[Plan, Plan, Plan],
) -> None:
    text = three_months[1].to_json()
    again = Plan.from_json(text)
    assert again == three_months[1]
    assert again.verify().kept
    document = json.loads(text)
    document["levels"][0]["history"][0]["mu"] *= 0.9
    with pytest.raises(PromiseBroken, match="which is less than it cost"):
        Plan.from_json(json.dumps(document))
    document = json.loads(text)
    document["levels"][0]["history"][0]["d"] = 2e-6  # more than a tenth of delta
    with pytest.raises(PromiseBroken):
        Plan.from_json(json.dumps(document))


def test_plans_of_which_one_was_chosen_after_results_are_not_fixed_together(
    three_months: tuple[Plan, Plan, Plan],
) -> None:
    later = Budgets(np.full(400, 5.0), ids=np.arange(400))
    with pytest.raises(PdpsgdError, match="leave history_fixed out"):
        plan(later, steps=40, batch_size=40, history=[three_months[1]], history_fixed=True)
    assert plan(later, steps=40, batch_size=40, history=[three_months[1]]).verify().kept


@pytest.mark.parametrize("mechanism", ["dp-sgd", "sampling", "pdp-sgd-fixed", "idp-scale", "dp-sgd-exclude"])
def test_every_mechanism_plans_after_results(mechanism: str, three_months: tuple[Plan, Plan, Plan]) -> None:
    later = Budgets(np.repeat([1.5, 3.0], 200), ids=np.arange(400))
    made = plan(
        later,
        mechanism,
        steps=20,
        batch_size=40,
        history=[three_months[0]],
        rounds=2 if "fixed" in mechanism else None,
    )
    assert made.accountant == "certificate"
    assert made.verify().kept
    assert Plan.from_json(made.to_json()) == made


@pytest.mark.parametrize(("before", "now"), [("ann ", "ann"), ("ann", " ann"), ("Zo\u00eb", "Zoe\u0308")])
def test_people_of_earlier_plans_are_not_forgotten_because_they_are_written_otherwise(
    before: str, now: str
) -> None:
    others = [f"p{i}" for i in range(60)]
    first = plan(Budgets([1.0] * 61, ids=[before, *others]), steps=10, batch_size=10)
    with pytest.raises(PdpsgdError, match=r"differ only in white space.* would be forgotten"):
        plan(Budgets([2.0] * 61, ids=[now, *others]), steps=10, batch_size=10, history=[first])
    newcomer = plan(Budgets([2.0] * 61, ids=["ben", *others]), steps=10, batch_size=10, history=[first])
    assert {len(level.history) > 0 for level in newcomer.levels} == {True, False}
