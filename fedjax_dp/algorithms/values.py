"""The values that a round passes to an algorithm, and those that it returns."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import flax.struct
import jax

from fedjax_dp.clients.base import LocalConfig, TrainingMetrics
from fedjax_dp.core.messages import received
from fedjax_dp.core.trees import PyTree


class Hyper(NamedTuple):
    """All numbers of a run that fix no shape, an argument of each round, so they can be swept.

    Attributes:
      local: the numbers of local training, scalars or `[num_clients]`; scalars for one client.
      algorithm: the algorithm's own numbers, by name.
      aggregator: the aggregator's numbers, by name.
    """

    local: LocalConfig
    algorithm: Mapping[str, Any] = {}
    aggregator: Mapping[str, Any] = {}

    def of_client(self, client: jax.typing.ArrayLike) -> "Hyper":
        """Selects the numbers of one client.

        Args:
          client: the client's index; may be traced.

        Returns:
          The same, with scalars of local training.
        """
        return self._replace(local=self.local.row(client))


@flax.struct.dataclass
class Round:
    """The place of a round in a run.

    Attributes:
      index: rounds completed before it, int32.
      stage: its stage, int32; 0 if there is only one.
    """

    index: jax.Array
    stage: jax.Array


class ClientOutput(NamedTuple):
    """The result of one client's round.

    Attributes:
      update: what the client sends; the aggregator reads it.
      weight: the client's weight, float32, at least 0.
      state: the client's state for its next round, as `ClientState` declares it.
      training: metrics of local training, or None if nothing is trained.
      info: further metrics by name, scalars or arrays; exact, not private. Means over the cohort
        are reported, without clients of weight 0.
    """

    update: PyTree
    weight: jax.Array
    state: PyTree
    training: TrainingMetrics | None = None
    info: Mapping[str, Any] = {}

    @property
    def message(self) -> PyTree:
        """The update in the form in which it is sent, see `core.messages`."""
        form = None if self.training is None else self.training.form
        return self.update if form is None else form.of(self.update)

    @property
    def received(self) -> PyTree:
        """The update as it arrives at the server."""
        return received(self.update)


@flax.struct.dataclass
class Recipient:
    """The server's knowledge of a client when it makes a message."""

    index: jax.typing.ArrayLike  # The client's index in the population, int32.
    size: jax.typing.ArrayLike  # Its number of records, int32; taken as public.
    round: jax.typing.ArrayLike  # Rounds completed before this one, int32.
    stage: jax.typing.ArrayLike  # The stage of the round, int32.
    # The part of the client's state that the server has from its uploads, as `ClientState.known`
    # declares; None for nothing.
    known: PyTree = None


class ClientStates(Protocol):
    """The states of all clients for work on the host: NumPy arrays, wherever they are stored."""

    def of_all(self, select: Callable[[PyTree], PyTree]) -> PyTree:
        """Reads a part `(own) -> part` of every client's state, `[num_clients, ...]`."""

    def of(self, client: int) -> PyTree:
        """Reads the state of one client, by its index."""

    def scores(self, client: int) -> Any:
        """Scores one client's state by the validation data of each client, `[num_clients]`."""
