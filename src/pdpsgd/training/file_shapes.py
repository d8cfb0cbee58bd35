"""The shapes of the JSON files of a run folder, as far as their readers count on them.

Versions differ in what they write beside it, and nothing is asked of that.
"""

from __future__ import annotations

from pdpsgd.budgets.files import ANY, Each, Nullable, OneOf, Optional, Range
from pdpsgd.planning.verdict import EXCEPT, HOLDS, NOT_FOR_RELEASE

_SHARE = Range(0, 1)
_EPSILON = Range(0, infinite=True)
_COUNTED = {"accuracy": _SHARE, "people": int}
_ERRORS = {"rmse": _EPSILON, "mae": _EPSILON, "r_squared": Nullable(Range(most=1)), "people": int}

ENCODER = {
    "name": str,
    "max_tokens": Range(1, whole=True),
    "pooling": str,
    "digest": str,
    "finetune": Optional(OneOf(("lora", "last-layer"))),
}
"""What read the texts, with adapters in it or without."""
SETTINGS = {
    "version": Optional(str),
    "data": Optional(str),
    "date": Optional(str),
    "purpose": Optional(str),
    "operator": Optional(str),
    "contact": Optional(str),
    "classes": Optional([str]),
    "notes": Optional([str]),
    "sources": Optional(Each(str)),
    "task": Optional(str),
    "label": Optional(str),
    "label_range": Optional([Range()]),
    "encoder": Optional(ENCODER),
    "started_from": Optional({"name": str, "sha256": str}),
    "plan": Optional(str),
    "seed": Optional(int),
    "secure": Optional(bool),
    "model": Optional(str),
    "activation": Optional(str),
    "preset": Optional(str),
    "augment": Optional(str),
    "learning_rate": Optional(Range(0)),
    "optimizer": Optional(str),
    "optimizer_options": Optional(Each(ANY)),
    "momentum": Optional(Range()),
    "weight_decay": Optional(Range()),
    "schedule": Optional(str),
    "max_physical_batch_size": Optional(Range(1, whole=True)),
    "records_per_person": Optional(Range(1, whole=True)),
}
RESULT = {
    "verdict": Optional(
        {
            "outcome": OneOf((HOLDS, EXCEPT, NOT_FOR_RELEASE)),
            "text": str,
            "reasons": [{"sentence": str}],
            "assumed": Optional([str]),
            "beside": Optional([str]),
        }
    ),
    "evaluation": Optional(
        {
            "accuracy": Optional(_SHARE),
            "accuracy_per_person": Optional(_SHARE),
            "balanced_accuracy": Optional(_SHARE),
            "auc": Optional(_SHARE),
            "majority": Optional(_SHARE),
            "people": int,
            "by_tier": Optional(Each(_COUNTED)),
            "by_class": Optional(Each(_COUNTED)),
            "probabilities": Optional(
                {
                    "log_loss": Range(0),
                    "calibration_error": _SHARE,
                    "bins": [{"said": _SHARE, "found": _SHARE, "records": int}],
                }
            ),
            "errors": Optional(_ERRORS),
            "errors_by_tier": Optional(Each(_ERRORS)),
        }
    ),
    "calibration": Optional({"temperature": Range(0), "bias": [Range()], "fitted_on": str}),
    "parameters": Optional(int),
    "levels": Optional([Each(ANY)]),
    "release_note": Optional(str),
    "versions": Optional(Each(str)),
    "ledger": Optional(
        {
            "id": str,
            "run": int,
            "head": str,
            "tiers": [
                {
                    "epsilon": _EPSILON,
                    "delta": _SHARE,
                    "people": int,
                    "spent_before": _EPSILON,
                    "this_run": _EPSILON,
                    "left": _EPSILON,
                    "share_before": Range(0),
                    "share_this_run": Range(0),
                }
            ],
            "levels": Optional([{"allows": [_EPSILON]}]),
        }
    ),
}
COMMAND = {
    "data": str,
    "options": Each(ANY),
    "files": Each({"path": str, "sha256": Nullable(str)}),
    "versions": Each(str),
}
RESERVATION = {"ledger": str, "token": str}
HISTORY = {
    "step": int,
    "test_accuracy": Optional(_SHARE),
    "by_tier": Optional(Each(_SHARE)),
    "test_loss": Optional(ANY),
    "test_rmse": Optional(_EPSILON),
    "rmse_by_tier": Optional(Each(_EPSILON)),
}
PUBLIC_TESTS = ("mechanism", "mechanism, little noise", "noise")
"""Conformance tests of an audit that touch nobody's record."""
_CONFORMANCE = {"passed": bool, "false_alarm_rate": _SHARE, "checks": [ANY]}
AUDIT = {
    "plan": Optional(str),
    "passed": bool,
    "alarms": [str],
    "confidence": _SHARE,
    "blind_tiers": Optional([str]),
    "conformance": Optional({name: Optional(_CONFORMANCE) for name in PUBLIC_TESTS}),
    "rows": [
        {
            "tier": str,
            "promised": _EPSILON,
            "proven": Nullable(_EPSILON),
            "measured": Nullable(_EPSILON),
            "attack": Nullable(str),
        }
    ],
}
