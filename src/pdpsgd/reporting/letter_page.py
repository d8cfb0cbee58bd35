"""The letter of one person: what was done with their record, and what it can reveal at most, in plain words.

A letter says what its person allows, what was done with their record, and what that can reveal at most, as odds. It is
made of the person's own line in `people/promises.csv`, their own account in the ledger, and what the run says of
itself; figures that other people's budgets move (rates, noise, what exactly is proven, how many people there are) stay
out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date
from functools import cache
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

from pdpsgd.planning.verdict import EXCEPT, HOLDS
from pdpsgd.training.finished_run import Run, read_run
from pdpsgd.training.options import ACCOUNTABLE

if TYPE_CHECKING:
    from pdpsgd.ledger.values import Person, PersonCharge
    from pdpsgd.training.promises import Promise

SECURITY_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
CERTAIN = 99
"""Out of 100: whoever is right more often than that is right nearly always."""


@dataclass(frozen=True)
class Letterhead:
    """What all letters of a run have in common."""

    run: Run
    used: tuple[bool, ...]
    """Of each level: whether training could use its people's records."""
    written: str
    purpose: str | None = None
    operator: str | None = None
    contact: str | None = None

    @classmethod
    def of(
        cls, folder: str | Path, said: Mapping[str, str | None] | None = None, *, written: date | None = None
    ) -> Letterhead:
        """Read what letters need of a finished run; what is said of purpose, operator and contact comes first."""
        run = read_run(folder)
        rounds = run.plan.rounds
        used = tuple(
            not all(r.exposure(index).costs_nothing for r in rounds) for index in range(len(run.plan.levels))
        )
        known = {name: (said or {}).get(name) or run.settings.get(name) for name in ACCOUNTABLE}
        return cls(run, used, (written or date.today()).isoformat(), **known)


def times_right(epsilon: float, delta: float) -> int:
    """Bound how often, of 100 times, anybody can tell whether a record was used; 50 is guessing. Rounded up.

    Guarantee: under (epsilon, delta)-DP no test is right more often, if both cases are as likely beforehand: its share
    is at most (e^epsilon + delta) / (1 + e^epsilon).

    >>> [times_right(epsilon, 1e-5) for epsilon in (0.0, 0.5, 1.0, 2.0, 8.0)]
    [51, 63, 74, 89, 100]
    >>> times_right(0.0, 0.0)
    50
    """
    other = math.exp(-epsilon)
    return min(100, math.ceil(100 * (1 + delta * other) / (1 + other)))


def letter(head: Letterhead, promise: Promise, person: Person | None) -> str:
    """Write the letter of one person.

    Args:
        head: What all letters of the run have in common.
        promise: The person's own line.
        person: Their account in the ledger, if there is one.

    Returns:
        A page of HTML, without scripts, that prints on one side of A4 unless there were many runs.
    """
    parts = [
        _top(head, promise),
        *_warning(head),
        _section("What you allow", _allowed(promise, person)),
        _section("What was done with your record", _done(head, promise)),
        _section("What it can reveal about you, at most", _reveals(head, promise, person)),
        _section("Over all models", _over_all(promise, person)),
        _section("If you change your mind", _change(head, promise)),
        _section("Whom to ask", _ask(head)),
        _small_print(head, promise),
    ]
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{SECURITY_POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(_title(head))}</title>
<style>{_style()}</style>
</head>
<body>
<main>
{"".join(parts)}</main>
</body>
</html>
"""


@cache
def _style() -> str:
    return files(__package__).joinpath("letter.css").read_text(encoding="utf-8")


def _section(title: str, inside: str) -> str:
    return f"<h2>{escape(title)}</h2>\n{inside}\n"


def _p(text: str, kind: str = "") -> str:
    attribute = f' class="{kind}"' if kind else ""
    return f"<p{attribute}>{escape(text)}</p>"


def _title(head: Letterhead) -> str:
    return f"Your record and the model {head.run.name}"


def _top(head: Letterhead, promise: Promise) -> str:
    return (
        f'<div class="top"><p>{escape(head.operator or "")}</p><p>{escape(head.written)}</p></div>\n'
        f"<h1>What was done with your record</h1>\n{_p(f'For {promise.id}', 'for')}\n"
    )


def _warning(head: Letterhead) -> list[str]:
    """Say that nothing is promised, if the run's own verdict says so."""
    found = head.run.verdict or {}
    if found.get("outcome") in (HOLDS, EXCEPT) and head.run.plan.not_for_release is None:
        return []
    return [
        _p(
            "The result of this training is marked as not for release: it must not be given to anybody, and what this "
            "letter says of limits holds only as long as that is kept. The report of the run says why.",
            "warning",
        )
        + "\n"
    ]


