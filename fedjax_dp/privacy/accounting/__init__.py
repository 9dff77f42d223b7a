"""What mechanisms cost: ledgers, Rényi curves, privacy loss distributions, calibration."""
