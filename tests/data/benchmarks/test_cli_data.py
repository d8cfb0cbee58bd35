from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pdpsgd.cli.data import app
from pdpsgd.data.benchmarks.catalog import CATALOG
from pdpsgd.data.benchmarks.formats import md5_of
from pdpsgd.data.schema import Numeric, Schema
from pdpsgd.errors import PdpsgdError


def run(*arguments: object) -> str:
    """What a command prints; a user's mistake comes out as the project's error."""
    result = CliRunner().invoke(
        app, [str(a) for a in arguments], catch_exceptions=False, env={"COLUMNS": "200"}
    )
    assert result.exit_code == 0, result.output
    return result.output


def test_the_list_says_what_is_here_and_how_to_get_the_rest(small, tmp_path: Path) -> None:
    small("mnist").write(tmp_path / "mnist")
    output = run("list", "--data-folder", tmp_path)
    assert str(tmp_path / "mnist") in output.replace("\n", "")
    assert "not here: pdpsgd data get svhn" in output
    assert "1,437 + 360 to test" in output


def test_the_list_for_scripts_is_json(small, tmp_path: Path) -> None:
    small("mnist").write(tmp_path / "mnist")
    rows = {row["name"]: row for row in json.loads(run("list", "--json", "-", "--data-folder", tmp_path))}
    assert list(rows) == ["digits", "mnist", "fashion-mnist", "svhn"]
    assert rows["mnist"]["found"] == str(tmp_path / "mnist")
    assert rows["svhn"]["found"] is None
    assert rows["svhn"]["input_shape"] == [3, 32, 32]


@pytest.fixture
def published(server, small, monkeypatch):
    miniature = small("mnist")
    monkeypatch.setitem(CATALOG, "mnist", replace(miniature.benchmark, mirrors=(server.address,)))
    server.files.update({f"/{name}": content for name, content in miniature.files.items()})
    return server


def test_getting_downloads_once_and_says_where(published, tmp_path: Path) -> None:
    assert f"mnist is in {tmp_path / 'mnist'}" in run("get", "mnist", "--data-folder", tmp_path)
    assert len(published.requests) == 4
    assert json.loads(run("get", "mnist", "--json", "-", "--data-folder", tmp_path))["folder"] == str(
        tmp_path / "mnist"
    )
    assert len(published.requests) == 4


def test_getting_repairs_a_damaged_file(published, tmp_path: Path) -> None:
    run("get", "mnist", "--data-folder", tmp_path)
    (tmp_path / "mnist" / "t10k-labels-idx1-ubyte.gz").write_bytes(b"")
    run("get", "mnist", "--data-folder", tmp_path)
    run("check", "mnist", "--data-folder", tmp_path)


def test_a_check_of_intact_files_ends_well(small, tmp_path: Path) -> None:
    small("mnist").write(tmp_path / "mnist")
    assert run("check", "--data-folder", tmp_path) == f"mnist in {tmp_path / 'mnist'}: intact\n"


@pytest.fixture(params=["mnist", "svhn"])
def truncated(request, small, tmp_path: Path) -> tuple[str, Path, int]:
    """A benchmark with a file that is cut off, the file, and how long it should be."""
    miniature = small(request.param)
    folder = miniature.write(tmp_path / request.param)
    file = miniature.benchmark.files[0]
    (folder / file.name).write_bytes(miniature.files[file.name][:1000])
    return request.param, folder / file.name, file.size


def test_a_check_of_damaged_files_ends_with_code_1_and_names_the_file_and_its_length(
    truncated, tmp_path: Path
) -> None:
    name, path, size = truncated
    result = CliRunner().invoke(app, ["check", "--json", "-", "--data-folder", str(tmp_path)])
    assert result.exit_code == 1
    (entry,) = json.loads(result.output)
    assert f"{path} cannot be used" in entry["problem"]
    assert "truncated" in entry["problem"]
    assert f"It has 1,000 bytes and md5 {md5_of(path)}, the published file {size:,} bytes" in entry["problem"]
    assert f"pdpsgd data get {name}" in entry["problem"]


def test_the_list_does_not_call_damaged_files_present(truncated, tmp_path: Path) -> None:
    name, path, size = truncated
    output = run("list", "--data-folder", tmp_path)
    assert "damaged, see below" in output
    assert f"{name}: {path} cannot be used for {name}" in output
    assert f"the published file {size:,} bytes" in output
    rows = {row["name"]: row for row in json.loads(run("list", "--json", "-", "--data-folder", tmp_path))}
    assert rows[name]["found"] is None
    assert str(path) in rows[name]["problem"]


def test_a_check_of_what_is_not_here_says_how_to_get_it(small) -> None:
    small("mnist")
    with pytest.raises(PdpsgdError, match="pdpsgd data get mnist"):
        run("check", "mnist")
    assert "No benchmark has files here" in run("check")
    assert run("check", "digits") == "digits in scikit-learn: intact\n"


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "people.csv"
    path.write_text("person,age,epsilon,income\na,30,0.5,low\nb,40,1,high\n")
    return path


def test_a_schema_is_drafted_into_a_file_that_is_not_overwritten(table: Path, tmp_path: Path) -> None:
    output = tmp_path / "schema.toml"
    command = ["schema", table, "--label", "income", "--id-column", "person", "--epsilon-column", "epsilon"]
    assert "NOT PRIVATE" in run(*command, "-o", output)
    schema = Schema.read(output)
    assert schema.features == ("age",)
    assert schema.columns["age"] == Numeric(30, 40)
    assert not schema.confirmed
    with pytest.raises(PdpsgdError, match="exists; --force overwrites it"):
        run(*command, "-o", output)
    run(*command, "-o", output, "--force")


def test_a_schema_without_a_file_goes_to_the_screen(table: Path) -> None:
    text = run("schema", table, "--label", "income")
    assert "NOT PRIVATE" in text.splitlines()[1]
    assert Schema.from_toml(text).label == "income"


@pytest.mark.parametrize("command", ["list", "get", "check", "schema"])
def test_help_teaches_by_example(command: str) -> None:
    assert f"pdpsgd data {command}" in run(command, "--help")


def test_the_command_does_not_load_torch() -> None:
    code = "import sys, pdpsgd.cli.data; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
