"""The communication meter: how many bytes clients and server send each other, by what they send."""

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_dp.algorithms.base import FederatedAlgorithm
from fedjax_dp.clients.base import ClientData
from fedjax_dp.core import checks, sums, trees
from fedjax_dp.core.dependence import dependence
from fedjax_dp.core.messages import ENCODINGS, Encoding, Tariff, is_part, tariff_of
from fedjax_dp.core.signatures import checked
from fedjax_dp.core.trees import PyTree
from fedjax_dp.engine.cohort import typed
from fedjax_dp.engine.compile import Simulation
from fedjax_dp.engine.federation import Federation
from fedjax_dp.engine.reads import run_client
from fedjax_dp.engine.record import Fate, RoundInfo, RoundRecord
from fedjax_dp.server.base import RoundKey, Stack, Stacked

Direction = Literal["up", "down", "both"]
# What came from the client, whether or not it is in the sum.
_SENT = (Fate.CONTRIBUTED, Fate.NOT_FINITE, Fate.LATE)
# Who was sent something: all that were told that they take part.
_TOLD = (*_SENT, Fate.DROPPED)


class Communication(NamedTuple):
    """Bytes that were sent in some rounds.

    Attributes:
      sent: by direction, "up" to the server or "down" to clients, by encoding and by type of
        number, `[rounds]`, int64. Bits of masks are of type "bool", indices of type "int32", and
        whole numbers of B bits of type "uintB".
    """

    sent: Mapping[str, Mapping[str, Mapping[str, np.ndarray]]]

    def by_round(
        self, direction: Direction = "both", encoding: Encoding = "smallest"
    ) -> np.ndarray:
        """Adds up the types of number.

        Args:
          direction: "up", "down" or "both".
          encoding: how masked arrays are sent, see `communication`.

        Returns:
          Bytes, `[rounds]`, int64.
        """
        return sum(self._of(direction, encoding).values(), self._nothing())

    def by_type(
        self, direction: Direction = "both", encoding: Encoding = "smallest"
    ) -> dict[str, int]:
        """Adds up the rounds.

        Args:
          direction: "up", "down" or "both".
          encoding: how masked arrays are sent, see `communication`.

        Returns:
          Bytes by type of number.
        """
        each = self._of(direction, encoding)
        return {name: int(np.sum(rounds)) for name, rounds in each.items() if np.any(rounds)}

    def total(self, direction: Direction = "both", encoding: Encoding = "smallest") -> int:
        """Adds up rounds and types.

        Args:
          direction: "up", "down" or "both".
          encoding: how masked arrays are sent, see `communication`.

        Returns:
          Bytes.
        """
        return int(np.sum(self.by_round(direction, encoding)))

    def _of(self, direction: str, encoding: str) -> dict[str, np.ndarray]:
        checks.one_of("direction", direction, get_args(Direction))
        checks.one_of("encoding", encoding, ENCODINGS)
        found: dict[str, np.ndarray] = {}
        for each in ("up", "down") if direction == "both" else (direction,):
            for name, rounds in self.sent[each][encoding].items():
                found[name] = found.get(name, self._nothing()) + rounds
        return dict(sorted(found.items()))

    def _nothing(self) -> np.ndarray:
        shapes = [x.shape for x in jax.tree.leaves(self.sent)]
        return np.zeros(shapes[0] if shapes else (), np.int64)


