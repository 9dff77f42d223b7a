"""Clipping, noise, mechanisms, and the accounting of what they cost."""

from fedjax_dp.privacy.accounting import Ledger, UnsupportedEvent
from fedjax_dp.privacy.calibration import (
    calibrate_noise_multiplier,
    calibrate_poisson,
    epsilon_of_poisson,
    max_poisson_steps,
)
from fedjax_dp.privacy.clipping import (
    Clipping,
    Sensitivity,
    clip_by_global_norm,
    clip_per_layer,
    make_clipping,
    noise_stddev,
    sensitivity_of_sum,
)
from fedjax_dp.privacy.noise import add_gaussian, add_laplace

__all__ = [
    "Clipping",
    "Ledger",
    "Sensitivity",
    "UnsupportedEvent",
    "add_gaussian",
    "add_laplace",
    "calibrate_noise_multiplier",
    "calibrate_poisson",
    "clip_by_global_norm",
    "clip_per_layer",
    "epsilon_of_poisson",
    "make_clipping",
    "max_poisson_steps",
    "noise_stddev",
    "sensitivity_of_sum",
]
