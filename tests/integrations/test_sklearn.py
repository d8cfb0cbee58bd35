"""Estimators with scikit-learn's habits: its own checks, budgets by row and by person, pipelines, declarations."""

from __future__ import annotations

import pickle
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import polars
import pytest

pytest.importorskip("sklearn", minversion="1.6", reason="scikit-learn 1.6 is not installed")
from joblib import Parallel, delayed
from sklearn.base import clone
from sklearn.calibration import CalibratedClassifierCV
from sklearn.compose import ColumnTransformer, TransformedTargetRegressor
from sklearn.datasets import load_breast_cancer, load_diabetes
from sklearn.frozen import FrozenEstimator
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import (
    FunctionTransformer,
    Normalizer,
    OneHotEncoder,
    PolynomialFeatures,
    StandardScaler,
)
from sklearn.utils.estimator_checks import parametrize_with_checks

import pdpsgd
from pdpsgd.errors import PdpsgdError
from pdpsgd.integrations._fits import forget_fits
from pdpsgd.integrations.sklearn import PersonalizedClassifier, PersonalizedRegressor
from pdpsgd.planning.verdict import HOLDS

QUICK = {"steps": 3, "batch_size": 8, "accountant": "rdp", "random_state": 0}
OTHER_FITS = "ignore:Some of these people were trained on in"
NOT_DECLARED = "ignore:Ranges, categories or other figures"

CHECKED = [
    PersonalizedClassifier(epsilon=1e4, steps=40, accountant="rdp", random_state=0, model="linear"),
    PersonalizedRegressor(epsilon=1e4, steps=40, accountant="rdp", random_state=0, model="linear"),
]
CANNOT: dict[str, str] = {}
"""Checks of scikit-learn that cannot pass, by name, and why: none; those that do not apply it leaves out by tags."""


@pytest.mark.filterwarnings(NOT_DECLARED, OTHER_FITS)
@parametrize_with_checks(CHECKED, expected_failed_checks=lambda estimator: CANNOT)
def test_checks_of_scikit_learn(estimator: Any, check: Any) -> None:
    check(estimator)


@pytest.fixture(autouse=True)
def as_in_a_new_process() -> None:
    forget_fits()


@pytest.fixture(scope="module")
def patients() -> dict[str, Any]:
    """Scikit-learn's breast cancer table: features, labels, public ranges, and what people allow."""
    data = load_breast_cancer(as_frame=True)
    ranges = {name: (0.0, 4.0 * float(data.data[name].median()) + 1) for name in data.data}
    epsilon = np.random.default_rng(0).choice([20.0, 80.0], len(data.data))
    return {"X": data.data, "y": data.target.to_numpy(), "ranges": ranges, "epsilon": epsilon}


def declared(patients: dict[str, Any], **more: Any) -> PersonalizedClassifier:
    return PersonalizedClassifier(feature_ranges=patients["ranges"], classes=[0, 1], model="linear", **more)


def test_a_classifier_learns_and_promises_what_each_person_asked_for(patients: dict[str, Any]) -> None:
    made = declared(patients, steps=40, accountant="rdp")
    made.fit(patients["X"], patients["y"], epsilon=patients["epsilon"], delta=1e-6)
    assert made.verdict_.outcome == HOLDS
    assert {level.epsilon: level.people for level in made.plan_.levels} == {
        value: int((patients["epsilon"] == value).sum()) for value in (20.0, 80.0)
    }
    assert all(level.delta == 1e-6 for level in made.plan_.levels)
    assert made.score(patients["X"], patients["y"]) > 0.85  # always the largest class: 0.63
    proba = made.predict_proba(patients["X"][:5])
    assert proba.shape == (5, 2)
    assert (proba.argmax(1) == made.predict(patients["X"][:5])).all()


def test_a_regressor_answers_in_the_unit_of_the_label() -> None:
    X, y = load_diabetes(return_X_y=True)
    made = PersonalizedRegressor(
        feature_ranges=(-0.2, 0.2), label_range=(0, 400), model="linear", steps=60, accountant="rdp"
    )
    made.fit(X, y, epsilon=50.0)
    assert made.verdict_.outcome == HOLDS
    assert made.score(X, y) > 0.3
    assert 0 <= made.predict(X).min() < made.predict(X).max() <= 400


