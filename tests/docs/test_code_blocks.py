"""What the documentation shows, works: Python is run, commands are run, links lead somewhere."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from pdpsgd.cli import app

ROOT = Path(__file__).parents[2]
RUN = (
    "README.md",
    "docs/index.md",
    "docs/choosing.md",
    "docs/pate.md",
    "docs/people-over-time.md",
    "docs/transformers.md",
    "docs/scikit-learn.md",
)
"""Pages whose Python is run, block after block, as a reader would."""
COMMANDS = ("docs/index.md", "docs/own-data.md", "docs/command-line.md", "docs/people-over-time.md")
"""Pages whose commands are run, in order, in a folder with people.csv and list.csv."""
PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("docs/results/*.md"))
)


def blocks(page: str, *languages: str) -> list[str]:
    text = (ROOT / page).read_text(encoding="utf-8")
    return [
        body
        for language, body in re.findall(r"^```(\w*)\n(.*?)^```", text, re.M | re.S)
        if language in languages
    ]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("page", RUN)
def test_the_python_on_the_page_runs(page: str, folder: Path) -> None:
    threads = torch.get_num_threads()
    names: dict[str, Any] = {}
    found = blocks(page, "python")
    assert found
    for block in found:
        exec(compile(block, page, "exec"), names)
    torch.set_num_threads(threads)


@pytest.mark.parametrize("page", COMMANDS)
def test_the_commands_on_the_page_run(page: str, folder: Path) -> None:
    _write_people(folder)
    for toml in blocks(page, "toml"):
        (folder / "run.toml").write_text(toml)
    commands = [
        line for block in blocks(page, "sh") for line in block.splitlines() if line.startswith("pdpsgd")
    ]
    assert commands
    for line in commands:
        arguments = shlex.split(line, comments=True)[1:]
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 0, (line, result.output, result.exception)
        if arguments[:2] == ["data", "schema"]:  # the reader confirms the draft
            schema = folder / "schema.toml"
            schema.write_text(schema.read_text().replace("confirmed = false", "confirmed = true"))


def test_the_page_about_using_a_model_runs_in_order_and_both_ways_agree(folder: Path) -> None:
    """Commands and Python of the page, block after block; without pdpsgd the answers are those of pdpsgd."""
    _write_people(folder)
    text = (ROOT / "docs/using-a-model.md").read_text(encoding="utf-8")
    names: dict[str, Any] = {}
    for language, body in re.findall(r"^```(\w*)\n(.*?)^```", text, re.M | re.S):
        if language == "text":
            (folder / "rows.csv").write_text(body)
        for line in body.splitlines() if language == "sh" else ():
            result = CliRunner().invoke(app, shlex.split(line)[1:])
            assert result.exit_code == 0, (line, result.output, result.exception)
            if "data schema" in line:  # the reader confirms the draft
                schema = folder / "schema.toml"
                schema.write_text(schema.read_text().replace("confirmed = false", "confirmed = true"))
        if language == "python":
            exec(compile(body, "docs/using-a-model.md", "exec"), names)
    scored = (folder / "scored.csv").read_text().splitlines()
    assert scored[0] == "age,job,hours,predicted_income,probability_high,probability_low"
    assert [line.split(",")[3] for line in scored[1:]] == names["answers"]
    probabilities = torch.softmax(names["logits"], dim=1)
    with pytest.warns(UserWarning, match="'baker' in 'job'"):
        own = names["model"].predict_proba("rows.csv")
    torch.testing.assert_close(torch.from_numpy(own), probabilities)


@pytest.mark.parametrize("page", PAGES)
def test_links_between_pages_lead_somewhere(page: str) -> None:
    text = re.sub(r"^```.*?^```", "", (ROOT / page).read_text(encoding="utf-8"), flags=re.M | re.S)
    for target in re.findall(r"\]\((?!https?:|#|mailto:)([^)#\s]+)", text):
        assert (ROOT / page).parent.joinpath(target).exists(), f"{page} links to {target}"


def test_the_page_about_opacus_shows_the_files_that_are_tested() -> None:
    page = (ROOT / "docs/opacus.md").read_text(encoding="utf-8")
    for name in ("opacus_before.py", "opacus_after.py"):
        code = (ROOT / "examples" / name).read_text(encoding="utf-8").split('"""\n\n', 1)[1]
        assert code in page, f"docs/opacus.md does not show examples/{name} as it is"


@pytest.mark.parametrize("name", ["opacus_before.py", "opacus_after.py"])
def test_the_loop_runs_before_and_after(name: str, folder: Path) -> None:
    if name == "opacus_before.py":
        pytest.importorskip("opacus", reason="opacus is not installed")
    result = subprocess.run(
        [sys.executable, "-W", "ignore", str(ROOT / "examples" / name)],
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
    )
    assert result.returncode == 0, result.stderr
    accuracy = re.search(r"accuracy ([\d.]+)%", result.stdout)
    assert accuracy is not None
    # Far from a test of quality: chance is 10 %, and both loops are far above it in every run.
    assert float(accuracy[1]) > 50


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_lightning_page_runs(folder: Path) -> None:
    pytest.importorskip("lightning", reason="the package lightning is not installed")
    script = folder / "page.py"
    script.write_text("\n".join(blocks("docs/lightning.md", "python")))
    result = subprocess.run(
        [sys.executable, "-W", "ignore", str(script)], capture_output=True, text=True, check=False, cwd=folder
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.split()[-1] == "30"


def test_the_notebook_runs_from_top_to_bottom(folder: Path) -> None:
    pytest.importorskip("nbclient", reason="nbclient is not installed")
    script = (
        "import sys, nbformat\n"
        "from nbclient import NotebookClient\n"
        "notebook = nbformat.read(sys.argv[1], as_version=4)\n"
        "NotebookClient(notebook, timeout=300, kernel_name='python3').execute()\n"
        "print(notebook.cells[-2].outputs[0]['text'])\n"
    )
    command = [sys.executable, "-W", "ignore", "-c", script, str(ROOT / "examples" / "first_steps.ipynb")]
    result = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
    assert result.returncode == 0, result.stderr[-3000:]
    assert "pdp-sgd-exact" in result.stdout


def test_the_site_builds_without_a_warning(folder: Path) -> None:
    if shutil.which("mkdocs", path=str(Path(sys.executable).parent)) is None:
        pytest.skip("mkdocs is not installed")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-q", "-d", str(folder / "site")]
    environment = {"NO_MKDOCS_2_WARNING": "1"}
    result = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=ROOT, env={**os.environ, **environment}
    )
    assert result.returncode == 0, result.stdout + result.stderr
    home = (folder / "site" / "index.html").read_text(encoding="utf-8")
    outside = re.findall(r'<(?:script|link)[^>]+(?:src|href)="(https?://[^"]+)"', home)
    assert outside == []


def _write_people(folder: Path) -> None:
    """The table that the pages speak of: 400 people."""
    rows = ["person,age,job,hours,epsilon,income"]
    listed = ["person,epsilon", "shy,1"]
    for number in range(400):
        age, hours, epsilon = 18 + number * 7 % 60, 20 + number * 11 % 30, (1, 2, 4)[number % 3]
        income = "high" if age + hours > 80 else "low"
        job = ("nurse", "teacher")[number % 2]
        rows.append(f"p{number},{age},{job},{hours},{epsilon},{income}")
        listed.append(f"p{number},{epsilon}")
    (folder / "people.csv").write_text("\n".join(rows) + "\n")
    (folder / "list.csv").write_text("\n".join(listed) + "\n")
