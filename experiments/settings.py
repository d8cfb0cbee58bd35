"""One training run as plain data: whose budgets, which system, how it is trained."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, replace
from typing import Any

from pdpsgd.budgets.budgets import Budgets

VALIDATION_PEOPLE = 5_000


@dataclass(frozen=True)
class Population:
    """Who allows what: the paper's exponential distribution over groups, or tiers as (epsilon, share)."""

    k: float = 0.0
    lowest: float = 0.5
    highest: float = 1.0
    groups: int = 20
    tiers: tuple[tuple[float, float], ...] = ()
    delta: float = 1e-5

    def budgets(self, people: int, *, shuffle: int) -> Budgets:
        """Return budgets of this many people; `shuffle` decides who has which."""
        if self.tiers:
            return Budgets.from_tiers(dict(self.tiers), people, self.delta, shuffle=shuffle)
        return Budgets.exponential(
            people,
            k=self.k,
            interval=(self.lowest, self.highest),
            groups=self.groups,
            delta=self.delta,
            shuffle=shuffle,
        )


@dataclass(frozen=True)
class Recipe:
    """How a model is trained.

    `learning_rate` is for gradients divided by the clipping norm, so that the two can be chosen apart: the
    optimizer gets learning_rate / max_grad_norm. With a `noise_multiplier` the plan finds the steps. With
    several `views`, an example goes through the network that often, each time moved by up to two pixels. The
    first weights are random ones, or with `start` "drawn" those that `start_from_synthetic` makes of them. The
    `network` is the paper's, or that of IDP-SGD's public code ("idp").
    """

    steps: int | None = 1000
    batch_size: float = 1024
    learning_rate: float = 2.0
    max_grad_norm: float = 0.1
    activation: str = "tanh"
    features: str = "pixels"
    momentum: float = 0.0
    schedule: str = "cosine"
    weight_average: float | None = None
    noise_multiplier: float | None = None
    rounds: int | None = None
    views: int = 1
    start: str = "random"
    network: str = "paper"


PAPERS_RECIPE = Recipe(
    steps=None,
    batch_size=64,
    learning_rate=0.05,
    max_grad_norm=1.0,
    activation="relu",
    schedule="constant",
    noise_multiplier=1.3,
    rounds=10,
)


@dataclass(frozen=True)
class Setting:
    """One cell of a table, or one point of a figure; a run is a setting and a seed."""

    dataset: str
    system: str
    recipe: Recipe
    population: Population = Population()
    bookkeeping: str = "sound"
    accountant: str = "pld"
    weights: tuple[float, float] | None = None
    threshold: float | None = None
    split: str = "test"
    loss: str | None = None
    reading: str | None = None

    def quick(self) -> Setting:
        """Return the same with few steps, from random weights: shows that everything runs, and nothing else."""
        steps = None if self.recipe.steps is None else max(10, self.recipe.steps // 50)
        batch_size = min(self.recipe.batch_size, 256)
        recipe = replace(self.recipe, steps=steps, batch_size=batch_size, start="random")
        if steps is None:
            recipe = replace(recipe, steps=50, noise_multiplier=None, rounds=3)
        return replace(self, recipe=recipe)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        plain: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        # As in records from before there were these.
        if self.recipe.views == 1:
            del plain["recipe"]["views"]
        if self.recipe.start == "random":
            del plain["recipe"]["start"]
        if self.recipe.network == "paper":
            del plain["recipe"]["network"]
        for name in ("loss", "reading"):
            if plain[name] is None:
                del plain[name]
        return plain

    @classmethod
    def from_dict(cls, plain: dict[str, Any]) -> Setting:
        """Invert `to_dict`."""
        population = dict(plain["population"])
        population["tiers"] = tuple((float(e), float(share)) for e, share in population["tiers"])
        weights = plain["weights"]
        return cls(
            **{
                **plain,
                "recipe": Recipe(**plain["recipe"]),
                "population": Population(**population),
                "weights": None if weights is None else (float(weights[0]), float(weights[1])),
            }
        )

    def key(self, seed: int) -> str:
        """A fingerprint of the run: the same run is never computed twice."""
        text = json.dumps([self.to_dict(), seed], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]
