"""Aggregators by name, for configurations: those that claim no privacy.

If clients are protected, the mechanism of `privacy.client` is the aggregator.
"""

from collections.abc import Callable

from fedjax_dp.core.registry import Registry
from fedjax_dp.server.base import Aggregator
from fedjax_dp.server.masking import gradient_mask
from fedjax_dp.server.mean import uniform_mean, weighted_mean
from fedjax_dp.server.trimmed_mean import trimmed_mean

# A user's aggregator is a function `(*, options…) -> Aggregator` too.
AGGREGATORS: Registry[Callable[..., Aggregator]] = Registry(
    {
        "weighted_mean": weighted_mean,
        "uniform_mean": uniform_mean,
        "trimmed_mean": trimmed_mean,
        "gradient_mask": gradient_mask,
    }
)
# Aggregators that wrap another one, passed as the argument of this name: the mechanism of
# `privacy.client` if clients are protected.
AROUND = {"gradient_mask": "mean"}
