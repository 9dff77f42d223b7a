"""Experiments as a library: configuration, assembly, the run and its folder, grids of runs."""
