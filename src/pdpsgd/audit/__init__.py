"""Attacks on our own training, and tests that it does what its plan says."""
