"""Made-up records, by a schema or a public shape: nobody's record is among them."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pdpsgd.data.people import PeopleData
from pdpsgd.data.preprocessing import Pixels, Preprocessing
from pdpsgd.data.schema import Categorical, Date, Numeric, Schema
from pdpsgd.data.text import text_column

SEED = 0
MADE_UP_TEXT = "made up"


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
        Tensors like those of a table with this schema. Texts are all the same; their length is up to the encoder.
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
        texts=() if text_column(schema) is None else (MADE_UP_TEXT,) * rows,
        named=ids is not None,
        learned_from_data=not schema.confirmed,
        preprocessing=Preprocessing("table", schema=schema),
    )


def made_up_images(
    shape: tuple[int, ...],
    classes: Sequence[str],
    people: int,
    *,
    pixels: bool = True,
    ids: npt.NDArray[Any] | None = None,
    test_people: int = 0,
    name: str = "made-up images",
) -> PeopleData:
    """Make images up, every pixel by chance, or arrays of other numbers.

    Args:
        shape: The public shape of one record: channels, height and width, or that of an array.
        classes: The public names of the classes.
        people: The number of records to train on.
        pixels: Whether records are bytes, which become numbers from -1 to 1.
        ids: The ids of these people, where they are known; else numbers.
        test_people: The number of records to test on.
        name: What the data is called.

    Returns:
        Tensors like those of such images.
    """
    import torch

    generator = torch.Generator().manual_seed(SEED)
    rows = people + test_people
    if pixels:
        drawn = torch.randint(256, (rows, *shape), generator=generator, dtype=torch.uint8)
        inputs = Pixels().to_inputs(drawn.float())
    else:
        inputs = torch.randn(rows, *shape, generator=generator)
    targets = torch.randint(len(classes), (rows,), generator=generator)
    return PeopleData(
        name=name,
        inputs=inputs[:people],
        targets=targets[:people],
        ids=np.arange(people) if ids is None else ids,
        classes=tuple(classes),
        test_inputs=inputs[people:] if test_people else None,
        test_targets=targets[people:] if test_people else None,
        named=ids is not None,
        preprocessing=Preprocessing("images", pixels=Pixels()) if pixels else Preprocessing(),
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
    return [MADE_UP_TEXT] * rows
