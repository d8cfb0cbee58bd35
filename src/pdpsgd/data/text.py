"""Free text in a table: which column it is, and the texts themselves, for an encoder to read."""

from __future__ import annotations

from typing import Any

from pdpsgd.budgets.readers import column_names, open_table
from pdpsgd.data.cells import cells
from pdpsgd.data.schema import Schema, Text
from pdpsgd.errors import fail


def text_column(schema: Schema) -> str | None:
    """Name the column of free text, which has to be the only feature; None where there is none."""
    texts = [name for name, column in schema.columns.items() if isinstance(column, Text)]
    if not texts:
        return None
    if len(schema.features) > 1:
        others = ", ".join(repr(name) for name in schema.features if name != texts[0])
        fail(
            f"Expected the text {texts[0]!r} to be the only column that is a feature. Got {others}, too: declare it "
            "ignored in the schema."
        )
    return texts[0]


def read_texts(table: Any, name: str) -> tuple[str, ...]:
    """Read a column of free text; a missing text is an empty one.

    Args:
        table: A pandas or polars frame, or a CSV or Parquet file.
        name: The column.

    Returns:
        One text per row.

    Raises:
        PdpsgdError: If there is no such column, or something else than text in it.
    """
    frame, source = open_table(table)
    if name not in frame.columns:
        fail(
            f"Expected a column {name!r} with texts in {source.name}. Its columns are {column_names(frame)}."
        )
    texts = ["" if value is None else value for value in cells(frame[name])]
    for index, text in enumerate(texts):
        if not isinstance(text, str):
            fail(f"Expected text in column {name!r} of {source.row(index)}. Got {text!r}.")
    return tuple(texts)
