"""The rooms of the package keep their order: read from the syntax trees, so that nothing has to be imported."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from docs._rooms import (
    ORDER,
    PAGE,
    PICTURE,
    SOURCE,
    WITHOUT_TORCH,
    Module,
    draw,
    page_with_list,
    read_imports,
    read_modules,
)

MODULES = read_modules()
IMPORTS = read_imports(MODULES)

ENTRY_POINTS = {"pdpsgd", "pdpsgd.__main__", "pdpsgd.cli.demo"}
"""Modules that somebody runs. Commands and integrations are entry points, too; experiments may import anything."""

KNOWN: set[str] = set()
"""Known exceptions, by room. They only get fewer: one that is not needed any more fails, too."""


def test_rooms_import_earlier_rooms_only() -> None:
    place = {room: number for number, room in enumerate(ORDER)}
    assert {module.room for module in MODULES.values()} - {"__main__"} <= place.keys()
    against = [
        (name, f"{name} imports {target}")
        for name, targets in IMPORTS.items()
        for target in targets
        if name != "pdpsgd.__main__" and place[MODULES[name].room] < place[MODULES[target].room]
    ]
    only_known("order of", against)


def test_no_modules_import_each_other_in_a_circle() -> None:
    only_known("cycle in", [(sorted(cycle)[0], " ".join(sorted(cycle))) for cycle in cycles(IMPORTS)])


def test_nothing_up_to_the_ledger_imports_torch() -> None:
    with_torch = [
        name
        for name, module in MODULES.items()
        if module.room in WITHOUT_TORCH
        and any(base.split(".")[0] == "torch" for base, _ in module.imported())
    ]
    assert with_torch == []


def test_somebody_imports_every_module() -> None:
    paths = (SOURCE.parent / "experiments").glob("*.py")
    outside = {base for path in paths for base, _ in Module(path.stem, path).imported()}
    imported = set().union(*IMPORTS.values()) | outside | ENTRY_POINTS
    unused = {
        name
        for name, module in MODULES.items()
        if name not in imported and module.room != "integrations" and module.path.parent.name != "cli"
    }
    assert {name for name in unused if MODULES[name].path.name != "__init__.py"} == set()


def test_the_listing_shows_the_way() -> None:
    hidden = {"__init__.py", "__main__.py", "py.typed", "__pycache__"}
    entries = {path.name for path in (SOURCE / "pdpsgd").iterdir()} - hidden
    assert len(entries) <= 19, sorted(entries)  # with PATE, which has a room of its own
    assert entries <= {*ORDER, *(f"{name}.py" for name in ORDER)}


def test_summaries_fit_on_one_line() -> None:
    found = [(name, place) for name, module in MODULES.items() for place in long_summaries(module)]
    only_known("summary in", found)


def test_the_page_shows_the_code_as_it_is() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page == page_with_list(page), "write it again: python docs/_rooms.py"
    assert PICTURE.read_text(encoding="utf-8") == draw(), "draw it again: python docs/_rooms.py"


def only_known(kind: str, found: list[tuple[str, str]]) -> None:
    """Refuse findings (module, what) in rooms without a known exception, and exceptions without a finding."""
    rooms: dict[str, list[str]] = {}
    for name, what in found:
        rooms.setdefault(f"{kind} {MODULES[name].room}", []).append(what)
    assert {key: what for key, what in rooms.items() if key not in KNOWN} == {}
    outdated = {key for key in KNOWN - rooms.keys() if key.startswith(kind)}
    assert outdated == set(), "take these out of KNOWN"


def cycles(graph: dict[str, set[str]]) -> set[frozenset[str]]:
    """Return the sets of modules that reach each other."""
    reach = {name: reachable(graph, name) for name in graph}
    return {
        frozenset(other for other in reach[name] if name in reach[other])
        for name in graph
        if name in reach[name]
    }


def reachable(graph: dict[str, set[str]], start: str) -> set[str]:
    seen: set[str] = set()
    left = list(graph[start])
    while left:
        name = left.pop()
        if name not in seen:
            seen.add(name)
            left += graph[name]
    return seen


def long_summaries(module: Module) -> Iterator[str]:
    """Yield what has a docstring whose first sentence goes on in the second line."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (ast.get_docstring(node) or "").splitlines()
            if len(lines) > 1 and lines[1].strip():
                yield f"{module.name}:{getattr(node, 'name', '')}"


def test_a_cycle_is_found() -> None:
    assert cycles({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == {frozenset({"b", "c"})}


@pytest.mark.parametrize(("text", "found"), [('"""One line."""', []), ('"""Two\nlines."""', ["m:"])])
def test_a_long_summary_is_found(text: str, found: list[str], tmp_path: Path) -> None:
    path = tmp_path / "m.py"
    path.write_text(text)
    assert list(long_summaries(Module("m", path))) == found
