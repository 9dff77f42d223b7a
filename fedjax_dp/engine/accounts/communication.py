"""The communication meter: the bytes of the messages between clients and server."""

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_dp.algorithms.base import FinishForAll
from fedjax_dp.clients.client_data import ClientData
from fedjax_dp.core import checks, sums, trees
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.core.messages import ENCODINGS, Encoding, Tariff, tariff_of
from fedjax_dp.core.trees import PyTree
from fedjax_dp.engine.cohort import typed
from fedjax_dp.engine.execution.compile import Simulation
from fedjax_dp.engine.federation import Federation
from fedjax_dp.engine.record import Fate, RoundInfo, RoundRecord
from fedjax_dp.engine.record_access import run_client
from fedjax_dp.engine.round import message_up
from fedjax_dp.server.base import Aggregator, Close, Roster, Sender, Stacked

Direction = Literal["up", "down", "both"]
# The fates of clients that sent an update, in the sum or not, and of those that were sent one.
_SENT = (Fate.CONTRIBUTED, Fate.NOT_FINITE, Fate.LATE)
_ANNOUNCED = (*_SENT, Fate.DROPPED)


class Communication(NamedTuple):
    """Bytes that were sent in some rounds.

    Attributes:
      sent: by direction, "up" to the server or "down" to clients, by encoding and by type of
        number, `[rounds]`, int64. Bits of masks are of type "bool", indices of type "int32", and
        whole numbers of B bits of type "uintB".
      num_rounds: how many rounds these are.
    """

    sent: Mapping[str, Mapping[str, Mapping[str, np.ndarray]]]
    num_rounds: int

    def by_round(
        self, direction: Direction = "both", encoding: Encoding = "smallest"
    ) -> np.ndarray:
        """Adds up the types of number.

        Args:
          direction: "up", "down" or "both".
          encoding: how masked arrays are sent, see `communication`.

        Returns:
          Bytes, `[rounds]`, int64.

        Raises:
          ValueError: for an unknown direction or encoding.
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

        Raises:
          ValueError: for an unknown direction or encoding.
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

        Raises:
          ValueError: for an unknown direction or encoding.
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
        return np.zeros(self.num_rounds, np.int64)


class Meter(NamedTuple):
    """The sizes of a federation's messages.

    Attributes:
      up: from a client.
      down: to a client that takes part.
      after: to clients at the end of a round, see `ClientState.finish`; None for nothing.
      num_after: how many clients receive that in each round; None for those who contributed.
    """

    up: Tariff
    down: Tariff
    after: Tariff | None
    num_after: int | None

    def measure(self, record: RoundRecord, info: RoundInfo) -> Communication:
        """Counts the bytes of some rounds, from their record on the host and their info."""
        is_counted, of_up, of_down = info.messages or (None, (), ())
        up = _bytes(self.up, record.count(*_SENT), is_counted, of_up)
        down = _bytes(self.down, record.count(*_ANNOUNCED), is_counted, of_down)
        if self.after is not None:
            num = record.count(Fate.CONTRIBUTED)
            num = num if self.num_after is None else np.full_like(num, self.num_after)
            down = {e: _added(down[e], _alike(self.after, e, num)) for e in ENCODINGS}
        return Communication({"up": up, "down": down}, len(record.stage))


def _bytes(
    tariff: Tariff, num_messages: np.ndarray, is_counted: Any, counts: tuple[Any, ...]
) -> dict[str, dict[str, np.ndarray]]:
    """Counts the bytes of all messages of one kind, `[rounds]`, by encoding and type of number."""
    if not tariff.rates:
        return {e: _alike(tariff, e, num_messages) for e in ENCODINGS}
    is_counted = np.asarray(is_counted)
    each = np.stack([np.asarray(x, np.int64) for x in counts], axis=-1)
    # Messages that are not computed, since they are late or dropped, have their largest size.
    uncounted = num_messages - np.sum(is_counted, axis=-1)
    found = {}
    for encoding in ENCODINGS:
        computed = {
            name: np.sum(np.where(is_counted, by_slot, 0), axis=-1)
            for name, by_slot in tariff.bytes_of(each, encoding).items()
        }
        whole = _alike(tariff, "values" if encoding == "values" else "dense", uncounted)
        found[encoding] = _added(computed, whole)
    return found


@checked
def communication(
    simulated: Simulation | Federation, record: RoundRecord, info: RoundInfo
) -> Communication:
    """Counts the bytes that clients and server sent each other.

    The messages themselves are counted: up, the update, as far as the aggregator reads it and the
    server cannot know it beforehand, or what `encode` makes of it, such as B-bit integers; down,
    the broadcasts of algorithm and aggregator; and, where `ClientState.finish` says so, a second
    message down at the end of a round.

    A client that dropped out was sent its message, and one that was late sent its own too. What is
    fixed before a run (code, numbers, public data, the first model) is not counted.

    Arrays that are `Sparse` can be sent in several encodings: "dense", every entry; "bitmap", the
    kept entries and one bit for every entry; "index", the kept entries and 4 bytes each for its
    place; "smallest", the shortest of these for each message. "values" leaves out the places of
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
    """Finds the sizes of a federation's messages; traces one client, and runs nothing."""
    up, down, after = _messages(federation)
    state = federation.algorithm.client_state
    is_for_all = state is not None and isinstance(state.finish, FinishForAll)
    return Meter(
        tariff_of(up),
        tariff_of(down),
        None if after is None else tariff_of(after),
        len(federation.population.sizes) if is_for_all else None,
    )


def _messages(federation: Federation) -> tuple[PyTree, PyTree, PyTree | None]:
    """Makes the messages of one client in shapes alone: up, down, at the end of a round."""
    algorithm, population, second = federation.algorithm, federation.population, None
    aggregator, client_state = algorithm.aggregator, algorithm.client_state

    def messages(key, examples, validation, index):
        def data(of, arrays):
            return ClientData(arrays, index, index, index, of.limit, round=index, stage=index)

        client = data(population, examples)
        if population.validation is not None:
            client = client.replace(validation=data(population.validation, validation))
        server = algorithm.init(key)
        own = None if client_state is None else client_state.init(server)
        hyper = jax.tree.map(jnp.asarray, typed(federation.hyper)).of_client(index)
        output = run_client(algorithm, server, own, client, hyper, key)
        state = aggregator.init(output.received)
        down = algorithm.message_to(server, own, client), aggregator.broadcast(state)
        after = None
        if client_state is not None and client_state.finish is not None:
            aggregate = _aggregate(aggregator, state, output.received, hyper.aggregator, key)
            after = client_state.finish.broadcast(server, aggregate)
        return message_up(aggregator, output), down, after

    if population.validation is not None:
        second = population.validation.structure
    index = jax.ShapeDtypeStruct((), jnp.int32)
    return jax.eval_shape(messages, jax.random.key(0), population.structure, second, index)


def _aggregate(aggregator: Aggregator, state: Any, update: PyTree, numbers: Any, key: Any) -> Any:
    """Makes the aggregate of a cohort of one, for its shapes."""
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


def _alike(tariff: Tariff, encoding: Any, num: np.ndarray) -> dict[str, np.ndarray]:
    """Counts `num` messages of the largest size."""
    one = tariff.bytes_of(np.array(tariff.most, np.int64), encoding)
    return {name: np.asarray(num, np.int64) * int(each) for name, each in one.items()}


def _added(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, np.ndarray]:
    return {name: a.get(name, 0) + b.get(name, 0) for name in sorted({*a, *b})}
