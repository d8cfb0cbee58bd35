"""What a page says of all runs on the same people: allowed, spent before, by this run, and left."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from pdpsgd.reporting import charts, parts
from pdpsgd.reporting.charts import PAGE


def over_time_parts(ledger: Mapping[str, Any] | None) -> list[str]:
    """Say what a run took of what its people allow over all runs, by tier; from consents and charges alone."""
    if ledger is None:
        return [
            parts.paragraph(
                "This run is in no ledger. What is proven here is of this run alone: another run on the same people "
                "spends more, unless its plan counts this one as history."
            )
        ]
    tiers = ledger["tiers"]
    rows = [
        (
            name,
            f"{tier['people']:,}",
            _epsilon(tier["spent_before"]),
            _epsilon(tier["this_run"]),
            _epsilon(tier["left"]),
            _share(tier),
        )
        for name, tier in zip(charts.tier_names(tiers), tiers, strict=True)
    ]
    head = (
        "allow over all runs",
        "people",
        "spent before (mean)",
        "this run takes (mean)",
        "left after it (mean)",
        "spent in all, of mu²",
    )
    said = [
        parts.paragraph(
            "Each person said how much privacy loss (epsilon, at a small probability delta) they allow over all runs "
            "on them together, however each run is chosen. Smaller is more private. A ledger keeps what everybody "
            f"allows and what every run has taken; this is run {ledger['run']} in it. Epsilons are means over a tier, "
            "at its delta, and do not add up: their mu² do. A run is charged in full before it starts; who was sampled "
            "changes nothing, and is written nowhere."
        ),
        parts.chart(
            charts.shares_left_chart(charts.share_rows(_finite(tiers)), PAGE),
            title="Of what people allow over all runs, on average",
            describe=f"Spent before, by this run, and left, for {len(tiers)} tiers.",
        )
        if _finite(tiers)
        else "",
        parts.table(head, rows, caption="Over all runs, by tier (epsilon)"),
        parts.paragraph(
            "The ledger's head when this run began. A copy of the ledger that lacks it is older, or another:"
        ),
        parts.code(f"pdpsgd ledger check --head {ledger['head']}"),
    ]
    return [part for part in said if part]


def _share(tier: Mapping[str, Any]) -> str:
    """Say how much of what is allowed is spent; whoever has lowered that, or withdrawn, may have spent more."""
    spent = tier["share_before"] + tier["share_this_run"]
    if float(tier["epsilon"]) == 0:
        return "nothing is allowed now"
    return f"{spent:.0%}" if spent <= 1 else "more than is allowed now"


def _finite(tiers: list[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [tier for tier in tiers if math.isfinite(float(tier["epsilon"])) and tier["epsilon"] > 0]


def _epsilon(value: float | str) -> str:
    return "no limit" if math.isinf(float(value)) else f"{float(value):.3g}"
