"""Which steps of a scikit-learn pipeline learn from the data that they are fitted on."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

from sklearn.compose import ColumnTransformer, TransformedTargetRegressor
from sklearn.frozen import FrozenEstimator
from sklearn.pipeline import FeatureUnion, Pipeline
from sklearn.preprocessing import OneHotEncoder, OrdinalEncoder, PolynomialFeatures
from sklearn.utils import get_tags


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
            found += [
                f"step {name!r} of the pipeline"
                for name, step in around.steps[:-1]
                for part in _parts(step)
                if learns_from_data(part)
            ]
            estimator = around  # which may be the last step of another
        if (
            isinstance(around, TransformedTargetRegressor)
            and frame.f_code.co_name == "fit"
            and learns_from_data(around.transformer)
        ):
            found.append("transformer of the target")
        frame = frame.f_back
    return list(dict.fromkeys(found))


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
        inside = [each for _, each, _ in step.transformers]
    elif isinstance(step, FeatureUnion):
        inside = [each for _, each in step.transformer_list]
    else:
        yield step
        return
    for each in inside:
        yield from _parts(each)
