"""Noise that no party knows: the protocol Π_PPFL, and an aggregator with the same law."""

from fedjax_dp.server.oblivious.aggregator import oblivious_mean, protocol_messages
from fedjax_dp.server.oblivious.protocol import (
    Played,
    SetUp,
    Terms,
    WideWords,
    play,
    set_up_protocol,
)

__all__ = [
    "Played",
    "SetUp",
    "Terms",
    "WideWords",
    "oblivious_mean",
    "play",
    "protocol_messages",
    "set_up_protocol",
]
