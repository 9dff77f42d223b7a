"""The shape that every algorithm has: a declaration of pure functions, without a loop."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import flax.struct
import jax
from chex import PRNGKey
from dp_accounting import ComposedDpEvent, DpEvent, NoOpDpEvent

from fedjax_dp.clients import base as clients
from fedjax_dp.clients.base import LocalConfig, TrainingMetrics
from fedjax_dp.clients.selection import Choice
from fedjax_dp.core import argument_checks, checks, ranges
from fedjax_dp.core.trees import PyTree
from fedjax_dp.privacy.claims import Claims, ClientClaim, RecordClaim
from fedjax_dp.server.base import Aggregator


class Hyper(NamedTuple):
    """Every number of a run that fixes no shape. It is an argument of each round, and is swept.

    Attributes:
      local: the numbers of local training, scalars or `[num_clients]`; scalars where one client is
        handed its own.
      algorithm: the algorithm's own numbers, by name.
      aggregator: the aggregator's numbers, by name.
    """

    local: LocalConfig
    algorithm: Mapping[str, Any] = {}
    aggregator: Mapping[str, Any] = {}

    def of_client(self, client: jax.typing.ArrayLike) -> "Hyper":
        """Reads the numbers that one client trains with.

        Args:
          client: the client's index; static or traced.

        Returns:
          The same, with scalars of local training.
        """
        return self._replace(local=self.local.row(client))


@flax.struct.dataclass
class Round:
    """Which round it is.

    Attributes:
      index: rounds done before it, int32.
      stage: its stage, int32; 0 where rounds are all of a kind.
    """

    index: jax.Array
    stage: jax.Array


class ClientOutput(NamedTuple):
    """What one client's round ends with.

    Attributes:
      update: what leaves the client; the aggregator reads it.
      weight: the client's weight, float32; not negative.
      state: the client's own state, kept for its next round; what `ClientState` declares.
      training: what local training tells people, or None where nothing is trained.
      info: further numbers for people, by name, scalars or arrays; exact, not private. The
        means over the cohort are shown, without those of weight 0.
    """

    update: PyTree
    weight: jax.Array
    state: PyTree
    training: TrainingMetrics | None = None
    info: Mapping[str, Any] = {}

    @property
    def message(self) -> PyTree:
        """Gives the update in the form in which it leaves, see `core.messages`."""
        form = None if self.training is None else self.training.form
        return self.update if form is None else form.of(self.update)


def _kept(server: PyTree, aggregate: PyTree, own: PyTree, hyper: Hyper) -> PyTree:
    del server, aggregate, hyper
    return own


class SharedModel(NamedTuple):
    """Where in a state a model is, such as that for the whole population in the server's.

    Attributes:
      read: `(state) -> params`.
      write: `(state, params) -> state` with another model in its place.
      is_start: whether the next round starts from it; not where it is an average of what rounds
        came to, which wrappers that extrapolate refuse.
      is_whole: whether it can be used as it is; not where some of it stays at home with clients,
        and what is there in its place was never trained.
    """

    read: Callable[[PyTree], PyTree]
    write: Callable[[PyTree, PyTree], PyTree]
    is_start: bool = True
    is_whole: bool = True


class Iterate(NamedTuple):
    """Where in a client's state the point is that a round maps to its next.

    Attributes:
      read: `(state) -> point`.
      write: `(state, point) -> state` with another point in its place.
      weigh: `(sizes) -> weights` of the clients in the mean of a round, on the host, both
        `[num_clients]`; the norm of the points of all clients has the same.
    """

    read: Callable[[PyTree], PyTree]
    write: Callable[[PyTree, PyTree], PyTree]
    weigh: Callable[[Any], Any]


@flax.struct.dataclass
class Recipient:
    """A client as the server knows it when it sends a message.

    Attributes:
      index: the client's index in the population, int32.
      size: how many records it owns, int32; taken as public.
      round: rounds done before this one, int32.
      stage: the stage of the round, int32.
      known: the part of the client's state that the server has from its uploads, as
        `ClientState.known` says; None where it has none.
    """

    index: jax.typing.ArrayLike
    size: jax.typing.ArrayLike
    round: jax.typing.ArrayLike
    stage: jax.typing.ArrayLike
    known: PyTree = None


class ClientState(NamedTuple):
    """What clients keep from round to round.

    Attributes:
      init: `(server) -> own`, one client's state before its first round.
      finish: `(server, aggregate, own, hyper) -> own`, what becomes of it when the round is over;
        `server` is the server's state behind its step, `own` what the client's round ended with,
        or what it began with for a client that sat out. None leaves it as it is.
      finishes_everybody: whether `finish` is for all clients, or for those alone whose contribution
        is in the aggregate.
      iterate: where in it the point is that a round maps to its next, for wrappers that
        extrapolate the points of all clients; None where it is not there as such.
      known: `(own) -> part`, the part that the server has from the client's uploads, which
        `FederatedAlgorithm.broadcast` may read; None for nothing.
    """

    init: Callable[[PyTree], PyTree]
    finish: Callable[[PyTree, PyTree, PyTree, Hyper], PyTree] | None = None
    finishes_everybody: bool = False
    iterate: Iterate | None = None
    known: Callable[[PyTree], PyTree] | None = None


def field(name: str, *, is_whole: bool = True) -> SharedModel:
    """Finds the shared model in a field of the server's state.

    Args:
      name: the field of a NamedTuple.
      is_whole: as `SharedModel`.

    Returns:
      The view.
    """
    return SharedModel(
        lambda server: getattr(server, name),
        lambda server, params: server._replace(**{name: params}),
        is_whole=is_whole,
    )


class Kept(Protocol):
    """What clients keep, as work on the host reads it: NumPy arrays, wherever they lie."""

    def of_all(self, select: Callable[[PyTree], PyTree]) -> PyTree:
        """Reads a part of every row.

        Args:
          select: `(row) -> part`, some of the row's leaves as they are.

        Returns:
          The part, `[num_clients, ...]`.
        """

    def of(self, client: int) -> PyTree:
        """Reads one client's row.

        Args:
          client: the client's index.

        Returns:
          What it keeps.
        """

    def judged(self, client: int) -> Any:
        """Lets every client judge what one of them keeps, by its own validation data.

        Args:
          client: whose row is judged.

        Returns:
          What `HostStep.judge` says at each client, `[num_clients]`, float32.
        """


class HostStep(NamedTuple):
    """Work on the host between two rounds, such as fitting a mixture with a library.

    The engine takes it as the last part of its round: a state that `Simulation.run` returns, or
    that a checkpoint holds, has it behind it.

    Attributes:
      after: how many rounds are done when it runs, at least 1.
      step: `(server, clients, hyper, key) -> server` on NumPy arrays, of unchanged structure,
        shapes and types, and a function of its arguments alone; the key is used for nothing else.
        What it reads must be private already: no event is charged. Clients take over what has
        become of the server when they next take part.
      reads_clients: whether it is handed what clients keep, as `Kept`, which is private for records
        where training is, and never private for clients; `clients` is None where not.
      judge: `(row, validation) -> scalar`, compiled, what a client's second split says of a row,
        its own or another's, for `Kept.judged`; it is exact, and refused where anything is promised
        to records. None where nobody is asked.
    """

    after: int
    step: Callable[[PyTree, Kept | None, Hyper, Any], PyTree]
    reads_clients: bool = True
    judge: Callable[[PyTree, clients.ClientData], jax.Array] | None = None


def one_stage(server: PyTree, hyper: Hyper, round_index: Any) -> Any:
    """Tells the stage where rounds are all of a kind.

    Args:
      server: not read.
      hyper: not read.
      round_index: not read.

    Returns:
      0.
    """
    del server, hyper, round_index
    return 0


class FederatedAlgorithm(NamedTuple):
    """Declares a federated algorithm; the engine makes its round.

    Attributes:
      name: the algorithm's name in reports.
      init: `(key) -> server`, the server's state: models, optimiser states, whatever is kept.
      broadcast: `(server, client) -> message`, what the server sends one client, a `Recipient`;
        arrays, or parts of them in the forms of `core.messages`.
      client: `(message, own, client, hyper, key) -> ClientOutput`, one client's whole round, from
        the message as it arrives, see `core.messages.received`, to what it returns; `own` is its
        state, None where clients keep nothing. Where privacy is claimed for records it is handed a
        `PublicClient`, which a trainer and a choice can open and it cannot.
      aggregator: how the cohort's updates become one aggregate.
      server_step: `(server, aggregate, hyper, round, key) -> (server, info)`; `round` is a `Round`.
      hyper: the numbers that a run starts with.
      num_steps: `(size, config) -> steps` of a client, by which clients of like length are grouped.
      ranges: of the algorithm's own numbers, see `core.ranges`.
      shared: the model for the whole population; None where there is no such model.
      personal: `(server, own, client) -> params`, the model that one client would use, `Sparse`
        where a mask of its own decides which weights it has; None where it is the shared one.
      clients: what clients keep; None where they keep nothing.
      record: what is promised to records, its numbers being a `Hyper`; None for nothing.
      choice: how clients choose one of several models by their own records; its numbers are the
        algorithm's own, its price is in `record`. None where they do not.
      stage_of: `(server, hyper, round_index) -> int32`, the stage of a round, both counting from 0.
        Which stage a round has is traced data: going from one to the next compiles nothing. It must
        be right for the round that the server's state stands before, and for later ones it must
        foresee no less cost than any course that the run may take.
      host_steps: what is done on the host between rounds.
      check_noised: raises a ValueError if noise on updates would move what training leaves alone;
        that of the trainer where an update is one of a model.
      num_clients: the population that it was built for; None where it serves any.
      needs_validation: whether clients read a second split of their data in a round.
      check_numbers: `(numbers, prefix)` raises a ValueError for numbers of its own that are in
        their ranges and do not go together; the prefix comes before a number's name.
      silent_stages: the stages in which nothing is sent.
    """

    name: str
    init: Callable[[PRNGKey], PyTree]
    broadcast: Callable[[PyTree, Recipient], PyTree]
    client: Callable[..., ClientOutput]
    aggregator: Aggregator
    server_step: Callable[[PyTree, PyTree, Hyper, Round, PRNGKey], tuple[PyTree, dict[str, Any]]]
    hyper: Hyper
    num_steps: Callable[[Any, LocalConfig], Any]
    ranges: Mapping[str, Any] = {}
    shared: SharedModel | None = None
    personal: Callable[..., PyTree] | None = None
    clients: ClientState | None = None
    record: RecordClaim | None = None
    choice: Choice | None = None
    stage_of: Callable[[PyTree, Hyper, Any], Any] = one_stage
    host_steps: tuple[HostStep, ...] = ()
    check_noised: Callable[[], None] = lambda: None
    num_clients: int | None = None
    needs_validation: bool = False
    check_numbers: Callable[[Mapping[str, Any], str], None] = lambda numbers, prefix: None
    silent_stages: tuple[int, ...] = ()

    @property
    def claims(self) -> Claims:
        """Gathers what aggregator and training promise."""
        of_clients = self.aggregator.claim
        return Claims(of_clients if isinstance(of_clients, ClientClaim) else None, self.record)

    def message_to(self, server: PyTree, own: PyTree, client: Any) -> PyTree:
        """Makes the message that one client is sent, before it arrives.

        Args:
          server: the server's state.
          own: the client's state; only the part that the server knows is read.
          client: the client, a `ClientData` or a `PublicClient`; only public facts are read.

        Returns:
          The message, for `core.messages.received` to hand to the client.
        """
        known = None
        if self.clients is not None and self.clients.known is not None:
            known = self.clients.known(own)
        return self.broadcast(
            server, Recipient(client.index, client.size, client.round, client.stage, known)
        )

    def with_numbers(
        self, numbers: Mapping[str, Any], ranges_: Mapping[str, Any]
    ) -> "FederatedAlgorithm":
        """Adds numbers of its own, for an algorithm that is made from another.

        Args:
          numbers: by name.
          ranges_: of these numbers.

        Returns:
          The algorithm; the numbers are checked.

        Raises:
          ValueError: for a number out of its range.
        """
        ranges.check(numbers, ranges_)
        hyper = self.hyper._replace(algorithm={**self.hyper.algorithm, **numbers})
        return self._replace(hyper=hyper, ranges={**self.ranges, **ranges_})

    def check(self, hyper: Hyper, num_clients: int | None = None) -> None:
        """Checks every number on the host; traced ones cannot be looked at.

        Args:
          hyper: the numbers of a run.
          num_clients: the population that algorithm and arrays must match, where it is known.

        Raises:
          ValueError: naming the number, its range and its value.
        """
        if num_clients is not None and self.num_clients is not None:
            rule = f"be the {num_clients} clients of the data for {self.name}"
            is_same = self.num_clients == num_clients
            checks.require(is_same, "num_clients", rule, self.num_clients)
        argument_checks.check_fields(hyper, "hyper.")
        hyper.local.validate(num_clients)
        ranges.check(hyper.algorithm, self.ranges, "hyper.algorithm.")
        self.check_numbers(hyper.algorithm, "hyper.algorithm.")
        ranges.check(hyper.aggregator, self.aggregator.ranges, "hyper.aggregator.")


def of_training(trainer: clients.LocalTrainer) -> RecordClaim | None:
    """Takes over what local training promises to records, for an algorithm that reads nothing else.

    Args:
      trainer: local training.

    Returns:
      The same claim with the numbers of a `Hyper`, or None where the trainer claims nothing.
    """
    return of_trainings(trainer, lambda hyper: hyper.local)


def of_trainings(
    trainer: clients.LocalTrainer, *numbers: Callable[[Hyper], LocalConfig]
) -> RecordClaim | None:
    """Adds up what several runs of local training in one round promise to records.

    Args:
      trainer: local training.
      *numbers: of each run, `(hyper) -> LocalConfig`.

    Returns:
      The claim with the numbers of a `Hyper`, or None where the trainer claims nothing.
    """
    if trainer.claim is None:
        return None
    (one,) = trainer.claim.events

    def event(size: int, hyper: Hyper) -> DpEvent:
        paid = [one(size, of_run(hyper)) for of_run in numbers]
        paid = [each for each in paid if not isinstance(each, NoOpDpEvent)]
        if len(paid) < 2:
            return paid[0] if paid else NoOpDpEvent()
        return ComposedDpEvent(paid)

    return RecordClaim((event,), trainer.claim.not_covered)
