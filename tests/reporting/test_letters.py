"""Letters to people: plain words, true figures, and nothing of anybody else."""

from __future__ import annotations

import csv
import math
import re
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from typer.testing import CliRunner

import pdpsgd
from pdpsgd.cli import app
from pdpsgd.reporting.letter_page import Letterhead, letter, times_right
from pdpsgd.reporting.letters import file_name, find_promise, write_letters
from pdpsgd.training.promises import Promise
from pdpsgd.training.run_folder import RunFolder

DAY = date(2030, 1, 2)


def train(place: Path, epsilons: list[float], *, shift: float = 0.0, **options: Any) -> Path:
    torch.manual_seed(0)
    inputs = torch.linspace(-1, 1, 4 * len(epsilons)).reshape(-1, 4)
    inputs[-1] += shift
    budgets = pdpsgd.Budgets(epsilons, 1e-5, ids=[f"p{i}" for i in range(len(epsilons))], allow_infinite=True)
    how = {"steps": 3, "batch_size": 5, "progress": False, **options}
    pdpsgd.fit(
        nn.Linear(4, 2), (inputs, (inputs.sum(1) > 0).long()), budgets, run_folder=place, operator="Us", **how
    )
    return place


def line_of(folder: Path, person: str) -> Promise:
    return find_promise(folder, RunFolder(folder).read_plan(), person)


def text_of(folder: Path, person: str, account: Any = None, **said: str) -> str:
    page = letter(
        Letterhead.of(folder, said, written=DAY),
        line_of(folder, person),
        account,
    )
    return re.sub(r"\s+", " ", re.sub(r"<style>.*?</style>|<[^>]+>", " ", page, flags=re.DOTALL))


@given(st.floats(0, 30), st.floats(0, 1))
def test_the_odds_bound_the_best_test_of_the_two_outcomes_that_fit_the_promise_most_tightly(epsilon, delta):
    """Of all pairs under (epsilon, delta), randomized response that tells all with probability delta is the worst."""
    told = delta + (1 - delta) * math.exp(epsilon) / (
        1 + math.exp(epsilon)
    )  # right, if it tells, or by its answer
    assert times_right(epsilon, delta) >= 100 * min(1.0, told) - 1e-9
    assert times_right(epsilon, delta) <= 100 * told + 1 + 1e-9


def test_a_letter_says_what_was_allowed_done_and_can_be_told_at_most_in_odds(tmp_path):
    folder = train(
        tmp_path / "spring", [0.5] * 20 + [2.0] * 20, purpose="finding leaks", contact="a@example.org"
    )
    words = text_of(folder, "p3")
    assert "right at most 63 times out of 100" in words  # e^0.5 / (1 + e^0.5) is 62.2 %
    assert "right at most 89 times out of 100" in text_of(folder, "p25")
    for expected in ("finding leaks", "a@example.org", "Us", "2030-01-02", "1 in 100,000", "named spring"):
        assert expected in words
    assert "not for release" not in words
    assert "privacy@other" in text_of(folder, "p3", contact="privacy@other")


def test_nothing_of_anybody_else_moves_a_letter(tmp_path):
    """Another person's budget moves every rate and the noise, and another record the model: no byte of this letter."""
    folders = (
        train(tmp_path / "a" / "run", [0.5] * 10 + [2.0] * 10),
        train(tmp_path / "b" / "run", [0.5] * 10 + [2.0] * 9 + [0.7]),
        train(tmp_path / "c" / "run", [0.5] * 10 + [2.0] * 10, shift=3.0),
    )
    letters = {letter(Letterhead.of(each, written=DAY), line_of(each, "p4"), None) for each in folders}
    plans = {(each / "public" / "plan.json").read_text() for each in folders}
    assert len(letters) == 1
    assert len(plans) == 2


def test_who_is_not_used_is_told_so_and_who_asked_for_no_limit_too(tmp_path):
    folder = train(tmp_path / "run", [0.0, math.inf, *[1.0] * 18])
    assert "not used for it, because you allow nothing" in text_of(folder, "p0")
    assert "no limit" in text_of(folder, "p1")
    strict = train(tmp_path / "excluded", [0.1] + [2.0] * 19, mechanism="dp-sgd-exclude")
    assert "not used for it, because you allow less" in text_of(strict, "p0")


def test_a_letter_about_a_run_that_is_not_for_release_says_so(tmp_path):
    folder = train(tmp_path / "run", [1.0] * 20, seed=1)
    assert "must not be given to anybody" in text_of(folder, "p0")


