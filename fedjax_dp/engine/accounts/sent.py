"""The messages of a round in shapes: up, down, and at its end."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_dp.algorithms.base import FinishForAll, Hyper
from fedjax_dp.clients.client_data import ClientData
from fedjax_dp.core import sums, trees
from fedjax_dp.core.trees import PyTree
from fedjax_dp.engine.cohort import typed
from fedjax_dp.engine.federation import Federation, Population
from fedjax_dp.engine.record_access import run_client
from fedjax_dp.engine.round import message_up
from fedjax_dp.server.base import Aggregator, Close, Fate, Roster, Sender, Stacked

_INDEX: Any = jax.ShapeDtypeStruct((), jnp.int32)


class Messages(NamedTuple):
    """Shapes of what is sent, see `core.messages`.

    Attributes:
      up: by a client.
      down: to a client that takes part.
      after: to clients at the end of a round; None for nothing.
      is_after_for_all: whether that goes to every client, or to those who contributed.
    """

    up: PyTree
    down: PyTree
    after: PyTree | None
    is_after_for_all: bool


class _Inputs(NamedTuple):
    """Shapes of what a client's round reads, in the order of its arguments."""

    server: PyTree
    own: PyTree
    client: ClientData
    hyper: Hyper
    key: Any


def messages_of(federation: Federation) -> Messages:
    """Makes the messages of one client in shapes alone; nothing is run."""
    algorithm, inputs = federation.algorithm, _inputs(federation)
    aggregator = algorithm.aggregator
    output = jax.eval_shape(partial(run_client, algorithm), *inputs)
    state = jax.eval_shape(lambda output: aggregator.init(output.received), output)
    up = jax.eval_shape(partial(message_up, aggregator), output)
    down = jax.eval_shape(algorithm.message_to, inputs.server, inputs.own, inputs.client)
    of_aggregator = jax.eval_shape(aggregator.broadcast, state)
    finish = None if algorithm.client_state is None else algorithm.client_state.finish
    after = None
    if finish is not None:
        update = jax.eval_shape(lambda output: output.received, output)
        aggregate = _aggregate(aggregator, inputs, update, state)
        after = jax.eval_shape(finish.broadcast, inputs.server, aggregate)
    return Messages(up, (down, of_aggregator), after, isinstance(finish, FinishForAll))


def _inputs(federation: Federation) -> _Inputs:
    algorithm, population = federation.algorithm, federation.population
    key = jax.random.key(0)

    def states(key):
        server = algorithm.init(key)
        clients = algorithm.client_state
        return server, None if clients is None else clients.init(server)

    def client_of(of: Population) -> ClientData:
        second = None if of.validation is None else client_of(of.validation)
        return ClientData(
            of.structure,
            _INDEX,
            _INDEX,
            _INDEX,
            of.limit,
            round=_INDEX,
            stage=_INDEX,
            validation=second,
        )

    def numbers(index):
        return jax.tree.map(jnp.asarray, typed(federation.hyper)).of_client(index)

    hyper = jax.eval_shape(numbers, _INDEX)
    server, own = jax.eval_shape(states, key)
    return _Inputs(server, own, client_of(population), hyper, key)


def _aggregate(aggregator: Aggregator, inputs: _Inputs, update: PyTree, state: PyTree) -> PyTree:
    """Finds the shapes of a cohort's aggregate."""

    def combined(state, update, numbers, key):
        roster = Roster(jnp.zeros(1, jnp.int32), jnp.ones(1, bool))
        sender = Sender(jnp.int32(0), jnp.float32(1), key, key, roster)
        broadcast = aggregator.broadcast(state)
        found = aggregator.contribute(broadcast, numbers, update, sender)
        found = jax.tree.map(trees.at_least_float32, found)
        if aggregator.encode is not None:
            found = aggregator.encode(broadcast, numbers, found, sender)
        if isinstance(aggregator, Stacked):
            gathered = jax.tree.map(lambda x: x[None], found)
        else:
            gathered = sums.value(sums.zeros_like(found))
        close = Close(roster, jnp.full(1, Fate.CONTRIBUTED, jnp.int8), key, key)
        return aggregator.combine(state, numbers, gathered, close)[1]

    return jax.eval_shape(combined, state, update, inputs.hyper.aggregator, inputs.key)
