"""Estimators with scikit-learn's habits, trained so that every person gets the privacy they asked for.

    classifier = PersonalizedClassifier(feature_ranges={"age": (0, 120)}, categories={"job": ["nurse"]}, classes=[0, 1])
    classifier.fit(X, y, epsilon=frame["epsilon"], delta=1e-6, groups=frame["person"])
    classifier.predict_proba(new)

Every `fit` spends what its people allow: a search or a cross-validation on private data fits many times. What is said
of the training data (`score` on it, a calibration fitted on it) is as private as the data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from pdpsgd._typing import FloatArray
from pdpsgd.budgets.budgets import Budgets
from pdpsgd.data.cells import text_of
from pdpsgd.data.preprocessing import Preprocessing
from pdpsgd.data.schema import Schema
from pdpsgd.errors import PdpsgdError, fail, shown, warn
from pdpsgd.integrations._columns import declare, encode, frame_of, has_words
from pdpsgd.training.fitting import fit
from pdpsgd.training.inputs import TrainingInputs
from pdpsgd.training.regression import in_range, scaled

try:
    from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
    from sklearn.utils import check_random_state
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import check_is_fitted, column_or_1d, validate_data
except ImportError as error:  # pragma: no cover
    raise PdpsgdError(
        "Expected the package scikit-learn, 1.6 or later. Install it: pip install 'pdpsgd[sklearn]'"
    ) from error

from pdpsgd.integrations._fits import (
    Fit,
    counted,
    digests_of,
    fits_so_far,
    learning_from_outputs,
    was_trained_on,
)
from pdpsgd.integrations._pipelines import learning_steps

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor, nn

    from pdpsgd.planning.plans import Plan

__all__ = ["PersonalizedClassifier", "PersonalizedRegressor"]

_FIT_OF: WeakKeyDictionary[Any, Fit] = WeakKeyDictionary()
"""What an estimator of this process was fitted on: never pickled with it."""

AT_ONCE = 16_384
"""Rows that go through the network together in `predict`."""


class _Personalized(BaseEstimator):  # type: ignore[misc]
    """What the classifier and the regressor share: budgets, public ranges, plan, training."""

    def __init__(
        self,
        *,
        epsilon: float | None = None,
        delta: float = 1e-5,
        feature_ranges: Any = None,
        categories: Mapping[Any, Sequence[Any]] | None = None,
        model: str | Callable[[int, int], nn.Module] = "tabular",
        mechanism: str = "pdp-sgd-exact",
        steps: int | None = None,
        batch_size: float | None = None,
        max_grad_norm: float = 1.0,
        learning_rate: float | None = None,
        accountant: str | None = None,
        records_per_person: int | None = None,
        run_folder: str | None = None,
        random_state: Any = None,
        verbose: bool = False,
    ) -> None:
        self.epsilon = epsilon
        self.delta = delta
        self.feature_ranges = feature_ranges
        self.categories = categories
        self.model = model
        self.mechanism = mechanism
        self.steps = steps
        self.batch_size = batch_size
        self.max_grad_norm = max_grad_norm
        self.learning_rate = learning_rate
        self.accountant = accountant
        self.records_per_person = records_per_person
        self.run_folder = run_folder
        self.random_state = random_state
        self.verbose = verbose

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = True
        tags.non_deterministic = self.random_state is None
        return tags

    def fit(
        self, X: Any, y: Any, epsilon: Any = None, delta: Any = None, groups: Any = None
    ) -> _Personalized:
        """Plan and train.

        Guarantee: the fitted estimator gives every person the (epsilon, delta) that they allow, all of their rows
        together, where ranges, categories and classes are declared and `random_state` is None; `verdict_` says
        whether, and what speaks against it.

        Args:
            X: Rows: an array of numbers, or a pandas or polars frame.
            y: The label of each row.
            epsilon: What people allow: one number for all, one for each row (the same in all rows of a person), a
                mapping by person, or `Budgets`. By default the estimator's own `epsilon`.
            delta: The same of delta. By default the estimator's own `delta`.
            groups: The person of each row. Without it, every row is another person.

        Returns:
            The estimator.

        Raises:
            PdpsgdError: If budgets are missing or do not fit, or the data cannot be used.
        """
        rows, names = self._rows(X, reset=True)
        labels = self._labels(y, len(rows))
        columns, learned = declare(rows, names, self.feature_ranges, self.categories)
        targets, of_label, label_learned = self._declare_label(labels)
        learned = [f"columns {', '.join(map(repr, learned[:6]))}"] if learned else []
        learned += ["the label"] if label_learned else []
        learning = learning_steps(self)
        learned += [f"the fitted {each}" for each in learning]
        if learned:
            warn(
                f"Ranges, categories or other figures of {', '.join(learned)} are read from the data, which no promise "
                f"covers: the model is not for release. {self._remedy(bool(learning))}"
            )
        self._columns = columns
        people, record_ids = _people(
            len(rows),
            self.epsilon if epsilon is None else epsilon,
            self.delta if delta is None else delta,
            groups,
        )
        schema = Schema(
            label=_free_name(names), columns=columns, confirmed=not learned, id_column=None, **of_label
        )
        inputs = _tensor(encode(rows, columns))
        given = TrainingInputs(
            records=(inputs, targets),
            budgets=people,
            record_ids=record_ids,
            name="X",
            classes=schema.classes,
            schema=schema,
            learned_from_data=bool(learned),
            preprocessing=Preprocessing("table", schema=schema),
            shape=tuple(inputs.shape[1:]),
            task=schema.task,
            label_range=schema.label_range,
        )
        self._train(given, people, schema.outputs, rows)
        return self

    def _train(self, inputs: TrainingInputs, people: Budgets, outputs: int, rows: Any) -> None:
        """Compute the plan, what nobody chose from the rules of `pdpsgd.planning.advice`, and train by it."""
        from pdpsgd.models.networks import count_parameters
        from pdpsgd.planning.advice import choose_setting, rate_for
        from pdpsgd.planning.planner import plan

        chosen = choose_setting(
            people, steps=self.steps, batch_size=self.batch_size, max_grad_norm=self.max_grad_norm
        )
        self.plan_: Plan = plan(
            people,
            self.mechanism,
            steps=chosen.steps,
            batch_size=chosen.batch_size,
            max_grad_norm=chosen.max_grad_norm,
            accountant=self.accountant,
        )
        fitted_elsewhere = hasattr(self, "verdict_") and self not in _FIT_OF
        now = Fit.of(rows, people, self.plan_)
        seed = None
        if self.random_state is not None:
            seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        with counted(now) as others, _seeded(seed):
            if others is not None:
                warn(f"{others} The model is not for release.")
            inputs = replace(inputs, other_fits=others)
            network = self._network(inputs.input_shape[0], outputs)
            rate = self.learning_rate
            if rate is None:
                rate = self._share_of_rate * rate_for(self.plan_, count_parameters(network))
            self.result_ = fit(
                network,
                inputs,
                plan=self.plan_,
                learning_rate=rate,
                records_per_person=self._records_per_person(inputs),
                run_folder=self.run_folder,
                seed=seed,
                progress=self.verbose,
            )
        self.network_ = self.result_.model.eval()
        self.verdict_ = self.result_.verdict
        if fitted_elsewhere:
            self.verdict_ = self.verdict_.with_assumption(
                "It is assumed that the fit before, in another process or of an estimator that this one is a copy of, "
                "was on other people: where a fit is not known by its rows, nothing counts it."
            )
        _FIT_OF[self] = now

    _share_of_rate = 1.0

    def _records_per_person(self, inputs: TrainingInputs) -> int | None:
        """Return the setting; one record where people are named, whether or not anybody has more."""
        if self.records_per_person is not None or inputs.record_ids is None:
            return self.records_per_person
        return 1

    def _network(self, features: int, outputs: int) -> nn.Module:
        from pdpsgd.models.networks import by_name

        if isinstance(self.model, str):
            return by_name(self.model, input_shape=(features,), classes=outputs)
        return self.model(features, outputs)

    def _rows(self, X: Any, *, reset: bool) -> tuple[Any, list[str]]:
        """Check the rows: an array of numbers, or a frame where some columns are not."""
        frame = frame_of(X)
        words = (
            frame is not None and (bool(self.categories) or has_words(frame))
            if reset
            else getattr(self, "_by_frame", False)
        )
        if words:
            if frame is None:
                fail(
                    "Expected a frame with the columns of the one that was fitted. Got "
                    + type(X).__name__
                    + "."
                )
            validate_data(self, X=X, skip_check_array=True, reset=reset)
            rows: Any = frame
        else:
            rows = validate_data(
                self, X=X, reset=reset, dtype=np.float64, ensure_all_finite="allow-nan", ensure_min_samples=1
            )
        if reset:
            self._by_frame = words
        names = list(frame.columns) if frame is not None else [f"x{i}" for i in range(rows.shape[1])]
        return rows, [str(name) for name in names]

    def _labels(self, y: Any, rows: int) -> npt.NDArray[Any]:
        if y is None:
            fail(f"Expected y: {type(self).__name__} requires y to be passed, but the target y is None.")
        labels = column_or_1d(y.to_numpy() if hasattr(y, "to_numpy") else y, warn=True)
        if labels.dtype.kind == "f" and not np.isfinite(labels).all():
            fail("Expected finite labels. Input y contains NaN (a missing label) or infinity.")
        if len(labels) != rows:
            fail(f"Expected a label for each of the {rows} rows. Found inconsistent numbers: {len(labels)}.")
        return labels

    def _outputs(self, X: Any) -> Tensor:
        import torch

        check_is_fitted(self, "network_")
        rows, _ = self._rows(X, reset=False)
        self._check_what_asks(rows)
        inputs = _tensor(encode(rows, self._columns))
        with torch.no_grad():
            return torch.cat([self.network_(part).float() for part in torch.split(inputs, AT_ONCE)])

    def _check_what_asks(self, rows: Any) -> None:
        """Mark the model where something else is fitted on what it says of those whom it was trained on."""
        asking, trained = learning_from_outputs(), _FIT_OF.get(self)
        if asking is None or not self.verdict_.is_for_release:
            return
        digests = digests_of(rows)
        if any(was_trained_on(digests, each) for each in (fits_so_far() if trained is None else [trained])):
            why = (
                f"{asking} was fitted on what the model says of the people whom it was trained on, which no promise "
                "covers."
            )
            warn(f"{why} The model is not for release with it: fit it on other people.")
            self.verdict_ = self.verdict_.with_reason("fitted-on-outputs", why)
        elif trained is None:
            self.verdict_ = self.verdict_.with_assumption(
                f"It is assumed that {asking} was fitted on other people than the model: it was trained in another "
                "process, or is a copy, and is not known by its rows."
            )

    def _remedy(self, in_pipeline: bool) -> str:
        known = f"Declare them: feature_ranges=, categories=, {self._label_parameter}=."
        return known + (
            " Fit steps on public data, and freeze them (FrozenEstimator)." if in_pipeline else ""
        )

    _label_parameter = ""

    def _declare_label(self, labels: npt.NDArray[Any]) -> tuple[Tensor, dict[str, Any], bool]:
        """Return targets, what the schema says of the label, and whether that was read from the data."""
        raise NotImplementedError


class PersonalizedClassifier(ClassifierMixin, _Personalized):  # type: ignore[misc]
    """A classifier that gives every person the (epsilon, delta) they asked for.

    After `fit`: `classes_`, `plan_` (public), `network_`, `verdict_`, and `result_` with all of a run's figures.

    Args:
        epsilon: What each person allows, where `fit` is not told.
        delta: The same of delta.
        feature_ranges: Public ranges of columns of numbers: one (low, high) for all, one for each, or {name: (low,
            high)}. Values outside count as the nearer end, missing ones as the middle. Ranges that are not declared are
            read from the data, and the model is then not for release.
        categories: Public categories of other columns, {name: [...]}; anything else counts as "other".
        classes: All classes there are, known in public.
        model: "tabular" (one hidden layer), "linear", "module:function", or a function of the numbers of inputs and
            outputs that makes a torch module.
        mechanism: The mechanism that turns budgets into sampling rates and noise.
        steps: Number of steps; by default 300.
        batch_size: Expected batch size; by default from the budgets (`pdpsgd.planning.advice`).
        max_grad_norm: Clipping norm of per-person gradients.
        learning_rate: Learning rate; by default from the plan's noise.
        accountant: "pld" (default) or "rdp".
        records_per_person: Rows of a person that take part in a step at most; 1 by default where people have several.
        run_folder: Where to leave the plan, the promises and the model, as `pdpsgd train` does.
        random_state: A seed, for tests: the model is then not for release.
        verbose: Whether to show a progress bar.
    """

    def __init__(
        self,
        *,
        epsilon: float | None = None,
        delta: float = 1e-5,
        feature_ranges: Any = None,
        categories: Mapping[Any, Sequence[Any]] | None = None,
        classes: Sequence[Any] | None = None,
        model: str | Callable[[int, int], nn.Module] = "tabular",
        mechanism: str = "pdp-sgd-exact",
        steps: int | None = None,
        batch_size: float | None = None,
        max_grad_norm: float = 1.0,
        learning_rate: float | None = None,
        accountant: str | None = None,
        records_per_person: int | None = None,
        run_folder: str | None = None,
        random_state: Any = None,
        verbose: bool = False,
    ) -> None:
        super().__init__(
            epsilon=epsilon,
            delta=delta,
            feature_ranges=feature_ranges,
            categories=categories,
            model=model,
            mechanism=mechanism,
            steps=steps,
            batch_size=batch_size,
            max_grad_norm=max_grad_norm,
            learning_rate=learning_rate,
            accountant=accountant,
            records_per_person=records_per_person,
            run_folder=run_folder,
            random_state=random_state,
            verbose=verbose,
        )
        self.classes = classes

    _label_parameter = "classes"

    def predict(self, X: Any) -> npt.NDArray[Any]:
        """Predict the class of each row."""
        chosen = self._outputs(X).argmax(1).numpy()
        return self.classes_[chosen]

    def predict_proba(self, X: Any) -> FloatArray:
        """Predict the probability of each class, in the order of `classes_`, for each row."""
        return self._outputs(X).double().softmax(1).numpy()

    def _declare_label(self, labels: npt.NDArray[Any]) -> tuple[Tensor, dict[str, Any], bool]:
        check_classification_targets(labels)
        self.classes_ = np.unique(labels if self.classes is None else np.asarray(self.classes))
        if len(self.classes_) < 2:
            fail(f"Expected at least two classes. Got one class: {shown(self.classes_.tolist())}.")
        place = {value: index for index, value in enumerate(self.classes_.tolist())}
        targets = np.array([place.get(value, -1) for value in labels.tolist()], dtype=np.int64)
        if (targets < 0).any():
            row = int((targets < 0).argmax())
            fail(
                f"Expected one of the classes {shown(self.classes_.tolist())} in row {row} of y. Got "
                f"{labels.tolist()[row]!r}."
            )
        names = tuple(map(text_of, self.classes_.tolist()))
        return _tensor(targets), {"classes": names}, self.classes is None


class PersonalizedRegressor(RegressorMixin, _Personalized):  # type: ignore[misc]
    """A regressor that gives every person the (epsilon, delta) they asked for.

    `label_range` is the public range of the label, (low, high): labels outside count as its nearer end, and so do
    predictions. The other arguments are those of `PersonalizedClassifier`, without `classes`.
    """

    def __init__(
        self,
        *,
        epsilon: float | None = None,
        delta: float = 1e-5,
        feature_ranges: Any = None,
        categories: Mapping[Any, Sequence[Any]] | None = None,
        label_range: tuple[float, float] | None = None,
        model: str | Callable[[int, int], nn.Module] = "tabular",
        mechanism: str = "pdp-sgd-exact",
        steps: int | None = None,
        batch_size: float | None = None,
        max_grad_norm: float = 1.0,
        learning_rate: float | None = None,
        accountant: str | None = None,
        records_per_person: int | None = None,
        run_folder: str | None = None,
        random_state: Any = None,
        verbose: bool = False,
    ) -> None:
        super().__init__(
            epsilon=epsilon,
            delta=delta,
            feature_ranges=feature_ranges,
            categories=categories,
            model=model,
            mechanism=mechanism,
            steps=steps,
            batch_size=batch_size,
            max_grad_norm=max_grad_norm,
            learning_rate=learning_rate,
            accountant=accountant,
            records_per_person=records_per_person,
            run_folder=run_folder,
            random_state=random_state,
            verbose=verbose,
        )
        self.label_range = label_range

    _label_parameter = "label_range"
    _share_of_rate = 0.3  # bench/regression_rates.py: the rule is made for classes

    def predict(self, X: Any) -> FloatArray:
        """Predict the number of each row, in the unit of the label."""
        outputs = self._outputs(X)
        return in_range(outputs.reshape(len(outputs)), self.label_range_).numpy()

    def _declare_label(self, labels: npt.NDArray[Any]) -> tuple[Tensor, dict[str, Any], bool]:
        try:
            numbers = labels.astype(np.float64)
        except (TypeError, ValueError):
            fail(f"Expected numbers in y. Got {shown(labels[:3].tolist())}.")
        if not np.isfinite(numbers).all():
            fail("Expected finite labels. Input y contains NaN (a missing label) or infinity.")
        if self.label_range is None:
            low, high = float(numbers.min()), float(numbers.max())
            limits = (low, high if high > low else low + max(1.0, abs(low)))
        else:
            limits = (float(self.label_range[0]), float(self.label_range[1]))
        self.label_range_ = limits
        return scaled(_tensor(numbers), limits), {"label_range": limits}, self.label_range is None


def _people(rows: int, epsilon: Any, delta: Any, groups: Any) -> tuple[Budgets, npt.NDArray[Any] | None]:
    """Make the list of people, and name the person of each row."""
    if epsilon is None:
        fail(
            "Expected epsilon, what each person allows: fit(X, y, epsilon=...), in a pipeline fit(X, y, "
            "NAME__epsilon=...), or epsilon= for everybody when the estimator is made. Got none."
        )
    ids = None if groups is None else np.asarray(groups.to_numpy() if hasattr(groups, "to_numpy") else groups)
    if ids is not None and ids.shape != (rows,):
        fail(f"Expected groups to name the person of each of the {rows} rows. Got shape {ids.shape}.")
    if isinstance(epsilon, (Budgets, Mapping)):
        listed = epsilon if isinstance(epsilon, Budgets) else Budgets.from_mapping(epsilon, _one(delta))
        if ids is None and listed.named:
            fail("Expected groups, the person of each row, to know whose budget is whose. Got none.")
        return listed, ids
    each, deltas = (_per_row(name, value, rows) for name, value in (("epsilon", epsilon), ("delta", delta)))
    if ids is None:
        return Budgets(each, deltas), None
    import polars

    table = polars.DataFrame({"person": ids.tolist(), "epsilon": each, "delta": deltas})
    listed = Budgets.from_table(table, id_column="person", delta_column="delta", repeated_ids=True)
    return listed, np.array(ids.tolist())


def _one(delta: Any) -> float:
    if np.ndim(delta):
        fail(
            "Expected one delta with a mapping of epsilon; for others give {person: (epsilon, delta)}. Got several."
        )
    return float(delta)


def _per_row(name: str, value: Any, rows: int) -> FloatArray:
    given = np.asarray(value.to_numpy() if hasattr(value, "to_numpy") else value)
    if given.ndim == 0:
        given = np.full(rows, given[()])
    if given.shape != (rows,):
        fail(f"Expected {name} as one number, or one for each of the {rows} rows. Got shape {given.shape}.")
    return given


def _free_name(names: Sequence[str]) -> str:
    """Name the label as no column is named."""
    name = "label"
    while name in names:
        name += "_"
    return name


def _tensor(values: Any) -> Tensor:
    import torch

    return torch.from_numpy(np.ascontiguousarray(values))


@contextmanager
def _seeded(seed: int | None) -> Iterator[None]:
    """Make first weights from a seed, and leave the user's generator as it was."""
    import torch

    if seed is None:
        yield
        return
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield
