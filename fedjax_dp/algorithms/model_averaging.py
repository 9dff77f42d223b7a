"""Averages of whole models on data that grow by round, the basis of both of PrivacyFL's methods."""

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_dp.algorithms.base import (
    ClientState,
    FederatedAlgorithm,
    Numbers,
    Training,
    Views,
    field,
    training_of,
)
from fedjax_dp.algorithms.values import ClientOutput
from fedjax_dp.clients.base import LocalTrainer
from fedjax_dp.clients.client_data import ClientData
from fedjax_dp.clients.growing import Form, Growth, growing
from fedjax_dp.clients.minimizer_noise import Mechanism, MinimizerNoise, minimizer_noise
from fedjax_dp.core import checks, trees
from fedjax_dp.core.keys import Purpose, fold
from fedjax_dp.core.ranges import Count
from fedjax_dp.core.trees import PyTree
from fedjax_dp.models.base import Model
from fedjax_dp.privacy.claims import OnceClaim, RecordClaim
from fedjax_dp.server.base import Aggregator
from fedjax_dp.server.counted import CountedMean, counted_mean

Calibration = Literal["corrected", "paper"]
Personal = Literal["own", "received", "shared"]


class ServerState(NamedTuple):
    """The server's state.

    Attributes:
      params: the mean of the clients' models.
      is_active: the clients that have not left, `[num_clients]`, bool; see `leaving`.
      num_averaged: how many models the mean is of, float32.
      round: the round that it is of, int32; -1 before the first.
    """

    params: PyTree
    is_active: jax.Array
    num_averaged: jax.Array
    round: jax.Array


class OwnModel(NamedTuple):
    """A client's state.

    Attributes:
      sent: the model that it sent last, noise included; None if its noise is a share.
      trained: the same without noise; None if nothing reads it.
      noise: its own noise in it; None if nothing reads it.
      round: the round in which it was sent, int32; -1 before the first.
    """

    sent: PyTree
    trained: PyTree
    noise: PyTree
    round: jax.Array


class Start(NamedTuple):
    """The message to a client.

    Attributes:
      params: the mean of the clients' models.
      num_active: how many clients have not left, float32.
      smallest: records of the smallest of them in this round, float32.
    """

    params: PyTree
    num_active: jax.Array
    smallest: jax.Array


