"""Canaries: clients or records made by the auditor, planted in a population and observed."""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import dp_accounting
import jax
import jax.numpy as jnp
import numpy as np

from fedjax_dp.algorithms.base import ClientOutput, FederatedAlgorithm
from fedjax_dp.clients.client_data import PublicClient
from fedjax_dp.core import checks, trees
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.core.trees import PyTree
from fedjax_dp.data import participants
from fedjax_dp.data.federated import FederatedData
from fedjax_dp.data.federated import flat as by_path
from fedjax_dp.data.participants import Participation
from fedjax_dp.engine.accounts.privacy_accounting import require_public_sizes
from fedjax_dp.engine.facts import FederationFacts, population_of
from fedjax_dp.engine.record import Fate, RoundInfo, RoundRecord
from fedjax_dp.models.base import Model
from fedjax_dp.server.masking import unmasked

# The array that marks the records that are canaries: -1 for an ordinary record,
# k for canary k that is included, -2 - k for canary k that is not.
MARK = "canary"
# A canary's contribution before clipping, in units of the parameters: far beyond any clip norm.
STRENGTH = 1e6
# The key of the attacker's observations of canaries in the algorithm's info.
SEEN = "seen_of_canaries"


class Planted(NamedTuple):
    """An algorithm and a population with canaries in it."""

    unit: str  # "client" or "record"
    relation: str  # "zero_out" or "replace_one"
    algorithm: FederatedAlgorithm  # Its info reports what an attacker sees of every canary.
    data: FederatedData  # The population, with all of the canaries' records.
    participation: Participation
    owners: np.ndarray  # [canaries]: the client that each canary is, or that holds it.
    # [canaries], or [observations, canaries], of one round or of several, higher if a canary was
    # more likely included.
    scores: Callable[[RoundRecord, RoundInfo], jax.Array]
    sends_votes: bool = False  # Distances between votes have no meaning.

    def marks(self, is_included: jax.Array) -> jax.Array:
        """Writes the auditor's coins, `[canaries]`, into the array `MARK` of `data`."""
        mark = jnp.asarray(self.data.examples[MARK])
        drawn = jnp.asarray(is_included)[jnp.maximum(mark, 0)]
        return jnp.where((mark >= 0) & ~drawn, -2 - mark, mark)


