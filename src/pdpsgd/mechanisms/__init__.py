"""Mechanisms: functions from budgets and a schedule to rounds. A new one is one file and one line here."""

from __future__ import annotations

from pdpsgd.mechanisms import adapdp, dp_sgd, exact, idp_sgd, pdp_sgd, sampling
from pdpsgd.mechanisms.base import Mechanism, Request

MECHANISMS: dict[str, Mechanism] = {
    "dp-sgd": dp_sgd.MECHANISM,
    "sampling": sampling.MECHANISM,
    "adapdp": adapdp.MECHANISM,
    "pdp-sgd-fixed": pdp_sgd.FIXED,
    "pdp-sgd-adaptive": pdp_sgd.ADAPTIVE,
    "pdp-sgd-exact": exact.MECHANISM,
    "idp-sample": idp_sgd.SAMPLE,
    "idp-scale": idp_sgd.SCALE,
}

__all__ = ["MECHANISMS", "Mechanism", "Request"]