@pytest.mark.parametrize(
    ("left_out", "reason"),
    [("feature_ranges", "columns 'mean radius'"), ("classes", "the label"), (None, None)],
)
def test_what_is_not_declared_is_warned_of_and_makes_the_model_not_for_release(
    patients: dict[str, Any], left_out: str | None, reason: str | None
) -> None:
    made = declared(patients, **{**QUICK, "random_state": None})
    if left_out is None:
        made.fit(patients["X"], patients["y"], epsilon=2.0)
        assert made.verdict_.outcome == HOLDS
        return
    made.set_params(**{left_out: None})
    with pytest.warns(UserWarning, match=f"of {reason}.* read from the data.*Declare them"):
        made.fit(patients["X"], patients["y"], epsilon=2.0)
    assert made.verdict_.outcome == "not for release"


@pytest.mark.filterwarnings(OTHER_FITS)
def test_a_seed_makes_the_model_not_for_release_and_repeatable(patients: dict[str, Any]) -> None:
    first, second = (
        declared(patients, **QUICK).fit(patients["X"], patients["y"], epsilon=2.0) for _ in range(2)
    )
    assert first.verdict_.outcome == "not for release"
    assert (first.predict_proba(patients["X"]) == second.predict_proba(patients["X"])).all()


@pytest.mark.filterwarnings(OTHER_FITS)
def test_pandas_polars_and_arrays_give_the_same_model(patients: dict[str, Any]) -> None:
    frames = (patients["X"], polars.from_pandas(patients["X"]))
    answers = []
    for frame in frames:
        made = declared(patients, **QUICK).fit(frame, patients["y"], epsilon=2.0)
        answers.append(made.predict_proba(frame))
    array = patients["X"].to_numpy()
    made = declared(patients, **QUICK).set_params(feature_ranges=list(patients["ranges"].values()))
    answers.append(made.fit(array, patients["y"], epsilon=2.0).predict_proba(array))
    assert (answers[0] == answers[1]).all()
    assert (answers[0] == answers[2]).all()


@pytest.mark.filterwarnings("ignore:Unknown categories")
@pytest.mark.parametrize("kind", [pandas.DataFrame, polars.DataFrame])
def test_columns_of_words_have_categories(kind: Any, tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    job, age = rng.choice(["nurse", "cook", "pilot"], 200), rng.integers(18, 80, 200)
    frame = kind({"job": job.tolist(), "age": age.tolist()})
    y = np.where(job == "nurse", "yes", "no")
    made = PersonalizedClassifier(
        feature_ranges={"age": (0, 120)},
        categories={"job": ["nurse", "cook"]},
        classes=["no", "yes"],
        model="linear",
        steps=30,
        accountant="rdp",
        run_folder=str(tmp_path / "run"),
    ).fit(frame, y, epsilon=80.0)
    assert made.verdict_.outcome == HOLDS
    assert made.score(frame, y) > 0.9
    assert (pdpsgd.load_run(tmp_path / "run").predict(frame) == made.predict(frame)).all()
    with pytest.raises(PdpsgdError, match="Expected a frame"):
        made.predict(np.ones((2, 2)))


@pytest.mark.filterwarnings(OTHER_FITS)
def test_all_rows_of_a_person_are_protected_together() -> None:
    rng = np.random.default_rng(2)
    ids = np.repeat([f"p{i}" for i in range(50)], 3)
    X, y = rng.uniform(-1, 1, (150, 2)), rng.integers(0, 2, 150)
    made = PersonalizedClassifier(feature_ranges=(-1, 1), classes=[0, 1], model="linear", **QUICK)
    made.fit(X, y, epsilon=np.repeat(rng.choice([1.0, 4.0], 50), 3), groups=ids)
    assert made.plan_.people == 50
    assert made.result_.settings["records_per_person"] == 1
    by_person = {f"p{i}": 2.0 for i in range(60)}  # ten of them without a record
    assert made.fit(X, y, epsilon=by_person, groups=pandas.Series(ids)).plan_.people == 60
    assert made.fit(X, y, epsilon=pdpsgd.Budgets.from_mapping(by_person), groups=ids).plan_.people == 60
    with pytest.raises(PdpsgdError, match="one budget per person, the same in all their rows"):
        made.fit(X, y, epsilon=rng.uniform(1, 2, 150), groups=ids)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "Expected epsilon, what each person allows"),
        ({"epsilon": [1.0, 2.0]}, "one for each of the 6 rows"),
        ({"epsilon": -1.0}, "epsilon >= 0"),
        ({"epsilon": {"a": 1.0}}, "Expected groups, the person of each row"),
        ({"epsilon": 1.0, "groups": ["a"]}, "the person of each of the 6 rows"),
        ({"epsilon": {"a": 1.0, "c": 1.0}, "groups": list("aaabbb")}, "on the list"),
    ],
)
def test_budgets_that_do_not_fit_are_refused(arguments: dict[str, Any], message: str) -> None:
    made = PersonalizedClassifier(feature_ranges=(0, 1), classes=[0, 1], **{**QUICK, "batch_size": 2})
    with pytest.raises(PdpsgdError, match=message):
        made.fit(np.ones((6, 1)), [0, 1] * 3, **arguments)
    made.fit(np.ones((6, 1)), [0, 1] * 3, epsilon=2.0)


