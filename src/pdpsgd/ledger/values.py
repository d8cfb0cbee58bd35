"""What a ledger tells: runs, people, tiers, and what a check found."""

from __future__ import annotations

from dataclasses import dataclass

from pdpsgd.budgets.budgets import Budgets

STATES = ("reserved", "running", "finished", "killed", "cancelled")
STARTED = ("running", "finished", "killed")
CHARGED = ("reserved", *STARTED)


@dataclass(frozen=True)
class Run:
    """A reservation and what became of it; charged in full in every state but `cancelled`."""

    number: int
    name: str
    state: str
    attempt: int
    people: int
    time: str
    token: str
    people_digest: str


@dataclass(frozen=True)
class Consent:
    """A promise made to one person, from `time` until the next one.

    `spent_epsilon` is what all that started before the next consent costs, as epsilon at `delta`. `kept` says
    whether the promise holds for that; not so if more was spent before it was lowered.
    """

    time: str
    epsilon: float
    delta: float
    spent_epsilon: float
    kept: bool


@dataclass(frozen=True)
class PersonCharge:
    """What one run took from one person."""

    run: int
    name: str
    state: str
    time: str
    kind: str
    mu: float
    d: float
    pure_epsilon: float


@dataclass(frozen=True)
class Person:
    """All that the ledger knows of one person, with what is spent and left as epsilon at their delta."""

    id: str
    kappa: float
    set_aside: float
    epsilon: float
    delta: float
    spent_epsilon: float
    spent_d: float
    left_epsilon: float
    consents: tuple[Consent, ...]
    charges: tuple[PersonCharge, ...]


@dataclass(frozen=True)
class Tier:
    """People with the same promise: what it is, and the mean and largest of what they have spent, as epsilon."""

    epsilon: float
    delta: float
    people: int
    mean_spent_epsilon: float
    largest_spent_epsilon: float
    mean_share_left: float
    out: int


@dataclass(frozen=True)
class TierShare:
    """What one run takes of people with the same promise: means over them, as epsilon at their delta.

    Epsilons do not add up; the shares of mu^2 do.
    """

    epsilon: float
    delta: float
    people: int
    spent_before: float
    this_run: float
    left: float
    share_before: float
    share_this_run: float
    unused: int


@dataclass(frozen=True)
class Statement:
    """What one run takes of what its people allow over all runs, by tier; from consents and charges alone.

    `above_consent` counts people from whom more was taken before than they allow now; `withdrawn` those who allow
    nothing now, and were used before: this run uses neither. `changed` counts people whom it uses, and who by now
    allow less than it and the runs before take.
    """

    run: int
    name: str
    tiers: tuple[TierShare, ...]
    above_consent: int
    withdrawn: int = 0
    changed: int = 0


@dataclass(frozen=True)
class Begun:
    """A run that has just begun: its attempt, what it takes, what its people allow, and the ledger's head then."""

    attempt: int
    statement: Statement
    promises: Budgets
    head: str


@dataclass(frozen=True)
class Check:
    """What `check` found: no problem, or what was changed where."""

    head: str
    entries: int
    people: int
    runs: int
    certificates: int
    problems: tuple[str, ...]
    cannot_tell: str = (
        "Not found by any check: a file replaced along with all notes of its head, and a second ledger for the same "
        "people. Note the head outside of the ledger, and compare."
    )

    @property
    def passed(self) -> bool:
        """Whether nothing was found."""
        return not self.problems
