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


def wrapped(text: str, console: Console, *, after: int = 0) -> str:
    """Wrap text for a terminal; what stands between backticks is a command and stays in one line.

    Args:
        text: One or more lines; those that fit stay as they are, points of a list are indented.
        console: Where it is printed.
        after: Columns that are taken in the first line already.

    Returns:
        The text, unchanged where nobody reads it on a terminal.
    """
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
