"""What everybody allows and what every run has spent, over time: sound however runs are chosen."""

from __future__ import annotations

from pdpsgd.ledger.database import LedgerUnavailable
from pdpsgd.ledger.ledger import Ledger
from pdpsgd.ledger.offers import Offer
from pdpsgd.ledger.reserved_run import ReservedRun
from pdpsgd.ledger.values import Check, Consent, Person, PersonCharge, Run, Statement, Tier, TierShare

__all__ = [
    "Check",
    "Consent",
    "Ledger",
    "LedgerUnavailable",
    "Offer",
    "Person",
    "PersonCharge",
    "ReservedRun",
    "Run",
    "Statement",
    "Tier",
    "TierShare",
]
