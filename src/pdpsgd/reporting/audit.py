"""The audit on the page of a run: what attacks could show, beside what is proven."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pdpsgd.reporting import parts
from pdpsgd.reporting.charts.audit import proven_against_measured

EXPLAINED = {
    "mechanism": "Sampling, clipping and noise of the whole run",
    "mechanism, little noise": "Sampling and clipping at a tenth of the noise, where faults show more clearly",
    "noise": "The noise itself, in a run without records",
}
"""What the conformance tests that touch nobody's record are about."""


def audit_parts(audit: Mapping[str, Any]) -> list[str]:
    """Return what `audit.json` of a run folder says. Nothing in that file was computed from people's records."""
    passed = "No alarm went off." if audit["passed"] else "An alarm went off: " + " ".join(audit["alarms"])
    rows = [
        (
            str(row["tier"]),
            _number(row["promised"]),
            _number(row["proven"]),
            _number(row["measured"]),
            str(row["attack"] or ""),
        )
        for row in audit["rows"]
    ]
    head = ("tier", "promised, at most", "proven, at most", "measured, at least", "strongest attack")
    shown = parts.table(head, rows, caption="Epsilon promised, proven and measured, tier by tier")
    followed = [
        f"{EXPLAINED[name]}: {'as the plan says' if found['passed'] else 'NOT as the plan says'} "
        f"({len(found['checks'])} checks; a false alarm in {found['false_alarm_rate']:g} of correct runs)."
        for name, found in (audit.get("conformance") or {}).items()
        if name in EXPLAINED
    ]
    blind = audit.get("blind_tiers")
    if blind:
        followed.append(
            f"Too few canaries to notice a doubled sampling rate in tier {', '.join(map(str, blind))}."
        )
    return [
        parts.paragraph(
            f"Made-up people were put on the list and the training was attacked, at {audit['confidence']:.0%} "
            f"confidence. {passed} What is measured is a lower bound: the truth lies between it and what is proven, "
            "and a small figure does not show that little leaks."
        ),
        parts.chart(
            proven_against_measured(dict(audit)),
            title="Proven and measured",
            describe="For each tier of people: epsilon promised, proven, and shown by attacks.",
            data=shown,
        ),
        *([parts.paragraph("Does training follow its plan? Tested on made-up people:")] if followed else []),
        *([parts.bullets(followed)] if followed else []),
        parts.paragraph("What attacks on people's own records showed is not public, and not on this page."),
    ]


def _number(value: float | str | None) -> str:
    return "none" if value is None else f"{float(value):.3g}"
