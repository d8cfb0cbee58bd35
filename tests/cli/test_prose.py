"""Prose fits the terminal it is read on; in a file or a pipe, a sentence stays in one line."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from pdpsgd.cli.prose import WIDEST, wrapped

SENTENCE = (
    "Columns of free text are left out, unless a schema says otherwise: `pdpsgd data schema people.csv`. "
)


def terminal(width):
    return Console(file=io.StringIO(), force_terminal=True, width=width)


@pytest.mark.parametrize("width", [50, 80, 100, 200])
def test_lines_fit_the_terminal_and_nothing_is_lost(width):
    text = SENTENCE * 4
    lines = wrapped(text, terminal(width)).split("\n")
    assert max(map(len, lines)) <= min(width, WIDEST)
    assert " ".join(lines).split() == text.split()


def test_a_command_stays_in_one_line():
    lines = wrapped(SENTENCE * 4, terminal(50)).split("\n")
    assert sum("`pdpsgd data schema people.csv`" in line for line in lines) == 4


def test_a_long_path_is_not_broken():
    path = "runs/" + "x" * 120
    assert path in wrapped(f"Folder: {path} (public/ may be published)", terminal(80)).split("\n")


def test_what_fits_stays_as_it_is():
    bar = "after run   1 jan                  ███████······· 75% left"
    assert wrapped(bar, terminal(80)) == bar


def test_room_is_left_for_what_stands_before():
    lines = wrapped(SENTENCE, terminal(60), after=9).split("\n")
    assert len(lines[0]) <= 60 - 9


def test_in_a_pipe_a_sentence_stays_in_one_line():
    pipe = Console(file=io.StringIO(), width=40)
    assert wrapped(SENTENCE, pipe) == SENTENCE
