"""Runs in a ledger: charged before they start, once, and whatever becomes of them."""

from __future__ import annotations

import numpy as np
import pytest

from pdpsgd.accounting.certificates import allowance
from pdpsgd.accounting.gaussian import gaussian_epsilon
from pdpsgd.budgets.budgets import Budgets
from pdpsgd.errors import PdpsgdError
from pdpsgd.ledger import Ledger
from pdpsgd.ledger.amounts import UNIT_B, Amounts, allowed
from pdpsgd.ledger.offers import Share, shares

from .conftest import everybody_in_every_step, people


def test_the_life_of_a_run(ledger: Ledger) -> None:
    assert ledger.enroll(people(*[0.5, 1.0, 2.0] * 40)) == 120
    made = ledger.plan(steps=20, batch_size=20)
    run = ledger.reserve(made, name="January")
    assert (run.state, run.attempt, run.people, run.name) == ("reserved", 0, 120, "January")
    before = ledger.person("p0")
    assert 0 < before.spent_epsilon < 0.5
    attempt = ledger.start(run.number)
    assert (attempt, ledger.run(run.number).state) == (1, "running")
    ledger.finish(run.number, attempt)
    ledger.finish(run.number, attempt)  # twice is once
    assert ledger.run(run.number).state == "finished"
    assert ledger.person("p0").spent_epsilon == before.spent_epsilon
    second = ledger.reserve(ledger.plan(steps=20, batch_size=20), name="February")
    assert ledger.person("p0").spent_epsilon > before.spent_epsilon
    assert [r.number for r in ledger.runs()] == [run.number, second.number]
    assert ledger.plan_of(run.number).rounds == made.rounds
    found = ledger.check()
    assert found.passed, found.problems
    assert found.certificates == 2 * len(made.levels)


def test_a_share_of_what_is_left_and_a_part_of_the_whole() -> None:
    whole = allowed(allowance([2.0], 1e-5), np.array([2.0]))
    spent, told = Amounts.zeros(1), {"0.25": [], "1 of 12": []}  # type: ignore[var-annotated]
    for spend, found in told.items():
        spent = Amounts.zeros(1)
        for _ in range(12):
            share = Share.parse(spend)
            epsilon, delta = shares(
                share, allowed=whole, spent=spent, epsilon=np.array([2.0]), delta=np.array([1e-5])
            )
            b = min(share.of_left * float(whole.b[0] - spent.b[0]), share.of_whole * float(whole.b[0]))
            found.append(float(gaussian_epsilon(np.sqrt(b * UNIT_B), 0.9e-5)))
            assert epsilon[0] > found[-1]  # because it is at a smaller delta
            assert delta[0] < 1e-5
            spent.b[0] += int(b)
            spent.d[0] += int(share.of_whole * share.of_left * whole.d[0] / 12)
    np.testing.assert_allclose([told["0.25"][i] for i in (0, 3, 11)], [0.93, 0.58, 0.17], atol=0.006)
    np.testing.assert_allclose(told["1 of 12"], 0.51, atol=0.006)


@pytest.mark.parametrize("text", ["0", "1.5", "13 of 12", "0 of 12", "some", "-1", "nan"])
def test_shares_that_mean_nothing_are_refused(text: str) -> None:
    with pytest.raises(PdpsgdError, match="Expected what a run may spend"):
        Share.parse(text)


def test_a_plan_from_an_offer_fits_and_takes_its_share(in_file: Ledger) -> None:
    in_file.enroll(people(*np.geomspace(0.3, 3, 150)))
    for _ in range(3):
        in_file.reserve(in_file.plan("all", steps=30, batch_size=30))
        if all(tier.mean_share_left < 0.02 for tier in in_file.tiers()):
            break
    assert in_file.check(certificates=False).passed
    assert all(tier.mean_share_left < 0.05 for tier in in_file.tiers())


def test_nobody_is_charged_beyond_what_they_allow(ledger: Ledger) -> None:
    ledger.enroll(people(1.0, 2.0))
    ids = ["p0", "p1"]
    ledger.reserve(everybody_in_every_step(ids, 0.2))
    with pytest.raises(PdpsgdError, match=r"Nothing was reserved: 1 people no longer allow it. 'p0'"):
        ledger.reserve(everybody_in_every_step(ids, 0.2))
    ledger.reserve(everybody_in_every_step(["p1"], 0.2))
    assert len(ledger.runs()) == 2


