"""A run folder is enough to use its model: the same outputs as in training, and clear words where it cannot be."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pytest
import safetensors
import torch
from torch import nn

import pdpsgd
from pdpsgd.data.people import load_people
from pdpsgd.data.rows import npz_batches
from pdpsgd.models.architecture import LAYERS, layers_of, make_layers
from pdpsgd.models.networks import BUILT_IN, by_name
from pdpsgd.training.model_description import ModelDescription, NetworkDescription

SCHEMA = """
label = "income"
classes = ["low", "high"]
id_column = "person"
confirmed = {confirmed}
[columns.age]
kind = "numeric"
low = 0
high = 120
[columns.job]
kind = "categorical"
categories = ["nurse", "teacher"]
[columns.epsilon]
kind = "ignored"
"""


@pytest.fixture
def table_run(tmp_path: Path) -> Any:
    """Train on a table; the answer is a function of whether the schema is confirmed."""
    people = [
        (f"p{number}", 18 + number * 7 % 60, ("nurse", "teacher")[number % 2], 2.0) for number in range(100)
    ]
    rows = [(*each, "high" if each[1] > 45 else "low") for each in people]
    frame = pl.DataFrame(rows, schema=["person", "age", "job", "epsilon", "income"], orient="row")
    frame.write_csv(tmp_path / "people.csv")

    def train(*, confirmed: bool = True, **options: Any) -> tuple[pdpsgd.TrainingResult, Path, pl.DataFrame]:
        (tmp_path / "schema.toml").write_text(SCHEMA.format(confirmed=str(confirmed).lower()))
        data = load_people(tmp_path / "people.csv", schema=tmp_path / "schema.toml")
        torch.manual_seed(0)
        model = by_name("tabular", input_shape=data.input_shape, classes=2)
        folder = tmp_path / "run"
        result = pdpsgd.fit(
            model,
            data,
            pdpsgd.Budgets([2.0] * 100, ids=data.ids),
            steps=3,
            batch_size=20,
            run_folder=folder,
            progress=False,
            **options,
        )
        return result, folder, frame

    return train


def test_a_table_is_predicted_as_training_saw_it_from_pandas_polars_csv_and_parquet(table_run, tmp_path):
    result, folder, frame = table_run()
    data = load_people(tmp_path / "people.csv", schema=tmp_path / "schema.toml")
    expected = torch.softmax(result.model.eval()(data.inputs), 1).detach().numpy()
    rows = frame.select("job", "age")  # another order of columns, and neither label nor id nor budget
    rows.write_parquet(tmp_path / "rows.parquet")
    model = pdpsgd.load_run(folder)
    for given in (rows, rows.to_pandas(), tmp_path / "rows.parquet", tmp_path / "people.csv"):
        np.testing.assert_array_equal(model.predict_proba(given), expected)
        assert model.predict(given).tolist() == [("low", "high")[i] for i in expected.argmax(1)]
    one_file = pdpsgd.load_run(folder / "public" / "model.safetensors")
    np.testing.assert_array_equal(one_file.predict_proba(rows), expected)
    np.testing.assert_array_equal(pdpsgd.load_run(folder / "public").predict_proba(rows), expected)


def test_unusual_rows_are_predicted_and_said(table_run):
    _, folder, _ = table_run()
    model = pdpsgd.load_run(folder)
    usual = pd.DataFrame({"age": [40, None], "job": ["nurse", None], "extra": [1, 2]})
    model.predict(
        usual
    )  # missing values and further columns are ordinary: not a word (warnings are errors here)
    with pytest.warns(
        UserWarning, match=r"'job' in 1 of 2 rows \(such as 'baker' in 'job'\).*'age' in 1 of 2"
    ):
        odd = model.predict_proba(pd.DataFrame({"age": [40, 200], "job": ["baker", "nurse"]}))
    same = model.predict_proba(pd.DataFrame({"age": [40, 120], "job": [None, "nurse"]}))
    np.testing.assert_array_equal(odd, same)
    assert model.predict(usual[:0]).shape == (0,)
    with pytest.raises(pdpsgd.PdpsgdError, match=r"Expected a column 'job'.*\"?'age'"):
        model.predict(pd.DataFrame({"age": [1]}))
    with pytest.raises(pdpsgd.PdpsgdError, match="the columns 'age', 'job'"):
        model.predict(pd.DataFrame({"other": [1]}))
    with pytest.raises(pdpsgd.PdpsgdError, match="Expected a number in column 'age' of the frame, row 1"):
        model.predict(pd.DataFrame({"age": ["1", "old"], "job": ["nurse", "nurse"]}))
    with pytest.raises(pdpsgd.PdpsgdError, match="Expected a frame with the columns 'age', 'job'"):
        model.predict(np.zeros((1, 4)))


def test_an_unconfirmed_schema_travels_in_private_and_is_marked(table_run):
    _, folder, frame = table_run(confirmed=False)
    public = b"".join(path.read_bytes() for path in (folder / "public").glob("model*"))
    assert b"nurse" not in public
    assert not (folder / "public" / "model.json").exists()
    described = json.loads((folder / "private" / "model.json").read_text())
    assert described["confirmed"] is False
    assert "NOT covered by the privacy promise" in described["notes"][0]
    assert len(pdpsgd.load_run(folder).predict(frame)) == 100
    with pytest.raises(pdpsgd.PdpsgdError, match=r"private/model\.json of the run folder alone"):
        pdpsgd.load_run(folder / "public")


def test_arrays_and_an_ensemble_of_models(problem, tmp_path):
    result = problem.fit(
        plan=problem.plan(steps=(5, 5), fresh=True), weight_average=None, run_folder=tmp_path
    )
    assert len(result.models) == 2
    model = pdpsgd.load_run(tmp_path)
    outputs = result.model.eval()(problem.inputs)
    np.testing.assert_array_equal(model.predict(problem.inputs), outputs.argmax(1).numpy())
    np.testing.assert_array_equal(model.predict(problem.inputs.numpy()), outputs.argmax(1).numpy())
    with pytest.raises(
        pdpsgd.PdpsgdError, match=r"Expected inputs of shape \(5,\), as in training. Got \(4,\)"
    ):
        model.predict(np.zeros((2, 4), dtype=np.float32))


@pytest.mark.parametrize("pixels", [True, False])
def test_npz_files_are_read_some_rows_at_a_time(tmp_path, pixels):
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (30, 4, 4), dtype=np.uint8) if pixels else rng.normal(size=(30, 4))
    np.savez(
        tmp_path / "data.npz", inputs=images, targets=np.arange(30) % 3, classes=np.array(["a", "b", "c"])
    )
    data = load_people(tmp_path / "data.npz")
    network = by_name("linear", input_shape=data.input_shape, classes=3)
    fitted = pdpsgd.fit(
        network, data, [2.0] * 30, steps=2, batch_size=10, run_folder=tmp_path / "run", progress=False
    )
    model = pdpsgd.load_run(tmp_path / "run")
    expected = fitted.model(data.inputs).argmax(1)
    parts = list(model.batches(tmp_path / "data.npz", at_once=7))
    assert [len(part.rows) for part in parts] == [7, 7, 7, 7, 2]
    assert np.concatenate([part.values for part in parts]).tolist() == ["abc"[i] for i in expected]
    np.testing.assert_array_equal(
        np.concatenate(list(npz_batches(tmp_path / "data.npz", "inputs", 4))), images
    )
    with pytest.raises(pdpsgd.PdpsgdError, match="Expected an array 'other'"):
        list(npz_batches(tmp_path / "data.npz", "other", 4))


def test_a_network_of_ones_own_is_found_by_its_name_or_given(problem, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    source = (
        "from torch import nn\n"
        "class Small(nn.Module):\n"
        "    def __init__(self, classes=3):\n"
        "        super().__init__()\n"
        "        self.inside = nn.Linear(5, classes)\n"
        "    def forward(self, x):\n"
        "        return self.inside(x)\n"
    )
    (tmp_path / "own_networks.py").write_text(source)
    module: dict[str, Any] = {}
    sys.path.insert(0, str(tmp_path))
    import own_networks  # type: ignore[import-not-found]

    result = problem.fit(model=own_networks.Small(), run_folder=tmp_path / "run")
    expected = result.model.eval()(problem.inputs).argmax(1).numpy()
    np.testing.assert_array_equal(pdpsgd.load_run("run").predict(problem.inputs), expected)
    sys.path.remove(str(tmp_path))
    del sys.modules["own_networks"]
    monkeypatch.chdir(tmp_path / "run")
    with pytest.raises(pdpsgd.PdpsgdError, match=r"trained as 'own_networks:Small'.*--model module:function"):
        pdpsgd.load_run(tmp_path / "run")
    exec(source, module)
    given = pdpsgd.load_run(tmp_path / "run", model=module["Small"]())
    np.testing.assert_array_equal(given.predict(problem.inputs), expected)
    with pytest.raises(pdpsgd.PdpsgdError, match="to fit the network"):
        pdpsgd.load_run(tmp_path / "run", model=nn.Linear(5, 4))


def test_every_layer_that_is_written_down_is_made_again():
    made = {
        "Linear": nn.Linear(3, 4, bias=False),
        "Conv1d": nn.Conv1d(2, 4, 3, stride=2),
        "Conv2d": nn.Conv2d(2, 4, (3, 1), padding="same"),
        "Embedding": nn.Embedding(5, 2, padding_idx=1),
        "MaxPool1d": nn.MaxPool1d(2),
        "MaxPool2d": nn.MaxPool2d(2, stride=1),
        "AvgPool1d": nn.AvgPool1d(2),
        "AvgPool2d": nn.AvgPool2d(2),
        "AdaptiveAvgPool1d": nn.AdaptiveAvgPool1d(3),
        "AdaptiveAvgPool2d": nn.AdaptiveAvgPool2d((2, 3)),
        "Flatten": nn.Flatten(2),
        "GroupNorm": nn.GroupNorm(2, 4, affine=False),
        "LayerNorm": nn.LayerNorm((3, 4), bias=False),
        "Dropout": nn.Dropout(0.3),
        "Dropout2d": nn.Dropout2d(0.3),
        "LeakyReLU": nn.LeakyReLU(0.3),
        "ELU": nn.ELU(2.0),
        "GELU": nn.GELU("tanh"),
    }
    for kind in LAYERS:
        network = nn.Sequential(made[kind] if kind in made else getattr(nn, kind)())
        layers = json.loads(json.dumps(layers_of(network)))
        assert layers is not None, kind
        again = make_layers(layers, place="here")
        assert str(again) == str(network)
        assert again.state_dict().keys() == network.state_dict().keys()


@pytest.mark.parametrize("name", BUILT_IN)
def test_every_built_in_network_is_written_down_as_layers(name):
    network = by_name(name, input_shape=BUILT_IN[name].input_shape or (7,), classes=3)
    assert layers_of(network) is not None


def test_what_is_more_than_its_layers_is_not_written_down():
    class Doubled(nn.Linear):
        def forward(self, inputs):
            return 2 * super().forward(inputs)

    assert layers_of(nn.Sequential(Doubled(2, 2))) is None
    assert layers_of(nn.Sequential(nn.Conv2d(1, 1, 3, padding=1, padding_mode="circular"))) is None
    assert layers_of(nn.Linear(2, 2)) is None
    with pytest.raises(
        pdpsgd.PdpsgdError, match=r"Expected layers as \[name, class in torch.nn, arguments\]"
    ):
        make_layers([["0", "Module", {}]], place="here")
    with pytest.raises(
        pdpsgd.PdpsgdError, match="Linear is written down with bias, in_features, out_features"
    ):
        make_layers([["0", "Linear", {"device": "cuda"}]], place="here")


def test_damaged_and_foreign_files_are_refused(problem, tmp_path):
    with pytest.raises(pdpsgd.PdpsgdError, match="There is no model"):
        pdpsgd.load_run(tmp_path)
    with pytest.raises(pdpsgd.PdpsgdError, match="Expected a run folder"):
        pdpsgd.load_run(tmp_path / "nothing")
    problem.fit(run_folder=tmp_path)
    path = tmp_path / "public" / "model.json"
    described = json.loads(path.read_text())
    path.write_text(json.dumps({**described, "format_version": 2}))
    with pytest.raises(pdpsgd.PdpsgdError, match="format version 1 or less"):
        pdpsgd.load_run(tmp_path)
    path.write_text(json.dumps({**described, "network": {}}))
    with pytest.raises(pdpsgd.PdpsgdError, match="Expected 'input_shape' in"):
        pdpsgd.load_run(tmp_path)
    path.unlink()
    pdpsgd.load_run(tmp_path)  # the metadata of the weights says the same
    weights = tmp_path / "public" / "model.safetensors"
    safetensors.torch.save_file({"x": torch.zeros(1)}, weights)
    with pytest.raises(pdpsgd.PdpsgdError, match="an earlier version, or another program"):
        pdpsgd.load_run(tmp_path)
    weights.write_bytes(b"torn")
    with pytest.raises(pdpsgd.PdpsgdError, match="cannot be read"):
        pdpsgd.load_run(tmp_path)


def test_a_description_survives_its_file():
    described = ModelDescription(
        NetworkDescription(
            (3,), 2, [["0", "Linear", {"in_features": 3, "out_features": 2}]], "linear", None, 2
        ),
        shape=(3,),
        classes=("a", "b"),
    )
    assert ModelDescription.from_json(described.to_json(), place="here") == described
