"""`pdpsgd pate`: a run as any other, from people's files and public examples; without these it says what it needs."""

from __future__ import annotations

import json

import numpy as np
import pytest

import pdpsgd
from pdpsgd.data.benchmarks import load
from pdpsgd.ledger import Ledger
from pdpsgd.training.predict import load_run

TIERS = ("--tiers", "4:0.5,8:0.5", "--teachers", "100", "--quiet")


def own_files(folder) -> None:
    """Digits as somebody's own images, their list, and images of nobody."""
    digits = load("digits")
    inputs, targets = digits.train_inputs.numpy(), digits.train_targets.numpy()
    ids = np.array([f"p{i}" for i in range(1000)])
    np.savez(
        folder / "images.npz",
        inputs=inputs[:990],
        targets=targets[:990],
        ids=ids[:990],
        test_inputs=digits.test_inputs.numpy(),
        test_targets=digits.test_targets.numpy(),
        classes=np.array([str(i) for i in range(10)]),
    )
    np.savez(folder / "public.npz", inputs=inputs[1000:])
    rows = [f"{name},{16 if i % 2 else 32}" for i, name in enumerate(ids)]
    (folder / "people.csv").write_text("\n".join(["person,epsilon", *rows]) + "\n")


def test_a_run_leaves_the_folder_of_any_run_and_a_student_that_predicts(run, tmp_path) -> None:
    result = run("pate", "digits", *TIERS, "--public", "last:400", "--run-folder", "r", "--json", "r.json")
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "r.json").read_text())
    assert "The promise holds for all 1,037 people" in json.dumps(found["verdict"])
    assert found["evaluation"]["accuracy"] > 0.5  # not seeded: 0.8 was seen, guessing has 0.1
    pdpsgd.Plan.read(tmp_path / "r/public/plan.json").verify()
    settings = json.loads((tmp_path / "r/public/settings.json").read_text())
    assert settings["answered"] <= settings["answers"]
    digits = load("digits")
    predicted = pdpsgd.load_run(tmp_path / "r").predict(digits.test_inputs.numpy())
    accuracy = np.mean(np.asarray(predicted).astype(int) == digits.test_targets.numpy())
    assert accuracy == pytest.approx(found["evaluation"]["accuracy"])
    assert not list((tmp_path / "r").glob("private/*votes*"))


def test_own_images_are_charged_to_the_ledger_also_for_people_without_a_record(run, tmp_path) -> None:
    own_files(tmp_path)
    options = (
        "--budgets",
        "people.csv",
        "--id-column",
        "person",
        "--teachers",
        "100",
        "--spend",
        "all",
        "--quiet",
    )
    result = run("pate", "images.npz", *options, "--public", "public.npz", "--run-folder", "r")
    assert result.exit_code == 0, result.output
    (only,) = Ledger(tmp_path / "people.ledger").runs()
    assert only.state == "finished"
    assert "The promise holds for all 1,000 people" in (tmp_path / "r/public/result.json").read_text()
    assert not Ledger(tmp_path / "people.ledger").check().problems


def test_a_vote_of_few_labels_is_warned_of_before_anybody_is_charged(run, tmp_path, monkeypatch) -> None:
    own_files(tmp_path)
    options = ("--budgets", "people.csv", "--id-column", "person", "--quiet", "--public", "public.npz")
    said = []

    def stop(message: str) -> None:
        said.append(message)
        raise KeyboardInterrupt

    monkeypatch.setattr("pdpsgd.cli.agreement.say_warning", stop)
    monkeypatch.setattr("pdpsgd.cli.pate.warn_of_release", lambda *_, **__: None)
    for more, message in (
        (("--teachers", "10"), "Expect hardly more than a guess: these people allow"),
        (("--teachers", "20"), "Expect a rough model at best: these people allow"),
        (("--teachers", "250"), "each of 250 teachers has 4 people to learn 10 classes from"),
    ):
        result = run("pate", "images.npz", *options, *more, "--run-folder", "r")
        assert result.exit_code == 130
        assert message in said.pop()
        assert not (tmp_path / "people.ledger").exists()
        assert not (tmp_path / "r").exists()


