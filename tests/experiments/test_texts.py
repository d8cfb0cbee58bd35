"""Texts: settings are chosen by trials at one epsilon, and the page shows tested runs of those alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from experiments.texts import FROZEN, LORA, TRIED, asked_for, chosen, page

OTHER = TRIED["lora"][1]


def line(part: str, split: str, times: float, accuracy: float, **settings: Any) -> str:
    asked = {**asked_for(part, times=times, seed=0, **settings), "split": split}
    return json.dumps({"asked": asked, "found": {"accuracy": accuracy, "per_sender": accuracy}}) + "\n"


def test_the_best_is_chosen_among_trials_at_one_epsilon(tmp_path: Path) -> None:
    record = tmp_path / "texts.jsonl"
    record.write_text(
        line("lora", "choice", 8.0, 0.6, **LORA)
        + line("lora", "choice", 8.0, 0.7, **OTHER)
        + line("lora", "choice", 64.0, 0.9, **LORA)
        + line("lora", "test", 8.0, 0.9, **LORA)
    )
    assert chosen("lora", record) == OTHER


def test_settings_are_chosen_at_the_multiple_that_they_are_for(tmp_path: Path) -> None:
    record = tmp_path / "texts.jsonl"
    first, second = TRIED["last-layer"][:2]
    record.write_text(
        line("last-layer", "choice", 64.0, 0.9, **first)
        + line("last-layer", "choice", 64.0, 0.8, **second)
        + line("last-layer", "choice", 8.0, 0.8, **first)
        + line("last-layer", "choice", 8.0, 0.9, **second)
    )
    assert chosen("last-layer", record, 8.0) == chosen("last-layer", record, 1.0) == second
    assert chosen("last-layer", record, 64.0) == chosen("last-layer", record, 512.0) == first


def test_the_page_shows_the_runs_of_chosen_settings_and_all_trials_of_adapters(tmp_path: Path) -> None:
    record = tmp_path / "texts.jsonl"
    record.write_text(
        line("frozen", "choice", 1.0, 0.8, **TRIED["frozen"][0])
        + line("frozen", "test", 1.0, 0.83, **TRIED["frozen"][0])
        + line("frozen-short", "choice", 1.0, 0.8, **TRIED["frozen-short"][1])
        + line("frozen-short", "test", 1.0, 0.81, **TRIED["frozen-short"][1])
        + line("frozen", "test", 1.0, 0.82, **FROZEN)
        + line("lora", "choice", 8.0, 0.6, **LORA)
        + line("lora", "choice", 1.0, 0.3, **OTHER)
        + line("lora", "test", 1.0, 0.5, **LORA)
        + line("lora", "test", 1.0, 0.99, **OTHER)
    )
    shown = page(record)
    assert "| **frozen, `pdp-sgd-exact`** | 1 / 2 / 3 | 83.0 | 83.0 | 1 |" in shown
    assert "| frozen, 64 tokens | 1 / 2 / 3 | 81.0 | 81.0 | 1 |" in shown
    assert "| adapters in all layers, 64 tokens | 1 / 2 / 3 | 50.0 | 50.0 | 1 |" in shown
    assert "82.0" not in shown
    assert "99.0" not in shown
    assert (
        "norm 19.6, clipping at 10, at most 1 of a sender's mails, 8 times the tiers' epsilons: 60.0 %"
        in shown
    )
    assert (
        "norm 1, clipping at 0.5, at most 1 of a sender's mails, the tiers' own epsilons: 30.0 % per mail"
        in shown
    )


def test_the_crossing_lies_between_two_measured_budgets_or_is_not_found(tmp_path: Path) -> None:
    def page_of(*pairs: tuple[float, float, float]) -> str:
        record = tmp_path / "texts.jsonl"
        chosen_by = line("frozen", "choice", 1.0, 0.8, **TRIED["frozen"][0])
        record.write_text(
            chosen_by
            + "".join(
                line(part, "test", times, accuracy, **TRIED[part][0])
                for times, frozen, adapted in pairs
                for part, accuracy in (("frozen-short", frozen), ("last-layer", adapted))
            )
        )
        return page(record)

    assert "per mail: not measured" in page_of()
    assert "per mail: nowhere up to 8 / 16 / 24; -2.0 points at 1 / 2 / 3" in page_of(
        (1.0, 0.9, 0.88), (8.0, 0.9, 0.89)
    )
    crossed = page_of((1.0, 0.9, 0.88), (8.0, 0.9, 0.89), (64.0, 0.9, 0.92), (512.0, 0.9, 0.93))
    assert "per mail: between 8 / 16 / 24 and 64 / 128 / 192;" in crossed
    assert "+2.0 points at 64 / 128 / 192; +3.0 points at 512 / 1024 / 1536" in crossed
    # Ahead once, and behind again further on: it is the last time that counts.
    twice = page_of((1.0, 0.9, 0.91), (8.0, 0.9, 0.89), (64.0, 0.9, 0.92))
    assert "per mail: between 8 / 16 / 24 and 64 / 128 / 192;" in twice
    assert "per mail: below 1 / 2 / 3, the smallest that was measured" in page_of((1.0, 0.9, 0.91))
