"""What is sent in a round: which parts of states and updates cross between server and clients."""

from collections.abc import Iterable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_dp.algorithms.base import FederatedAlgorithm, FinishForAll, Hyper
from fedjax_dp.clients.base import ClientData
from fedjax_dp.core import sums, trees
from fedjax_dp.core.dependence import dependence
from fedjax_dp.core.messages import Known, SentIf, is_part, received
from fedjax_dp.core.trees import PyTree
from fedjax_dp.engine.cohort import typed
from fedjax_dp.engine.federation import Federation, Population
from fedjax_dp.engine.record_access import run_client
from fedjax_dp.server.base import Close, Fate, Roster, Sender, Stacked

_INDEX: Any = jax.ShapeDtypeStruct((), jnp.int32)


class Messages(NamedTuple):
    """Shapes of what is sent, see `core.messages`.

    Attributes:
      up: by a client.
      down: to a client that takes part.
      after: to clients when a round is over; None where nothing is.
      is_after_for_all: whether that goes to everybody, or to those who contributed.
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
    """Finds what is sent, by following what a client's round gives back to what it reads.

    Args:
      federation: what is run; one client is traced, nothing is run.

    Returns:
      The shapes of the messages.
    """
    algorithm, inputs = federation.algorithm, _inputs(federation)
    sets, output = dependence(partial(run_client, algorithm), *inputs)
    update = jax.eval_shape(lambda output: output.received, output)
    aggregator = algorithm.aggregator
    state = jax.eval_shape(aggregator.init, update)
    read = _read_by_aggregator(algorithm, inputs, output, state)
    of_update = [
        of_leaf if is_read else frozenset()
        for of_leaf, is_read in zip(_sets_in(sets.update), read.update, strict=True)
    ]
    of_weight = sets.weight if read.weight else frozenset()
    unknown = _unknown_to_server(inputs)
    is_new = [bool(of_leaf & unknown) for of_leaf in of_update]
    is_weighed = bool(of_weight & unknown)

    message = jax.eval_shape(lambda output: output.message, output)
    if aggregator.sent_up is not None:
        up = jax.eval_shape(aggregator.sent_up, message, output.weight)
    else:
        weight = output.weight if is_weighed else None
        if isinstance(message, Known):
            up = ()
        elif isinstance(message, SentIf):
            up = SentIf((message.values, weight), message.is_sent)
        else:
            marks = jax.tree.unflatten(jax.tree.structure(output.update), is_new)
            up = _marked_parts(marks, output.update, message), weight

    after = _after(algorithm, inputs, update, state)
    clients = algorithm.client_state
    is_for_all = clients is not None and isinstance(clients.finish, FinishForAll)
    down = jax.eval_shape(algorithm.message_to, inputs.server, inputs.own, inputs.client)
    return Messages(up, (down, _marked(read.state, state)), after, is_for_all)


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


def _unknown_to_server(inputs: _Inputs) -> frozenset[int]:
    """Marks what the server does not know: what clients keep, hold and draw."""
    marks = jax.tree.map(lambda x: True, inputs)
    client = marks.client.replace(index=False, round=False, stage=False)
    marks = marks._replace(
        server=jax.tree.map(lambda x: False, inputs.server),
        client=client,
        hyper=jax.tree.map(lambda x: False, inputs.hyper),
    )
    return frozenset(i for i, mark in enumerate(jax.tree.leaves(marks)) if mark)


class _Read(NamedTuple):
    """Which leaves are read; whether the weight is."""

    state: list[bool]
    update: list[bool]
    weight: bool


def _read_by_aggregator(
    algorithm: FederatedAlgorithm, inputs: _Inputs, output: Any, state: PyTree
) -> _Read:
    """Finds what of its state, of an update and of a weight an aggregator reads at the client."""
    aggregator, numbers = algorithm.aggregator, inputs.hyper.aggregator

    def contribution(state, update, weight, sender, numbers, key):
        one = Sender(sender, weight, key, key, _roster(sender))
        found = aggregator.contribute(state, numbers, received(update), one)
        if aggregator.encode is not None:
            found = aggregator.encode(state, numbers, found, one)
        return found

    parts = (state, output.update, output.weight)
    sets, _ = dependence(contribution, *parts, _INDEX, numbers, inputs.key)
    reached = _union(_sets_in(sets))
    flags = iter(i in reached for i in range(len(jax.tree.leaves(parts))))
    of_state, of_update, (of_weight,) = (
        [next(flags) for _ in jax.tree.leaves(part)] for part in parts
    )
    return _Read(of_state, of_update, of_weight)


def _after(
    algorithm: FederatedAlgorithm, inputs: _Inputs, update: PyTree, state: PyTree
) -> PyTree | None:
    """Finds what clients are sent when a round is over."""
    clients = algorithm.client_state
    if clients is None or clients.finish is None:
        return None
    aggregate = _aggregate(algorithm, inputs, update, state)
    return jax.eval_shape(clients.finish.broadcast, inputs.server, aggregate)


def _aggregate(
    algorithm: FederatedAlgorithm, inputs: _Inputs, update: PyTree, state: PyTree
) -> PyTree:
    """Finds the shapes of what an aggregator makes of a cohort."""
    aggregator = algorithm.aggregator

    def combined(state, update, numbers, key):
        roster = _roster(jnp.int32(0))
        sender = Sender(jnp.int32(0), jnp.float32(1), key, key, roster)
        found = aggregator.contribute(state, numbers, update, sender)
        found = jax.tree.map(trees.at_least_float32, found)
        if aggregator.encode is not None:
            found = aggregator.encode(state, numbers, found, sender)
        if isinstance(aggregator, Stacked):
            gathered = jax.tree.map(lambda x: x[None], found)
        else:
            gathered = sums.value(sums.zeros_like(found))
        close = Close(roster, jnp.full(1, Fate.CONTRIBUTED, jnp.int8), key, key)
        return aggregator.combine(state, numbers, gathered, close)[1]

    return jax.eval_shape(combined, state, update, inputs.hyper.aggregator, inputs.key)


def _roster(client: jax.Array) -> Roster:
    return Roster(client[None], jnp.ones(1, bool))


def _is_set(x: Any) -> bool:
    return isinstance(x, frozenset)


def _sets_in(tree: PyTree) -> list[frozenset[int]]:
    return jax.tree.leaves(tree, is_leaf=_is_set)


def _union(sets: Iterable[frozenset[int]]) -> frozenset[int]:
    return frozenset().union(*sets)


def _marked(marks: list[bool], tree: PyTree) -> list[Any]:
    return [x for x, mark in zip(jax.tree.leaves(tree), marks, strict=True) if mark]


def _marked_parts(marks: PyTree, update: PyTree, message: PyTree) -> list[Any]:
    """Keeps what is marked of an update; what is masked, coded or repeated goes as a whole."""
    parts = (jax.tree.leaves(tree, is_leaf=is_part) for tree in (marks, update, message))
    return [
        sent
        for mark, whole, sent in zip(*parts, strict=True)
        if is_part(whole) or is_part(sent) or mark
    ]
