"""Studies of many runs: sweeps, audits, benchmarks."""
