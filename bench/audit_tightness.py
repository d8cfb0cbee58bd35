"""How tight the audit is: white box, Dirac canaries, epsilon 1, 2, 4, 8, measured against proven, one run and
many.

Every run goes through the real engine. Two settings: everybody in every batch (the Gaussian mechanism, where
the bound through Gaussian DP is justified) and subsampled (rate 0.1, 50 steps).

    python bench/audit_tightness.py --out docs/results/audit/tightness.json
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import numpy as np
import torch

from pdpsgd.accounting import accountant
from pdpsgd.audit.canaries import put_on_list, tiers_of
from pdpsgd.audit.dirac import dirac_steps
from pdpsgd.audit.many_runs import many_run_bounds, many_runs, rehearsed_threshold
from pdpsgd.audit.one_run import one_run_bounds, rehearsed_rule
from pdpsgd.audit.scores import LikelihoodScores, simulated_scores
from pdpsgd.noise_search import smallest_noise_multiplier
from pdpsgd.plans import Level, Plan, Round

DELTA = 1e-5
SETTINGS = {"full batch, 5 steps": (1.0, 5), "rate 0.1, 50 steps": (0.1, 50)}
EPSILONS = (1.0, 2.0, 4.0, 8.0)


def plan_for(epsilon: float, rate: float, steps: int, people: int = 10) -> Plan:
    noise = smallest_noise_multiplier(epsilon, DELTA, sample_rate=rate, steps=steps)
    one = Round(steps, noise, people * rate, (1.0,), (rate,), (1.0,))
    made = Plan("by-hand", (Level(epsilon, DELTA, people),), (one,))
    proven = accountant("pld").epsilon(made.history_of(0), DELTA)
    return Plan("by-hand", (Level(epsilon, DELTA, people, proven_epsilon=proven),), (one,))


def one_run(plan: Plan, canaries: int, significance: float, seed: int) -> dict[str, float | None]:
    listed = put_on_list(plan, canaries, np.random.default_rng(seed))
    rule = rehearsed_rule(plan.history_of(0), canaries, delta=DELTA, significance=significance)
    scores = LikelihoodScores(listed)
    for seen in dirac_steps(listed, layers=1, seed=seed):
        scores.observe(seen)
    (bound,) = one_run_bounds(listed, scores.scores(), rules=[rule], significance=significance)
    return {"measured": bound.measured, "gaussian": bound.gaussian, "success": bound.success}


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
        thresholds=[rehearsed_threshold(history, len(coins), **options)],
        balanced_thresholds=[rehearsed_threshold(history, len(coins), balanced=True, **options)],
        significance=significance,
    )
    assumed = bound.gaussian if bound.gaussian is not None else bound.within_family
    return {"measured": bound.measured, "assumed": assumed}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--canaries", type=int, nargs="+", default=[1000, 5000])
    parser.add_argument("--runs", type=int, default=2000)
    parser.add_argument("--simulated-runs", type=int, default=1_000_000)
    parser.add_argument("--significance", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
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
                    f"one run, {count} canaries": one_run(plan, count, options.significance, options.seed)
                    for count in options.canaries
                },
                f"{options.runs} runs": many(plan, options.runs, options.significance, options.seed),
                f"{options.simulated_runs} simulated runs": simulated(
                    plan, options.simulated_runs, options.significance, options.seed
                ),
            }
            row["seconds"] = round(time.perf_counter() - began, 1)
            rows.append(row)
            print(json.dumps(row))
    if options.out:
        settings = {key: value for key, value in vars(options).items() if key != "out"}
        options.out.write_text(json.dumps({"settings": settings, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
