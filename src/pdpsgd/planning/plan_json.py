"""The published file format of a plan: fields in, JSON text out, and back; strict in what it accepts."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from pdpsgd.accounting.history import EarlierRun, Exposure
from pdpsgd.accounting.registry import ACCOUNTANTS
from pdpsgd.budgets.files import mapping, number, parse_json, whole
from pdpsgd.budgets.files import text as text_of
from pdpsgd.errors import check_one_of, fail, shown
from pdpsgd.planning.levels import Roster
from pdpsgd.planning.rounds import Level, Round

VERSION = 1


def write(
    *,
    mechanism: str,
    bookkeeping: str,
    accountant: str,
    neighbours: str,
    max_grad_norm: float,
    levels: Sequence[Level],
    rounds: Sequence[Round],
    notes: Sequence[str] = (),
    not_for_release: str | None = None,
    history_fixed: bool = False,
    counted: Sequence[str] = (),
    ledger: tuple[str, int | None] | None = None,
    roster: Roster | None = None,
    people_digest: str | None = None,
    indent: int | None = 1,
) -> str:
    """Write the fields of a plan as JSON text.

    Infinity is written "inf"; fields that are None or empty by default are left out.

    Args:
        mechanism: name of the mechanism.
        bookkeeping: "sound", or what else the plan follows.
        accountant: name of the accountant.
        neighbours: the neighboring relation.
        max_grad_norm: the clipping norm C.
        levels: the levels.
        rounds: the rounds.
        notes: remarks for people.
        not_for_release: why nothing that follows the plan may be released; the file itself then says so too.
        history_fixed: the plan was fixed before any result of the plans in its history was seen.
        counted: identities of the earlier plans that the levels' histories count.
        ledger: the ledger that the budgets come from, and the number of the run there.
        roster: who is on which level, where (epsilon, delta) alone do not say it.
        people_digest: a public fingerprint of who is on which level.
        indent: spaces per nesting level of the text, or None for one line.

    Returns:
        The JSON text.
    """
    document: dict[str, Any] = {
        "version": VERSION,
        **({} if not_for_release is None else {"not_for_release": not_for_release}),
        "mechanism": mechanism,
        "bookkeeping": bookkeeping,
        "accountant": accountant,
        "neighbours": neighbours,
        "max_grad_norm": max_grad_norm,
        "levels": [_level(level) for level in levels],
        "rounds": [_round(r) for r in rounds],
        **({"notes": list(notes)} if notes else {}),
        **({"history_fixed": True} if history_fixed else {}),
        **({"counted": list(counted)} if counted else {}),
        **({} if ledger is None else {"ledger": _ledger(*ledger)}),
    }
    if roster is not None:
        document["people"] = {"ids": roster.ids.tolist(), "levels": roster.level.tolist()}
        if not roster.named:
            document["people"]["named"] = False
    if people_digest is not None:
        document["people_digest"] = people_digest
    return json.dumps(document, indent=indent, allow_nan=False)


def read(text: str) -> dict[str, Any]:
    """Read the fields of a plan from JSON text.

    Returns:
        The fields of `Plan`, by name.

    Raises:
        PdpsgdError: something is missing, of the wrong type, or inconsistent; the message says where.
    """
    document = mapping("a plan", parse_json(text, "JSON", "a plan"))
    if document.get("version") is True or document.get("version") != VERSION:
        fail(f"Expected a plan of version {VERSION}. Got version {shown(document.get('version'))}.")
    check_one_of(ACCOUNTANTS, accountant=_text("accountant", document))
    levels = tuple(_read_level(f"levels[{i}]", level) for i, level in enumerate(_list("levels", document)))
    rounds = tuple(_read_round(f"rounds[{i}]", r) for i, r in enumerate(_list("rounds", document)))
    return {
        "mechanism": _text("mechanism", document),
        "levels": levels,
        "rounds": rounds,
        "accountant": _text("accountant", document),
        "bookkeeping": _text("bookkeeping", document),
        "neighbours": _text("neighbours", document),
        "max_grad_norm": number("max_grad_norm", document.get("max_grad_norm")),
        "notes": tuple(
            text_of(f"notes[{i}]", note) for i, note in enumerate(_list("notes", document, default=()))
        ),
        "not_for_release": _read_mark(document),
        "history_fixed": document.get("history_fixed") is True,
        "counted": tuple(
            text_of(f"counted[{i}]", one) for i, one in enumerate(_list("counted", document, default=()))
        ),
        "ledger": _read_ledger(document),
        "roster": _read_roster(document, len(levels)),
        "stated_people": _read_people_digest(document),
    }


def _read_mark(document: dict[str, Any]) -> str | None:
    """Why the plan is not for release; files of version 0.1.0 say it as `sensitive`."""
    for name in ("not_for_release", "sensitive"):
        if document.get(name) is not None:
            return _text(name, document)
    if _text("bookkeeping", document) != "sound":
        return f"Its bookkeeping is {document['bookkeeping']!r}, which does not keep the promise."
    return None


def _ledger(name: str, run: int | None) -> dict[str, Any]:
    return {"id": name} if run is None else {"id": name, "run": run}


def _read_ledger(document: dict[str, Any]) -> tuple[str, int | None] | None:
    """The ledger that the budgets come from, and the number of the run there once it is reserved."""
    mark = document.get("ledger")
    if mark is None:
        return None
    found = mapping("ledger", mark)
    run = found.get("run")
    return text_of("ledger.id", found.get("id")), None if run is None else whole("ledger.run", run)


def _level(level: Level) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "epsilon": _finite_or_text(level.epsilon),
        "delta": level.delta,
        "people": level.people,
        "proven_epsilon": None if level.proven_epsilon is None else _finite_or_text(level.proven_epsilon),
    }
    if level.history:
        fields["history"] = [_past(entry) for entry in level.history]
    return fields


def _past(entry: Exposure | EarlierRun) -> list[float] | dict[str, Any]:
    if isinstance(entry, EarlierRun):
        return {
            "mu": _finite_or_text(entry.mu),
            "d": entry.d,
            "exposures": [list(exposure) for exposure in entry.exposures],
        }
    return list(entry)


def _round(r: Round) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "steps": r.steps,
        "noise_multiplier": r.noise_multiplier,
        "expected_batch_size": r.expected_batch_size,
        "threshold": r.threshold,
        "participation": list(r.participation),
        "sample_rates": list(r.sample_rates),
        "clip_scales": list(r.clip_scales),
    }
    if r.fresh_model:
        fields["fresh_model"] = True
    if r.spending_limits is not None:
        fields["spending_limits"] = list(r.spending_limits)
    return fields


def _read_level(place: str, level: Any) -> Level:
    mapping(place, level)
    proven = level.get("proven_epsilon")
    history = tuple(
        _read_past(f"{place}.history[{i}]", entry)
        for i, entry in enumerate(_list("history", level, place) if "history" in level else ())
    )
    return Level(
        epsilon=number(f"{place}.epsilon", level.get("epsilon")),
        delta=number(f"{place}.delta", level.get("delta")),
        people=whole(f"{place}.people", level.get("people")),
        proven_epsilon=None if proven is None else number(f"{place}.proven_epsilon", proven),
        history=history,
    )


def _read_past(place: str, entry: Any) -> Exposure | EarlierRun:
    """An exposure, or a run that is counted by its certificate."""
    if not isinstance(entry, dict):
        return _read_exposure(place, entry)
    mu, d = (number(f"{place}.{name}", entry.get(name)) for name in ("mu", "d"))
    if not (mu >= 0 and 0 <= d < 1):
        fail(f"Expected mu of at least 0 and d in [0, 1) in {place}. Got {shown(entry)}.")
    exposures = enumerate(_list("exposures", entry, place))
    return EarlierRun(mu, d, tuple(_read_exposure(f"{place}.exposures[{i}]", one) for i, one in exposures))


def _read_exposure(place: str, entry: Any) -> Exposure:
    if not isinstance(entry, list) or len(entry) != 4:
        fail(
            f"Expected {place} to be [participation, sample rate, noise multiplier, steps]. Got {shown(entry)}."
        )
    pi, q, sigma = (number(place, value) for value in entry[:3])
    if not (0 <= pi <= 1 and 0 <= q <= 1 and 0 < sigma < math.inf):
        fail(f"Expected participation and rate in [0, 1] and noise > 0 in {place}. Got {shown(entry)}.")
    return Exposure(pi, q, sigma, whole(place, entry[3]))


def _read_round(place: str, r: Any) -> Round:
    mapping(place, r)
    rates = {
        name: tuple(number(f"{place}.{name}[{i}]", value) for i, value in enumerate(_list(name, r, place)))
        for name in ("participation", "sample_rates", "clip_scales")
    }
    threshold, limits = r.get("threshold"), None
    if r.get("spending_limits") is not None:
        name = "spending_limits"
        limits = tuple(number(f"{place}.{name}[{i}]", value) for i, value in enumerate(_list(name, r, place)))
    return Round(
        steps=whole(f"{place}.steps", r.get("steps")),
        noise_multiplier=number(f"{place}.noise_multiplier", r.get("noise_multiplier")),
        expected_batch_size=number(f"{place}.expected_batch_size", r.get("expected_batch_size")),
        threshold=None if threshold is None else number(f"{place}.threshold", threshold),
        fresh_model=bool(r.get("fresh_model", False)),
        spending_limits=limits,
        **rates,
    )


def _read_roster(document: dict[str, Any], levels: int) -> Roster | None:
    people = document.get("people")
    if people is None:
        return None
    mapping("people", people)
    names, level = _list("ids", people, "people"), _list("levels", people, "people")
    if set(map(type, names)) not in ({str}, {int}, {float}, set()):
        fail(f"Expected people.ids to be all whole numbers or all text. Got {shown(names)}.")
    ids = np.array(names)
    places = np.array([whole(f"people.levels[{i}]", value) for i, value in enumerate(level)], dtype=np.int64)
    if ids.shape != places.shape or (places.size and places.max() >= levels):
        fail(
            f"Expected people.levels to give one of the {levels} levels for each of the {ids.size} people.ids."
        )
    return Roster(ids, places, named=people.get("named") is not False)


def _read_people_digest(document: dict[str, Any]) -> str | None:
    """Absent in files of earlier versions."""
    stated = document.get("people_digest")
    if stated is None:
        return None
    if not isinstance(stated, str) or not stated.startswith(("ids:", "places:")):
        fail(f"Expected people_digest to begin with 'ids:' or 'places:'. Got {shown(stated)}.")
    return stated


def _finite_or_text(value: float) -> float | str:
    return value if math.isfinite(value) else "inf"


def _list(name: str, document: dict[str, Any], place: str = "the plan", *, default: Any = None) -> list[Any]:
    value = list(default) if default is not None and name not in document else document.get(name)
    if not isinstance(value, list):
        fail(f"Expected a list {name!r} in {place}. Got {shown(value)}.")
    return value


def _text(name: str, document: dict[str, Any]) -> str:
    value = document.get(name)
    if not isinstance(value, str):
        fail(f"Expected a text {name!r} in the plan. Got {shown(value)}.")
    return value
