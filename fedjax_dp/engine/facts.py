"""The population of a federation, and facts about it before it runs: shapes, messages, costs."""

from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_dp.algorithms.base import FederatedAlgorithm, FinishForAll
from fedjax_dp.clients.client_data import ClientData
from fedjax_dp.core import backend, checks, jaxprs, sums, trees
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.core.choices import choices
from fedjax_dp.core.messages import received
from fedjax_dp.core.products import Arithmetic, computed_with
from fedjax_dp.core.trees import PyTree
from fedjax_dp.data.federated import FederatedData, nested
from fedjax_dp.engine.cohort import Examples, typed
from fedjax_dp.engine.record import Fate
from fedjax_dp.engine.round import message_up
from fedjax_dp.engine.sides import run_client
from fedjax_dp.models import kinds, losses
from fedjax_dp.models.cost import Cost, cost_of_jaxpr
from fedjax_dp.server.base import Aggregator, Close, Roster, Sender, Stacked


class Population(NamedTuple):
    """The sizes and shapes of clients' data, all that a federation is built from."""

    sizes: np.ndarray  # Examples of each client, `[num_clients]`, int32.
    structure: PyTree  # Shapes of all examples, by name.
    validation: "Population | None" = None  # A second split of the same clients.

    @property
    def num_clients(self) -> int:
        """The number of clients."""
        return len(self.sizes)

    @property
    def limit(self) -> int:
        """The size of the largest client, at least 1."""
        return max(1, int(self.sizes.max()))


@checked
def population_of(data: FederatedData, validation: FederatedData | None = None) -> Population:
    """Finds sizes and shapes of the clients' data.

    Args:
      data: the clients' training examples.
      validation: a second split of the same clients' own data.

    Returns:
      The population.

    Raises:
      ValueError: if a split has no examples, or too many, or they are not of the same clients, or
        shapes or types of their examples differ.
    """
    first = _population("data", data)
    if validation is None:
        return first
    rule = f"hold a second split of the {data.num_clients} clients"
    same = validation.num_clients == data.num_clients
    checks.require(same, "validation", rule, validation.num_clients)
    expected, found = (_kinds(split) for split in (data, validation))
    rule = f"hold examples of the shapes and types of data, {expected}"
    checks.require(found == expected, "validation", rule, found)
    return first._replace(validation=_population("validation", validation))


def _population(name: str, data: FederatedData) -> Population:
    rule = "hold at least one and fewer than 2**31 examples"
    checks.require(0 < data.num_examples < 2**31, name, rule, data.num_examples)
    kept = jax.dtypes.canonicalize_dtype
    shapes = {k: jax.ShapeDtypeStruct(v.shape, kept(v.dtype)) for k, v in data.examples.items()}
    return Population(data.sizes.astype(np.int32), nested(shapes))


def _kinds(data: FederatedData) -> dict[str, str]:
    """Describes one example of each array, such as `float32[28, 28]`."""
    return {k: f"{v.dtype}{list(v.shape[1:])}" for k, v in sorted(data.examples.items())}


@checked
def examples_of(data: FederatedData, validation: FederatedData | None = None) -> Examples:
    """Returns all examples of a population, as a round reads them.

    Args:
      data: the clients' training examples.
      validation: a second split of the same clients' own data.

    Returns:
      The examples on the host, for `jax.device_put`.
    """
    return Examples(
        nested({name: np.asarray(array) for name, array in data.examples.items()}),
        data.offsets[:-1].astype(np.int32),
        data.sizes.astype(np.int32),
        None if validation is None else examples_of(validation),
        max(1, int(data.sizes.max())),
    )


class _Round(NamedTuple):
    """What the trace of one client's round shows."""

    update: PyTree
    up: PyTree
    down: PyTree
    frozen: tuple[kinds.Frozen, ...]
    targets: tuple[losses.Allowed, ...]
    cost: Cost


