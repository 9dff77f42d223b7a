"""Secure aggregation: messages under masks that cancel in the sum."""

from fedjax_dp.server.fixed_point import FixedPoint, fixed_point
from fedjax_dp.server.secure.aggregator import masked, masking_facts
from fedjax_dp.server.secure.graphs import MaskGraph, all_pairs, mask_messages, random_neighbors
from fedjax_dp.server.secure.key_agreement import MaskKeys, agreed_keys, simulated_keys
from fedjax_dp.server.secure.secret_sharing import HeldShares, recover_secret, share_secret

__all__ = [
    "FixedPoint",
    "HeldShares",
    "MaskGraph",
    "MaskKeys",
    "agreed_keys",
    "all_pairs",
    "fixed_point",
    "mask_messages",
    "masked",
    "masking_facts",
    "random_neighbors",
    "recover_secret",
    "share_secret",
    "simulated_keys",
]