def averaged_models(
    model: Model,
    trainer: LocalTrainer,
    start_of: Callable[[PyTree], PyTree],
    *,
    num_clients: Count,
    rows_per_round: Count | Sequence[Count] | None,
    growth: Form,
    regularizer: float,
    mechanism: Mechanism,
    calibration: Calibration,
    entry_delta: float,
    personal: Personal,
    aggregator: Aggregator | None,
    name: str,
) -> FederatedAlgorithm:
    """Declares rounds in which clients train from a start, add noise, and are averaged.

    `start_of` makes the start of training from the received model; it must depend on no record that
    the round reads, but through noised models.
    """
    trainer.require_untransformed("the models themselves are averaged")
    data = None if rows_per_round is None else growing(rows_per_round, num_clients, growth)
    noise = None
    if trainer.is_private:
        noise = minimizer_noise(
            model,
            trainer,
            regularizer=regularizer,
            mechanism=mechanism,
            num_clients=num_clients,
            is_corrected=calibration == "corrected",
            entry_delta=entry_delta,
        )
    is_shared = noise is not None and noise.num_parties > 1
    # Noise of a common size, for shares of one sum and as printed.
    is_common = is_shared or calibration == "paper"
    rule = "be given for noise that all clients make for the smallest of them"
    checks.require(data is not None or noise is None or not is_common, "rows_per_round", rule, None)
    keeps = personal != "shared"
    required = num_clients if is_shared else 1
    mean = aggregator or counted_mean(required=num_clients if is_shared else 0)
    decay = optax.add_decayed_weights(regularizer)

    def init(key):
        params = model.init(key)
        active = jnp.ones(num_clients, bool)
        return ServerState(params, active, jnp.float32(0), jnp.int32(-1))

    def broadcast(server, client):
        smallest = 1.0 if data is None else data.smallest(server.is_active, client.round)
        count = jnp.sum(server.is_active, dtype=jnp.float32)
        return Start(server.params, count, jnp.float32(smallest))

    def noised(params: PyTree, config: Any, size: Any, message: Start, key: Any) -> PyTree:
        if noise is None:
            return params
        records = message.smallest if is_common else size
        is_printed = calibration == "paper"
        multiplier = config.noise_multiplier / (message.num_active if is_printed else 1)
        return noise.add(fold(key, Purpose.CLIENT_NOISE, 0), params, records, multiplier)

    def client(message, own, client, hyper, key):
        event = None if noise is None else noise.event
        records: ClientData = client.read_by("training of a client's model", event)
        records = records if data is None else data.view(records)
        config = hyper.local
        if noise is not None:
            config = noise.training_numbers(config)
        start = start_of(message.params)
        result = trainer.train(start, records, config, key, gradient_transform=decay)
        sent = noised(result.params, hyper.local, records.size, message, key)
        has_data = records.size > 0
        after = OwnModel(
            None if is_shared else sent,
            result.params if keeps else None,
            trees.subtract(sent, result.params) if keeps else None,
            jnp.asarray(client.round, jnp.int32),
        )
        update = trees.subtract(sent, message.params)
        metrics = result.metrics.reported_by(client)
        kept = trees.where(has_data, after, own)
        return ClientOutput(update, has_data.astype(jnp.float32), kept, metrics)

    def server_step(server, aggregate, hyper, round, key):
        rule = "average with counts, as counted_mean() and secure.masked(counted_mean(), ...) do"
        found = type(aggregate).__name__
        checks.require(isinstance(aggregate, CountedMean), "aggregator", rule, found)
        # An aggregator that requires fewer clients must not release a part of the shares.
        has_mean = aggregate.num_averaged >= required
        mean = trees.where(has_mean, aggregate.mean, trees.zeros_like(aggregate.mean))
        return server._replace(
            params=optax.apply_updates(server.params, mean),
            num_averaged=jnp.where(has_mean, aggregate.num_averaged, server.num_averaged),
            round=jnp.where(has_mean, round.index, server.round),
        ), {}

    def first(server):
        params = server.params
        zeros = trees.zeros_like(params)
        return OwnModel(
            None if is_shared else params,
            params if keeps else None,
            zeros if keeps else None,
            jnp.int32(-1),
        )

    def personal_of(server, own, client):
        if personal == "own":
            return own.trained
        # Noise of other rounds is in no mean that it could be taken out of.
        is_in = (own.round == server.round) & (server.round >= 0)
        factor = jnp.where(is_in, trees.reciprocal(server.num_averaged), 0.0)
        received = trees.subtract(server.params, trees.scale(own.noise, factor))
        return trees.where(server.is_active[client.index], received, own.trained)

    return FederatedAlgorithm(
        name=name,
        init=init,
        broadcast=broadcast,
        client=client,
        aggregator=mean,
        server_step=server_step,
        training=_training(trainer, noise, data, keeps),
        numbers=Numbers(num_clients=num_clients),
        views=Views(shared=field("params"), personal=personal_of if keeps else None),
        client_state=ClientState(first),
    )


def _training(
    trainer: LocalTrainer, noise: MinimizerNoise | None, data: Growth | None, keeps: bool
) -> Training:
    """Collects what training declares, with the claim of the noise on models."""
    if noise is None:
        return training_of(trainer)
    uncovered = []
    if keeps:
        uncovered.append("each client's own model without noise, which only the client has")
    if noise.num_parties > 1:
        uncovered.append(
            "a client's model by itself, without those of all other clients, and entries that "
            "masks cut to their range or round to their words"
        )
    is_once = data is not None and data.form == "disjoint"
    claim = OnceClaim if is_once else RecordClaim

    def event(size: int, hyper: Any) -> Any:
        return noise.event(size, hyper.local)

    least = noise.num_parties if noise.num_parties > 1 else 0
    record = claim((event,), "; ".join(uncovered) or None, least)
    return training_of(trainer, record=record)