def read_mark(mark: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns whether a mark is a canary's, whether that is included, and its index."""
    return mark != -1, mark >= 0, jnp.where(mark >= 0, mark, jnp.maximum(-2 - mark, 0))


def flat(tree: PyTree) -> jax.Array:
    """Flattens the float leaves of a tree into one vector, in float32 or better."""
    leaves = [jnp.asarray(x) for x in jax.tree.leaves(tree)]
    floats = [x.reshape(-1) for x in leaves if jnp.issubdtype(x.dtype, jnp.floating)]
    return jnp.concatenate([trees.at_least_float32(x) for x in floats])


def draw_coordinates(
    is_open: np.ndarray, num_canaries: int, rng: np.random.Generator
) -> np.ndarray:
    """Draws distinct entries of the parameters, counted as in `flat`, one for each canary."""
    (entries,) = np.nonzero(is_open)
    checks.whole("num_canaries", num_canaries)
    rule = f"be at most {entries.size}, one for each entry of the update"
    checks.require(num_canaries <= entries.size, "num_canaries", rule, num_canaries)
    return rng.choice(entries, num_canaries, replace=False).astype(np.int32)


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
    facts = FederationFacts(algorithm, population_of(data))
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
            is_entry = jnp.arange(leaf.size) + first == coordinate
            leaf = jnp.where(is_entry, value, 0.0).astype(leaf.dtype).reshape(leaf.shape)
            first += leaf.size
        built.append(leaf)
    return jax.tree.unflatten(structure, built)


class CanaryReader(Protocol):
    """An attacker's observation of a client's canaries."""

    def __call__(
        self,
        server: PyTree,
        output: ClientOutput,
        own: PyTree,
        client: PublicClient,
        canaries: jax.Array,
        /,
    ) -> jax.Array:
        """Returns `[..., canaries]`, higher if a canary was more likely included."""
        ...


@checked
def plant_records(
    make_algorithm: Callable[[Model], FederatedAlgorithm],
    model: Model,
    data: FederatedData,
    participation: Participation,
    num_canaries: int,
    rng: np.random.Generator,
    *,
    relation: str = "zero_out",
) -> Planted:
    """Adds records whose gradient is one entry of the parameters, far above the clip norm.

    The model is wrapped: for a canary the loss is a multiple of one parameter, and its prediction
    is correct where it is included; other records are unchanged. The attacker observes what leaves
    the client or, if nothing does, the client's own model. Under zero-out a canary that is not
    included has gradient zero, and the client's size, which is public, does not change; under
    replace-one it has the opposite gradient.

    Args:
      make_algorithm: `(model) -> algorithm` that claims privacy for records.
      model: the model to train.
      data: the clients' examples; canaries go to clients that have some, in turn.
      participation: how clients are drawn for a round.
      num_canaries: at least 1, at most the number of trained parameters.
      rng: draws the entries.
      relation: which data are neighbours, "zero_out" or "replace_one".

    Returns:
      The planted population; canaries are the last records of their clients.

    Raises:
      ValueError: if the algorithm claims nothing for records, or an argument is not valid.
    """
    require_public_sizes(relation)
    params = jax.eval_shape(model.init, jax.random.key(0))
    coordinates = draw_trained(model, num_canaries, rng)
    algorithm = make_algorithm(_with_canaries(model, coordinates, relation))

    def read(server, output: ClientOutput, own: PyTree, client: PublicClient, canaries: jax.Array):
        sent, kept = released(output, own, params)
        # Descent moves the parameters against the gradient of the canary.
        return -flat(kept if sent is None else sent)[jnp.asarray(coordinates)[canaries]]

    return watch_records(algorithm, data, participation, num_canaries, read, relation)


def draw_trained(model: Model, num_canaries: int, rng: np.random.Generator) -> np.ndarray:
    """Draws for each canary an entry of the parameters that training changes."""
    params = jax.eval_shape(model.init, jax.random.key(0))
    is_trained = [
        np.full(leaf.size, not is_buffer)
        for leaf, is_buffer in zip(
            jax.tree.leaves(params), jax.tree.leaves(model.is_buffer(params)), strict=True
        )
    ]
    return draw_coordinates(np.concatenate(is_trained), num_canaries, rng)


def watch_records(
    algorithm: FederatedAlgorithm,
    data: FederatedData,
    participation: Participation,
    num_canaries: int,
    read: CanaryReader,
    relation: str,
) -> Planted:
    """Assigns canaries to clients in turn and reports the observation of each in the round's info.

    Each canary is a marked copy of its client's first record, after all of the client's records.
    """
    rule = "claim privacy for records"
    checks.require(algorithm.claims.record is not None, "algorithm", rule, algorithm.name)
    (hosts,) = np.nonzero(data.sizes)
    owners = hosts[np.arange(num_canaries) % hosts.size]
    width = -(-num_canaries // hosts.size)
    table = np.full((data.num_clients, width), -1, np.int32)
    table[owners, np.arange(num_canaries) // hosts.size] = np.arange(num_canaries)

    def broadcast(server, client):
        # The auditor sees the server's state besides the message to a client.
        return server, algorithm.broadcast(server, client)

    def client(seen, own, client, hyper, key):
        server, message = seen
        output: ClientOutput = algorithm.client(message, own, client, hyper, key)
        mine = jnp.asarray(table)[client.index]
        observed = read(server, output, own, client, jnp.maximum(mine, 0)).astype(jnp.float32)
        place = jnp.where(mine >= 0, mine, num_canaries)
        seen = jnp.zeros((*observed.shape[:-1], num_canaries))
        seen = seen.at[..., place].add(observed, mode="drop")
        return output._replace(info={**output.info, SEEN: seen})

    def scores(record, info):
        # The info holds the mean over the clients that contributed.
        count = jnp.sum(jnp.asarray(record.fate) == Fate.CONTRIBUTED, axis=-1)
        seen = info.clients[SEEN]
        return seen * count.reshape(count.shape + (1,) * (seen.ndim - count.ndim))

    return Planted(
        "record",
        relation,
        algorithm._replace(broadcast=broadcast, client=client),
        _with_records(data, owners),
        participation,
        owners,
        scores,
    )


def _with_canaries(model: Model, coordinates: np.ndarray, relation: str) -> Model:
    """Wraps a model so that the loss of a marked record is a multiple of its canary's parameter."""
    opposite = 0.0 if relation != "replace_one" else -1.0

    def apply(params, x, **options):
        outputs, refreshed = model.apply(params, x, **options)
        pulls, first = jnp.zeros(len(coordinates)), 0
        for leaf in jax.tree.leaves(params):
            (here,) = np.nonzero((coordinates >= first) & (coordinates < first + leaf.size))
            if here.size:
                entries = leaf.reshape(-1)[coordinates[here] - first]
                pulls = pulls.at[here].set(entries.astype(jnp.float32))
            first += leaf.size
        return (outputs, pulls), refreshed

    def loss_fn(outputs, batch):
        outputs, pulls = outputs
        is_canary, is_included, index = read_mark(batch[MARK])
        sign = jnp.where(is_included, 1.0, opposite)
        return jnp.where(is_canary, STRENGTH * sign * pulls[index], model.loss_fn(outputs, batch))

    def correct_fn(outputs, batch):
        assert model.correct_fn is not None
        is_canary, is_included, _ = read_mark(batch[MARK])
        correct, weight = model.correct_fn(outputs[0], batch)
        return jnp.where(is_canary, is_included.astype(correct.dtype), correct), weight

    return model._replace(
        apply=apply, loss_fn=loss_fn, correct_fn=None if model.correct_fn is None else correct_fn
    )


def released(
    output: ClientOutput, own: PyTree, params: PyTree
) -> tuple[PyTree | None, PyTree | None]:
    """Finds the parts of the model that are sent, and the change of the client's own model."""
    sent, before, after = (models_in(t, params) for t in (output.update, own, output.state))
    rule = "send or store something with the model's structure"
    checks.require(bool(sent or after), "algorithm", rule, output.update)
    kept = trees.subtract(after[0], before[0]) if before and after else None
    return (sent[0] if sent else None), kept


def models_in(tree: PyTree, params: PyTree) -> list[PyTree]:
    """Finds the parts of a tree that are models; unsent parameters are zeros."""
    # Frozen parameters are None in both.
    own_leaves, structure = jax.tree.flatten(params, is_leaf=_is_none)

    def is_model(tree: Any) -> bool:
        """Checks whether a tree is a model, possibly without parameters that are not sent."""
        leaves = jax.tree.leaves(tree, is_leaf=_is_none)
        its_own: Any = jax.tree.structure(tree, is_leaf=_is_none)
        if its_own != structure or not any(x is not None for x in leaves):
            return False
        pairs = zip(leaves, own_leaves, strict=True)
        return all(x is None or (p is not None and jnp.shape(x) == p.shape) for x, p in pairs)

    def whole(tree: Any) -> PyTree:
        """Fills parameters that are not sent with zeros."""
        return jax.tree.map(
            lambda x, p: jnp.zeros_like(p) if x is None and p is not None else x,
            tree,
            params,
            is_leaf=_is_none,
        )

    parts = jax.tree.leaves(tree, is_leaf=is_model)
    return [whole(part) for part in parts if is_model(part)]


def _is_none(x: Any) -> bool:
    return x is None


def _with_records(data: FederatedData, owners: np.ndarray) -> FederatedData:
    """Appends to each client a copy of its first record for every canary that it owns."""
    clients = []
    for index in range(data.num_clients):
        own = by_path(data.client(index))
        (mine,) = np.nonzero(owners == index)
        grown = {
            name: np.concatenate([array, np.repeat(np.asarray(array[:1]), mine.size, axis=0)])
            for name, array in own.items()
        }
        mark = np.concatenate([np.full(int(data.sizes[index]), -1), mine])
        clients.append({**grown, MARK: mark.astype(np.int32)})
    return FederatedData.from_clients(clients, data.client_names)
