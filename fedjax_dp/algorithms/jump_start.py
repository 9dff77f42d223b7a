"""Jump-Start: clients first train alone; then FedLTN starts from their best ticket."""

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_dp.algorithms.base import ClientState, FederatedAlgorithm, HostStep, Stages, Views
from fedjax_dp.algorithms.fed_ltn import Own, Scheme, Tickets, on_tickets, scheme_of
from fedjax_dp.clients.base import LocalTrainer
from fedjax_dp.clients.selection import accuracy_of
from fedjax_dp.core import masks, trees
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.core.masks import Sparse
from fedjax_dp.core.messages import Known, SentIf
from fedjax_dp.core.ranges import Count, Decay
from fedjax_dp.core.trees import PyTree
from fedjax_dp.models.base import Model

LOCAL, SHARED = 0, 1
Score = Literal["own", "all"]


class Message(NamedTuple):
    """The message of FedLTN, and the packed mask of its ticket."""

    ticket: PyTree
    mask: PyTree


class ServerState(NamedTuple):
    """FedLTN's server state, the mask of the chosen ticket (or full), and whether it is chosen."""

    inner: Any
    mask: PyTree
    has_jumped: jax.typing.ArrayLike


class Jumping(NamedTuple):
    """A client's state in FedLTN, and its model of the first stage; accuracy −1 at first."""

    inner: Own
    params: PyTree
    accuracy: jax.Array
    has_jumped: jax.Array


@dataclass(frozen=True)
class _Stages:
    """The functions of both stages: `alone` up to the jump, `together` by FedLTN after it."""

    scheme: Scheme
    ltn: FederatedAlgorithm
    score: Score
    inherits_mask: bool

    def init(self, key):
        server = self.ltn.init(key)
        return ServerState(server, self.scheme.first(server).mask, jnp.bool_(False))

    def own(self, server):
        """Makes a client's first state."""
        first = self.scheme.first(server.inner)
        return Jumping(first, server.inner.params, jnp.float32(-1), jnp.bool_(False))

    def mask_of(self, server, mask, has_jumped):
        """Adopts the shared mask in a client's first round after the jump."""
        if not self.inherits_mask:
            return mask
        return trees.where(server.has_jumped & ~has_jumped, server.mask, mask)

    def known_of(self, own):
        """Returns the mask that a client has sent, full before its first round after the jump."""
        full = masks.packed(masks.full(self.scheme.weights))
        return trees.where(own.has_jumped, own.inner.mask, full), own.has_jumped

    def broadcast(self, server, client):
        mask = self.mask_of(server, *client.known)
        message = self.ltn.broadcast(server.inner, client.replace(known=mask))
        ticket = SentIf(message.ticket, client.stage != LOCAL)
        return Message(message._replace(ticket=ticket), Known(mask))

    def client(self, *arguments):
        stage = arguments[2].stage
        return jax.lax.cond(
            stage == LOCAL, lambda: self.alone(*arguments), lambda: self.together(*arguments)
        )

    def alone(self, message, own, client, hyper, key):
        scheme, target = self.scheme, hyper.algorithm["jump_target"]
        start = message.ticket.start
        ticket = scheme.update(own.inner, own.params, start, client, hyper, target, key)
        output = scheme.output(ticket, client)
        # The accuracy of the final ticket, which may have been pruned and trained since it was
        # evaluated; a client without data has found no ticket for others.
        accuracy = accuracy_of(scheme.model, ticket.params, client.validation)
        accuracy = jnp.where(client.size > 0, accuracy, own.accuracy)
        state = Jumping(output.state, ticket.params, accuracy, own.has_jumped)
        return output._replace(update=SentIf(output.update, jnp.bool_(False)), state=state)

    def together(self, message, own, client, hyper, key):
        inner, ticket = own.inner, message.ticket
        if self.inherits_mask:
            inner = inner._replace(mask=message.mask)
        else:
            # The server does not have the mask of the first stage, and sent the whole model.
            mask = self.scheme.home.sent(masks.unpacked(inner.mask, self.scheme.weights))
            params = masks.applied(mask, ticket.ticket.values)
            ticket = ticket._replace(ticket=Sparse(params, mask))
        output = self.ltn.client(ticket, inner, client, hyper, key)
        state = own._replace(inner=output.state, has_jumped=jnp.bool_(True))
        return output._replace(update=SentIf(output.update, jnp.bool_(True)), state=state)

    def server_step(self, server, aggregate, hyper, round, key):
        inner, info = self.ltn.server_step(server.inner, aggregate, hyper, round, key)
        is_alone = round.stage == LOCAL
        return server._replace(inner=trees.where(is_alone, server.inner, inner)), info

    def jump(self, server, clients, hyper, key):
        """Makes the best ticket the shared one, on the host."""
        scores, inner = np.array(clients.of_all(lambda own: own.accuracy)), server.inner
        trained = np.flatnonzero(scores >= 0)
        if not len(trained):  # All start from the initial model.
            return server._replace(has_jumped=np.bool_(True))
        if self.score == "all":
            scores[trained] = [np.mean(clients.scores(int(i))) for i in trained]
        best = clients.of(int(trained[np.argmax(scores[trained])]))
        shared = self.scheme.home.joined(best.params, inner.params)
        start = None if inner.start is None else shared
        inner = inner._replace(params=shared, start=start)
        return ServerState(inner, best.inner.mask, np.bool_(True))

    def accuracy(self, own, validation):
        return accuracy_of(self.scheme.model, own.params, validation)

    def personal(self, server, own, client):
        mask = self.mask_of(server, own.inner.mask, own.has_jumped)
        jumped = self.scheme.personal(server.inner, own.inner._replace(mask=mask))
        mask = masks.unpacked(own.inner.mask, self.scheme.weights)
        alone = Sparse(masks.applied(mask, own.params), mask)
        return trees.where(server.has_jumped, jumped, alone)


