"""What to choose before anything is spent: batch size, steps, clipping norm and learning rate, from public things.

Looked at are what people allow, how many they are, and how many parameters the network has; never a record. The measure
is a plan's signal-to-noise ratio, its signal (`planning.signal`) over the square root of the number of parameters: the
length of the sum of people's clipped gradients, if they all agreed, over the length of the noise in it. The rules are
calibrated on public data; docs/results/advice.md has the runs, and how the rules do on other data.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from pdpsgd.budgets.budgets import Budgets
from pdpsgd.errors import PdpsgdError, check_positive, fail
from pdpsgd.planning.defaults import CLIPPING_NORM, STEPS, default_batch_size, default_clipping_norm
from pdpsgd.planning.levels import make_levels
from pdpsgd.planning.planner import plan as make_plan
from pdpsgd.planning.plans import Plan
from pdpsgd.planning.signal import signal, signal_efficiency

TRAVEL, TRAVEL_POWER, LONGEST_TRAVEL = 20.0, 0.75, 1600.0
"""Clipping norm times the sum of learning rates, at a signal-to-noise ratio of r: TRAVEL * r^TRAVEL_POWER, limited."""
LARGEST_STEP = 2 * LONGEST_TRAVEL / STEPS
"""Clipping norm times learning rate, however few the steps are: the largest that was tried."""
AFTER_A_START = 0.25
"""Share of the learning rate for a run that starts from an earlier model (docs/results/advice.md)."""
FEW_STEPS = 50
"""With fewer steps no learning rate is doubted: the rule was calibrated at 300."""
FAR_OFF = 5.0
"""A learning rate so many times above or below the rule's is worth a word."""
MEAN_OF_SCHEDULE = {"cosine": 0.5, "linear": 0.5, "constant": 1.0}

MECHANISMS = ("pdp-sgd-exact", "dp-sgd-exclude", "dp-sgd")
"""What is compared: the default, and what people do without it."""


@dataclass(frozen=True)
class Setting:
    """What a run can be asked for, as far as the rules say it."""

    batch_size: int
    steps: int
    max_grad_norm: float = CLIPPING_NORM
    learning_rate: float | None = None


@dataclass(frozen=True)
class Outlook:
    """One plan, as far as it tells before training how good a model can get."""

    mechanism: str
    batch_size: float
    steps: int
    noise_multiplier: float
    people_used: int
    efficiency: float
    signal_to_noise: float


def outlook(made: Plan, parameters: int) -> Outlook:
    """Read off a plan what it tells beforehand.

    Args:
        made: The plan.
        parameters: The number of parameters of the network.

    Returns:
        Its noise multiplier (averaged over steps), who is used, its signal efficiency and signal-to-noise ratio.
    """
    steps = made.steps
    used = [
        level.people
        for index, level in enumerate(made.levels)
        if any(not r.exposure(index).costs_nothing for r in made.rounds)
    ]
    return Outlook(
        mechanism=made.mechanism,
        batch_size=sum(r.steps * r.expected_batch_size for r in made.rounds) / steps,
        steps=steps,
        noise_multiplier=sum(r.steps * r.noise_multiplier for r in made.rounds) / steps,
        people_used=sum(used),
        efficiency=signal_efficiency(made.levels, made.rounds) or 0.0,
        signal_to_noise=signal_to_noise(made, parameters),
    )


def signal_to_noise(made: Plan, parameters: int) -> float:
    """Compute a plan's signal over the square root of the number of parameters."""
    check_positive(parameters=parameters)
    return signal(made.levels, made.rounds) / math.sqrt(parameters)


def choose_setting(
    budgets: Budgets,
    parameters: int | None = None,
    *,
    steps: int | None = None,
    batch_size: float | None = None,
    max_grad_norm: float | None = None,
) -> Setting:
    """Choose what is not said of batch size, steps and clipping norm.

    Args:
        budgets: What each person allows for this run.
        parameters: The number of parameters of the network, if it is known.
        steps: The number of steps, if it is said.
        batch_size: The expected batch size, if it is said.
        max_grad_norm: The clipping norm, if it is said.

    Returns:
        A setting without a learning rate, which follows from the plan (`rate_for`).
    """
    taken = STEPS if steps is None else steps
    levels, _ = make_levels(budgets)
    if max_grad_norm is None:
        max_grad_norm = CLIPPING_NORM if parameters is None else default_clipping_norm(levels, parameters)
    batch = default_batch_size(levels, taken) if batch_size is None else max(1, round(batch_size))
    return Setting(batch_size=batch, steps=taken, max_grad_norm=max_grad_norm)


