"""Clipping, noise, mechanisms, and the accounting of what they cost."""

from fedjax_dp.privacy.accounting import Ledger, UnsupportedEvent
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
    "clip_by_global_norm",
    "clip_per_layer",
    "make_clipping",
    "noise_stddev",
    "sensitivity_of_sum",
]
