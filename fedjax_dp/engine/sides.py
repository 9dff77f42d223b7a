"""The two sides of a round: a client's, from what it receives, and the server's."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from chex import PRNGKey

from fedjax_dp.algorithms.base import ClientOutput, FederatedAlgorithm, Hyper, Round
from fedjax_dp.clients.client_data import ClientData
from fedjax_dp.core import trees
from fedjax_dp.core.inspection import note_finite
from fedjax_dp.core.keys import Purpose, fold
from fedjax_dp.core.materialize import as_stored, updates_stored
from fedjax_dp.core.trees import PyTree
from fedjax_dp.engine.record_access import run_client
from fedjax_dp.privacy.claims import ClientClaim
from fedjax_dp.server.base import Close, Roster, Sender


class Received(NamedTuple):
    """All that reaches a client in a round."""

    message: PyTree  # The algorithm's message, as `core.messages.received` returns it.
    aggregator: PyTree  # The aggregator's message.
    hyper: Hyper  # The numbers of this client.
    public_key: PRNGKey  # The key that all clients and the server share in this round.
    roster: Roster  # The cohort.


class Work(NamedTuple):
    """The result of one client's round."""

    output: ClientOutput  # The update, the next state and the metrics.
    sent: PyTree  # What the aggregator adds up or stacks; zeros where the client takes no part.
    is_finite: jax.Array  # If false, a contribution of zeros was sent.


class Closed(NamedTuple):
    """The server's part of a round, done."""

    server: PyTree  # The algorithm's state.
    aggregator: PyTree  # The aggregator's state.
    aggregate: PyTree  # What the server stepped along; zeros if it was not finite.
    is_finite: jax.Array  # Whether the aggregate was finite.
    of_aggregator: Any  # The aggregator's metrics.
    of_server: Any  # The server step's metrics.


def client_side(
    algorithm: FederatedAlgorithm,
    received: Received,
    own: PyTree,
    client: ClientData,
    key: PRNGKey,
    takes_part: Any = True,
) -> Work:
    """Runs one client's round; its state and metrics count only if `Work.is_finite`."""
    with updates_stored(_clips_whole(algorithm)):
        output = run_client(algorithm, received.message, own, client, received.hyper, key)
    return contributed(algorithm, received, output, client.index, key, takes_part)


def _clips_whole(algorithm: FederatedAlgorithm) -> bool:
    claim = algorithm.aggregator.claim
    return isinstance(claim, ClientClaim) and claim.clips_whole


def contributed(
    algorithm: FederatedAlgorithm,
    received: Received,
    output: ClientOutput,
    index: Any,
    key: PRNGKey,
    takes_part: Any = True,
) -> Work:
    """Makes what a client sends of its trained update: the contribution, encoded."""
    aggregator, numbers = algorithm.aggregator, received.hyper.aggregator
    own_key = fold(key, Purpose.ENCODING, 0)
    sender = Sender(index, output.weight, own_key, received.public_key, received.roster)
    contribution = aggregator.contribute(received.aggregator, numbers, output.received, sender)
    contribution = jax.tree.map(trees.at_least_float32, contribution)
    # A finite update may overflow in the contribution, except where that is the update scaled down.
    # The update is checked itself, because clipping hides values that are not finite.
    is_smaller = _clips_whole(algorithm)
    may_overflow = () if is_smaller else contribution
    with updates_stored(is_smaller):
        update = as_stored(output.received)
    note_finite("the update", output.received, counts=takes_part, client=index)
    note_finite("the contribution", contribution, counts=takes_part, client=index)
    checked = update, output.weight, output.state, may_overflow
    is_finite = trees.can_be_summed(checked)
    counts = takes_part & is_finite
    sent = trees.where(counts, contribution, trees.zeros_like(contribution))
    if aggregator.encode is not None:
        message = aggregator.encode(received.aggregator, numbers, sent, sender)
        # A message that is not sent adds no share of the noise either.
        sent = trees.where(takes_part, message, trees.zeros_like(message))
    return Work(output, sent, is_finite)


def clients_at_server(algorithm: FederatedAlgorithm, clients: PyTree) -> PyTree:
    """Returns what a server that runs no clients holds of their states before the first round.

    None, or the first state of any client, the part of each that the algorithm's server knows, and
    the round of each that counted last, -1 for none.
    """
    states = algorithm.client_state
    if states is None:
        return clients
    known = None if states.known is None else jax.vmap(states.known)(clients)
    last = jnp.full(len(jax.tree.leaves(clients)[0]), -1, jnp.int32)
    return trees.take(clients, 0), known, last


def server_side(
    algorithm: FederatedAlgorithm,
    server: PyTree,
    aggregator: PyTree,
    hyper: Hyper,
    total: PyTree,
    close: Close,
    round: Round,
    key: PRNGKey,
) -> Closed:
    """Combines a sum, or stack `[slots, ...]`, of messages and steps along the aggregate."""
    kept, aggregate, of_aggregator = algorithm.aggregator.combine(
        aggregator, hyper.aggregator, total, close
    )
    # An aggregate of finite contributions may overflow; then no client counts as contributing.
    note_finite("the aggregate", aggregate, round=round.index)
    is_finite = trees.is_finite(aggregate)
    aggregate = trees.where(is_finite, aggregate, trees.zeros_like(aggregate))
    server, of_server = algorithm.server_step(server, aggregate, hyper, round, key)
    note_finite("the server's state", server, round=round.index)
    return Closed(server, kept, aggregate, is_finite, of_aggregator, of_server)
