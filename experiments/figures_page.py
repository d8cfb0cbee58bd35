"""Writes the figures, and the page that shows them beside what the paper says of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from experiments import figures
from experiments.cells import printed_text
from experiments.figures import PAPER_SERIES, WITH_THRESHOLDS
from experiments.published import TABLE_1
from experiments.record import Record

INTRODUCTION = """\
# Figures

Written by `python -m experiments pages`. Each is also there as SVG, in the same folder. The paper's own figures are
images that were not available when this was made, only its text and captions: its curves could not be read. What
stands here beside ours is what its text says, and what its tables print.
"""

SECTIONS: tuple[tuple[str, str, dict[str, str]], ...] = (
    (
        "Who allows what",
        "How many of 60,000 people allow which epsilon, in 20 groups, at the three skews. The paper shows the same "
        "three distributions, by Count(epsilon) = n (c1 exp(k "
        "epsilon) + c2). With the constants that its appendix prints (the dots), the groups at k = -0.2 and 0.2 hold "
        "1.83 times as many people as there are; here (the bars) the counts are scaled to sum to all people.",
        {
            "epsilon-distributions": "Three bar charts of people by the epsilon they allow, at k = -0.2, 0 and 0.2"
        },
    ),
    (
        "Rounds as published",
        "How many people have how much epsilon left before a round (left), and with which chance they are drawn into "
        "it (right), a bar a value, with the paper's bookkeeping: only those who are drawn pay. It is not sound. "
        "Noise is searched for each round, so that there are many; the runs on "
        "[table-1-as-published](table-1-as-published.md) have noise 1.3 throughout and end after one to three rounds, "
        "with the thresholds of the first rounds here. The paper has such a figure of AdaPDP alone, with counts of "
        "users by epsilon on the left and by their chance on the right. Its text says neither the skew nor the "
        "number of rounds nor any of the counts (by its number of parameters in table 2, its AdaPDP had two rounds), "
        "so only what is counted can be compared. Of PDP-SGD it has none.",
        {
            f"rounds-as-published-{name}": f"{name} as published: people by epsilon left, and by chance, in each round"
            for name in WITH_THRESHOLDS
        },
    ),
    (
        "Rounds where everybody pays",
        "The same for the plans of [table-1](table-1.md) on MNIST at k = 0: everybody pays in every "
        "round, drawn or not, and on the right is the rate at each step. Rounds for which nobody has anything left are "
        "dropped. The paper has no such figure.",
        {
            f"rounds-sound-{name}": f"{name}, sound: people by epsilon left, and by rate, in each round"
            for name in WITH_THRESHOLDS
        },
    ),
    (
        "Accuracy against w1",
        "PDP-SGD with fixed weights on MNIST at k = 0, w2 = 1 - w1, sound bookkeeping. The paper's figure is of three "
        "data sets and all k, by its own bookkeeping. By its text accuracy grows with w1 at all k, and from 0.7 on the "
        "averages are alike and vary more from run to run. It prints one of these points, in table 1, where w1 is 0.7.",
        {
            "weights-mnist": "Test accuracy on MNIST against w1 from 0.3 to 0.9, and the paper's printed point at 0.7"
        },
    ),
    (
        "Accuracy against the interval of budgets",
        "Budgets spread evenly over [0.5, 0.5 + alpha], MNIST, sound bookkeeping, test accuracy. The paper's figure is "
        "of three data sets, test and train accuracy, by its own bookkeeping, and by its text test accuracy grows with "
        "the interval on the whole. It prints one of these points, in table 1, where alpha is 0.5.",
        {
            "intervals-mnist": "Test accuracy on MNIST against alpha from 0.1 to 0.9, of two systems, "
            "and the paper's printed point at 0.5"
        },
    ),
)
"""Headings, captions, and the figures under them with what they show in words."""


def figures_page(search: Record, record: Record, output: Path) -> str:
    """Return the page that shows every figure that is in the folder."""
    tables = {
        "weights-mnist": _sweep_table("w1", figures.weight_points(search, record), 0.7, "pdp-sgd-fixed"),
        "intervals-mnist": _sweep_table(
            "alpha", figures.interval_points(search, record), 0.5, "pdp-sgd-adaptive"
        ),
    }
    parts = [INTRODUCTION]
    for heading, caption, shown in SECTIONS:
        there = [name for name in shown if (output / "figures" / f"{name}.png").exists()]
        if there:
            parts.append(f"## {heading}\n\n{caption}\n")
        for name in there:
            parts.append(f"![{shown[name]}](figures/{name}.png)\n\n*{shown[name]}.*\n")
            parts += tables.get(name, [])
    return "\n".join(parts)


def _sweep_table(x: str, points: list[dict[str, Any]], printed_at: float, system: str) -> list[str]:
    """Return the points of a sweep in figures, with the paper's cell where it printed one (MNIST, k = 0)."""
    names = list(dict.fromkeys(p["series"] for p in points))
    printed = f"{printed_text(TABLE_1['mnist', 0.0, system])} ({system})"
    lines = [
        "Mean ± standard deviation (seeds), and steps:\n",
        f"| {x} | {' | '.join(f'{name} | steps' for name in names)} | {PAPER_SERIES} |",
        "|---" * (2 * len(names) + 2) + "|",
    ]
    for value in sorted({p[x] for p in points}):
        of = {p["series"]: f"{p['text']} | {p['steps']}" for p in points if p[x] == value}
        ours = " | ".join(of.get(name, " | ") for name in names)
        lines.append(f"| {value:g} | {ours} | {printed if value == printed_at else ''} |")
    return [*lines, ""]


def write_figures(what: str, search: Record, record: Record, output: Path) -> list[Path]:
    """Write the figures that a study belongs to, and the page of all figures that are there."""
    everything = what in ("all", "pages")
    made: dict[str, Any] = {}
    if everything or what == "distributions":
        made["epsilon-distributions"] = figures.distributions()
    if everything or what == "rounds":
        made |= {f"rounds-as-published-{name}": figures.rounds_as_published(name) for name in WITH_THRESHOLDS}
        made |= {f"rounds-sound-{name}": figures.rounds_sound(name) for name in WITH_THRESHOLDS}
    if everything or what == "weights":
        made["weights-mnist"] = figures.weights(figures.weight_points(search, record))
    if everything or what == "intervals":
        made["intervals-mnist"] = figures.intervals(figures.interval_points(search, record))
    written: list[Path] = []
    for name, chart in made.items():
        if chart is not None:
            written += figures.save_chart(chart, output / "figures", name)
    if written:
        page = output / "figures.md"
        page.write_text(figures_page(search, record, output), encoding="utf-8")
        written.append(page)
    return written
