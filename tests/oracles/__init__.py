"""Independent float64 NumPy implementations; only random draws come from the package."""
