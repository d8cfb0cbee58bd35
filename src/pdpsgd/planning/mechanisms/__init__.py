"""Mechanisms: functions from budgets and a schedule to rounds. A new one is one file and a line in `registry`."""
