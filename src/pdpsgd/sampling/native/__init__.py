"""Compiled code for AES words and noise: called, checked, chosen."""
