"""The communication meter: the bytes of the messages between clients and server."""

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from fedjax_dp.core import checks
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.core.messages import ENCODINGS, Encoding, Exchange, Tariff, tariff_of
from fedjax_dp.core.ranges import Index
from fedjax_dp.engine.execution.compile import Simulation
from fedjax_dp.engine.federation import Federation
from fedjax_dp.engine.record import Fate, RoundInfo, RoundRecord

Direction = Literal["up", "down", "both"]
# The fates of clients that sent an update, in the sum or not, and of those that were sent one.
_SENT = (Fate.CONTRIBUTED, Fate.NOT_FINITE, Fate.LATE)
_ANNOUNCED = (*_SENT, Fate.DROPPED)
_DIRECTIONS: tuple[Literal["up", "down"], ...] = ("up", "down")


class Communication(NamedTuple):
    """Bytes that were sent in some rounds.

    Attributes:
      sent: by direction, "up" to the server or "down" to clients, by encoding and by type of
        number, `[rounds]`, int64. Bits of masks are of type "bool", indices of type "int32", and
        whole numbers of B bits of type "uintB"; secure aggregation has types "keys" and "shares".
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
        totals: dict[str, np.ndarray] = {}
        for each in ("up", "down") if direction == "both" else (direction,):
            for name, rounds in self.sent[each][encoding].items():
                totals[name] = totals.get(name, self._nothing()) + rounds
        return dict(sorted(totals.items()))

    def _nothing(self) -> np.ndarray:
        return np.zeros(self.num_rounds, np.int64)


class Meter(NamedTuple):
    """The sizes of a federation's messages."""

    up: Tariff  # From a client.
    down: Tariff  # To a client that takes part.
    after: Tariff | None  # To clients at the end of a round (`ClientState.finish`), or None.
    num_after: int | None  # The clients that receive `after`; None for those who contributed.
    exchange: Exchange | None = None  # Of a protocol that takes further messages; None for none.
    has_server: bool = True  # If false, messages go to each other client of the cohort.

    def measure(self, record: RoundRecord, info: RoundInfo, first_round: int = 0) -> Communication:
        """Counts the bytes of some rounds, from their record on the host and their info."""
        is_counted, of_up, of_down = info.messages or (None, (), ())
        num_sent, num_notified = record.count(*_SENT), record.count(*_ANNOUNCED)
        up = _bytes(self.up, num_sent, is_counted, of_up)
        down = _bytes(self.down, num_notified, is_counted, of_down)
        if self.after is not None:
            num = record.count(Fate.CONTRIBUTED)
            num = num if self.num_after is None else np.full_like(num, self.num_after)
            down = {e: _added(down[e], _alike(self.after, e, num)) for e in ENCODINGS}
        if not self.has_server:
            others = np.maximum(record.count(*_ANNOUNCED) - 1, 0)
            up, down = _scaled(up, others), _scaled(down, np.zeros_like(others))
        if self.exchange is not None:
            # Late messages are not in the sum, and their senders give no shares back.
            in_sum = np.asarray(record.count(Fate.CONTRIBUTED, Fate.NOT_FINITE), np.int64)
            rounds = first_round + np.arange(len(record.stage))
            counts = rounds, np.asarray(num_notified, np.int64), in_sum
            up = {e: _added(up[e], self.exchange.up(*counts)) for e in ENCODINGS}
            down = {e: _added(down[e], self.exchange.down(*counts)) for e in ENCODINGS}
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
    simulated: Simulation | Federation,
    record: RoundRecord,
    info: RoundInfo,
    *,
    exchange: Exchange | None = None,
    first_round: Index = 0,
) -> Communication:
    """Counts the bytes that clients and server sent each other.

    The messages themselves are counted: up, the update, as far as the aggregator reads it and the
    server cannot know it beforehand, or what `encode` makes of it, such as B-bit integers; down,
    the broadcasts of algorithm and aggregator; and, where `ClientState.finish` says so, a second
    message down at the end of a round.

    A client that dropped out was sent its message, and one that was late sent its own too. What is
    fixed before a run (code, numbers, public data, the first model) is not counted. Without a
    server, see `serverless`, each message up goes to every other client, and nothing goes down.

    Arrays that are `Sparse` can be sent in several encodings: "dense", every entry; "bitmap", the
    kept entries and one bit for every entry; "index", the kept entries and 4 bytes each for its
    place; "smallest", the shortest of these for each message. "values" leaves out the places of
    entries, as papers count. All else is sent as it is in any encoding.

    Args:
      simulated: what ran.
      record: of some of its rounds, on the host.
      info: of the same rounds.
      exchange: of a protocol whose further messages are counted too: `server.secure.mask_messages`
        or `server.oblivious.noise_messages`.
      first_round: the index in the run of the first of these rounds, from 0, for an exchange that
        takes messages in some rounds only.

    Returns:
      The bytes by round, direction, encoding and type of number.
    """
    federation = simulated.federation if isinstance(simulated, Simulation) else simulated
    return meter_of(federation, exchange).measure(record, info, first_round)


