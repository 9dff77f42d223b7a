"""Runs experiments: run folders, checkpoints, results, releases."""
