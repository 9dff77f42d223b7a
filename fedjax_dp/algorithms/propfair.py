"""PropFair: clients minimise a loss that grows steep near a baseline, and models are averaged."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_dp.algorithms.base import ClientOutput, FederatedAlgorithm
from fedjax_dp.algorithms.fedavg import fedavg
from fedjax_dp.clients.base import LocalTrainer
from fedjax_dp.clients.objectives import Extension, check_margin, proportional
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.core.ranges import Positive
from fedjax_dp.models.base import Model


@checked
def propfair(
    model: Model,
    trainer: LocalTrainer,
    *,
    baseline: Positive = 5.0,
    margin: Positive = 0.2,
    extension: Extension = "smooth",
    server_learning_rate: Positive = 1.0,
    **options: Any,
) -> FederatedAlgorithm:
    """Declares PropFair: FedAvg on `−Σ p_i ln(1 − f_i / M)`.

    Each step follows the objective of its batch's mean loss, which scales the gradient by
    `1 / (M − ℓ)`. A loss within the margin of M, or above it, goes on in a straight line: its value
    is defined, and `share_beyond` tells how many clients had such a loss on average. Behind a
    private trainer it tells whose mean objective is above that of M − ε, which cannot be told where
    the objective falls there, as the "released" one does: it is left out.

    Guarantee: that of trainer and aggregator. Behind a private trainer the objective is taken of
    each record's loss, before its gradient is clipped, and costs nothing more; what is told of
    losses is then the objective.

    Args:
      model: what is trained.
      trainer: local training, any.
      baseline: M, above the losses that are to be told apart; the paper takes 2 to 5.
      margin: ε, how close to M the logarithm is followed, below M.
      extension: how the objective goes on beyond M − ε, "smooth", or "released" or
        "released_huber" as in the authors' program.
      server_learning_rate: the server's step size.
      **options: further options of `fedavg`.

    Returns:
      The algorithm.

    Raises:
      ValueError: for a number out of its range, a margin that is not below the baseline, or an
        unknown extension.

    Source: Zhang and others 2022, "Proportional Fairness in Federated Learning", algorithm 1.
    """
    proportional(baseline, margin, extension)  # Refuses what it cannot be built with.
    is_told = not (trainer.is_private and extension == "released")

    def client(message, own, client, hyper, key):
        baseline, margin = hyper.algorithm["baseline"], hyper.algorithm["margin"]
        objective = proportional(jnp.asarray(baseline), jnp.asarray(margin), extension)
        result = trainer.train(message, client, hyper.local, key, objective=objective)
        last = baseline - margin
        if trainer.is_private:
            last = -jnp.log(margin / baseline)
        told = result.metrics
        if not is_told:
            return ClientOutput(result.delta, result.weight, own, told)
        is_beyond = jax.tree.map(lambda s, n: s > last * n, told.loss_sum, told.num_read)
        info = {"share_beyond": jax.tree.map(jnp.float32, is_beyond)}
        return ClientOutput(result.delta, result.weight, own, told, info)

    own: dict[str, Any] = {"server_learning_rate": server_learning_rate, "name": "propfair"}
    algorithm = fedavg(model, trainer, **(own | options))
    algorithm = algorithm.with_numbers(
        {"baseline": baseline, "margin": margin}, {"baseline": Positive, "margin": Positive}
    )
    return algorithm._replace(
        client=client, numbers=algorithm.numbers._replace(check=check_options)
    )


def check_options(options: Mapping[str, Any], prefix: str) -> None:
    """Requires a margin below the baseline.

    Args:
      options: of `propfair`, by name; baseline and margin are read.
      prefix: what an error puts before the name.

    Raises:
      ValueError: for a margin that is not above 0 and below the baseline.
    """
    check_margin(options["baseline"], options["margin"], prefix)
