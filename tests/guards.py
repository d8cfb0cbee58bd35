"""Switches every refusal off once, to see a test fail: `python -m tests.guards engine/checks tests/engine/checks`.

A refusal is a call of `fail` (or of a function named after refusing) or a `raise`. An import hook numbers them. While a
test runs, it is noted which of them it sets off; then the test runs again with each of these switched off, and one that
fails then has found it. What is never set off, or found by no test that sets it off, is listed.

Arguments are folders or files of `src/pdpsgd` (without .py), then the tests that are to find their refusals; further
options are pytest's. Refusals in other processes (ranks, commands that are started) are not seen.
"""

from __future__ import annotations

import ast
import importlib.abc
import importlib.machinery
import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

PACKAGE = Path(__file__).parent.parent / "src" / "pdpsgd"
CHOSEN, OUTPUT = "PDPSGD_GUARDS", "PDPSGD_GUARDS_OUTPUT"
SECONDS = 120  # for a test with a refusal switched off, which may then never end
REFUSING = ("fail", "refuse", "_fail", "_refuse")

places: list[str] = []
"""The refusals by number: file and line."""
set_off: set[int] = set()
off: set[int] = set()
found: dict[int, str] = {}
reached: dict[int, list[str]] = {}


def refuses(number: int) -> bool:
    """Note that a refusal was set off; whether it is to refuse."""
    set_off.add(number)
    return number not in off


def is_refusal(node: ast.stmt) -> bool:
    """Whether a statement refuses something."""
    if isinstance(node, ast.Raise):
        return node.exc is not None
    if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)):
        return False
    called = node.value.func
    name = (
        called.id
        if isinstance(called, ast.Name)
        else called.attr
        if isinstance(called, ast.Attribute)
        else ""
    )
    return name.startswith(REFUSING)


class Numbering(ast.NodeTransformer):
    """Puts every refusal under a condition that asks for its number."""

    def __init__(self, file: str) -> None:
        self.file = file

    def generic_visit(self, node: ast.AST) -> ast.AST:
        """Rewrite the statements of a block."""
        super().generic_visit(node)
        if not (isinstance(node, ast.stmt) and is_refusal(node)):
            return node
        places.append(f"{self.file}:{node.lineno}")
        condition = ast.parse(
            f"__import__('tests.guards').guards.refuses({len(places) - 1})", mode="eval"
        ).body
        return ast.fix_missing_locations(ast.copy_location(ast.If(condition, [node], []), node))


class Loader(importlib.machinery.SourceFileLoader):
    """Loads a module with its refusals numbered."""

    def get_code(self, fullname: str) -> Any:
        """Compile afresh: nothing of this goes into the cache."""
        path = self.get_filename(fullname)
        tree = Numbering(str(Path(path).relative_to(PACKAGE))).visit(ast.parse(self.get_data(path)))
        return compile(tree, path, "exec", dont_inherit=True)


class Finder(importlib.abc.MetaPathFinder):
    """Finds the modules whose refusals are looked at."""

    def __init__(self, chosen: list[str]) -> None:
        self.chosen = [PACKAGE / each for each in chosen]

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        """Return the module with another loader, if it was chosen."""
        if not fullname.startswith("pdpsgd."):
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
            return None
        file = Path(spec.origin).with_suffix("")
        if any(each == file or each in file.parents for each in self.chosen):
            spec.loader = Loader(fullname, spec.origin)
        return spec


if (
    CHOSEN in os.environ and __name__ != "__main__"
):  # a plugin of pytest, read before anything of the package is
    sys.meta_path.insert(0, Finder(json.loads(os.environ[CHOSEN])))


def pytest_runtest_protocol(item: Any, nextitem: Any) -> bool:
    """Run a test, then again with each refusal off that it set off and that no test has found."""
    set_off.clear()
    if any(report.failed for report in run(item, item)):
        print(f"\nfails by itself: {item.nodeid}")
        return True
    for number in sorted(set_off):
        reached.setdefault(number, []).append(item.nodeid)
    for number in sorted(set_off - found.keys()):
        off.add(number)
        try:
            if any(report.failed for report in run(item, item)):
                found[number] = item.nodeid
        finally:
            off.clear()
    item.session._setupstate.teardown_exact(nextitem)
    return True


def run(item: Any, nextitem: Any) -> list[Any]:
    """Run a test once, with fixtures of its own."""
    from _pytest.runner import runtestprotocol

    if hasattr(item, "_request"):
        item._initrequest()
    signal.signal(signal.SIGALRM, too_long)
    signal.alarm(SECONDS)
    try:
        item.session._setupstate.teardown_exact(None)
        return list(runtestprotocol(item, log=False, nextitem=None))
    finally:
        signal.alarm(0)


def too_long(*_: Any) -> None:
    """End a test that a refusal was to end."""
    raise TimeoutError


def pytest_sessionfinish() -> None:
    """List what no test finds."""
    result = {
        "refusals": len(places),
        "found": {places[n]: test for n, test in sorted(found.items())},
        "set off, found by no test": {
            places[n]: reached[n][:3] for n in sorted(reached.keys() - found.keys())
        },
        "never set off": [place for n, place in enumerate(places) if n not in reached],
    }
    print("\n" + "\n".join(lines(result)))
    if os.environ.get(OUTPUT):
        Path(os.environ[OUTPUT]).write_text(json.dumps(result, indent=1))


def lines(result: dict[str, Any]) -> Iterator[str]:
    """Say it in lines."""
    yield f"{result['refusals']} refusals; {len(result['found'])} found by a test"
    for kind in ("set off, found by no test", "never set off"):
        yield f"{kind}: {len(result[kind])}"
        yield from (f"  {place}" for place in result[kind])


def main(arguments: list[str]) -> int:
    """Look at some rooms with some tests."""
    chosen = [each for each in arguments if (PACKAGE / each).is_dir() or (PACKAGE / f"{each}.py").is_file()]
    rest = [each for each in arguments if each not in chosen]
    os.environ[CHOSEN] = json.dumps(chosen)
    sys.modules.pop("pdpsgd", None)
    return int(pytest.main(["-p", "tests.guards", "-p", "no:cacheprovider", "-n", "0", "-q", *rest]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
