"""Shows the doctests of docstrings as code: without this, Markdown takes `>>>` for quotations."""

from __future__ import annotations

import re
from typing import Any

import griffe

# A block that begins with >>> and goes on to the next empty line.
DOCTEST = re.compile(r"(?m)^( *)>>> (?:.+\n?)+")


class FencedDoctests(griffe.Extension):
    """Puts a fence around every doctest."""

    def on_object(self, *, obj: Any, **kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = DOCTEST.sub(_fenced, obj.docstring.value)


def _fenced(found: re.Match[str]) -> str:
    indent = found.group(1)
    return f"{indent}```pycon\n{found.group(0).rstrip()}\n{indent}```\n"
