"""Small helpers that every layer may use: checks, devices, keys, trees."""
