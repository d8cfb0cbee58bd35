"""The figures, as PNG and SVG: two that need no training, and two sweeps made from records."""

from __future__ import annotations

import math
import statistics
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Any

import altair as alt
import numpy as np
import polars as pl

from experiments.cells import Cell, cell
from experiments.published import PAPERS_EPSILON_CONSTANTS, SKEWS, TABLE_1, TABLE_2
from experiments.record import Record
from experiments.search import GRIDS, recipe_for
from experiments.settings import PAPERS_RECIPE, Population, Setting
from experiments.studies import interval_settings, weight_settings
from experiments.systems import plan_of
from pdpsgd.accounting.registry import accountant
from pdpsgd.accounting.theorems import participation_for
from pdpsgd.budgets.budgets import Budgets
from pdpsgd.planning.plans import Plan

Rows = list[dict[str, Any]]

OURS, OURS_TOO, THE_PAPERS = "#1f6f8b", "#7a8f2a", "#c8553d"
PAPER_SERIES = "the paper, as published"
PEOPLE = 60_000
SHOWN_ROUNDS = 5
WITH_THRESHOLDS = ("adapdp", "pdp-sgd-fixed", "pdp-sgd-adaptive")
FAR_BELOW = 10.0
"""Points so many percent below the median of a sweep are left outside its axis, and named."""
LINE = 88
"""Characters that fit on a line above a sweep."""


def save_chart(chart: Any, folder: Path, name: str) -> list[Path]:
    """Write a chart as PNG and SVG."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{name}.png", folder / f"{name}.svg"]
    styled = chart.configure_axis(grid=True, gridColor="#eeeeee").configure_view(strokeWidth=0)
    styled.save(str(paths[0]), scale_factor=2)
    styled.save(str(paths[1]))
    return paths


def distributions() -> Any:
    """Draw how many people allow which epsilon, for the paper's three skews (its figure "skew")."""
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
    """Draw what people have left and their probability of participation, round by round, as published."""
    # With noise 1.3 the first round takes nearly all; with noise that is searched for, there are more.
    recipe = replace(PAPERS_RECIPE, steps=TABLE_2["pdp-sgd"].iterations, noise_multiplier=None)
    setting = Setting("mnist", mechanism, recipe, Population(), bookkeeping="as-published", accountant="rdp")
    budgets = setting.population.budgets(PEOPLE, shuffle=seed)
    made = plan_of(setting, budgets, seed=seed)
    trained = plan_of(replace(setting, recipe=PAPERS_RECIPE), budgets, seed=seed)
    return _round_chart(
        _published_rows(made),
        title=f"{mechanism}, as published: left before each round, and chance of being drawn into it",
        subtitle=_published_subtitle(mechanism, made, trained),
        chance="chance to be in the round",
    )


def rounds_sound(mechanism: str) -> Any:
    """Draw the same where everybody pays, by the plan of table 1: left before each round, and sampling rates."""
    recipe = recipe_for(mechanism, GRIDS["mnist", "pixels"][0])
    setting = Setting("mnist", mechanism, recipe, Population())
    made = plan_of(setting, setting.population.budgets(PEOPLE, shuffle=0), seed=0)
    return _round_chart(
        _sound_rows(made),
        title=f"{mechanism}, sound: left before each round, and rate at each of its steps",
        subtitle=_sound_subtitle(setting, made),
        chance="rate at each step (own axis in each round)",
    )


def _published_subtitle(mechanism: str, made: Plan, trained: Plan) -> list[str]:
    last = len(trained.rounds)
    same = [r.threshold for r in trained.rounds] == [r.threshold for r in made.rounds[:last]]
    return [
        "Only those who are drawn pay. This is the paper's bookkeeping; it is not sound. k = 0, RDP accounting.",
        f"Noise is searched for each round, as in the paper's Algorithm 1: {TABLE_2['pdp-sgd'].iterations:,} steps "
        f"planned in {PAPERS_RECIPE.rounds} rounds.",
        f"{len(made.rounds)} rounds take place; the first {min(SHOWN_ROUNDS, len(made.rounds))} are shown.",
        f"Not the runs of table 1 as published: they have noise {PAPERS_RECIPE.noise_multiplier} throughout and end "
        f"after round {last}" + (", with thresholds as here." if same else "."),
        "The paper's figure of AdaPDP shows these two counts, round by round; only its caption is at hand."
        if mechanism == "adapdp"
        else "The paper shows no such figure of PDP-SGD, only one of AdaPDP.",
    ]


def _sound_subtitle(setting: Setting, made: Plan) -> list[str]:
    recipe = setting.recipe
    dropped = (recipe.rounds or 0) - len(made.rounds)
    lines = [
        f"Everybody pays, drawn or not. The plan of table 1: {made.steps} steps in {len(made.rounds)} rounds, "
        f"expected batch {recipe.batch_size:,.0f}, k = 0, PLD.",
    ]
    if dropped:
        lines.append(
            f"Planned: {recipe.steps} steps in {recipe.rounds} rounds; nobody has anything left for the rest."
        )
    return [*lines, "The paper has no such figure: in its bookkeeping, those who are not drawn do not pay."]


