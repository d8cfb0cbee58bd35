"""What `pdpsgd pate` reads: records in the order of the list, and public examples, which are nobody's on it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pdpsgd.errors import fail

if TYPE_CHECKING:
    from torch import Tensor

    from pdpsgd.budgets.budgets import Budgets
    from pdpsgd.training.inputs import TrainingInputs


def check_public(public: str, data: str, inputs: TrainingInputs) -> None:
    """Refuse people of the list as public examples: the student learns from them without noise."""
    from pdpsgd.budgets.readers import has_column, read_columns
    from pdpsgd.data.people import TABLES

    file = Path(public)
    if file.exists() and Path(data).exists() and file.samefile(data):
        fail(
            f"Expected examples of nobody who has to be protected. Got --public {public}: people's own records."
        )
    id_column = None if inputs.schema is None else inputs.schema.id_column
    listed = inputs.budgets
    if id_column is None or listed is None or not listed.named or file.suffix.lower() not in TABLES:
        return
    if not file.is_file() or not has_column(file, id_column):
        return
    both = set(map(str, listed.ids.tolist())) & set(map(str, read_columns(file, [id_column])[0][id_column]))
    if both:
        fail(
            f"Expected examples of nobody who has to be protected. Got {min(both)!r} in {public} and on the list: "
            "the student learns from these rows without noise."
        )


def split(
    inputs: TrainingInputs, public: str, *, own_data: bool
) -> tuple[tuple[Tensor, Tensor], Budgets, Tensor]:
    """Put records in the order of the list (NaN for whoever has none), and read the public examples."""
    import numpy as np
    import torch

    from pdpsgd.budgets.budgets import Budgets
    from pdpsgd.data.remarks import Remarks
    from pdpsgd.data.rows import read_rows

    values, targets = inputs.records
    budgets = inputs.budgets
    assert budgets is not None  # read_inputs reads them, too
    place = {name: number for number, name in enumerate(np.asarray(inputs.record_ids).tolist())}
    found = [place.get(name, -1) for name in budgets.ids.tolist()]
    missing = torch.tensor(found) < 0
    held = values[found].clone().float()
    held[missing] = torch.nan
    wanted = targets[found].clone()
    wanted[missing] = 0
    if not public.startswith("last:"):
        parts = read_rows(public, inputs.preprocessing, inputs.shape, at_once=4096, remarks=Remarks())
        return (held, wanted), budgets, torch.cat([part.inputs for part in parts]).float()
    if own_data:
        fail(
            "Expected a file of examples of nobody who has to be protected, with --public: last:N is for benchmarks. "
            f"Got --public {public} with data of your own, whose last records are people's, too."
        )
    number = public.removeprefix("last:")
    if not number.isdigit() or not 0 < int(number) < len(held):
        fail(f"Expected --public last:N with N from 1 to {len(held) - 1}. Got {public!r}.")
    rest = len(held) - int(number)
    listed = Budgets(budgets.epsilon[:rest], budgets.delta[:rest], ids=budgets.ids[:rest])
    listed = listed if budgets.named else listed.without_names()
    return (held[:rest], wanted[:rest]), listed, held[rest:]