def test_the_same_request_twice_is_one_reservation(ledger: Ledger) -> None:
    ledger.enroll(people(1.0))
    first = ledger.reserve(everybody_in_every_step(["p0"], 0.2), token="january")
    again = ledger.reserve(everybody_in_every_step(["p0"], 0.2), token="january")
    assert (first.number, len(ledger.runs())) == (again.number, 1)


def test_only_what_has_not_started_is_given_back(ledger: Ledger) -> None:
    ledger.enroll(people(1.0))
    run = ledger.reserve(everybody_in_every_step(["p0"], 0.2)).number
    ledger.cancel(run)
    assert ledger.person("p0").spent_epsilon == 0
    with pytest.raises(PdpsgdError, match="It is cancelled: reserve a new run"):
        ledger.start(run)
    second = ledger.reserve(everybody_in_every_step(["p0"], 0.2)).number
    attempt = ledger.start(second)
    with pytest.raises(PdpsgdError, match="what has started stays charged"):
        ledger.cancel(second)
    ledger.kill(second, attempt)
    with pytest.raises(PdpsgdError, match="what has started stays charged"):
        ledger.cancel(second)
    assert ledger.person("p0").spent_epsilon > 0
    assert ledger.check().passed


def test_a_resumed_run_is_charged_once_and_the_older_process_stops(ledger: Ledger) -> None:
    ledger.enroll(people(1.0))
    run = ledger.reserve(everybody_in_every_step(["p0"], 0.2)).number
    first = ledger.start(run)
    ledger.check_attempt(run, first)
    spent = ledger.person("p0").spent_epsilon
    second = ledger.resume(run)
    assert second == 2
    with pytest.raises(PdpsgdError, match="Another process has taken it over"):
        ledger.check_attempt(run, first)
    with pytest.raises(PdpsgdError, match="another process has taken it over"):
        ledger.finish(run, first)
    ledger.kill(run, second)
    third = ledger.resume(run)
    ledger.finish(run, third)
    with pytest.raises(PdpsgdError, match="It is finished: reserve a new run"):
        ledger.resume(run)
    with pytest.raises(PdpsgdError, match="to start it"):
        ledger.start(run)
    assert ledger.person("p0").spent_epsilon == spent
    assert ledger.check().passed


@pytest.mark.parametrize("killed", [False, True])
def test_a_run_that_has_started_may_be_resumed_after_somebody_withdrew(ledger: Ledger, killed: bool) -> None:
    """A change of mind holds for every start after it; a run that is under way ends as it is."""
    ledger.enroll(people(1.0))
    plan = everybody_in_every_step(["p0"], 0.1)
    started, reserved = ledger.reserve(plan).number, ledger.reserve(plan).number
    attempt = ledger.start(started)
    if killed:
        ledger.kill(started, attempt)
    spent = ledger.person("p0").spent_epsilon
    ledger.consent(people(0.0))
    with pytest.raises(PdpsgdError, match=f"Run {reserved} was reserved, but"):
        ledger.start(reserved)
    ledger.finish(started, ledger.resume(started))
    assert ledger.person("p0").spent_epsilon == spent
    assert ledger.check().passed


@pytest.mark.parametrize("now", [0.0, 0.05])
def test_a_resumed_run_counts_whom_it_uses_and_who_allow_less_by_now(ledger: Ledger, now: float) -> None:
    """It takes what they no longer allow; "this run does not use them" was said, or nothing."""
    ledger.enroll(people(1.0, 1.0, 1.0))
    earlier, run, other = (
        ledger.reserve(everybody_in_every_step(ids, 0.1)).number for ids in (["p1"], ["p0", "p1"], ["p2"])
    )
    ledger.finish(earlier, ledger.start(earlier))
    begun = ledger.begin(run)
    assert (begun.statement.above_consent, begun.statement.withdrawn, begun.statement.changed) == (0, 0, 0)
    ledger.consent(people(now, now))
    found = ledger.begin(run).statement
    assert (found.above_consent, found.withdrawn, found.changed) == (0, 0, 2)
    assert ledger.begin(other).statement.changed == 0


def test_what_is_reserved_only_was_not_taken_from_anybody(ledger: Ledger) -> None:
    ledger.enroll(people(1.0))
    run, _ = (ledger.reserve(everybody_in_every_step(["p0"], 0.1)).number for _ in range(2))
    ledger.consent(people(0.5))  # which the first allows, and not both
    assert ledger.begin(run).statement.changed == 0


