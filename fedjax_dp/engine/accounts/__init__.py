"""Accounts of what ran: privacy and bytes, and calibration of noise for whole runs."""
