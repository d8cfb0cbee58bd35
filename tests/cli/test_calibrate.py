"""`train --calibrate`: people of the list are refused, however ids are written; others are taken without a word."""

from __future__ import annotations

import pytest

TRAIN = (
    "train", "t.csv", "--label", "y", "--id-column", "person", "--steps", "20", "--batch-size", "10",
    "--no-ledger", "--quiet", "--no-report", "--run-folder", "r",
)  # fmt: skip


def table(rows) -> str:
    return (
        "\n".join(["person,x,y,epsilon", *(f"{who},{i % 7},{'ab'[i % 2]},2" for i, who in enumerate(rows))])
        + "\n"
    )


@pytest.mark.parametrize(("others", "code"), [(["7", "x1"], 2), (["107", "x1", "x2", "x3"], 0)])
def test_people_of_the_list_are_not_calibrated_on(run, tmp_path, others, code) -> None:
    (tmp_path / "t.csv").write_text(table(range(60)))
    (tmp_path / "others.csv").write_text(table(others))  # one id that is no number makes all of them text
    result = run(*TRAIN, "--calibrate", "others.csv", "--yes")
    assert result.exit_code == code, result.output
    said = " ".join(result.output.split())
    assert ("in others.csv and on the list" in said) == (code == 2)


ONE_EACH = tuple(
    "--one-row-per-person" if each == "person" else each for each in TRAIN if each != "--id-column"
)


def rows_without_ids(start: int, stop: int) -> str:
    return "x,z,y,epsilon\n" + "".join(
        f"{i * 37 % 101},{i * i % 97},{'ab'[i % 2]},2\n" for i in range(start, stop)
    )


@pytest.mark.parametrize("option", ["--calibrate", "--test-file"])
@pytest.mark.parametrize("which", ["same", "linked", "copied"])
def test_a_file_without_ids_that_is_trained_on_is_refused(run, tmp_path, option, which) -> None:
    (tmp_path / "t.csv").write_text(rows_without_ids(0, 60))
    others = tmp_path / ("t.csv" if which == "same" else "o.csv")
    if which == "linked":
        others.symlink_to(tmp_path / "t.csv")
    if which == "copied":
        others.write_text(rows_without_ids(20, 60))
    result = run(*ONE_EACH, option, others.name, "--yes")
    assert result.exit_code == 2, result.output
    assert "Expected other people to" in " ".join(result.output.split())
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize("option", ["--calibrate", "--test-file"])
def test_a_file_of_other_people_without_ids_is_taken(run, tmp_path, option) -> None:
    (tmp_path / "t.csv").write_text(rows_without_ids(0, 60))
    (tmp_path / "o.csv").write_text(rows_without_ids(60, 100))
    result = run(*ONE_EACH, option, "o.csv", "--yes")
    assert result.exit_code == 0, result.output
