"""The package as somebody gets it: built, installed alone, imported."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Wheel and sdist, built from what is in the repository."""
    pytest.importorskip("hatchling", reason="hatchling is not installed")
    target = tmp_path_factory.mktemp("dist")
    _run(sys.executable, "-m", "hatchling", "build", "-d", str(target), cwd=ROOT)
    return target


@pytest.fixture(scope="module")
def installed(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh environment with the wheel alone; what it depends on is borrowed from here, to download nothing."""
    place = tmp_path_factory.mktemp("fresh")
    venv.create(place, with_pip=False)
    python = place / "bin" / "python"
    wheel = next(built.glob("*.whl"))
    _run(
        sys.executable,
        "-m",
        "pip",
        "--python",
        str(python),
        "install",
        "--no-deps",
        "--no-index",
        "-q",
        str(wheel),
    )
    packages = next(place.glob("lib/python*/site-packages"))
    (packages / "borrowed.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    return python


def test_the_wheel_holds_the_package_and_nothing_else(built: Path) -> None:
    with zipfile.ZipFile(next(built.glob("*.whl"))) as wheel:
        names = set(wheel.namelist())
    assert {
        "pdpsgd/py.typed",
        "pdpsgd/reporting/page.css",
        "pdpsgd/reporting/page.js",
        "pdpsgd/cli/plan.py",
        "pdpsgd/gradients/native/kernels.c",
        "pdpsgd/sampling/native/kernels.c",
    } <= names
    assert all(re.match(r"pdpsgd(-[\d.]+\.dist-info)?/", name) for name in names)
    assert not any("experiments" in name for name in names)
    assert any(name.endswith("licenses/LICENSE") for name in names)
    sources = {path.relative_to(ROOT / "src").as_posix() for path in (ROOT / "src/pdpsgd").rglob("*.py")}
    assert sources <= names


def test_the_sdist_is_enough_to_build_the_same_wheel(built: Path, tmp_path: Path) -> None:
    with tarfile.open(next(built.glob("*.tar.gz"))) as archive:
        archive.extractall(tmp_path, filter="data")
    source = next(tmp_path.glob("pdpsgd-*"))
    assert (source / "Makefile").exists()
    assert (source / "tests").is_dir()
    _run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path / "again"), cwd=source)
    with (
        zipfile.ZipFile(next(built.glob("*.whl"))) as one,
        zipfile.ZipFile(next((tmp_path / "again").glob("*.whl"))) as other,
    ):
        assert set(one.namelist()) == set(other.namelist())


def test_the_wheel_works_in_a_fresh_environment(installed: Path, tmp_path: Path) -> None:
    where = _run(installed, "-c", "import pdpsgd; print(pdpsgd.__file__)", cwd=tmp_path)
    assert str(installed.parents[1]) in where
    command = [
        installed.with_name("pdpsgd"),
        "plan",
        "--tiers",
        "1:0.5,2:0.5",
        "--people",
        "500",
        "--steps",
        "20",
    ]
    out = _run(*map(str, command), "--batch-size", "20", "--verify", cwd=tmp_path)
    assert "Verified" in out


def test_importing_the_package_loads_nothing_heavy(installed: Path, tmp_path: Path) -> None:
    heavy = "{'torch', 'scipy', 'polars', 'pandas', 'altair', 'rich', 'dp_accounting', 'lightning'}"
    _run(installed, "-c", f"import pdpsgd, sys; assert not {heavy} & sys.modules.keys()", cwd=tmp_path)


def test_every_public_name_can_be_had(installed: Path, tmp_path: Path) -> None:
    _run(installed, "-c", "import pdpsgd; [getattr(pdpsgd, name) for name in pdpsgd.__all__]", cwd=tmp_path)


def test_versions_and_requirements_agree() -> None:
    import pdpsgd

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == pdpsgd.__version__
    assert f"## {pdpsgd.__version__}" in (ROOT / "CHANGELOG.md").read_text()
    assert f"version: {pdpsgd.__version__}" in (ROOT / "CITATION.cff").read_text()
    assert project["requires-python"] == ">=3.10"
    torch = next(line for line in project["dependencies"] if line.startswith("torch"))
    assert "==" not in torch, "the range stays open; constraints.txt pins what make installs"


def test_the_two_commands_need_nothing_but_python_and_make() -> None:
    for target in ("demo", "test", "lint", "docs", "bench", "reproduce"):
        dry = _run("make", "-n", target, "VENV=/nowhere/env", cwd=ROOT)
        assert "-m venv /nowhere/env" in dry, target
        assert "-c constraints.txt" in dry, target
    run = ROOT / ".ci" / "run"
    assert os.access(run, os.X_OK)
    assert "make test" in run.read_text()


def _run(*command: object, cwd: Path | None = None) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    result = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, f"{command}\n{result.stdout}\n{result.stderr}"
    return result.stdout
