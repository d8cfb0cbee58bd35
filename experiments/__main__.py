"""`python -m experiments WHAT`: the paper's tables and figures, from a clone of the repository."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from experiments.reproduce import OWN_RECORDS
from experiments.studies import STUDIES, WITHOUT_TRAINING
from pdpsgd.cli.messages import messages_for_users
from pdpsgd.errors import fail


class Command(TyperCommand):
    """A command that ends with a sentence, not with a traceback, as those of `pdpsgd` do."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command; exit code 2 for what the user gave, 130 after Ctrl-C."""
        with messages_for_users():
            return super().invoke(ctx)


app = typer.Typer(
    pretty_exceptions_enable=False,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.command(cls=Command, no_args_is_help=True)
def reproduce(
    what: Annotated[
        str,
        typer.Argument(
            help=f"{', '.join((*STUDIES, *OWN_RECORDS))} (these train); {', '.join(WITHOUT_TRAINING)} (these do "
            "not); pages (write everything again from the records); all.",
            show_default=False,
        ),
    ],
    dataset: Annotated[
        list[str] | None,
        typer.Option(
            help="mnist, fashion-mnist or svhn; may be repeated. All by default.", show_default=False
        ),
    ] = None,
    system: Annotated[
        list[str] | None,
        typer.Option(help="Only runs of this system; may be repeated. All by default.", show_default=False),
    ] = None,
    k: Annotated[
        list[float] | None,
        typer.Option(
            help="Only runs at this skew of the budgets; may be repeated. All by default.", show_default=False
        ),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each setting.")] = 3,
    quick: Annotated[
        bool, typer.Option("--quick", help="Few steps: shows that it runs. Records are kept apart.")
    ] = False,
    output: Annotated[Path, typer.Option(help="Folder of the records, tables and figures.")] = Path(
        "docs/results"
    ),
    part: Annotated[
        str, typer.Option(help="i/n: do only every n-th run, to share work among n processes.")
    ] = "1/1",
    threads: Annotated[int, typer.Option(min=1, help="Processor threads; 1 is most efficient.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print the table's figures as JSON.")] = False,
) -> None:
    """Re-run the paper's evaluation: run and record what is missing, then write tables and figures.

    Each finished run is one line in runs.jsonl (trials of the search: search.jsonl). Runs that are on
    record are not done again, so a reproduction can be stopped at any time and continued by the same
    command.

    \b
    Examples:
      python -m experiments distributions
      python -m experiments table-1 --dataset mnist --seeds 3
      python -m experiments table-1 --dataset mnist --system pdp-sgd-exact --k 0
      python -m experiments table-1 --dataset mnist --part 1/2     (and 2/2 in another window)
      python -m experiments all --quick --output /tmp/results
    """
    import torch

    from experiments.record import Record
    from experiments.reproduce import reproduce as run
    from experiments.tables import PAGES

    torch.set_num_threads(threads)
    if what in OWN_RECORDS:
        from experiments.fairness import run_fairness
        from experiments.filters import run_filters
        from experiments.least_squares import run_least_squares
        from experiments.table_3 import run_table_3
        from experiments.table_3_networks import run_table_3_networks
        from experiments.table_3_published import run_table_3_published

        studies = (
            run_table_3,
            run_table_3_networks,
            run_table_3_published,
            run_fairness,
            run_filters,
            run_least_squares,
        )
        study = dict(zip(OWN_RECORDS, studies, strict=True))[what]
        for path in study(
            output, datasets=dataset or (), seeds=seeds, say=lambda line: typer.echo(line, err=True)
        ):
            typer.echo(f"wrote {path}")
        return
    written = run(
        what,
        output=output,
        datasets=dataset or (),
        systems=system or (),
        skews=k or (),
        seeds=seeds,
        quick=quick,
        part=_part(part),
        say=lambda line: typer.echo(line, err=True),
        progress=sys.stderr.isatty(),
    )
    if as_json:
        folder = output / "quick" if quick else output
        records = Record(folder / "search.jsonl"), Record(folder / "runs.jsonl")
        pages = PAGES if what in ("all", "pages") else {name: PAGES[name] for name in [what] if name in PAGES}
        shown = {name: [found.row() for found in make(*records).cells] for name, make in pages.items()}
        typer.echo(json.dumps({"files": [str(path) for path in written], "tables": shown}, indent=1))
        return
    for path in written:
        typer.echo(f"wrote {path}")


def _part(text: str) -> tuple[int, int]:
    index, slash, parts = text.partition("/")
    if not (slash and index.isdigit() and parts.isdigit()):
        fail(f"Expected --part as i/n, for example 1/2. Got {text!r}.")
    return int(index), int(parts)


if __name__ == "__main__":
    app(prog_name="python -m experiments")
