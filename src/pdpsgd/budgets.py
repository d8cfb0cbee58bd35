"""What each person allows: the specification (Phi, Delta) of the promise."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pdpsgd.errors import check_positive, fail
from pdpsgd.tables import read_columns

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
IdArray = npt.NDArray[Any]


@dataclass(frozen=True, init=False, eq=False)
class Budgets:
    """The public list of people and the (epsilon, delta) that each of them allows.

    An epsilon or a delta of 0 means that the person's record is never used. An infinite epsilon ("no protection asked")
    must be allowed by name with `allow_infinite=True`. Without `ids`, people are known by their position.

    The list, and the budgets on it, are public: the promise protects people's records and whether they supplied one.

    >>> Budgets([0.5, 1.0, 2.0])
    Budgets(3 people, epsilon 0.5 to 2, delta 1e-05)
    >>> Budgets([0.5, -1.0])
    Traceback (most recent call last):
        ...
    pdpsgd.errors.PdpsgdError: Expected epsilon >= 0. Got -1.0 for person 1.
    """

    epsilon: FloatArray
    delta: FloatArray
    ids: IdArray

    def __init__(
        self,
        epsilon: npt.ArrayLike,
        delta: npt.ArrayLike = 1e-5,
        *,
        ids: npt.ArrayLike | None = None,
        allow_infinite: bool = False,
    ) -> None:
        epsilons = _numbers("epsilon", epsilon)
        deltas = np.broadcast_to(_numbers("delta", delta), epsilons.shape)
        names = np.arange(epsilons.size) if ids is None else np.asarray(ids)
        if epsilons.size == 0:
            fail("Expected a budget for at least one person. Got an empty list.")
        if names.shape != epsilons.shape:
            fail(f"Expected one id for each of the {epsilons.size} budgets. Got {names.size}.")
        place = _Place.positions(names)
        check_budgets(epsilons, deltas, place, allow_infinite=allow_infinite)
        if ids is not None:
            check_ids(names, place)
        for name, values in (("epsilon", epsilons), ("delta", deltas), ("ids", names)):
            values = values.view()
            values.flags.writeable = False
            object.__setattr__(self, name, values)
