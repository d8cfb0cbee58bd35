"""The plan of a vote: how many questions the teachers answer, fixed and public before any record is touched."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from pdpsgd._typing import FloatArray, IntArray
from pdpsgd.accounting.base import Accountant
from pdpsgd.accounting.gaussian import gaussian_mu
from pdpsgd.accounting.history import Exposure
from pdpsgd.accounting.registry import accountant as accountant_by_name
from pdpsgd.budgets.budgets import Budgets
from pdpsgd.errors import check_one_of, check_positive, fail
from pdpsgd.planning.levels import Levels, Roster, make_levels
from pdpsgd.planning.planner import prove
from pdpsgd.planning.plans import Plan
from pdpsgd.planning.rounds import Round
from pdpsgd.planning.solver import largest_within, usable_levels

MECHANISMS = ("pate", "i-pate-upsample", "i-pate-weight")
WEIGHTS = ("mu", "epsilon", "epsilon-times-share")
VERIFIABLE = 1e-4
"""Budgets are lowered by this share, so that rounding of votes and the verifier's grid stay within them."""


@dataclass(frozen=True)
class VoteSettings:
    """Confident-GNMax (Papernot et al. 2018, arXiv:1802.08908), for plain PATE's number of teachers.

    Attributes:
        teachers: number of teachers; with upsampling there are more, and noise and threshold grow with them.
        threshold: a question is answered if the largest count, with noise, reaches this.
        check_noise: standard deviation of the noise on the largest count (sigma1).
        answer_noise: standard deviation of the noise on every count (sigma2).
        questions_per_answer: how many questions may be asked for each that may be answered.
    """

    teachers: int = 250
    threshold: float = 200.0
    check_noise: float = 150.0
    answer_noise: float = 40.0
    questions_per_answer: float = 2.0

    def __post_init__(self) -> None:
        check_positive(
            teachers=self.teachers,
            check_noise=self.check_noise,
            answer_noise=self.answer_noise,
            questions_per_answer=self.questions_per_answer,
        )
        if self.questions_per_answer < 1:
            fail(f"Expected at least one question per answer. Got {self.questions_per_answer!r}.")

    def enlarged(self, factor: float) -> VoteSettings:
        """Return the same vote among more teachers: threshold and noise grow in proportion."""
        return replace(
            self,
            teachers=round(self.teachers * factor),
            threshold=self.threshold * factor,
            check_noise=self.check_noise * factor,
            answer_noise=self.answer_noise * factor,
        )


@dataclass(frozen=True)
class VotePlan:
    """A vote: its privacy as an ordinary plan, and what the teachers are.

    Guarantee: see `plan_votes`. Everything here is public; teachers, their accuracy and their votes are not.
    """

    plan: Plan
    settings: VoteSettings
    copies: tuple[int, ...]
    """The number of teachers that each person of a level is with."""
    weights: tuple[float, ...]
    """The weight of the vote of a teacher with people of that level."""
    answers: int
    questions: int

    def __post_init__(self) -> None:
        """Refuse a vote that its plan does not pay for, such as one with more answers."""
        asked, answered = self.plan.rounds
        noise = (self.settings.check_noise, self.settings.answer_noise / math.sqrt(2))
        moved = [copies * weight for copies, weight in zip(self.copies, self.weights, strict=True)]
        is_paid = (self.questions, self.answers) == (asked.steps, answered.steps) and all(
            _covers(each.exposure(level), deviation / share)
            for each, deviation in zip((asked, answered), noise, strict=True)
            for level, share in enumerate(moved)
            if share > 0
        )
        if not is_paid:
            fail(
                f"Expected a vote as its plan has it: {asked.steps} questions, {answered.steps} answers, its noise and "
                f"weights. Got another one ({self.questions} questions, {self.answers} answers): compute it with "
                "plan_votes."
            )

    @property
    def by_level(self) -> bool:
        """Whether each teacher has people of one level only."""
        return self.plan.mechanism == "i-pate-weight"