def _odds(epsilon: float, delta: float, verb: str) -> str:
    right = times_right(epsilon, delta)
    return (
        "may be nearly always right" if right > CERTAIN else f"{verb} right at most {right} times out of 100"
    )


def _chance(delta: float) -> str:
    """Write a small probability as 1 in so many, rounded towards more."""
    return f"1 in {math.floor(1 / delta + 1e-6):,}"


def _asked(promise: Promise, person: Person | None) -> tuple[float, float]:
    """Return what the person allows now: by the ledger if there is one, else by the run's list."""
    return (promise.epsilon, promise.delta) if person is None else (person.epsilon, person.delta)


def _limit(head: Letterhead, promise: Promise, person: Person | None) -> tuple[float, float]:
    """Return what holds for the person: what they allow, unless more was spent before they lowered it."""
    if person is None:
        proven = head.run.plan.levels[promise.level].proven_epsilon
        return max(promise.epsilon, proven or 0.0), promise.delta
    kept = [consent for consent in person.consents if consent.kept]
    if not kept:
        return person.spent_epsilon, person.delta
    return kept[-1].epsilon, kept[-1].delta


def _allowed(promise: Promise, person: Person | None) -> str:
    epsilon, delta = _asked(promise, person)
    scope = "this model" if person is None else "all models together that are trained with your record"
    if epsilon == 0 or delta == 0:
        return _p("You allow nothing: your record is never to be used.")
    if math.isinf(epsilon):
        return _p("You asked for no limit on what others may learn about you from models.")
    guess = times_right(epsilon, delta)
    said = (
        f"You allow that somebody who tries to tell from {scope} whether your record was used is right at most {guess} "
        "times out of 100. By guessing alone they would be right 50 times out of 100."
        if guess <= CERTAIN
        else f"You allow that somebody can tell from {scope}, nearly with certainty, whether your record was used: the "
        "number that stands for you on the list protects little. You can ask for a smaller one."
    )
    return _p(said)


def _done(head: Letterhead, promise: Promise) -> str:
    settings = head.run.settings
    when = f"On {settings['date']}, " if settings.get("date") else ""
    who = head.operator or "whoever sends you this letter"
    data = f" from {settings['data']}" if settings.get("data") else ""
    what = f"{when}{who} trained a model, named {head.run.name}{data and ','}{data}"
    purpose = f"{what}. It is for: {head.purpose.rstrip('.')}." if head.purpose else f"{what}."
    first = purpose[:1].upper() + purpose[1:]
    if not head.used[promise.level]:
        why = (
            "because you allow nothing"
            if promise.epsilon == 0 or promise.delta == 0
            else "because you allow less than this training needed of everybody it used"
        )
        return _p(f"{first} Your record was not used for it, {why}.")
    many = settings.get("records_per_person") is not None
    record = "your records" if many else "your record"
    return _p(first) + _p(
        f"Training takes many small steps. At each of them chance decided anew whether {record} took part; the less "
        f"you "
        f"allow, the less often. What {record} could change{' together' if many else ''} was cut to a fixed size, and "
        "random noise was added to it before anything was kept. Whether that ever happened with yours is known to "
        "nobody "
        "and written nowhere."
    )


def _reveals(head: Letterhead, promise: Promise, person: Person | None) -> str:
    if not head.used[promise.level]:
        return _p("Nothing: your record was not used.")
    epsilon, delta = _limit(head, promise, person)
    if math.isinf(epsilon):
        return _p("There is no limit, as you asked for none.")
    many = head.run.settings.get("records_per_person") is not None
    right = times_right(epsilon, delta)
    model, it = ("the model", "it") if person is None else ("all models together that you allow", "them")
    return (
        _p(
            "Imagine somebody who knows everything about everybody else, and wants to find out whether "
            f"{'any of your records were' if many else 'your record was'} used. By guessing they are right 50 times "
            f"out of 100. With {model}, and with all that is published about {it}, they "
            f"{_odds(epsilon, delta, 'are')}, whatever they do and however long they try."
        )
        + _scale(right)
        + _p(
            f"With a chance of at most {_chance(delta)} this limit fails. It is about what your record adds: what a "
            f"model "
            "learns from everybody else about people like you, it learns with or without you."
        )
    )


