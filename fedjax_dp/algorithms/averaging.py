"""Averaging with any optimiser at the server, of which FedAvg and its adaptive kin are made."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import optax

from fedjax_dp.algorithms.base import (
    ClientOutput,
    FederatedAlgorithm,
    Hyper,
    field,
    of_training,
)
from fedjax_dp.clients.base import LocalTrainer
from fedjax_dp.core import ranges
from fedjax_dp.core.trees import PyTree
from fedjax_dp.models.base import Model
from fedjax_dp.server.base import Aggregator
from fedjax_dp.server.mean import weighted_mean
from fedjax_dp.server.optimizers import apply_aggregate


class ServerState(NamedTuple):
    """One model and the state of its server optimiser.

    Attributes:
      params: the model's parameters.
      opt_state: the optimiser's state.
    """

    params: PyTree
    opt_state: Any


def averaged(
    model: Model,
    trainer: LocalTrainer,
    optimizer_of: Callable[[Mapping[str, Any]], optax.GradientTransformation],
    *,
    numbers: Mapping[str, Any],
    ranges_of: Mapping[str, Any],
    aggregator: Aggregator | None = None,
    name: str,
) -> FederatedAlgorithm:
    """Declares averaging with any optimiser at the server.

    Args:
      model: what is trained.
      trainer: local training.
      optimizer_of: `(numbers) -> optimiser`, which reads the mean delta as a negative gradient.
      numbers: the optimiser's, by name.
      ranges_of: of these numbers.
      aggregator: how deltas are combined; the mean weighted by client size where it is None.
      name: the name in reports.

    Returns:
      The algorithm.

    Raises:
      ValueError: for a number out of its range.

    Source: Reddi and others 2021, algorithm 1.
    """
    ranges.check(numbers, ranges_of)
    aggregator = aggregator or weighted_mean()

    def init(key):
        params = model.init(key)
        return ServerState(params, optimizer_of(numbers).init(params))

    def client(server, own, client, hyper, key):
        result = trainer.train(server.params, client, hyper.local, key)
        return ClientOutput(result.delta, result.weight, own, result.metrics)

    def server_step(server, aggregate, hyper, round, key):
        is_buffer = model.is_buffer(server.params) if model.buffer_keys else None
        optimizer = optimizer_of(hyper.algorithm)
        opt_state, params = apply_aggregate(
            optimizer, server.opt_state, server.params, aggregate, is_buffer
        )
        return ServerState(params, opt_state), {}

    return FederatedAlgorithm(
        name=name,
        init=init,
        client=client,
        aggregator=aggregator,
        server_step=server_step,
        hyper=Hyper(trainer.config, numbers, aggregator.numbers),
        num_steps=trainer.num_steps,
        ranges=ranges_of,
        shared=field("params"),
        record=of_training(trainer),
        check_noised=trainer.check_noised,
    )
