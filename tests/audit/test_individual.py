"""`pdpsgd audit --individual`: private, after a run that kept norms, and nothing public knows of it."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from typer.testing import CliRunner

import pdpsgd
from pdpsgd.audit.individual import audit_individual
from pdpsgd.cli import app
from pdpsgd.errors import PdpsgdError

PEOPLE = 60


def train(folder: Path, *, mechanism: str = "pdp-gd-filter", keep_norms: bool = True, seed: int = 3) -> None:
    torch.manual_seed(0)
    inputs = torch.randn(PEOPLE, 4)
    pdpsgd.fit(
        torch.nn.Linear(4, 3),
        (inputs, inputs.argmax(1) % 3),
        pdpsgd.Budgets([1.0] * 40 + [2.0] * 20, ids=[f"p{n}" for n in range(PEOPLE)]),
        mechanism=mechanism,
        steps=5,
        batch_size=20,
        seed=seed,
        run_folder=folder,
        keep_norms=keep_norms,
        progress=False,
    )


@pytest.mark.parametrize("mechanism", ["pdp-gd-filter", "pdp-sgd-exact"])
def test_everybody_has_a_figure_that_is_at_most_what_is_proven_in_a_private_file(
    tmp_path: Path, mechanism: str
) -> None:
    train(tmp_path / "run", mechanism=mechanism)
    found = audit_individual(tmp_path / "run")
    assert found.path == tmp_path / "run" / "private" / "individual.csv"
    rows = list(csv.DictReader(found.path.read_text().splitlines()))
    assert [row["id"] for row in rows] == [f"p{n}" for n in range(PEOPLE)]
    figures = np.array([float(row["individual_epsilon"]) for row in rows])
    proven = np.array([float(row["proven_epsilon"]) for row in rows])
    assert (figures <= proven).all()
    assert (figures > 0).all()
    tiers = {tier.epsilon: tier for tier in found.tiers}
    assert {epsilon: tier.people for epsilon, tier in tiers.items()} == {1.0: 40, 2.0: 20}
    assert tiers[1.0].median == np.median(figures[:40])
    assert tiers[1.0].exact == (mechanism == "pdp-gd-filter")
    for row in rows:
        assert float(row["by_tighter_conversion"]) <= float(row["by_papers_conversion"])


def test_nothing_public_tells_whether_norms_were_kept(tmp_path: Path) -> None:
    contents = []
    for keep in (False, True):
        train(tmp_path / "run", keep_norms=keep)
        if keep:
            audit_individual(tmp_path / "run")
        files = {
            path.relative_to(tmp_path): path.read_bytes()
            for folder in ("public", "people")
            for path in sorted((tmp_path / "run" / folder).rglob("*"))
            if path.is_file()
        }
        assert (tmp_path / "run" / "private" / "norms.safetensors").exists() == keep
        contents.append(files)
        shutil.rmtree(tmp_path / "run")
    assert contents[0].keys() == contents[1].keys()
    assert [name for name in contents[0] if contents[0][name] != contents[1][name]] == []


def test_the_command_warns_and_its_json_says_that_it_is_sensitive(tmp_path: Path) -> None:
    train(tmp_path / "run")
    told = CliRunner().invoke(
        app, ["audit", str(tmp_path / "run"), "--individual", "--json", str(tmp_path / "x.json")]
    )
    assert told.exit_code == 0, told.output
    text = " ".join(told.output.split())
    assert "PRIVATE" in text
    assert "neither this table nor the file may be published" in text
    assert "The tighter conversion" in text
    assert json.loads((tmp_path / "x.json").read_text())["sensitive"] is True


def test_runs_without_norms_or_with_those_of_another_plan_are_refused(tmp_path: Path) -> None:
    train(tmp_path / "one", keep_norms=False)
    with pytest.raises(PdpsgdError, match="--keep-norms"):
        audit_individual(tmp_path / "one")
    train(tmp_path / "other", mechanism="pdp-sgd-exact")
    kept = Path("private", "norms.safetensors")
    shutil.copy(tmp_path / "other" / kept, tmp_path / "one" / kept)
    with pytest.raises(PdpsgdError, match="another one"):
        audit_individual(tmp_path / "one")
    columns = load_file(tmp_path / "other" / kept)
    for level in (columns["level"].astype(np.int32), columns["level"] + 1, columns["level"] - 1):
        save_file({**columns, "level": level}, tmp_path / "other" / kept)
        with pytest.raises(PdpsgdError, match=r"level of each person, from 0 to 1, in .*norms\.safetensors"):
            audit_individual(tmp_path / "other")
        assert not (tmp_path / "other" / "private" / "individual.csv").exists()
    (tmp_path / "one" / kept).write_bytes(b"not a file of tensors")
    with pytest.raises(PdpsgdError, match="cannot be read"):
        audit_individual(tmp_path / "one")


def test_norms_need_a_folder_to_be_kept_in() -> None:
    with pytest.raises(PdpsgdError, match="run_folder"):
        pdpsgd.fit(
            torch.nn.Linear(2, 2),
            (torch.zeros(4, 2), torch.zeros(4, dtype=torch.long)),
            pdpsgd.Budgets([1.0] * 4),
            keep_norms=True,
        )
