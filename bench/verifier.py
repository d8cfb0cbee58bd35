"""The verifier against the planner against closed forms, on thousands of random plans, participation included.

    python bench/verifier.py [--plans 10000] [--seed 7] [--record FILE.jsonl] [--summary FILE.json]

Nine of ten plans are one person's rounds, drawn as the tests draw them (`tests/planning/closed_forms.py`): full
batches, participation, one subsampled step with and without participation, each with a closed form for both directions,
and several rounds without one. The verifier's epsilon is compared with the closed form, or with the planner's
accountant, which takes longer and is also asked for one plan in four. One plan in twenty is held against
dp-accounting's own accountant, called directly, where it knows the rounds; for one in four, a promise slightly below
the closed form has to be refused. Every tenth plan is made by `pdpsgd.plan` for random budgets and a random mechanism,
and has to be verified.

Every plan adds a line to the record (docs/results/verifier.jsonl), and a run that was stopped, or is asked for more
plans, goes on where it was; where it begins, a line says by which code (a digest of accounting and planning), seed and
versions. The summary has counts and the lowest and highest ratios. "Below" counts ratios under
1 by more than rounding: there must be none.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import math
import sys
import time
import warnings
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import dp_accounting
from dp_accounting import pld

from pdpsgd import Budgets, Level, PdpsgdError, Plan, PromiseBroken, Round, plan
from pdpsgd.accounting.history import History
from pdpsgd.accounting.registry import accountant
from pdpsgd.planning.mechanisms.registry import MECHANISMS
from pdpsgd.planning.verification import epsilon_upper_bound
from tests.planning.closed_forms import Case, draw

ROOT = Path(__file__).resolve().parents[1]
ROUNDING, SMALL = 1e-9, 1e-5  # ratios are of epsilon + SMALL, so that nearly nothing over nothing counts as 1


def examine(seed: int, number: int) -> dict[str, Any]:
    """Draw plan `number` and compare."""
    rng = np.random.default_rng([seed, number])
    start = time.process_time()
    found = _planned(rng) if number % 10 == 9 else _stated(draw(rng), number)
    return {"number": number, **found, "seconds": round(time.process_time() - start, 3)}


def _stated(case: Case, number: int) -> dict[str, Any]:
    verified = _answer(lambda: epsilon_upper_bound(case.history, case.delta))
    found = {"kind": case.kind, "verifier": verified, "exact": case.epsilon}
    if case.epsilon is None or number % 4 == 0:
        found["planner"] = _answer(lambda: accountant("pld").epsilon(case.history, case.delta))
    if number % 20 == 0 and all(e.participation == 1 for e in case.history):
        found["dp-accounting"] = _answer(lambda: _directly(case.history, case.delta))
    if case.epsilon is not None and case.epsilon > 1e-3 and number % 4 == 1:
        found["refused below"] = _is_refused(case, case.epsilon * (1 - 1e-6))
    return found


def _answer(compute: Callable[[], float]) -> float | str:
    try:
        return float(compute())
    except PdpsgdError:
        return "refused"
    except Exception as error:
        return f"raw {type(error).__name__}"


def _directly(history: History, delta: float) -> float:
    events = [
        dp_accounting.SelfComposedDpEvent(
            dp_accounting.PoissonSampledDpEvent(
                e.sample_rate, dp_accounting.GaussianDpEvent(e.noise_multiplier)
            ),
            e.steps,
        )
        for e in history
    ]
    account = pld.PLDAccountant(value_discretization_interval=1e-3)
    return float(account.compose(dp_accounting.ComposedDpEvent(events)).get_epsilon(delta))


def _is_refused(case: Case, promise: float) -> bool:
    rounds = tuple(
        Round(
            e.steps,
            e.noise_multiplier,
            1000 * e.participation * e.sample_rate,
            (e.participation,),
            (e.sample_rate,),
            (1.0,),
        )
        for e in case.history
    )
    try:
        Plan("pdp-sgd-exact", (Level(promise, case.delta, 1000),), rounds).verify()
    except PromiseBroken:
        return True
    return False


def _planned(rng: np.random.Generator) -> dict[str, Any]:
    """Plan for two to five tiers, and verify."""
    tiers = np.exp(rng.uniform(math.log(0.2), math.log(8), rng.integers(2, 6)))
    people = int(rng.integers(200, 2000))
    mechanism = str(rng.choice(sorted(MECHANISMS)))
    budgets = Budgets(rng.choice(tiers, people), float(np.exp(rng.uniform(math.log(1e-8), math.log(1e-4)))))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            made = plan(
                budgets,
                mechanism=mechanism,
                steps=int(rng.integers(10, 400)),
                batch_size=float(rng.uniform(0.01, 0.3)) * people,
            )
    except PdpsgdError:
        return {"kind": "planned", "mechanism": mechanism, "verified": "no plan"}
    try:
        found = made.verify()
    except PdpsgdError:
        return {"kind": "planned", "mechanism": mechanism, "verified": "refused"}
    claims = [level.proven_epsilon or 0.0 for level in made.levels]
    ratios = [(e + SMALL) / (c + SMALL) for e, c in zip(found.epsilon, claims, strict=True)]
    return {
        "kind": "planned",
        "mechanism": mechanism,
        "verified": "kept",
        "ratios": [min(ratios), max(ratios)],
    }


def begun(number: int, seed: int) -> dict[str, Any]:
    """Say what makes the lines from this plan on."""
    rooms = [ROOT / "src/pdpsgd" / room for room in ("accounting", "planning")]
    code = hashlib.sha256(
        "".join(_code(file) for room in rooms for file in sorted(room.rglob("*.py"))).encode()
    )
    versions = {name: version(name) for name in ("pdpsgd", "dp-accounting", "numpy", "scipy")}
    return {"from plan": number, "seed": seed, "code": code.hexdigest()[:12], "versions": versions}


def _code(file: Path) -> str:
    """The file without comments and docstrings."""
    tree = ast.parse(file.read_text())
    for node in ast.walk(tree):
        for statements in (getattr(node, field, None) for field in ("body", "orelse", "finalbody")):
            if isinstance(statements, list):
                statements[:] = [some for some in statements if not _is_text(some)]
    return ast.dump(tree)


def _is_text(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def read(record: Path, seed: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return what a record says of its parts, and its plans; plans of another seed would not go on with them."""
    lines = [json.loads(line) for line in record.read_text().splitlines()] if record.exists() else []
    parts = [line for line in lines if "from plan" in line]
    plans = [line for line in lines if "number" in line]
    if any(part["seed"] != seed for part in parts) or [line["number"] for line in plans] != [
        *range(len(plans))
    ]:
        sys.exit(f"Expected a record of plans 0, 1, ... of seed {seed}. Got another one: {record}.")
    return parts, plans


