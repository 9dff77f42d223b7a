"""Reads, compares and checks configurations before any work."""
