"""`pdpsgd advise`: public things in, a recommendation out, nothing spent."""

from __future__ import annotations

import json


def test_advice_on_a_table_is_about_the_share_that_train_would_take_and_leaves_no_ledger(
    run, people, tmp_path
):
    done = run(
        "advise", people, "--label", "income", "--id-column", "person", "--no-time", "--json", "a.json"
    )
    assert done.exit_code == 0, done.output
    assert "--spend 0.25" in done.output
    assert "Recommended: --batch-size" in done.output
    assert not (tmp_path / "people.ledger").exists()
    quarter = json.loads((tmp_path / "a.json").read_text())
    done = run(
        "advise",
        people,
        "--label",
        "income",
        "--id-column",
        "person",
        "--no-time",
        "--spend",
        "all",
        "--json",
        "b.json",
    )
    whole = json.loads((tmp_path / "b.json").read_text())
    ratios = [each["mechanisms"][0]["signal_to_noise"] for each in (quarter, whole)]
    assert ratios[1] > 1.5 * ratios[0]
    assert quarter["parameters"] == whole["parameters"] == 32 * (4 + 1) + 2 * 33


def test_advice_on_tiers_needs_no_file_and_draws_a_chart(run, tmp_path):
    done = run("advise", "--tiers", "1:0.5,4:0.5", "--people", 500, "--features", 10, "--chart", "a.svg")
    assert done.exit_code == 0, done.output
    assert "on this machine" in done.output
    assert "<svg" in (tmp_path / "a.svg").read_text()


def test_a_chart_as_a_page_says_in_its_head_that_it_fits_a_phone(run, tmp_path):
    how = ("--tiers", "1:0.5,4:0.5", "--people", 500, "--features", 10, "--no-time")
    done = run("advise", *how, "--chart", "a.html")
    assert done.exit_code == 0, done.output
    page = (tmp_path / "a.html").read_text()
    assert page.index('<meta name="viewport"') < page.index("<script")  # inside a script it would say nothing


def test_advice_without_any_size_of_the_network_says_what_is_missing(run, people):
    done = run("advise", people, "--id-column", "person")
    assert done.exit_code == 2
    assert "--features" in done.output
