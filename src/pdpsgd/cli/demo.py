"""`make demo`: uniform against personalized training on scikit-learn's digits, with three tiers of people."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

TIERS = {
    1.0: 0.34,
    2.0: 0.43,
    3.0: 0.23,
}  # epsilon: share of people, the benchmark of Boenisch et al. (IDP-SGD)
MECHANISMS = ("dp-sgd", "pdp-sgd-exact")
SEEDS = (0, 1, 2, 3, 4)
STEPS = 150
BATCH_SIZE = 256
LEARNING_RATES = {"dp-sgd": 1.0, "pdp-sgd-exact": 2.0}
FOLDER = Path("demo-runs")
NOTES = (
    "People were put into tiers at random: differences in accuracy between tiers are chance.",
    "Each mechanism has the learning rate, of 0.5, 1, 2 and 4, that did best on these test people. That "
    "is fine for a demo "
    "on public images; on private data, choose settings on public data, or pay for the choice.",
    "The seeds can be guessed, so that anybody gets these figures again: the models are not for release.",
)


def main() -> None:
    """Compare, print a table, write a page and say where it is."""
    started = time.monotonic()
    import torch
    from rich.console import Console

    from pdpsgd.budgets.budgets import Budgets
    from pdpsgd.cli.training_options import tier_names
    from pdpsgd.data.benchmarks.loading import load
    from pdpsgd.models.networks import digits_network
    from pdpsgd.reporting import comparison_page
    from pdpsgd.reporting.charts import save_comparison_chart
    from pdpsgd.training.comparison import compare
    from pdpsgd.training.run_folder import to_jsonable

    torch.set_num_threads(1)  # small matrices: more threads only wait for each other
    console = Console()
    digits = load("digits")
    people, test_people = len(digits.train_inputs), len(digits.test_inputs)
    console.print(
        f"{people:,} people each give one image of a digit and say how much privacy loss they allow: epsilon "
        + ", ".join(f"{epsilon:g} ({share:.0%})" for epsilon, share in TIERS.items())
        + f", at delta 1e-5. {len(SEEDS)} runs of each mechanism.",
        highlight=False,
    )

    def network(seed: int) -> torch.nn.Module:
        torch.manual_seed(seed)
        return digits_network()

    made = compare(
        MECHANISMS,
        make_model=network,
        data=(digits.train_inputs, digits.train_targets),
        budgets=Budgets.from_tiers(TIERS, people, shuffle=0),
        test_data=(digits.test_inputs, digits.test_targets),
        test_tiers=tier_names(Budgets.from_tiers(TIERS, test_people, shuffle=1).epsilon),
        seeds=SEEDS,
        plan_options={"steps": STEPS, "batch_size": BATCH_SIZE},
        options_of={name: {"learning_rate": rate} for name, rate in LEARNING_RATES.items()},
        name="digits",
        model_name="64-32-10, tanh",
        classes=digits.classes,
        notes=NOTES,
        progress=lambda mechanism, done, runs: (
            console.print(f"  {mechanism}: run {done + 1} of {runs}") if done < runs else None
        ),
    )
    console.print(made.table())
    for note in made.notes:
        console.print(f"- {note}", highlight=False)
    FOLDER.mkdir(exist_ok=True)
    page = FOLDER / "report.html"
    page.write_text(comparison_page(made), encoding="utf-8")
    (FOLDER / "figures.json").write_text(
        json.dumps(to_jsonable(made.to_dict()), indent=1) + "\n", encoding="utf-8"
    )
    save_comparison_chart(made, FOLDER / "picture.svg")
    console.print(f"\nReport page: {page.resolve()}", soft_wrap=True, highlight=False)
    console.print(f"Done in {time.monotonic() - started:.0f} seconds.", highlight=False)
    command = Path(sys.executable).with_name("pdpsgd")
    console.print(f"Next: {command} plan --help", soft_wrap=True, highlight=False)


if __name__ == "__main__":
    main()