def _published_rows(made: Plan) -> Rows:
    rows: Rows = []
    left = np.array([level.epsilon for level in made.levels])
    people = np.array([level.people for level in made.levels])
    for index, r in enumerate(made.rounds[:SHOWN_ROUNDS]):
        assert r.threshold is not None
        chance = np.where(left > 1e-3, participation_for(left, r.threshold), 0.0)
        rows += _counted(index, r.threshold, left, chance, people)
        left = np.where(np.array(r.participation) > 0, np.maximum(left - r.threshold, 0.0), left)
    return rows


def _sound_rows(made: Plan) -> Rows:
    rows: Rows = []
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


def _counted(index: int, tau: float, left: Any, chance: Any, people: Any) -> Rows:
    kinds: dict[tuple[float, float], int] = {}
    for e, p, n in zip(left, chance, people, strict=True):
        kind = (round(float(e), 3), round(float(p), 4))
        kinds[kind] = kinds.get(kind, 0) + int(n)
    empty = sum(n for (_, p), n in kinds.items() if p == 0)
    title = f"round {index + 1}: threshold {tau:.3f}" + (f", {empty:,} have nothing left" if empty else "")
    return [{"round": title, "left": e, "chance": p, "people": n} for (e, p), n in kinds.items()]


def _round_chart(rows: Rows, *, title: str, subtitle: list[str], chance: str) -> Any:
    """Draw one strip per round: people by what they have left, and by their probability, without those at 0."""
    frame = pl.DataFrame(rows).filter(pl.col("chance") > 0)
    strips = []
    for name in dict.fromkeys(frame["round"].to_list()):
        of_round = frame.filter(pl.col("round") == name)
        highest = 1.0 if chance.startswith("chance") else max(of_round["chance"].to_list())
        sides = []
        for field, color, label, end in (
            ("left", OURS, "epsilon left", 1.02),
            ("chance", THE_PAPERS, chance, highest * 1.02),
        ):
            scale = alt.Scale(domain=[0, end], nice=False)
            counted = of_round.group_by(field).agg(pl.col("people").sum())
            sides.append(
                alt.Chart(counted.sort(field))
                .mark_bar(color=color, size=2.5)
                .encode(
                    alt.X(
                        f"{field}:Q", title=label, scale=scale, axis=alt.Axis(labelFlush=False, tickCount=6)
                    ),
                    alt.Y("people:Q", title="people", axis=alt.Axis(tickCount=4, minExtent=40)),
                )
                .properties(
                    width=330, height=80, title=alt.Title(name if field == "left" else "", anchor="start")
                )
            )
        strips.append(sides[0] | sides[1])
    heading = alt.Title(title, subtitle=subtitle, anchor="start", offset=12)
    return alt.vconcat(*strips).properties(title=heading)


def weight_points(search: Record, record: Record) -> Rows:
    """Return our accuracies on MNIST by w1, as far as they are on record."""
    found = ((s, cell(s, record)) for s in weight_settings("mnist", search))
    return [
        _point("w1", s.weights[0], "pdp-sgd-fixed, sound", runs)
        for s, runs in found
        if s.weights and runs.seeds
    ]


def interval_points(search: Record, record: Record) -> Rows:
    """Return our accuracies on MNIST by the interval of budgets and system, as far as they are on record."""
    found = ((s, cell(s, record)) for s in interval_settings("mnist", search))
    return [
        _point("alpha", s.population.highest - s.population.lowest, f"{s.system}, sound", runs)
        for s, runs in found
        if runs.seeds
    ]


def _point(x: str, value: float, series: str, runs: Cell) -> dict[str, Any]:
    assert runs.mean is not None
    spread = runs.deviation or 0.0
    return {
        x: round(value, 3),
        "series": series,
        "accuracy": runs.mean,
        "low": runs.mean - spread,
        "high": runs.mean + spread,
        "seeds": runs.seeds,
        "steps": runs.iterations,
        "text": runs.text(),
    }


def weights(points: Rows) -> Any:
    """Draw accuracy against w1 (the paper's figure "weight"); None without points."""
    if not points:
        return None
    return sweep(
        points,
        x="w1",
        title="pdp-sgd-fixed on MNIST: accuracy against w1",
        subtitle=[
            f"k = 0, sound bookkeeping, {seeds_text(points)}",
            "Diamond: the paper's printed accuracy at w1 = 0.7, as published, with its deviation.",
            "By the paper's text accuracy grows with w1, and is alike from 0.7 on.",
        ],
        marks=[printed_point("w1", 0.7, "mnist", "pdp-sgd-fixed")],
    )


def intervals(points: Rows) -> Any:
    """Draw accuracy against the interval of budgets (the paper's figure "interval"); None without points."""
    if not points:
        return None
    return sweep(
        points,
        x="alpha",
        title="MNIST: accuracy against the interval of budgets [0.5, 0.5 + alpha]",
        subtitle=[
            f"k = 0, sound bookkeeping, {seeds_text(points)}",
            "Diamond: the paper's printed accuracy of PDP-SGD adaptive at alpha = 0.5, as published,",
            "with its deviation. By its text accuracy grows with alpha on the whole.",
        ],
        marks=[printed_point("alpha", 0.5, "mnist", "pdp-sgd-adaptive")],
    )