def rate_for(
    made: Plan,
    parameters: int,
    *,
    schedule: str = "cosine",
    momentum: float = 0.0,
    started: bool = False,
) -> float:
    """Compute the learning rate of SGD that goes with a plan, to two digits.

    The more signal there is for the noise, the further weights may travel: with gradients clipped to C, the sum of all
    learning rates times C is TRAVEL * r^TRAVEL_POWER at a signal-to-noise ratio of r, up to
    LONGEST_TRAVEL. Momentum m multiplies what a learning rate moves by 1 / (1 - m).

    Args:
        made: The plan: its steps, noise and clipping norm.
        parameters: The number of parameters of the network.
        schedule: The name of the learning rate schedule.
        momentum: Momentum of SGD.
        started: Whether the first weights are those of an earlier model for the same task.

    Returns:
        The learning rate at the beginning of the schedule.
    """
    rates = MEAN_OF_SCHEDULE.get(schedule, 0.5) * _steps_of_a_model(made) * made.max_grad_norm
    rate = min(_travel(signal_to_noise(made, parameters)) / rates, LARGEST_STEP / made.max_grad_norm)
    rate *= (1 - min(momentum, 0.99)) * (AFTER_A_START if started else 1.0)
    return float(f"{rate:.2g}")


def _steps_of_a_model(made: Plan) -> int:
    """Count the steps of the longest model, where rounds begin with fresh ones."""
    longest = current = 0
    for r in made.rounds:
        current = r.steps if r.fresh_model else current + r.steps
        longest = max(longest, current)
    return longest


def _travel(ratio: float) -> float:
    return min(TRAVEL * max(ratio, 1e-3) ** TRAVEL_POWER, LONGEST_TRAVEL)


def doubt_about_rate(
    made: Plan,
    parameters: int,
    rate: float,
    *,
    schedule: str = "cosine",
    momentum: float = 0.0,
    started: bool = False,
) -> str | None:
    """Say that a learning rate, with this momentum, is far from what the plan's noise calls for; None if it is not.

    Args:
        made: The plan.
        parameters: The number of parameters of the network.
        rate: The learning rate of SGD that was chosen.
        schedule: The name of its schedule.
        momentum: Momentum that was chosen.
        started: Whether the first weights are those of an earlier model.

    Returns:
        A sentence with the learning rate to try instead, or None.
    """
    by_rule = rate_for(made, parameters, schedule=schedule, momentum=momentum, started=started)
    if made.steps < FEW_STEPS or by_rule / FAR_OFF < rate < by_rule * FAR_OFF:
        return None
    ratio = signal_to_noise(made, parameters)
    side = "above" if rate > by_rule else "below"
    times = max(rate / by_rule, by_rule / rate)
    harm = "the noise then drowns the model" if rate > by_rule else "the model then hardly leaves its start"
    with_momentum = (
        f" Momentum {momentum:g} makes every step count {1 / (1 - min(momentum, 0.99)):.3g} times."
        if momentum > 0 and rate > by_rule
        else ""
    )
    return (
        f"Learning rate {rate:g} is {times:.2g} times {side} what suits this plan (signal-to-noise ratio "
        f"{ratio:.3g}): {harm}.{with_momentum} About {by_rule:g} is usual here; leave it out to have it chosen."
    )


@dataclass(frozen=True)
class Expectation:
    """Points of accuracy that runs with such a ratio lost against the same network without privacy, in the calibration.

    `usual` is the median over data sets, `at_worst` what nine of ten stayed below.
    """

    usual: float
    at_worst: float


LOST = ((3.0, 5.6, 15.6), (10.0, 3.2, 5.6), (30.0, 1.5, 5.0), (100.0, 0.7, 1.5), (300.0, 0.4, 5.6))
"""Signal-to-noise ratio, usual loss in points, loss that nine of ten stayed below (docs/results/advice.md)."""
SMALLEST_SEEN = 1.5
TOO_NOISY = 1.0
ENOUGH = 3.0


def expected_loss(ratio: float) -> Expectation:
    """Interpolate what is lost at a signal-to-noise ratio, from the calibration's table.

    >>> expected_loss(10.0).usual > expected_loss(100.0).usual
    True
    """
    at = np.log([row[0] for row in LOST])
    usual, worst = ([row[column] for row in LOST] for column in (1, 2))
    place = math.log(max(ratio, 1e-9))
    return Expectation(float(np.interp(place, at, usual)), float(np.interp(place, at, worst)))


