"""Noise that no party knows: the protocol Π_PPFL, and an aggregator with the same law."""

from fedjax_dp.server.oblivious.aggregator import noise_messages, oblivious_mean
from fedjax_dp.server.oblivious.protocol import (
    Iteration,
    SetUp,
    Terms,
    run_iteration,
    set_up_protocol,
)

__all__ = [
    "Iteration",
    "SetUp",
    "Terms",
    "noise_messages",
    "oblivious_mean",
    "run_iteration",
    "set_up_protocol",
]
