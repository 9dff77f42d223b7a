"""Secure aggregation: messages under masks that cancel in the sum."""

from fedjax_dp.server.secure.aggregator import masked
from fedjax_dp.server.secure.graphs import MaskGraph, all_pairs, random_neighbors
from fedjax_dp.server.secure.key_agreement import MaskKeys, simulated_keys
from fedjax_dp.server.secure.words import FixedPoint, fixed_point

__all__ = [
    "FixedPoint",
    "MaskGraph",
    "MaskKeys",
    "all_pairs",
    "fixed_point",
    "masked",
    "random_neighbors",
    "simulated_keys",
]
