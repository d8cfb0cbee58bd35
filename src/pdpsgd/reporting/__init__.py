"""Report pages: one self-contained HTML file that opens offline. Public things only go in."""

from __future__ import annotations

from pdpsgd.reporting.comparison import comparison_page
from pdpsgd.reporting.run import run_page, write_run_report

__all__ = ["comparison_page", "run_page", "write_run_report"]