def test_people_with_a_delta_each_are_named_with_it() -> None:
    made = PersonalizedClassifier(feature_ranges=(0, 1), classes=[0, 1], **{**QUICK, "batch_size": 2})
    people = {"groups": list("aabbcc"), "delta": [1e-5, 1e-6, 1e-5, 1e-5, 1e-5, 1e-5]}
    with pytest.raises(PdpsgdError, match=r"one delta with a mapping.*\{person: \(epsilon, delta\)\}"):
        made.fit(np.ones((6, 1)), [0, 1] * 3, epsilon={"a": 2.0, "b": 2.0, "c": 2.0}, **people)
    each = {"a": (2.0, 1e-5), "b": (2.0, 1e-6), "c": (2.0, 1e-5)}
    made.fit(np.ones((6, 1)), [0, 1] * 3, epsilon=each, groups=people["groups"])


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (["a", "b"] * 3, r"Expected numbers in y\. Got \['a', 'b', 'a'\]"),
        ([1.0, float("nan")] * 3, "Expected finite labels"),
        ([1.0, float("inf")] * 3, "Expected finite labels"),
    ],
)
def test_labels_that_are_no_numbers_are_refused(labels: list[Any], message: str) -> None:
    made = PersonalizedRegressor(epsilon=2.0, feature_ranges=(0, 1), label_range=(0, 5), **QUICK)
    with pytest.raises(PdpsgdError, match=message):
        made.fit(np.ones((6, 2)), np.array(labels, dtype=object))


def test_columns_without_any_value_are_refused_where_there_are_no_others() -> None:
    rows = pandas.DataFrame({"age": [None] * 6, "job": [None] * 6})
    made = PersonalizedClassifier(epsilon=2.0, classes=[0, 1], **{**QUICK, "batch_size": 2})
    with pytest.raises(PdpsgdError, match="at least one column with values in X"):
        made.fit(rows, [0, 1] * 3)
    made.set_params(feature_ranges={"age": (0, 1)}, categories={"job": ["a"]}).fit(
        rows.assign(age=0.5), [0, 1] * 3
    )


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"feature_ranges": (1, 1)}, "finite low < high for column 'x0' in feature_ranges"),
        ({"feature_ranges": [(0, 1)] * 3}, "one pair for each of the 2 columns"),
        ({"feature_ranges": {"z": (0, 1)}}, "Expected columns of X in feature_ranges. Got 'z'"),
        ({"feature_ranges": {0: "wide", 1: (0, 1)}}, r"\(low, high\) for column 'x0'"),
        ({"classes": [0, 2]}, r"one of the classes \[0, 2\] in row 1 of y. Got 1"),
    ],
)
def test_declarations_that_do_not_fit_are_refused(parameters: dict[str, Any], message: str) -> None:
    made = PersonalizedClassifier(epsilon=2.0, feature_ranges=(0, 1), classes=[0, 1], **QUICK)
    with pytest.raises(PdpsgdError, match=message):
        made.set_params(**parameters).fit(np.ones((6, 2)), [0, 1] * 3)


