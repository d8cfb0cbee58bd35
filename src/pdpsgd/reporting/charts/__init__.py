"""Charts of plans, runs and comparisons, as Altair charts: for files, and for the report page."""

from pdpsgd.reporting.charts.plans import (
    budgets_chart,
    level_name,
    level_names,
    noise_chart,
    promise_chart,
    rates_chart,
    save_plan_chart,
    selected_levels,
    spending,
    spending_chart,
)
from pdpsgd.reporting.charts.results import (
    interval,
    lines_chart,
    save_comparison_chart,
    seed_rows,
    seeds_chart,
    shares_chart,
    used_chart,
    used_rows,
)
from pdpsgd.reporting.charts.style import PAGE, PAPER, Chart, Palette, Rows, styled

__all__ = [
    "PAGE",
    "PAPER",
    "Chart",
    "Palette",
    "Rows",
    "budgets_chart",
    "interval",
    "level_name",
    "level_names",
    "lines_chart",
    "noise_chart",
    "promise_chart",
    "rates_chart",
    "save_comparison_chart",
    "save_plan_chart",
    "seed_rows",
    "seeds_chart",
    "selected_levels",
    "shares_chart",
    "spending",
    "spending_chart",
    "styled",
    "used_chart",
    "used_rows",
]
