"""`pdpsgd predict`: the model of a run, on new rows."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pdpsgd.cli import shared
from pdpsgd.cli.shared import option
from pdpsgd.errors import check_positive, fail
from pdpsgd.training.options import OUTPUT

if TYPE_CHECKING:
    from pdpsgd.training.temperature import Calibration


def predict(
    run: Annotated[
        Path,
        typer.Argument(
            help="run folder, a copy of its public/, or a model.safetensors file", show_default=False
        ),
    ],
    rows: Annotated[
        Path,
        typer.Argument(
            help=".csv, .parquet or .npz file, image, or folder of images",
            show_default=False,
        ),
    ],
    output: Annotated[
        Path | None,
        option(
            "--output", "-o", help=".csv or .parquet file to write", panel=OUTPUT, show_default="the screen"
        ),
    ] = None,
    columns: Annotated[
        str | None,
        option(
            "--columns", help="columns of ROWS to repeat: names, or none", panel=OUTPUT, show_default="all"
        ),
    ] = None,
    model: Annotated[
        str | None,
        option(
            "--model", help="your network, as module:function", panel=OUTPUT, show_default="as it was trained"
        ),
    ] = None,
    at_once: Annotated[
        int | None,
        option("--rows-at-once", help="rows held in memory", panel=OUTPUT, show_default="16384; 64 of texts"),
    ] = None,
    json_file: shared.JsonFile = None,
    quiet: shared.Quiet = False,
) -> None:
    """Predict for new rows with the model of a run: a class and its probabilities, or a number, for each row.

    Rows need no labels, ids or budgets. They are read, predicted and written some at a time, so a file may be larger
    than memory. Unknown categories, numbers outside their range and missing values are counted and said; a column that
    is missing is refused.

    Using a model is post-processing: it costs nobody any more privacy.

    \b
    Examples:
      pdpsgd predict runs/people-pdp-sgd-exact rows.csv -o scored.csv
      pdpsgd predict runs/people-pdp-sgd-exact rows.parquet -o scored.parquet \\
          --columns person
      pdpsgd predict runs/photos-pdp-sgd-exact new-photos/ -o scored.csv
    """
    from pdpsgd.training.predict import load_run
    from pdpsgd.training.scored_files import ENDINGS, write_scored

    screen = shared.Screen(quiet=quiet, json_file=json_file)
    if at_once is not None:
        check_positive(rows_at_once=at_once)
    if output is None and json_file == "-":
        fail("Expected --output FILE with --json -: both would go to the screen. Got none.")
    if output is not None:
        shared.check_output(output, "--output")
        if output.suffix.lower() not in ENDINGS:
            fail(f"Expected --output to end in {', '.join(ENDINGS)}. Got {str(output)!r}.")
    if output is None:
        screen.console.stderr = True  # the answers have the screen for themselves
    loaded = load_run(run, model=model)
    if loaded.description.task == "classification":
        screen.say(about_probabilities(loaded.description.calibration))
    for note in _notes(run, loaded):
        screen.say(f"Note: {note}")
    kept = None if columns is None else [name.strip() for name in columns.split(",") if name.strip()]
    with screen.bars() as bars:
        scored = write_scored(
            loaded,
            rows,
            output,
            columns=[] if kept == ["none"] else kept,
            at_once=at_once or loaded.rows_at_once,
            tell=_progress(rows, at_once or loaded.rows_at_once, bars) if output is not None else None,
        )
    for sentence in scored.remarks.sentences():
        screen.say(f"Note: {sentence}")
    if output is not None:
        screen.say(f"Scored:  {output} ({scored.rows:,} rows)")
    screen.write_json(shared.dump({**scored.remarks.to_dict(), "rows": scored.rows, "output": str(output)}))


def about_probabilities(calibration: Calibration | None) -> str:
    """Say whether probabilities are calibrated, and by whom."""
    if calibration is None:
        return "Probabilities: as the network says them, not calibrated (train with --calibrate)."
    return (
        f"Probabilities: calibrated on {calibration.fitted_on} (temperature {calibration.temperature:.3g})."
    )


def _progress(rows: Path, at_once: int, bars: Any) -> Any:
    """Return what shows progress, where the number of rows is known and they are more than are read at once."""
    from pdpsgd.data.rows import number_of_rows

    total = None if bars is None else number_of_rows(rows)
    if total is None or total <= at_once:
        return None
    return lambda done: bars("Rows scored", done, total)


def _notes(run: Path, loaded: Any) -> list[str]:
    """Say what speaks against handing the answers on: a run that is not for release."""
    from pdpsgd.training.run_folder import RunFolder

    folder = RunFolder(run)
    of_run = folder.read_result().get("release_note") if run.is_dir() and folder.finished else None
    note = of_run or loaded.description.not_for_release  # which stays with weights that were copied
    if note is None:
        return [] if loaded.description.confirmed else ["The model is not for release."]
    why = str(note).removeprefix("Not for release. ").removesuffix(": not for release").removesuffix(".")
    return [f"Neither the model nor its answers are for release. {why[:1].upper()}{why[1:]}."]