def summary(parts: list[dict[str, Any]], lines: list[dict[str, Any]]) -> dict[str, Any]:
    """Count, and find the extremes."""
    kinds = {}
    for kind in sorted({line["kind"] for line in lines}):
        mine = [line for line in lines if line["kind"] == kind]
        found: dict[str, Any] = {"plans": len(mine)}
        if kind == "planned":
            for outcome in sorted({line["verified"] for line in mine}):
                found[outcome] = sum(line["verified"] == outcome for line in mine)
            both = [ratio for line in mine for ratio in line.get("ratios", ())]
            found["verifier / planner"] = _extremes(both)
        else:
            answers = [x for line in mine for x in (line["verifier"], line.get("planner"))]
            found["refused"] = sum(x == "refused" for x in answers)
            found["raw errors"] = sum(isinstance(x, str) and x.startswith("raw") for x in answers)
            found["infinite"] = sum(x == math.inf for x in answers)
            for one, other in (
                ("verifier", "exact"),
                ("planner", "exact"),
                ("verifier", "planner"),
                ("verifier", "dp-accounting"),
            ):
                ratios = _ratios(mine, one, other)
                if ratios:
                    found[f"{one} / {other}"] = _extremes(ratios)
                    if other == "exact":
                        found[f"{one} below"] = sum(ratio < 1 - ROUNDING for ratio in ratios)
            promised = [line["refused below"] for line in mine if "refused below" in line]
            found["promises below the closed form"] = {"tried": len(promised), "refused": sum(promised)}
        kinds[kind] = found
    seconds = sorted(line["seconds"] for line in lines)
    return {
        "command": f"python bench/verifier.py --plans {len(lines)} --seed {parts[0]['seed']}",
        "parts": parts,
        "plans": len(lines),
        "seconds of a plan (processor): median, largest": [seconds[len(seconds) // 2], seconds[-1]],
        "kinds": kinds,
    }


def _ratios(lines: list[dict[str, Any]], one: str, other: str) -> list[float]:
    pairs = [(line.get(one), line.get(other)) for line in lines]
    numbers = [(a, b) for a, b in pairs if isinstance(a, float) and isinstance(b, float)]
    return [(a + SMALL) / (b + SMALL) for a, b in numbers if math.isfinite(a) and math.isfinite(b)]


def _extremes(ratios: list[float]) -> list[float]:
    return (
        [round(min(ratios), 9), round(float(np.median(ratios)), 9), round(max(ratios), 9)] if ratios else []
    )


def main() -> None:
    """Go on with the record, and write the summary."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--plans", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--record", type=Path, default=ROOT / "docs/results/verifier.jsonl")
    parser.add_argument("--summary", type=Path)
    given = parser.parse_args()
    parts, lines = read(given.record, given.seed)
    start = time.monotonic()
    with given.record.open("a") as record:

        def add(line: dict[str, Any], to: list[dict[str, Any]]) -> None:
            to.append(line)
            record.write(json.dumps(line) + "\n")
            record.flush()

        part = begun(len(lines), given.seed)
        if len(lines) < given.plans and (not parts or part != {**parts[-1], "from plan": len(lines)}):
            add(part, parts)
        for number in range(len(lines), given.plans):
            add(examine(given.seed, number), lines)
            if number % 50 == 49 or number + 1 == given.plans:
                seconds = time.monotonic() - start
                print(f"\r{number + 1:,} of {given.plans:,} plans, {seconds:,.0f} s", end="", file=sys.stderr)
    text = json.dumps(summary(parts, lines), indent=1)
    print(f"\n{text}")
    if given.summary is not None:
        given.summary.write_text(text + "\n")


if __name__ == "__main__":
    main()
