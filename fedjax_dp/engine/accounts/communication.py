"""The communication meter: how many bytes clients and server send each other, by what they send."""

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from fedjax_dp.core import checks
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.core.messages import ENCODINGS, Encoding, Tariff, tariff_of
from fedjax_dp.engine.accounts.sent import messages_of
from fedjax_dp.engine.execution.compile import Simulation
from fedjax_dp.engine.federation import Federation
from fedjax_dp.engine.record import Fate, RoundInfo, RoundRecord

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
    """What the messages of a federation take, each.

    Attributes:
      up: from a client.
      down: to a client that takes part.
      after: to clients when a round is over, where what they keep is finished with what it came to;
        None where it is not.
      num_after: clients that get `after`; None for those that contributed.
    """

    up: Tariff
    down: Tariff
    after: Tariff | None
    num_after: int | None

    def measure(self, record: RoundRecord, info: RoundInfo) -> Communication:
        """Counts what was sent in some rounds.

        Args:
          record: of these rounds, on the host.
          info: of the same rounds.

        Returns:
          The bytes.
        """
        messages = info.messages
        is_counted, of_up, of_down = messages or (None, (), ())
        up = self._of_tariff(self.up, record, _SENT, (is_counted, of_up))
        down = self._of_tariff(self.down, record, _TOLD, (is_counted, of_down))
        after = self._after(record)
        sent = {
            "up": up,
            "down": {e: _added(down[e], after[e]) for e in ENCODINGS},
        }
        return Communication(sent, len(record.stage))

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
        num_messages = record.count(*fates)
        if not tariff.rates:
            return {e: _alike(tariff, e, num_messages) for e in ENCODINGS}
        is_counted = np.asarray(counts[0])
        each = np.stack([np.asarray(x, np.int64) for x in counts[1]], axis=-1)
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

    def _after(self, record: RoundRecord) -> dict[str, dict[str, np.ndarray]]:
        if self.after is None:
            return {e: {} for e in ENCODINGS}
        num = record.count(Fate.CONTRIBUTED)
        if self.num_after is not None:
            num = np.full_like(num, self.num_after)
        return {e: _alike(self.after, e, num) for e in ENCODINGS}


@checked
def communication(
    simulated: Simulation | Federation, record: RoundRecord, info: RoundInfo
) -> Communication:
    """Counts the bytes that clients and server sent each other.

    What counts is what a message holds. Up goes what a client's round ends with, as far as the
    aggregator reads it and the server cannot know it beforehand, or what `encode` makes of it, such
    as integers of B bits. Down goes what the client's round reads of the server's state, found by
    following every output back to it, so that moments of a server optimiser are not counted; where
    what clients keep is finished with what a round came to, that is sent once more when it is over,
    and not again before the next round if all clients have it.

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
    messages = messages_of(federation)
    return Meter(
        tariff_of(messages.up),
        tariff_of(messages.down),
        None if messages.after is None else tariff_of(messages.after),
        len(federation.population.sizes) if messages.is_after_for_all else None,
    )


def _alike(tariff: Tariff, encoding: Any, num: np.ndarray) -> dict[str, np.ndarray]:
    """Counts so many messages of the largest size."""
    one = tariff.bytes_of(np.array(tariff.most, np.int64), encoding)
    return {name: np.asarray(num, np.int64) * int(each) for name, each in one.items()}


def _added(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, np.ndarray]:
    return {name: a.get(name, 0) + b.get(name, 0) for name in sorted({*a, *b})}
