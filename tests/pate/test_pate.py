"""Individualized PATE: plans against closed forms, who goes to whom, and votes within their plan."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import pytest
import torch
from scipy.optimize import brentq

from pdpsgd import Budgets, PdpsgdError, Plan
from pdpsgd.models.networks import by_name, linear_model
from pdpsgd.pate import (
    MECHANISMS,
    VoteSettings,
    answer_queries,
    ask_about,
    assign_people,
    plan_votes,
    spread_labels,
    train_network_teachers,
    train_ridge_teachers,
    vote_counts,
)
from pdpsgd.pate.teachers import Teacher, _proportional
from pdpsgd.sampling.source import RandomSource
from tests.planning.closed_forms import gaussian

CASES = [{1.0: 0.34, 2.0: 0.43, 3.0: 0.23}, {1.0: 0.54, 2.0: 0.37, 3.0: 0.09}]
MU = np.array([brentq(lambda mu, e=e: gaussian(mu, e) - 1e-5, 0.01, 5) for e in (1.0, 2.0, 3.0)])


@pytest.mark.parametrize("shares", CASES)
@pytest.mark.parametrize("noise", [40.0, 60.0])
@pytest.mark.parametrize("weights", ["pate", "upsample", "epsilon", "mu", "epsilon-times-share"])
def test_the_number_of_labels_is_the_closed_form(
    shares: dict[float, float], noise: float, weights: str
) -> None:
    share, epsilon = np.array(list(shares.values())), np.array([1.0, 2.0, 3.0])
    mechanism = {"pate": "pate", "upsample": "i-pate-upsample"}.get(weights, "i-pate-weight")
    moved = {"pate": np.ones(3), "mu": MU, "epsilon-times-share": epsilon * share}.get(weights, epsilon)
    moved = moved / (share @ moved)  # upsampling: noise grows with the teachers, which is the same
    exact = np.min((MU / moved) ** 2) / (2 / 150**2 + 2 / noise**2)
    made = plan_votes(
        Budgets.from_tiers(shares, 10_000),
        mechanism,
        settings=VoteSettings(answer_noise=noise),
        weights=weights if mechanism == "i-pate-weight" else "mu",
    )
    if weights == "pate":
        exact = MU[0] ** 2 / (2 / 150**2 + 2 / noise**2)
    assert exact * (1 - 5e-4) - 1 <= made.answers <= exact
    assert made.questions == 2 * made.answers
    Plan.from_json(made.plan.to_json()).verify()


def test_the_published_settings_give_these_labels() -> None:
    people = Budgets.from_tiers(CASES[0], 10_000)
    assert [plan_votes(people, name).answers for name in MECHANISMS] == [53, 153, 166]
    assert plan_votes(people, "i-pate-weight", weights="epsilon").answers == 153


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_every_level_spends_what_the_formula_says(mechanism: str) -> None:
    made = plan_votes(Budgets.from_tiers(CASES[0], 1000), mechanism)
    for index, level in enumerate(made.plan.levels):
        s = made.copies[index] * made.weights[index]
        by_rounds = sum(r.steps * (r.clip_scales[index] / r.noise_multiplier) ** 2 for r in made.plan.rounds)
        mu = s * math.sqrt(
            made.questions / made.settings.check_noise**2 + 2 * made.answers / made.settings.answer_noise**2
        )
        assert math.sqrt(by_rounds) == pytest.approx(mu, rel=1e-9)
        assert gaussian(mu, level.proven_epsilon or 0.0) == pytest.approx(level.delta, rel=1e-6)
        assert (level.proven_epsilon or math.inf) <= level.epsilon


def test_charges_follow_the_level_whatever_the_order_and_equal_weights_do_not_merge_levels() -> None:
    epsilon = np.repeat([1.0, 2.0, 3.0], [54, 37, 9])
    one = plan_votes(Budgets(epsilon), "i-pate-weight", weights="epsilon-times-share")
    other = plan_votes(Budgets(epsilon[::-1].copy()), "i-pate-weight", weights="epsilon-times-share")
    assert one.weights == other.weights
    assert one.answers == other.answers
    assert np.argsort(one.weights).tolist() == [2, 0, 1]  # not the order of budgets, and charged all the same
    alike = plan_votes(
        Budgets([1.0] * 60 + [2.0] * 30 + [3.0] * 10), "i-pate-weight", weights="epsilon-times-share"
    )
    assert alike.weights[0] == pytest.approx(alike.weights[1])
    assert len(alike.plan.levels) == 3


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_everybody_is_with_as_many_different_teachers_as_planned(mechanism: str) -> None:
    budgets = Budgets([0.0] * 7 + [1.0] * 340 + [2.0] * 430 + [3.0] * 230)
    made = plan_votes(budgets, mechanism, settings=VoteSettings(teachers=20, threshold=10, check_noise=100))
    level = made.plan.level_of_person(budgets)
    teachers = assign_people(made, level, seed=0)
    assert len(teachers) == made.settings.teachers
    met = np.zeros((len(teachers), len(budgets)))
    for number, teacher in enumerate(teachers):
        assert len(set(teacher.people.tolist())) == len(teacher.people)
        met[number, teacher.people] = 1
        if made.by_level:
            assert set(level[teacher.people]) == {made.weights.index(teacher.weight)}
    assert met.sum(axis=0).tolist() == np.array(made.copies)[level].tolist()


def test_removing_somebody_moves_the_counts_by_no_more_than_is_charged() -> None:
    torch.manual_seed(0)
    inputs, targets, public = torch.randn(300, 6), torch.randint(3, (300,)), torch.randn(50, 6)
    budgets = Budgets([1.0] * 100 + [2.0] * 100 + [3.0] * 100)
    for mechanism in MECHANISMS:
        settings = VoteSettings(teachers=12, check_noise=100)
        made = plan_votes(budgets, mechanism, settings=settings)
        level = made.plan.level_of_person(budgets)
        teachers = assign_people(made, level, seed=1)

        def counts(rows: torch.Tensor, teachers=teachers) -> torch.Tensor:  # type: ignore[no-untyped-def]
            labels = train_ridge_teachers(teachers, rows, targets, public, classes=3)
            return vote_counts(teachers, labels, classes=3)

        everybody = counts(inputs)
        for person in (0, 150, 299):
            without = inputs.clone()
            without[person] = torch.nan
            moved = everybody - counts(without)
            s = made.copies[level[person]] * made.weights[level[person]]
            assert moved.norm(dim=1).max() <= math.sqrt(2) * s + 1e-9
            assert (everybody.amax(1) - counts(without).amax(1)).abs().max() <= s + 1e-9


def test_a_record_moves_its_own_teachers_labels_only() -> None:
    torch.manual_seed(0)
    inputs, targets, public = torch.randn(60, 4), torch.randint(3, (60,)), torch.randn(30, 4)
    made = plan_votes(Budgets([4.0] * 60), "pate", settings=VoteSettings(teachers=5, check_noise=100))
    teachers = assign_people(made, np.zeros(60, dtype=np.int64), seed=1)

    def labels(rows: torch.Tensor) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
        torch.manual_seed(3)
        return train_network_teachers(lambda: linear_model(4, 3), teachers, rows, targets, public)

    without = inputs.clone()
    without[teachers[1].people] = torch.nan  # it has learned nothing
    moved = (labels(inputs) != labels(without)).any(axis=1)
    assert moved.tolist() == [False, True, False, False, False]
    assert (labels(without)[1] == 0).all()
    without = inputs.clone()
    without[teachers[2].people[0]] = torch.nan
    assert not np.delete(labels(inputs) != labels(without), 2, axis=0).any()


def test_networks_learn_what_their_people_show_and_leave_torchs_generator_where_it_was() -> None:
    classes = torch.arange(3).repeat_interleave(40)
    images = torch.zeros(120, 1, 6, 6)
    for number, label in enumerate(classes.tolist()):
        images[number, 0, 2 * label] = 1.0
    teachers = [Teacher(np.arange(start, 120, 4), 1.0) for start in range(4)]
    network = partial(by_name, "linear", input_shape=(1, 6, 6), classes=3)
    told: list[tuple[int, int]] = []
    torch.manual_seed(5)
    labels = train_network_teachers(
        network, teachers, images, classes, images, progress=lambda done, total: told.append((done, total))
    )
    assert (labels == classes.numpy()).mean() > 0.99
    assert told == [(1, 4), (2, 4), (3, 4), (4, 4)]
    drawn = torch.rand(())
    torch.manual_seed(5)
    torch.randint(2**62, ())  # the one number that all teachers' seeds are made of
    assert torch.rand(()) == drawn


def test_the_vote_ends_with_its_questions_or_its_answers_and_is_mostly_right() -> None:
    made = plan_votes(Budgets([2.0] * 1000), "pate")
    sure = torch.zeros(1000, 10)
    sure[:, 3] = 250
    told = answer_queries(sure, made, source=RandomSource.from_seed(0))
    assert told.asked <= made.questions
    assert len(told.labels) <= made.answers
    assert told.asked == made.questions or len(told.labels) == made.answers
    assert (told.labels == 3).mean() > 0.95
    assert told.not_for_release is not None
    unsure = answer_queries(torch.full((2000, 10), 25.0), made)
    assert unsure.asked == made.questions
    assert unsure.not_for_release is None
    assert len(unsure.labels) < 0.4 * made.questions  # P(25 + N(0, 150) > 200) = 0.12; above 0.4 below 1e-20


def test_the_student_asks_about_different_examples_and_spreads_their_labels() -> None:
    torch.manual_seed(0)
    classes = torch.arange(4).repeat_interleave(60)
    public = torch.eye(4)[classes] * 10 + torch.randn(240, 4)
    asked = ask_about(public, 12)
    assert len(set(asked.tolist())) == 12
    assert set(classes[asked].tolist()) == {0, 1, 2, 3}
    spread = spread_labels(public, asked, classes[asked].numpy(), classes=4)
    assert (spread.argmax(1) == classes).float().mean() > 0.95
    with pytest.raises(PdpsgdError, match="at least one answer"):
        spread_labels(public, asked[:0], asked[:0], classes=4)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: plan_votes(Budgets([0.0] * 5)), "budget that is left"),
        (lambda: plan_votes(Budgets([0.01] * 5)), "at least one answer"),
        (lambda: plan_votes(Budgets([1.0, np.inf], allow_infinite=True)), "finite budgets"),
        (lambda: VoteSettings(questions_per_answer=0.5), "at least one question"),
        (lambda: ask_about(torch.zeros(5, 2), 6), "1 to 5 questions"),
    ],
)
def test_what_cannot_be_is_refused_with_what_can(call, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(PdpsgdError, match=message):
        call()


def test_questions_are_about_public_examples_that_are_there() -> None:
    planned = plan_votes(Budgets([5.0] * 50), "pate", settings=VoteSettings(teachers=5, answer_noise=20.0))
    counts = torch.full((4, 3), 2.0, dtype=torch.float64)
    answer_queries(counts, planned, np.array([3, 0]), source=RandomSource.from_seed(0))
    for order in ([0, 4], [-1, 0]):
        with pytest.raises(
            PdpsgdError, match=f"about the 4 public examples. Got {min(order)} to {max(order)}"
        ):
            answer_queries(counts, planned, np.array(order), source=RandomSource.from_seed(0))


def test_people_are_not_with_more_teachers_than_there_are() -> None:
    few = VoteSettings(teachers=3, answer_noise=20.0, threshold=2.0)
    near, far = Budgets([2.0, 4.0] * 30), Budgets([1.0, 200.0] + [1.0] * 1000)
    assert len(plan_votes(near, "i-pate-upsample", settings=few).copies) == 2
    with pytest.raises(PdpsgdError, match=r"within a factor of 4 of each other\. Got 200"):
        plan_votes(far, "i-pate-upsample", settings=few)


def test_every_level_that_votes_by_itself_has_a_teacher() -> None:
    assert _proportional(np.array([5, 5]), 2).tolist() == [1, 1]
    with pytest.raises(PdpsgdError, match=r"one teacher for each of the 3 levels. Got 2"):
        _proportional(np.array([5, 5, 5]), 2)