@pytest.mark.parametrize(
    ("labels", "message"),
    [(None, "Expected y: PersonalizedClassifier requires y"), ([0, 1] * 2, "a label for each of the 6 rows")],
    ids=["no labels", "too few"],
)
def test_labels_that_do_not_go_with_the_rows_are_refused(labels: Any, message: str) -> None:
    made = PersonalizedClassifier(epsilon=2.0, feature_ranges=(0, 1), classes=[0, 1], **QUICK)
    with pytest.raises(PdpsgdError, match=message):
        made.fit(np.ones((6, 2)), labels)


def test_a_pipeline_of_steps_that_learn_nothing_is_for_release(patients: dict[str, Any]) -> None:
    few = patients["X"].iloc[:, :3].to_numpy()
    public = StandardScaler().fit(np.random.default_rng(0).uniform(0, 100, (50, 3)))
    steps = (FunctionTransformer(np.log1p), FrozenEstimator(public), PolynomialFeatures(2), Normalizer())
    last = PersonalizedClassifier(feature_ranges=(-1, 1), classes=[0, 1], model="linear", **QUICK)
    pipe = make_pipeline(*steps, last.set_params(random_state=None))
    pipe.fit(few, patients["y"], personalizedclassifier__epsilon=patients["epsilon"])  # warnings are errors
    assert pipe[-1].verdict_.outcome == HOLDS
    assert pipe.predict(few).shape == (len(few),)


def test_a_step_that_is_fitted_on_private_data_is_warned_of(patients: dict[str, Any]) -> None:
    few = patients["X"].iloc[:, :3]
    last = PersonalizedClassifier(
        feature_ranges=(-3, 3), classes=[0, 1], epsilon=2.0, model="linear", **QUICK
    )
    inside = ColumnTransformer([("scale", StandardScaler(), ["mean radius"])], remainder="passthrough")
    for step, name in ((StandardScaler(), "standardscaler"), (inside, "columntransformer")):
        pipe = make_pipeline(step, last.set_params(random_state=None))
        forget_fits()
        with pytest.warns(UserWarning, match=f"fitted step '{name}' of the pipeline.*FrozenEstimator"):
            pipe.fit(few, patients["y"])
        assert pipe[-1].verdict_.outcome == "not for release"
    outer = make_pipeline(StandardScaler(), make_pipeline(Normalizer(), last))
    forget_fits()
    with pytest.warns(UserWarning, match="fitted step 'standardscaler'"):
        outer.fit(few, patients["y"])


@pytest.mark.parametrize(
    ("encoder", "learns"),
    [
        (OneHotEncoder(categories=[["a", "b"]], handle_unknown="ignore"), False),
        (OneHotEncoder(), True),
        (OneHotEncoder(categories=[["a", "b"]], min_frequency=3), True),
        ("passthrough", False),
    ],
)
def test_an_encoder_with_given_categories_learns_nothing(encoder: Any, learns: bool) -> None:
    from pdpsgd.integrations._pipelines import learns_from_data

    assert learns_from_data(encoder) == learns


@pytest.mark.filterwarnings(NOT_DECLARED, "ignore:It was fitted inside GridSearchCV", OTHER_FITS)
def test_search_clones_and_routes_budgets_by_row(patients: dict[str, Any]) -> None:
    made = declared(patients, **QUICK)
    assert clone(made).get_params() == made.get_params()
    search = GridSearchCV(made, {"learning_rate": [0.1, 1.0]}, cv=2)
    search.fit(patients["X"], patients["y"], epsilon=patients["epsilon"])
    assert search.best_estimator_.plan_.people == len(patients["y"])
    again = pickle.loads(pickle.dumps(search.best_estimator_))
    assert (again.predict(patients["X"]) == search.predict(patients["X"])).all()
    (reason, *_) = [each for each in search.best_estimator_.verdict_.reasons if each.code == "other-fits"]
    assert "inside GridSearchCV, which fits several times on the same people" in reason.sentence


# --- several fits on the same people ----------------------------------------------------------------------

UNSEEDED = {**QUICK, "random_state": None}


def reasons(made: Any) -> list[str]:
    return [each.code for each in made.verdict_.reasons]


