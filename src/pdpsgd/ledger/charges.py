"""What a run costs each level, fixed when it is reserved: `gaussian`, `renyi` or `declared`."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass

from pdpsgd.accounting.certificates import (
    KAPPA,
    Certificate,
    certificate,
    certificate_of_declared,
    certificate_of_renyi,
)
from pdpsgd.accounting.history import Exposure, History, simplify
from pdpsgd.errors import check_not_negative, check_probability
from pdpsgd.ledger.amounts import LARGEST, UNIT_B, UNIT_D, charge
from pdpsgd.ledger.log import canonical
from pdpsgd.planning.certificate_check import certificate_holds
from pdpsgd.planning.plans import Plan

DEFAULT_SHARE = 0.25
KINDS = ("gaussian", "renyi", "declared", "series")


@dataclass(frozen=True)
class Charge:
    """One level's charge: integers that are added up, and what they were computed from."""

    kind: str
    mu: float
    b: int
    d: int
    e: int
    exposures: str

    @property
    def costs_nothing(self) -> bool:
        """Whether nobody of the level pays anything."""
        return self.b == self.d == self.e == 0


def charges_of_plan(plan: Plan, *, share_of_d: float | None = None) -> list[Charge]:
    """Compute a certificate for every level of a plan, from its rounds alone.

    d is KAPPA of the level's delta for a plan that was made from a ledger's offer. Other plans have the delta of a
    whole promise: of that they take the default share, or `share_of_d`.
    """
    share = share_of_d or default_share_of_d(plan)
    found = []
    for index, level in enumerate(plan.levels):
        history = simplify(tuple(r.exposure(index) for r in plan.rounds))
        found.append(_gaussian(history, KAPPA * level.delta * share))
    return found


def default_share_of_d(plan: Plan) -> float:
    """Return how much of KAPPA delta a plan takes: all of it if its delta is that of an offer."""
    return 1.0 if plan.accountant == "certificate" else DEFAULT_SHARE


def charge_of(history: History, *, delta: float, share_of_d: float) -> Charge:
    """Compute the charge of exposures that are fixed together, with a share of KAPPA delta as d."""
    return _gaussian(history, KAPPA * delta * share_of_d)


def member_charge(history: History) -> Charge:
    """Compute the charge of a run of a series, which has paid for it: nothing."""
    return Charge("series", 0.0, 0, 0, 0, canonical([[*exposure] for exposure in history]))


def declared(epsilon: float, delta: float, *, from_set_aside: bool) -> Charge:
    """Compute the charge of another system's (epsilon, delta)-DP run: from what was set aside, or from b."""
    check_not_negative(epsilon=epsilon)
    check_probability(delta=delta)
    stated = canonical({"epsilon": float(epsilon), "delta": float(delta), "set_aside": from_set_aside})
    if from_set_aside:
        return Charge("declared", 0.0, 0, charge(delta, UNIT_D), charge(epsilon, UNIT_B), stated)
    return _of(certificate_of_declared(epsilon, delta), "declared", stated)


def renyi(orders: Sequence[float], rho: Sequence[float], *, d: float) -> Charge:
    """Compute the charge of a run of which only Renyi divergences are known, both ways."""
    found = certificate_of_renyi(orders, rho, d=d)  # which checks them
    for divergence in rho:
        check_not_negative(rho=divergence)
    stated = canonical({"orders": [float(x) for x in orders], "rho": [float(x) for x in rho], "d": float(d)})
    return _of(found, "renyi", stated)


def is_confirmed(kind: str, mu: float, b: int, d: int, e: int, exposures: str) -> bool:
    """Whether a charge covers what it was computed from; `gaussian` by the independent computation."""
    stated = json.loads(exposures)
    if kind == "series":
        return b == d == e == 0  # what it was exposed to is compared with what its series has paid
    if b == LARGEST:
        return True  # more than anybody allows
    if b < mu * mu / UNIT_B * (1 - 1e-12):
        return False
    if kind == "gaussian":
        history = tuple(Exposure(*entry) for entry in stated)
        return not simplify(history) or certificate_holds(history, mu=mu, d=d * UNIT_D)
    if kind == "declared":
        again = declared(stated["epsilon"], stated["delta"], from_set_aside=stated["set_aside"])
    else:
        again = renyi(stated["orders"], stated["rho"], d=stated["d"])
    return b >= again.b and d >= again.d and e >= again.e


def _gaussian(history: History, d: float) -> Charge:
    stated = canonical([[*exposure] for exposure in history])
    if not history:
        return Charge("gaussian", 0.0, 0, 0, 0, stated)
    in_every_step = all(e.participation == 1 and e.sample_rate == 1 for e in history)
    return _of(certificate(history, d=0.0 if in_every_step else d), "gaussian", stated)


def _of(found: Certificate, kind: str, stated: str) -> Charge:
    b = LARGEST if math.isinf(found.mu) else charge(found.mu**2, UNIT_B)
    return Charge(kind, min(found.mu, 1e9), b, charge(found.d, UNIT_D), 0, stated)
