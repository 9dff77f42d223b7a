"""Canary clients: an update of the auditor's choice, far above the clip norm."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_dp.algorithms.base import FederatedAlgorithm
from fedjax_dp.audit.canaries import (
    MARK,
    STRENGTH,
    Planted,
    Watched,
    draw_coordinates,
    flat,
    read_mark,
    through,
)
from fedjax_dp.clients.base import ClientData, LocalConfig
from fedjax_dp.core import checks, trees
from fedjax_dp.core.trees import PyTree
from fedjax_dp.data import participants
from fedjax_dp.data.federated import FederatedData
from fedjax_dp.data.participants import Participation


def plant_clients(
    algorithm: FederatedAlgorithm,
    data: FederatedData,
    participation: Participation,
    num_canaries: int,
    rng: np.random.Generator,
    *,
    relation: str = "zero_out",
) -> Planted:
    """Adds clients whose update is one entry of the parameters, far above the clip norm.

    No two canaries share an entry, so that in the released aggregate each shows in its own place.
    Under zero-out a canary that is not included sends an update that is not finite, which the
    engine counts as nobody's; under replace-one it sends the opposite update.

    Args:
      algorithm: an algorithm that claims privacy for clients; its aggregate has the structure of
        an update.
      data: the clients' examples; every canary gets a copy of the first one.
      participation: who joins a round; the sampler and, as nearly as whole cohorts allow, the
        sampling rate are kept.
      num_canaries: at least 1, at most the number of parameters.
      rng: draws the entries.
      relation: which data are neighbours, "zero_out" or "replace_one".

    Returns:
      The planted population; the canaries are its last clients.

    Raises:
      ValueError: if the algorithm claims nothing for clients, or an argument is not valid.
    """
    checks.require(
        algorithm.aggregator.event is not None,
        "algorithm",
        "claim privacy for clients",
        algorithm.name,
    )
    num_entries = sum(x.size for x in _aggregate_structure(algorithm, data))
    coordinates = draw_coordinates(np.ones(num_entries, bool), num_canaries, rng)
    num_clients = data.num_clients + num_canaries
    absent = np.nan if relation != "replace_one" else -STRENGTH
    aggregator = algorithm.aggregator

    def client(server, row, client: ClientData, config: LocalConfig, key):
        output = algorithm.client(server.inner, row, client, config, key)
        # What the audit itself reads is released to nobody.
        marked = client.read_by("the audit", algorithm.record_event)
        first = jnp.clip(marked.start, 0, marked.examples[MARK].shape[0] - 1)
        is_canary, is_included, index = read_mark(marked.examples[MARK][first])
        value = jnp.where(is_included, STRENGTH, absent)
        planted = _unit_vector(output.update, jnp.asarray(coordinates)[index], value)
        update = trees.where(is_canary & (client.size > 0), planted, output.update)
        return output._replace(update=update)

    def server_step(server, aggregate, round_index):
        seen = server.seen + flat(aggregate)[coordinates]
        return Watched(algorithm.server_step(server.inner, aggregate, round_index), seen)

    watched = algorithm._replace(
        init=lambda key: Watched(algorithm.init(key), jnp.zeros(num_canaries)),
        client=client,
        server_step=server_step,
        aggregator=aggregator._replace(init=lambda server: aggregator.init(server.inner)),
        config=jax.tree.map(lambda x: _grown(x, num_canaries), algorithm.config),
        **through(algorithm),
    )
    return Planted(
        "client",
        relation,
        watched,
        _with_clients(data, num_canaries),
        _regrown(participation, num_clients),
        np.arange(data.num_clients, num_clients),
        lambda state: state.server.seen,
    )


def _with_clients(data: FederatedData, count: int) -> FederatedData:
    """Appends clients that own a copy of the first record each."""
    examples = {
        name: np.concatenate([array, np.repeat(np.asarray(array[:1]), count, axis=0)])
        for name, array in data.examples.items()
    }
    mark = np.concatenate([np.full(data.num_examples, -1), np.arange(count)])
    offsets = np.concatenate([data.offsets, data.num_examples + 1 + np.arange(count)])
    return FederatedData({**examples, MARK: mark.astype(np.int32)}, offsets)


def _aggregate_structure(algorithm: FederatedAlgorithm, data: FederatedData) -> list[Any]:
    """Finds the float leaves of an aggregate and requires them to be those of an update."""

    def one_round(examples, key):
        server = algorithm.init(key)
        client = ClientData(examples, jnp.int32(0), jnp.int32(1), jnp.int32(0), limit=1)
        row = None if algorithm.init_row is None else algorithm.init_row(server)
        output = algorithm.client(server, row, client, algorithm.config.row(0), key)
        state = algorithm.aggregator.init(server)
        part = algorithm.aggregator.contribute(state, output.update, output.weight)
        if algorithm.aggregator.encode is not None:
            part = algorithm.aggregator.encode(state, part, key, key)
        if algorithm.aggregator.is_stacked:
            part = (jax.tree.map(lambda x: jnp.asarray(x)[None], part), jnp.ones(1, bool))
        return output.update, algorithm.aggregator.combine(state, part, key)[1]

    examples = {k: jax.ShapeDtypeStruct(v.shape, v.dtype) for k, v in data.examples.items()}
    examples[MARK] = jax.ShapeDtypeStruct((data.num_examples,), np.int32)
    update, aggregate = jax.eval_shape(one_round, examples, jax.random.key(0))
    update, aggregate = (
        [x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.floating)]
        for tree in (update, aggregate)
    )
    checks.require(
        [x.shape for x in update] == [x.shape for x in aggregate],
        "algorithm",
        "aggregate updates to something of their own shapes",
        [x.shape for x in aggregate],
    )
    return aggregate


def _grown(values: Any, count: int) -> Any:
    """Gives canaries the number of the first client."""
    array = np.asarray(values)
    return values if array.ndim == 0 else np.concatenate([array, np.repeat(array[:1], count)])


def _regrown(participation: Participation, num_clients: int) -> Participation:
    """Binds a participation to more clients at the same rate."""
    size = participation.cohort_size * num_clients / participation.num_clients
    if not participation.sampler.varies:
        size = float(np.clip(round(size), 1, num_clients))
    return participants.participation(participation.sampler, num_clients, min(size, num_clients))


def _unit_vector(tree: PyTree, coordinate: jax.Array, value: jax.Array) -> PyTree:
    """Sets the float leaves of a tree to zero but for one entry, counted as in `flat`."""
    leaves, structure = jax.tree.flatten(tree)
    built, first = [], 0
    for leaf in leaves:
        leaf = jnp.asarray(leaf)
        if jnp.issubdtype(leaf.dtype, jnp.floating):
            at = jnp.arange(leaf.size) + first == coordinate
            leaf = jnp.where(at, value, 0.0).astype(leaf.dtype).reshape(leaf.shape)
            first += leaf.size
        built.append(leaf)
    return jax.tree.unflatten(structure, built)
