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


def test_the_page_shows_the_runs_of_chosen_settings_and_all_trials_of_adapters(tmp_path: Path) -> None:
    record = tmp_path / "texts.jsonl"
    record.write_text(
        line("frozen", "choice", 1.0, 0.8, **TRIED["frozen"][0])
        + line("frozen-short", "test", 1.0, 0.81, **TRIED["frozen"][0])
        + line("frozen", "test", 1.0, 0.82, **FROZEN)
        + line("lora", "choice", 8.0, 0.6, **LORA)
        + line("lora", "choice", 1.0, 0.3, **OTHER)
        + line("lora", "test", 1.0, 0.5, **LORA)
        + line("lora", "test", 1.0, 0.99, **OTHER)
    )
    shown = page(record)
    assert "| frozen, 64 tokens, `pdp-sgd-exact` | 1 / 2 / 3 | 81.0 | 81.0 | 1 |" in shown
    assert "| **adapters, 64 tokens, `pdp-sgd-exact`** | 1 / 2 / 3 | 50.0 | 50.0 | 1 |" in shown
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
