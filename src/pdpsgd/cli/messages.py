"""How a command ends: a user's mistake with a sentence and exit code 2, Ctrl-C with what is kept and 130."""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import typer

from pdpsgd.errors import PdpsgdError, shown

INTERRUPTED = 130
USER_ERROR = 2

_tracebacks = False


@contextmanager
def messages_for_users() -> Iterator[None]:
    """Turn errors, warnings and Ctrl-C into sentences; bugs keep their traceback."""
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            yield
    except PdpsgdError as error:
        _end(error, str(error))
    except BrokenPipeError:  # whoever read the output has seen enough
        raise
    except OSError as error:
        where = f" of {shown(str(error.filename))}" if error.filename else ""
        _end(error, f"Expected the operating system to allow the use{where}. Got: {error.strerror or error}.")
    except MemoryError as error:
        _end(error, f"Expected enough memory for what was asked. Got too little: {error or 'none is left'}.")
    except KeyboardInterrupt as error:
        _say("Interrupted", str(error) or "Nothing was left half-written.")
        raise typer.Exit(INTERRUPTED) from error


def show_tracebacks(wanted: bool) -> None:
    """Say whether errors are followed by where in the code they arose."""
    global _tracebacks
    _tracebacks = wanted


def _end(error: BaseException, message: str) -> NoReturn:
    _say("Error", message)
    if _tracebacks:
        traceback.print_exception(error)
    raise typer.Exit(USER_ERROR) from error


def say_warning(message: str) -> None:
    """Say something that `--quiet` does not silence, on the error stream."""
    _say("Warning", message, style="bold yellow")


def _show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    """Print a warning as a sentence, without the line of code that gave it."""
    say_warning(str(message))


def _say(kind: str, message: str, *, style: str = "bold red") -> None:
    from rich.console import Console

    from pdpsgd.cli.prose import wrapped

    console = Console(stderr=True)
    console.print(f"{kind}:", style=style, end=" ")
    text = wrapped(message, console, after=len(kind) + 2)
    console.print(text, markup=False, highlight=False, soft_wrap=True)
