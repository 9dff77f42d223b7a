"""DP-FedAvg: a whole client is the unit of privacy."""

from typing import Any

from fedjax_dp.algorithms.base import FederatedAlgorithm
from fedjax_dp.algorithms.fedavg import fedavg
from fedjax_dp.clients.base import LocalTrainer
from fedjax_dp.core.ranges import NonNegative, Positive
from fedjax_dp.models.base import Model
from fedjax_dp.server.private import gaussian_mean


def dp_fedavg(
    model: Model,
    trainer: LocalTrainer,
    *,
    clip_norm: Positive,
    noise_multiplier: NonNegative,
    expected_cohort_size: Positive,
    per_layer: bool = False,
    **options: Any,
) -> FederatedAlgorithm:
    """Declares DP-FedAvg: clipped deltas, one Gaussian noise on their sum, a public divisor.

    With a private trainer both units are protected at once, and both are accounted.

    Guarantee: unit of privacy is one client; L2 sensitivity of the sum is `clip_norm` under
    zero-out, the number of clients being public; meant for Poisson cohorts, which amplify. The
    server is trusted to add the noise and to hide the cohort and its size.

    Args:
      model: what is trained.
      trainer: local training.
      clip_norm: bound on the L2 norm of one client's delta, above 0.
      noise_multiplier: noise standard deviation over `clip_norm`, at least 0.
      expected_cohort_size: the public divisor, the expected number of clients a round.
      per_layer: clip layer by layer instead of over the whole delta.
      **options: further options of `fedavg`, such as a server optimiser.

    Returns:
      The algorithm.

    Source: McMahan and others 2018, algorithm 1; `user_level_dp` section 2.
    """
    aggregator = gaussian_mean(
        clip_norm, noise_multiplier, expected_cohort_size, per_layer=per_layer
    )
    return fedavg(model, trainer, aggregator=aggregator, name="dp_fedavg", **options)
