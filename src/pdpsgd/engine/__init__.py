"""Executes a plan inside a user's training loop."""
