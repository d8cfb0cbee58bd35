"""Accountants by name."""

from __future__ import annotations

from functools import lru_cache

from pdpsgd.accounting.base import Accountant
from pdpsgd.errors import check_one_of

ACCOUNTANTS = ("pld", "rdp", "gdp", "certificate")


@lru_cache
def accountant(name: str) -> Accountant:
    """Return the accountant of that name; the same object each time, so that its cache is shared."""
    check_one_of(ACCOUNTANTS, accountant=name)
    if name == "pld":
        from pdpsgd.accounting.pld import PldAccountant

        return PldAccountant()
    if name == "rdp":
        from pdpsgd.accounting.rdp import RdpAccountant

        return RdpAccountant()
    if name == "certificate":
        from pdpsgd.accounting.certificates import CertificateAccountant

        return CertificateAccountant()
    from pdpsgd.accounting.gdp import GdpAccountant

    return GdpAccountant()