class Meter(NamedTuple):
    """What the messages of a federation take, each.

    Attributes:
      up: from a client.
      down: to a client that takes part.
      after: to clients when a round is over, where what they keep is finished with what it came to;
        None where it is not.
      everybody: how many get it, or None where those do who contributed.
      silent_stages: stages in which nothing is sent.
    """

    up: Tariff
    down: Tariff
    after: Tariff | None
    everybody: int | None
    silent_stages: tuple[int, ...]

    def measure(self, record: RoundRecord, info: RoundInfo) -> Communication:
        """Counts what was sent in some rounds.

        Args:
          record: of these rounds, on the host.
          info: of the same rounds.

        Returns:
          The bytes.
        """
        is_silent = np.isin(np.asarray(record.stage), self.silent_stages)
        messages = info.messages
        is_counted, of_up, of_down = messages or (None, (), ())
        up = self._of_tariff(self.up, record, _SENT, (is_counted, of_up))
        down = self._of_tariff(self.down, record, _TOLD, (is_counted, of_down))
        after = self._after(record)
        sent = {
            "up": up,
            "down": {e: _added(down[e], after[e]) for e in ENCODINGS},
        }
        return Communication(jax.tree.map(lambda x: np.where(is_silent, 0, x), sent))

    def _of_tariff(
        self,
        tariff: Tariff,
        record: RoundRecord,
        fates: tuple[Fate, ...],
        counts: tuple[Any, tuple[Any, ...]],
    ) -> dict[str, dict[str, np.ndarray]]:
        """Counts messages of one kind: those that were computed, and those that nobody computed.

        A simulation does not compute what comes too late or is dropped. It counts as whole.
        """
        everybody = record.count(*fates)
        if not tariff.rates:
            return {e: _alike(tariff, e, everybody) for e in ENCODINGS}
        is_counted = np.asarray(counts[0])
        each = np.stack([np.asarray(x, np.int64) for x in counts[1]], axis=-1)
        uncounted = everybody - np.sum(is_counted, axis=-1)
        found = {}
        for encoding in ENCODINGS:
            computed = {
                name: np.sum(np.where(is_counted, by_slot, 0), axis=-1)
                for name, by_slot in tariff.bytes_of(each, encoding).items()
            }
            whole = _alike(tariff, "values" if encoding == "values" else "dense", uncounted)
            found[encoding] = _added(computed, whole)
        return found

    def _after(self, record: RoundRecord) -> dict[str, dict[str, np.ndarray]]:
        if self.after is None:
            return {e: {} for e in ENCODINGS}
        num = record.count(Fate.CONTRIBUTED)
        if self.everybody is not None:
            num = np.full_like(num, self.everybody)
        return {e: _alike(self.after, e, num) for e in ENCODINGS}


@checked
def communication(
    simulated: Simulation | Federation, record: RoundRecord, info: RoundInfo
) -> Communication:
    """Counts the bytes that clients and server sent each other.

    What counts is what a message holds. Up goes what a client's round ends with, as far as the
    aggregator reads it and the server cannot know it beforehand, or what encoders make of it, such
    as integers of B bits. Down goes what the client's round reads of the server's state, found by
    following every output back to it, so that moments of a server optimiser are not counted; where
    what clients keep is finished with what a round came to, that is sent once more when it is over,
    and not again before the next round if everybody has it.

    Whoever was told to take part was sent something, also who dropped out; whoever came late sent
    too. What is fixed before a run (code, numbers, public data, the first model) is not counted.

    Arrays that are `Sparse` can be sent in several encodings: "dense", every entry; "bitmap", those
    that are kept and one bit for every entry; "index", those that are kept and 4 bytes each for its
    place; "smallest", the shortest of these for every message. "values" leaves out what tells the
    entries, as papers count. All else is sent as it is in any encoding.

    Args:
      simulated: what ran.
      record: of some of its rounds, on the host.
      info: of the same rounds.

    Returns:
      The bytes by round, direction, encoding and type of number.
    """
    federation = simulated.federation if isinstance(simulated, Simulation) else simulated
    return meter_of(federation).measure(record, info)


def meter_of(federation: Federation) -> Meter:
    """Finds what the messages of a federation take; traces one client, and runs nothing.

    Args:
      federation: what is run.

    Returns:
      The meter.
    """
    algorithm = federation.algorithm
    arguments = _arguments(federation)
    reads = _Reads(algorithm, arguments)
    up, down = reads.message_up(), reads.message_down()
    after = reads.message_after()
    is_for_all = algorithm.clients is not None and algorithm.clients.finishes_everybody
    return Meter(
        tariff_of(up),
        tariff_of(down),
        None if after is None else tariff_of(after),
        len(federation.population.sizes) if is_for_all else None,
        algorithm.silent_stages,
    )


class _Arguments(NamedTuple):
    """The shapes that a client's round reads."""

    server: PyTree
    own: PyTree
    client: ClientData
    hyper: PyTree
    key: Any
    aggregator: PyTree


