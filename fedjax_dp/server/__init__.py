"""Aggregators and server steps."""

from fedjax_dp.server.base import (
    Aggregator,
    Close,
    Roster,
    Sender,
    Stacked,
    Summed,
    stateless,
    update_alone,
    update_and_weight,
)
from fedjax_dp.server.clustering import (
    ClusterAggregate,
    Clusters,
    Similarity,
    kmeans,
    mean_per_cluster,
    similarity_of,
)
from fedjax_dp.server.distributed import discrete_mean, num_shares
from fedjax_dp.server.float_offsets import FloatOffsets, float_offsets
from fedjax_dp.server.masking import Masked, gradient_mask
from fedjax_dp.server.mean import (
    CountedMean,
    ModelChoice,
    counted_mean,
    mean_per_model,
    per_part,
    scaled_sum,
    sparse_mean,
    uniform_mean,
    weighted_mean,
)
from fedjax_dp.server.mixture import (
    Mixture,
    fit_best_mixture,
    fit_mixture,
    num_soft_rounds,
    principal_features,
)
from fedjax_dp.server.noise_aware import (
    inverse_noise_weights,
    noise_aware_mean,
    weighted_by_client,
)
from fedjax_dp.server.oblivious import oblivious_mean
from fedjax_dp.server.optimizers import apply_aggregate
from fedjax_dp.server.private import (
    adaptive_gaussian_mean,
    bounded_laplace_mean,
    by_realised_count,
    central_discrete_mean,
    correlated_gaussian_mean,
    gaussian_mean,
    laplace_mean,
    private_mean,
    staircase_mean,
)
from fedjax_dp.server.robust_pca import (
    Decomposition,
    NoiseEstimate,
    estimate_noise,
    principal_component_pursuit,
)
from fedjax_dp.server.stacked_means import (
    UpdateWithLoss,
    agnostic_mean,
    onto_simplex,
    projected_mean,
)
from fedjax_dp.server.trimmed_mean import trimmed_mean

__all__ = [
    "Aggregator",
    "Close",
    "ClusterAggregate",
    "Clusters",
    "CountedMean",
    "Decomposition",
    "FloatOffsets",
    "Masked",
    "Mixture",
    "ModelChoice",
    "NoiseEstimate",
    "Roster",
    "Sender",
    "Similarity",
    "Stacked",
    "Summed",
    "UpdateWithLoss",
    "adaptive_gaussian_mean",
    "agnostic_mean",
    "apply_aggregate",
    "bounded_laplace_mean",
    "by_realised_count",
    "central_discrete_mean",
    "correlated_gaussian_mean",
    "counted_mean",
    "discrete_mean",
    "estimate_noise",
    "fit_best_mixture",
    "fit_mixture",
    "float_offsets",
    "gaussian_mean",
    "gradient_mask",
    "inverse_noise_weights",
    "kmeans",
    "laplace_mean",
    "mean_per_cluster",
    "mean_per_model",
    "noise_aware_mean",
    "num_shares",
    "num_soft_rounds",
    "oblivious_mean",
    "onto_simplex",
    "per_part",
    "principal_component_pursuit",
    "principal_features",
    "private_mean",
    "projected_mean",
    "scaled_sum",
    "similarity_of",
    "sparse_mean",
    "staircase_mean",
    "stateless",
    "trimmed_mean",
    "uniform_mean",
    "update_alone",
    "update_and_weight",
    "weighted_by_client",
    "weighted_mean",
]
