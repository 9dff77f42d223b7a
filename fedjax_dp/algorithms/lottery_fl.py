"""LotteryFL: every client searches for a winning ticket; the server averages shared weights."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_dp.algorithms.base import (
    ClientOutput,
    ClientState,
    FederatedAlgorithm,
    Views,
    field,
    training_of,
)
from fedjax_dp.clients.base import LocalTrainer, Objective
from fedjax_dp.clients.client_data import ClientData, PublicClient
from fedjax_dp.clients.pruning import Scope, prune, pruned_share, weights_of
from fedjax_dp.clients.selection import accuracy_of, require_accuracy
from fedjax_dp.core import masks, trees
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.core.masks import Sparse
from fedjax_dp.core.messages import Known
from fedjax_dp.core.ranges import Decay, ProperFraction
from fedjax_dp.core.trees import PyTree
from fedjax_dp.models.base import Model
from fedjax_dp.models.kinds import Where
from fedjax_dp.server.mean import sparse_mean

AS_TICKETS = "clients send the weights that are left, unchanged"
UNPROTECTED = "pruning depends on the exact accuracy on validation data, which no noise covers"


def joins(client: ClientData | PublicClient) -> jax.Array:
    """Returns weight 1 for a client, 0 if it has no data to find a ticket with."""
    return jnp.float32(client.size > 0)


class Message(NamedTuple):
    """The model under the client's mask, and the initial model, which it received first."""

    ticket: Sparse
    start: PyTree


class ServerState(NamedTuple):
    """The shared model, and the initial one, to which tickets are rewound."""

    params: PyTree
    start: PyTree


@checked
def lottery_fl(
    model: Model,
    trainer: LocalTrainer,
    *,
    prune_rate: Decay = 0.2,
    target: Decay = 0.5,
    accuracy_threshold: ProperFraction = 0.5,
    scope: Scope = "tensor",
    prunable: Where | None = None,
) -> FederatedAlgorithm:
    """Declares LotteryFL, whose clients prune shared weights to tickets of their own.

    A client whose masked model is above the threshold on its validation data prunes the smallest of
    its weights and rewinds the rest to the initial model; then it trains, and sends the weights of
    its ticket. The server averages each weight over the clients that keep it.

    Guarantee: none; every upload is exact.

    Args:
      model: the model to train, a model with accuracy.
      trainer: local training, not a private one; pruned weights stay 0 under any optimiser.
      prune_rate: share of the remaining weights that one pruning removes, in [0, 1).
      target: pruned share at which a client stops pruning, in [0, 1); the last pruning may exceed
        it, as in the authors' code.
      accuracy_threshold: accuracy above which a client prunes, in (0, 1).
      scope: as for `prune`.
      prunable: the weights that may be pruned, as for `weights_of`.

    Returns:
      The algorithm; a client's state is its mask, one bit per weight. It needs validation data.

    Raises:
      ValueError: for a number out of its range, a private trainer, one with update transforms, or a
        model without prunable weights or without accuracy.

    Source: Li and others 2021 (LotteryFL), algorithm 1.
    """
    trainer.require_open(UNPROTECTED)
    trainer.require_untransformed(AS_TICKETS)
    require_accuracy(model)
    weights = weights_of(model, prunable)

    def init(key):
        params = model.init(key)
        return ServerState(params, params)

    def ticket_of(server, own, client=None):
        mask = masks.unpacked(own, weights)
        return Sparse(masks.applied(mask, server.params), mask, is_known=True)

    def broadcast(server, client):
        # The initial model, to which tickets are rewound, was received first.
        return Message(ticket_of(server, client.known), Known(server.start))

    def client(message, own, client, hyper, key):
        numbers = hyper.algorithm
        ticket, before = masks.parted(message.ticket)
        accuracy = accuracy_of(model, ticket, client.validation)
        is_due = (
            (client.size > 0)
            & (accuracy > numbers["accuracy_threshold"])
            & (pruned_share(before) < numbers["target"])
        )
        mask = jax.lax.cond(
            is_due,
            lambda: prune(before, ticket, numbers["prune_rate"], scope=scope),
            lambda: before,
        )
        # Too few weights may be left for the rate to remove one.
        has_pruned = masks.num_alive(mask) < masks.num_alive(before)
        start = trees.where(has_pruned, masks.applied(mask, message.start), ticket)
        result = trainer.train(start, client, hyper.local, key, objective=Objective(mask=mask))
        ticket = masks.applied(mask, trees.add(start, result.delta))
        info = {"pruned_share": pruned_share(mask), "validation_accuracy": accuracy}
        return ClientOutput(
            Sparse(ticket, mask), joins(client), masks.packed(mask), result.metrics, info
        )

    def server_step(server, aggregate, hyper, round, key):
        params = jax.tree.map(
            lambda kept, mean, old: jnp.where(kept, mean.astype(old.dtype), old),
            aggregate.mask,
            aggregate.values,
            server.params,
        )
        return server._replace(params=params), {}

    return FederatedAlgorithm(
        name="lottery_fl",
        init=init,
        broadcast=broadcast,
        client=client,
        aggregator=sparse_mean(),
        server_step=server_step,
        training=training_of(trainer, reads_validation=True),
        views=Views(shared=field("params"), personal=ticket_of),
        client_state=ClientState(
            init=lambda server: masks.packed(masks.full(weights)), known=lambda own: own
        ),
    ).with_numbers(
        {"prune_rate": prune_rate, "target": target, "accuracy_threshold": accuracy_threshold},
        {"prune_rate": Decay, "target": Decay, "accuracy_threshold": ProperFraction},
    )