@pytest.mark.parametrize("again", ["itself", "a clone", "another model", "by a frame of half of them"])
def test_a_second_fit_on_the_same_people_says_what_both_cost(patients: dict[str, Any], again: str) -> None:
    X, y = patients["X"], patients["y"]
    first = declared(patients, **UNSEEDED).fit(X, y, epsilon=2.0)
    assert first.verdict_.outcome == HOLDS
    second = first if again == "itself" else clone(first)
    if again == "another model":
        second = second.set_params(learning_rate=0.1, model="tabular")
    if again.startswith("by a frame"):
        X, y = X.iloc[100:300], y[100:300]
    with pytest.warns(UserWarning, match=r"an earlier fit.*up to epsilon 2, all together up to 4"):
        second.fit(X, y, epsilon=2.0)
    assert (second.verdict_.outcome, reasons(second)) == ("not for release", ["other-fits"])


def test_fits_on_other_people_say_nothing(patients: dict[str, Any]) -> None:
    for rows in (slice(0, 300), slice(300, 569)):  # warnings are errors
        made = declared(patients, **UNSEEDED)
        made.fit(patients["X"].iloc[rows], patients["y"][rows], epsilon=2.0)
        assert made.verdict_.outcome == HOLDS
    rng = np.random.default_rng(3)
    few = PersonalizedClassifier(feature_ranges=(0, 2), classes=[0, 1], model="linear", **UNSEEDED)
    for _ in range(2):  # most rows have twins among people who are others
        few.fit(rng.integers(0, 3, (100, 2)), rng.integers(0, 2, 100), epsilon=2.0)
        assert few.verdict_.outcome == HOLDS


def test_named_people_are_the_same_whatever_their_rows_are() -> None:
    rng = np.random.default_rng(4)
    made = PersonalizedClassifier(feature_ranges=(0, 1), classes=[0, 1], model="linear", **UNSEEDED)
    X, y = rng.random((60, 2)), rng.integers(0, 2, 60)
    made.fit(X, y, epsilon=2.0, groups=[f"p{i}" for i in range(60)])
    made.fit(X, y, epsilon=2.0, groups=[f"q{i}" for i in range(60)])
    assert made.verdict_.outcome == HOLDS
    with pytest.warns(UserWarning, match="an earlier fit"):
        made.fit(
            rng.random((60, 2)), y, epsilon=2.0, groups=[f"{'p' if i == 7 else 'r'}{i}" for i in range(60)]
        )
    assert reasons(made) == ["other-fits"]


def test_folds_are_fits_of_their_own_and_none_is_for_release(patients: dict[str, Any]) -> None:
    made, fitted = declared(patients, **UNSEEDED), []
    with pytest.warns(UserWarning, match="fitted inside cross_val_score, which fits several times"):
        cross_val_score(
            made,
            patients["X"],
            patients["y"],
            cv=2,
            params={"epsilon": patients["epsilon"]},
            scoring=lambda estimator, X, y: float(not fitted.append(estimator)),
        )
    assert [each.verdict_.outcome for each in fitted] == ["not for release"] * 2


def test_a_calibration_by_folds_is_not_for_release(patients: dict[str, Any]) -> None:
    made = CalibratedClassifierCV(declared(patients, **UNSEEDED, epsilon=2.0), cv=2)
    with pytest.warns(UserWarning, match="fitted inside"):
        made.fit(patients["X"], patients["y"])
    assert {each.estimator.verdict_.outcome for each in made.calibrated_classifiers_} == {"not for release"}


@pytest.mark.parametrize("on_others", [False, True])
def test_a_calibration_of_a_ready_model_has_to_be_fitted_on_other_people(
    patients: dict[str, Any], on_others: bool
) -> None:
    X, y = patients["X"], patients["y"]
    made = declared(patients, **UNSEEDED).fit(X[:300], y[:300], epsilon=2.0)
    calibrated = CalibratedClassifierCV(FrozenEstimator(made))
    if on_others:
        calibrated.fit(X[300:], y[300:])  # warnings are errors
        assert made.verdict_.outcome == HOLDS
        return
    with pytest.warns(UserWarning, match="CalibratedClassifierCV was fitted on what the model says"):
        calibrated.fit(X[:300], y[:300])
    assert reasons(made) == ["fitted-on-outputs"]


