"""What mechanisms cost: ledgers, Rényi curves, privacy loss distributions, calibration."""

from fedjax_dp.privacy.accounting.budgets import published_batch_sizes, published_budgets
from fedjax_dp.privacy.accounting.calibration import (
    calibrate_noise_multiplier,
    calibrate_poisson,
    epsilon_of_poisson,
    max_poisson_steps,
)
from fedjax_dp.privacy.accounting.composition import (
    Guarantee,
    advanced_composition,
    amplified_by_sampling,
)
from fedjax_dp.privacy.accounting.ledger import Ledger, UnsupportedEvent

__all__ = [
    "Guarantee",
    "Ledger",
    "UnsupportedEvent",
    "advanced_composition",
    "amplified_by_sampling",
    "calibrate_noise_multiplier",
    "calibrate_poisson",
    "epsilon_of_poisson",
    "max_poisson_steps",
    "published_batch_sizes",
    "published_budgets",
]
