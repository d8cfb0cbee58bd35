"""Consents over time: raised, lowered, withdrawn, left and returned."""

from __future__ import annotations

import math

import numpy as np
import pytest

from pdpsgd.budgets.budgets import Budgets
from pdpsgd.errors import PdpsgdError
from pdpsgd.ledger import Ledger

from .conftest import everybody_in_every_step, people


def run(ledger: Ledger, ids: list[str], mu: float) -> None:
    number = ledger.reserve(everybody_in_every_step(ids, mu)).number
    ledger.finish(number, ledger.start(number))


def one(name: str, epsilon: float, delta: float = 1e-5) -> Budgets:
    return Budgets([epsilon], delta, ids=[name], allow_infinite=True)


def test_raised_lets_more_runs_in_and_keeps_both_promises(ledger: Ledger) -> None:
    ledger.enroll(people(0.5))
    run(ledger, ["p0"], 0.14)
    with pytest.raises(PdpsgdError, match="no longer allow it"):
        run(ledger, ["p0"], 0.14)
    ledger.consent(one("p0", 1.0))
    run(ledger, ["p0"], 0.14)
    told = ledger.person("p0")
    assert [(c.epsilon, c.kept) for c in told.consents] == [(0.5, True), (1.0, True)]
    assert told.consents[0].spent_epsilon < 0.5 < told.consents[1].spent_epsilon < 1.0
    assert ledger.check().passed


def test_lowered_and_it_still_fits(ledger: Ledger) -> None:
    ledger.enroll(people(2.0))
    run(ledger, ["p0"], 0.1)
    ledger.consent(one("p0", 1.0))
    run(ledger, ["p0"], 0.1)
    with pytest.raises(PdpsgdError, match="no longer allow it"):
        run(ledger, ["p0"], 0.25)
    assert all(c.kept for c in ledger.person("p0").consents)


def test_lowered_below_what_was_spent_is_out_and_told(ledger: Ledger) -> None:
    ledger.enroll(people(2.0, 2.0))
    run(ledger, ["p0", "p1"], 0.4)
    ledger.consent(one("p0", 0.5))
    told = ledger.person("p0")
    assert [(c.epsilon, c.kept) for c in told.consents] == [(2.0, True), (0.5, False)]
    assert told.left_epsilon == 0
    assert told.spent_epsilon > 1.5
    offered = ledger.offer("all").budgets
    assert offered.epsilon[0] == 0
    assert offered.epsilon[1] > 0
    with pytest.raises(PdpsgdError, match="no longer allow it"):
        run(ledger, ["p0"], 1e-6)


def test_withdrawn_is_never_drawn_again(ledger: Ledger) -> None:
    ledger.enroll(people(*[2.0] * 50))
    ledger.consent(one("p7", 0.0))
    made = ledger.plan(steps=10, batch_size=10)
    assert made.people_with_nothing_left() == ["p7"]
    ledger.reserve(made)
    assert ledger.person("p7").charges == ()
    assert len(ledger.person("p8").charges) == 1


def test_a_change_between_reservation_and_start_holds(ledger: Ledger) -> None:
    ledger.enroll(people(2.0, 2.0))
    reserved = ledger.reserve(everybody_in_every_step(["p0", "p1"], 0.3)).number
    ledger.consent(one("p1", 0.1))
    with pytest.raises(
        PdpsgdError, match=rf"Run {reserved} was reserved, but 1 people no longer allow it. 'p1'"
    ):
        ledger.start(reserved)
    assert ledger.run(reserved).state == "reserved"
    ledger.cancel(reserved)
    run(ledger, ["p0"], 0.3)
    assert ledger.check().passed


def test_a_run_that_has_started_ends_as_it_is(ledger: Ledger) -> None:
    ledger.enroll(people(2.0))
    number = ledger.reserve(everybody_in_every_step(["p0"], 0.3)).number
    attempt = ledger.start(number)
    ledger.consent(one("p0", 0.0))
    ledger.finish(number, attempt)
    assert ledger.person("p0").epsilon == 0
    assert ledger.check().passed


def test_what_is_only_reserved_does_not_stop_another_start(ledger: Ledger) -> None:
    ledger.enroll(people(2.0))
    first, second = (ledger.reserve(everybody_in_every_step(["p0"], 0.3)).number for _ in range(2))
    ledger.consent(one("p0", 1.3))
    ledger.start(second)
    with pytest.raises(PdpsgdError, match="no longer allow it"):
        ledger.start(first)


