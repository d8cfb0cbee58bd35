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
