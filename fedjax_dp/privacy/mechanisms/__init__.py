"""Clipping and noise: mechanisms with the sensitivity and event of what they release."""

from fedjax_dp.privacy.mechanisms.clipping import (
    AdaptiveClipping,
    clip_by_global_norm,
    clip_by_l1_norm,
    clip_per_layer,
    make_adaptive_clipping,
)
from fedjax_dp.privacy.mechanisms.correlated_noise import BandedNoise, banded_noise
from fedjax_dp.privacy.mechanisms.distributed import (
    DiscreteMechanism,
    DistributedDiscreteGaussianDpEvent,
    Plan,
    SkellamDpEvent,
    choose_bits,
    discrete_mechanism,
    make_central_plan,
    make_plan,
)
from fedjax_dp.privacy.mechanisms.gamma_shares import (
    GammaShares,
    GammaSharesDpEvent,
    draw_shares,
    gamma_shares,
    minimizer_sensitivity,
)
from fedjax_dp.privacy.mechanisms.mechanism import (
    Mechanism,
    bounded_laplace,
    gaussian,
    laplace,
    staircase,
)
from fedjax_dp.privacy.mechanisms.noise import (
    BoundedLaplaceDpEvent,
    PureDpEvent,
    StaircaseDpEvent,
    add_bounded_laplace,
    add_gaussian,
    add_laplace,
    add_staircase,
)
from fedjax_dp.privacy.mechanisms.selection import (
    BoundedRangeDpEvent,
    score_units,
    select,
    selection_event,
    summed_scores,
)

__all__ = [
    "AdaptiveClipping",
    "BandedNoise",
    "BoundedLaplaceDpEvent",
    "BoundedRangeDpEvent",
    "DiscreteMechanism",
    "DistributedDiscreteGaussianDpEvent",
    "GammaShares",
    "GammaSharesDpEvent",
    "Mechanism",
    "Plan",
    "PureDpEvent",
    "SkellamDpEvent",
    "StaircaseDpEvent",
    "add_bounded_laplace",
    "add_gaussian",
    "add_laplace",
    "add_staircase",
    "banded_noise",
    "bounded_laplace",
    "choose_bits",
    "clip_by_global_norm",
    "clip_by_l1_norm",
    "clip_per_layer",
    "discrete_mechanism",
    "draw_shares",
    "gamma_shares",
    "gaussian",
    "laplace",
    "make_adaptive_clipping",
    "make_central_plan",
    "make_plan",
    "minimizer_sensitivity",
    "score_units",
    "select",
    "selection_event",
    "staircase",
    "summed_scores",
]