def test_a_vote_that_budgets_do_not_allow_enrolls_nobody_and_makes_no_ledger(run, tmp_path) -> None:
    own_files(tmp_path)
    options = ("--budgets", "people.csv", "--id-column", "person", "--teachers", "2", "--quiet")
    result = run("pate", "images.npz", *options, "--public", "public.npz", "--run-folder", "r")
    assert result.exit_code == 2
    assert "Expected budgets that allow at least one answer" in result.output
    assert not (tmp_path / "people.ledger").exists()
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "Expected --public: examples like people's"),
        (("--public", "last:0"), "Expected --public last:N with N from 1 to 1436. Got 'last:0'"),
        (("--public", "last:400", "--mechanism", "votes"), "i-pate-upsample"),
        (("--public", "last:400", "--weights", "age"), "epsilon-times-share"),
        (("--public", "nowhere.npz"), "nowhere.npz"),
    ],
)
def test_what_is_refused_leaves_nothing_behind(run, tmp_path, options, message) -> None:
    result = run("pate", "digits", *TIERS, *options, "--run-folder", "r")
    assert result.exit_code == 2
    assert message in result.output
    assert not (tmp_path / "r").exists()


def test_people_of_the_list_are_no_public_examples(run, tmp_path) -> None:
    own_files(tmp_path)
    listed = ("--budgets", "people.csv", "--id-column", "person", "--yes", "--no-ledger")
    result = run("pate", "images.npz", *listed, "--public", "images.npz", "--teachers", "100")
    assert result.exit_code == 2
    assert "Got --public images.npz: people's own records" in " ".join(result.output.split())
    rows = [f"{i},{i % 7},{i % 2}" for i in range(40)]
    (tmp_path / "t.csv").write_text("\n".join(["person,x,y", *rows]) + "\n")
    (tmp_path / "b.csv").write_text("\n".join(["person,epsilon", *(f"{i},20" for i in range(40))]) + "\n")
    (tmp_path / "p.csv").write_text(
        "\n".join(["person,x", "7,3", "x1,2"]) + "\n"
    )  # one id makes all of them text
    table = ("pate", "t.csv", "--label", "y", "--id-column", "person", "--budgets", "b.csv", "--yes")
    result = run(*table, "--no-ledger", "--public", "p.csv", "--teachers", "5")
    assert result.exit_code == 2
    assert "Got '7' in p.csv and on the list" in " ".join(result.output.split())


def test_the_published_accounting_is_shown_on_a_benchmark_and_leaves_nothing(run, tmp_path) -> None:
    options = ("--tiers", "4:0.54,8:0.37,12:0.09", "--teachers", "100", "--public", "last:400", "--seed", "0")
    published = ("--bookkeeping", "as-published")
    result = run("pate", "digits", *options, *published, "--json", "shown.json")
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "shown.json").read_text())
    assert "no promise" in found["not_for_release"]
    assert found["by-rank"]["labels"] > found["own"]["labels"]
    assert found["by-rank"]["own"][0] > 4, "the first level spends more than it allows"
    assert all(spent <= allowed for spent, allowed in zip(found["own"]["own"], (4, 8, 12), strict=True))
    assert [path.name for path in tmp_path.iterdir()] == ["shown.json"]
    for refused in (("--mechanism", "pate"), ("--run-folder", "r")):
        result = run("pate", "digits", *options, *published, *refused)
        assert result.exit_code == 2
        assert "promises nobody anything" in " ".join(result.output.split())


def test_the_published_accounting_is_refused_for_own_data(run, tmp_path) -> None:
    own_files(tmp_path)
    files = ("--budgets", "people.csv", "--id-column", "person", "--public", "public.npz")
    result = run("pate", "images.npz", *files, "--bookkeeping", "as-published")
    assert result.exit_code == 2
    assert "Expected a benchmark" in " ".join(result.output.split())


def test_teachers_and_student_may_be_a_built_in_network(run, tmp_path) -> None:
    options = ("--public", "last:400", "--model", "digits", "--no-spread", "--run-folder", "r")
    tiers = ("--tiers", "16:0.5,32:0.5", "--teachers", "40", "--quiet")
    result = run("pate", "digits", *tiers, *options)
    assert result.exit_code == 0, result.output
    assert json.loads((tmp_path / "r" / "public" / "settings.json").read_text())["model"] == "digits"
    loaded = load_run(tmp_path / "r")
    assert sum(parameter.numel() for parameter in loaded.network.parameters()) == 2410
    result = run("pate", "digits", *tiers, "--public", "last:400", "--model", "mnist-cnn")
    assert result.exit_code == 2
    assert "mnist-cnn" in result.output
