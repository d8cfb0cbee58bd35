"""Made-up rows by a schema: in public ranges and categories, and nobody's record among them."""

from __future__ import annotations

import datetime
from typing import Any

import numpy as np
import numpy.typing as npt

from pdpsgd.data.people import PeopleData
from pdpsgd.data.preprocessing import Preprocessing
from pdpsgd.data.schema import Categorical, Date, Numeric, Schema
from pdpsgd.errors import fail

SEED = 0


def made_up_people(
    schema: Schema,
    people: int,
    *,
    ids: npt.NDArray[Any] | None = None,
    test_people: int = 0,
    name: str = "made-up rows",
) -> PeopleData:
    """Make rows up, evenly over what the schema allows, and encode them as records are.

    Args:
        schema: The public ranges, categories and classes.
        people: The number of rows to train on.
        ids: The ids of these people, where they are known; else numbers.
        test_people: The number of rows to test on.
        name: What the data is called.

    Returns:
        Tensors like those of a table with this schema.

    Raises:
        PdpsgdError: If the schema has free text, which cannot be made up.
    """
    import polars

    from pdpsgd.data.tabular import encode

    random = np.random.default_rng(SEED)
    rows = people + test_people
    columns = {key: _column(schema, key, rows, random) for key in schema.features}
    if schema.label_range is None:
        columns[schema.label] = random.choice(schema.classes, rows).tolist()
    else:
        columns[schema.label] = random.uniform(*schema.label_range, rows).tolist()
    if schema.id_column is not None:
        columns[schema.id_column] = [f"made-up-{number}" for number in range(rows)]
    encoded = encode(polars.DataFrame(columns), schema)
    return PeopleData(
        name=name,
        inputs=encoded.inputs[:people],
        targets=encoded.targets[:people],
        ids=np.arange(people) if ids is None else ids,
        classes=encoded.classes,
        test_inputs=encoded.inputs[people:] if test_people else None,
        test_targets=encoded.targets[people:] if test_people else None,
        schema=schema,
        named=ids is not None,
        learned_from_data=not schema.confirmed,
        preprocessing=Preprocessing("table", schema=schema),
    )


def _column(schema: Schema, name: str, rows: int, random: np.random.Generator) -> list[Any]:
    """Make up the values of a column."""
    how = schema.columns[name]
    if isinstance(how, Numeric):
        return random.uniform(how.low, how.high, rows).tolist()
    if isinstance(how, Date):
        days = random.integers(0, (how.high - how.low).days + 1, rows)
        return [how.low + datetime.timedelta(days=int(each)) for each in days]
    if isinstance(how, Categorical):
        return random.choice(how.categories, rows).tolist()
    fail(f"Expected numbers, dates and categories, to make rows up. Got column {name!r}, which is free text.")
