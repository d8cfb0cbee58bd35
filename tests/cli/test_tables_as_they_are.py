"""Tables as people have them: words for budgets, other separators and letters, test people without ids or budgets."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pdpsgd import Budgets
from pdpsgd.errors import PdpsgdError

SMALL = ("--steps", "4", "--batch-size", "30", "--no-report", "--no-ledger")
TABLE = ("--label", "ill", "--id-column", "person")


def said(result: Any) -> str:
    return " ".join(result.output.split())


def write(
    path: str, *, separator: str = ",", encoding: str = "utf-8", budget: Callable[[int], object] = lambda i: 2
) -> None:
    """Write 60 people; a fraction is written with a comma where cells are separated by semicolons."""
    lines = [separator.join(("person", "age", "weight", "city", "since", "remarks", "epsilon", "ill"))]
    for i in range(60):
        weight = f"{50 + i / 2:.1f}".replace(".", "," if separator == ";" else ".")
        cells = (f"p{i}", 20 + i, weight, ("Köln", "Bern")[i % 2], f"20{10 + i % 9}-03-0{1 + i % 9}")
        lines.append(separator.join(map(str, (*cells, f"said {i}", budget(i), "yes" if i > 30 else "no"))))
    Path(path).write_text("\n".join(lines) + "\n", encoding=encoding)


def levels(name: str) -> dict[float, int]:
    return {each["epsilon"]: each["people"] for each in json.loads(Path(name).read_text())["levels"]}


def test_words_stand_for_budgets_by_a_public_mapping(run: Callable[..., Any]) -> None:
    write("words.csv", budget=lambda i: ("low", "high ", "never")[i % 3])
    words = ("--epsilon-map", "low=0.5,high=8,never=0")
    result = run("train", "words.csv", *TABLE, *SMALL, *words, "--json", "f.json", "--run-folder", "run")
    assert result.exit_code == 0, result.output
    assert levels("f.json") == {0: 20, 0.5: 20, 8: 20}
    assert "low=0.5,high=8,never=0" in " ".join(
        json.loads(Path("run/public/settings.json").read_text())["notes"]
    )
    Path("run.toml").write_text("[epsilon_map]\nlow = 0.5\nhigh = 8\nnever = 0\n")
    assert (
        run("plan", "words.csv", "--config", "run.toml", "--steps", "4", "--batch-size", "9").exit_code == 0
    )


def test_words_without_a_mapping_are_refused_with_the_option_to_write(run: Callable[..., Any]) -> None:
    write("words.csv", budget=lambda i: ("low", "high")[i % 2])
    result = run("train", "words.csv", *TABLE, *SMALL)
    assert result.exit_code == 2
    assert "--epsilon-map high=EPSILON,low=EPSILON" in said(result)
    result = run("plan", "words.csv", "--epsilon-map", "low=0.5")
    assert "one of the words 'low' in column 'epsilon'" in said(result)
    assert "30 of 60 rows: row 3: 'high'" in said(result)


@pytest.mark.parametrize("text", ["low", "low=much", "low=1,low=2", "low=-1"])
def test_a_mapping_that_is_none_is_refused(run: Callable[..., Any], text: str) -> None:
    write("words.csv", budget=lambda i: "low")
    result = run("plan", "words.csv", "--epsilon-map", text)
    assert result.exit_code == 2
    assert "Expected" in said(result)


def test_all_missing_and_bad_budgets_are_named_at_once(run: Callable[..., Any]) -> None:
    write("people.csv", budget=lambda i: {3: "", 7: "x", 8: -1}.get(i, 2))
    result = run("plan", "people.csv")
    assert "0: this person's record is never used" in said(result)
    assert "3 of 60 rows: row 5: missing, row 9: 'x', row 10: '-1'" in said(result)
    write("people.csv", budget=lambda i: {3: ""}.get(i, 2))
    assert "row 5. It is missing. 0 means that this person's record is never used" in said(
        run("plan", "people.csv")
    )


@pytest.mark.parametrize("separator", [",", ";", "\t"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "latin-1"])
def test_separators_decimal_commas_and_latin_letters_are_read(
    run: Callable[..., Any], separator: str, encoding: str
) -> None:
    write("people.csv", separator=separator, encoding=encoding, budget=lambda i: "2")
    result = run("train", "people.csv", *TABLE, *SMALL, "--run-folder", "run")
    assert result.exit_code == 0, result.output
    draft = Path("run/private/schema-draft.toml").read_text(encoding="utf-8")
    assert 'categories = ["Bern", "Köln"]' in draft
    assert "low = 50" in draft  # weights are numbers
    assert 'kind = "date"' in draft
    assert ("no UTF-8" in said(result)) == (encoding == "latin-1")
    public = "".join(file.read_text() for file in Path("run/public").rglob("*.json"))
    assert "UTF-8" not in public  # whose line it is shows somebody's record
    assert "Latin-1" not in public
    assert "left out, unless a schema says otherwise: 'remarks'" in said(result)
    scored = run("predict", "run", "people.csv", "-o", "scored.csv")
    assert scored.exit_code == 0, scored.output
    assert "Köln" in Path("scored.csv").read_text(encoding="utf-8")


def test_test_people_need_neither_ids_nor_budgets(run: Callable[..., Any]) -> None:
    write("people.csv")
    header, *rows = Path("people.csv").read_text().splitlines()
    bare = [",".join((*each.split(",")[1:-2], each.split(",")[-1])) for each in (header, *rows[:20])]
    Path("test.csv").write_text("\n".join(bare) + "\n")
    Path("people.csv").write_text("\n".join((header, *rows[20:])) + "\n")
    result = run("train", "people.csv", *TABLE, *SMALL, "--test-file", "test.csv", "--json", "f.json")
    assert result.exit_code == 0, result.output
    assert json.loads(Path("f.json").read_text())["evaluation"]["people"] == 20
    assert "has no ids: that none of them is trained on was checked by rows alone" in said(result)


def test_a_plan_and_a_test_share_go_together(run: Callable[..., Any]) -> None:
    write("people.csv", budget=lambda i: (1, 4)[i % 2])
    plan = ("plan", "people.csv", "--id-column", "person", "--steps", "4", "--batch-size", "9")
    assert run(*plan, "--test-share", "0.3", "--json", "plan.json").exit_code == 0
    train = ("train", "people.csv", *TABLE, *SMALL[-2:], "--test-share", "0.3", "--yes")
    result = run(*train, "--plan", "plan.json")
    assert result.exit_code == 0, result.output
    assert run(*plan, "--json", "all.json").exit_code == 0
    result = run(*train, "--plan", "all.json")
    assert result.exit_code == 2
    assert "plan with the same --test-share" in said(result)


def test_in_python_words_and_numbers_as_text_are_read_and_others_are_not() -> None:
    import pandas
    import polars

    frame = pandas.DataFrame({"epsilon": pandas.array(["low", "high"], dtype="string")})
    read = Budgets.from_table(frame, epsilon_map={"low": 0.5, "high": 8})
    assert read.epsilon.tolist() == [0.5, 8]
    text = polars.DataFrame({"epsilon": ["0.5", " 2"]})
    assert Budgets.from_table(text).epsilon.tolist() == [0.5, 2]
    nullable = pandas.DataFrame({"epsilon": pandas.array([1, 2], dtype="Int64")})
    assert Budgets.from_table(nullable).epsilon.tolist() == [1, 2]
    with pytest.raises(PdpsgdError, match="epsilon_map as"):
        Budgets.from_table(frame, epsilon_map={})
