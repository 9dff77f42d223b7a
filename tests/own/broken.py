"""Fails when it is imported."""

raise RuntimeError("not today")
