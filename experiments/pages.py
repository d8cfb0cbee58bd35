"""What the pages of results have in common: a page with its figures, and cells in a table."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from experiments.cells import Cell, printed_text
from experiments.published import SKEWS, TABLE_1
from experiments.search import EXCLUDE

HOW_TO_READ = (
    "Test accuracy in percent: mean ± standard deviation over seeds (number of seeds in parentheses). "
    "An empty cell was not run; `python -m experiments {what}` fills it."
)


@dataclass(frozen=True)
class Page:
    """A page and the figures on it."""

    name: str
    markdown: str
    cells: tuple[Cell, ...]

    def write(self, folder: Path) -> list[Path]:
        """Write the Markdown and the CSV file."""
        folder.mkdir(parents=True, exist_ok=True)
        paths = [folder / f"{self.name}.md", folder / f"{self.name}.csv"]
        paths[0].write_text(self.markdown, encoding="utf-8")
        paths[1].write_text(_csv(self.cells), encoding="utf-8")
        return paths


def by_skew(dataset: str, systems: Sequence[str], cells: Sequence[Cell]) -> list[str]:
    """Return a table of systems at the three skews, beside the paper's cells, and their steps at k = 0."""
    heads = " | ".join(f"k = {k:g} | paper" for k in SKEWS)
    lines = [f"| system | {heads} | steps |", f"|---|{'---|---|' * len(SKEWS)}---|"]
    for system in systems:
        shown = []
        for k in SKEWS:
            found = find(cells, system, k)
            if found is None and system in ("dp-sgd", EXCLUDE):
                # Uniform DP-SGD at the smallest budget does not depend on k; excluding nobody is the same.
                found = find(cells, "dp-sgd", 0.0)
            shown += [text(found), printed_text(TABLE_1.get((dataset, k, system)))]
        middle = find(cells, "dp-sgd" if system == EXCLUDE else system, 0.0)
        steps = "" if middle is None or middle.iterations is None else f"{middle.iterations:,}"
        lines.append(f"| {system} | {' | '.join(shown)} | {steps} |")
    return lines


def find(cells: Sequence[Cell], system: str, k: float) -> Cell | None:
    """Return the cell of a system at a skew."""
    return next((c for c in cells if c.setting.system == system and c.setting.population.k == k), None)


def text(found: Cell | None) -> str:
    """Return a cell for a table."""
    return "" if found is None else found.text()


def _csv(cells: Sequence[Cell]) -> str:
    written = io.StringIO()
    rows = [found.row() for found in cells]
    if rows:
        writer = csv.DictWriter(written, fieldnames=list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    return written.getvalue()
