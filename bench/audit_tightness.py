"""How tight the audit is: white box, Dirac canaries, epsilon 1, 2, 4, 8, measured against proven, one run and
many.

Every run goes through the real engine. Two settings: everybody in every batch (the Gaussian mechanism, where
the bound through Gaussian DP is justified) and subsampled (rate 0.2, 20 steps). Also what is left to see of a
real fault, half the noise.

    python bench/audit_tightness.py --out docs/results/audit/tightness.json
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pdpsgd.accounting.registry import accountant
from pdpsgd.accounting.smallest_noise import smallest_noise_multiplier
from pdpsgd.audit.canaries import add_canaries, tiers_of
from pdpsgd.audit.conformance import ConformanceTest
from pdpsgd.audit.dirac_canaries import dirac_steps, tensor_names
from pdpsgd.audit.many_runs import many_run_bounds, many_runs, simulated_threshold
from pdpsgd.audit.one_run import one_run_bounds, simulated_rule
from pdpsgd.audit.scores import LikelihoodScores, simulated_scores
from pdpsgd.planning.plans import Plan
from pdpsgd.planning.rounds import Level, Round
from pdpsgd.sampling.source import RandomSource

DELTA = 1e-5
SETTINGS = {"everybody in every batch, 5 steps": (1.0, 5), "rate 0.2, 20 steps": (0.2, 20)}
EPSILONS = (1.0, 2.0, 4.0, 8.0)


def plan_for(epsilon: float, rate: float, steps: int, people: int = 10) -> Plan:
    noise = smallest_noise_multiplier(epsilon, DELTA, sample_rate=rate, steps=steps)
    one = Round(steps, noise, people * rate, (1.0,), (rate,), (1.0,))
    made = Plan("by-hand", (Level(epsilon, DELTA, people),), (one,))
    proven = accountant("pld").epsilon(made.history_of(0), DELTA)
    return Plan("by-hand", (Level(epsilon, DELTA, people, proven_epsilon=proven),), (one,))


class HalfTheNoise(RandomSource):
    def release(
        self, quantized: Sequence[torch.Tensor], *, noise_multiplier: float, **options: Any
    ) -> list[torch.Tensor]:
        return super().release(quantized, noise_multiplier=noise_multiplier / 2, **options)


def one_run(
    plan: Plan,
    canaries: int,
    significance: float,
    seed: int,
    repeats: int,
    source: type[RandomSource] = RandomSource,
) -> dict[str, object]:
    """Lower bounds of single runs: their mean and largest over some repeats, and what the conformance test
    says."""
    rule = simulated_rule(plan.history_of(0), canaries, delta=DELTA, significance=significance)
    measured, gaussian, alarms = [], [], 0
    for repeat in range(repeats):
        listed = add_canaries(plan, canaries, np.random.default_rng([seed, repeat]))
        scores = LikelihoodScores(listed)
        test = ConformanceTest(listed, tensor_names(1), orthogonal=True, false_alarm_rate=1e-6)
        for seen in dirac_steps(listed, layers=1, source=source.from_seed(1000 * seed + repeat)):
            scores.observe(seen)
            test.observe(seen)
        (bound,) = one_run_bounds(listed, scores.scores(), rules=[rule], significance=significance)
        measured.append(bound.measured)
        if bound.gaussian is not None:
            gaussian.append(bound.gaussian)
        alarms += not test.result().passed
    return {
        "mean": float(np.mean(measured)),
        "largest": max(measured),
        "mean_if_gaussian": float(np.mean(gaussian)) if gaussian else None,
        "conformance_alarms": alarms,
        "repeats": repeats,
    }


def many(plan: Plan, runs: int, significance: float, seed: int) -> dict[str, float | None]:
    coins, scores = [], []
    for canaries, found in many_runs(plan, runs=runs, seed=seed):
        coins.append(canaries.has_record)
        scores.append(found)
    return bounds(plan, np.array(coins), np.array(scores), significance)


def simulated(plan: Plan, runs: int, significance: float, seed: int) -> dict[str, float | None]:
    coins, scores = simulated_scores(plan.history_of(0), runs, np.random.default_rng(seed))
    return bounds(plan, coins[:, None], scores[:, None], significance)


def bounds(plan: Plan, coins: np.ndarray, scores: np.ndarray, significance: float) -> dict[str, float | None]:
    (tier,) = tiers_of(plan)
    history = plan.history_of(tier.levels[0])
    options = {"delta": DELTA, "significance": significance}
    (bound,) = many_run_bounds(
        plan,
        coins,
        scores,
        thresholds=[simulated_threshold(history, len(coins), **options)],
        balanced_thresholds=[simulated_threshold(history, len(coins), balanced=True, **options)],
        significance=significance,
    )
    assumed = bound.gaussian if bound.gaussian is not None else bound.within_family
    return {"measured": bound.measured, "assumed": assumed}


def false_alarms(runs: int, rate: float, seed: int) -> dict[str, object]:
    """How often either alarm goes off on correct training: short runs of two tiers through the real
    engine."""
    levels = tuple(Level(float("inf"), DELTA, 10) for _ in range(2))
    one = Round(8, 1.0, 5.0, (1.0, 1.0), (0.1, 0.4), (1.0, 1.0))
    plan = Plan("by-hand", levels, (one,))
    spent = [accountant("pld").epsilon(plan.history_of(index), DELTA) for index in range(2)]
    levels = tuple(Level(epsilon, DELTA, 10, proven_epsilon=epsilon) for epsilon in spent)
    plan = Plan("by-hand", levels, (one,))
    conformance = lower_bound = 0
    for run in range(runs):
        listed = add_canaries(plan, 50, np.random.default_rng([seed, run]))
        scores = LikelihoodScores(listed)
        test = ConformanceTest(listed, tensor_names(), orthogonal=True, false_alarm_rate=rate)
        for seen in dirac_steps(listed, seed=1_000_000 * seed + run):
            scores.observe(seen)
            test.observe(seen)
        conformance += not test.result().passed
        bounds = one_run_bounds(listed, scores.scores(), significance=rate)
        lower_bound += any(bound.alarm for bound in bounds)
    return {"runs": runs, "rate": rate, "conformance_alarms": conformance, "lower_bound_alarms": lower_bound}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--canaries", type=int, nargs="+", default=[1000, 5000])
    parser.add_argument("--repeats", type=int, default=10, help="of the one-run audit")
    parser.add_argument("--runs", type=int, default=1500)
    parser.add_argument("--simulated-runs", type=int, default=1_000_000)
    parser.add_argument("--false-alarms", type=int, default=0, help="only count alarms in so many runs")
    parser.add_argument("--significance", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.false_alarms:
        print(json.dumps(false_alarms(options.false_alarms, options.significance, options.seed)))
        return
    rows = []
    for name, (rate, steps) in SETTINGS.items():
        for epsilon in EPSILONS:
            began = time.perf_counter()
            plan = plan_for(epsilon, rate, steps)
            row = {
                "setting": name,
                "promised": epsilon,
                "proven": plan.levels[0].proven_epsilon,
                "noise_multiplier": plan.rounds[0].noise_multiplier,
                **{
                    f"one run, {count} canaries": one_run(
                        plan, count, options.significance, options.seed, options.repeats
                    )
                    for count in options.canaries
                },
                f"{options.runs} runs": many(plan, options.runs, options.significance, options.seed),
                f"{options.simulated_runs} simulated runs": simulated(
                    plan, options.simulated_runs, options.significance, options.seed
                ),
            }
            row["seconds"] = round(time.perf_counter() - began, 1)
            rows.append(row)
            print(json.dumps(row), flush=True)
    rate, steps = SETTINGS["everybody in every batch, 5 steps"]
    plan = plan_for(1.0, rate, steps)
    planned = plan.history_of(0)
    halved = tuple(e._replace(noise_multiplier=e.noise_multiplier / 2) for e in planned)
    fault = {
        "fault": "half the noise",
        "proven": plan.levels[0].proven_epsilon,
        "true": accountant("pld").epsilon(halved, DELTA),
        **{
            f"one run, {count} canaries": one_run(
                plan, count, options.significance, options.seed, options.repeats, HalfTheNoise
            )
            for count in options.canaries
        },
    }
    print(json.dumps(fault))
    if options.out:
        settings = {key: value for key, value in vars(options).items() if key != "out"}
        options.out.write_text(
            json.dumps({"settings": settings, "rows": rows, "fault": fault}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
