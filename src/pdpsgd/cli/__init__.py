"""The command line: one file a command. Nothing heavy is imported before a command needs it."""

from __future__ import annotations

import warnings
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from pdpsgd.errors import PdpsgdError

COMMANDS = ("plan", "train", "compare", "audit", "report", "data")
INTERRUPTED = 130
USER_ERROR = 2


class Commands(TyperGroup):
    """The commands in the order of use; a user's mistake ends with a message, not with a traceback."""

    def list_commands(self, ctx: Any) -> list[str]:
        """The names, in the order of use."""
        return [name for name in COMMANDS if name in self.commands]

    def invoke(self, ctx: Any) -> Any:
        """Run a command; exit code 2 for what the user gave, 130 after Ctrl-C."""
        try:
            with warnings.catch_warnings():
                warnings.showwarning = _show_warning
                return super().invoke(ctx)
        except PdpsgdError as error:
            _say("Error", str(error))
            raise typer.Exit(USER_ERROR) from error
        except KeyboardInterrupt as error:
            _say("Interrupted", str(error) or "Nothing was left half-written.")
            raise typer.Exit(INTERRUPTED) from error


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main() -> None:
    """The entry point of the console script."""
    app(prog_name="pdpsgd")


def _print_version(wanted: bool) -> None:
    if wanted:
        from pdpsgd import __version__

        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _pdpsgd(
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version and end.", is_eager=True, callback=_print_version),
    ] = False,
) -> None:
    """Train models so that every person gets the privacy they asked for.

    \b
    Start with a plan for a made-up list of people, or train and compare on a small benchmark:
      pdpsgd plan --tiers 1:0.34,2:0.43,3:0.23 --people 60000
      pdpsgd train digits --tiers 1:0.34,2:0.43,3:0.23 --steps 150 --batch-size 256 --learning-rate 2
      pdpsgd compare digits --tiers 1:0.34,2:0.43,3:0.23 --steps 150 --batch-size 256
    """


def _show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    """A warning as a sentence, without the line of code that gave it."""
    _say("Warning", str(message), style="bold yellow")


def _say(kind: str, message: str, *, style: str = "bold red") -> None:
    from rich.console import Console

    console = Console(stderr=True)
    console.print(f"{kind}:", style=style, end=" ")
    console.print(message, markup=False, highlight=False, soft_wrap=True)


def _assemble() -> None:
    """Each command's file has either a group `app` of several commands, or one function of the command's
    name."""
    for name in COMMANDS:
        module = import_module(f"pdpsgd.cli.{name}")
        if hasattr(module, "app"):
            app.add_typer(module.app, name=name)
        else:
            app.command(name)(getattr(module, name))


_assemble()
