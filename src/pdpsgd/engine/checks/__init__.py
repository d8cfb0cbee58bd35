"""Checks of models, losses, loops, collations and augmentations; each refuses what it finds."""
