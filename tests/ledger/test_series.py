"""Series: several runs whose plans are fixed together, under one certificate."""

from __future__ import annotations

import pytest

from pdpsgd.accounting.certificates import certificate
from pdpsgd.accounting.history import Exposure
from pdpsgd.budgets.budgets import Budgets
from pdpsgd.errors import PdpsgdError
from pdpsgd.ledger import Ledger

from .conftest import everybody_in_every_step, people


def test_one_certificate_pays_for_all_runs_and_is_smaller_than_one_for_each(ledger: Ledger) -> None:
    ledger.enroll(people(*[2.0] * 60))
    plans = ledger.plan_series(4, "0.5", steps=10, batch_size=10)
    runs = ledger.reserve_series(plans, name="spring")
    assert [run.name for run in runs] == ["spring 1", "spring 2", "spring 3", "spring 4"]
    (charge,) = ledger.person("p0").charges
    each = plans[0].rounds[0].exposure(0)
    together = certificate(
        (Exposure(each.participation, each.sample_rate, each.noise_multiplier, 40),), d=charge.d
    )
    assert charge.mu == pytest.approx(together.mu, rel=1e-9)
    alone = certificate((each,), d=charge.d / 4)
    assert charge.mu**2 < 4 * alone.mu**2
    assert ledger.tiers()[0].mean_share_left == pytest.approx(0.5, abs=0.01)
    found = ledger.check()
    assert found.passed, found.problems


def test_runs_of_a_series_are_used_once_or_not_in_any_order(ledger: Ledger) -> None:
    ledger.enroll(people(2.0, 2.0))
    ids = ["p0", "p1"]
    plans = [everybody_in_every_step(ids, 0.1), everybody_in_every_step(["p0"], 0.2)]
    first, second = (run.number for run in ledger.reserve_series(plans, name="both"))
    series = first - 1
    spent = [ledger.person(name).spent_epsilon for name in ids]
    assert ledger.person("p0").charges[0].mu == pytest.approx(0.05**0.5, rel=1e-9)
    assert ledger.person("p1").charges[0].mu == pytest.approx(0.1, rel=1e-9)
    with pytest.raises(PdpsgdError, match=f"runs of series {series}"):
        ledger.start(series)
    with pytest.raises(PdpsgdError, match="belongs to a series"):
        ledger.cancel(first)
    ledger.finish(second, ledger.start(second))
    assert [ledger.run(number).state for number in (series, first, second)] == [
        "running",
        "reserved",
        "finished",
    ]
    with pytest.raises(PdpsgdError, match="to start it"):
        ledger.start(second)
    with pytest.raises(PdpsgdError, match="what has started stays charged"):
        ledger.cancel(series)
    ledger.start(first)
    ledger.finish(first, ledger.resume(first))
    assert ledger.run(series).state == "finished"
    assert [ledger.person(name).spent_epsilon for name in ids] == spent
    assert ledger.statement(first).tiers[0].this_run > 0
    assert ledger.check().passed


def test_a_series_that_has_not_started_is_given_back_whole(ledger: Ledger) -> None:
    ledger.enroll(people(2.0))
    runs = ledger.reserve_series([everybody_in_every_step(["p0"], 0.1)] * 3)
    ledger.cancel(runs[0].number - 1)
    assert {run.state for run in ledger.runs()} == {"cancelled"}
    assert ledger.person("p0").spent_epsilon == 0
    assert ledger.check().passed


def test_a_consent_that_changed_holds_for_every_later_start_of_a_series(ledger: Ledger) -> None:
    ledger.enroll(people(2.0, 2.0))
    runs = ledger.reserve_series([everybody_in_every_step(["p0", "p1"], 0.2)] * 2)
    ledger.finish(runs[0].number, ledger.start(runs[0].number))
    ledger.consent(Budgets([0.1], ids=["p1"]))
    with pytest.raises(PdpsgdError, match=r"1 people no longer allow it\. 'p1'"):
        ledger.start(runs[1].number)


def test_a_series_that_does_not_fit_is_refused_whole(ledger: Ledger) -> None:
    ledger.enroll(people(1.0))
    with pytest.raises(PdpsgdError, match="Nothing was reserved"):
        ledger.reserve_series([everybody_in_every_step(["p0"], 0.2)] * 2)
    assert ledger.runs() == []
    with pytest.raises(PdpsgdError, match="a token of your own"):
        ledger.reserve(everybody_in_every_step(["p0"], 0.1), token="series:1:0")


def test_a_series_that_paid_too_little_is_found(in_file: Ledger) -> None:
    """The hash chain aside: what members expose people to is compared with what was paid."""
    import sqlite3
    from contextlib import closing

    in_file.enroll(people(2.0))
    in_file.reserve_series([everybody_in_every_step(["p0"], 0.1)] * 2)
    with closing(sqlite3.connect(in_file.place)) as connection:
        connection.execute("UPDATE charges SET exposures = '[[1.0,1.0,5.0,1]]' WHERE run = 2")
        connection.commit()
    assert any("has not paid" in problem for problem in in_file.check().problems)
