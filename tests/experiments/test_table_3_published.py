"""The section on the published accounting is made from its record alone, and says what the counts follow from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from experiments.table_3_published import RECORD, published_section


def made_up(labels: int, **other: Any) -> dict[str, Any]:
    """A run that never was."""
    charged = {
        "labels": labels,
        "label_accuracy": 0.9,
        "accuracy": 0.8,
        "own": [0.9, 2.5, 2.0],
        "exact": [1.0, 2.0, 3.5],
    }
    run = {"dataset": "mnist", "case": "34/43/23", "seed": 0, "sound_answers": 100}
    return {**run, "by-rank": charged, "own": charged, **other}


def section(folder: Path, *runs: dict[str, Any]) -> str:
    (folder / RECORD).write_text("".join(json.dumps(run) + "\n" for run in runs))
    return "\n".join(published_section(folder))


def test_a_run_that_does_not_name_its_ridge_has_the_usual_one(tmp_path: Path) -> None:
    alone = section(tmp_path, made_up(900))
    named = section(tmp_path, made_up(900, ridge=1.0))
    assert alone == named
    assert (
        "| by rank, as the public code | 900 | 100 | 0.90 / **2.50** / 2.00 | 1.00 / 2.00 / **3.50** |"
        in alone
    )
    assert "regularized less" not in alone


def test_other_teachers_are_no_row_but_a_line_below_the_table(tmp_path: Path) -> None:
    other = made_up(1000, ridge=0.1)
    for charge in ("by-rank", "own"):
        other[charge] = {**other[charge], "labels_by_other_noise": [950, 1050]}
    text = section(tmp_path, made_up(900), other)
    assert text.count("| by rank, as the public code |") == 1
    assert "1,000 labels by rank and 1,000 each its own, in place of 900 and 900" in text
    assert "By rank 950 to 1,050, by seed and noise." in text
