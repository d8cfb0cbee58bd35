"""Labels that are numbers: a public range in, squared error, errors and predictions in the label's own unit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import polars
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from sklearn.metrics import mean_absolute_error, mean_squared_error, r2_score
from torch import nn

import pdpsgd
from pdpsgd.data.people import hold_out, load_people
from pdpsgd.errors import PdpsgdError
from pdpsgd.models.networks import by_name
from pdpsgd.training.evaluation import evaluate
from pdpsgd.training.regression import error_sentences, errors_of, in_range, scaled

SCHEMA = """
label = "rent"
label_range = [0, 2000]
id_column = "person"
confirmed = true
[columns.size]
kind = "numeric"
low = 10
high = 150
[columns.since]
kind = "date"
low = 2000-01-01
high = 2025-12-31
[columns.epsilon]
kind = "ignored"
"""


@pytest.fixture
def flats(tmp_path: Path) -> Path:
    """A table of flats whose rent goes with their size; some rents are above the public range."""
    rng = np.random.default_rng(5)
    size = rng.uniform(10, 150, 400).round(1)
    rent = (12 * size + rng.normal(0, 50, 400)).round(2)
    rent[:3] = 9000
    day = polars.date_range(polars.date(2001, 1, 1), polars.date(2002, 12, 31), eager=True)[:400]
    frame = polars.DataFrame(
        {
            "person": [f"p{i}" for i in range(400)],
            "size": size,
            "since": day,
            "rent": rent,
            "epsilon": rng.choice([20.0, 80.0], 400),
        }
    )
    frame.write_csv(tmp_path / "flats.csv")
    (tmp_path / "flats.toml").write_text(SCHEMA)
    return tmp_path / "flats.csv"


def train(flats: Path, **options: Any) -> tuple[pdpsgd.TrainingResult, Any]:
    data = load_people(flats, schema=flats.with_suffix(".toml"))
    budgets = pdpsgd.Budgets.from_table(flats, id_column="person")
    data, staying, aside = hold_out(data, budgets, 0.3)
    tier_of = dict(zip(aside.ids.tolist(), aside.epsilon.tolist(), strict=True))
    torch.manual_seed(0)
    network = by_name("linear", input_shape=data.input_shape, classes=1)
    tiers = [tier_of[person] for person in data.test_ids.tolist()]
    made = pdpsgd.fit(
        network,
        data,
        staying,
        test_tiers=tiers,
        **{"steps": 60, "batch_size": 100, "progress": False, "seed": 0, **options},
    )
    return made, data


def test_a_schema_with_a_label_range_is_all_that_a_regression_needs(flats: Path, tmp_path: Path) -> None:
    result, data = train(flats, run_folder=tmp_path / "run", evaluate_every=20)
    assert result.settings["loss"] == "squared-error"
    assert data.targets.min() >= -1
    assert data.targets.max() == 1  # rents above the range count as its end
    errors = result.evaluation.errors
    assert result.accuracy is None
    assert result.rmse == errors.rmse < 300  # always answering the mean is off by 500
    assert list(result.evaluation.errors_by_tier) == ["20", "80"]
    history = [json.loads(line) for line in (tmp_path / "run/public/history.jsonl").read_text().splitlines()]
    assert history[-1]["test_rmse"] == pytest.approx(errors.rmse)


def test_predictions_of_the_run_folder_are_in_the_unit_of_the_label_and_give_the_same_errors(
    flats: Path, tmp_path: Path
) -> None:
    result, data = train(flats, run_folder=tmp_path / "run")
    frame = polars.read_csv(flats).filter(polars.col("person").is_in(data.test_ids.tolist()))
    rows = frame.drop("rent", "person", "epsilon")
    loaded = pdpsgd.load_run(tmp_path / "run")
    answers = loaded.predict(rows)
    truth = frame["rent"].to_numpy().clip(0, 2000)
    assert answers.min() >= 0
    assert answers.max() <= 2000
    assert np.sqrt(np.mean((answers - truth) ** 2)) == pytest.approx(result.rmse, rel=1e-4)
    with pytest.raises(PdpsgdError, match="a model of classes"):
        loaded.predict_proba(rows)


def test_the_page_gives_errors_where_it_would_give_accuracy(flats: Path, tmp_path: Path) -> None:
    from pdpsgd.reporting import write_run_report

    result, _ = train(flats, run_folder=tmp_path / "run", evaluate_every=20)
    page = write_run_report(tmp_path / "run").read_text()
    assert f"{result.rmse:.4g}" in page
    assert "Its public range is 0 to 2000" in page
    assert "no test people" not in page


def test_arrays_with_a_label_range_are_trained_and_reported_alike(flats: Path) -> None:
    by_table, data = train(flats)
    limits = (0.0, 2000.0)
    torch.manual_seed(0)
    by_arrays = pdpsgd.fit(
        by_name("linear", input_shape=data.input_shape, classes=1),
        (data.inputs, in_range(data.targets, limits)),
        plan=by_table.plan,
        record_ids=data.ids,
        test_data=(data.test_inputs, in_range(data.test_targets, limits)),
        task="regression",
        label_range=limits,
        progress=False,
        seed=0,
    )
    assert by_arrays.rmse == pytest.approx(by_table.rmse, rel=1e-4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"task": "regressing"}, "'classification', 'regression'"),
        ({"task": "classification", "loss": "squared-error"}, "Expected a loss for classification"),
        ({"task": "regression", "loss": "cross-entropy"}, "Expected a loss for regression: 'squared-error'"),
        ({"label_range": (0, 1)}, "Expected label_range with task='regression'"),
        ({"task": "regression", "label_range": (1, 1)}, "low < high in label_range"),
        ({"task": "regression", "label_range": "wide"}, r"Expected label_range=\(low, high\)"),
    ],
)
def test_task_loss_and_range_that_do_not_go_together_are_refused(options: Any, message: str) -> None:
    data = (torch.rand(20, 2), torch.rand(20))
    with pytest.raises(PdpsgdError, match=message):
        pdpsgd.fit(nn.Linear(2, 1), data, [1.0] * 20, steps=2, batch_size=5, progress=False, **options)


def test_a_label_read_as_classes_is_not_regressed_on(flats: Path) -> None:
    with pytest.raises(PdpsgdError, match=r"task 'regression': the label of .* has a label_range"):
        load_people(flats, schema=flats.with_suffix(".toml"), task="classification")
    with pytest.raises(PdpsgdError, match="label_range of the schema"):
        train(flats, label_range=(0, 10))


@given(
    truth=arrays.arrays(np.float64, 8, elements=st.floats(-1e3, 1e3)),
    answers=arrays.arrays(np.float64, 8, elements=st.floats(-1e3, 1e3)),
)
def test_errors_agree_with_those_of_scikit_learn(truth: Any, answers: Any) -> None:
    found = errors_of(answers, truth)
    assert found.rmse == pytest.approx(mean_squared_error(truth, answers) ** 0.5, abs=1e-9)
    assert found.mae == pytest.approx(mean_absolute_error(truth, answers), abs=1e-9)
    if found.r_squared is not None and np.ptp(truth) > 1e-3:
        assert found.r_squared == pytest.approx(r2_score(truth, answers), rel=1e-6, abs=1e-6)


@given(st.floats(-1e4, 1e4), st.floats(1e-2, 1e4), st.floats(0, 1))
def test_a_label_comes_back_from_its_range(low: float, width: float, share: float) -> None:
    limits = (low, low + width)
    value = torch.tensor([low + share * width], dtype=torch.float64)
    assert float(in_range(scaled(value, limits), limits)) == pytest.approx(float(value), abs=width * 1e-6)


def test_weights_that_ran_away_give_an_infinite_error_not_a_broken_file() -> None:
    found = evaluate(
        nn.Linear(1, 1), (torch.full((3, 1), torch.inf), torch.ones(3)), "squared-error", task="regression"
    )
    assert found.errors.rmse == float("inf")
    assert "inf" in error_sentences(found.to_dict())[0]


def test_a_model_no_better_than_the_mean_is_called_so() -> None:
    figures = {"rmse": 2.0, "mae": 1.0, "r_squared": -0.1, "people": 3}
    said = error_sentences({"people": 3, "errors": figures})
    assert "no better than always answering the mean" in " ".join(said)
    assert len(error_sentences({"people": 3, "errors": {**figures, "r_squared": 0.4}})) == 1
