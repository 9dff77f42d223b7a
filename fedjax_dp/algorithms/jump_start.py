"""Jump-Start: clients train alone at first; then FedLTN goes on from the best of their tickets."""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_dp.algorithms.base import (
    ClientOutput,
    ClientState,
    FederatedAlgorithm,
    HostStep,
    Stages,
    Views,
)
from fedjax_dp.algorithms.fed_ltn import Distance, Own, Pruning, When, on_tickets, scheme_of
from fedjax_dp.algorithms.lottery_fl import joins
from fedjax_dp.clients.base import LocalTrainer
from fedjax_dp.clients.pruning import Scope, pruned_share
from fedjax_dp.clients.selection import accuracy_of
from fedjax_dp.core import masks, trees
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.core.masks import Sparse
from fedjax_dp.core.messages import Known, SentIf
from fedjax_dp.core.ranges import Count, Decay, NonNegative, Probability, ProperFraction
from fedjax_dp.core.trees import PyTree
from fedjax_dp.models.base import Model
from fedjax_dp.models.kinds import BATCH_NORM, Where

LOCAL, SHARED = 0, 1
Score = Literal["own", "all"]


class Message(NamedTuple):
    """What a client is sent.

    Attributes:
      ticket: the message of FedLTN.
      mask: the mask of that ticket, packed.
    """

    ticket: PyTree
    mask: PyTree


class ServerState(NamedTuple):
    """FedLTN's server, and whether it has begun.

    Attributes:
      inner: the state of FedLTN's server.
      mask: of the ticket that all go on with; of all weights before there is one.
      has_jumped: whether the first stage is over, bool.
    """

    inner: Any
    mask: PyTree
    has_jumped: jax.typing.ArrayLike


class Jumping(NamedTuple):
    """What a client keeps.

    Attributes:
      inner: what it keeps in FedLTN.
      params: its model of the first stage.
      accuracy: that of this model on its validation data; below 0 before it has trained.
      has_jumped: whether it has gone on with the shared ticket, bool; else its mask is of its own.
    """

    inner: Own
    params: PyTree
    accuracy: jax.Array
    has_jumped: jax.Array


