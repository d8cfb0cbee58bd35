"""Compiled code for the slowest of the rules."""
