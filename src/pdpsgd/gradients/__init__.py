"""The sum of clipped per-example gradients."""
