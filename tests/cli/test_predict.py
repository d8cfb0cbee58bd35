"""`pdpsgd predict`: rows in, a file with answers out, whole or not at all."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from pdpsgd.training.start import find_start


@pytest.fixture
def trained(run: Any, people: Path) -> Path:
    result = run(
        "train", people, "--label", "income", "--id-column", "person", "--steps", 3, "--batch-size", 20,
        "--run-folder", "a", "--quiet", "--no-report",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    return Path("a")


def test_rows_are_scored_in_parts_and_remarks_are_said(run, trained, people):
    rows = pl.read_csv(people).select("age", "job").with_columns(job=pl.lit("baker"), more=1)
    rows.write_csv("rows.csv")
    result = run(
        "predict", trained, "rows.csv", "-o", "out/scored.csv", "--rows-at-once", 50, "--json", "s.json"
    )
    assert result.exit_code == 0, result.output
    assert (
        "Neither the model nor its answers are for release. Ranges," in result.output
    )  # its schema was read from the data
    assert "'job' in 120 of 120 rows (such as 'baker' in 'job')" in result.output
    assert "does not look at: 'more'" in result.output
    scored = pl.read_csv("out/scored.csv")
    assert scored.columns == ["age", "job", "more", "predicted_income", "probability_high", "probability_low"]
    assert len(scored) == 120
    assert json.loads(Path("s.json").read_text())["unknown"] == {"job": 120}
    again = run(
        "predict", trained, "rows.csv", "-o", "scored.parquet", "--rows-at-once", 7, "--columns", "age"
    )
    assert again.exit_code == 0, again.output
    parquet = pl.read_parquet("scored.parquet")
    assert parquet["predicted_income"].to_list() == scored["predicted_income"].to_list()
    assert parquet.columns == ["age", *scored.columns[3:]]
    np.testing.assert_allclose(parquet["probability_low"], scored["probability_low"], rtol=1e-5)
    screen = run("predict", trained, "rows.csv", "--columns", "none", "--quiet")
    assert screen.stdout.splitlines()[0] == "predicted_income,probability_high,probability_low"
    assert len(screen.stdout.splitlines()) == 121


@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_nothing_half_written_stays_behind(run, trained, ending):
    lines = ["age,job", *["40,nurse"] * 30, "old,nurse"]
    Path("rows.csv").write_text("\n".join(lines) + "\n")
    result = run("predict", trained, "rows.csv", "-o", f"out/scored.{ending}", "--rows-at-once", 10)
    assert result.exit_code == 2
    assert "rows.csv, row 32. Got 'old'" in result.output
    assert list(Path("out").iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["rows.csv", "-o", "scored.txt"], "Expected --output to end in .csv, .parquet"),
        (["nothing.csv", "-o", "scored.csv"], "There is no such file"),
        (["rows.csv", "-o", "s.csv", "--columns", "weight"], "Got 'weight'"),
        (["rows.txt", "-o", "s.csv"], "ends in .csv or .parquet"),
        (["rows.csv", "--json", "-"], "both would go to the screen"),
        (["rows.csv", "-o", "s.csv", "--model", "not_there:f"], "'not_there:f'"),
    ],
)
def test_what_cannot_be_used_is_refused(run, trained, arguments, message):
    Path("rows.csv").write_text("age,job\n40,nurse\n")
    result = run("predict", trained, *arguments)
    assert result.exit_code == 2
    assert message in result.output
    assert not Path("s.csv").exists()


def test_images_are_scored_by_file(run, tmp_path):
    pytest.importorskip("PIL", reason="pillow is not installed")
    from PIL import Image

    rng = np.random.default_rng(1)
    for name in ("cat", "dog"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for number in range(15):
            pixels = rng.integers(0, 256, (9, 9, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "photos" / name / f"{number}.png")
    trained = run(
        "train", "photos", "--tiers", "2:1", "--image-size", 8, "--steps", 2, "--batch-size", 10, "--no-ledger",
        "--run-folder", "a", "--quiet", "--no-report",
    )  # fmt: skip
    assert trained.exit_code == 0, trained.output
    result = run("predict", "a", "photos/dog", "-o", "scored.csv", "--rows-at-once", 4)
    assert result.exit_code == 0, result.output
    scored = pl.read_csv("scored.csv")
    assert scored.columns == ["file", "predicted", "probability_cat", "probability_dog"]
    assert scored["file"].to_list() == sorted(f"{n}.png" for n in range(15))
    alone = run("predict", "a", "photos/dog/3.png", "-o", "one.csv")
    assert alone.exit_code == 0, alone.output
    one = pl.read_csv("one.csv").row(0)
    expected = next(row for row in scored.iter_rows() if row[0] == "3.png")
    assert one[:2] == expected[:2]
    assert one[2:] == pytest.approx(expected[2:], rel=1e-4)  # in float32, among four and alone


NOTE = "Neither the model nor its answers are for release."


def test_what_speaks_against_a_model_is_said_wherever_its_files_were_copied(run, people):
    draft = ["data", "schema", people, "--label", "income", "--id-column", "person", "-o", "schema.toml"]
    assert run(*draft).exit_code == 0
    text = Path("schema.toml").read_text()
    Path("schema.toml").write_text(text.replace("confirmed = false", "confirmed = true"))
    train = [
        "train",
        people,
        "--schema",
        "schema.toml",
        "--steps",
        3,
        "--batch-size",
        20,
        "--no-report",
        "--quiet",
    ]
    for name, more in {"seeded": ["--seed", 3], "sound": []}.items():
        assert run(*train, "--run-folder", name, *more).exit_code == 0
        shutil.copytree(f"{name}/public", f"copy-{name}")
        shutil.copy(f"{name}/public/model.safetensors", f"{name}.safetensors")
    shutil.copytree("sound", "mixed")  # with another run's weights
    shutil.copy("seeded.safetensors", "mixed/public/model.safetensors")
    for place in ("seeded", "copy-seeded", "seeded.safetensors", "mixed"):
        said = run("predict", place, people, "-o", "out.csv").output
        assert NOTE in said, place
        assert "Samples and noise come from a seed" in said, place
        assert "Samples and noise come from a seed" in str(find_start(place).not_for_release), place
    for place in ("sound", "copy-sound", "sound.safetensors"):
        assert "release" not in run("predict", place, people, "-o", "out.csv").output, place
        assert find_start(place).not_for_release is None, place
