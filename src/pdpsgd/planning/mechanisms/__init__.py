"""Mechanisms: functions from budgets and a schedule to rounds. A new one is one file and one line here."""

from __future__ import annotations

from pdpsgd.planning.mechanisms import adapdp
from pdpsgd.planning.mechanisms import dp_sgd
from pdpsgd.planning.mechanisms import exact
from pdpsgd.planning.mechanisms import idp_sgd
from pdpsgd.planning.mechanisms import pdp_sgd
from pdpsgd.planning.mechanisms import sampling
from pdpsgd.planning.mechanisms.base import Mechanism, Request

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
