"""Claims: what a mechanism guarantees, as one value that is built with the mechanism.

The ledger, the statement, the calibration and the audits read claims and nothing else.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

from dp_accounting import DpEvent

from fedjax_dp.privacy.sensitivities import Sensitivity

# `(size, numbers) -> DpEvent` charged to one record of a client of that size.
RecordEvent: TypeAlias = Callable[[int, Any], DpEvent]


class ClientClaim(NamedTuple):
    """What an aggregator guarantees to a client that takes part."""

    # `(state, numbers) -> Sensitivity` of the sum that noise is added to.
    sensitivity: Callable[[Any, Any], Sensitivity]
    event: Callable[[Any], DpEvent]  # `(numbers) -> DpEvent` of one release on a given cohort.
    # The fewest rounds from one participation of a client to its next; 1 for noise that is drawn
    # afresh each round.
    min_separation: int = 1
    # The fewest clients of a round that is not lost, since each adds its share of the noise; 0
    # where none does.
    min_participants: int = 0
    # `(numbers) -> count`, the public number that the noised sum is divided by; None if it is not
    # divided.
    divisor: Callable[[Any], Any] | None = None
    # Whether an update is scaled by one number, and unchanged within the bound in L2 norm; anything
    # that shares the bound is then scaled with the update. The engine relies on it that such a
    # contribution is finite for any finite update.
    clips_whole: bool = False


class UnclaimedNoise(NamedTuple):
    """Noise on clients' messages without a privacy claim, and the reason."""

    reason: str


class RecordClaim(NamedTuple):
    """What is guaranteed to one record of a client that takes part."""

    # By stage, `(size, numbers) -> DpEvent` charged to the record for a round; a single one if all
    # rounds are alike.
    events: tuple[RecordEvent, ...]
    # What leaves the client without any protection, as text for the statement; None if the events
    # cover everything that is sent.
    not_covered: str | None = None
    # The fewest clients of a round that is not lost, where noise comes in shares of clients; 0
    # where not.
    min_participants: int = 0
    # The bound on what a record adds to what is released, as text for the statement; None if it is
    # the clip norm of the gradients that training releases.
    contribution: str | None = None

    def at(self, stage: int) -> RecordEvent:
        """The event of a stage; the only one if all rounds are alike."""
        return self.events[stage if len(self.events) > 1 else 0]


class OnceClaim(RecordClaim):
    """The same where each record is read in one round only, such as data that are new by round.

    Rounds of one run compose in parallel: a client pays for the first of equally priced rounds, and
    for no other. Another run reads the records again, so that accounts hold for one run alone.
    """

    __slots__ = ()


class Claims(NamedTuple):
    """All claims of an algorithm, by unit of privacy; None if absent."""

    client: ClientClaim | None = None
    record: RecordClaim | None = None

    @property
    def units(self) -> tuple[str, ...]:
        """The units of privacy that have a claim."""
        return tuple(unit for unit, claim in self._asdict().items() if claim is not None)

    @property
    def min_participants(self) -> int:
        """The fewest clients whose shares of noise a sum needs; 0 without shares."""
        return max((c.min_participants for c in (self.client, self.record) if c), default=0)

    @property
    def not_covered(self) -> str | None:
        """What leaves clients without any protection, as text."""
        return None if self.record is None else self.record.not_covered
