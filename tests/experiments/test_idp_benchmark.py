"""IDP-SGD's benchmark: uniform DP-SGD stands for excluding only where excluding leaves out nobody."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from experiments.idp_page import idp_benchmark
from experiments.published import IDP_CASES
from experiments.record import Record
from experiments.search import GRIDS
from experiments.settings import Population, Recipe, Setting


def run(system: str, case: str, accuracy: float) -> dict[str, Any]:
    recipe, (rate,) = GRIDS["svhn", "idp"]
    people = Population(tiers=IDP_CASES[case])
    setting = Setting("svhn", system, replace(recipe, learning_rate=rate), people)
    made = {"iterations": 64, "seconds": 1.0, "parameters": 550_570, "levels": []}
    return {"setting": setting.to_dict(), "seed": 0, "accuracy": accuracy, **made}


def page(tmp_path: Path, *runs: dict[str, Any]) -> list[str]:
    record = Record(tmp_path / "runs.jsonl")
    for each in runs:
        record.add(each)
    return idp_benchmark(Record(tmp_path / "search.jsonl"), record).markdown.splitlines()


def test_where_excluding_leaves_people_out_it_is_a_row_of_its_own(tmp_path: Path) -> None:
    lines = page(tmp_path, run("pdp-sgd-exact", "34/43/23", 0.9), run("dp-sgd", "34/43/23", 0.8))
    row = next(line for line in lines if line.startswith("| SVHN | 34/43/23 | IDP-SGD's"))
    assert row.split(" | ")[3:6] == ["90.00 (1)", "80.00 (1)", "–"]
    gain = next(line for line in lines if line.startswith("- SVHN, 34/43/23, IDP-SGD's"))
    assert gain.endswith("+10.00 over dp-sgd.")


def test_where_it_leaves_out_nobody_it_is_uniform(tmp_path: Path) -> None:
    lines = page(tmp_path, run("pdp-sgd-exact", "54/37/9", 0.9), run("dp-sgd", "34/43/23", 0.8))
    row = next(line for line in lines if line.startswith("| SVHN | 54/37/9 | IDP-SGD's"))
    assert row.split(" | ")[3:6] == ["90.00 (1)", "80.00 (1)", "80.00 (1)"]
    gain = next(line for line in lines if line.startswith("- SVHN, 54/37/9, IDP-SGD's"))
    assert gain.endswith("(excluding leaves out nobody, and is dp-sgd).")


def test_what_was_tried_before_is_told_from_the_record(tmp_path: Path) -> None:
    search, record = Record(tmp_path / "search.jsonl"), Record(tmp_path / "runs.jsonl")
    recipe = Recipe(steps=200, network="idp", learning_rate=4.0)
    trial = Setting("svhn", "pdp-sgd-exact", recipe, split="validation")
    search.add({"setting": trial.to_dict(), "seed": 0, "accuracy": 0.7})
    text = idp_benchmark(search, record).markdown
    assert "200 steps of 1,024 at rate 4 from random weights, 70.00 %. The number" in text
    record.add({**run("pdp-sgd-exact", "34/43/23", 0.9)})
    assert idp_benchmark(search, record).markdown.count("on the test people") == 0
    other = {**run("pdp-sgd-exact", "34/43/23", 0.8)}
    other["setting"]["recipe"]["steps"] = 64
    record.add(other)
    text = idp_benchmark(search, record).markdown
    assert (
        "then, on the test people, 64 steps of 2,048 at rate 4 from drawn weights, 80.00 %. The number"
        in text
    )