@dataclass(frozen=True)
class Advice:
    """What to choose for a list of people and a network, what else there is, and what to expect."""

    people: int
    people_who_allow_something: int
    parameters: int
    recommended: Setting
    plan: Plan
    settings: tuple[Outlook, ...]
    mechanisms: tuple[Outlook, ...]

    @property
    def best(self) -> Outlook:
        """The recommended setting with the recommended mechanism."""
        return self.mechanisms[0]

    @property
    def gain(self) -> tuple[float, float]:
        """Points of accuracy that personalization is expected to bring over the best way without: usual, at most."""
        here = expected_loss(self.best.signal_to_noise)
        without = expected_loss(max(each.signal_to_noise for each in self.mechanisms[1:]))
        usual = max(without.usual - here.usual, 0.0)
        return usual, max(without.at_worst - here.at_worst, usual)

    def reasons(self) -> list[str]:
        """Say why this setting, what to expect of it, and whether personalization is worth it here."""
        return [_why(self), _if_started(self), _what_to_expect(self), _worth(self), *_if_too_noisy(self)]

    def to_dict(self) -> dict[str, Any]:
        """Return the advice as plain data."""
        return {
            "people": self.people,
            "people_who_allow_something": self.people_who_allow_something,
            "parameters": self.parameters,
            "recommended": asdict(self.recommended),
            "settings": [asdict(each) for each in self.settings],
            "mechanisms": [asdict(each) for each in self.mechanisms],
            "expected_loss_in_points": asdict(expected_loss(self.best.signal_to_noise)),
            "gain_of_personalization_in_points": {"usual": self.gain[0], "at_most": self.gain[1]},
            "reasons": self.reasons(),
        }


def advise(
    budgets: Budgets,
    parameters: int,
    *,
    steps: int | None = None,
    batch_size: float | None = None,
    max_grad_norm: float | None = None,
    accountant: str | None = None,
) -> Advice:
    """Advise on a run before anything is spent: public things in, settings and expectations out.

    Args:
        budgets: What each person allows for this run.
        parameters: The number of parameters of the network.
        steps: The number of steps, if it is fixed already.
        batch_size: The expected batch size, if it is fixed already.
        max_grad_norm: The clipping norm, if it is fixed already.
        accountant: The accountant of the plans.

    Returns:
        A recommended setting, others beside it, and the mechanisms compared.

    Raises:
        PdpsgdError: If nobody on the list allows anything.

    >>> people = Budgets.from_tiers({0.5: 0.3, 2.0: 0.5, 8.0: 0.2}, people=30_000)
    >>> found = advise(people, parameters=3_500)
    >>> found.recommended.batch_size, found.recommended.steps, round(found.best.signal_to_noise)
    (2200, 300, 291)
    """
    check_positive(parameters=parameters)
    able = int(((budgets.epsilon > 0) & (budgets.delta > 0)).sum())
    if not able:
        fail("Expected somebody who allows something, to advise on a run. Got a list on which nobody does.")
    chosen = choose_setting(
        budgets, parameters, steps=steps, batch_size=batch_size, max_grad_norm=max_grad_norm
    )

    def planned(setting: Setting, mechanism: str = MECHANISMS[0]) -> Plan:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of weak promises: whoever plans is told, once
            return make_plan(
                budgets,
                mechanism,
                steps=setting.steps,
                batch_size=setting.batch_size,
                max_grad_norm=setting.max_grad_norm,
                accountant=accountant,
            )

    made = planned(chosen)
    grid = [
        chosen
        if (size, n) == (chosen.batch_size, chosen.steps)
        else replace(chosen, batch_size=size, steps=n)
        for n in _beside(chosen.steps, fixed=steps is not None, least=10, most=10_000)
        for size in _beside(chosen.batch_size, fixed=batch_size is not None, least=1, most=able)
    ]
    return Advice(
        people=len(budgets),
        people_who_allow_something=able,
        parameters=parameters,
        recommended=replace(chosen, learning_rate=rate_for(made, parameters)),
        plan=made,
        settings=_outlooks([(planned, setting) for setting in grid], parameters),
        mechanisms=tuple(
            _as_asked(
                outlook(
                    made if name == made.mechanism else _smaller_if_needed(planned, chosen, name), parameters
                ),
                chosen,
            )
            for name in MECHANISMS
        ),
    )


