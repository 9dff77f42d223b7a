"""FedAvg, whose server averages the updates of clients, and DP-FedAvg, which adds noise."""

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
from fedjax_dp.core import checks, ranges
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.core.ranges import Positive
from fedjax_dp.core.trees import PyTree
from fedjax_dp.models.base import Model
from fedjax_dp.models.kinds import Home
from fedjax_dp.server.base import Aggregator
from fedjax_dp.server.mean import weighted_mean
from fedjax_dp.server.optimizers import apply_aggregate

# `(start, client, hyper, key) -> LocalResult`.
Train: TypeAlias = Callable[..., LocalResult]


class ServerState(NamedTuple):
    """One model, and the state of its server optimiser."""

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
    """Declares averaging with any optimiser at the server, of all parameters or of shared ones.

    `optimizer_of` makes the optimiser from its `numbers`, whose `ranges_of` are by name; it reads
    the mean delta as a negative gradient. Parameters of `home` stay in the clients' states, and the
    server has their initial values; `train` replaces `trainer.train`.

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

    def client(message, own, client, hyper, key):
        start = message if home is None else home.joined(message, own)
        result = train(start, client, hyper, key)
        own = own if home is None else home.own(result.params)
        return ClientOutput(sent(result.delta), result.weight, own, result.metrics)

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
            else lambda server, own, client: home.joined(server.params, own),
        ),
        client_state=None if home is None else ClientState(lambda server: home.own(server.params)),
    )


def _plain(trainer: LocalTrainer) -> Train:
    return lambda start, client, hyper, key: trainer.train(start, client, hyper.local, key)


@checked
def fedavg(
    model: Model,
    trainer: LocalTrainer,
    *,
    server_learning_rate: Positive = 1.0,
    server_optimizer: Callable[..., Any] | optax.GradientTransformation = optax.sgd,
    aggregator: Aggregator | None = None,
    name: str = "fedavg",
) -> FederatedAlgorithm:
    """Declares FedAvg: clients train the server's model, the server steps along their mean delta.

    Args:
      model: the model to train.
      trainer: local training; a private one makes this DP-SGD at the clients.
      server_learning_rate: the server's step size.
      server_optimizer: an Optax factory that takes the server's learning rate, or an optimiser,
        which ignores it; it reads the mean delta as a negative gradient.
      aggregator: combines deltas; by default the mean weighted by client size.
      name: the name in reports.

    Returns:
      The algorithm.

    Raises:
      ValueError: for a number out of its range.

    Source: McMahan and others 2017, algorithm 1; Reddi and others 2021, algorithm 1.
    """

    def optimizer_of(numbers):
        if isinstance(server_optimizer, optax.GradientTransformation):
            return server_optimizer
        return server_optimizer(numbers["server_learning_rate"])

    return averaged(
        model,
        trainer,
        optimizer_of,
        numbers={"server_learning_rate": server_learning_rate},
        ranges_of={"server_learning_rate": Positive},
        aggregator=aggregator,
        name=name,
    )


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
