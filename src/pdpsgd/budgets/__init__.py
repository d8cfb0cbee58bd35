"""What each person allows."""

from pdpsgd.budgets.budgets import Budgets

__all__ = ["Budgets"]
