"""Canary clients: an update of the auditor's choice, far above the clip norm."""

from typing import Any

import dp_accounting
import jax
import jax.numpy as jnp
import numpy as np

from fedjax_dp.algorithms.base import FederatedAlgorithm
from fedjax_dp.audit.canaries import (
    MARK,
    SEEN,
    STRENGTH,
    Planted,
    draw_coordinates,
    flat,
    read_mark,
)
from fedjax_dp.core import checks, trees
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.core.trees import PyTree
from fedjax_dp.data import participants
from fedjax_dp.data.federated import FederatedData
from fedjax_dp.data.participants import Participation
from fedjax_dp.engine.accounts.privacy_accounting import require_public_sizes
from fedjax_dp.engine.facts import Facts
from fedjax_dp.engine.population import population_of
from fedjax_dp.server.masking import unmasked


@checked
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

    No two canaries share an entry, so that each has its own entry in the released aggregate. Under
    zero-out a canary that is not included sends an update that is not finite, which contributes
    zero; under replace-one it sends the opposite update.

    Args:
      algorithm: an algorithm that claims privacy for clients; its aggregate, under a mask the
        mean, has the structure of an update.
      data: the clients' examples; every canary gets a copy of the first one.
      participation: how clients are drawn for a round; the sampler and, up to rounding of cohorts,
        the sampling rate are preserved.
      num_canaries: at least 1, at most the number of parameters.
      rng: draws the entries.
      relation: which data are neighbours, "zero_out" or "replace_one".

    Returns:
      The planted population; the canaries are its last clients.

    Raises:
      ValueError: if the algorithm claims nothing for clients, or an argument is not valid.
    """
    rule = "claim privacy for clients"
    checks.require(algorithm.claims.client is not None, "algorithm", rule, algorithm.name)
    require_public_sizes(relation)
    num_entries = sum(x.size for x in _aggregate_structure(algorithm, data))
    coordinates = draw_coordinates(np.ones(num_entries, bool), num_canaries, rng)
    num_clients = data.num_clients + num_canaries
    absent = np.nan if relation != "replace_one" else -STRENGTH

    def client(message, own, client, hyper, key):
        output = algorithm.client(message, own, client, hyper, key)
        # The mark belongs to the auditor, not to a client, so reading it costs no privacy.
        marked = client.read_by("the audit", lambda size, config: dp_accounting.NoOpDpEvent())
        first = jnp.clip(marked.start, 0, marked.examples[MARK].shape[0] - 1)
        is_canary, is_included, index = read_mark(marked.examples[MARK][first])
        value = jnp.where(is_included, STRENGTH, absent)
        planted = _unit_vector(output.update, jnp.asarray(coordinates)[index], value)
        update = trees.where(is_canary & (client.size > 0), planted, output.update)
        return output._replace(update=update)

    def server_step(server, aggregate, hyper, round, key):
        server, info = algorithm.server_step(server, aggregate, hyper, round, key)
        return server, {**info, SEEN: flat(unmasked(aggregate)[0])[coordinates]}

    local = jax.tree.map(lambda x: _grown(x, num_canaries), algorithm.hyper.local)
    numbers = algorithm.numbers
    if numbers.num_clients is not None:
        numbers = numbers._replace(num_clients=num_clients)
    watched = algorithm._replace(
        client=client,
        server_step=server_step,
        training=algorithm.training._replace(config=local),
        numbers=numbers,
    )
    return Planted(
        "client",
        relation,
        watched,
        _with_clients(data, num_canaries),
        _regrown(participation, num_clients),
        np.arange(data.num_clients, num_clients),
        lambda record, info: info.server[SEEN],
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
    facts = Facts(algorithm, population_of(data))
    sent, given = facts.update, unmasked(facts.aggregate)[0]
    update, aggregate = (
        [x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.floating)]
        for tree in (sent, given)
    )
    fits = [x.shape for x in update] == [x.shape for x in aggregate]
    rule = "have an aggregate with the shapes of an update"
    checks.require(fits, "algorithm", rule, [x.shape for x in aggregate])
    return aggregate


def _grown(values: Any, count: int) -> Any:
    """Extends an array by canaries, which get the value of the first client."""
    array = np.asarray(values)
    return values if array.ndim == 0 else np.concatenate([array, np.repeat(array[:1], count)])


def _regrown(participation: Participation, num_clients: int) -> Participation:
    """Binds a participation to more clients at the same rate."""
    size = participation.cohort_size * num_clients / participation.num_clients
    if not participation.sampler.varies:
        size = float(np.clip(round(size), 1, num_clients))
    return participants.participation(participation.sampler, num_clients, min(size, num_clients))


def _unit_vector(tree: PyTree, coordinate: jax.Array, value: jax.Array) -> PyTree:
    """Sets the float leaves of a tree to zero except one entry, counted as in `flat`."""
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
