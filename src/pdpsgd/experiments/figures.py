"""The figures, as PNG and SVG: two that need no training, and two sweeps made from records."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import altair as alt
import numpy as np
import polars as pl

from pdpsgd.accounting import accountant
from pdpsgd.budgets import Budgets
from pdpsgd.experiments.published import PAPERS_EPSILON_CONSTANTS, SKEWS, TABLE_1, TABLE_2
from pdpsgd.experiments.settings import PAPERS_RECIPE, Population, Recipe, Setting
from pdpsgd.experiments.systems import plan_of
from pdpsgd.plans import Plan
from pdpsgd.theorems import participation_for

OURS, THE_PAPERS = "#1f6f8b", "#c8553d"
PEOPLE = 60_000
SHOWN_ROUNDS = 5


def save_chart(chart: Any, folder: Path, name: str) -> list[Path]:
    """Write a chart as PNG and SVG."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{name}.png", folder / f"{name}.svg"]
    styled = chart.configure_axis(grid=True, gridColor="#eeeeee").configure_view(strokeWidth=0)
    styled.save(str(paths[0]), scale_factor=2)
    styled.save(str(paths[1]))
    return paths


def distributions() -> Any:
    """How many people allow which epsilon, for the paper's three skews (its figure "skew")."""
    rows = []
    for k in SKEWS:
        epsilons, people = np.unique(Budgets.exponential(PEOPLE, k=k).epsilon, return_counts=True)
        c1, c2 = PAPERS_EPSILON_CONSTANTS.get(k, (1 / len(epsilons), 0.0))
        as_printed = PEOPLE * (c1 * np.exp(k * epsilons) + c2)
        rows += [
            {"k": f"k = {k:g}", "epsilon": round(float(e), 4), "people": int(n), "as printed": float(p)}
            for e, n, p in zip(epsilons, people, as_printed, strict=True)
        ]
    base = alt.Chart(pl.DataFrame(rows))
    x = alt.X("epsilon:Q", title="epsilon a person allows", scale=alt.Scale(domain=[0.48, 1.02]))
    bars = base.mark_bar(color=OURS, size=8).encode(x, alt.Y("people:Q", title="people of 60,000"))
    printed = base.mark_point(color=THE_PAPERS, size=18, filled=True).encode(x, alt.Y("as printed:Q"))
    return (
        (bars + printed)
        .properties(width=210, height=150)
        .facet(alt.Column("k:N", title=None, sort=[f"k = {k:g}" for k in SKEWS]))
        .properties(
            title=alt.Title(
                "Who allows what",
                subtitle=[
                    "Bars: as used here. Dots: the formula with the constants as the paper prints them,",
                    "which for k = -0.2 and 0.2 counts 1.83 times as many people as there are.",
                ],
                anchor="start",
            )
        )
    )


def rounds_as_published(mechanism: str, *, seed: int = 0) -> Any:
    """What people have left and how likely each is drawn, round by round, with the paper's bookkeeping."""
    # With noise 1.3 the first round takes nearly all; with noise that is searched for, there are ten.
    recipe = replace(PAPERS_RECIPE, steps=TABLE_2["pdp-sgd"].iterations, noise_multiplier=None)
    setting = Setting("mnist", mechanism, recipe, Population(), bookkeeping="as-published", accountant="rdp")
    budgets = setting.population.budgets(PEOPLE, shuffle=seed)
    rows = _published_rows(plan_of(setting, budgets, seed=seed))
    return _round_chart(
        rows,
        title=f"{mechanism}, as published: left before each round, and chance of being drawn into it",
        subtitle="Only those who are drawn pay. This is the paper's bookkeeping; it is not sound.",
        chance="chance to be in the round",
    )


def rounds_sound(mechanism: str) -> Any:
    """The same where everybody pays: what is left before each round, and the rates of its steps."""
    setting = Setting("mnist", mechanism, Recipe(steps=300, batch_size=1024), Population())
    made = plan_of(setting, setting.population.budgets(PEOPLE, shuffle=0), seed=0)
    return _round_chart(
        _sound_rows(made),
        title=f"{mechanism}, sound: left before each round, and rate at each of its steps",
        subtitle="Everybody pays, drawn or not. 300 steps, expected batch 1,024, PLD accounting.",
        chance="rate at each step",
    )


def _published_rows(made: Plan) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    left = np.array([level.epsilon for level in made.levels])
    people = np.array([level.people for level in made.levels])
    for index, r in enumerate(made.rounds[:SHOWN_ROUNDS]):
        assert r.threshold is not None
        chance = np.where(left > 1e-3, participation_for(left, r.threshold), 0.0)
        rows += _counted(index, r.threshold, left, chance, people)
        left = np.where(np.array(r.participation) > 0, np.maximum(left - r.threshold, 0.0), left)
    return rows


