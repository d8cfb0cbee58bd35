"""Records of texts, each collated by itself and filled up to one public length.

The collators of transformers pad to the longest text of the batch, so that the shape of everybody's row tells of
somebody else's text. Here the same collator is given one record at a time, and rounds its length up to the public one:
a row is a function of its own record alone, to the bit, and what the collator draws at random (masked words, say) it
draws for that record alone.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from pdpsgd.errors import check_positive, fail

MULTIPLE = (
    "pad_to_multiple_of"  # the option by which every padding collator of transformers rounds lengths up
)
UNKNOWN = 10**6  # tokenizers without a limit say some huge number


class OneByOne(Dataset[dict[str, Tensor]]):
    """The records of a dataset as rows of one shape, each made of its own record alone.

    Guarantee: row i depends on record i, the collator and public constants only.

    Args:
        records: Any map-style dataset of mappings.
        collate: The collator; it is only ever given one record.
        without: Columns that say whose record it is.
    """

    def __init__(
        self,
        records: Any,
        collate: Callable[[list[Any]], Mapping[str, Any]],
        *,
        without: frozenset[str] = frozenset(),
    ) -> None:
        self.records = records
        self.collate = collate
        self.without = without
        self._shapes: dict[str, torch.Size] | None = None

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        record = self.records[number]
        if not isinstance(record, Mapping):
            fail(
                f"Expected records that are mappings, such as a dict of columns. Got {type(record).__name__}."
            )
        batch = self.collate([{name: value for name, value in record.items() if name not in self.without}])
        row = {name: self._row_of(name, value) for name, value in batch.items()}
        self._check_shapes(row)
        return row

    def _row_of(self, name: str, value: Any) -> Tensor:
        if not isinstance(value, Tensor) or value.dim() == 0 or len(value) != 1:
            got = (
                f"a tensor of shape {tuple(value.shape)}"
                if isinstance(value, Tensor)
                else type(value).__name__
            )
            fail(
                f"Expected the data_collator to give a tensor with one row for one record as {name!r}. Got {got}: it "
                "does something to the batch as a whole."
            )
        return value[0]

    def _check_shapes(self, row: Mapping[str, Tensor]) -> None:
        shapes = {name: value.shape for name, value in row.items()}
        if self._shapes is None:
            self._shapes = shapes
        if shapes != self._shapes:
            name = next(
                (each for each in (*self._shapes, *shapes) if self._shapes.get(each) != shapes.get(each)), ""
            )
            fail(
                f"Expected rows of one public shape: {name!r} of {_shown(self._shapes.get(name))}, as in another "
                f"record. Got {_shown(shapes.get(name))}. Cut every text to the public length, "
                "tokenizer(text, truncation=True, max_length=N), give PrivateTrainer(max_length=N), and a "
                "data_collator that pads."
            )


def padded_to(collate: Any, length: int) -> Any:
    """Return a copy of a collator that rounds the length of texts up to this one; others are given back as they are."""
    check_positive(max_length=length)
    if not hasattr(collate, MULTIPLE):
        return collate
    made = copy.copy(collate)
    setattr(made, MULTIPLE, length)
    return made


def public_length(tokenizer: Any, config: Any) -> int:
    """Return the greatest length that tokenizer and model allow: public, as it depends on neither's texts."""
    limits = [
        getattr(tokenizer, "model_max_length", None),
        getattr(config, "max_position_embeddings", None),
    ]
    known = [limit for limit in limits if isinstance(limit, int) and 0 < limit < UNKNOWN]
    if not known:
        fail(
            "Expected max_length=N, the public length that texts are padded to: neither tokenizer nor model has a "
            "limit. Got none."
        )
    return min(known)


def _shown(shape: torch.Size | None) -> str:
    return "nothing" if shape is None else f"shape {tuple(shape)}"