def plan_votes(
    budgets: Budgets,
    mechanism: str = "i-pate-weight",
    *,
    settings: VoteSettings | None = None,
    weights: str = "mu",
    accountant: str = "pld",
) -> VotePlan:
    """Compute the plan of a vote: how many questions may be asked, and how many of them answered.

    Guarantee: removing or adding person i's record changes at most s_i = copies * weight of the votes, so the
    largest count moves by at most s_i and the histogram by at most sqrt(2) s_i. Both get Gaussian noise, so that Q
    questions and A answers cost mu_i^2 = s_i^2 (Q / sigma1^2 + 2 A / sigma2^2), exactly, whichever are answered
    (docs/theory.md, "Individualized PATE"). As a plan these are two rounds with rate 1; `Plan.verify` checks them.

    Args:
        budgets: what each person allows.
        mechanism: `pate` (everybody as the strictest asks), `i-pate-upsample` (generous people are with several
            teachers) or `i-pate-weight` (votes of their teachers weigh more).
        settings: of the vote.
        weights: for `i-pate-weight`, in proportion to `mu` (the default: all levels run out together), `epsilon` (as
            published) or `epsilon-times-share` (what the published code does, here charged rightly).
        accountant: `pld`, or `certificate` for a run of a ledger.

    Returns:
        The plan.

    Raises:
        PdpsgdError: nobody has a budget, or the budgets do not allow a single answer.

    >>> thousand = Budgets.from_tiers({1: 0.34, 2: 0.43, 3: 0.23}, 1000)
    >>> [plan_votes(thousand, name).answers for name in MECHANISMS]
    [53, 153, 166]
    """
    check_one_of(MECHANISMS, mechanism=mechanism)
    check_one_of(WEIGHTS, weights=weights)
    settings = settings or VoteSettings()
    by = accountant_by_name(accountant)
    levels, of_person = make_levels(budgets)
    if np.isinf(levels.epsilon).any():
        fail("Expected finite budgets for a vote. Got people who ask for no protection: give them a number.")
    usable = usable_levels(levels.up_to(np.where(levels.usable(), levels.epsilon, 0.0)))
    used = levels.only(usable)
    mu = _mu_of(used, by)
    copies, weight, settings = _shares(mechanism, used, mu, settings, weights)
    share = copies * weight
    allowed = float(np.min((mu / share) ** 2))
    per_answer = settings.questions_per_answer / settings.check_noise**2 + 2 / settings.answer_noise**2
    answers = int(allowed / per_answer)
    if answers < 1:
        fail(
            "Expected budgets that allow at least one answer. Got less: take more teachers and more noise, or plan "
            "with larger budgets."
        )
    questions = int(answers * settings.questions_per_answer)
    scales = share / share.max()
    rounds = tuple(
        _round(levels, usable, scales, steps, noise / float(share.max()))
        for steps, noise in (
            (questions, settings.check_noise),
            (answers, settings.answer_noise / math.sqrt(2)),
        )
    )
    note = (
        f"A vote of {settings.teachers} teachers: at most {questions} questions, and {answers} answers. Teachers and "
        "their votes are not public; labels and student are."
    )
    draft = Plan(mechanism, levels.unproven(), rounds, by.name, notes=(note,))
    proven = replace(prove(draft, by), roster=Roster(budgets.ids, of_person, budgets.named))
    everybody = np.zeros(len(levels))
    return VotePlan(
        proven,
        settings,
        tuple(int(x) for x in _placed(everybody, usable, copies.astype(float))),
        tuple(_placed(everybody, usable, weight).tolist()),
        answers,
        questions,
    )


def _covers(charged: Exposure, noise_multiplier: float) -> bool:
    """Whether a release with this noise, and everybody in it, costs no more than what is charged for it."""
    whole = charged.participation == charged.sample_rate == 1
    return whole and noise_multiplier >= charged.noise_multiplier * (1 - 1e-9)


def _mu_of(levels: Levels, by: Accountant) -> FloatArray:
    """The mu of the one Gaussian mechanism that each level's budget allows, by the accountant."""
    found = []
    for epsilon, delta in zip(levels.epsilon.tolist(), levels.delta.tolist(), strict=True):
        target = epsilon * (1 - VERIFIABLE)

        def cost(mu: float, delta: float = delta) -> float:
            return by.epsilon((Exposure(1.0, 1.0, 1 / mu, 1),), delta)

        found.append(largest_within(cost, target, float(gaussian_mu(target, delta))))
    return np.array(found)


def _shares(
    mechanism: str, levels: Levels, mu: FloatArray, settings: VoteSettings, weights: str
) -> tuple[IntArray, FloatArray, VoteSettings]:
    """Each level's number of teachers per person, the weight of their votes, and the vote's size."""
    ones = np.ones(len(levels))
    if mechanism == "pate":
        return ones.astype(np.int64), ones, settings
    of_all = levels.people / levels.people.sum()
    if mechanism == "i-pate-upsample":
        copies = np.maximum(1, (levels.epsilon / levels.epsilon.min() + 1e-9).astype(np.int64))
        enlarged = settings.enlarged(float(of_all @ copies))
        if copies.max() > enlarged.teachers:
            fail(
                f"Expected budgets within a factor of {enlarged.teachers} of each other. Got {copies.max()}."
            )
        return copies, ones, enlarged
    weight = {"mu": mu, "epsilon": levels.epsilon, "epsilon-times-share": levels.epsilon * of_all}[weights]
    return ones.astype(np.int64), weight / float(of_all @ weight), settings


def _round(levels: Levels, usable: IntArray, scales: FloatArray, steps: int, noise: float) -> Round:
    zeros, ones = np.zeros(len(levels)), np.ones(len(levels))
    rates, clip_scales = _placed(zeros, usable, np.ones(usable.size)), _placed(ones, usable, scales)
    return levels.round(steps, noise, rates, clip_scales=clip_scales)


def _placed(into: FloatArray, usable: IntArray, values: FloatArray) -> FloatArray:
    placed = into.copy()
    placed[usable] = values
    return placed
