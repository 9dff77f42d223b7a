"""Noise that no party knows: the protocol Π_PPFL, and an aggregator with the same law."""

from fedjax_dp.server.oblivious.aggregator import oblivious_mean
from fedjax_dp.server.oblivious.protocol import (
    FixedPoint,
    Played,
    SetUp,
    Terms,
    play,
    set_up_protocol,
)

__all__ = [
    "FixedPoint",
    "Played",
    "SetUp",
    "Terms",
    "oblivious_mean",
    "play",
    "set_up_protocol",
]