def test_over_several_runs_a_letter_tells_all_of_them_and_what_they_reveal_together(tmp_path):
    ledger = pdpsgd.Ledger.create(tmp_path / "people.ledger")
    first = train(tmp_path / "january", [1.0] * 20 + [4.0] * 10, ledger=ledger)
    train(tmp_path / "february", [1.0] * 20 + [4.0] * 10, ledger=ledger)
    words = text_of(first, "p0", ledger.person("p0"))
    assert "january" in words
    assert "february" in words
    assert "right at most 74 times out of 100" in words  # what she allows, over all runs
    together = times_right(ledger.person("p0").spent_epsilon, 1e-5)
    assert f"From all of them together, anybody is right at most {together} times" in words
    assert 50 < together < 74
    ledger.consent(pdpsgd.Budgets([0.0], 1e-5, ids=["p0"]))
    lowered = text_of(first, "p0", ledger.person("p0"))
    assert "You allow nothing" in lowered
    assert "right at most 74 times out of 100, whatever they do" in lowered  # what held then goes on holding
    assert "cannot be called back" in lowered
    with ledger.accounts() as account:
        assert [account(f"p{i}") for i in range(30)] == [ledger.person(f"p{i}") for i in range(30)]


@given(st.text(max_size=300))
def test_every_id_has_a_file_name_that_any_system_accepts(person):
    name = file_name(person)
    assert re.fullmatch(r"[A-Za-z0-9._~%-]{1,120}", name)
    assert name.endswith(".html")
    assert name[0] != "."


@given(st.lists(st.text(alphabet="aA./% con1~-", max_size=6), unique=True, max_size=30))
def test_no_two_ids_share_a_file_name_even_where_case_is_ignored(people):
    names = {file_name(person).casefold() for person in people}
    assert len(names) == len(people)


@pytest.fixture(scope="module")
def odd_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("odd") / "run"
    train(place, [1.0] * 20)
    path = place / "people" / "promises.csv"
    rows = list(csv.reader(path.read_text().splitlines()))
    for row, name in zip(rows[1:], ("../../x", "a<b>&", "con", "Ann", "ann"), strict=False):
        row[0] = name
    with path.open("w", newline="") as file:
        csv.writer(file).writerows(rows)
    return place


def test_all_letters_are_written_under_safe_names_for_their_person_alone(odd_folder, tmp_path):
    told: list[int] = []
    count = write_letters(
        odd_folder, Letterhead.of(odd_folder), tmp_path / "all", lambda name: None, progress=told.append
    )
    files = sorted((tmp_path / "all").iterdir())
    assert count == len(files) == 20
    assert told == [20]
    assert all(file.stat().st_mode & 0o077 == 0 for file in (tmp_path / "all", *files))
    page = next(file for file in files if file.name.startswith("a%3C")).read_text()
    assert "a&lt;b&gt;&amp;" in page
    assert "a<b>" not in page
    for file in files:
        others = {f"p{i}" for i in range(5, 20)} - {file.stem}
        assert not others & set(re.findall(r"\bp\d+\b", file.read_text()))


def test_the_command_writes_one_letter_or_all_and_refuses_whom_it_does_not_know(odd_folder, tmp_path):
    def run(*arguments: object) -> Any:
        return CliRunner().invoke(app, ["report", str(odd_folder), *map(str, arguments)])

    done = run("--person", "p7", "--contact", "a@example.org")
    assert done.exit_code == 0, done.output
    assert "No contact" not in done.output
    assert "a@example.org" in (odd_folder / "people" / "letters" / "p7.html").read_text()
    done = run("--letters", tmp_path / "all", "--json", "-")
    assert done.exit_code == 0, done.output
    assert "No contact" in done.output
    assert len(list((tmp_path / "all").iterdir())) == 20
    for wrong, said in (
        (("--person", "nobody"), "'nobody'"),
        (("--person", "p7", "--letters", "x"), "Got both"),
        (("--letters", "p7"), "write --person p7"),
        (("--person", "p7", "--contact", "two\nlines"), "a line of text"),
        (("--person", "p7", "--ledger", "x"), "in none"),
    ):
        done = run(*wrong)
        assert done.exit_code == 2
        assert said in done.output


def test_a_run_of_a_ledger_has_letters_with_that_ledger_only(tmp_path):
    ledger = pdpsgd.Ledger.create(tmp_path / "people.ledger")
    folder = train(tmp_path / "run", [1.0] * 20, ledger=ledger)
    other = pdpsgd.Ledger.create(tmp_path / "other.ledger")
    for place, said in ((tmp_path / "none.ledger", "name it with --ledger"), (other.place, "another one")):
        done = CliRunner().invoke(app, ["report", str(folder), "--person", "p1", "--ledger", str(place)])
        assert done.exit_code == 2
        assert said in re.sub(r"\s+", " ", done.output)
    done = CliRunner().invoke(
        app, ["report", str(folder), "--letters", str(tmp_path / "all"), "--ledger", ledger.place]
    )
    assert done.exit_code == 0, done.output
    assert np.all(["An account is kept" in f.read_text() for f in (tmp_path / "all").iterdir()])
