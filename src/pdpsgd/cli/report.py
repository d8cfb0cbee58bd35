"""`pdpsgd report`: the page of a run, from its folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pdpsgd.cli import shared
from pdpsgd.cli.shared import option
from pdpsgd.training.options import OUTPUT


def report(
    run_folder: Annotated[Path, typer.Argument(help="folder of a finished run", show_default=False)],
    output: Annotated[
        Path | None,
        option(
            "--output",
            "-o",
            help="file of the page",
            panel=OUTPUT,
            show_default="RUN_FOLDER/public/report.html",
        ),
    ] = None,
    json_file: shared.JsonFile = None,
    quiet: shared.Quiet = False,
) -> None:
    """Write one HTML page about a run: what was promised, what is proven, how good the model is, for whom.

    The page opens offline and loads nothing. Only public things go in: the plan, the settings, and figures on
    test people.

    \b
    Examples:
      pdpsgd report runs/people-pdp-sgd-exact
      pdpsgd report runs/people-pdp-sgd-exact --output for-the-privacy-officer.html
    """
    from pdpsgd.reporting import write_run_report
    from pdpsgd.training.finished_run import read_run

    screen = shared.Screen(quiet=quiet, json_file=json_file)
    if output is not None:
        shared.check_output(output, "--output")
    shared.say_other_version(run_folder, screen)
    screen.say(f"Report: {write_run_report(run_folder, output)}")
    if json_file is not None:
        run = read_run(run_folder)
        screen.write_json(
            shared.dump({"plan": run.plan.digest, "settings": run.settings, "result": run.result})
        )
