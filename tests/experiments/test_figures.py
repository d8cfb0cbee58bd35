"""Figures say what they show: whose plan, how many steps and seeds, and what lies outside; a page shows them all."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from experiments import figures, figures_page
from experiments.published import TABLE_2
from experiments.record import Record
from experiments.search import GRIDS, recipe_for, trials
from experiments.settings import Population, Setting
from experiments.studies import W1, weight_settings
from experiments.systems import plan_of


def made_up(setting: Setting, seed: int, accuracy: float) -> dict[str, object]:
    """A record of a run that never was."""
    return {
        "key": setting.key(seed),
        "setting": setting.to_dict(),
        "seed": seed,
        "accuracy": accuracy,
        "iterations": 300,
        "seconds": 1.0,
        "parameters": 1,
        "levels": [],
    }


def records(folder: Path, accuracies: dict[float, tuple[float, ...]]) -> tuple[Record, Record]:
    """Records of a sweep over w1: accuracies of the seeds at each of them."""
    search, record = Record(folder / "search.jsonl"), Record(folder / "runs.jsonl")
    for setting in trials("mnist", "pdp-sgd-fixed"):
        search.add(made_up(setting, 0, 0.9))
    for setting in weight_settings("mnist", search):
        assert setting.weights is not None
        for seed, accuracy in enumerate(accuracies.get(setting.weights[0], ())):
            record.add(made_up(setting, seed, accuracy))
    return search, record


def points(*accuracies: float, spread: float = 0.0, seeds: int = 1) -> list[dict[str, Any]]:
    """Points of a sweep over w1."""
    return [
        {"w1": w1, "series": "ours", "accuracy": a, "low": a - spread, "high": a + spread, "seeds": seeds}
        for w1, a in zip(W1, accuracies, strict=False)
    ]


def subtitle(chart: Any) -> str:
    """What stands under the title of a chart."""
    return " ".join(chart.to_dict()["title"]["subtitle"])


def bars(chart: Any, strip: int, side: int) -> list[dict[str, Any]]:
    """The bars of one side (0: left, 1: chance) of a round."""
    plain = chart.to_dict()
    rows: list[dict[str, Any]] = plain["datasets"][plain["vconcat"][strip]["hconcat"][side]["data"]["name"]]
    return rows


def test_rounds_as_published_say_that_they_are_not_the_runs_of_table_1() -> None:
    chart = figures.rounds_as_published("adapdp")
    said = subtitle(chart)
    assert f"{TABLE_2['pdp-sgd'].iterations:,} steps planned in 10 rounds" in said
    assert "the first 5 are shown" in said
    assert len(chart.to_dict()["vconcat"]) == 5
    assert (
        "Not the runs of table 1 as published: they have noise 1.3 throughout and end after round 2" in said
    )
    assert "only its caption is at hand" in said


def test_sound_rounds_are_the_plan_of_table_1_and_say_its_steps() -> None:
    recipe = recipe_for("adapdp", GRIDS["mnist", "pixels"][0])
    setting = Setting("mnist", "adapdp", recipe, Population())
    made = plan_of(setting, setting.population.budgets(figures.PEOPLE, shuffle=0), seed=0)
    chart = figures.rounds_sound("adapdp")
    assert f"{made.steps} steps in {len(made.rounds)} rounds" in subtitle(chart)
    assert len(chart.to_dict()["vconcat"]) == len(made.rounds)


def test_bars_stand_at_the_levels_without_gaps() -> None:
    chart = figures.rounds_sound("pdp-sgd-fixed")
    left = [bar["left"] for bar in bars(chart, 0, 0)]
    assert left == pytest.approx(np.linspace(0.5, 1.0, 20), abs=1e-3)
    assert sum(bar["people"] for bar in bars(chart, 0, 0)) == figures.PEOPLE
    assert sum(bar["people"] for bar in bars(chart, 0, 1)) == figures.PEOPLE


def test_a_collapsed_run_is_named_and_does_not_stretch_the_axis() -> None:
    chart = figures.weights(points(94.8, 28.13, 88.2, 95.2, 96.5, 96.6, 96.4))
    assert "Below the axis: w1 = 0.4, 28.1." in subtitle(chart)
    assert "1 seed a point." in subtitle(chart)
    assert chart.to_dict()["layer"][0]["encoding"]["y"]["scale"]["domain"] == [87, 97]


def test_a_sweep_whose_points_are_alike_leaves_nothing_outside() -> None:
    chart = figures.weights(points(94.0, 95.0, 96.0, spread=0.2, seeds=3))
    assert "3 seeds a point. Bars: standard deviation." in subtitle(chart)
    assert "axis" not in subtitle(chart)


def test_a_bar_that_goes_below_the_axis_is_named() -> None:
    chart = figures.weights([*points(95.0, 95.0, 95.0), *points(90.0, spread=20.0)])
    assert "Bars cut off at the axis: w1 = 0.3, 90.0 ± 20.0." in subtitle(chart)


def test_seeds_and_deviations_come_from_the_records(tmp_path: Path) -> None:
    search, record = records(tmp_path, {0.3: (0.95,), 0.7: (0.96, 0.97)})
    found = figures.weight_points(search, record)
    assert [(p["w1"], p["seeds"]) for p in found] == [(0.3, 1), (0.7, 2)]
    assert [p["high"] - p["low"] for p in found] == pytest.approx([0.0, 2 * 0.7071], abs=1e-3)
    assert "1 to 2 seeds a point" in subtitle(figures.weights(found))


def test_the_page_shows_every_figure_that_is_there_and_the_papers_point(tmp_path: Path) -> None:
    search, record = records(tmp_path, {0.3: (0.95,), 0.7: (0.96, 0.97)})
    figures_page.write_figures("distributions", search, record, tmp_path)
    written = figures_page.write_figures("weights", search, record, tmp_path)
    assert written[-1] == tmp_path / "figures.md"
    text = written[-1].read_text(encoding="utf-8")
    shown = re.findall(r"!\[(.+)\]\((.+)\)", text)
    assert [link for _, link in shown] == ["figures/epsilon-distributions.png", "figures/weights-mnist.png"]
    assert all((tmp_path / link).exists() for _, link in shown)
    assert "| 0.7 | 96.50 ± 0.71 (2) | 300 | 95.19 ± 0.27 (pdp-sgd-fixed) |" in text
    assert "its curves could not be read" in text


def test_every_figure_has_a_place_on_the_page() -> None:
    names = [name for *_, shown in figures_page.SECTIONS for name in shown]
    with_rounds = [
        f"rounds-{kind}-{m}" for kind in ("as-published", "sound") for m in figures.WITH_THRESHOLDS
    ]
    assert sorted(names) == sorted(
        [*with_rounds, "epsilon-distributions", "weights-mnist", "intervals-mnist"]
    )


def test_without_records_there_is_no_sweep_and_no_page(tmp_path: Path) -> None:
    search, record = Record(tmp_path / "a"), Record(tmp_path / "b")
    for what in ("weights", "intervals", "table-1"):
        assert figures_page.write_figures(what, search, record, tmp_path) == []
