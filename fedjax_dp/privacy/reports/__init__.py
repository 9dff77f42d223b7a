"""What is reported about privacy: statements, empirical bounds, effects of noise."""
