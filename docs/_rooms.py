"""What docs/architecture.md shows of the code, read from it: `python docs/_rooms.py` writes it again."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from html import escape
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src"
PICTURE = ROOT / "docs" / "images" / "rooms.svg"
PAGE = ROOT / "docs" / "architecture.md"

ROOMS = {
    "budgets": "what each person allows",
    "accounting": "what an exposure costs",
    "planning": "from budgets to a plan anyone can check",
    "ledger": "what everyone has spent, over time",
    "sampling": "everything random, from one secret key",
    "data": "tables and images in, tensors out",
    "models": "networks, features, first weights",
    "gradients": "the sum of clipped per-example gradients",
    "engine": "executes a plan in any loop",
    "training": "one call: plan, train, evaluate",
    "pate": "teachers, votes, student",
    "audit": "attacks, and tests of the promise",
    "reporting": "pages and charts",
    "integrations": "the engine in other frameworks",
    "cli": "one file per command",
}
"""The rooms in the order of the data, those that are still to come included."""

BASE = ("_typing", "errors", "_cache", "_native_build")
ORDER = (*BASE, *list(ROOMS)[:-2], "__init__", "integrations", "cli")
"""Each imports earlier ones only. `__init__` is the front door, `import pdpsgd`."""

WITHOUT_TORCH = (*BASE, "budgets", "accounting", "planning", "ledger")


@dataclass(frozen=True)
class Module:
    """A file of the package, by its dotted name."""

    name: str
    path: Path

    @property
    def room(self) -> str:
        """The first folder or file below the package."""
        return [*self.name.split("."), "__init__"][1]

    @cached_property
    def tree(self) -> ast.Module:
        """The syntax tree."""
        return ast.parse(self.path.read_text(encoding="utf-8"), str(self.path))

    def imported(self) -> Iterator[tuple[str, str | None]]:
        """Yield (module, name) of every import, also those inside functions and those for types only."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                yield from ((alias.name, None) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                yield from ((node.module or "", alias.name) for alias in node.names)


def read_modules() -> dict[str, Module]:
    """Return all modules of the package by dotted name."""
    found = {}
    for path in sorted((SOURCE / "pdpsgd").rglob("*.py")):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name] = Module(name, path)
    return found


def read_imports(modules: dict[str, Module]) -> dict[str, set[str]]:
    """Return which modules each module imports.

    Importing `a.b.c` also runs the `__init__` of `a` and `a.b`; they count, unless the importer is in there itself.
    """
    graph: dict[str, set[str]] = {}
    for name, module in modules.items():
        graph[name] = set()
        for base, attribute in module.imported():
            target = f"{base}.{attribute}" if f"{base}.{attribute}" in modules else base
            if target in modules:
                parts = target.split(".")
                packages = (".".join(parts[:length]) for length in range(2, len(parts)))
                graph[name] |= {target, *(p for p in packages if not f"{name}.".startswith(f"{p}."))}
        graph[name].discard(name)
    return graph


def room_imports(modules: dict[str, Module], graph: dict[str, set[str]]) -> dict[str, set[str]]:
    """Return which rooms each room imports."""
    found: dict[str, set[str]] = {}
    for name, targets in graph.items():
        room = modules[name].room
        found.setdefault(room, set()).update({modules[target].room for target in targets} - {room})
    return found


def draw() -> str:
    """Return the picture as SVG: a row for each room, a dot for each room that it imports."""
    modules = read_modules()
    imports = room_imports(modules, read_imports(modules))
    rooms = [room for room in ROOMS if room in imports]
    row, left, top = 30, 396, 96
    width, height = left + row * len(rooms) + 20, top + row * len(rooms) + 44
    text = 'font-family="sans-serif"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        'aria-label="Which room imports which: only earlier ones">',
        f'<rect width="{width}" height="{height}" rx="8" fill="#fcfcfb"/>',
    ]
    for index, room in enumerate(rooms):
        y, x = top + row * index, left + row * index + row // 2
        torch = room not in WITHOUT_TORCH
        lines += [
            f'<rect x="16" y="{y + 2}" width="104" height="{row - 4}" rx="5" '
            f'fill="{"#e8eef7" if torch else "#e3f1e6"}" stroke="{"#4a6fa5" if torch else "#3f8050"}"/>',
            f'<text x="68" y="{y + 20}" text-anchor="middle" fill="#1d1d1b" {text} font-size="13">{room}</text>',
            f'<text x="130" y="{y + 20}" fill="#55534e" {text} font-size="12">{escape(ROOMS[room])}</text>',
            f'<text x="{x + 4}" y="{top - 8}" fill="#55534e" {text} font-size="12" '
            f'transform="rotate(-50 {x + 4} {top - 8})">{room}</text>',
            f'<line x1="{left}" x2="{left + row * index}" y1="{y + row // 2}" y2="{y + row // 2}" stroke="#d9d7d0"/>',
        ]
        for column, other in enumerate(rooms):
            center = left + row * column + row // 2
            if other in imports[room]:
                color = "#4a6fa5" if column < index else "#c0392b"
                lines.append(f'<circle cx="{center}" cy="{y + row // 2}" r="6" fill="{color}"/>')
            elif other == room:
                lines.append(
                    f'<rect x="{center - 7}" y="{y + row // 2 - 7}" width="14" height="14" rx="3" fill="#d9d7d0"/>'
                )
    lines += [
        f'<text x="16" y="{height - 16}" fill="#55534e" {text} font-size="12">'
        "Data flows downward. A dot: the room of this row imports the room of that column. "
        "Green: no torch.</text>",
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def list_files(modules: dict[str, Module]) -> str:
    """Return the table of all files: the first line of each one's docstring, in the order of the rooms."""
    rows = ["| file | one line |", "|---|---|"]
    shown = [module for module in modules.values() if module.room in ORDER and module.name != "pdpsgd"]
    for module in sorted(shown, key=lambda module: ORDER.index(module.room)):
        line = (ast.get_docstring(module.tree) or "").split("\n")[0]
        name = module.name.removeprefix("pdpsgd.").replace(".", "/")
        room = "/" not in name and module.path.name == "__init__.py"
        rows.append(f"| **{name}** | **{line}** |" if room else f"| `{name}` | {line} |")
    return "\n".join(rows)


def page_with_list(page: str) -> str:
    """Return the page with its table of files replaced."""
    before, begin, rest = page.partition("<!-- files -->\n")
    _, end, after = rest.partition("<!-- end of files -->\n")
    return f"{before}{begin}\n{list_files(read_modules())}\n\n{end}{after}"


if __name__ == "__main__":
    PAGE.write_text(page_with_list(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    PICTURE.write_text(draw(), encoding="utf-8")
