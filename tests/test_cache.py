"""What is kept for later runs is in one folder, which is the user's, bounded, listed and emptied."""

from __future__ import annotations

import json
import os

import pytest
import torch
from typer.testing import CliRunner

from experiments.kept_features import kept_features
from pdpsgd import _cache
from pdpsgd.cli import app
from pdpsgd.errors import PdpsgdError
from pdpsgd.models.embedding_cache import EmbeddingCache


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("PDPSGD_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("PDPSGD_CACHE_LIMIT", raising=False)
    made = _cache.cache_folder()
    assert made == tmp_path / "cache"
    return made


def put(path, size, used):
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(bytes(size))
    os.utime(path, (used, used))


def test_a_folder_that_others_can_write_to_is_not_used(folder):
    folder.chmod(0o777)
    assert _cache.cache_folder() is None
    folder.chmod(0o755)
    assert _cache.cache_folder() == folder


def test_without_the_variable_it_is_in_the_users_cache(tmp_path, monkeypatch):
    monkeypatch.delenv("PDPSGD_CACHE", raising=False)
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert _cache.cache_place() == tmp_path / "pdpsgd"


def test_features_are_kept_once_with_a_word_about_it_and_not_in_the_data_folder(
    folder, tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("PDPSGD_DATA", str(tmp_path / "data"))
    calls = []

    def compute():
        calls.append(1)
        return {"x": torch.ones(1000)}

    assert torch.equal(kept_features("some", compute)["x"], torch.ones(1000))
    said = capsys.readouterr().err
    assert "features/some.safetensors (4.0 kB)" in said
    assert "pdpsgd data cache --clear" in said
    kept_features("some", compute)
    assert len(calls) == 1
    assert not (tmp_path / "data").exists()


def test_what_was_not_used_for_longest_makes_room_and_benchmarks_stay(folder, monkeypatch):
    monkeypatch.setenv("PDPSGD_CACHE_LIMIT", "1e-5")  # 10,000 bytes
    put(folder / "features" / "old.safetensors", 6000, 100)
    put(folder / "features" / "new.safetensors", 3000, 200)
    put(folder / "mnist" / "images.gz", 50_000, 50)
    put(folder / "notes.txt", 9000, 1)  # somebody's own
    assert [each.path.name for each in _cache.make_room(2000)] == ["old.safetensors"]
    assert [each.path.name for each in _cache.make_room(2000)] == []
    assert kept_features("large", lambda: {"x": torch.ones(4000)})["x"].numel() == 4000
    assert not (folder / "features" / "large.safetensors").exists()  # more than the limit is never kept
    assert (folder / "mnist" / "images.gz").exists()
    assert (folder / "notes.txt").exists()


def test_embeddings_keep_to_the_limit(folder, monkeypatch):
    cache = EmbeddingCache(folder / _cache.EMBEDDINGS)
    for number in range(200):
        cache.add(bytes([number]), torch.full((384,), float(number)))
    cache.flush()
    before = cache.size
    monkeypatch.setenv("PDPSGD_CACHE_LIMIT", "2e-4")  # 200 kB
    again = EmbeddingCache(folder / _cache.EMBEDDINGS)
    assert again.size <= 200_000 < before
    assert list(again.read([bytes([199]), bytes([0])])) == [bytes([199])]  # the newest stays


def test_the_command_lists_and_clears(folder):
    put(folder / "native-0123.so", 2000, 1)
    put(folder / "features" / "a.safetensors", 3000, 2)
    put(folder / "mnist" / "images.gz", 4000, 3)
    run = CliRunner().invoke
    listed = json.loads(run(app, ["data", "cache", "--json", "-"]).output)
    assert listed["bytes"] == 9000
    assert listed["folder"] == str(folder)
    shown = run(app, ["data", "cache", "--clear"])
    assert "Removed: 2 files, 5.0 kB" in shown.output
    assert [each.path.name for each in _cache.cached_files()] == ["images.gz"]


def test_the_option_names_another_folder(folder, tmp_path):
    put(tmp_path / "other" / "native-0123.so", 2000, 1)
    shown = CliRunner().invoke(app, ["data", "cache", "--cache-folder", str(tmp_path / "other")])
    assert "native-0123.so" in shown.output


@pytest.mark.parametrize("limit", ["much", "-1", "nan"])
def test_a_limit_that_is_no_number_is_refused(folder, monkeypatch, limit):
    monkeypatch.setenv("PDPSGD_CACHE_LIMIT", limit)
    with pytest.raises(PdpsgdError, match="Expected PDPSGD_CACHE_LIMIT"):
        _cache.cache_limit()
