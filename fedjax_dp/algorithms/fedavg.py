"""FedAvg, alone or with a proximal term, and its references: pooled examples, clients alone."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

import numpy as np
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
from fedjax_dp.clients.regularizers import proximal
from fedjax_dp.core import checks, ranges
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.core.messages import Known
from fedjax_dp.core.ranges import NonNegative, Positive
from fedjax_dp.core.trees import PyTree
from fedjax_dp.data.federated import FederatedData
from fedjax_dp.models.base import Model
from fedjax_dp.models.kinds import Home
from fedjax_dp.server.base import Aggregator
from fedjax_dp.server.mean import uniform_mean, weighted_mean
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


@checked
def fedprox(
    model: Model,
    trainer: LocalTrainer,
    *,
    mu: NonNegative = 0.01,
    server_learning_rate: Positive = 1.0,
    **options: Any,
) -> FederatedAlgorithm:
    """Declares FedProx: each local objective gains `mu / 2 * ‖w − w_server‖²`.

    Args:
      model: the model to train.
      trainer: local training; each step's gradient passes through the proximal term.
      mu: strength of the proximal term; 0 is FedAvg.
      server_learning_rate: the server's step size.
      **options: further options of `fedavg`.

    Returns:
      The algorithm.

    Raises:
      ValueError: for a number out of its range.

    Source: Li and others 2020 (FedProx), algorithm 2.
    """

    def client(message, own, client, hyper, key):
        pull = proximal(hyper.algorithm["mu"])
        result = trainer.train(message, client, hyper.local, key, gradient_transform=pull)
        return ClientOutput(result.delta, result.weight, own, result.metrics)

    own: dict[str, Any] = {"server_learning_rate": server_learning_rate, "name": "fedprox"}
    algorithm = fedavg(model, trainer, **(own | options))
    return algorithm.with_numbers({"mu": mu}, {"mu": NonNegative})._replace(client=client)


@checked
def pool(data: FederatedData) -> FederatedData:
    """Pools all clients into one, on which any algorithm is centralised training.

    Args:
      data: the clients' examples.

    Returns:
      A store of one client that owns every example; the arrays are not copied. Under record-level
      privacy the unit is still a record, and the pool has one budget.
    """
    return FederatedData(data.examples, np.array([0, data.num_examples]), ("all",))


@checked
def centralized(model: Model, trainer: LocalTrainer) -> FederatedAlgorithm:
    """Declares training on the pool of all examples, the reference for the cost of federation.

    Run it on `pool(data)`.

    Args:
      model: the model to train.
      trainer: training; a private one makes this central DP-SGD.

    Returns:
      The algorithm; one round is one run of the trainer, continued from the last.

    Source: with a private trainer Abadi and others 2016, algorithm 1.
    """
    base = fedavg(model, trainer, name="centralized")

    def client(message, own, client, hyper, key):
        output = base.client(message, own, client, hyper, key)
        return output._replace(update=Known(output.update))

    return base._replace(
        broadcast=lambda server, client: Known(base.broadcast(server, client)), client=client
    )


class LocalStart(NamedTuple):
    """The parameters that every client starts from."""

    start: PyTree


@checked
def local_only(model: Model, trainer: LocalTrainer) -> FederatedAlgorithm:
    """Declares training without any federation, the reference for personal models.

    Args:
      model: the model to train.
      trainer: local training; a private one makes this local DP-SGD.

    Returns:
      The algorithm; a client's state is its own model, and its optimiser restarts every round.

    Source: the usual baseline of personal methods, as in Liu and others 2022.
    """

    def client(message, own, client, hyper, key):
        result = trainer.train(own, client, hyper.local, key)
        return ClientOutput((), result.weight, result.params, result.metrics)

    return FederatedAlgorithm(
        name="local_only",
        init=lambda key: LocalStart(model.init(key)),
        broadcast=lambda server, client: (),
        client=client,
        aggregator=uniform_mean(),
        server_step=lambda server, aggregate, hyper, round, key: (server, {}),
        training=training_of(trainer),
        views=Views(personal=lambda server, own, client: own),
        client_state=ClientState(init=lambda server: server.start),
    )
