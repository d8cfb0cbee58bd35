"""Learning rates for a regression: the rule of `pdpsgd advise`, made for classes, and shares of it, on three tables.

    python bench/regression_rates.py

Prints R^2 on held-out rows for each share of the rule's rate, beside least squares without privacy. Seed 0.
"""

from __future__ import annotations

import warnings

import numpy as np
import torch
from sklearn.datasets import load_diabetes, make_friedman1, make_regression
from sklearn.linear_model import LinearRegression

import pdpsgd
from pdpsgd.models.networks import by_name, count_parameters
from pdpsgd.planning.advice import choose_setting, rate_for

SHARES = (1.0, 0.3, 0.1, 0.03)
TABLES = {
    "diabetes": (load_diabetes(return_X_y=True), (2.0, 8.0, 20.0)),
    "friedman": (make_friedman1(20_000, noise=1.0, random_state=0), (0.5, 2.0, 8.0)),
    "linear, 40 features": (
        make_regression(5_000, 40, n_informative=10, noise=20, random_state=1),
        (0.5, 2.0, 8.0),
    ),
}


def main() -> None:
    warnings.filterwarnings("ignore", message=".* people (has|have)")
    rng = np.random.default_rng(0)
    print(
        "| table | network | rate by the rule | R^2 at",
        " / ".join(f"{s:g}" for s in SHARES),
        "of it | least squares |",
    )
    print("|---|---|---|---|---|")
    for name, ((X, y), tiers) in TABLES.items():
        low, high = X.min(0), X.max(0)
        X = ((X - low) / (high - low) * 2 - 1).astype(np.float32)
        cut, limits = int(0.8 * len(X)), (float(y.min()), float(y.max()))
        budgets = pdpsgd.Budgets(rng.choice(tiers, cut, p=[0.3, 0.5, 0.2]))
        setting = choose_setting(budgets)
        plan = pdpsgd.plan(
            budgets,
            steps=setting.steps,
            batch_size=setting.batch_size,
            max_grad_norm=setting.max_grad_norm,
        )
        least = LinearRegression().fit(X[:cut], y[:cut]).score(X[cut:], y[cut:])
        for model in ("linear", "tabular"):
            found = []
            for share in SHARES:
                torch.manual_seed(0)
                network = by_name(model, input_shape=X.shape[1:], classes=1)
                rate = rate_for(plan, count_parameters(network))
                result = pdpsgd.fit(
                    network,
                    (X[:cut], y[:cut]),
                    budgets,
                    plan=plan,
                    learning_rate=share * rate,
                    task="regression",
                    label_range=limits,
                    test_data=(X[cut:], y[cut:]),
                    progress=False,
                    seed=0,
                )
                found.append(f"{result.evaluation.errors.r_squared:.3f}")
            print(f"| {name} | {model} | {rate:g} | {' / '.join(found)} | {least:.3f} |", flush=True)


if __name__ == "__main__":
    main()
