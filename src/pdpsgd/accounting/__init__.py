"""Accountants: what a history of exposures costs, as epsilon at a delta or as delta at an epsilon.

An accountant sees one person's history only (`Exposure`s), because that is all the loss of that person
depends on. A new accountant is one class and one line in `accountant`.
"""

from __future__ import annotations

from functools import lru_cache

from pdpsgd.accounting.base import Accountant
from pdpsgd.accounting.history import Exposure, History, simplify
from pdpsgd.errors import check_one_of

ACCOUNTANTS = ("pld", "rdp", "gdp")

__all__ = ["ACCOUNTANTS", "Accountant", "Exposure", "History", "accountant", "simplify"]


@lru_cache
def accountant(name: str) -> Accountant:
    """The accountant of that name; the same object each time, so that what it remembers is shared."""
    check_one_of(ACCOUNTANTS, accountant=name)
    if name == "pld":
        from pdpsgd.accounting.pld import PldAccountant

        return PldAccountant()
    if name == "rdp":
        from pdpsgd.accounting.rdp import RdpAccountant

        return RdpAccountant()
    from pdpsgd.accounting.gdp import GdpAccountant

    return GdpAccountant()