def test_who_leaves_and_returns_keeps_their_past(ledger: Ledger) -> None:
    ledger.enroll(people(1.0, 1.0))
    run(ledger, ["p0", "p1"], 0.2)
    spent = ledger.person("p1").spent_epsilon
    run(ledger, ["p0"], 0.1)
    assert ledger.person("p1").spent_epsilon == spent
    with pytest.raises(PdpsgdError, match="'p1' is, and 0 more"):
        ledger.enroll(people(5.0, first=1))
    with pytest.raises(PdpsgdError, match="no longer allow it"):
        run(ledger, ["p0", "p1"], 0.2)


def test_newcomers_start_at_nothing(ledger: Ledger) -> None:
    ledger.enroll(people(1.0))
    run(ledger, ["p0"], 0.2)
    ledger.enroll(people(1.0, first=1))
    assert ledger.person("p1").spent_epsilon == 0
    offered = ledger.offer("all").budgets
    assert offered.epsilon[1] > offered.epsilon[0] > 0
    run(ledger, ["p1"], 0.2)
    assert len(ledger) == 2


def test_no_protection_asked_has_no_limit_but_is_recorded(ledger: Ledger) -> None:
    ledger.enroll(people(math.inf, *[1.0] * 40))
    ledger.reserve(ledger.plan("all", steps=10, batch_size=10))
    for _ in range(2):
        run(ledger, ["p0"], 3.0)
    told = ledger.person("p0")
    assert len(told.charges) == 3
    assert told.left_epsilon == math.inf
    assert ledger.check(certificates=False).passed


def test_kappa_is_fixed_before_the_first_charge(in_file: Ledger) -> None:
    in_file.enroll(people(1.0), kappa=0.5)
    run(in_file, ["p0"], 0.1)
    in_file.consent(one("p0", 2.0))
    assert in_file.person("p0").kappa == 0.5
    with pytest.raises(PdpsgdError, match="0 < kappa < 1"):
        in_file.enroll(people(1.0, first=1), kappa=0.0)
    assert len(in_file) == 1  # nothing half-done


def test_strangers_and_ids_of_another_kind(ledger: Ledger) -> None:
    ledger.enroll(people(1.0))
    with pytest.raises(PdpsgdError, match="'eve' is not one of them: enroll them first, or leave them out"):
        ledger.consent(one("eve", 1.0))
    with pytest.raises(PdpsgdError, match="Expected ids that are text"):
        ledger.enroll(Budgets([1.0], ids=[7]))
    with pytest.raises(PdpsgdError, match="people with ids"):
        ledger.enroll(Budgets([1.0]))
    with pytest.raises(PdpsgdError, match="'eve' is not enrolled"):
        ledger.person("eve")


def test_ids_that_are_numbers_come_back_as_numbers(ledger: Ledger) -> None:
    ledger.enroll(Budgets([1.0] * 40, ids=np.arange(100, 140)))
    made = ledger.plan(steps=10, batch_size=5)
    assert made.roster is not None
    assert made.roster.ids.tolist() == list(range(100, 140))
    ledger.reserve(made)
    assert len(ledger.person(100).charges) == 1


def test_a_list_of_some_people_only(ledger: Ledger) -> None:
    ledger.enroll(people(*[1.0] * 60))
    made = ledger.plan(people=[f"p{i}" for i in range(0, 60, 2)], steps=10, batch_size=5)
    assert ledger.reserve(made).people == 30
    assert len(ledger.person("p0").charges) == 1
    assert ledger.person("p1").charges == ()


@pytest.mark.parametrize(
    ("there", "again"), [("ann", "ann "), (" ann", "ann"), ("Zo\u00eb", "Zoe\u0308"), ("ann", "ann\u200b")]
)
def test_nobody_is_enrolled_anew_under_another_way_to_write_their_id(
    ledger: Ledger, there: str, again: str
) -> None:
    """They would begin with nothing spent."""
    ledger.enroll(one(there, 1.0))
    with pytest.raises(PdpsgdError, match=r"Expected one way to write each id.*in the ledger"):
        ledger.admit(Budgets([1.0, 1.0], ids=[again, "ben"]))
    assert ledger.admit(Budgets([1.0, 1.0], ids=[there, " ben"])) == 1
    assert ledger.admit(Budgets([1.0, 1.0], ids=[there, "Ben"])) == 1
