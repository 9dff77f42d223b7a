"""Byte totals of a run, counted round by round and saved with its checkpoints."""

from collections.abc import Mapping
from typing import Any, Literal

from fedjax_dp.core.messages import ENCODINGS, Encoding, Exchange
from fedjax_dp.engine.accounts.communication import meter_of
from fedjax_dp.engine.federation import Federation
from fedjax_dp.engine.record import RoundInfo, RoundRecord

_DIRECTIONS: tuple[Literal["up", "down"], ...] = ("up", "down")


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
        found = self._meter.measure(record, info, self._rounds)
        self._rounds += len(record.stage)
        for direction in _DIRECTIONS:
            for encoding in ENCODINGS:
                totals = self._bytes[direction][encoding]
                for name, more in found.by_type(direction, encoding).items():
                    totals[name] = totals.get(name, 0) + more
        each = {f"bytes_{d}": found.by_round(d, self._encoding) for d in _DIRECTIONS}
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
