"""Averaging with any optimiser at the server, of which FedAvg and its adaptive kin are made."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

import optax

from fedjax_dp.algorithms.base import (
    ClientOutput,
    ClientState,
    FederatedAlgorithm,
    Numbers,
    Views,
    field,
    training_of,
)
from fedjax_dp.clients.base import LocalResult, LocalTrainer
from fedjax_dp.core import ranges
from fedjax_dp.core.trees import PyTree
from fedjax_dp.models.base import Model
from fedjax_dp.models.kinds import Home
from fedjax_dp.server.base import Aggregator
from fedjax_dp.server.mean import weighted_mean
from fedjax_dp.server.optimizers import apply_aggregate

# `(start, client, hyper, key) -> LocalResult`.
Train: TypeAlias = Callable[..., LocalResult]


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
    home: Home | None = None,
    train: Train | None = None,
    name: str,
) -> FederatedAlgorithm:
    """Declares averaging with any optimiser at the server, of all parameters or of those shared.

    Args:
      model: what is trained.
      trainer: local training.
      optimizer_of: `(numbers) -> optimiser`, which reads the mean delta as a negative gradient.
      numbers: the optimiser's, by name.
      ranges_of: of these numbers.
      aggregator: how deltas are combined; the mean weighted by client size where it is None.
      home: which parameters stay with their clients; none where it is None.
      train: what a client does, `trainer.train` where it is None.
      name: the name in reports.

    Returns:
      The algorithm; what a client keeps are the parameters that stay at home, and the server holds
      those that every client starts with.

    Raises:
      ValueError: for a number out of its range.

    Source: Reddi and others 2021, algorithm 1.
    """
    ranges.check(numbers, ranges_of)
    aggregator, train = aggregator or weighted_mean(), train or _plain(trainer)
    home = home if home is not None and any(home.is_own) else None

    def sent(params):
        return params if home is None else home.sent(params)

    def init(key):
        params = model.init(key)
        return ServerState(params, optimizer_of(numbers).init(sent(params)))

    def whole(params, own):
        return params if home is None else home.joined(params, own)

    def client(message, own, client, hyper, key):
        result = train(whole(message, own), client, hyper, key)
        kept = own if home is None else home.own(result.params)
        return ClientOutput(sent(result.delta), result.weight, kept, result.metrics)

    def server_step(server, aggregate, hyper, round, key):
        shared = sent(server.params)
        is_buffer = sent(model.is_buffer(server.params)) if model.buffer_keys else None
        optimizer = optimizer_of(hyper.algorithm)
        opt_state, params = apply_aggregate(
            optimizer, server.opt_state, shared, aggregate, is_buffer
        )
        params = params if home is None else home.joined(params, server.params)
        return ServerState(params, opt_state), {}

    return FederatedAlgorithm(
        name=name,
        init=init,
        broadcast=lambda server, client: sent(server.params),
        client=client,
        aggregator=aggregator,
        server_step=server_step,
        training=training_of(trainer, sent=None if home is None else home.is_sent),
        numbers=Numbers(numbers, ranges_of),
        views=Views(
            shared=field("params", is_whole=home is None),
            personal=None
            if home is None
            else lambda server, own, client: whole(server.params, own),
        ),
        client_state=None if home is None else ClientState(lambda server: home.own(server.params)),
    )


def _plain(trainer: LocalTrainer) -> Train:
    return lambda start, client, hyper, key: trainer.train(start, client, hyper.local, key)