def _arguments(federation: Federation) -> _Arguments:
    algorithm, population = federation.algorithm, federation.population
    index: Any = jax.ShapeDtypeStruct((), jnp.int32)

    def client_of(of):
        return ClientData(of.structure, index, index, index, of.limit, round=index, stage=index)

    client = client_of(population)
    if population.validation is not None:
        second = client_of(population.validation)
        client = client.replace(validation=second)  # type: ignore[attr-defined]

    def state(key):
        server = algorithm.init(key)
        return server, None if algorithm.clients is None else algorithm.clients.init(server)

    def numbers(client):
        return jax.tree.map(jnp.asarray, typed(federation.hyper)).of_client(client)

    key = jax.random.key(0)
    server, own = jax.eval_shape(state, key)
    hyper = jax.eval_shape(numbers, index)
    update = jax.eval_shape(
        lambda *a: run_client(algorithm, *a), server, own, client, hyper, key
    ).update
    aggregator = jax.eval_shape(lambda: algorithm.aggregator.init(update))
    return _Arguments(server, own, client, hyper, key, aggregator)


class _Reads:
    """What of a round's arguments reaches what is sent."""

    def __init__(self, algorithm: FederatedAlgorithm, arguments: _Arguments):
        self._algorithm, self._arguments = algorithm, arguments
        server, own, client, hyper, key, _ = arguments

        def run(*of_client):
            return run_client(algorithm, *of_client)

        output = jax.eval_shape(run, server, own, client, hyper, key)
        sets = dependence(run, server, own, client, hyper, key)
        self._update, self._weight = output.update, output.weight
        self._message = jax.eval_shape(lambda output: output.message, output)
        self._server = range(len(jax.tree.leaves(server)))
        marks = jax.tree.map(lambda x: False, arguments._replace(aggregator=()))
        known = marks._replace(
            server=jax.tree.map(lambda x: True, server),
            hyper=jax.tree.map(lambda x: True, hyper),
            client=marks.client.replace(index=True, round=True, stage=True),
        )
        flags = jax.tree.leaves(known)
        self._new = frozenset(i for i, flag in enumerate(flags) if not flag)
        self._of_update = jax.tree.leaves(sets.update, is_leaf=_is_set)
        self._of_weight = sets.weight
        self._of_state = jax.tree.leaves(sets.state, is_leaf=_is_set)
        self._contribute()

    def _contribute(self) -> None:
        """Finds what the aggregator reads of update, weight and its own state."""
        aggregator, (_, _, _, hyper, key, state) = self._algorithm.aggregator, self._arguments
        index: Any = jax.ShapeDtypeStruct((), jnp.int32)

        def contribution(state, update, weight, numbers, sender, key):
            found = aggregator.contribute(state, numbers, update, weight, sender)
            for encode in getattr(aggregator, "encoders", ()):
                found = encode(state, numbers, found, key, key)
            return found

        parts = (state, self._update, self._weight)
        sets = dependence(contribution, *parts, hyper.aggregator, index, key)
        read = frozenset().union(*jax.tree.leaves(sets, is_leaf=_is_set))
        flags = iter(i in read for i in range(len(jax.tree.leaves(parts))))
        self._state_flags, update, (weight,) = (
            [next(flags) for _ in jax.tree.leaves(part)] for part in parts
        )
        self._is_sent = [
            is_read and bool(found & self._new)
            for is_read, found in zip(update, self._of_update, strict=True)
        ]
        self._sends_weight = weight and bool(self._of_weight & self._new)

    def message_up(self) -> PyTree:
        """Gives the shapes of what a client sends."""
        declared = self._algorithm.aggregator.sent_up
        if declared is not None:
            return jax.eval_shape(declared, self._message, self._weight)
        flags = jax.tree.unflatten(jax.tree.structure(self._update), self._is_sent)
        update = _chosen(flags, self._update, self._message)
        return update, self._weight if self._sends_weight else None

    def message_down(self) -> PyTree:
        """Gives the shapes of what a client is sent before its round."""
        server, own, client, *_, state = self._arguments
        of_aggregator = _only(self._state_flags, state)
        declared = self._algorithm.sent_down
        if declared is not None:
            return jax.eval_shape(declared, server, own, client), of_aggregator
        sent = [s for s, flag in zip(self._of_update, self._is_sent, strict=True) if flag]
        if self._sends_weight:
            sent.append(self._of_weight)
        reached = frozenset().union(*sent, *self._of_state)
        flags = [i in reached for i in self._server]
        if self._everybody_was_told():
            flags = [f and not told for f, told in zip(flags, self._after()[0], strict=True)]
        return _only(flags, server), of_aggregator

    def message_after(self) -> PyTree | None:
        """Gives the shapes of what clients are sent when a round is over, or None."""
        clients = self._algorithm.clients
        if clients is None or clients.finish is None:
            return None
        of_server, of_aggregate, aggregate = self._after()
        return _only(of_server, self._arguments.server), _only(of_aggregate, aggregate)

    def _everybody_was_told(self) -> bool:
        clients = self._algorithm.clients
        return clients is not None and clients.finish is not None and clients.finishes_everybody

    def _after(self) -> tuple[list[bool], list[bool], PyTree]:
        """Finds which parts of the server's new state and of the aggregate are read at the end."""
        clients = self._algorithm.clients
        assert clients is not None and clients.finish is not None
        server, own, _, hyper, *_ = self._arguments
        aggregate = aggregate_structure(self._algorithm, self._arguments, self._update)
        sets = dependence(clients.finish, server, aggregate, own, hyper)
        read = frozenset().union(*jax.tree.leaves(sets, is_leaf=_is_set))
        num_server, num_more = len(self._server), len(jax.tree.leaves(aggregate))
        flags = [i in read for i in range(num_server + num_more)]
        return flags[:num_server], flags[num_server:], aggregate