def _sound_rows(made: Plan) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    by = accountant(made.accountant)
    people = np.array([level.people for level in made.levels])
    epsilon = np.array([level.epsilon for level in made.levels])
    deltas = [level.delta for level in made.levels]
    for index, r in enumerate(made.rounds[:SHOWN_ROUNDS]):
        histories = [
            tuple(before.exposure(level) for before in made.rounds[:index]) for level in range(len(people))
        ]
        left = np.maximum(0.0, epsilon - np.array(by.epsilons(histories, deltas)))
        rows += _counted(index, r.threshold or math.nan, left, np.array(r.sample_rates), people)
    return rows


def _counted(index: int, tau: float, left: Any, chance: Any, people: Any) -> list[dict[str, Any]]:
    kinds: dict[tuple[float, float], int] = {}
    for e, p, n in zip(left, chance, people, strict=True):
        kind = (round(float(e), 3), round(float(p), 4))
        kinds[kind] = kinds.get(kind, 0) + int(n)
    empty = sum(n for (_, p), n in kinds.items() if p == 0)
    title = f"round {index + 1}: threshold {tau:.3f}" + (f", {empty:,} have nothing left" if empty else "")
    return [{"round": title, "left": e, "chance": p, "people": n} for (e, p), n in kinds.items()]


def _round_chart(rows: list[dict[str, Any]], *, title: str, subtitle: str, chance: str) -> Any:
    """One strip a round: people by what they have left, and by their chance, without those at 0."""
    frame = pl.DataFrame(rows).filter(pl.col("chance") > 0)
    highest = 1.0 if chance.startswith("chance") else float(np.max(frame["chance"].to_numpy()))
    bins = {"left": 0.025, "chance": highest / 40}
    strips = []
    for name in dict.fromkeys(frame["round"].to_list()):
        sides = []
        for field, colour, label, end in (
            ("left", OURS, "epsilon left", 1.025),
            ("chance", THE_PAPERS, chance, highest * 1.025),
        ):
            width = bins[field]
            binned = (
                frame.filter(pl.col("round") == name)
                .with_columns(((pl.col(field) / width + 1e-6).floor() * width).alias("from"))
                .group_by("from")
                .agg(pl.col("people").sum())
                .with_columns((pl.col("from") + 0.9 * width).alias("to"))
            )
            sides.append(
                alt.Chart(binned)
                .mark_bar(color=colour)
                .encode(
                    alt.X("from:Q", title=label, scale=alt.Scale(domain=[0, end], nice=False)),
                    alt.X2("to:Q"),
                    alt.Y("people:Q", title="people", axis=alt.Axis(tickCount=4)),
                    alt.Y2Datum(0),
                )
                .properties(width=280, height=80, title=name if field == "left" else "")
            )
        strips.append(sides[0] | sides[1])
    return alt.vconcat(*strips).properties(title=alt.Title(title, subtitle=subtitle, anchor="start"))


def sweep(
    points: list[dict[str, Any]], *, x: str, title: str, subtitle: list[str], marks: list[dict[str, Any]]
) -> Any:
    """Accuracy against a parameter: mean and deviation of our runs, and the paper's printed points."""
    frame = pl.DataFrame(points)
    base = alt.Chart(frame).encode(alt.X(f"{x}:Q", scale=alt.Scale(zero=False)))
    y = alt.Y("accuracy:Q", title="test accuracy, %", scale=alt.Scale(zero=False))
    colour = alt.Color("series:N", title=None)
    layers = [
        base.mark_line().encode(y, colour),
        base.mark_point(filled=True, size=40).encode(y, colour),
        base.mark_rule().encode(alt.Y("low:Q"), alt.Y2("high:Q"), colour),
    ]
    if marks:
        paper = alt.Chart(pl.DataFrame(marks)).encode(alt.X(f"{x}:Q"), color=alt.value(THE_PAPERS))
        layers.append(paper.mark_point(shape="diamond", size=90, filled=True).encode(alt.Y("accuracy:Q")))
        layers.append(paper.mark_rule().encode(alt.Y("low:Q"), alt.Y2("high:Q")))
    heading = alt.Title(title, subtitle=subtitle, anchor="start")
    return alt.layer(*layers).properties(width=460, height=280, title=heading)


def printed_point(x: str, value: float, dataset: str, system: str) -> dict[str, Any]:
    """A cell of the paper's table 1 (k = 0) as a point of a sweep."""
    cell = TABLE_1[dataset, 0.0, system]
    spread = cell.deviation or 0.0
    return {x: value, "accuracy": cell.mean, "low": cell.mean - spread, "high": cell.mean + spread}
