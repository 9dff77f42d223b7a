"""Clipping, noise, mechanisms, and the accounting of what they cost."""

from fedjax_dp.privacy.accounting.amplification import sampled_event
from fedjax_dp.privacy.accounting.budgets import (
    draw_budgets,
    published_batch_sizes,
    published_budgets,
)
from fedjax_dp.privacy.accounting.calibration import (
    calibrate_noise_multiplier,
    calibrate_poisson,
    max_poisson_steps,
)
from fedjax_dp.privacy.accounting.ledger import Ledger, UnsupportedEvent
from fedjax_dp.privacy.accounting.poisson import epsilon_of_poisson
from fedjax_dp.privacy.mechanisms.adaptive_clipping import AdaptiveClipping, make_adaptive_clipping
from fedjax_dp.privacy.mechanisms.clipping import (
    Clipping,
    clip_by_global_norm,
    clip_by_l1_norm,
    clip_entries,
    clip_per_layer,
    make_clipping,
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
from fedjax_dp.privacy.mechanisms.mechanism import (
    Mechanism,
    bounded_laplace,
    gaussian,
    laplace,
    staircase,
)
from fedjax_dp.privacy.mechanisms.noise import add_gaussian, add_laplace
from fedjax_dp.privacy.mechanisms.scalar_noise import (
    BoundedLaplaceDpEvent,
    PureDpEvent,
    StaircaseDpEvent,
    add_bounded_laplace,
    add_staircase,
)
from fedjax_dp.privacy.mechanisms.selection import (
    BoundedRangeDpEvent,
    score_units,
    select,
    selection_event,
    summed_scores,
)
from fedjax_dp.privacy.reports.noise_levels import (
    aggregate_variance,
    clipped_gradient_variance,
    inverse_variance_weights,
    noise_multiplier_of_run,
    overlap,
    separation_scores,
    unclipped_gradient_variance,
    update_variance,
)
from fedjax_dp.privacy.sensitivities import Sensitivity, noise_stddev, sensitivity_of_sum

__all__ = [
    "AdaptiveClipping",
    "BandedNoise",
    "BoundedLaplaceDpEvent",
    "BoundedRangeDpEvent",
    "Clipping",
    "DiscreteMechanism",
    "DistributedDiscreteGaussianDpEvent",
    "Ledger",
    "Mechanism",
    "Plan",
    "PureDpEvent",
    "Sensitivity",
    "SkellamDpEvent",
    "StaircaseDpEvent",
    "UnsupportedEvent",
    "add_bounded_laplace",
    "add_gaussian",
    "add_laplace",
    "add_staircase",
    "aggregate_variance",
    "banded_noise",
    "bounded_laplace",
    "calibrate_noise_multiplier",
    "calibrate_poisson",
    "choose_bits",
    "clip_by_global_norm",
    "clip_by_l1_norm",
    "clip_entries",
    "clip_per_layer",
    "clipped_gradient_variance",
    "discrete_mechanism",
    "draw_budgets",
    "epsilon_of_poisson",
    "gaussian",
    "inverse_variance_weights",
    "laplace",
    "make_adaptive_clipping",
    "make_central_plan",
    "make_clipping",
    "make_plan",
    "max_poisson_steps",
    "noise_multiplier_of_run",
    "noise_stddev",
    "overlap",
    "published_batch_sizes",
    "published_budgets",
    "sampled_event",
    "score_units",
    "select",
    "selection_event",
    "sensitivity_of_sum",
    "separation_scores",
    "staircase",
    "summed_scores",
    "unclipped_gradient_variance",
    "update_variance",
]