@pytest.mark.parametrize(
    ("target", "learns"),
    [
        ({"func": np.log1p, "inverse_func": np.expm1}, False),
        ({"transformer": FunctionTransformer(np.log1p, np.expm1)}, False),
        ({"transformer": StandardScaler()}, True),
    ],
)
def test_a_transformed_target_holds_where_the_transformer_learns_nothing(
    target: dict[str, Any], learns: bool
) -> None:
    X, y = load_diabetes(return_X_y=True)
    inner = PersonalizedRegressor(
        feature_ranges=(-0.2, 0.2), label_range=(-5, 7), model="linear", epsilon=50.0, **UNSEEDED
    )
    made = TransformedTargetRegressor(inner, **target)
    if learns:
        with pytest.warns(UserWarning, match="the fitted transformer of the target"):
            made.fit(X, y)
    else:
        made.fit(X, y)  # warnings are errors
    assert (made.regressor_.verdict_.outcome == HOLDS) != learns


@pytest.mark.parametrize("in_a_new_process", [False, True])
def test_a_second_fit_of_an_estimator_that_was_pickled_says_what_it_assumes(
    patients: dict[str, Any], in_a_new_process: bool
) -> None:
    """A new process knows of no fit: the second one on the same people said "holds for all", and nothing else."""
    made = declared(patients, **UNSEEDED).fit(patients["X"], patients["y"], epsilon=2.0)
    assert made.verdict_.assumed == ()
    again = pickle.loads(pickle.dumps(made))
    if in_a_new_process:
        forget_fits()
        again.fit(patients["X"], patients["y"], epsilon=2.0)
        assert again.verdict_.outcome == HOLDS
    else:
        with pytest.warns(UserWarning, match="an earlier fit of this process"):
            again.fit(patients["X"], patients["y"], epsilon=2.0)
    (assumed,) = again.verdict_.assumed
    assert assumed.startswith("It is assumed that the fit before, in another process")
    assert assumed in again.verdict_.sentences


@pytest.mark.parametrize("in_a_new_process", [False, True])
@pytest.mark.parametrize("on_others", [False, True])
def test_what_is_fitted_on_a_model_that_was_pickled_is_caught_or_said_to_be_assumed(
    patients: dict[str, Any], on_others: bool, in_a_new_process: bool
) -> None:
    X, y = patients["X"], patients["y"]
    made = declared(patients, **UNSEEDED).fit(X[:300], y[:300], epsilon=2.0)
    again = pickle.loads(pickle.dumps(made))
    if in_a_new_process:
        forget_fits()
    rows = slice(300, None) if on_others else slice(300)
    calibrated = CalibratedClassifierCV(FrozenEstimator(again))
    if in_a_new_process or on_others:
        calibrated.fit(X[rows], y[rows])
        (assumed,) = again.verdict_.assumed
        assert "CalibratedClassifierCV was fitted on other people than the model" in assumed
        assert (again.verdict_.outcome, made.verdict_.assumed) == (HOLDS, ())
        return
    with pytest.warns(UserWarning, match="CalibratedClassifierCV was fitted on what the model says"):
        calibrated.fit(X[rows], y[rows])
    assert reasons(again) == ["fitted-on-outputs"]


def test_nothing_of_the_rows_is_pickled_with_an_estimator(patients: dict[str, Any]) -> None:
    made = declared(patients, **UNSEEDED).fit(patients["X"], patients["y"], epsilon=2.0)
    again = pickle.loads(pickle.dumps(made))
    assert not any("fit" in name for name in vars(again))
    assert again.verdict_.outcome == HOLDS


def test_settings_do_not_tell_whether_somebody_has_several_rows() -> None:
    rng = np.random.default_rng(5)
    X, y = rng.random((40, 2)), rng.integers(0, 2, 40)
    listed = {f"p{i}": 2.0 for i in range(40)}
    ids = [f"p{i}" for i in range(40)]
    found = []
    for groups in (ids, ["p1", *ids[1:]]):  # somebody has two rows, and somebody none
        forget_fits()
        made = PersonalizedClassifier(feature_ranges=(0, 1), classes=[0, 1], model="linear", **QUICK)
        made.fit(X, y, epsilon=listed, groups=groups)
        found.append({**made.result_.settings, "plan": made.plan_.digest})
    assert found[0] == found[1]
    assert found[0]["records_per_person"] == 1


NUMBERS = np.random.default_rng(3).normal(size=(300, 3))
CLASSES = (NUMBERS[:, 0] > 0).astype(int)


def small(**more: Any) -> PersonalizedClassifier:
    chosen = {"feature_ranges": (-40, 40), "classes": [0, 1], "model": "linear", "steps": 5, "epsilon": 1.0}
    return PersonalizedClassifier(**{**chosen, **more})