class FederationFacts:
    """Shapes (`jax.ShapeDtypeStruct`s) and costs of a federation's parts, traced when needed."""

    def __init__(self, algorithm: FederatedAlgorithm, population: Population):
        """Describes an algorithm on a population."""
        self._algorithm, self._population = algorithm, population

    @cached_property
    def server(self) -> PyTree:
        """The shapes of the server's state."""
        return jax.eval_shape(self._algorithm.init, jax.random.key(0))

    @cached_property
    def own(self) -> PyTree:
        """The shapes of one client's state; None if clients have none."""
        clients = self._algorithm.client_state
        return None if clients is None else jax.eval_shape(clients.init, self.server)

    @property
    def own_bytes(self) -> int:
        """The bytes of one client's state."""
        return 0 if self.own is None else trees.num_bytes(self.own)

    @property
    def update(self) -> PyTree:
        """The shapes of an update, as the aggregator receives it."""
        return self._round.update

    @property
    def up(self) -> PyTree:
        """The message from a client, in the forms of `core.messages`."""
        return self._round.up

    @cached_property
    def down(self) -> PyTree:
        """The messages of algorithm and aggregator to a client, in the same forms."""
        aggregator = self._algorithm.aggregator
        sent = jax.eval_shape(
            lambda update: aggregator.broadcast(aggregator.init(update)), self.update
        )
        return self._round.down, sent

    @cached_property
    def frozen(self) -> tuple[kinds.Frozen, ...]:
        """The frozen parameters that clients' rounds read, and the seeds of their masks."""
        with kinds.reads() as read:
            if self._algorithm.aggregator.encode is not None:
                jax.eval_shape(lambda update: self.sent(update, Roster.of_one()), self.update)
        return *self._round.frozen, *read

    @property
    def targets(self) -> tuple[losses.Allowed, ...]:
        """The targets of examples that the losses of a client's round are for."""
        return self._round.targets

    @property
    def cost(self) -> Cost:
        """The arithmetic of one client's round; a loop whose length is not static counts once."""
        return self._round.cost

    def cost_by(self, how: Arithmetic) -> Cost:
        """Counts the arithmetic of a client's round as it is computed, which may be measured."""
        if how.products == "exact" and how.convolutions == _usual().convolutions:
            return self.cost
        with computed_with(how):
            return cost_of_jaxpr(self._traced()[0])

    @property
    def is_stacked(self) -> bool:
        """Whether a round holds all updates of its cohort side by side."""
        return isinstance(self._algorithm.aggregator, Stacked)

    @property
    def is_finished_for_all(self) -> bool:
        """Whether the end of a round changes the state of every client."""
        clients = self._algorithm.client_state
        return clients is not None and isinstance(clients.finish, FinishForAll)

    @cached_property
    def aggregate(self) -> PyTree:
        """The shapes of an aggregate."""
        aggregate = partial(self._aggregate, self._algorithm.aggregator)
        return jax.eval_shape(aggregate, self.update, jax.random.key(0))

    @cached_property
    def total(self) -> PyTree:
        """The shapes of the running sums over clients, or of one client's entry of a stack."""
        sent = jax.eval_shape(lambda update: self.sent(update, Roster.of_one()), self.update)
        return sent if self.is_stacked else jax.eval_shape(sums.zeros_like, sent)

    @cached_property
    def after(self) -> PyTree:
        """The message to a client at the end of a round; None if there is none."""
        clients = self._algorithm.client_state
        if clients is None or clients.finish is None:
            return None
        return jax.eval_shape(clients.finish.broadcast, self.server, self.aggregate)

    def divides_batches(self, axis: str, num_devices: int) -> bool:
        """Checks whether devices of a mesh axis would divide the batches of a client."""
        closed, _ = self._traced(axis, axis_env=[(axis, num_devices)])
        return jaxprs.has_primitive(closed, "all_gather")

    @cached_property
    def _round(self) -> _Round:
        # The largest value, by which clients are computed side by side, is that of this backend.
        with kinds.reads() as frozen, losses.reads() as targets, computed_with(_usual()):
            jaxpr, (update, up, down) = self._traced()
        if self._algorithm.claims.units:
            jaxprs.require_apart(jaxpr)
        return _Round(update, up, down, tuple(frozen), tuple(targets), cost_of_jaxpr(jaxpr))

    def _traced(self, batch_axis: str | None = None, **options: Any) -> tuple[Any, Any]:
        """Traces one client's round; returns its jaxpr, and the update and both messages."""
        algorithm, population = self._algorithm, self._population

        def one(key, examples, validation, index):
            def data(of, arrays):
                return ClientData(arrays, index, index, index, of.limit, round=index, stage=index)

            client = data(population, examples).replace(batch_axis=batch_axis)
            if population.validation is not None:
                second = data(population.validation, validation)
                client = client.replace(validation=second)
            server = algorithm.init(key)
            own = None if algorithm.client_state is None else algorithm.client_state.init(server)
            hyper = jax.tree.map(jnp.asarray, typed(algorithm.hyper)).of_client(index)
            down = algorithm.message_to(server, own, client)
            output = run_client(algorithm, received(down), own, client, hyper, key)
            return output.received, message_up(algorithm.aggregator, output), down

        second = None if population.validation is None else population.validation.structure
        index = jax.ShapeDtypeStruct((), jnp.int32)
        arguments = jax.random.key(0), population.structure, second, index
        return jax.make_jaxpr(one, return_shape=True, **options)(*arguments)

    def _numbers(self) -> Any:
        """The numbers of the aggregator at the start."""
        return jax.tree.map(jnp.asarray, typed(self._algorithm.hyper)).aggregator

    def sent(self, update: PyTree, roster: Roster) -> PyTree:
        """Makes what the aggregator adds up or stacks of the client with index 0."""
        aggregator, numbers, key = self._algorithm.aggregator, self._numbers(), jax.random.key(0)
        sender = Sender(jnp.int32(0), jnp.float32(1), key, key, roster)
        broadcast = aggregator.broadcast(aggregator.init(update))
        contribution = aggregator.contribute(broadcast, numbers, update, sender)
        contribution = jax.tree.map(trees.at_least_float32, contribution)
        if aggregator.encode is None:
            return contribution
        return aggregator.encode(broadcast, numbers, contribution, sender)

    def _aggregate(self, aggregator: Aggregator, update: PyTree, key: Any) -> PyTree:
        """Makes the aggregate of a cohort of one."""
        message = self.sent(update, Roster.of_one())
        if self.is_stacked:
            gathered = jax.tree.map(lambda x: x[None], message)
        else:
            gathered = sums.value(sums.zeros_like(message))
        close = Close(Roster.of_one(), jnp.full(1, Fate.CONTRIBUTED, jnp.int8), key, key)
        return aggregator.combine(aggregator.init(update), self._numbers(), gathered, close)[1]


def _usual() -> Arithmetic:
    """Returns how a backend computes without measured speeds."""
    return Arithmetic(convolutions=choices(backend.facts()).convolutions)