NOT_A_NUMBER, INFINITE = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("epsilon", "delta"),
    [
        *((value, 1e-9) for value in (NOT_A_NUMBER, INFINITE, -1.0, "x", None)),
        *((0.1, value) for value in (NOT_A_NUMBER, INFINITE, -1.0, 2.0, "x", None)),
    ],
)
def test_declared_figures_that_are_none_are_refused(in_file: Ledger, epsilon: float, delta: float) -> None:
    in_file.enroll(people(1.0))
    with pytest.raises(PdpsgdError, match=r"Expected .*(epsilon|delta).*Got"):
        in_file.reserve_declared(epsilon, delta)
    assert in_file.runs() == []


@pytest.mark.parametrize(
    ("orders", "rho", "d"),
    [
        *(([2.0], [value], 1e-9) for value in (NOT_A_NUMBER, INFINITE, -0.1, "x")),
        *(([value], [0.1], 1e-9) for value in (NOT_A_NUMBER, INFINITE, 1.0, 0.5, "x")),
        *(([2.0], [0.1], value) for value in (NOT_A_NUMBER, INFINITE, -1.0, "x")),
        ([], [], 1e-9),  # nothing is known of the run: it was charged nothing
        ([2.0, 3.0], [0.1], 1e-9),
    ],
)
def test_divergences_that_are_none_are_refused(
    in_file: Ledger, orders: list[float], rho: list[float], d: float
) -> None:
    in_file.enroll(people(1.0))
    with pytest.raises(PdpsgdError, match=r"Expected .*Got"):
        in_file.reserve_renyi(orders, rho, d=d)
    assert in_file.runs() == []


def test_other_figures_that_are_none_are_refused(in_file: Ledger) -> None:
    for value in (NOT_A_NUMBER, INFINITE, -1.0):
        with pytest.raises(PdpsgdError, match="set_aside >= 0 and finite"):
            in_file.enroll(people(1.0), set_aside=value)
    in_file.enroll(people(4.0), set_aside=0.5)
    for number in (NOT_A_NUMBER, INFINITE, -1, 0, 2**70, None, "x", 99):
        for use in (in_file.start, in_file.resume, in_file.cancel, in_file.run, in_file.plan_of):
            with pytest.raises(PdpsgdError, match="run"):
                use(number)
    with pytest.raises(PdpsgdError, match="list of ids"):
        in_file.offer(people=5)
    assert in_file.reserve_declared(0.1, 1e-9).people == 1
    assert in_file.reserve_renyi([2.0, 64.0], [1e-5, 3e-4], d=1e-7).people == 1
    assert in_file.check().passed


def test_real_spending_changes_no_charge_and_is_never_shown(in_file: Ledger) -> None:
    """A run that ends after one step, one that is killed and one that is done are told alike."""
    in_file.enroll(people(2.0, 2.0, 2.0))
    told = []
    for person, end in (("p0", in_file.finish), ("p1", in_file.kill), ("p2", None)):
        run = in_file.reserve(everybody_in_every_step([person], 0.2)).number
        attempt = in_file.start(run)
        if end is not None:
            end(run, attempt)
        told.append(in_file.person(person).spent_epsilon)
    assert len(set(told)) == 1
    # There is no way to hand the ledger anything that was seen in a run.
    import inspect

    for name in ("start", "resume", "finish", "kill", "cancel"):
        assert set(inspect.signature(getattr(Ledger, name)).parameters) <= {"self", "run", "attempt"}


def test_mu_and_d_are_fixed_when_reserved(in_file: Ledger) -> None:
    in_file.enroll(people(1.0, 1.0))
    run = in_file.reserve(everybody_in_every_step(["p0", "p1"], 0.2), token="t").number
    charges = in_file.person("p0").charges
    in_file.start(run)
    with pytest.raises(PdpsgdError, match="with another plan"):
        in_file.reserve(everybody_in_every_step(["p0", "p1"], 0.1), token="t")
    assert [(c.mu, c.d) for c in in_file.person("p0").charges] == [(c.mu, c.d) for c in charges]


def test_nothing_flows_between_b_and_d(in_file: Ledger) -> None:
    """d that is used up is not paid from b, though plenty of that is left; and the other way round."""
    in_file.enroll(people(2.0))
    d = 0.1 * 1e-5
    in_file.reserve_renyi([2, 8, 32, 128], [1e-6, 4e-6, 16e-6, 64e-6], d=0.9 * d)
    with pytest.raises(PdpsgdError, match=r"would come to d 1\.8e-06 of 1e-06"):
        in_file.reserve_renyi([2, 8, 32, 128], [1e-6, 4e-6, 16e-6, 64e-6], d=0.9 * d)
    in_file.reserve(everybody_in_every_step(["p0"], 0.4))
    with pytest.raises(PdpsgdError, match=r"would come to mu\^2"):
        in_file.reserve(everybody_in_every_step(["p0"], 0.4))


