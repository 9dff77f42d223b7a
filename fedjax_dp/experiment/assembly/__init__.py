"""Builds data, model, algorithm and simulation from a configuration."""
