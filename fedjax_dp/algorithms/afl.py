"""AFL: the model is trained for the worst mixture of clients."""

from typing import Any

from fedjax_dp.algorithms.base import FederatedAlgorithm
from fedjax_dp.algorithms.fedavg import fedavg
from fedjax_dp.clients.base import LocalTrainer
from fedjax_dp.clients.selection import mean_loss
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.core.ranges import Count, NonNegative, Positive
from fedjax_dp.models.base import Model
from fedjax_dp.server.stacked_means import UpdateWithLoss, agnostic_mean


@checked
def afl(
    model: Model,
    trainer: LocalTrainer,
    *,
    num_clients: Count,
    step_size: NonNegative = 0.1,
    server_learning_rate: Positive = 1.0,
) -> FederatedAlgorithm:
    """Declares agnostic federated learning, `min_θ max_λ Σ λ_i f_i(θ)` over the simplex of λ.

    In each round clients send their loss at the model that they received, and train it; the server
    moves λ along the losses, projects it onto the simplex, and averages updates by the new λ. It is
    meant for full participation: λ of an absent client does not rise.

    Guarantee: none. Weights depend on exact losses, so private training is refused.

    Args:
      model: the model to train.
      trainer: local training, not a private one.
      num_clients: the population, at least 1; a cohort's updates are stacked.
      step_size: γ, the step of λ along losses; 0 is the mean with equal weights.
      server_learning_rate: the server's step size.

    Returns:
      The algorithm; its info has the `weights` of clients.

    Raises:
      ValueError: for a private trainer, or a number out of its range.

    Source: Mohri, Sivek, Suresh 2019 (AFL), algorithm 1, with local training in place of one
    gradient, the last model in place of the mean of all, and, as in PropFair's code, λ updated
    before it is used.
    """
    trainer.require_open("clients are weighted by exact losses, which no noise covers")
    algorithm: Any = fedavg(
        model,
        trainer,
        server_learning_rate=server_learning_rate,
        aggregator=agnostic_mean(num_clients, step_size),
        name="afl",
    )

    def client(message, own, client, hyper, key):
        loss = mean_loss(model, message, client)
        output = algorithm.client(message, own, client, hyper, key)
        return output._replace(update=UpdateWithLoss(output.update, loss))

    return algorithm._replace(client=client).for_clients(num_clients)
