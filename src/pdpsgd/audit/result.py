"""What an audit found: measured beside proven, tier by tier, as values, as a table and as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pdpsgd.audit.canaries import Tier
from pdpsgd.audit.conformance import Conformance
from pdpsgd.audit.many_runs import ManyRunsBound
from pdpsgd.audit.membership import MembershipResult
from pdpsgd.audit.one_run import OneRunBound

if TYPE_CHECKING:
    from rich.table import Table

DIRAC, MISLABELED = "Dirac, white box", "mislabeled, white box"
NETWORK = "network, little noise"
"""The conformance test whose canaries have records of people."""


@dataclass(frozen=True)
class AuditRow:
    """One tier of the table.

    `measured` is the best lower bound of all attacks; `attack` names the one that gave it.
    """

    tier: Tier
    measured: float
    attack: str
    success: float | None
    auc: float | None
    true_positive_rate: float | None


@dataclass(frozen=True)
class AuditResult:
    """The outcome of an audit.

    Guarantee: if training keeps what the plan proves, the probability that any measured bound is above what is
    proven is at most 1 - `confidence`, and that any conformance test goes off is at most the sum of their
    stated rates. What is not claimed: that a low measured bound means little leaks; see docs/audit.md.
    """

    plan_digest: str
    mechanism: str
    tiers: tuple[Tier, ...]
    confidence: float
    one_run: Mapping[str, tuple[OneRunBound, ...]]
    many_runs: tuple[ManyRunsBound, ...]
    conformance: Mapping[str, Conformance]
    membership: tuple[MembershipResult, ...]
    settings: Mapping[str, Any]
    seconds: float | None

    @property
    def sensitive(self) -> bool:
        """Whether anything here was computed from people's records, which no plan accounts for."""
        return bool(self.membership) or set(self.one_run) != {DIRAC} or NETWORK in self.conformance

    def without_data(self) -> AuditResult:
        """Return what may be published: the attacks and tests that never touched people's records.

        Guarantee: depends on the plan, the canaries and the code only.
        """
        of_nobody = {name: found for name, found in self.conformance.items() if name != NETWORK}
        # Not even how long it took: that depends on how many records people hold.
        return replace(
            self, one_run={DIRAC: self.one_run[DIRAC]}, membership=(), conformance=of_nobody, seconds=None
        )

    @property
    def passed(self) -> bool:
        """Whether no alarm went off: no bound above what is proven, every conformance test silent."""
        return not self.alarms

    @property
    def alarms(self) -> tuple[str, ...]:
        """What speaks against the training, in words."""
        found = []
        for attack, bounds in self._bounds():
            found += [
                f"{attack}: tier {bound.tier.name} leaks at least epsilon {bound.measured:.3g}, "
                f"proven {bound.tier.proven:.3g}"
                for bound in bounds
                if bound.alarm
            ]
        for name, conformance in self.conformance.items():
            found += [
                f"{name}: {check.kind}{' of ' * bool(check.subject)}{check.subject} is {check.observed:.3g}, "
                f"planned {check.expected:.3g} (p-value {check.p_value:.1g})"
                for check in conformance.alarms
            ]
        return tuple(found)

    @property
    def rows(self) -> tuple[AuditRow, ...]:
        """The table, one row per tier."""
        membership = {found.tier.name: found for found in self.membership}
        rows = []
        for place, tier in enumerate(self.tiers):
            best = max(
                ((bounds[place], attack) for attack, bounds in self._bounds()),
                key=lambda one: one[0].measured,
            )
            attacked = membership.get(tier.name)
            rows.append(
                AuditRow(
                    tier=tier,
                    measured=best[0].measured,
                    attack=best[1],
                    success=best[0].success,
                    auc=None if attacked is None else attacked.auc,
                    true_positive_rate=None if attacked is None else attacked.true_positive_rates[0.01],
                )
            )
        return tuple(rows)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON and for the report page."""
        return {
            "version": 1,
            "sensitive": self.sensitive,
            "passed": self.passed,
            "alarms": list(self.alarms),
            "blind_tiers": list(self.underpowered_tiers),
            "confidence": self.confidence,
            "mechanism": self.mechanism,
            "plan": self.plan_digest,
            "rows": [
                {
                    "tier": row.tier.name,
                    "levels": list(row.tier.levels),
                    "promised": row.tier.promised,
                    "proven": row.tier.proven,
                    "delta": row.tier.delta,
                    "measured": row.measured,
                    "confidence": self.confidence,
                    "attack": row.attack,
                    "attack_success": row.success,
                    "auc": row.auc,
                    "true_positive_rate_at_1_percent": row.true_positive_rate,
                }
                for row in self.rows
            ],
            "one_run": {
                attack: [
                    {
                        "tier": bound.tier.name,
                        "canaries": bound.canaries,
                        "guesses": bound.guesses,
                        "correct": bound.correct,
                        "looks": bound.looks,
                        "measured": bound.measured,
                        "measured_if_gaussian": bound.gaussian,
                    }
                    for bound in bounds
                ]
                for attack, bounds in self.one_run.items()
            },
            "many_runs": [
                {
                    "tier": bound.tier.name,
                    "runs": bound.runs,
                    "true_positives": bound.true_positives,
                    "positives": bound.positives,
                    "false_positives": bound.false_positives,
                    "negatives": bound.negatives,
                    "measured": bound.measured,
                    "measured_if_gaussian": bound.gaussian,
                    "measured_within_family": bound.within_family,
                }
                for bound in self.many_runs
            ],
            "conformance": {name: found.to_dict() for name, found in self.conformance.items()},
            "membership": [found.to_dict() for found in self.membership],
            "settings": dict(self.settings),
            **({} if self.seconds is None else {"seconds": self.seconds}),
        }

    def table(self) -> Table:
        """Return the table for people to read."""
        table = empty_table(
            "What people get, as epsilon: at most what is proven, at least what was measured",
            "right: share of the attack's guesses that were right"
            + "; AUC, found: membership inference, found at 1 % false alarms" * bool(self.membership),
        )
        columns = ["tier", "promised", "proven", "measured", "confidence", "attack", "right"]
        for column in columns + ["AUC", "found"] * bool(self.membership):
            table.add_column(column, no_wrap=column != "attack", min_width=11 if column == "attack" else None)
        for row in self.rows:
            cells = [
                row.tier.name,
                f"{row.tier.promised:.4g}",
                "nothing" if row.tier.proven is None else f"{row.tier.proven:.4g}",
                f"{row.measured:.3g}",
                f"{self.confidence:.0%}",
                row.attack,
                "" if row.success is None else f"{row.success:.0%}",
            ]
            if self.membership:
                cells.append("" if row.auc is None else f"{row.auc:.3f}")
                cells.append("" if row.true_positive_rate is None else f"{row.true_positive_rate:.2%}")
            table.add_row(*cells)
        return table

    def summary(self) -> str:
        """Return the outcome in a few sentences."""
        lines = list(self.alarms) or ["No alarm: nothing measured is above what is proven."]
        for name, found in self.conformance.items():
            verdict = "does what the plan says" if found.passed else "DOES NOT do what the plan says"
            lines.append(
                f"{name}: training {verdict} ({len(found.checks)} checks, false alarms in "
                f"{found.false_alarm_rate:g} of correct runs)."
            )
        for attack, bounds in self.one_run.items():
            if attack != DIRAC:
                shown = ", ".join(f"{bound.measured:.3g} in tier {bound.tier.name}" for bound in bounds)
                lines.append(f"{attack}, on the data: at least epsilon {shown}.")
        if self.underpowered_tiers:
            lines.append(f"Too weak to notice a doubled rate in tier {', '.join(self.underpowered_tiers)}.")
        return "\n".join(lines)

    @property
    def underpowered_tiers(self) -> tuple[str, ...]:
        """Tiers in which no conformance test would notice a doubled rate."""
        blind = [set(found.underpowered_tiers) for found in self.conformance.values() if found.canaries]
        return tuple(tier.name for tier in self.tiers if all(tier.name in names for names in blind))

    def _bounds(self) -> list[tuple[str, tuple[OneRunBound, ...] | tuple[ManyRunsBound, ...]]]:
        found: list[tuple[str, tuple[OneRunBound, ...] | tuple[ManyRunsBound, ...]]] = [*self.one_run.items()]
        return [*found, ("many runs", self.many_runs)] if self.many_runs else found


def empty_table(title: str, caption: str) -> Table:
    """Return a table of an audit, without columns yet."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    return Table(
        box=SIMPLE_HEAD,
        collapse_padding=True,
        pad_edge=False,
        title=title,
        title_justify="left",
        caption=caption,
        caption_justify="left",
    )