def in_a_pipeline(*steps: Any) -> PersonalizedClassifier:
    made = small()
    make_pipeline(*steps, made).fit(NUMBERS, CLASSES)
    return made


def kept(X: Any) -> Any:
    return X


def scaled_by_its_own(X: Any) -> Any:
    return (X - X.mean(0)) / (X.std(0) + 1)


@pytest.mark.parametrize(
    "step",
    [
        ColumnTransformer([("kept", "passthrough", [0])], remainder=StandardScaler()),
        FunctionTransformer(scaled_by_its_own),
        make_pipeline(FunctionTransformer(kept), FunctionTransformer(scaled_by_its_own)),
        ColumnTransformer(
            [("scaled", FunctionTransformer(scaled_by_its_own), [0, 1])], remainder="passthrough"
        ),
    ],
    ids=["remainder", "function", "nested", "columns"],
)
def test_what_looks_at_other_rows_learns(step: Any) -> None:
    with pytest.warns(UserWarning, match="not for release"):
        made = in_a_pipeline(step)
    assert reasons(made) == ["schema-from-data"]


@pytest.mark.parametrize(
    "step",
    [
        ColumnTransformer([("kept", "passthrough", [0])], remainder="passthrough"),
        FunctionTransformer(np.tanh),
        FunctionTransformer(lambda X: np.where(X > 3, 3, X)),
        ColumnTransformer(
            [("log", FunctionTransformer(np.cbrt), [0, 1])], remainder=FunctionTransformer(np.tanh)
        ),
    ],
    ids=["remainder", "function", "own function", "columns"],
)
def test_what_looks_at_each_row_by_itself_does_not(step: Any) -> None:
    assert in_a_pipeline(step).verdict_.outcome == HOLDS


def test_a_target_that_is_scaled_by_its_own_mean_is_learned() -> None:
    for function, codes in ((lambda y: (y - y.mean()) / 2, ["schema-from-data"]), (lambda y: y / 2, [])):
        forget_fits()
        made = PersonalizedRegressor(
            epsilon=2.0, feature_ranges=(-4, 4), label_range=(-9, 9), model="linear", steps=5
        )
        around = TransformedTargetRegressor(
            made, func=function, inverse_func=lambda y: 2 * y, check_inverse=False
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            around.fit(NUMBERS, 2 * NUMBERS[:, 0])
        assert reasons(around.regressor_) == codes


@pytest.mark.parametrize("change", ["scaled", "turned round", "other columns", "a frame"])
def test_the_same_people_are_known_by_the_order_in_a_column(change: str) -> None:
    given = {
        "scaled": 3 * NUMBERS + 1,
        "turned round": -NUMBERS,
        "other columns": np.column_stack((NUMBERS[:, 0], np.sin(NUMBERS[:, 1]))),
        "a frame": pandas.DataFrame({"first": NUMBERS[:, 0] / 7}),
    }[change]
    assert small().fit(NUMBERS, CLASSES).verdict_.outcome == HOLDS
    with pytest.warns(UserWarning, match="an earlier fit of this process"):
        assert reasons(small().fit(given, CLASSES)) == ["other-fits"]


def test_sorted_columns_and_columns_of_few_numbers_say_nothing() -> None:
    for rows in (
        np.sort(NUMBERS, axis=0),
        np.round(np.sort(NUMBERS[::-1], axis=0)),
        1.0 + np.sort(NUMBERS, axis=0),
    ):
        assert small().fit(rows, CLASSES).verdict_.outcome == HOLDS


def test_of_fits_in_threads_one_holds() -> None:
    def fitted(rate: float) -> str:
        return str(small(learning_rate=rate).fit(NUMBERS, CLASSES).verdict_.outcome)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = Parallel(n_jobs=3, backend="threading")(delayed(fitted)(rate) for rate in (0.1, 0.2, 0.3))
    assert found.count(HOLDS) == 1


def test_a_fit_that_fails_is_none() -> None:
    def no_network(features: int, outputs: int) -> Any:
        raise KeyError(features)

    with pytest.raises(KeyError):
        small(model=no_network).fit(NUMBERS, CLASSES)
    assert small().fit(NUMBERS, CLASSES).verdict_.outcome == HOLDS