def seeds_text(points: Rows) -> str:
    """Return how many seeds the points of a sweep have.

    >>> seeds_text([{"seeds": 1}, {"seeds": 1}])
    '1 seed a point.'
    >>> seeds_text([{"seeds": 1}, {"seeds": 3}])
    '1 to 3 seeds a point. Bars: standard deviation, where there are several.'
    """
    least, most = min(p["seeds"] for p in points), max(p["seeds"] for p in points)
    if most == 1:
        return "1 seed a point."
    if least == most:
        return f"{most} seeds a point. Bars: standard deviation."
    return f"{least} to {most} seeds a point. Bars: standard deviation, where there are several."


def sweep(points: Rows, *, x: str, title: str, subtitle: list[str], marks: Rows) -> Any:
    """Draw accuracy against a parameter: mean and deviation of our runs, and the paper's printed points.

    The axis shows the bulk of the points; those below it are marked at its foot and named in the subtitle.
    """
    names = list(dict.fromkeys(p["series"] for p in points))
    marks = [{**mark, "series": PAPER_SERIES} for mark in marks]
    bottom = axis_bottom(points + marks)
    top = min(100, math.ceil(max(p["high"] for p in points + marks)))
    where = sorted({p[x] for p in points})
    margin = 0.05 * (where[-1] - where[0]) or 0.05
    across = alt.X(
        f"{x}:Q",
        scale=alt.Scale(domain=[where[0] - margin, where[-1] + margin], nice=False),
        axis=alt.Axis(values=where, format=".1f"),
    )
    up = alt.Y(
        "accuracy:Q", title="test accuracy, %", scale=alt.Scale(domain=[bottom, top], nice=False, zero=False)
    )
    colors = alt.Scale(domain=[*names, PAPER_SERIES], range=[*(OURS, OURS_TOO)[: len(names)], THE_PAPERS])
    legend = alt.Legend(orient="bottom", labelLimit=0, symbolOpacity=1)
    color = alt.Color("series:N", title=None, sort=[*names, PAPER_SERIES], scale=colors, legend=legend)
    ours, paper = (alt.Chart(pl.DataFrame(rows)).encode(across, color) for rows in (points, marks))
    layers = [
        ours.mark_line(clip=True).encode(up),
        ours.mark_point(clip=True, filled=True, size=45, opacity=1).encode(up),
        ours.mark_rule(clip=True, strokeWidth=2).encode(alt.Y("low:Q"), alt.Y2("high:Q")),
        # A little to the right, so that it does not hide ours.
        paper.mark_point(shape="diamond", size=90, filled=True, opacity=1, xOffset=6).encode(up),
        paper.mark_rule(strokeWidth=2, xOffset=6).encode(alt.Y("low:Q"), alt.Y2("high:Q")),
    ]
    outside = [
        {**p, "foot": bottom, "label": f"{p['accuracy']:.1f}"} for p in points if p["accuracy"] < bottom
    ]
    if outside:
        foot = alt.Chart(pl.DataFrame(outside)).encode(across, color, alt.Y("foot:Q"))
        layers.append(foot.mark_point(shape="triangle-down", size=80, filled=True, opacity=1, yOffset=-6))
        layers.append(foot.mark_text(align="left", dx=8, dy=-8).encode(alt.Text("label:N")))
    cut = [p for p in points if p["low"] < bottom <= p["accuracy"]]
    for what, some in (("Below the axis", outside), ("Bars cut off at the axis", cut)):
        if some:
            named = "; ".join(_named(p, x, several=len(names) > 1) for p in some)
            subtitle = subtitle + textwrap.wrap(f"{what}: {named}.", LINE, break_on_hyphens=False)
    heading = alt.Title(title, subtitle=subtitle, anchor="start", offset=12)
    return alt.layer(*layers).properties(width=500, height=280, title=heading)


def axis_bottom(points: Rows) -> int:
    """Return where the axis of a sweep begins: below the bulk, and never far below the median.

    >>> axis_bottom([{"accuracy": a, "low": a} for a in (28.1, 94.8, 95.2, 96.5)])
    94
    """
    least = statistics.median(p["accuracy"] for p in points) - FAR_BELOW
    return math.floor(max(least, min(p["low"] for p in points if p["accuracy"] >= least) - 0.5))


def _named(point: dict[str, Any], x: str, *, several: bool) -> str:
    spread = point["high"] - point["accuracy"]
    return (
        (f"{point['series']}: " if several else "")
        + f"{x} = {point[x]:g}, {point['accuracy']:.1f}"
        + (f" ± {spread:.1f}" if spread else "")
    )


def printed_point(x: str, value: float, dataset: str, system: str) -> dict[str, Any]:
    """Return a cell of the paper's table 1 (k = 0) as a point of a sweep."""
    printed = TABLE_1[dataset, 0.0, system]
    spread = printed.deviation or 0.0
    return {x: value, "accuracy": printed.mean, "low": printed.mean - spread, "high": printed.mean + spread}
