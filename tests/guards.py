"""Switches every refusal off once, to see a test fail: `python -m tests.guards engine/checks tests/engine/checks`.

A refusal is a call of `fail` (or of a function named after refusing) or a `raise`. An import hook puts each under a
condition. While a test runs, it is noted which of them it sets off; then the test runs again with each of these
switched off, and one that fails then has found it. What is never set off, or found by no test that sets it off, is
listed. Processes that a test starts (ranks, commands) take part: they read which refusal is off from the environment,
and write which they set off to a file.

Arguments are folders or files of `src/pdpsgd` (without .py), then the tests that are to find their refusals; further
options are pytest's. What a fixture sets off that several tests share counts for the first of them.
"""

from __future__ import annotations

import ast
import importlib.abc
import importlib.machinery
import json
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "pdpsgd"
CHOSEN, OUTPUT = "PDPSGD_GUARDS", "PDPSGD_GUARDS_OUTPUT"
OFF, SET_OFF = (
    "PDPSGD_GUARDS_OFF",
    "PDPSGD_GUARDS_SET_OFF",
)  # one refusal; a file with those that were set off
SECONDS = 120  # for a test with a refusal switched off, which may then never end
REFUSING = ("fail", "refuse", "_fail", "_refuse")
IN_EVERY_PROCESS = "import tests.guards\n"

found: dict[str, str] = {}
reached: dict[str, list[str]] = {}
noted: set[str] = set()  # by this process


def refuses(place: str) -> bool:
    """Note that a refusal was set off; whether it is to refuse."""
    if place not in noted:
        noted.add(place)
        with Path(os.environ[SET_OFF]).open("a") as file:
            file.write(f"{place}\n")
    return os.environ.get(OFF) != place


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


class Conditions(ast.NodeTransformer):
    """Puts every refusal under a condition that asks for its place."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.places: list[str] = []

    def generic_visit(self, node: ast.AST) -> ast.AST:
        """Rewrite the statements of a block."""
        super().generic_visit(node)
        if not (isinstance(node, ast.stmt) and is_refusal(node)):
            return node
        place = f"{self.file}:{node.lineno}"
        self.places.append(place)
        asked = f"__import__('tests.guards').guards.refuses({place!r})"
        condition = ast.parse(asked, mode="eval").body
        return ast.fix_missing_locations(ast.copy_location(ast.If(condition, [node], []), node))

    @classmethod
    def of(cls, path: Path) -> tuple[ast.AST, list[str]]:
        """Return a file's syntax tree with all refusals under conditions, and their places."""
        rewriting = cls(str(path.relative_to(PACKAGE)))
        return rewriting.visit(ast.parse(path.read_bytes())), rewriting.places


class Loader(importlib.machinery.SourceFileLoader):
    """Loads a module with its refusals under conditions."""

    def get_code(self, fullname: str) -> Any:
        """Compile afresh: nothing of this goes into the cache."""
        path = self.get_filename(fullname)
        return compile(Conditions.of(Path(path))[0], path, "exec", dont_inherit=True)


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
):  # in every process, before anything of the package is read
    sys.meta_path.insert(0, Finder(json.loads(os.environ[CHOSEN])))


def pytest_runtest_protocol(item: Any, nextitem: Any) -> bool:
    """Run a test, then again with each refusal off that it set off and that no test has found."""
    forget()
    failed = any(report.failed for report in run(item, nextitem))
    set_off = sorted(all_set_off())
    if failed:
        print(f"\nfails by itself: {item.nodeid}")
        return True
    for place in set_off:
        reached.setdefault(place, []).append(item.nodeid)
    for place in set_off:
        if place not in found:
            item.session._setupstate.teardown_exact(None)  # fixtures of its own: they may refuse, too
            os.environ[OFF] = place
            try:
                if any(report.failed for report in run(item, None)):
                    found[place] = item.nodeid
            finally:
                del os.environ[OFF]
    return True


def forget() -> None:
    """Begin to note afresh."""
    noted.clear()
    Path(os.environ[SET_OFF]).write_text("")


def all_set_off() -> set[str]:
    """Return what this process and those that it started have set off."""
    return set(Path(os.environ[SET_OFF]).read_text().splitlines())


def run(item: Any, nextitem: Any) -> list[Any]:
    """Run a test once."""
    from _pytest.runner import runtestprotocol

    if hasattr(item, "_request"):
        item._initrequest()
    signal.signal(signal.SIGALRM, too_long)
    signal.alarm(SECONDS)
    try:
        return list(runtestprotocol(item, log=False, nextitem=nextitem))
    except TimeoutError:  # between the parts of a test
        item.session._setupstate.teardown_exact(nextitem)
        return []
    finally:
        signal.alarm(0)


def too_long(*_: Any) -> None:
    """End a test that a refusal was to end."""
    raise TimeoutError


def pytest_sessionfinish() -> None:
    """List what no test finds."""
    chosen = [PACKAGE / each for each in json.loads(os.environ[CHOSEN])]
    files = [
        path
        for each in chosen
        for path in (sorted(each.rglob("*.py")) if each.is_dir() else [each.with_suffix(".py")])
    ]
    places = [place for path in dict.fromkeys(files) for place in Conditions.of(path)[1]]
    result = {
        "refusals": len(places),
        "found": {place: found[place] for place in places if place in found},
        "set off, found by no test": {
            place: reached[place][:3] for place in places if place in reached and place not in found
        },
        "never set off": [place for place in places if place not in reached],
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
    import pytest

    chosen = [each for each in arguments if (PACKAGE / each).is_dir() or (PACKAGE / f"{each}.py").is_file()]
    rest = [each for each in arguments if each not in chosen]
    sys.modules.pop("pdpsgd", None)
    with tempfile.TemporaryDirectory() as folder:
        os.environ[CHOSEN] = json.dumps(chosen)
        os.environ[SET_OFF] = str(Path(folder) / "set-off")
        Path(folder, "sitecustomize.py").write_text(IN_EVERY_PROCESS)
        paths = [folder, str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        os.environ["PYTHONPATH"] = os.pathsep.join(paths)
        return int(pytest.main(["-p", "tests.guards", "-p", "no:cacheprovider", "-n", "0", "-q", *rest]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
