"""SCAFFOLD: control variates at server and clients correct the drift of local training."""

from typing import NamedTuple

import jax
import optax

from fedjax_dp.algorithms.base import (
    ClientOutput,
    ClientState,
    FederatedAlgorithm,
    Hyper,
    field,
    of_training,
)
from fedjax_dp.clients.base import LocalTrainer
from fedjax_dp.clients.regularizers import shift
from fedjax_dp.core import checks, trees
from fedjax_dp.core.ranges import Count, Positive
from fedjax_dp.core.signatures import checked
from fedjax_dp.core.trees import PyTree
from fedjax_dp.models.base import Model
from fedjax_dp.server.base import Aggregator, Summed
from fedjax_dp.server.mean import per_part, scaled_sum, uniform_mean, weighted_mean
from fedjax_dp.server.optimizers import apply_aggregate


class ServerState(NamedTuple):
    """The model and the mean of all clients' control variates.

    Attributes:
      params: the model's parameters, x.
      control: the server's control variate, c.
    """

    params: PyTree
    control: PyTree


@checked
def scaffold(
    model: Model,
    trainer: LocalTrainer,
    *,
    num_clients: Count,
    server_learning_rate: Positive = 1.0,
    is_weighted: bool = False,
    aggregator: Aggregator | None = None,
) -> FederatedAlgorithm:
    """Declares SCAFFOLD with the cheaper control variate (option II).

    A client adds `c − c_i` to every gradient; afterwards its control variate becomes
    `c_i − c + (x − y_i) / (K · learning rate)`, which is its mean gradient under plain SGD.

    Args:
      model: what is trained.
      trainer: local training with `optax.sgd`, whose learning rate the control variate needs.
      num_clients: the population; the server's control variate is the mean over all of it.
      server_learning_rate: the server's step size.
      is_weighted: weight deltas by client size; the paper weights all clients the same.
      aggregator: how deltas are combined, a summed one, in place of their mean; `gradient_mask()`
        weighs them by size unless it is told otherwise. Control variates are averaged in any case.
        Its numbers are those of the part "params", as `hyper.aggregator["params"]["threshold"]`.

    Returns:
      The algorithm; it keeps one control variate for each client.

    Raises:
      ValueError: for a number out of its range, a trainer that does not take plain SGD steps, or
        weights beside an aggregator.

    Source: Karimireddy and others 2020, algorithm 1.
    """
    checks.whole("num_clients", num_clients)
    trainer.require_plain_sgd("control variates are computed from both")
    rule = "be False beside an aggregator, which weighs in its own way"
    checks.require(aggregator is None or not is_weighted, "is_weighted", rule, is_weighted)

    def init(key):
        params = model.init(key)
        # Control variates are sums over many rounds: float32 whatever the model computes in.
        control = jax.tree.map(lambda p: trees.zeros_like(trees.at_least_float32(p)), params)
        return ServerState(params, control)

    def client(server, control, client, hyper, key):
        correction = trees.subtract(server.control, control)
        result = trainer.train(
            server.params, client, hyper.local, key, gradient_transform=shift(correction)
        )
        per_step = result.num_steps * hyper.local.learning_rate
        inverse = trees.reciprocal(per_step)
        moved = jax.tree.map(lambda delta, c: -delta * inverse - c, result.delta, server.control)
        # A client that did not move learned nothing new about its gradient.
        moved = trees.where(per_step > 0, moved, trees.zeros_like(moved))
        update = {"params": result.delta, "control": moved}
        return ClientOutput(update, result.weight, trees.add(control, moved), result.metrics)

    def server_step(server, aggregate, hyper, round, key):
        optimizer = optax.sgd(hyper.algorithm["server_learning_rate"])
        is_buffer = model.is_buffer(server.params) if model.buffer_keys else None
        state, mean = optimizer.init(server.params), aggregate["params"]
        _, params = apply_aggregate(optimizer, state, server.params, mean, is_buffer)
        return ServerState(params, trees.add(server.control, aggregate["control"])), {}

    mean = aggregator or (weighted_mean() if is_weighted else uniform_mean())
    rule = "be summed, as control variates are, not stacked"
    checks.require(isinstance(mean, Summed), "aggregator", rule, type(mean).__name__)
    assert isinstance(mean, Summed)
    aggregator = per_part({"params": mean, "control": scaled_sum(num_clients)})
    return FederatedAlgorithm(
        name="scaffold",
        init=init,
        client=client,
        aggregator=aggregator,
        server_step=server_step,
        hyper=Hyper(trainer.config, {}, aggregator.numbers),
        num_steps=trainer.num_steps,
        num_clients=num_clients,
        shared=field("params"),
        clients=ClientState(init=lambda server: server.control),
        record=of_training(trainer),
        check_noised=trainer.check_noised,
    ).with_numbers(
        {"server_learning_rate": server_learning_rate}, {"server_learning_rate": Positive}
    )