@checked
def jump_start(
    model: Model,
    trainer: LocalTrainer,
    *,
    jump_rounds: Count = 25,
    jump_target: Decay = 0.3,
    score: Score = "own",
    inherits_mask: bool = True,
    prune_rate: Decay = 0.1,
    target: Decay = 0.9,
    accuracy_threshold: ProperFraction = 0.6,
    strength: NonNegative = 0.01,
    mixing: Probability = 0.5,
    momentum: NonNegative = 0.5,
    looks_ahead: bool = True,
    home: Where = BATCH_NORM,
    rewinds: bool = False,
    prunes: When = "after",
    is_masked_mean: bool = True,
    distance: Distance = "norm",
    scope: Scope = "tensor",
    prunable: Where | None = None,
) -> FederatedAlgorithm:
    """Declares FedLTN behind a Jump-Start.

    For the first rounds each client that takes part updates a ticket of its own and sends nothing.
    Then the ticket of the highest validation accuracy, by `score`, becomes the shared model and
    what is rewound to, and its mask, by `inherits_mask`, the one that all go on with; batch norm
    stays everyone's own. The one-off broadcast of that ticket is no part of any round.

    All clients should take part in the first rounds: `sampling.full_participation_first`.

    Guarantee: none; every upload is exact, and so is the choice of the best.

    Args:
      model: as for `fed_ltn`.
      trainer: as for `fed_ltn`.
      jump_rounds: rounds of the first stage, at least 1.
      jump_target: pruned share that a client reaches in it, in [0, 1).
      score: whose validation data choose the best ticket: "own", those of the client that found it,
        which needs no communication, as the text says; or "all", the mean of the accuracies at all
        clients, as the listing has it, who would have to be sent all tickets: clients times clients
        models, which no round counts either.
      inherits_mask: whether all go on with the mask of the ticket that was chosen, whose pruned
        weights are 0 in what they are sent; else each keeps the mask that it found. The source does
        not say.
      prune_rate: as for `fed_ltn`.
      target: as for `fed_ltn`, of what follows.
      accuracy_threshold: as for `fed_ltn`.
      strength: as for `fed_ltn`.
      mixing: as for `fed_ltn`.
      momentum: as for `fed_ltn`.
      looks_ahead: as for `fed_ltn`.
      home: as for `fed_ltn`.
      rewinds: as for `fed_ltn`.
      prunes: as for `fed_ltn`.
      is_masked_mean: as for `fed_ltn`.
      distance: as for `fed_ltn`.
      scope: as for `fed_ltn`.
      prunable: as for `fed_ltn`.

    Returns:
      The algorithm; a client's state is that of FedLTN and its model of the first stage.

    Raises:
      ValueError: as for `fed_ltn`.

    Source: Mugunthan 2022, chapter 4, algorithm 2; `personalization` section 7.
    """
    given = locals()
    options = Pruning(**{name: given[name] for name in Pruning._fields})
    scheme = scheme_of(model, trainer, options)
    ltn = on_tickets(model, trainer, options, scheme)

    def init(key):
        server = ltn.init(key)
        return ServerState(server, scheme.first(server).mask, jnp.bool_(False))

    def keeps(server):
        params = server.inner.params
        return Jumping(scheme.first(server.inner), params, jnp.float32(-1), jnp.bool_(False))

    def mask_of(server, mask, has_jumped):
        """Takes the shared mask over, where this is due."""
        if not inherits_mask:
            return mask
        return trees.where(server.has_jumped & ~has_jumped, server.mask, mask)

    def broadcast(server, client):
        mask = mask_of(server, *client.known)
        ticket = ltn.broadcast(server.inner, client.replace(known=mask))
        ticket = ticket._replace(ticket=SentIf(ticket.ticket, client.stage != LOCAL))
        return Message(ticket, Known(mask))

    def alone(message, own, client, hyper, key):
        mask, start = masks.unpacked(own.inner.mask, scheme.weights), message.ticket.start
        # Batch norm is no part of a ticket, and goes back no further than this round.
        start = None if start is None else scheme.home.joined(start, own.params)
        target = hyper.algorithm["jump_target"]
        found = scheme.update(own.params, mask, start, client, hyper, target, key)
        kept = Own(masks.packed(found.mask), scheme.home.own(found.params))
        info = {"pruned_share": pruned_share(found.mask), "validation_accuracy": found.accuracy}
        # Of the ticket that is kept, which may have been pruned and trained since it was tried.
        # Whoever has no data has learned nothing that others could go on with.
        accuracy = accuracy_of(model, found.params, client.validation)
        accuracy = jnp.where(client.size > 0, accuracy, own.accuracy)
        state = Jumping(kept, found.params, accuracy, own.has_jumped)
        update = Sparse(scheme.home.sent(found.params), scheme.home.sent(found.mask))
        silent = SentIf(update, jnp.bool_(False))
        return ClientOutput(silent, joins(client), state, found.metrics, info)

    def together(message, own, client, hyper, key):
        inner = own.inner._replace(mask=message.mask)
        output = ltn.client(message.ticket, inner, client, hyper, key)
        state = own._replace(inner=output.state, has_jumped=jnp.bool_(True))
        return output._replace(update=SentIf(output.update, jnp.bool_(True)), state=state)

    def client(message, own, client, hyper, key):
        return jax.lax.cond(
            client.stage == LOCAL,
            lambda: alone(message, own, client, hyper, key),
            lambda: together(message, own, client, hyper, key),
        )

    def server_step(server, aggregate, hyper, round, key):
        inner, info = ltn.server_step(server.inner, aggregate, hyper, round, key)
        is_alone = round.stage == LOCAL
        return server._replace(inner=trees.where(is_alone, server.inner, inner)), info

    def jump(server, clients, hyper, key):
        scores, inner = np.array(clients.of_all(lambda row: row.accuracy)), server.inner
        trained = np.flatnonzero(scores >= 0)
        if not len(trained):  # All go on from the start.
            return server._replace(has_jumped=np.bool_(True))
        if score == "all":
            scores[trained] = [np.mean(clients.scores(int(i))) for i in trained]
        best = int(trained[np.argmax(scores[trained])])
        found = clients.of(best)
        shared = scheme.home.joined(found.params, inner.params)
        start = None if inner.start is None else shared
        inner = inner._replace(params=shared, start=start)
        return ServerState(inner, found.inner.mask, np.bool_(True))

    def accuracy(own, validation):
        return accuracy_of(model, own.params, validation)

    def personal(server, own, client):
        mask = mask_of(server, own.inner.mask, own.has_jumped)
        jumped = scheme.personal(server.inner, own.inner._replace(mask=mask))
        mask = masks.unpacked(own.inner.mask, scheme.weights)
        alone = Sparse(masks.applied(mask, own.params), mask)
        return trees.where(server.has_jumped, jumped, alone)

    return ltn._replace(
        name="jump_start",
        init=init,
        broadcast=broadcast,
        client=client,
        server_step=server_step,
        views=Views(personal=personal),
        client_state=ClientState(init=keeps, known=lambda own: (own.inner.mask, own.has_jumped)),
        stages=Stages(
            stage_of=lambda server, hyper, r: jnp.where(r < jump_rounds, LOCAL, SHARED),
            host_steps=(HostStep(jump_rounds, jump, score=accuracy if score == "all" else None),),
        ),
    ).with_numbers({"jump_target": jump_target}, {"jump_target": Decay})
