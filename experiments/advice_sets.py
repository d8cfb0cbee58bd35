"""Public data sets for the rules of `pdpsgd advise`: those it is calibrated on, and others that it has not seen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from experiments.kept_features import kept_features
from pdpsgd.errors import fail

Array = npt.NDArray[Any]


@dataclass(frozen=True, eq=False)
class PublicSet:
    """Records to train on and to test on, and the number of classes."""

    name: str
    inputs: torch.Tensor
    targets: torch.Tensor
    test_inputs: torch.Tensor
    test_targets: torch.Tensor

    @property
    def classes(self) -> int:
        """The number of classes."""
        return int(self.targets.max()) + 1

    @property
    def majority(self) -> float:
        """Accuracy of always naming the most frequent class of the test people."""
        return float(torch.bincount(self.test_targets).max()) / len(self.test_targets)


@dataclass(frozen=True)
class Entry:
    """How a set is made, and whether the rules were calibrated on it."""

    make: Callable[[str, Path], PublicSet]
    seen: bool


def load(name: str, folder: Path) -> PublicSet:
    """Load a set by name; `folder` has the files of those that no package carries."""
    if name not in SETS:
        fail(f"Expected one of {', '.join(SETS)}. Got {name!r}.")
    return SETS[name].make(name, folder)


def synthetic_table(
    people: int, features: int, *, classes: int = 2, rare: float = 0.5, sharpness: float = 3.0, seed: int = 0
) -> tuple[Array, Array]:
    """Make a table: half of the features numbers, half flags; labels follow some of them, with products among them.

    Args:
        people: Number of rows.
        features: Number of columns.
        classes: Number of classes.
        rare: Share of the second class, where there are two.
        sharpness: How sure labels are, given the features.
        seed: Of everything.

    Returns:
        Features in [-1, 1] and labels.
    """
    random = np.random.default_rng(seed)
    x = random.uniform(-1, 1, (people, features)).astype(np.float32)
    flags = features // 2
    x[:, :flags] = (x[:, :flags] > random.uniform(-0.8, 0.8, flags)).astype(np.float32)
    scores = x @ random.normal(size=(features, classes)) / np.sqrt(features / 4)
    pairs = random.integers(0, features, (features, 2))
    products = x[:, pairs[:, 0]] * x[:, pairs[:, 1]]
    scores += 0.5 * products @ random.normal(size=(features, classes)) / np.sqrt(features / 4)
    scores = sharpness * (scores - scores.mean(0)) / scores.std(0) + random.gumbel(size=(people, classes))
    if classes == 2:
        margin = scores[:, 1] - scores[:, 0]
        return x, (margin > np.quantile(margin, 1 - rare)).astype(np.int64)
    return x, scores.argmax(1).astype(np.int64)


def _synthetic(people: int, features: int, **how: Any) -> Callable[[str, Path], PublicSet]:
    def make(name: str, folder: Path) -> PublicSet:
        x, y = synthetic_table(people + 5000, features, **how)
        return _parted(name, x, y, test=np.arange(people + 5000) >= people)

    return make


def _scikit_learn(name: str, folder: Path) -> PublicSet:
    from sklearn import datasets

    if name.startswith("digits"):
        x, y = datasets.load_digits(return_X_y=True)
        x = x / 8 - 1
    else:
        x, y = datasets.load_breast_cancer(return_X_y=True)
        high = 10 ** np.ceil(np.log10(x.max(0)))  # public enough for an experiment: powers of ten
        x = np.clip(4 * x / high - 1, -1, 1)
    return _parted(name, x, y, test=_every_fifth(len(y)))


def _scattering(name: str, folder: Path) -> PublicSet:
    from pdpsgd.data.benchmarks.loading import load as load_benchmark
    from pdpsgd.models.scattering import scattering_features

    def compute() -> dict[str, torch.Tensor]:
        data = load_benchmark(name.removesuffix("-scattering"), folder=folder)
        return {
            "x": scattering_features(data.train_inputs[:20_000]).flatten(1).half(),
            "y": data.train_targets[:20_000],
            "test_x": scattering_features(data.test_inputs[:5_000]).flatten(1).half(),
            "test_y": data.test_targets[:5_000],
        }

    kept = kept_features(f"{name}-20000", compute)
    return PublicSet(name, kept["x"].float(), kept["y"], kept["test_x"].float(), kept["test_y"])


def _table(file: str, label: str, *, ignored: tuple[str, ...] = (), header: bool = True) -> Any:
    def make(name: str, folder: Path) -> PublicSet:
        import polars

        from pdpsgd.data.drafting import draft_schema
        from pdpsgd.data.tabular import encode

        if not (folder / file).is_file():
            fail(
                f"Expected {file} in {str(folder)!r} (docs/results/advice.md says where it is from). Got none."
            )
        frame = polars.read_csv(folder / file, has_header=header, infer_schema_length=None).drop(ignored)
        encoded = encode(frame, draft_schema(frame, label=label))
        return _parted(name, encoded.inputs.numpy(), encoded.targets.numpy(), test=_every_fifth(len(frame)))

    return make


def _every_fifth(rows: int) -> Array:
    return np.random.default_rng(0).permutation(rows) % 5 == 0


def _parted(name: str, x: Array, y: Array, *, test: Array) -> PublicSet:
    inputs, targets = torch.tensor(x, dtype=torch.float32), torch.tensor(y, dtype=torch.int64)
    train = torch.from_numpy(~test)
    return PublicSet(name, inputs[train], targets[train], inputs[~train], targets[~train])


SETS = {
    "digits": Entry(_scikit_learn, seen=True),
    "breast-cancer": Entry(_scikit_learn, seen=True),
    "synthetic-1000": Entry(_synthetic(1_000, 10, seed=1), seen=True),
    "synthetic-4000": Entry(_synthetic(4_000, 30, seed=2), seen=True),
    "synthetic-20000": Entry(_synthetic(20_000, 60, seed=3), seen=True),
    "synthetic-20000-rare": Entry(_synthetic(20_000, 40, rare=0.08, seed=4), seen=True),
    "synthetic-50000-classes": Entry(_synthetic(50_000, 40, classes=6, seed=5), seen=True),
    "fashion-mnist-scattering": Entry(_scattering, seen=True),
    "adult": Entry(_table("adult.csv", "income-per-year"), seen=True),
    "census": Entry(_table("census_income_1994_1995_train.csv", "column_41", header=False), seen=True),
    "german-credit": Entry(_table("german_credit.csv", "credit_risk"), seen=True),
    "insurance": Entry(_table("HI.csv", "whi", ignored=("", "wght")), seen=False),
    "mortgages": Entry(_table("Hdma.csv", "deny", ignored=("",)), seen=False),
    "diamonds": Entry(_table("diamonds.csv", "cut", ignored=("",)), seen=False),
    "recidivism": Entry(_table("compas.csv", "two_year_recid"), seen=False),
    "mnist-scattering": Entry(_scattering, seen=False),
    "synthetic-200000-rare": Entry(_synthetic(200_000, 50, rare=0.06, seed=6), seen=False),
}
"""All sets; those that were seen served to calibrate the rules, the others only to test them."""
