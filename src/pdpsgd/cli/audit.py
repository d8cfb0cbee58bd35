"""`pdpsgd audit`: attack one's own training and put what was measured beside what is proven."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pdpsgd.errors import fail

if TYPE_CHECKING:
    from pdpsgd.audit.result import AuditResult


def audit(
    run: Annotated[Path, typer.Argument(help="A run folder, or a plan as JSON.", show_default=False)],
    data: Annotated[
        str | None,
        typer.Option(
            help="Audit the training on this benchmark too: digits, mnist, fashion-mnist or svhn. "
            "Left out, the mechanism is audited alone (or what the run folder names).",
            show_default=False,
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="The network: a built-in name or module:function.", show_default=False),
    ] = None,
    learning_rate: Annotated[
        float | None, typer.Option(help="Of the audited training.", show_default="the run's, else 1.0")
    ] = None,
    canaries: Annotated[int, typer.Option(min=10, help="Dirac canaries a tier, in one run.")] = 1000,
    example_canaries: Annotated[
        int, typer.Option(min=0, help="Mislabelled examples a tier, in one run on the data.")
    ] = 100,
    runs: Annotated[
        int, typer.Option(min=0, help="Train so often again with one canary a tier (small plans only).")
    ] = 0,
    shadow_models: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Models for membership inference; 0 leaves it out.",
            show_default="16 where that takes minutes, else 0",
        ),
    ] = None,
    tiers: Annotated[int, typer.Option(min=1, help="Look at this many groups of levels at most.")] = 5,
    confidence: Annotated[float, typer.Option(help="Of all measured bounds together.")] = 0.95,
    false_alarm_rate: Annotated[float, typer.Option(help="Of each conformance test.")] = 1e-3,
    seed: Annotated[
        int | None, typer.Option(help="Repeat an audit exactly.", show_default="a fresh one")
    ] = None,
    data_folder: Annotated[
        Path | None, typer.Option(help="Where benchmarks are.", show_default=False)
    ] = None,
    json_file: Annotated[
        Path | None,
        typer.Option("--json", help="Write the result as JSON here ('-': print it).", show_default=False),
    ] = None,
    chart: Annotated[
        Path | None,
        typer.Option(help="Write proven against measured here (.html, .svg or .png).", show_default=False),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")] = False,
) -> None:
    """Measure the privacy that people really get, tier by tier, beside what is proven.

    Trains anew with canaries (records of nobody, put on the list) and attacks the result. Every attack
    gives a lower bound on epsilon; conformance tests say whether training does what the plan says. What the
    figures mean, and what they do not: docs/audit.md. Ends with exit code 1 if an alarm goes off.

    \b
    Examples:
      pdpsgd audit plan.json
      pdpsgd audit runs/digits --data digits --json audit.json --chart audit.html
      pdpsgd audit plan.json --canaries 5000 --runs 2000 --seed 1
    """
    from pdpsgd.audit.auditing import audit as run_audit
    from pdpsgd.audit.subjects import named_in, plan_and_settings, subject_of

    if not 0 < confidence < 1:
        fail(f"Expected 0 < confidence < 1. Got confidence={confidence!r}.")
    plan, settings = plan_and_settings(run)
    data = data or _benchmark(named_in(settings, "data", "dataset"))
    subject = None
    if data is not None:
        subject = subject_of(
            plan,
            data,
            model=model or named_in(settings, "model"),
            learning_rate=learning_rate or named_in(settings, "learning_rate") or 1.0,
            folder=data_folder,
            run_folder=run if run.is_dir() else None,
        )
    with _shown(quiet) as progress:
        result = run_audit(
            plan,
            subject,
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
    _write(result, json_file, chart)
    if not result.passed:
        raise typer.Exit(1)


def _write(result: AuditResult, json_file: Path | None, chart: Path | None) -> None:
    from pdpsgd.run_folder import plain

    text = json.dumps(plain(result.to_dict()), indent=1)
    if json_file == Path("-"):
        typer.echo(text)
    else:
        from rich.console import Console

        Console().print(result.table())
        typer.echo(result.summary())
        if json_file is not None:
            json_file.write_text(text + "\n")
    if chart is not None:
        from pdpsgd.audit.chart import proven_against_measured

        if chart.suffix not in (".html", ".svg", ".png"):
            fail(f"Expected a chart file that ends in .html, .svg or .png. Got {str(chart)!r}.")
        if chart.suffix == ".html":  # with everything in it, so that it opens offline
            proven_against_measured(result).save(str(chart), inline=True)
        else:
            proven_against_measured(result).save(str(chart))


def _benchmark(name: object) -> str | None:
    """The run's data if it is a benchmark; one's own files cannot be found again from a run folder."""
    from pdpsgd.datasets import NAMES

    return name if isinstance(name, str) and name in NAMES else None


@contextmanager
def _shown(quiet: bool) -> Iterator[Callable[[str, int, int], None] | None]:
    """A progress bar for each stage, on the error stream."""
    if quiet:
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as bars:
        stages = {}

        def tell(stage: str, done: int, total: int) -> None:
            if stage not in stages:
                stages[stage] = bars.add_task(stage, total=total)
            bars.update(stages[stage], completed=done)

        yield tell
