"""Accountants: what a history of exposures costs, as epsilon at a delta or as delta at an epsilon.

An accountant sees one person's history only (`Exposure`s), because that is all the loss of that person
depends on. A new accountant is one class and one line in `registry`.
"""

from __future__ import annotations

from pdpsgd.accounting.base import Accountant
from pdpsgd.accounting.history import Exposure
from pdpsgd.accounting.registry import accountant

__all__ = ["Accountant", "Exposure", "accountant"]
