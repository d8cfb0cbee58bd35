"""Which steps of a scikit-learn pipeline learn from the data that they are fitted on."""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from sklearn.compose import ColumnTransformer, TransformedTargetRegressor
from sklearn.frozen import FrozenEstimator
from sklearn.pipeline import FeatureUnion, Pipeline
from sklearn.preprocessing import OneHotEncoder, OrdinalEncoder, PolynomialFeatures
from sklearn.utils import _safe_indexing, get_tags

FEW = 32
"""Rows that steps are tried on, which say that they learn nothing."""


def learning_steps(estimator: Any) -> list[str]:
    """Name the steps before this estimator, in the pipelines that are fitting it, that learn from the data.

    So does what transforms its target (`TransformedTargetRegressor`). Neither tells its steps where they are, so the
    calls that lead here are looked at.
    """
    found = []
    frame = inspect.currentframe()
    while frame is not None:
        around = frame.f_locals.get("self")
        if (
            isinstance(around, Pipeline)
            and frame.f_code.co_name.startswith("fit")
            and around.steps[-1][1] is estimator
        ):
            found += [f"step {name!r} of the pipeline" for name in _learning(around, frame.f_locals.get("X"))]
            estimator = around  # which may be the last step of another
        if (
            isinstance(around, TransformedTargetRegressor)
            and frame.f_code.co_name == "fit"
            and (
                learns_from_data(around.transformer)
                or (around.func is not None and looks_at_other_rows(around.func, frame.f_locals.get("y")))
            )
        ):
            found.append("transformer of the target")
        frame = frame.f_back
    return list(dict.fromkeys(found))


def _learning(pipeline: Pipeline, rows: Any) -> Iterator[str]:
    """Yield the steps before the last that learn when they are fitted, or look at other rows when they transform."""
    few = _first(rows, FEW)
    for name, step in pipeline.steps[:-1]:
        transform = getattr(step, "transform", None)
        learns = any(learns_from_data(part) for part in _parts(step))
        if learns or (transform is not None and looks_at_other_rows(transform, few)):
            yield name
        if transform is not None:
            few = _tried(transform, few)


def looks_at_other_rows(transform: Callable[[Any], Any], rows: Any) -> bool:
    """Tell whether what becomes of a row depends on others, as of a column that a function scales by its own mean.

    Also where that cannot be tried on a few rows.
    """
    whole = _numbers(_tried(transform, _first(rows, FEW)))
    for number in (1, 2, FEW // 2):
        some = _first(rows, number)
        found = _numbers(_tried(transform, some))
        if whole is None or found is None or not _same(whole[: len(found)], found, len(some)):
            return True
    return False


def _first(rows: Any, number: int) -> Any:
    return None if rows is None else _safe_indexing(rows, slice(0, number))


def _tried(transform: Callable[[Any], Any], rows: Any) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return None if rows is None else transform(copy.deepcopy(rows))
    except Exception:  # a user's function may raise anything
        return None


def _numbers(found: Any) -> Any:
    if found is None:
        return None
    return np.asarray(found.toarray() if hasattr(found, "toarray") else found)


def _same(whole: Any, some: Any, rows: int) -> bool:
    if whole.shape != some.shape or len(some) != rows:
        return False
    if whole.dtype.kind in "fiub" and some.dtype.kind in "fiub":
        return bool(np.allclose(whole, some, rtol=1e-6, atol=1e-9, equal_nan=True))
    return whole.astype(str).tolist() == some.astype(str).tolist()


def learns_from_data(step: Any) -> bool:
    """Tell whether fitting a transformer looks at more than the number and names of columns."""
    if step is None or isinstance(step, str):  # "passthrough", "drop"
        return False
    if isinstance(step, (FrozenEstimator, PolynomialFeatures)):
        return False
    if isinstance(step, (OneHotEncoder, OrdinalEncoder)) and not isinstance(step.categories, str):
        return any(
            getattr(step, name, None) is not None for name in ("min_frequency", "max_categories")
        )  # categories that are given are not learned
    return bool(get_tags(step).requires_fit)


def _parts(step: Any) -> Iterator[Any]:
    """Look into steps that are made of others."""
    if isinstance(step, Pipeline):
        inside = [each for _, each in step.steps]
    elif isinstance(step, ColumnTransformer):
        inside = [*(each for _, each, _ in step.transformers), step.remainder]
    elif isinstance(step, FeatureUnion):
        inside = [each for _, each in step.transformer_list]
    else:
        yield step
        return
    for each in inside:
        yield from _parts(each)
