"""`pdpsgd audit`: attack your own training and put what was measured beside what is proven."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pdpsgd.cli import shared
from pdpsgd.cli.shared import option
from pdpsgd.errors import fail
from pdpsgd.training.options import OUTPUT

if TYPE_CHECKING:
    from pdpsgd.audit.result import AuditResult

TRAINING = "The training"
ATTACKS = "The attacks"


def audit(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="run folder, or plan (.json)", show_default=False)
    ],
    data: Annotated[
        str | None,
        option(
            "--data",
            help="the run's own records (as for train), or a benchmark's name",
            panel=TRAINING,
            show_default="the run's; else none, and the mechanism is audited alone",
        ),
    ] = None,
    model: Annotated[
        str | None,
        option(
            "--model",
            help="network: a built-in name, or module:function",
            panel=TRAINING,
            show_default="the run's, else one that fits the data",
        ),
    ] = None,
    learning_rate: Annotated[
        float | None,
        option(
            "--learning-rate",
            help="learning rate of the audited training",
            panel=TRAINING,
            show_default="the run's, else 1.0",
        ),
    ] = None,
    data_folder: Annotated[
        Path | None,
        option("--data-folder", help="folder of the benchmarks", panel=TRAINING, show_default=False),
    ] = None,
    people_file: Annotated[
        Path | None,
        option(
            "--people-file",
            help="table with columns file and id, for folders of images",
            panel=TRAINING,
            show_default="the run's",
        ),
    ] = None,
    canaries: Annotated[
        int, option("--canaries", min=10, help="Dirac canaries per tier, in one run", panel=ATTACKS)
    ] = 1000,
    example_canaries: Annotated[
        int,
        option(
            "--example-canaries",
            min=0,
            help="mislabeled examples per tier, in one run on the data",
            panel=ATTACKS,
        ),
    ] = 100,
    runs: Annotated[
        int,
        option("--runs", min=0, help="number of extra runs, with one canary per tier", panel=ATTACKS),
    ] = 0,
    shadow_models: Annotated[
        int | None,
        option(
            "--shadow-models",
            min=0,
            help="models for membership inference (0: none)",
            panel=ATTACKS,
            show_default="16 where that takes minutes, else 0",
        ),
    ] = None,
    tiers: Annotated[
        int, option("--tiers", min=1, help="maximum number of groups of levels", panel=ATTACKS)
    ] = 5,
    confidence: Annotated[
        float, option("--confidence", help="confidence of all measured bounds together", panel=ATTACKS)
    ] = 0.95,
    false_alarm_rate: Annotated[
        float, option("--false-alarm-rate", help="false-alarm rate of each conformance test", panel=ATTACKS)
    ] = 1e-3,
    seed: Annotated[
        int | None,
        option("--seed", help="seed for a repeatable audit", panel=ATTACKS, show_default="a fresh one"),
    ] = None,
    individual: Annotated[
        bool,
        option(
            "--individual",
            help="no attacks: what the run's own norms have cost each person (private)",
            panel=TRAINING,
            show_default=False,
        ),
    ] = False,
    chart: Annotated[
        Path | None,
        option(
            "--chart",
            help="chart of proven against measured (.svg, .png, .html)",
            panel=OUTPUT,
            show_default=False,
        ),
    ] = None,
    json_file: shared.JsonFile = None,
    quiet: shared.Quiet = False,
    config: shared.Config = None,
) -> None:
    """Measure the privacy that people really get, tier by tier, beside what is proven.

    Trains anew with canaries (records of nobody, put on the list) and attacks the result. Every attack
    gives a lower bound on epsilon; conformance tests say whether training does what the plan says. What the
    figures mean, and what they do not: docs/audit.md. Ends with exit code 1 if an alarm goes off.

    --individual computes, after a run with --keep-norms, what each person's own gradients have cost them: into
    private/individual.csv. It promises nothing, and may not be published.

    A run folder keeps the result as public/audit.json; what was computed from people's records (attacks on the data,
    membership inference) goes to private/audit.json.

    \b
    Examples:
      pdpsgd audit plan.json
      pdpsgd audit runs/digits --data digits --json audit.json --chart audit.html
      pdpsgd audit runs/people-pdp-sgd-exact --data people.csv
      pdpsgd audit runs/images-pdp-sgd-exact --data images --people-file who.csv
      pdpsgd audit plan.json --canaries 5000 --runs 2000 --seed 1
      pdpsgd audit runs/people-pdp-sgd-exact --individual
    """
    from pdpsgd.audit.auditing import audit as run_audit
    from pdpsgd.audit.targets import named_in, optimization_of, plan_and_settings, target_of

    screen = shared.Screen(quiet=quiet, json_file=json_file)
    if individual:
        _individual(run, screen)
        return
    if not 0 < confidence < 1:
        fail(f"Expected --confidence above 0 and below 1. Got {confidence!r}.")
    if chart is not None:
        shared.check_chart(chart)
    plan, settings = plan_and_settings(run)
    shared.say_other_version(run, screen)
    data = data or _benchmark(named_in(settings, "data"))
    target = None
    optimization, note = optimization_of(settings, learning_rate)
    if data is not None and run.is_dir() and _benchmark(data) is None:
        from pdpsgd.audit.own_data import own_target

        with screen.bars() as progress:
            target = own_target(
                Path(data),
                run,
                optimization=optimization,
                people_file=people_file,
                seed=seed,
                progress=progress,
            )
    elif data is not None:
        target = target_of(
            plan,
            data,
            model=model or named_in(settings, "model"),
            activation=None if model else named_in(settings, "activation"),
            preset=named_in(settings, "preset"),
            learning_rate=optimization,
            folder=data_folder,
            run_folder=run if run.is_dir() else None,
        )
    with screen.bars() as progress:
        result = run_audit(
            plan,
            target,
            canaries=canaries,
            example_canaries=example_canaries,
            runs=runs,
            shadow_models=shadow_models,
            significance=1 - confidence,
            false_alarm_rate=false_alarm_rate,
            max_tiers=tiers,
            seed=seed,
            progress=progress,
        )
    screen.table(result.table())
    screen.say(result.summary())
    if target is None:
        screen.say("Audited: the mechanism alone. With --data, the network and its training too.")
    else:
        for sentence in (*target.notes, *([] if note is None else [note])):
            screen.say(sentence)
        if named_in(settings, "augment"):
            screen.say(
                f"Audited without the run's augmentation ({settings['augment']}): records as they are."
            )
    if chart is not None:
        _draw(result, chart)
        screen.say(f"Chart: {chart}")
    screen.write_json(shared.dump(result.to_dict()))
    if run.is_dir():
        _keep(result, run)
    if not result.passed:
        raise typer.Exit(1)


def _individual(run: Path, screen: shared.Screen) -> None:
    """Compute what the run has cost each person by the norms that it kept."""
    from pdpsgd.audit.individual import audit_individual

    if not run.is_dir():
        fail(f"Expected the folder of a run, for --individual. Got {str(run)!r}: norms are kept there alone.")
    shared.say_other_version(run, screen)
    found = audit_individual(run)
    screen.table(found.table())
    for sentence in found.sentences():
        screen.say(sentence)
    screen.write_json(shared.dump(found.to_dict()))


def _keep(result: AuditResult, folder: Path) -> None:
    """Leave the result in the run folder, where a report finds it; what was computed from records, apart."""
    from pdpsgd.training.run_folder import RunFolder

    sensitive = result.to_dict() if result.sensitive else None
    RunFolder(folder).write_audit(result.without_data().to_dict(), sensitive)


def _draw(result: AuditResult, chart: Path) -> None:
    from pdpsgd.reporting.charts.audit import proven_against_measured

    drawn = proven_against_measured(result)
    if chart.suffix.lower() == ".html":  # with everything in it, so that it opens offline
        drawn.save(str(chart), format="html", inline=True)
    else:
        drawn.save(str(chart), format="svg" if chart.suffix.lower() == ".svg" else "png")


def _benchmark(name: object) -> str | None:
    """Return the run's data if it is a benchmark; your own files cannot be found again from a run folder."""
    from pdpsgd.data.benchmarks.loading import NAMES

    return name if isinstance(name, str) and name in NAMES else None