def _scale(right: int) -> str:
    label = f"{right} of 100, between 50 (a guess) and 100 (certain)"
    filled = f'<div class="bar"><span style="width:{2 * (right - 50)}%"></span></div>'
    ends = "".join(f"<span>{each}</span>" for each in ("50: a guess", f"at most {right}", "100: certain"))
    return f'<div class="scale" role="img" aria-label="{label}">{filled}<div class="ends">{ends}</div></div>'


def _over_all(promise: Promise, person: Person | None) -> str:
    if person is None:
        return _p(
            "This letter is about one model. Another one that is trained with your record reveals more; no account "
            "over "
            "several models is kept of this list."
        )
    rows = "".join(
        f"<tr><td>{escape(charge.time[:10])}</td><td>{escape(charge.name or f'run {charge.run}')}{_state(charge)}</td>"
        f"<td>{_right(_epsilon_of(charge, person), person.delta)}</td></tr>"
        for charge in person.charges
    )
    if not person.charges:
        return _p(
            "An account is kept of all models that are trained with your record. Up to now there is none."
        )
    head = "".join(f"<th>{name}</th>" for name in ("date", "model", "right at most, of 100"))
    together = _odds(person.spent_epsilon, person.delta, "is")
    return (
        _p("An account is kept of all models that your record may have been used for:")
        + f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
        + _p(f"From all of them together, anybody {together}. {_left(person)}")
        + _not_kept(person)
    )


def _state(charge: PersonCharge) -> str:
    return {"reserved": " (planned)", "running": " (not finished)", "killed": " (broken off)"}.get(
        charge.state, ""
    )


def _epsilon_of(charge: PersonCharge, person: Person) -> float:
    from pdpsgd.accounting.gaussian import gaussian_epsilon

    if charge.mu == 0:
        return charge.pure_epsilon
    return float(gaussian_epsilon(charge.mu, (1 - person.kappa) * person.delta)) + charge.pure_epsilon


def _right(epsilon: float, delta: float) -> str:
    right = times_right(epsilon, delta)
    return "nearly always" if right > CERTAIN else f"{right} times of 100"


def _left(person: Person) -> str:
    if math.isinf(person.epsilon):
        return "You set no limit."
    if person.epsilon == 0 or person.delta == 0:
        return "You allow nothing now: your record is not used again."
    allowed = f"You allow that they are right {_right(person.epsilon, person.delta)}."
    if person.left_epsilon <= 0:
        return f"{allowed} Nothing is left: your record is not used again unless you allow more."
    return f"{allowed} Something is left, so that your record may be used again within that limit."


def _not_kept(person: Person) -> str:
    if all(consent.kept for consent in person.consents):
        return ""
    return _p(
        "You once allowed less than had been used before. What was published until then cannot be called back: for it "
        "holds what you had allowed at that time."
    )


def _change(head: Letterhead, promise: Promise) -> str:
    where = f"write to {head.contact}" if head.contact else "tell whoever sent you this letter"
    return _p(
        f"You can allow less, more, or nothing at all, at any time and without giving a reason: {where}, and name "
        f"{promise.id}. It holds from the next training on. What is published already cannot be called back; the limit "
        "above goes on holding for it, whatever else becomes known."
    )


def _ask(head: Letterhead) -> str:
    who = ", ".join(each for each in (head.operator, head.contact) if each)
    return _p(
        f"{who or 'Whoever sent you this letter'}. They can also show you the report of this training, with which "
        f"anybody "
        "can check the limit without seeing anybody's data."
    )


def _small_print(head: Letterhead, promise: Promise) -> str:
    over = "" if head.run.plan.ledger is None else ", over all runs"
    return _p(
        f"For experts: run {head.run.name}; asked for on its list{over}: epsilon {promise.epsilon:g}, delta "
        f"{promise.delta:g}, "
        "under adding or removing all that is yours; figures are (e^epsilon + delta) / (1 + e^epsilon), rounded up. "
        "The "
        "proof is in plan.json of the report (pdpsgd plan plan.json --verify).",
        "small",
    )
