"""Planning for a million people with a million budgets, beside one call of dp-accounting and IDP-SGD's search.

Run `python bench/planning.py`. All plan 1,000 steps, in one run; ratios are what counts: to one PLD that dp-accounting
composes for one level, and to the nested bisection of IDP-SGD for three groups, on Opacus's RDP. With an expected batch
of 1 % of the people noise is large, with one of 1,024 small.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from pathlib import Path

import numpy as np
from opacus.accountants.analysis import rdp
from rich.console import Console
from rich.table import Table

from pdpsgd import Budgets, plan
from pdpsgd.accounting import pld
from pdpsgd.planning.levels import make_levels

ORDERS = [1 + x / 10.0 for x in range(1, 100)] + list(range(12, 64))
PRECISION = 2e-3


def nested_bisection(
    epsilons: list[float], shares: list[float], rate: float, steps: int, delta: float
) -> tuple[float, int]:
    """IDP-SGD's search: bisect the noise, and for each noise each group's rate, with an accountant call per step."""
    calls = 0

    def epsilon(q: float, sigma: float) -> float:
        nonlocal calls
        calls += 1
        curve = rdp.compute_rdp(q=q, noise_multiplier=sigma, steps=steps, orders=ORDERS)
        return float(rdp.get_privacy_spent(orders=ORDERS, rdp=curve, delta=delta)[0])

    def rate_of(group: float, sigma: float) -> float:
        low, high = 0.0, 1.0
        while high - low > PRECISION * max(low, 1e-6):
            middle = (low + high) / 2
            low, high = (middle, high) if epsilon(middle, sigma) <= group else (low, middle)
        return low

    low, high = 0.3, 10.0
    while high - low > PRECISION * high:
        sigma = (low + high) / 2
        mean = sum(s * rate_of(e, sigma) for e, s in zip(epsilons, shares, strict=True))
        low, high = (sigma, high) if mean < rate else (low, sigma)
    return high, calls


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rate", type=float, default=0.01, help="expected batch over people")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    import warnings

    warnings.filterwarnings("ignore", message="Optimal order is the")
    console = Console(width=120)
    rows: list[dict[str, float | str]] = []

    def timed(what: str, run) -> None:  # type: ignore[no-untyped-def]
        start, cpu = time.perf_counter(), time.process_time()
        detail = run()
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        rows.append(
            {
                "what": what,
                "seconds": time.perf_counter() - start,
                "cpu": time.process_time() - cpu,
                "peak MiB": peak,
                "detail": detail,
            }
        )
        console.print(f"{what}: {rows[-1]['seconds']:.2f} s, {detail}", highlight=False)

    rng = np.random.default_rng(0)
    plan(Budgets([1.0, 2.0]), steps=10, batch_size=1)  # imports
    for people in (1_000_000, 10_000_000):
        budgets = Budgets(rng.uniform(0.5, 4, people))
        for batch in (options.rate * people, 1024):

            def ours(budgets: Budgets = budgets, batch: float = batch) -> str:
                return described(plan(budgets, steps=1000, batch_size=batch))

            forget()
            timed(f"pdp-sgd-exact, {people:,} people, batch {batch:,.0f}", ours)
        timed(
            f"of that, budgets to levels, {people:,} people",
            lambda budgets=budgets: f"{len(make_levels(budgets)[0])} levels",
        )
        if people == 1_000_000:
            made = plan(budgets, steps=1000, batch_size=1024)
            timed("verify, 1,000,000 people, batch 1,024", lambda made=made: str(made.verify())[:60])
    some = Budgets(rng.uniform(0.5, 4, 100_000))
    forget()
    timed(
        "idp-sample, 100,000 people, batch 1,024",
        lambda: described(plan(some, steps=1000, batch_size=1024, mechanism="idp-sample")),
    )

    def one_call() -> str:
        from dp_accounting.pld import privacy_loss_distribution as distributions

        one = distributions.from_gaussian_mechanism(
            1.0, value_discretization_interval=1e-4, sampling_prob=options.rate
        )
        return f"epsilon {one.self_compose(1000).get_epsilon_for_delta(1e-5):.3f}"

    timed("dp-accounting, one PLD of 1,000 steps", one_call)
    call = float(rows[-1]["cpu"])

    def theirs() -> str:
        sigma, calls = nested_bisection([1.0, 2.0, 3.0], [0.34, 0.43, 0.23], options.rate, 1000, 1e-5)
        return f"3 groups, noise {sigma:.3f}, {calls} accountant calls"

    timed("IDP-SGD's nested bisection, 3 groups", theirs)
    reference = float(rows[-1]["cpu"])
    table = Table(title="Planning 1,000 steps")
    for column in ("what", "seconds", "CPU seconds", "x one PLD", "share of IDP-SGD's", "peak memory"):
        table.add_column(column, justify="left" if column == "what" else "right")
    for row in rows:
        table.add_row(
            str(row["what"]),
            f"{row['seconds']:.2f}",
            f"{row['cpu']:.2f}",
            f"{float(row['cpu']) / call:.2f}",
            f"{float(row['cpu']) / reference:.3f}",
            f"{row['peak MiB']:.0f} MiB",
        )
    console.print(table)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


def forget() -> None:
    """Empty the caches of the accountant, so that a plan is the first one."""
    for cached in (pld._larger_epsilon, pld._distribution, pld._steps):
        cached.cache_clear()


def described(made) -> str:  # type: ignore[no-untyped-def]
    spent = min(x.proven_epsilon / x.epsilon for x in made.levels)
    noise = made.rounds[0].noise_multiplier
    return f"{len(made.levels)} levels, noise {noise:.3f}, every level spends at least {100 * spent:.2f} %"


if __name__ == "__main__":
    main()
