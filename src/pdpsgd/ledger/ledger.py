"""`Ledger`: what everybody allows and what every run has spent."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
from sqlalchemy import Connection, select

from pdpsgd._typing import IdArray, IntArray
from pdpsgd.accounting.certificates import KAPPA
from pdpsgd.budgets.budgets import Budgets
from pdpsgd.errors import check_not_negative, check_probability, fail
from pdpsgd.ledger import charges, consents, reservations, schema, series, views
from pdpsgd.ledger.amounts import UNLIMITED
from pdpsgd.ledger.checking import check
from pdpsgd.ledger.damage import find_damage
from pdpsgd.ledger.database import TIMEOUT, Database, insert
from pdpsgd.ledger.log import GENESIS, append
from pdpsgd.ledger.offers import DEFAULT_SPEND, Offer, Share, shares, with_cost_of_adaptivity
from pdpsgd.ledger.reserved_run import ReservedRun
from pdpsgd.ledger.spending import levels_of_run, spent
from pdpsgd.ledger.undoing import OwnEntries, give_back, undo
from pdpsgd.ledger.values import CHARGED, Begun, Check, Person, Run, Statement, Tier
from pdpsgd.planning.levels import Roster
from pdpsgd.planning.planner import plan as make_plan
from pdpsgd.planning.plans import LedgerMark, Plan


class Ledger:
    """Consents, reservations and spending of the same people over many runs.

    Guarantee: if every run on these people's records is reserved here before it touches them, and executes the plan
    that was reserved, each person's current promise (epsilon, delta) holds for the outputs of all runs together, under
    adding or removing all of that person's records in all runs; also if each run was chosen after looking at what
    earlier runs released. Exceptions are told by `person`: whoever lowers a promise below what was spent before.
    (docs/theory.md, "Runs that are chosen after results".)

    >>> import tempfile
    >>> folder = tempfile.TemporaryDirectory()
    >>> ledger = Ledger.create(f"{folder.name}/people.ledger")
    >>> ledger.enroll(Budgets([0.5, 1.0, 2.0] * 100, ids=[f"p{i}" for i in range(300)]))
    300
    >>> run = ledger.reserve(ledger.plan(spend="1 of 4", steps=20, batch_size=30), name="January")
    >>> run.state, ledger.person("p1").epsilon, round(ledger.person("p1").spent_epsilon, 1)
    ('reserved', 1.0, 0.5)
    >>> attempt = ledger.start(run.number)
    >>> ledger.finish(run.number, attempt)
    >>> ledger.check().passed
    True
    >>> folder.cleanup()
    """

    def __init__(self, place: str | os.PathLike[str], *, timeout: float = TIMEOUT) -> None:
        """Open a ledger: the path of a file, or a URL postgresql://..."""
        self._database = Database(place, timeout=timeout, find_damage=find_damage)
        self._database.check_version()
        self._own = OwnEntries()

    @classmethod
    def create(cls, place: str | os.PathLike[str], *, timeout: float = TIMEOUT) -> Ledger:
        """Create an empty ledger in a new file, or in a database that has none."""
        database = Database(place, timeout=timeout, find_damage=find_damage)

        def fill(connection: Connection) -> None:
            insert(connection, schema.ledger, [(uuid.uuid4().hex, schema.SCHEMA_VERSION, "", 0, GENESIS)])
            append(connection, "create", {"schema_version": schema.SCHEMA_VERSION})

        database.create(fill)
        return cls(place, timeout=timeout)

    @property
    def place(self) -> str:
        """Where the ledger is, without a password."""
        return self._database.name

    @cached_property
    def id(self) -> str:
        """The ledger's id: a plan that is made from it carries it."""
        with self._database.reading() as connection:
            return str(connection.execute(select(schema.ledger.c.id)).scalar_one())

    def __len__(self) -> int:
        with self._database.reading() as connection:
            return consents.people_count(connection)

    @property
    def head(self) -> str:
        """The hash of the last entry, to be noted elsewhere: an older copy of the ledger lacks it."""
        with self._database.reading() as connection:
            return str(connection.execute(select(schema.ledger.c.head)).scalar_one())

    def enroll(self, budgets: Budgets, *, kappa: float = KAPPA, set_aside: float = 0.0) -> int:
        """Add people with what they allow over all runs; return how many there are now.

        Args:
            budgets: people with ids, none of whom is in the ledger.
            kappa: the share of delta for the d of certificates; fixed for these people from now on.
            set_aside: the part of epsilon for runs of other systems that are only known to be (e, d)-DP; fixed.

        Returns:
            The number of people in the ledger.
        """
        check_probability(kappa=kappa)
        check_not_negative(set_aside=set_aside)
        return self._enroll(budgets, kappa=kappa, set_aside=set_aside)

    def admit(self, budgets: Budgets) -> int:
        """Enroll whom the ledger does not know yet, and return how many; whoever it knows must allow the same here.

        A list never changes what somebody allowed: an old copy of it would raise what was lowered since. Record
        changes with `consent`.
        """
        with self._database.reading() as connection:
            strangers = consents.strangers(connection, budgets)
        if strangers is None:
            return 0
        self._enroll(strangers, kappa=KAPPA, set_aside=0.0)
        return len(strangers)

    def _enroll(self, budgets: Budgets, *, kappa: float, set_aside: float) -> int:
        """Add people, and remember by which entry this was done."""
        with self._database.writing() as connection:
            people = consents.enroll(connection, budgets, kappa=kappa, set_aside=set_aside)
            head = str(connection.execute(select(schema.ledger.c.head)).scalar_one())
        self._own.enrolled.add(head)
        return people

    def knows_some(self, people: npt.ArrayLike) -> bool:
        """Whether any of these ids is in the ledger."""
        with self._database.reading() as connection:
            return consents.knows_some(connection, np.asarray(people))

    def consent(self, changes: Budgets) -> int:
        """Change what people allow, for every run that starts from now on; epsilon 0 withdraws.

        Guarantee: each promise holds by itself. Raised: what came before keeps the old promise, everything keeps the
        new one. Lowered: what is spent stays spent; if it fits, the new promise holds for everything, else the person
        is out from now on.
        """
        with self._database.writing() as connection:
            return consents.change(connection, changes)

    def offer(self, spend: str | float = DEFAULT_SPEND, *, people: npt.ArrayLike | None = None) -> Offer:
        """Compute budgets for the next run from what everybody has left.

        Args:
            spend: "0.25", a share of what is left; "1 of 12", a part of the whole; or "all".
            people: the ids on the run's list; everybody by default. Never from the records at hand.

        Returns:
            Budgets for one run, to be planned with the accountant `certificate`.
        """
        share = Share.parse(spend)
        with self._database.reading() as connection:
            allowed = consents.current_allowed(connection, with_e=False)
            if not len(allowed):
                fail("Expected people in the ledger. There is nobody: enroll them first.")
            unlimited = allowed.b == UNLIMITED
            epsilon, delta = shares(
                share,
                allowed=allowed,
                spent=spent(connection, len(allowed), CHARGED),
                epsilon=np.where(unlimited, np.inf, 0.0),
                delta=consents.current_deltas(connection) if unlimited.any() else np.zeros(len(allowed)),
            )
            del allowed, unlimited  # of a million people each array counts
            listed = None
            if people is not None:
                listed = consents.numbers_of(connection, consents.texts_of(connection, np.asarray(people)))
            ids = consents.named_ids(connection, consents.all_ids(connection))
        if listed is not None:
            epsilon, delta, ids = epsilon[listed], delta[listed], ids[listed]
        return Offer(Budgets.of_enrolled(epsilon, delta, ids), share)

    def plan(
        self, spend: str | float = DEFAULT_SPEND, *, people: npt.ArrayLike | None = None, **settings: Any
    ) -> Plan:
        """Compute a plan for the next run, within a share of what everybody has left; nothing is charged yet.

        Args:
            spend: as for `offer`.
            people: as for `offer`.
            settings: as for `pdpsgd.plan`, without the accountant.
        """
        budgets = self.offer(spend, people=people).budgets
        return self.mark(make_plan(budgets, accountant="certificate", **settings))

    def mark(self, plan: Plan) -> Plan:
        """Note in a plan that was made from an offer which ledger it belongs to, and what certificates cost."""
        return replace(with_cost_of_adaptivity(plan), ledger=LedgerMark(self.id))

    def reserve(self, plan: Plan, *, name: str = "", token: str | None = None) -> Run:
        """Charge everybody on the plan's list for the whole run, or nobody if somebody does not allow it.

        Args:
            plan: with its people. What it costs is computed here from its rounds.
            name: for people to read.
            token: names the request, so that it can be repeated after a lost connection; the same is one reservation.

        Returns:
            The run, in the state `reserved`.

        Guarantee: mu and d are fixed before the run's first output, and never change; the check and the charge are one
        transaction, so that processes that reserve at once never overspend anybody.
        """
        _check_plan(plan)
        return self._reserve(plan, charges.charges_of_plan(plan), name, _checked_token(token), "reserved")

    def plan_series(
        self,
        runs: int,
        spend: str | float = DEFAULT_SPEND,
        *,
        people: npt.ArrayLike | None = None,
        steps: int = 1000,
        **settings: Any,
    ) -> list[Plan]:
        """Compute equal plans for several runs that are fixed together, within one share of what is left.

        Args:
            runs: how many runs.
            spend: what all of them take together, as for `offer`.
            people: as for `offer`.
            steps: the number of steps of each run.
            settings: as for `pdpsgd.plan`, without the accountant.

        Returns:
            The plans, for `reserve_series`.
        """
        budgets = self.offer(spend, people=people).budgets
        made = make_plan(budgets, accountant="certificate", steps=runs * steps, **settings)
        return series.split(self.mark(made), runs)

    def reserve_series(self, plans: Sequence[Plan], *, name: str = "", token: str | None = None) -> list[Run]:
        """Charge everybody once for runs whose plans are fixed together; each is used once or not, in any order.

        Args:
            plans: each with its people; fixed before the first of them has any result.
            name: for people to read.
            token: as for `reserve`.

        Returns:
            The runs, in the order of the plans. The series itself, which pays for them, is the run before the first.

        Guarantee: as for `reserve`, with one certificate for all runs together: inside the series nothing is chosen
        by results, so that exposures compose exactly.
        """
        for plan in plans:
            _check_plan(plan)
        if len(plans) < 2:
            fail(f"Expected several plans for a series. Got {len(plans)}: reserve a single run with reserve.")
        shares_of_d = {charges.default_share_of_d(plan) for plan in plans}
        with self._charging(plans) as (connection, listed):
            numbers = series.reserve_series(
                connection,
                token=_checked_token(token),
                name=name,
                plans=plans,
                numbers=listed,
                texts=[_text_of(plan) for plan in plans],
                share_of_d=min(shares_of_d),
            )
            return [reservations.read_runs(connection, number)[0] for number in numbers[1:]]

    @contextmanager
    def running(self, plan: Plan, *, name: str = "", token: str | None = None) -> Iterator[ReservedRun]:
        """Reserve and start a run, and finish it at the end of a `with` block; after an error it is killed.

        Args:
            plan: as for `reserve`.
            name: as for `reserve`.
            token: as for `reserve`.

        Yields:
            The run, in the state `running`: from here on records may be read. Its `plan` is to be executed, with
            `make_private(reservation=run)` or `fit(reservation=run)`, which see that it is this one.
        """
        run = self.hold(self.reserve(plan, name=name, token=token).number)
        try:
            run.begin()
            yield run
        except BaseException:
            run.give_up()
            raise
        run.finish()

    def hold(self, run: int, *, watches: bool = True) -> ReservedRun:
        """Take a reserved run, or one that was begun and not finished, in order to train it.

        Args:
            run: its number.
            watches: whether this process moves its state; False on all ranks but the first.

        Returns:
            The run with its plan and people, for `fit` or `make_private`.
        """
        return ReservedRun(self, self.run(run), self.plan_of(run, with_people=True), watches=watches)

    def enter_history(self, plan: Plan, *, name: str = "", token: str | None = None) -> Run:
        """Enter a plan that was run before the ledger began, as finished; enter them in the order of time.

        d is not chosen: it is the default share of what entered runs have left of it.

        Args:
            plan: with its people.
            name: for people to read.
            token: needed for a plan that was run more than once, one for each further time.

        Returns:
            The run, in the state `finished`.
        """
        _check_plan(plan)
        entered = {run.token: run.number for run in self.runs() if run.token.startswith("history:")}
        name_of_run = f"history:{plan.digest[:40]}:{token or ''}"
        if name_of_run in entered:
            fail(
                f"This plan was entered already, as run {entered[name_of_run]}. If it was run more than once, enter "
                'each further time with a token of its own, as in token="second time".'
            )
        share = charges.DEFAULT_SHARE * (1 - charges.DEFAULT_SHARE) ** len(entered)
        cost = charges.charges_of_plan(plan, share_of_d=share)
        return self._reserve(plan, cost, name, name_of_run, "finished")

    def _reserve(self, plan: Plan, cost: list[charges.Charge], name: str, token: str, state: str) -> Run:
        assert plan.roster is not None
        with self._charging([plan]) as (connection, (numbers,)):
            number = reservations.reserve(
                connection,
                token=token,
                name=name,
                numbers=numbers,
                levels=plan.roster.level,
                charges=cost,
                plan=_text_of(plan),
                people_digest=plan.people_digest or "",
                state=state,
                must_fit=state == "reserved",
            )
            return reservations.read_runs(connection, number)[0]

    @contextmanager
    def _charging(self, plans: Sequence[Plan]) -> Iterator[tuple[Connection, list[IntArray]]]:
        """Give a connection that holds the lock, and the numbers of each plan's people.

        They are looked up before the lock, which then is held for less time. People are only ever added, but for those
        of a refused command, who are taken back: if the ledger was put back meanwhile, they are looked up again.
        """
        with self._database.reading() as connection:
            head = connection.execute(select(schema.ledger.c.head)).scalar_one()
            listed = _numbers_of(connection, plans)
        with self._database.writing() as connection:
            is_there = select(schema.log.c.entry).where(schema.log.c.hash == head)
            if connection.execute(is_there).first() is None:
                listed = _numbers_of(connection, plans)
            yield connection, listed

    def reserve_declared(
        self,
        epsilon: float,
        delta: float,
        *,
        people: npt.ArrayLike | None = None,
        name: str = "",
        token: str | None = None,
    ) -> Run:
        """Charge people for a run of another system of which only (epsilon, delta)-DP is known.

        Whoever has enough epsilon set aside pays from that, everybody else from b.

        Args:
            epsilon: what the other system states.
            delta: what the other system states.
            people: the ids of the people it touches; everybody by default.
            name: for people to read.
            token: as for `reserve`.

        Returns:
            The run, in the state `reserved`.
        """
        pair = [charges.declared(epsilon, delta, from_set_aside=aside) for aside in (True, False)]

        def levels(connection: Connection, numbers: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
            now = consents.current(connection)
            left = now.allowed.left_after(spent(connection, len(now), CHARGED)).e[numbers]
            return np.where(left >= pair[0].e, 0, 1)

        return self._reserve_stated(pair, levels, people, name, token)

    def reserve_renyi(
        self,
        orders: Sequence[float],
        rho: Sequence[float],
        *,
        d: float,
        people: npt.ArrayLike | None = None,
        name: str = "",
        token: str | None = None,
    ) -> Run:
        """Charge people for a run of which only Renyi divergences are known, for both directions.

        Args:
            orders: the orders alpha > 1.
            rho: the divergence at each of them.
            d: what the certificate need not cover.
            people: the ids of the people it touches; everybody by default.
            name: for people to read.
            token: as for `reserve`.

        Returns:
            The run, in the state `reserved`.
        """
        cost = [charges.renyi(orders, rho, d=d)]
        return self._reserve_stated(
            cost, lambda _, numbers: np.zeros(numbers.size, dtype=np.int64), people, name, token
        )

    def _reserve_stated(
        self,
        cost: list[charges.Charge],
        levels: Any,
        people: npt.ArrayLike | None,
        name: str,
        token: str | None,
    ) -> Run:
        with self._database.writing() as connection:
            if people is None:
                numbers = np.arange(consents.people_count(connection))
            else:
                numbers = consents.numbers_of(connection, consents.texts_of(connection, np.asarray(people)))
            number = reservations.reserve(
                connection,
                token=_checked_token(token),
                name=name,
                numbers=numbers,
                levels=levels(connection, numbers),
                charges=cost,
                plan="",
                people_digest="",
            )
            return reservations.read_runs(connection, number)[0]

    def start(self, run: int) -> int:
        """Begin a reserved run, before any data is read; return the attempt.

        Checked again against what everybody allows now: a consent that was changed since holds.
        """
        with self._database.writing() as connection:
            return reservations.start(connection, run)

    def resume(self, run: int) -> int:
        """Take over a run whose process has ended, under its own reservation; return the new attempt."""
        with self._database.writing() as connection:
            return reservations.resume(connection, run)

    def begin(self, run: int) -> Begun:
        """Start a run, or take it over if it was started before; and tell what it takes, all of it or nothing.

        Args:
            run: a run that is reserved, running or killed.

        Returns:
            The attempt, and what is to be said of the run: as of the moment at which it began.

        Raises:
            PdpsgdError: If somebody no longer allows it, or the ledger cannot be read; then nothing has begun.
        """
        with self._database.writing() as connection:
            state, _ = reservations.attempt_of(connection, run)
            move = reservations.start if state == "reserved" else reservations.resume
            attempt = move(connection, run)
            head = str(connection.execute(select(schema.ledger.c.head)).scalar_one())
            return Begun(attempt, views.read_statement(connection, run), _consents_of(connection, run), head)

    def tie(self, run: int, attempt: int, *, key_name: str) -> None:
        """Tie a run to the random key of its noise, before its first release; any other key is refused from then on.

        Args:
            run: a run that is running.
            attempt: the attempt of this process.
            key_name: the name of the key (a digest), which reveals nothing else about it.

        Raises:
            PdpsgdError: If noise of another key was released under this reservation, or another process runs it.
        """
        with self._database.writing() as connection:
            reservations.tie(connection, run, attempt, key_name)

    def finish(self, run: int, attempt: int) -> None:
        """End a run; it stays charged in full, however many of its steps were taken."""
        with self._database.writing() as connection:
            reservations.finish(connection, run, attempt, state="finished")

    def kill(self, run: int, attempt: int) -> None:
        """Give a run up; it stays charged in full, and may be resumed."""
        with self._database.writing() as connection:
            reservations.finish(connection, run, attempt, state="killed")

    def cancel(self, run: int) -> None:
        """Give back what a run has reserved; only before it has started."""
        with self._database.writing() as connection:
            reservations.cancel(connection, run)

    def undo(self, since: str, run: int | None = None) -> bool:
        """Take back whom a refused command enrolled, and the run that it reserved and cancelled before it started.

        Only what was enrolled through this object, in this thread, is taken back, and only if nobody has written
        anything after it.

        Args:
            since: the head before the command.
            run: the run, if one was reserved.

        Returns:
            Whether it is gone; else nothing is changed.
        """
        with self._database.writing() as connection:
            return undo(connection, since, run, own=self._own.enrolled)

    def remove_if_unused(self) -> bool:
        """Remove the file of a ledger to which nobody has written since it was made; say whether it is gone."""
        with self._database.writing() as connection:
            unused = give_back(connection)
        if unused:
            self._database.remove()
        return unused

    def check_attempt(self, run: int, attempt: int) -> None:
        """Refuse to go on if another process has taken the run over."""
        with self._database.reading() as connection:
            state, now = reservations.attempt_of(connection, run)
        if (state, now) != ("running", attempt):
            fail(
                f"Run {run} is {state}, attempt {now}; this process is attempt {attempt}. Another process has taken it "
                "over: stop here, it goes on there."
            )

    def runs(self) -> list[Run]:
        """List all runs."""
        with self._database.reading() as connection:
            return reservations.read_runs(connection)

    def run(self, number: int) -> Run:
        """Return one run."""
        reservations.check_number(number)
        with self._database.reading() as connection:
            return reservations.read_runs(connection, number)[0]

    def find(self, token: str) -> Run | None:
        """Return the run that was reserved under a token, or None."""
        with self._database.reading() as connection:
            query = select(schema.runs.c.number).where(schema.runs.c.token == token)
            number = connection.execute(query).scalar()
            return None if number is None else reservations.read_runs(connection, number)[0]

    def plan_of(self, run: int, *, with_people: bool = False) -> Plan:
        """Return the plan that was reserved, without its people unless they are asked for; not verified again."""
        reservations.check_number(run)
        with self._database.reading() as connection:
            query = select(schema.runs.c.plan).where(schema.runs.c.number == run)
            text = connection.execute(query).scalar()
            if not text:
                fail(f"Expected a run of the ledger that has a plan. Run {run} has none.")
            plan = replace(Plan.from_json(text, verify=False), ledger=LedgerMark(self.id, run))
            if not with_people:
                return plan
            ids, levels = _list_of(connection, run)
        return replace(plan, roster=Roster(ids, levels), stated_people=None)

    def everybody(self) -> Budgets:
        """Return what everybody in the ledger allows now, over all runs."""
        with self._database.reading() as connection:
            ids, now = (
                consents.named_ids(connection, consents.all_ids(connection)),
                consents.current(connection),
            )
        if not len(now):
            fail("Expected people in the ledger. There is nobody: enroll them first.")
        return Budgets.of_enrolled(now.epsilon, now.delta, ids)

    def consents_of(self, run: int) -> Budgets:
        """Return what the people on a run's list allow now, over all runs."""
        with self._database.reading() as connection:
            return _consents_of(connection, run)

    def statement(self, run: int) -> Statement:
        """Tell what a run takes of what its people allow: spent before, by this run, and left, by tier."""
        with self._database.reading() as connection:
            return views.read_statement(connection, run)

    def person(self, name: object) -> Person:
        """Tell what one person allows, was charged, and has left."""
        with self._database.reading() as connection:
            return views.read_person(connection, str(name))

    @contextmanager
    def accounts(self) -> Iterator[Callable[[object], Person]]:
        """Give a function that does what `person` does, and is ten times as fast: for letters to everybody.

        It tells what the ledger has now, whatever is written meanwhile.
        """
        known: dict[int, Person] = {}
        with self._database.reading() as connection:
            kinds = views.read_kinds(connection)

            def person(name: object) -> Person:
                number = views.read_number(connection, str(name))
                if number is None:
                    return views.read_person(connection, str(name))  # which says that nobody is there
                kind = int(kinds[number])
                if kind not in known:
                    known[kind] = views.read_person(connection, str(name))
                return replace(known[kind], id=str(name))

            yield person

    def tiers(self) -> list[Tier]:
        """Sum up what people allow, have spent and have left, by what they allow."""
        with self._database.reading() as connection:
            return views.read_tiers(connection)

    def timeline(self) -> list[dict[str, Any]]:
        """Tell what was left on average after each run, as a share of what people allow now."""
        with self._database.reading() as connection:
            return views.read_timeline(connection)

    def check(
        self,
        *,
        head: str | None = None,
        certificates: bool = True,
        progress: Callable[[str, int, int], None] | None = None,
    ) -> Check:
        """Compute chain, digests, states, sums, allowances and certificates again.

        Args:
            head: a head that was noted before; a ledger without it is an older copy, or another one.
            certificates: also recompute every charge by the independent computation (seconds to minutes).
            progress: told what is checked, how many of it are done, and of how many.

        Returns:
            What was found.
        """
        with self._database.reading() as connection:
            return check(connection, head=head, certificates=certificates, tell=progress)


def _numbers_of(connection: Connection, plans: Sequence[Plan]) -> list[IntArray]:
    rosters = [plan.roster for plan in plans if plan.roster is not None]
    return [consents.numbers_of(connection, consents.texts_of(connection, roster.ids)) for roster in rosters]


def _checked_token(token: str | None) -> str:
    if token is not None and token.startswith(("series:", "history:")):
        fail(
            f"Expected a token of your own, which begins neither with series: nor with history:. Got {token!r}."
        )
    return token or uuid.uuid4().hex


def _text_of(plan: Plan) -> str:
    """The plan as the ledger keeps it: who is on which level stands in `run_people`."""
    return replace(plan, roster=None, stated_people=plan.people_digest).to_json(indent=None)


def _consents_of(connection: Connection, run: int) -> Budgets:
    ids, _ = _list_of(connection, run)
    now = consents.current(connection)
    listed = levels_of_run(connection, run, len(now)) != schema.NOT_THERE
    return Budgets.of_enrolled(now.epsilon[listed], now.delta[listed], ids)


def _list_of(connection: Connection, run: int) -> tuple[IdArray, IntArray]:
    """Read who is on a run's list, in the order of the ledger, and on which level of its plan."""
    levels = levels_of_run(connection, run, consents.people_count(connection))
    listed = levels != schema.NOT_THERE
    return consents.named_ids(connection, consents.all_ids(connection)[listed]), levels[listed]


def _check_plan(plan: Plan) -> None:
    if plan.roster is None:
        fail("Expected a plan that knows its people. Attach them with plan.with_people(budgets).")
    if plan.not_for_release is not None:
        fail(f"Expected a plan that keeps a promise. Got one not for release: {plan.not_for_release}")
    if not plan.roster.named:
        fail("Expected people with ids: over time, a place on a list says nothing about who somebody is.")
