"""The engine inside other frameworks."""
