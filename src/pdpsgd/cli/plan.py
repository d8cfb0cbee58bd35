"""`pdpsgd plan`: from people's budgets to a plan, as a table, as JSON, as a chart."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pdpsgd.cli import shared
from pdpsgd.cli.shared import OUTPUT, PEOPLE, option

if TYPE_CHECKING:
    from pdpsgd.budgets.budgets import Budgets
    from pdpsgd.planning.plans import Plan


def plan(
    file: Annotated[
        Path | None,
        typer.Argument(
            help="The list of people (.csv or .parquet), or a plan (.json) to show and verify.",
            show_default=False,
        ),
    ] = None,
    id_column: shared.IdColumn = None,
    epsilon_column: shared.EpsilonColumn = "epsilon",
    delta_column: shared.DeltaColumn = None,
    delta: shared.Delta = 1e-5,
    tiers: shared.Tiers = None,
    people: Annotated[
        int | None,
        option("--people", help="How many people, with --tiers.", panel=PEOPLE, show_default=False),
    ] = None,
    allow_infinite: shared.AllowInfinite = False,
    mechanism: shared.Mechanism = "pdp-sgd-exact",
    steps: shared.Steps = None,
    batch_size: shared.BatchSize = 1024,
    accountant: shared.AccountantName = None,
    max_grad_norm: shared.MaxGradNorm = 1.0,
    rounds: shared.Rounds = None,
    noise_multiplier: shared.NoiseMultiplier = None,
    drawn: shared.Drawn = "step",
    weights: shared.Weights = None,
    threshold_loss: shared.ThresholdLoss = None,
    history: shared.EarlierPlans = None,
    history_budgets: shared.EarlierLists = None,
    history_fixed: shared.HistoryFixed = False,
    max_levels: shared.MaxLevels = 256,
    verify: Annotated[
        bool,
        option(
            "--verify",
            help="Check the plan with an accountant that shares no code with the one that made it.",
            panel=OUTPUT,
        ),
    ] = False,
    chart: Annotated[
        Path | None,
        option(
            "--chart",
            help="Draw budgets, rates and spending to this .svg, .png or .html file.",
            panel=OUTPUT,
            show_default=False,
        ),
    ] = None,
    json_file: shared.JsonFile = None,
    quiet: shared.Quiet = False,
    config: shared.Config = None,
) -> None:
    """Draw up a plan: who is drawn how often, under how much noise, and what each person will have spent.

    Nothing but the list of people and what they allow is needed: no data, no model. The plan is public.

    \b
    Examples:
      pdpsgd plan people.csv --id-column person --steps 1000 --batch-size 1024 --json plan.json
      pdpsgd plan --tiers 1:0.34,2:0.43,3:0.23 --people 60000 --chart plan.svg
      pdpsgd plan people.csv --mechanism pdp-sgd-adaptive --rounds 10
      pdpsgd plan people.csv --id-column person --history plan.json   (what is left after that run)
      pdpsgd plan plan.json --verify                                  (check somebody else's plan)
    """
    screen = shared.Screen(quiet=quiet, json_file=json_file)

    def read_list(path: Path | None) -> Budgets:
        return shared.read_budgets(
            path,
            id_column=id_column,
            epsilon_column=epsilon_column,
            delta_column=delta_column,
            delta=delta,
            tiers=tiers if path == file else None,
            people=people,
            allow_infinite=allow_infinite,
        )

    if file is not None and file.suffix.lower() == ".json":
        made = shared.read_plan(file)
    else:
        from pdpsgd.planning.planner import plan as make_plan

        budgets = read_list(file)
        made = make_plan(
            budgets,
            mechanism,
            steps,
            batch_size,
            accountant,
            max_grad_norm,
            rounds=rounds,
            noise_multiplier=noise_multiplier,
            drawn=drawn,
            weights=shared.parse_weights(weights),
            loss=threshold_loss,
            history=shared.earlier_plans(
                history, [read_list(path) for path in history_budgets or []], budgets
            ),
            history_fixed=history_fixed,
            max_levels=max_levels,
        )
    show(made, screen)
    if verify:
        _verify(made, screen)
    if chart is not None:
        from pdpsgd.reporting.charts import save_plan_chart

        save_plan_chart(made, chart)
        screen.say(f"Chart: {chart}")
    screen.write_json(made.to_json())


def show(made: Plan, screen: shared.Screen) -> None:
    """The plan's table and what belongs under it."""
    if screen.quiet:
        return
    from pdpsgd.planning.plan_table import table

    screen.table(table(made.mechanism, made.levels, made.rounds))
    for line in made.summary():
        screen.say(line)


def _verify(made: Plan, screen: shared.Screen) -> None:
    found = made.verify()
    screen.say(
        f"Verified: an independent accountant finds at most {max(found.epsilon):.4g} of "
        f"{max(found.promised):.4g}, "
        f"and every one of the {len(made.levels)} levels within its promise."
    )
