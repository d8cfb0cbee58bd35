"""What is unusual in rows that a model is asked about: counted, to be said, and never an obstacle."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from pdpsgd._typing import FloatArray
from pdpsgd.data.cells import key_of
from pdpsgd.data.schema import Categorical, Numeric
from pdpsgd.errors import shown

MOST_NAMED = 6
"""Columns that one sentence names."""


class Remarks:
    """Counts, over all rows so far, of missing values, numbers outside their range, and unknown categories."""

    def __init__(self) -> None:
        self.rows = 0
        self.missing: Counter[str] = Counter()
        self.outside: Counter[str] = Counter()
        self.unknown: Counter[str] = Counter()
        self.unused: tuple[str, ...] = ()
        self._example: dict[str, str] = {}

    def see_numbers(self, name: str, values: FloatArray, column: Numeric) -> None:
        """Count what a column of numbers lacks, and what lies outside of its public range."""
        self._count(self.missing, name, int(np.isnan(values).sum()))
        self._count(self.outside, name, int(((values < column.low) | (values > column.high)).sum()))

    def see_categories(self, name: str, values: Sequence[Any], column: Categorical) -> None:
        """Count what a column of categories lacks, and which of its values no category is."""
        self._count(self.missing, name, sum(value is None for value in values))
        known = set(map(key_of, column.categories))
        unknown = [value for value in values if value is not None and key_of(value) not in known]
        if unknown:
            self._example.setdefault(name, shown(unknown[0]))
        self._count(self.unknown, name, len(unknown))

    def alarming(self) -> list[str]:
        """Say what the model has never been told of: unknown categories, and numbers outside their range."""
        said = []
        if self.unknown:
            first = next(iter(self.unknown))
            said.append(
                f'Unknown categories count as "other": {self._list(self.unknown)} (such as {self._example[first]} in '
                f"{first!r})."
            )
        if self.outside:
            said.append(f"Numbers outside their range count as its nearer end: {self._list(self.outside)}.")
        return said

    def sentences(self) -> list[str]:
        """Say everything, for people to read."""
        said = self.alarming()
        if self.missing:
            said.append(
                'Missing values count as the middle of a range, or as the category "other": '
                f"{self._list(self.missing)}."
            )
        if self.unused:
            names = ", ".join(map(repr, self.unused[:MOST_NAMED]))
            more = f" and {len(self.unused) - MOST_NAMED} more" if len(self.unused) > MOST_NAMED else ""
            said.append(f"Columns that the model does not look at: {names}{more}.")
        return said

    def to_dict(self) -> dict[str, Any]:
        """Return the counts as plain data."""
        return {
            "rows": self.rows,
            "missing": dict(self.missing),
            "outside": dict(self.outside),
            "unknown": dict(self.unknown),
            "unused": list(self.unused),
        }

    def _count(self, counter: Counter[str], name: str, times: int) -> None:
        if times:
            counter[name] += times

    def _list(self, counter: Counter[str]) -> str:
        named = [f"{name!r} in {times:,} of {self.rows:,} rows" for name, times in counter.most_common()]
        more = [f"{len(named) - MOST_NAMED} more columns"] if len(named) > MOST_NAMED else []
        return ", ".join(named[:MOST_NAMED] + more)
