"""Reads configurations, compares them, and checks them before any work."""
