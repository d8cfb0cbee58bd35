"""`make demo`: uniform training, leaving the strict out, and personalized training, on scikit-learn's digits.

`python -m pdpsgd.cli.demo --search` shows how the learning rates were chosen.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pdpsgd.training.comparison import Comparison

MECHANISMS = ("dp-sgd", "dp-sgd-exclude", "pdp-sgd-exact")
SEEDS = (0, 1, 2, 3, 4)
STEPS = 150
BATCH_SIZE = 256
RATES_TRIED = (0.06, 0.12, 0.25, 0.5, 1.0, 2.0, 4.0)
FOLDER = Path("demo-runs")


@dataclass(frozen=True)
class PeopleList:
    """What people allow (epsilon: share of them), and each mechanism's best learning rate of those tried."""

    name: str
    tiers: Mapping[float, float]
    learning_rates: Mapping[str, float]


LISTS = (
    # The benchmark of Boenisch et al. (IDP-SGD).
    PeopleList(
        "digits",
        {1.0: 0.34, 2.0: 0.43, 3.0: 0.23},
        {"dp-sgd": 1.0, "dp-sgd-exclude": 1.0, "pdp-sgd-exact": 2.0},
    ),
    PeopleList(
        "digits, 1 % of the people at 0.1",
        {0.1: 0.01, 1.0: 0.33, 2.0: 0.43, 3.0: 0.23},
        {"dp-sgd": 0.12, "dp-sgd-exclude": 1.0, "pdp-sgd-exact": 1.0},
    ),
)
NOTES = (
    "People were put into tiers at random: differences in accuracy between tiers are chance.",
    f"Each mechanism has the learning rate, of {', '.join(f'{rate:g}' for rate in RATES_TRIED)}, that did best on "
    "these test people. That is fine for a demo on public images; on private data, choose settings on public "
    "data, or pay for the choice.",
    "The seeds can be guessed, so that anybody gets these figures again: the models are not for release.",
)


def main(arguments: Sequence[str] = ()) -> None:
    """Compare on both lists, print tables, write a page and say where it is."""
    started = time.monotonic()
    import torch
    from rich.console import Console

    from pdpsgd.reporting import comparison_page
    from pdpsgd.reporting.charts import save_comparison_chart
    from pdpsgd.training.run_folder import to_jsonable

    torch.set_num_threads(1)  # small matrices: more threads only wait for each other
    console = Console()
    if "--search" in arguments:
        search(console)
        return
    made = []
    for people in LISTS:
        console.print(_about(people), highlight=False)
        made.append(run(people, people.learning_rates, console))
        console.print(made[-1].table())
    for note in dict.fromkeys(note for comparison in made for note in comparison.notes):
        console.print(f"- {note}", highlight=False)
    FOLDER.mkdir(exist_ok=True)
    page = FOLDER / "report.html"
    page.write_text(comparison_page(*made), encoding="utf-8")
    figures = [to_jsonable(comparison.to_dict()) for comparison in made]
    (FOLDER / "figures.json").write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    save_comparison_chart(made[0], FOLDER / "picture.svg")
    console.print(f"\nReport page: {page.resolve()}", soft_wrap=True, highlight=False)
    console.print(f"Done in {time.monotonic() - started:.0f} seconds.", highlight=False)
    command = Path(sys.executable).with_name("pdpsgd")
    console.print(f"Next: {command} plan --help", soft_wrap=True, highlight=False)


def run(people: PeopleList, learning_rates: Mapping[str, float], console: Any) -> Comparison:
    """Train every mechanism with every seed on one list of people."""
    import torch

    from pdpsgd.budgets.budgets import Budgets
    from pdpsgd.cli.training_options import tier_names
    from pdpsgd.data.benchmarks.loading import load
    from pdpsgd.models.networks import digits_network
    from pdpsgd.training.comparison import compare

    digits = load("digits")

    def network(seed: int) -> torch.nn.Module:
        torch.manual_seed(seed)
        return digits_network()

    def said(mechanism: str, done: int, runs: int) -> None:
        if done < runs:
            console.print(f"  {mechanism}: run {done + 1} of {runs}", highlight=False)

    return compare(
        MECHANISMS,
        make_model=network,
        data=(digits.train_inputs, digits.train_targets),
        budgets=Budgets.from_tiers(people.tiers, len(digits.train_inputs), shuffle=0),
        test_data=(digits.test_inputs, digits.test_targets),
        test_tiers=tier_names(Budgets.from_tiers(people.tiers, len(digits.test_inputs), shuffle=1).epsilon),
        seeds=SEEDS,
        plan_options={"steps": STEPS, "batch_size": BATCH_SIZE},
        options_of={name: {"learning_rate": rate} for name, rate in learning_rates.items()},
        name=people.name,
        model_name="64-32-10, tanh",
        classes=digits.classes,
        notes=NOTES,
        progress=said,
    )


def search(console: Any) -> None:
    """Print every mechanism's accuracy at every learning rate tried."""
    for people in LISTS:
        console.print(_about(people), highlight=False)
        for rate in RATES_TRIED:
            outcomes = run(people, dict.fromkeys(MECHANISMS, rate), console).outcomes
            console.print(
                f"learning rate {rate:g}: " + ", ".join(f"{x.mechanism} {x.accuracy:.2%}" for x in outcomes)
            )


def _about(people: PeopleList) -> str:
    tiers = ", ".join(f"{epsilon:g} ({share:.0%})" for epsilon, share in people.tiers.items())
    return (
        f"\n{people.name}: people each give one image of a digit and say how much privacy loss they allow: epsilon "
        f"{tiers}, at delta 1e-5. {len(SEEDS)} runs of each mechanism."
    )


if __name__ == "__main__":
    main(sys.argv[1:])
