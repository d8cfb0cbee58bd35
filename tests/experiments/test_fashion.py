"""What was tried for Fashion-MNIST is told from the trials on record, and nothing without them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from experiments.fashion import LONG, OTHERS, SHORT, tried_for_fashion
from experiments.record import Record
from experiments.settings import Recipe, Setting


def trial(recipe: Recipe, accuracy: float) -> dict[str, object]:
    setting = Setting("fashion-mnist", "pdp-sgd-exact", recipe, split="validation")
    return {"setting": setting.to_dict(), "seed": 0, "accuracy": accuracy}


def test_trials_are_told_by_what_is_different_about_them(tmp_path: Path) -> None:
    search = Record(tmp_path / "search.jsonl")
    search.add(trial(LONG, 0.8))
    assert tried_for_fashion(search) == []
    search.add(trial(replace(SHORT, start="processes"), 0.7))
    search.add(trial(OTHERS["tanh"], 0.6))
    (text,) = tried_for_fashion(search)
    assert "processes at 300 steps 70.00" in text
    assert "random at 1,000 steps 80.00" in text
    assert "one trial each: tanh 60.00." in text


def test_all_that_the_page_lists_is_on_record() -> None:
    (text,) = tried_for_fashion(Record(Path(__file__).parents[2] / "docs" / "results" / "search.jsonl"))
    assert all(f"{name} 8" in text for name in OTHERS)
