"""What is asked before a run starts, and that nothing is spent where nobody agreed."""

from __future__ import annotations

import random

import pytest

from tests.cli.test_like import SCHEMA, run, write


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "schema.toml").write_text(SCHEMA)
    write(tmp_path / "few.csv", 12, "few-")
    rng = random.Random(0)
    lines = [f"many-{n},{rng.randint(18, 80)},8,{rng.choice(('low', 'high'))}" for n in range(600)]
    (tmp_path / "many.csv").write_text("person,age,epsilon,income\n" + "\n".join(lines) + "\n")
    return tmp_path


def words(name):
    return ("train", f"{name}.csv", "--schema", "schema.toml", "--steps", 20)


@pytest.fixture
def terminal(monkeypatch):
    """Let the commands believe that somebody sits at a terminal, and answer for them."""
    asked = []

    def answer(said):
        monkeypatch.setattr("pdpsgd.cli.agreement._on_a_terminal", lambda: True)

        def confirm(question, **_):
            asked.append(question)
            if isinstance(said, bool):
                return said
            raise said

        monkeypatch.setattr("pdpsgd.cli.agreement.typer.confirm", confirm)
        return asked

    return answer


def test_a_guess_is_announced_before_anything_is_reserved(place):
    made = run(*words("few"))
    assert made.exit_code == 0, made.output
    said = " ".join(made.output.split())
    assert "hardly more than a guess" in said
    assert said.index("hardly more than a guess") < said.index("Run 1 in the ledger")


def test_whoever_declines_spends_nothing(place, terminal):
    asked = terminal(False)
    made = run(*words("few"))
    assert made.exit_code == 2
    assert "nothing was spent" in " ".join(made.output.split())
    assert len(asked) == 1
    assert "hardly more than a guess" in asked[0]
    assert not (place / "people.ledger").exists()
    assert not (place / "runs").exists() or not list((place / "runs").iterdir())


def test_whoever_agrees_trains(place, terminal):
    assert run(*words("few")).exit_code == 0  # without a terminal
    asked = terminal(True)
    assert run(*words("few")).exit_code == 0
    assert len(asked) == 1
    assert run(*words("few"), "--yes").exit_code == 0
    assert len(asked) == 1


def test_with_signal_enough_nobody_is_asked(place, terminal):
    asked = terminal(False)
    made = run(*words("many"), "--spend", "all")
    assert made.exit_code == 0, made.output
    assert asked == []
    assert "Expect" not in made.output


def test_a_result_that_will_not_be_for_release_is_announced_before_people_are_charged(place):
    unconfirmed = [word for word in words("many") if word not in ("--schema", "schema.toml")]
    made = run(*unconfirmed, "--label", "income", "--id-column", "person", "--spend", "all", "--seed", 3)
    assert made.exit_code == 0, made.output
    said = " ".join(made.output.split())
    warned = said.index("The result will not be for release: ranges, categories or classes were read")
    assert "samples and noise come from a seed" in said
    assert warned < said.index("Run 1 in the ledger")


def test_an_ordinary_run_is_not_warned_of(place):
    made = run(*words("many"), "--spend", "all")
    assert made.exit_code == 0, made.output
    assert "Warning" not in made.output


def test_a_prompt_without_an_answer_ends_with_a_sentence(place, terminal):
    import typer

    terminal(typer.Abort())
    made = run(*words("many"), "--test-share", 0.2)
    assert made.exit_code == 2
    assert "--yes" in made.output
    assert "Aborted" not in made.output
    assert not (place / "people.ledger").exists()


def test_without_a_terminal_test_people_need_yes(place):
    made = run(*words("many"), "--test-share", 0.2)
    assert made.exit_code == 2
    assert "Expected --yes" in " ".join(made.output.split())
