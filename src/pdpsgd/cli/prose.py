"""Prose on a terminal: wrapped between words to its width; in a file or a pipe, each sentence stays in one line."""

from __future__ import annotations

import re
import textwrap
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

WIDEST = 100
"""Columns of prose at most: longer lines are hard to read, however wide the terminal is."""
_JOINED = "\N{NO-BREAK SPACE}"
_STEERING = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")
"""Characters that steer a terminal, or turn the direction of what follows; not tabs and ends of lines."""


def harmless(text: str) -> str:
    """Write what would steer a terminal as what it is: names of people, classes and columns come from files.

    >>> harmless("\x1b[2Jann")
    '\\\\x1b[2Jann'
    """
    return _STEERING.sub(lambda found: repr(found[0])[1:-1], text)


def cell(text: str) -> str:
    """Write a name for a table of rich, in which brackets would be marks, and which may steer no terminal."""
    from rich.markup import escape

    return escape(harmless(text))


def wrapped(text: str, console: Console, *, after: int = 0) -> str:
    """Wrap text for a terminal, which it cannot steer; a command between backticks stays in one line.

    Args:
        text: One or more lines; those that fit stay as they are, points of a list are indented.
        console: Where it is printed.
        after: Columns that are taken in the first line already.

    Returns:
        The text, in the lines that it has where nobody reads it on a terminal.
    """
    text = harmless(text)
    if not console.is_terminal:
        return text
    return "\n".join(
        _wrapped_line(line, min(console.width, WIDEST), after if not place else 0)
        for place, line in enumerate(text.split("\n"))
    )


def _wrapped_line(line: str, width: int, after: int) -> str:
    if len(line) + after <= width:
        return line
    whole = re.sub(r"`[^`]*`", lambda found: found[0].replace(" ", _JOINED), line)
    filled = textwrap.fill(
        whole,
        width,
        initial_indent=" " * after,
        subsequent_indent="  " if line.startswith("- ") else "",
        break_long_words=False,
        break_on_hyphens=False,
    )
    return filled[after:].replace(_JOINED, " ")
