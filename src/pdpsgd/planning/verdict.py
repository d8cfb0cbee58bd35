"""The headline of a result: holds for all, holds with exceptions, or not for release; every reason in one place.

Everything that would make a headline false is an argument of `verdict` or is read off the plan. The terminal,
the report page and `result.json` show what this function says, and nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from pdpsgd.accounting.history import split
from pdpsgd.accounting.registry import accountant
from pdpsgd.planning.plans import Plan

HOLDS = "holds for all"
EXCEPT = "holds, except"
NOT_FOR_RELEASE = "not for release"

GUESSABLE = "reproducible, guessable: not for release"


@dataclass(frozen=True)
class Reason:
    """Why a headline is not the best one.

    `code` is for programs and stays the same; `sentence` is for people. `people` counts those for whom the
    promise does not hold; None where the reason concerns everybody.
    """

    code: str
    sentence: str
    people: int | None = None


@dataclass(frozen=True)
class Verdict:
    """What may be said of a result, and why not more.

    `outcome` is one of `HOLDS`, `EXCEPT` and `NOT_FOR_RELEASE`. `assumed` are sentences on what was taken for granted
    of this run in particular, because it could not be tried; `beside` names what lies beside the result and is covered
    by no promise. They change no outcome.
    """

    outcome: str
    people: int
    reasons: tuple[Reason, ...] = ()
    assumed: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()

    @property
    def is_for_release(self) -> bool:
        """Whether nothing speaks against publishing the result."""
        return self.outcome != NOT_FOR_RELEASE

    @property
    def headline(self) -> str:
        """The outcome as one sentence."""
        if self.outcome == NOT_FOR_RELEASE:
            return "Not for release."
        if self.outcome == EXCEPT:
            excepted = sum(reason.people or 0 for reason in self.reasons)
            return f"The promise holds for {self.people - excepted:,} of {self.people:,} people."
        return f"The promise holds for all {self.people:,} people."

    @property
    def sentences(self) -> tuple[str, ...]:
        """The headline, then why, one sentence per reason, then what is assumed, and what is not covered."""
        return (self.headline, *(reason.sentence for reason in self.reasons), *self.assumed, *self.beside)

    @property
    def note(self) -> str | None:
        """Why the result is not for release, in one line; None if it is for release."""
        if self.is_for_release:
            return None
        why = [reason.sentence.rstrip(".") for reason in self.reasons if reason.people is None]
        return f"{'; '.join(why)}: not for release"

    @property
    def against_release(self) -> str | None:
        """Why the result is not for release, as sentences; None if it is for release."""
        return None if self.is_for_release else " ".join(self.sentences)

    def with_reason(self, code: str, sentence: str) -> Verdict:
        """Return the verdict with one more reason against a release, which came up later."""
        return replace(self, outcome=NOT_FOR_RELEASE, reasons=(Reason(code, sentence), *self.reasons))

    def with_assumption(self, sentence: str) -> Verdict:
        """Return the verdict with one more thing that is taken for granted."""
        return self if sentence in self.assumed else replace(self, assumed=(*self.assumed, sentence))

    def to_dict(self) -> dict[str, Any]:
        """Return the verdict for JSON files."""
        return {
            "outcome": self.outcome,
            "people": self.people,
            "reasons": [
                {"code": r.code, "sentence": r.sentence, **({} if r.people is None else {"people": r.people})}
                for r in self.reasons
            ],
            **({"assumed": list(self.assumed)} if self.assumed else {}),
            **({"beside": list(self.beside)} if self.beside else {}),
            "text": " ".join(self.sentences),
        }


def verdict(
    plan: Plan,
    *,
    verified: bool | None = None,
    seeded: bool = False,
    weak_generator: str | None = None,
    test_double: bool = False,
    schema_from_data: bool = False,
    start_not_for_release: str | None = None,
    ledger_off: bool = False,
    rehearsal: bool = False,
    in_ledger: str | None = None,
    other_fits: str | None = None,
    unseen_code: Sequence[str] = (),
    without_promise: int = 0,
    above_consent: int = 0,
    withdrawn: int = 0,
    changed: int = 0,
    assumed: Sequence[str] = (),
    beside: Sequence[str] = (),
) -> Verdict:
    """Say whether the promise holds for all, holds with exceptions, or the result is not for release.

    Guarantee: `HOLDS` is returned only if the plan was proven or verified for every level, and nothing was
    reported that would void the proof.

    Args:
        plan: the plan that was executed.
        verified: whether the plan was verified; None: whether this process computed or verified it.
        seeded: samples and noise come from a seed, or a key, that somebody knows.
        weak_generator: name of the generator of samples and noise, if it is not cryptographic.
        test_double: noise was left out, recorded or injected, as tests do.
        schema_from_data: ranges, categories or classes were learned from the private data.
        start_not_for_release: why the model that the first weights come from is not for release, if it is not.
        ledger_off: no ledger was kept where there should be one, so that the run is not counted later.
        rehearsal: rows were made up; no record was read.
        in_ledger: id of the ledger that the run was entered in; a plan that comes from another one counts as off.
        other_fits: what speaks against the run because of others on the same people that nothing counts.
        unseen_code: what the guards could not see through, one short description each.
        without_promise: people outside the plan whose records are used all the same, such as test people.
        above_consent: people of the ledger from whom more was taken before than they allow now.
        withdrawn: people of the ledger who allow nothing any more, and whom earlier runs have used.
        changed: people of the ledger whom this run uses, and who since its start have come to allow less than all runs
            take.
        assumed: what was taken for granted of this run in particular, in sentences.
        beside: what was written beside the result and is covered by no promise, in sentences.

    Returns:
        The verdict with all its reasons, those against a release first.
    """
    circumstances = {
        "seeded": seeded
        and "Samples and noise come from a seed or a key that was given: who knows it can subtract the noise.",
        "weak-generator": weak_generator is not None
        and f"Samples and noise come from {weak_generator}, which is not cryptographic: its output can be predicted.",
        "rehearsal": rehearsal
        and "This was a rehearsal on made-up rows: no record was read, and nobody was promised anything.",
        "test-double": test_double and "Noise was left out, recorded or injected, as in a test.",
        "schema-from-data": schema_from_data
        and "Ranges, categories or classes were learned from the private data, which nothing accounts for.",
        "start": start_not_for_release is not None
        and f"The first weights come from a model that is not for release. Of that one: {start_not_for_release}",
        "ledger-off": (ledger_off or (plan.ledger is not None and plan.ledger.id != in_ledger))
        and "The run was not entered in these people's ledger, so it is not counted later.",
        "other-fits": other_fits or False,
        "unseen-code": bool(unseen_code)
        and f"The guards could not see through some code: {'; '.join(unseen_code)}.",
    }
    against = [
        *_against_plan(plan, verified),
        *(Reason(code, sentence) for code, sentence in circumstances.items() if sentence),
    ]
    exceptions = _exceptions(plan, without_promise, above_consent, withdrawn, changed)
    outcome = NOT_FOR_RELEASE if against else EXCEPT if exceptions else HOLDS
    people = plan.people + without_promise
    return Verdict(outcome, people, (*against, *exceptions), tuple(assumed), tuple(beside))


def _against_plan(plan: Plan, verified: bool | None) -> list[Reason]:
    """Why nothing that follows the plan is for release."""
    found = []
    if plan.not_for_release is not None:
        found.append(Reason("marked-plan", plan.not_for_release))
    elif lacks_proof(plan) and not accountant(plan.accountant).proves:
        approximate = f"Nothing is proven: the plan's accountant, {plan.accountant}, only approximates."
        found.append(Reason("unproven-accountant", approximate))
    if verified is False or (verified is None and needs_to_be_verified(plan)):
        found.append(Reason("unverified-plan", "The plan was not verified."))
    if any(split(level.history)[1] for level in plan.levels) and not plan.history_fixed:
        found.append(
            Reason(
                "adaptive-history",
                "The plan counts earlier runs as if all had been fixed before any result was seen, and nothing says "
                "so: what is proven for all runs together may then not hold. Plan with the accountant certificate.",
            )
        )
    return found


def _exceptions(
    plan: Plan, without_promise: int, above_consent: int, withdrawn: int, changed: int
) -> list[Reason]:
    """For whom the promise does not hold, and why."""
    over = [
        x for x in plan.levels if x.people and x.proven_epsilon is not None and x.proven_epsilon > x.epsilon
    ]
    unlimited = sum(
        x.people
        for index, x in enumerate(plan.levels)
        if math.isinf(x.epsilon) and not all(r.exposure(index).costs_nothing for r in plan.rounds)
    )
    found = []
    if over:
        people = sum(level.people for level in over)
        most = max((x.proven_epsilon or 0.0) / x.epsilon if x.epsilon else math.inf for x in over)
        share = f"up to {100 * most:,.1f} % of it" if math.isfinite(most) else "though they now allow nothing"
        found.append(
            Reason(
                "above-budget",
                f"Earlier runs have spent more than {_people(people)} now {_allow(people)} ({share}).",
                people,
            )
        )
    if above_consent:
        who = f"{_people(above_consent)} now {_allow(above_consent)}"
        sentence = f"Earlier runs have spent more than {who}; this run does not use them."
        found.append(Reason("above-budget", sentence, above_consent))
    if withdrawn:
        have = "has" if withdrawn == 1 else "have"
        sentence = (
            f"{_people(withdrawn)} {have} withdrawn since earlier runs: what those have spent stays spent; "
            "this run does not use them."
        )
        found.append(Reason("withdrawn", sentence, withdrawn))
    if changed:
        sentence = (
            f"{_people(changed)} now {_allow(changed)} less than this run and those before have spent: that was "
            "changed after this run had begun, and a run that has begun ends as it is."
        )
        found.append(Reason("changed", sentence, changed))
    if unlimited:
        found.append(
            Reason("no-protection-asked", f"{_people(unlimited)} asked for no protection.", unlimited)
        )
    if without_promise:
        found.append(
            Reason(
                "without-promise",
                f"The records of {_people(without_promise)} are used to test on, without a promise.",
                without_promise,
            )
        )
    return found


def _allow(people: int) -> str:
    return "allows" if people == 1 else "allow"


def _people(number: int) -> str:
    return f"{number:,} {'person' if number == 1 else 'people'}"


def release_note(plan: Plan, *, guessable: bool) -> str | None:
    """Say why results are not for release, as far as plan and seed tell; None if nothing speaks against it."""
    return verdict(plan, seeded=guessable).note


def needs_to_be_verified(plan: Plan) -> bool:
    """Whether a plan claims a proof, or should, and this process has neither computed nor verified it."""
    claims = accountant(plan.accountant).proves or any(x.proven_epsilon is not None for x in plan.levels)
    return claims and plan.not_for_release is None and not plan.is_proven_here


def lacks_proof(plan: Plan) -> bool:
    """Whether a plan promises something to people whom it samples, and does not say what it proves."""
    return plan.not_for_release is None and any(
        level.proven_epsilon is None
        and math.isfinite(level.epsilon)
        and not all(r.exposure(index).costs_nothing for r in plan.rounds)
        for index, level in enumerate(plan.levels)
    )
