"""Small helpers that every layer may use: checks, keys, trees."""