def test_declared_runs_are_paid_from_what_was_set_aside_or_else_from_b(in_file: Ledger) -> None:
    in_file.enroll(people(2.0), set_aside=0.3)
    in_file.enroll(people(2.0, first=1))
    in_file.reserve_declared(0.2, 1e-8, name="another system")
    aside, whole = in_file.person("p0"), in_file.person("p1")
    assert (aside.charges[0].mu, round(aside.charges[0].pure_epsilon, 6)) == (0.0, 0.2)
    assert (round(whole.charges[0].mu, 3), whole.charges[0].pure_epsilon) == (0.250, 0.0)
    assert aside.left_epsilon == pytest.approx(1.7, abs=1e-6)
    assert in_file.check().passed


def test_old_plans_are_entered_in_order_with_a_d_that_nobody_chooses(in_file: Ledger) -> None:
    from pdpsgd import plan

    listed = people(*[1.0] * 60)
    in_file.enroll(listed)
    old = [plan(listed, steps=steps, batch_size=10) for steps in (10, 12)]
    runs = [in_file.enter_history(one, name=f"old {i}") for i, one in enumerate(old)]
    with pytest.raises(PdpsgdError, match="entered already, as run 1"):
        in_file.enter_history(old[0])
    assert [run.state for run in runs] == ["finished", "finished"]
    first, second = in_file.person("p0").charges
    assert (first.d, second.d) == (pytest.approx(2.5e-7, rel=1e-6), pytest.approx(0.75 * 2.5e-7, rel=1e-6))
    assert in_file.check().passed
    with pytest.raises(PdpsgdError):  # each of them alone spent everything
        in_file.reserve(everybody_in_every_step(["p0"], 0.05))


def test_a_block_of_code_is_a_run(in_file: Ledger) -> None:
    in_file.enroll(people(2.0))
    with in_file.running(everybody_in_every_step(["p0"], 0.1), name="January") as run:
        assert (run.state, run.attempt) == ("running", 1)
    assert in_file.run(run.number).state == "finished"
    with (
        pytest.raises(RuntimeError, match="out of memory"),
        in_file.running(everybody_in_every_step(["p0"], 0.1)) as second,
    ):
        raise RuntimeError("out of memory")
    assert in_file.run(second.number).state == "killed"
    assert len(in_file.person("p0").charges) == 2
    in_file.finish(second.number, in_file.resume(second.number))


def test_a_run_whose_state_nobody_moves_is_not_begun(in_file: Ledger) -> None:
    """It could be cancelled after training, and what it has cost be spent again."""
    in_file.enroll(people(1.0, 1.0))
    run = in_file.reserve(everybody_in_every_step(["p0", "p1"], 0.1)).number
    other = in_file.hold(run, watches=False)
    with pytest.raises(PdpsgdError, match=r"Expected run 1 from Ledger.hold\(watches=True\)"):
        other.begin()
    other.begin(watches=False)  # as all ranks but the first
    assert in_file.run(run).state == "reserved"
    in_file.hold(run).begin()
    assert in_file.run(run).state == "running"


def test_nobody_is_on_a_list_twice(in_file: Ledger) -> None:
    in_file.enroll(people(2.0))
    with pytest.raises(PdpsgdError, match="Expected each person once"):
        in_file.reserve(everybody_in_every_step(["p0", "p0"], 0.1))


def test_plans_without_people_or_with_strangers_are_refused(in_file: Ledger) -> None:
    in_file.enroll(people(1.0))
    with pytest.raises(PdpsgdError, match="'stranger' is not one of them"):
        in_file.reserve(everybody_in_every_step(["stranger"], 0.1))
    nameless = Budgets([1.0] * 50).ids
    with pytest.raises(PdpsgdError, match="Expected ids that are text"):
        in_file.reserve(everybody_in_every_step(nameless.tolist(), 0.1))


def test_another_declared_charge_under_the_same_token_is_refused(ledger: Ledger) -> None:
    ledger.enroll(people(1.0, 1.0))
    first = ledger.reserve_declared(0.0001, 0, people=["p0"], token="nightly")
    assert ledger.reserve_declared(0.0001, 0, people=["p0"], token="nightly").number == first.number
    for epsilon, charged in ((0.0002, ["p0"]), (0.0001, ["p0", "p1"]), (0.0001, ["p1"])):
        with pytest.raises(PdpsgdError, match="same request under the same token"):
            ledger.reserve_declared(epsilon, 0, people=charged, token="nightly")