def meter_of(federation: Federation, exchange: Exchange | None = None) -> Meter:
    """Finds the sizes of a federation's messages; traces one client, and runs nothing."""
    facts = federation.facts
    rule = "be left out without a server, through which its messages go"
    checks.require(federation.has_server or exchange is None, "exchange", rule, "one")
    return Meter(
        tariff_of(facts.up),
        tariff_of(facts.down),
        None if facts.after is None else tariff_of(facts.after),
        federation.population.num_clients if facts.is_finished_for_all else None,
        exchange,
        federation.has_server,
    )


def _alike(tariff: Tariff, encoding: Any, num: np.ndarray) -> dict[str, np.ndarray]:
    """Counts `num` messages of the largest size."""
    one = tariff.bytes_of(np.array(tariff.most, np.int64), encoding)
    return {name: np.asarray(num, np.int64) * int(each) for name, each in one.items()}


def _scaled(sent: Mapping[str, Mapping[str, Any]], times: np.ndarray) -> dict[str, dict[str, Any]]:
    """Multiplies the bytes of each round, by encoding and type of number."""
    return {e: {name: each * times for name, each in of.items()} for e, of in sent.items()}


def _added(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, np.ndarray]:
    return {name: a.get(name, 0) + b.get(name, 0) for name in sorted({*a, *b})}


class ByteTotals:
    """Counts the bytes that clients and server have sent each other since a run began."""

    def __init__(
        self, federation: Federation, encoding: Encoding, exchange: Exchange | None = None
    ):
        """Starts at zero; `encoding` of masked arrays is used for the metrics by round."""
        self._meter, self._encoding = meter_of(federation, exchange), encoding
        self._rounds = 0
        self._bytes: dict[str, dict[str, dict[str, int]]] = {
            direction: {e: {} for e in ENCODINGS} for direction in _DIRECTIONS
        }

    def count(self, record: RoundRecord, info: RoundInfo) -> list[dict[str, int]]:
        """Adds some rounds and returns `bytes_up` and `bytes_down` of each."""
        measured = self._meter.measure(record, info, self._rounds)
        self._rounds += len(record.stage)
        for direction in _DIRECTIONS:
            for encoding in ENCODINGS:
                totals = self._bytes[direction][encoding]
                for name, more in measured.by_type(direction, encoding).items():
                    totals[name] = totals.get(name, 0) + more
        each = {f"bytes_{d}": measured.by_round(d, self._encoding) for d in _DIRECTIONS}
        return [
            {name: int(by_round[i]) for name, by_round in each.items()}
            for i in range(len(record.stage))
        ]

    def to_json(self) -> dict[str, Any]:
        """Returns the totals for a checkpoint."""
        return {"rounds": self._rounds, "bytes": self._bytes}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Resumes from the totals that `to_json` returned."""
        self._rounds, self._bytes = saved["rounds"], saved["bytes"]

    def summary(self) -> dict[str, Any]:
        """Returns bytes by direction and of both: in all, by type of number, by encoding."""
        found: dict[str, Any] = {"rounds": self._rounds, "encoding": self._encoding}
        both: dict[str, dict[str, int]] = {e: {} for e in ENCODINGS}
        for by_encoding in self._bytes.values():
            for encoding, by_type in by_encoding.items():
                for name, more in by_type.items():
                    both[encoding][name] = both[encoding].get(name, 0) + more
        for direction, by_encoding in {**self._bytes, "both": both}.items():
            found[direction] = {
                "bytes": sum(by_encoding[self._encoding].values()),
                "by_type": dict(sorted(by_encoding[self._encoding].items())),
                "by_encoding": {e: sum(by_encoding[e].values()) for e in ENCODINGS},
            }
        return found
