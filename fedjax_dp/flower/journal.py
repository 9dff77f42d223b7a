"""The rounds whose messages have left the server, written before they leave."""

from typing import Protocol

from fedjax_dp.engine.record import RoundRecord


class Journal(Protocol):
    """The rounds that were sent, in order."""

    @property
    def run(self) -> str:
        """A random name of the run, the same when it is resumed."""

    def append(self, round: int, record: RoundRecord) -> None:
        """Writes a round that is about to be sent.

        Args:
          round: rounds done before it.
          record: its record, as it is known before messages leave.
        """

    def num_attempts(self, round: int) -> int:
        """Counts the earlier attempts of a round.

        Args:
          round: rounds done before it.

        Returns:
          The number of attempts.
        """

    def num_released(self, round: int) -> int:
        """Counts the earlier attempts of a round whose aggregate was sent to nodes afterwards.

        Args:
          round: rounds done before it.

        Returns:
          The number of attempts.
        """