@checked
def jump_start(
    model: Model,
    trainer: LocalTrainer,
    *,
    jump_rounds: Count = 25,
    jump_target: Decay = 0.3,
    score: Score = "own",
    inherits_mask: bool = True,
    tickets: Tickets = Tickets(),
) -> FederatedAlgorithm:
    """Declares FedLTN after a Jump-Start.

    In the first rounds each participant updates its own ticket and sends nothing. Then the ticket
    of the highest validation accuracy, by `score`, becomes the shared model and the rewind target,
    and with `inherits_mask` its mask that of all clients; batch norm stays local. The one-off
    broadcast of that ticket is not part of any round.

    All clients should take part in the first rounds: `sampling.full_participation_first`.

    Guarantee: none; every upload is exact, and so is the choice of the best.

    Args:
      model: as for `fed_ltn`.
      trainer: as for `fed_ltn`.
      jump_rounds: rounds of the first stage, at least 1.
      jump_target: pruned share that a client reaches in it, in [0, 1).
      score: the validation data that choose the best ticket: "own", those of the client that found
        it, which needs no communication, as in the text; or "all", the mean of the accuracies at
        all clients, as in the listing, to each of which all tickets would have to be sent, which is
        not counted either.
      inherits_mask: whether all clients continue with the mask of the chosen ticket, whose pruned
        weights are 0 in the model that they receive; else each has its own mask. The source does
        not specify it.
      tickets: as for `fed_ltn`, whose target is that of the rounds after the jump.

    Returns:
      The algorithm; a client's state is that of FedLTN and its model of the first stage.

    Raises:
      ValueError: as for `fed_ltn`.

    Source: Mugunthan 2022 (FedLTN with Jump-Start), chapter 4, algorithm 2.
    """
    scheme = scheme_of(model, trainer, tickets)
    ltn = on_tickets(scheme)
    stages = _Stages(scheme, ltn, score, inherits_mask)
    by_all = stages.accuracy if score == "all" else None
    return ltn._replace(
        name="jump_start",
        init=stages.init,
        broadcast=stages.broadcast,
        client=stages.client,
        server_step=stages.server_step,
        views=Views(personal=stages.personal),
        client_state=ClientState(init=stages.own, known=stages.known_of),
        stages=Stages(
            stage_of=lambda server, hyper, r: jnp.where(r < jump_rounds, LOCAL, SHARED),
            host_steps=(HostStep(jump_rounds, stages.jump, score=by_all),),
        ),
    ).with_numbers({"jump_target": jump_target}, {"jump_target": Decay})
