"""From budgets to a plan that anyone can check, before any data is touched. No torch."""
