"""Clipping and noise: mechanisms with the sensitivity and event of what they release."""
