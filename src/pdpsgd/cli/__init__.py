"""The command line: one file a command. Nothing heavy is imported before a command needs it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from pdpsgd.cli.messages import messages_for_users, show_tracebacks
from pdpsgd.errors import closest, fail

COMMANDS = ("advise", "plan", "train", "predict", "compare", "pate", "audit", "report", "ledger", "data")


class Command(TyperCommand):
    """A command whose help fits the screen, and that proposes an option for an unknown one only if it is close."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.help = None if self.help is None else in_paragraphs(self.help)

    def invoke(self, ctx: Any) -> Any:
        """Run the command, unless what it writes would take the place of what it is given."""
        check_nothing_overwritten(ctx.params)
        return super().invoke(ctx)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the options; the parser's own proposals go far afield (--chart for --schema)."""
        try:
            rest: list[str] = super().parse_args(ctx, args)
        except Exception as error:
            if hasattr(error, "possibilities"):
                known = [name for parameter in self.params for name in parameter.opts]
                error.possibilities = closest(str(getattr(error, "option_name", "")), known, most=2)
            raise
        return rest


class Commands(TyperGroup):
    """The commands in the order of use; a user's mistake ends with a message, not with a traceback."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names, in the order of use."""
        return [name for name in COMMANDS if name in self.commands]

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find a command by its name; say where the experiments went."""
        if args and args[0] == "reproduce":
            again = " ".join(["python -m experiments", *args[1:]])
            fail(
                f"Expected one of {', '.join(COMMANDS)}. Got reproduce: in a clone of the repository, type `{again}`."
            )
        return super().resolve_command(ctx, args)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Take `--traceback`, which no help mentions, from wherever it stands: it is for whoever mends a mistake."""
        options = args[: args.index("--")] if "--" in args else args
        show_tracebacks("--traceback" in options)
        rest: list[str] = super().parse_args(
            ctx, [each for each in options if each != "--traceback"] + args[len(options) :]
        )
        return rest

    def invoke(self, ctx: Any) -> Any:
        """Run a command; exit code 2 for what the user gave, 130 after Ctrl-C."""
        with messages_for_users():
            return super().invoke(ctx)


WRITTEN = {"json_file": "--json", "chart": "--chart", "page": "--page"}
"""Parameters that name a file to write; `predict --output` may be that of the rows, whose columns are kept."""


def check_nothing_overwritten(values: Mapping[str, Any]) -> None:
    """Refuse to write figures, a chart or a page over a file that the command reads, such as people's own table.

    A plan (.json) may be written again.
    """
    read = [each for name, value in values.items() if name not in WRITTEN for each in _files_in(value)]
    for name, option in WRITTEN.items():
        for written in _files_in(values.get(name)):
            if any(each.samefile(written) for each in read):
                fail(f"Expected a new file for {option}. Got {str(written)!r}, which this command reads.")


def _files_in(value: Any) -> list[Path]:
    """List the files, but plans, that an argument names."""
    values = value if isinstance(value, (list, tuple)) else [value]
    paths = [Path(each) for each in values if isinstance(each, (str, Path))]
    return [path for path in paths if path.suffix != ".json" and os.path.isfile(path)]


def in_paragraphs(text: str) -> str:
    r"""Put each paragraph into one line, to be wrapped where the screen ends; what begins with \b keeps its lines.

    >>> in_paragraphs("One\ntwo.\n\n\b\nExample:\n  three")
    'One two.\n\nExample:\n  three'
    """
    parts = text.split("\n\n")
    return "\n\n".join(
        part.removeprefix("\b\n") if part.startswith("\b") else " ".join(part.split()) for part in parts
    )


app = typer.Typer(
    cls=Commands,
    invoke_without_command=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main() -> None:
    """Run the console script."""
    app(prog_name="pdpsgd")


def _print_version(wanted: bool) -> None:
    if wanted:
        from pdpsgd import __version__

        typer.echo(__version__)
        raise typer.Exit


MOST_USED = (
    ("pdpsgd train people.csv --label income --id-column person", "train, within what each person allows"),
    ("pdpsgd predict runs/people-pdp-sgd-exact rows.csv -o scored.csv", "use the model on new rows"),
    (
        "pdpsgd advise people.csv --label income --id-column person",
        "what to expect, before anything is spent",
    ),
    ("pdpsgd report runs/people-pdp-sgd-exact --letters letters", "tell each person what was done"),
    ("pdpsgd ledger show", "what everybody allows, has spent and has left"),
)
"""What people do most, with one line each."""


def _show_most_used() -> None:
    typer.echo("Train models so that every person gets the privacy they asked for.\n")
    for command, what in MOST_USED:
        typer.echo(f"  {what[0].upper()}{what[1:]}:\n    {command}")
    typer.echo("\nNo data at hand? pdpsgd train digits --tiers 1:0.34,2:0.43,3:0.23")
    typer.echo("All commands: pdpsgd --help. All options of one: pdpsgd train --help.")


@app.callback()
def _pdpsgd(
    ctx: typer.Context,
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="version of pdpsgd, and nothing else", is_eager=True, callback=_print_version
        ),
    ] = False,
) -> None:
    """Train models so that every person gets the privacy they asked for.

    \b
    Start with a plan for a made-up list of people, or train and compare on a small benchmark:
      pdpsgd plan --tiers 1:0.34,2:0.43,3:0.23 --people 60000
      pdpsgd train digits --tiers 1:0.34,2:0.43,3:0.23
      pdpsgd compare digits --tiers 1:0.34,2:0.43,3:0.23
    """
    if ctx.invoked_subcommand is None:
        _show_most_used()


def _assemble() -> None:
    """Add the commands: each file has a group `app` of several, or one function of the command's name."""
    for name in COMMANDS:
        module = import_module(f"pdpsgd.cli.{name}")
        if hasattr(module, "app"):
            for command in module.app.registered_commands:
                command.cls = Command
            app.add_typer(module.app, name=name)
        else:
            app.command(name, cls=Command)(getattr(module, name))


_assemble()