def _smaller_if_needed(planned: Callable[[Setting, str], Plan], setting: Setting, mechanism: str) -> Plan:
    """Plan with a mechanism that may use fewer people than the batch has: then with half the batch, and so on."""
    try:
        return planned(setting, mechanism)
    except PdpsgdError:
        if setting.batch_size <= 1:
            raise
        return _smaller_if_needed(planned, replace(setting, batch_size=setting.batch_size // 2), mechanism)


def _outlooks(wanted: Sequence[Any], parameters: int) -> tuple[Outlook, ...]:
    """Look at all settings for which there is a plan."""
    found = []
    for planned, setting in wanted:
        with suppress(PdpsgdError):  # such a batch cannot be had from these people
            found.append(_as_asked(outlook(planned(setting), parameters), setting))
    return tuple(found)


def _as_asked(seen: Outlook, setting: Setting) -> Outlook:
    """Name the batch size that was asked for where a plan has it but for rounding: 2,200 and not 2,199.4."""
    is_it = math.isclose(seen.batch_size, setting.batch_size, rel_tol=0.02)
    return replace(seen, batch_size=float(setting.batch_size)) if is_it else seen


def _beside(value: int, *, fixed: bool, least: int, most: int) -> list[int]:
    """Return a value with one about a third of it and one three times as large."""
    if fixed:
        return [value]
    return sorted({int(min(max(round(value * factor), least), max(most, value))) for factor in (1 / 3, 1, 3)})


def _why(advice: Advice) -> str:
    best = advice.best
    return (
        f"Batches of {best.batch_size:,.0f} people over {best.steps:,} steps have a noise multiplier of "
        f"{best.noise_multiplier:.3g} and use {best.efficiency:.0%} of what these people allow; smaller ones waste "
        "more of it, larger ones take longer for little. Learning rate and clipping norm follow from the noise."
    )


def _if_started(advice: Advice) -> str:
    rate = float(f"{AFTER_A_START * (advice.recommended.learning_rate or 0.0):.2g}")
    return (
        f"For a run that starts from last month's model (--start), a quarter of that learning rate, {rate:g}, did "
        f"best or "
        "nearly so on public data; train takes it by itself."
    )


def _what_to_expect(advice: Advice) -> str:
    ratio, loss = advice.best.signal_to_noise, expected_loss(advice.best.signal_to_noise)
    if ratio < SMALLEST_SEEN:
        return (
            f"The signal-to-noise ratio is {ratio:.2g}, less than that of any public set that was tried: more is "
            f"lost than "
            f"the {loss.usual:.1f} points of accuracy that are usual at {LOST[0][0]:g}."
        )
    return (
        f"The signal-to-noise ratio is {ratio:.3g}. Public data sets at that ratio lost about {loss.usual:.1f} points "
        f"of accuracy against the same network without privacy, nine of ten at most {loss.at_worst:.1f}."
    )


def _worth(advice: Advice) -> str:
    usual, most = advice.gain
    best, others = advice.best, advice.mechanisms[1:]
    other = max(others, key=lambda each: each.signal_to_noise)
    if best.signal_to_noise < 1.02 * other.signal_to_noise:
        return "Personalization changes nothing here: these budgets are (nearly) alike, and uniform DP-SGD is as good."
    said = {"dp-sgd": "uniform DP-SGD", "dp-sgd-exclude": "leaving the strictest people out"}[other.mechanism]
    times = best.signal_to_noise / other.signal_to_noise
    if best.signal_to_noise < ENOUGH:
        return f"Personalization has {times:.2g} times the signal of {said}, and there is little either way."
    if most < 0.5:
        return (
            f"Personalization has {times:.2g} times the signal of {said}, but there is signal enough either way: "
            f"expect {usual:.1f} points of accuracy from it, {most:.1f} at most. It uses everybody as they asked."
        )
    return (
        f"Personalization is worth it here: {times:.2g} times the signal of {said}, or about {usual:.1f} points of "
        f"accuracy (up to {most:.1f})."
    )


def too_noisy(best: Outlook) -> str | None:
    """Name what can be had of a plan in which there is more noise than signal; None where there is enough signal."""
    if best.signal_to_noise >= ENOUGH:
        return None
    return "hardly more than a guess" if best.signal_to_noise < TOO_NOISY else "a rough model at best"


def _if_too_noisy(advice: Advice) -> list[str]:
    doubt = doubt_about_signal(advice.best, advice.parameters)
    return [] if doubt is None else [doubt]


def doubt_about_signal(best: Outlook, parameters: int) -> str | None:
    """Say what can be had of a plan with too much noise, and what would help; None where there is enough signal.

    Args:
        best: What a plan tells beforehand.
        parameters: The number of parameters of the network.

    Returns:
        Sentences to be said before anything is spent, or None.
    """
    doubt = too_noisy(best)
    if doubt is None:
        return None
    people = math.ceil(best.people_used * ENOUGH / max(best.signal_to_noise, 1e-9) / 10) * 10
    smaller = int(parameters * (best.signal_to_noise / ENOUGH) ** 2)
    network = (
        f", a network of {smaller:,} parameters at most (a linear one, or fewer columns)"
        if smaller >= 2
        else ", a much smaller network"
    )
    return (
        f"Expect {doubt}: for a network of {parameters:,} parameters these people allow too little (signal-to-noise "
        f"ratio {best.signal_to_noise:.2g}). What would help: about {people:,} people like these, larger budgets"
        f"{network}."
    )
