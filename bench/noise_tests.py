"""The tests of the noise themselves: alarms on sound noise, and how often each planted fault is found.

Noise of a hundred steps and 2,410 numbers in four tensors, as of a small network, drawn afresh each time.

    python bench/noise_tests.py --out docs/results/audit/noise_tests.json
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pdpsgd.audit.conformance import FALSE_ALARM_RATE, Check
from pdpsgd.audit.noise_tests import NoiseSample, noise_checks

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "audit"))
import faults

SIZES = {"0.weight": 2048, "0.bias": 32, "2.weight": 320, "2.bias": 10}
STEPS = 100
Fault = Callable[[int, np.ndarray], np.ndarray]
FAULTS: dict[str, Callable[[], Fault]] = {
    "noise used for two steps": faults.used_for_two_steps,
    "noise used once more": faults.used_again_once,
    "telescoping": faults.telescoping,
    "ten numbers shared with the next step": faults.ten_numbers_of_the_last_step,
    "ten numbers shared between layers": lambda: faults.shared_between_layers,
    "a layer copied from anywhere": lambda: faults.a_layer_copied_from_anywhere,
    "variance alternating by 5 %": lambda: faults.alternating_variance,
    "unsteady variance": lambda: faults.unsteady_variance,
    "uneven layers": lambda: faults.uneven_layers,
    "sixty directions for a hundred steps": lambda: faults.few_directions,
    "Student's t, 10 degrees": lambda: faults.student_10,
    "tails cut at 4": lambda: faults.tails_cut_at_4,
    "rounded to halves": lambda: faults.rounded_to_halves,
    "standard deviation 2.5 % too small": lambda: lambda step, flat: 0.975 * flat,
    "standard deviation 1 % too small": lambda: lambda step, flat: 0.99 * flat,
}


def drawn(generator: np.random.Generator, fault: Fault | None) -> tuple[Check, ...]:
    sample = NoiseSample(tuple(SIZES))
    for step in range(STEPS):
        flat = generator.standard_normal(sum(SIZES.values()))
        flat = flat if fault is None else np.ascontiguousarray(fault(step, flat))
        sample.add(torch.from_numpy(flat).split(list(SIZES.values())), standard_deviation=1.0)
    return noise_checks(sample)


def sound(runs: int, generator: np.random.Generator) -> Iterator[float]:
    """Yield the smallest p-value of each run, times the number of checks: an alarm at every rate above."""
    for _ in range(runs):
        checks = drawn(generator, None)
        yield len(checks) * min(check.p_value for check in checks)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=300, help="of sound noise")
    parser.add_argument("--repeats", type=int, default=10, help="of each fault")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    generator = np.random.default_rng(options.seed)
    smallest = list(sound(options.runs, generator))
    power = {}
    for name, make in FAULTS.items():
        found = 0
        for _ in range(options.repeats):
            checks = drawn(generator, make())
            found += any(check.p_value <= FALSE_ALARM_RATE / len(checks) for check in checks)
        power[name] = found
    record: dict[str, Any] = {
        "seed": options.seed,
        "sound runs": options.runs,
        "alarms at a stated rate of": {
            f"{r:g}": sum(p <= r for p in smallest) for r in (0.5, 0.1, 0.05, 0.01, 1e-3)
        },
        "repeats of each fault": options.repeats,
        "found at 0.001": power,
    }
    text = json.dumps(record, indent=1)
    print(text)
    if options.out is not None:
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
