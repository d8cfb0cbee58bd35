"""Files are checked for size, encoding, nesting, types and ranges before anything in them is used."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pdpsgd.budgets.files import (
    DEEPEST,
    Each,
    OneOf,
    Optional,
    Range,
    check_shape,
    parse_json,
    parse_toml,
    read_text,
)
from pdpsgd.errors import PdpsgdError


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "file.json"


def test_text_is_read_with_or_without_a_mark_at_its_start(path: Path) -> None:
    path.write_text("größer\n", encoding="utf-8")
    assert read_text(path, "a file") == "größer\n"
    path.write_text("größer\n", encoding="utf-8-sig")
    assert read_text(path, "a file") == "größer\n"


def test_what_is_no_text_is_named(path: Path) -> None:
    path.write_bytes(b'{"a":\n "\xe4"}')
    with pytest.raises(PdpsgdError, match=r"file.json', as UTF-8 text. Got .*the byte 0xe4 in line 2"):
        read_text(path, "a plan (JSON)")
    path.write_bytes(b"\x1f\x8b\x08\x00")
    with pytest.raises(PdpsgdError, match="Got a gzip file"):
        read_text(path, "a plan (JSON)")


def test_a_file_as_large_as_allowed_is_read_and_a_larger_one_is_not(path: Path) -> None:
    path.write_bytes(b"x" * 1000)
    assert len(read_text(path, "a file", most=1000)) == 1000
    with pytest.raises(PdpsgdError, match="of at most 999 bytes"):
        read_text(path, "a file", most=999)


def test_files_that_are_not_there_folders_and_devices_are_refused(tmp_path: Path) -> None:
    for place, said in (
        (tmp_path / "none", "No such file"),
        (tmp_path, "Is a directory"),
        ("a\0b", "no name"),
    ):
        with pytest.raises(PdpsgdError, match=said):
            read_text(place, "a file")
    with pytest.raises(PdpsgdError, match="larger"):
        read_text("/dev/zero", "a file", most=1000)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "an empty file"),
        ("[1, 2", "something else: Expecting"),
        ('{"a": NaN}', "Got NaN"),
        ('{"a": 1, "a": 2}', "Got 'a' twice"),
        ("[" * 100_000 + "]" * 100_000, "nested deeper"),
        ("[" * (DEEPEST + 1) + "]" * (DEEPEST + 1), "nested deeper"),
        ("1" * 5000, "numbers that can be read"),
        (r'["\ud800"]', "text in Unicode"),
        (r'{"\ud800": 1}', "text in Unicode"),
    ],
)
def test_json_that_cannot_be_used_is_refused_with_its_file(text: str, said: str) -> None:
    with pytest.raises(PdpsgdError, match=rf"Expected JSON in it.*{said}"):
        parse_json(text, "it")


def test_ordinary_json_is_read(path: Path) -> None:
    document = {"a": [1, 2.5, None, True, "größer"], "b": {"c": []}}
    assert parse_json(json.dumps(document), "it") == document
    assert parse_json("[" * DEEPEST + "]" * DEEPEST, "it")
    assert parse_json("3", "it") == 3


@pytest.mark.parametrize(
    "text", ["a = [1, 2", "a = " + "[" * 100_000, "a = " + "1" * 5000, "a = 1\na = 2", "a = 1979-99-99"]
)
def test_toml_that_cannot_be_used_is_refused_with_its_file(text: str) -> None:
    with pytest.raises(PdpsgdError, match="Expected TOML in it"):
        parse_toml(text, "it")


def test_ordinary_toml_is_read() -> None:
    assert parse_toml('a = [1, 2.5]\n[b]\nc = "größer"\n', "it") == {"a": [1, 2.5], "b": {"c": "größer"}}


SHAPE = {
    "name": str,
    "steps": int,
    "share": Range(0, 1),
    "epsilon": Optional(Range(0, infinite=True)),
    "outcome": OneOf(("yes", "no")),
    "done": bool,
    "parts": [{"name": str}],
    "tiers": Optional(Each(Range(0))),
}
GOOD: dict[str, Any] = {
    "name": "x",
    "steps": 3,
    "share": 1,
    "epsilon": "inf",
    "outcome": "no",
    "done": False,
    "parts": [{"name": "y", "more": 1}],
    "tiers": {"a": 0.5},
    "unknown": {},
}


def test_a_shape_accepts_what_it_says_and_more_beside_it() -> None:
    check_shape("it", GOOD, SHAPE)
    check_shape("it", GOOD | {"epsilon": None, "tiers": None, "parts": []}, SHAPE)
    check_shape("it", {key: value for key, value in GOOD.items() if key not in ("epsilon", "tiers")}, SHAPE)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"name": 3}, "it: name to be a text. Got 3"),
        ({"steps": -1}, "it: steps to be a whole number of at least 0. Got -1"),
        ({"steps": 2.5}, "it: steps"),
        ({"steps": True}, "it: steps"),
        ({"steps": 2**64}, "it: steps to be a whole number of at most"),
        ({"share": 1.5}, "it: share to be a number from 0 to 1. Got 1.5"),
        ({"share": "inf"}, "it: share"),
        ({"share": 10**400}, "it: share to be a number that fits in double precision"),
        ({"epsilon": "much"}, "it: epsilon to be a number. Got 'much'"),
        ({"outcome": "perhaps"}, "it: outcome to be one of 'yes', 'no'"),
        ({"done": 1}, "it: done to be true or false"),
        ({"parts": {}}, "it: parts to be a list"),
        ({"parts": [{}]}, r"Expected 'name' in it: parts\[0\]"),
        ({"parts": [None]}, r"it: parts\[0\] to be an object"),
        ({"tiers": {"a": []}}, r"it: tiers.a to be a number. Got \[\]"),
    ],
)
def test_a_shape_refuses_with_the_place_what_was_expected_and_what_was_found(
    change: dict[str, Any], said: str
) -> None:
    with pytest.raises(PdpsgdError, match=said):
        check_shape("it", GOOD | change, SHAPE)
    with pytest.raises(PdpsgdError, match=r"Expected it to be an object. Got None"):
        check_shape("it", None, SHAPE)