def aggregate_structure(
    algorithm: FederatedAlgorithm, arguments: _Arguments, update: PyTree
) -> PyTree:
    """Finds the shapes of what an aggregator makes of a cohort.

    Args:
      algorithm: the declaration.
      arguments: the shapes that a client's round reads.
      update: the shapes of an update.

    Returns:
      The shapes of the aggregate.
    """
    aggregator, numbers = algorithm.aggregator, arguments.hyper.aggregator

    def combined(state, update, numbers, key):
        found = aggregator.contribute(state, numbers, update, jnp.float32(1), jnp.int32(0))
        found = jax.tree.map(trees.at_least_float32, found)
        both = RoundKey(key, key)
        if isinstance(aggregator, Stacked):
            stacked = jax.tree.map(lambda x: x[None], found)
            stack = Stack(stacked, jnp.zeros(1, jnp.int32), jnp.ones(1, bool))
            return aggregator.combine(state, numbers, stack, both)[1]
        for encode in aggregator.encoders:
            found = encode(state, numbers, found, key, key)
        total = sums.value(sums.zeros_like(found))
        return aggregator.combine(state, numbers, total, both)[1]

    return jax.eval_shape(combined, arguments.aggregator, update, numbers, arguments.key)


def _is_set(x: Any) -> bool:
    return isinstance(x, frozenset)


def _only(flags: Any, tree: PyTree) -> PyTree:
    """Keeps the leaves that are marked."""
    return [x for x, flag in zip(jax.tree.leaves(tree), flags, strict=True) if flag]


def _chosen(flags: PyTree, update: PyTree, message: PyTree) -> list[Any]:
    """Keeps what is marked of an update; what is masked, coded or repeated goes as a whole."""
    parts = (jax.tree.leaves(tree, is_leaf=is_part) for tree in (flags, update, message))
    return [
        sent
        for mark, whole, sent in zip(*parts, strict=True)
        if is_part(whole) or is_part(sent) or mark
    ]


def _alike(tariff: Tariff, encoding: Any, num: np.ndarray) -> dict[str, np.ndarray]:
    """Counts so many messages of the largest size."""
    one = tariff.bytes_of(np.array(tariff.most, np.int64), encoding)
    return {name: np.asarray(num, np.int64) * int(each) for name, each in one.items()}


def _added(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, np.ndarray]:
    return {name: a.get(name, 0) + b.get(name, 0) for name in sorted({*a, *b})}
