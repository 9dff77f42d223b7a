"""DP-FedAvg: a whole client is the unit of privacy."""

from fedjax_dp.algorithms.base import FederatedAlgorithm
from fedjax_dp.algorithms.fedavg import fedavg
from fedjax_dp.clients.base import LocalTrainer
from fedjax_dp.core import checks
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.models.base import Model
from fedjax_dp.server.base import Aggregator


@checked
def dp_fedavg(model: Model, trainer: LocalTrainer, *, aggregator: Aggregator) -> FederatedAlgorithm:
    """Declares DP-FedAvg: clipped deltas, noise on their sum, a public divisor.

    With a private trainer both units are protected and accounted.

    Guarantee: that of the aggregator, with one client as the unit. Of `gaussian_mean`: L2
    sensitivity of the sum is its clip norm under zero-out, the number of clients being public;
    meant for Poisson cohorts, which amplify. The server is trusted to add the noise and to hide the
    cohort and its size.

    Args:
      model: the model to train.
      trainer: local training.
      aggregator: the private mean, such as `gaussian_mean`.

    Returns:
      The algorithm.

    Raises:
      ValueError: for an aggregator that protects no client.

    Source: McMahan and others 2018, algorithm 1.
    """
    rule = "bound contributions and add noise, as gaussian_mean does"
    checks.require(aggregator.claim is not None, "aggregator", rule, "one that does not")
    return fedavg(model, trainer, aggregator=aggregator, name="dp_fedavg")
