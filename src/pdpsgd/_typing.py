"""Array types, once for all rooms."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.floating[Any]]
IntArray = npt.NDArray[np.int64]
AnyIntArray = npt.NDArray[np.integer[Any]]
BoolArray = npt.NDArray[np.bool_]
WordArray = npt.NDArray[np.uint64]
IdArray = npt.NDArray[Any]
