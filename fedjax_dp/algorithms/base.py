"""The declaration of a federated algorithm, and the values that its functions exchange."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from chex import PRNGKey
from dp_accounting import ComposedDpEvent, DpEvent, NoOpDpEvent

from fedjax_dp.clients.base import RANGES, LocalConfig, LocalTrainer, TrainingMetrics
from fedjax_dp.clients.client_data import ClientData
from fedjax_dp.clients.selection import Choice
from fedjax_dp.clients.transforms import UpdateTransform
from fedjax_dp.core import argument_checks, checks, ranges, trees
from fedjax_dp.core.messages import received
from fedjax_dp.core.trees import PyTree
from fedjax_dp.privacy.claims import Claims, ClientClaim, RecordClaim
from fedjax_dp.server.base import Aggregator


class Hyper(NamedTuple):
    """All numbers of a run that fix no shape, an argument of each round, so they can be swept.

    Attributes:
      local: the numbers of local training, scalars or `[num_clients]`; scalars for one client.
      algorithm: the algorithm's own numbers, by name.
      aggregator: the aggregator's numbers, by name.
      factors: by dotted name, such as "local.learning_rate", what multiplies a number in each
        round, `[rounds]`, float32; the last entry is that of all later rounds. Empty for numbers of
        one round, or that never change.
    """

    local: LocalConfig
    algorithm: Mapping[str, Any] = {}
    aggregator: Mapping[str, Any] = {}
    factors: Mapping[str, Any] = {}

    def of_client(self, client: jax.typing.ArrayLike) -> "Hyper":
        """Selects the numbers of one client.

        Args:
          client: the client's index; may be traced.

        Returns:
          The same, with scalars of local training.
        """
        return self._replace(local=self.local.row(client))

    def at(self, round: jax.typing.ArrayLike) -> "Hyper":
        """Computes the numbers of one round.

        Args:
          round: rounds done before it; may be traced.

        Returns:
          The numbers, without factors.
        """
        numbers = self._replace(factors={})
        for name, table in self.factors.items():
            is_known = isinstance(round, int | np.integer | np.ndarray)
            place = (np if is_known else jnp).minimum(round, len(table) - 1)
            factor = (table if is_known else jnp.asarray(table))[place]
            numbers = numbers._changed(name, partial(_scaled, factor=factor))
        return numbers

    def alike(self, num_rounds: int | None = None) -> list[int]:
        """Finds for each round the first one with the same numbers, on the host.

        Args:
          num_rounds: how many rounds; those after which no number changes if None.

        Returns:
          An index of a round, from 0, for each round.
        """
        tables = [np.asarray(table).tolist() for table in self.factors.values()]
        if num_rounds is None:
            num_rounds = max(map(len, tables), default=1)
        firsts: dict[tuple[float, ...], int] = {}
        rows = (tuple(x[min(t, len(x) - 1)] for x in tables) for t in range(num_rounds))
        return [firsts.setdefault(row, t) for t, row in enumerate(rows)]

    def number(self, name: str) -> Any:
        """Finds a number by its dotted name; None if there is none.

        Args:
          name: such as "local.learning_rate", "local.optimizer.momentum" or "algorithm.mu".

        Returns:
          The number, or the mapping of numbers at this name.
        """
        value: Any = self
        for part in name.split("."):
            fields = getattr(value, "_asdict", lambda value=value: value)()
            value = fields.get(part) if isinstance(fields, Mapping) else None
        return value

    def _changed(self, name: str, change: Callable[[Any], Any]) -> "Hyper":
        """Changes the number of a dotted name."""

        def changed(value: Any, path: Sequence[str]) -> Any:
            if not path:
                return change(value)
            first, *rest = path
            if isinstance(value, Mapping):
                return {**value, first: changed(value[first], rest)}
            return value._replace(**{first: changed(getattr(value, first), rest)})

        numbers: Hyper = changed(self, name.split("."))
        return numbers


def _scaled(number: Any, factor: Any) -> Any:
    """Multiplies numbers in float32, as compiled rounds do."""
    if not isinstance(number, jax.Array):
        number = np.asarray(number)
    return number.astype(np.float32) * factor


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


class SharedModel(NamedTuple):
    """The location of the shared model in a state.

    Attributes:
      read: `(state) -> params`.
      write: `(state, params) -> state` with another model.
      is_start: whether the next round starts from it; wrappers that extrapolate refuse an average
        over rounds.
      is_whole: whether it is usable by itself; not if a part of it stays with clients and its
        counterpart at the server is never trained.
    """

    read: Callable[[PyTree], PyTree]
    write: Callable[[PyTree, PyTree], PyTree]
    is_start: bool = True
    is_whole: bool = True


@argument_checks.checked
def field(name: str, *, is_whole: bool = True) -> SharedModel:
    """Declares the shared model in a field of the server's state, a NamedTuple.

    Args:
      name: of the field.
      is_whole: as of `SharedModel`.

    Returns:
      The location of the model.

    Raises:
      ValueError: for a name that no field can have.
    """
    checks.require(name.isidentifier(), "name", "be that of a field", name)
    return SharedModel(
        lambda server: getattr(server, name),
        lambda server, params: server._replace(**{name: params}),
        is_whole=is_whole,
    )


class ClusterModel(NamedTuple):
    """A client's model among those of all clusters.

    Attributes:
      models: of the clusters, `[models, ...]`.
      cluster: the index of the client's, int32.
    """

    models: PyTree
    cluster: jax.Array


def model_of(view: PyTree | ClusterModel) -> PyTree:
    """Takes the model out of what a view of one client shows."""
    return trees.take(view.models, view.cluster) if isinstance(view, ClusterModel) else view


# `(server, own, client) -> params` of one client; `Sparse` if its mask determines which it has.
PersonalModel: TypeAlias = Callable[[PyTree, PyTree, Any], PyTree]


class Views(NamedTuple):
    """The models that an algorithm trains, as evaluation and export read them.

    Attributes:
      shared: the model for the whole population; None if absent.
      personal: the model of one client, or a `ClusterModel`; None if it is the shared one.
    """

    shared: SharedModel | None = None
    personal: PersonalModel | None = None


def views_of_clusters(cluster: Callable[[PyTree, PyTree, Any], jax.Array]) -> Views:
    """Shows the model of each client's cluster among `server.models`, `[models, ...]`."""
    return Views(personal=lambda server, *own: ClusterModel(server.models, cluster(server, *own)))


class Iterate(NamedTuple):
    """The location, in a client's state, of the point that a round maps to its next.

    Attributes:
      read: `(state) -> point`.
      write: `(state, point) -> state` with another point.
      weigh: `(sizes) -> weights` of the clients in the mean of a round and in the norm of their
        points, on the host, both `[num_clients]`.
    """

    read: Callable[[PyTree], PyTree]
    write: Callable[[PyTree, PyTree], PyTree]
    weigh: Callable[[Any], Any]


class Averaged(NamedTuple):
    """Whole models that clients send and the server averages, where their states hold them.

    Attributes:
      sent: `(own) -> params`, what the client sent last, noise included; None if that noise is a
        share, which protects no client's model by itself.
      sent_in: `(own) -> round` in which it was sent, int32; -1 before the first.
      mean: `(server) -> params`, the mean of the clients' models.
      mean_in: `(server) -> round` that it is of, int32; -1 before the first.
      active: `(server) -> is_active`, the clients that have not left, `[num_clients]`, bool.
      with_active: `(server, is_active) -> server` with others.
      has_common_noise: whether clients scale their noise by numbers of others.
    """

    sent: Callable[[PyTree], PyTree] | None
    sent_in: Callable[[PyTree], jax.Array]
    mean: Callable[[PyTree], PyTree]
    mean_in: Callable[[PyTree], jax.Array]
    active: Callable[[PyTree], jax.Array]
    with_active: Callable[[PyTree, jax.Array], PyTree]
    has_common_noise: bool = False


class Finish(NamedTuple):
    """A second message at the end of a round, to the clients that contributed to the aggregate.

    Attributes:
      broadcast: `(server, aggregate) -> message`, one for all; `server` is the state after the
        server's step.
      apply: `(message, own, hyper) -> own`, from the state that the client's round ended with.
    """

    broadcast: Callable[[PyTree, PyTree], PyTree]
    apply: Callable[[PyTree, PyTree, Hyper], PyTree]


class FinishForAll(Finish):
    """The same for every client of the population, including absent ones.

    Attributes:
      broadcast: as of `Finish`.
      apply: as of `Finish`.
    """

    __slots__ = ()


class ClientState(NamedTuple):
    """The state of a client, from round to round.

    Attributes:
      init: `(server) -> own`, one client's state before its first round.
      finish: its change at the end of a round, `Finish` or `FinishForAll`; None for nothing.
      iterate: for wrappers, the location in it of the point that a round maps to its next, or of
        the model that is averaged; None if it holds neither.
      known: `(own) -> part`, the part that the server has from the client's uploads, which
        `FederatedAlgorithm.broadcast` may read; None for nothing.
    """

    init: Callable[[PyTree], PyTree]
    finish: Finish | None = None
    iterate: Iterate | Averaged | None = None
    known: Callable[[PyTree], PyTree] | None = None


class HostStep(NamedTuple):
    """Work on the host between two rounds, such as fitting a mixture with a library.

    The engine runs it as the last part of a round, so that every state that `Simulation.run`
    returns and every checkpoint includes it.

    Attributes:
      after: the number of completed rounds when it runs, at least 1.
      step: `(server, clients, hyper, key) -> server` on NumPy arrays, of unchanged structure,
        shapes and types, and a function of its arguments alone; the key is used nowhere else.
        Everything that it reads must be private already: no event is charged.
      reads_clients: whether it gets the clients' states, as `ClientStates`, which are private for
        records if training is, and never private for clients; else `clients` is None.
      score: `(own, validation) -> scalar`, compiled, the quality of a client's state, its own or
        another's, on the second split of a client's data, for `ClientStates.scores`. It is exact,
        and refused if privacy is claimed for records. None if unused.
    """

    after: int
    step: Callable[[PyTree, ClientStates | None, Hyper, Any], PyTree]
    reads_clients: bool = True
    score: Callable[[PyTree, ClientData], jax.Array] | None = None


def one_stage(server: PyTree, hyper: Hyper, round_index: Any) -> Any:
    """Returns 0, the only stage."""
    del server, hyper, round_index
    return 0


class Stages(NamedTuple):
    """The kinds of round of an algorithm that changes over time.

    Attributes:
      stage_of: `(server, hyper, round_index) -> int32`, the stage of a round, both counted from 0,
        as traced data: a change of stage compiles nothing. It must be exact for the next round; for
        later rounds it may overestimate the privacy cost, never underestimate it.
      host_steps: work on the host between rounds.
      choice: how clients choose one of several models by their own records; its numbers are the
        algorithm's, its price is in the claim for records. None for no choice.
    """

    stage_of: Callable[[PyTree, Hyper, Any], Any] = one_stage
    host_steps: tuple[HostStep, ...] = ()
    choice: Choice | None = None


class Training(NamedTuple):
    """The part of a declaration that local training determines, made by `training_of`.

    Attributes:
      config: the numbers of local training that a run starts with.
      num_steps: `(size, config) -> steps` of a client, by which clients are grouped.
      record: the claim for records, with the numbers of a `Hyper`; None for nothing.
      check_noised: raises a ValueError if noise on updates would move parameters that training does
        not.
      reads_validation: whether clients read a second split of their data in a round.
      ranges: of the numbers of `config`, see `core.ranges`.
    """

    config: LocalConfig
    num_steps: Callable[[Any, LocalConfig], Any]
    record: RecordClaim | None = None
    check_noised: Callable[[], None] = lambda: None
    reads_validation: bool = False
    ranges: Mapping[str, Any] = RANGES

    def steps_of(self, clients: jax.Array, sizes: jax.Array, local: LocalConfig) -> jax.Array:
        """Counts the local steps of clients.

        Args:
          clients: their indices, `[slots]`, int32.
          sizes: records of all clients, `[num_clients]`.
          local: the numbers of the population.

        Returns:
          The steps, `[slots]`.
        """
        return jax.vmap(lambda i: self.num_steps(sizes[i], local.row(i)))(clients)


class Numbers(NamedTuple):
    """An algorithm's own numbers that can be swept.

    Attributes:
      values: by name, those that a run starts with.
      ranges: of these numbers, see `core.ranges`.
      check: `(hyper)` raises a ValueError for numbers of a round that are in their ranges and do
        not fit together.
      num_clients: the population that they were chosen for; None for any.
    """

    values: Mapping[str, Any] = {}
    ranges: Mapping[str, Any] = {}
    check: Callable[[Hyper], None] = lambda hyper: None
    num_clients: int | None = None


class Needs(NamedTuple):
    """What an algorithm needs of the other sections of a configuration.

    Attributes:
      steps: the local steps it can use: "any"; "plain", those of SGD without momentum; or "none",
        without local steps.
      transforms: declarations of the update transforms that it adds at the clients.
      option_for_bound: the option that is required if no aggregator bounds an update; empty for
        none.
      reason: why it needs plain steps, for an error.
      check_rate: `(learning rates)`, raises a ValueError for those that it cannot use.
      option_for_weights: the option by which it weights clients itself; empty if it does not.
      check_clients: raises a ValueError for options that it cannot have if clients are protected.
    """

    steps: Literal["any", "plain", "none"] = "any"
    transforms: Sequence[UpdateTransform] = ()
    option_for_bound: str = ""
    reason: str = "its updates are computed from the gradients of single steps"
    check_rate: Callable[[Any], None] = lambda learning_rate: None
    option_for_weights: str = ""
    check_clients: Callable[[], None] = lambda: None

    def check_bound(self, is_bounded: bool) -> None:
        """Refuses updates without a bound.

        Args:
          is_bounded: whether an aggregator bounds them.

        Raises:
          ValueError: naming the option that bounds them otherwise.
        """
        rule = "be given if no aggregator bounds an update"
        option = self.option_for_bound
        checks.require(is_bounded or not option, option, rule, None)

    def check_weights(self, has_aggregator: bool) -> None:
        """Refuses weights beside those of an aggregator.

        Args:
          has_aggregator: whether an aggregator is configured.

        Raises:
          ValueError: naming the option that weights clients.
        """
        rule = "be False with an aggregator, which has its own weights"
        option = self.option_for_weights
        checks.require(not has_aggregator or not option, option, rule, True)


def weighted(is_weighted: bool) -> Needs:
    """Declares whether clients have weights, which no private mean has a place for."""
    return Needs(option_for_weights="is_weighted" if is_weighted else "")


# The functions of a declaration. If privacy is claimed for records, the client of a round is a
# `PublicClient`, whose records a trainer and a choice can read and the algorithm cannot; else a
# `ClientData`. Its second argument is the client's state, or None.
Init: TypeAlias = Callable[[PRNGKey], PyTree]
Broadcast: TypeAlias = Callable[[PyTree, Recipient], PyTree]
ClientRound: TypeAlias = Callable[[PyTree, PyTree, Any, Hyper, PRNGKey], ClientOutput]
ServerStep: TypeAlias = Callable[
    [PyTree, PyTree, Hyper, Round, PRNGKey], tuple[PyTree, dict[str, Any]]
]


class FederatedAlgorithm(NamedTuple):
    """Declares a federated algorithm; the engine makes its round.

    Attributes:
      name: the algorithm's name in reports.
      init: `(key) -> server`, the server's state: models, optimiser states, all that it needs.
      broadcast: `(server, recipient) -> message` to one client: arrays, or parts of them in the
        forms of `core.messages`.
      client: `(message, own, client, hyper, key) -> ClientOutput`, one client's round. It sees the
        message, as `core.messages.received` returns it, and nothing else of the server.
      aggregator: combines the cohort's updates into one aggregate.
      server_step: `(server, aggregate, hyper, round, key) -> (server, info)` along it.
      training: numbers, steps and claim of local training.
      numbers: the algorithm's own numbers.
      views: the models that it trains.
      client_state: the clients' state between rounds; None for nothing.
      stages: the kinds of round, if there are several.
    """

    name: str
    init: Init
    broadcast: Broadcast
    client: ClientRound
    aggregator: Aggregator
    server_step: ServerStep
    training: Training
    numbers: Numbers = Numbers()
    views: Views = Views()
    client_state: ClientState | None = None
    stages: Stages = Stages()

    @property
    def hyper(self) -> Hyper:
        """The numbers that a run starts with."""
        return Hyper(self.training.config, self.numbers.values, self.aggregator.numbers)

    @property
    def claims(self) -> Claims:
        """The claims of aggregator and training."""
        of_clients = self.aggregator.claim
        return Claims(
            of_clients if isinstance(of_clients, ClientClaim) else None, self.training.record
        )

    def message_to(self, server: PyTree, own: PyTree, client: Any) -> PyTree:
        """Makes the message that one client is sent, before it arrives.

        Args:
          server: the server's state.
          own: the client's state; only the part that the server knows is read.
          client: a `ClientData` or a `PublicClient`; only public facts are read.

        Returns:
          The message, for `core.messages.received`.
        """
        known = None
        if self.client_state is not None and self.client_state.known is not None:
            known = self.client_state.known(own)
        return self.broadcast(
            server, Recipient(client.index, client.size, client.round, client.stage, known)
        )

    def with_hyper(self, hyper: Hyper) -> "FederatedAlgorithm":
        """Replaces the initial numbers, which are checked when the algorithm is bound to data.

        Args:
          hyper: numbers of the same names.

        Returns:
          The algorithm.
        """
        return self._replace(
            training=self.training._replace(config=hyper.local),
            numbers=self.numbers._replace(values=hyper.algorithm),
            aggregator=self.aggregator._replace(numbers=hyper.aggregator),
        )

    def for_clients(self, num_clients: int, name: str | None = None) -> "FederatedAlgorithm":
        """Restricts an algorithm to a population, under a new name if given.

        Args:
          num_clients: the size of the population.
          name: the new name.

        Returns:
          The algorithm.
        """
        numbers = self.numbers._replace(num_clients=num_clients)
        return self._replace(name=name or self.name, numbers=numbers)

    def with_numbers(
        self,
        values: Mapping[str, Any],
        ranges_: Mapping[str, Any],
        check: Callable[[Hyper], None] | None = None,
    ) -> "FederatedAlgorithm":
        """Adds numbers.

        Args:
          values: by name.
          ranges_: of these numbers.
          check: replaces `Numbers.check` if given.

        Returns:
          The algorithm; the numbers are checked.

        Raises:
          ValueError: for a number out of its range, or numbers that do not fit together.
        """
        ranges.check(values, ranges_)
        present = self.numbers
        more = present._replace(
            values={**present.values, **values},
            ranges={**present.ranges, **ranges_},
            check=check or present.check,
        )
        algorithm = self._replace(numbers=more)
        more.check(algorithm.hyper)
        return algorithm

    def check(self, hyper: Hyper, num_clients: int | None = None) -> None:
        """Checks every number on the host; traced numbers are not checked.

        Args:
          hyper: the numbers of a run.
          num_clients: the population that algorithm and arrays must match, if known.

        Raises:
          ValueError: naming the number, its range and its value.
        """
        built_for = self.numbers.num_clients
        if num_clients is not None and built_for is not None:
            rule = f"be the {num_clients} clients of the data for {self.name}"
            checks.require(built_for == num_clients, "num_clients", rule, built_for)
        argument_checks.check_fields(hyper, "hyper.")
        hyper.local.validate(num_clients, self.training.ranges)
        ranges.check(hyper.algorithm, self.numbers.ranges)
        self.numbers.check(hyper)
        ranges.check(hyper.aggregator, self.aggregator.ranges, "hyper.aggregator.")


@argument_checks.checked
def training_of(
    trainer: LocalTrainer,
    *,
    num_steps: Callable[[Any, LocalConfig], Any] | None = None,
    record: RecordClaim | None = None,
    sent: PyTree | None = None,
    sends_models: bool = True,
    reads_validation: bool = False,
) -> Training:
    """Collects what local training declares.

    Args:
      trainer: local training.
      num_steps: `(size, config) -> steps` of a client; the trainer's by default.
      record: the claim for records, if a round is more than one run of the trainer; the trainer's
        own by default.
      sent: which parameters leave the client, a tree of bools; all by default.
      sends_models: whether an update is that of a model, so that noise on it moves parameters.
      reads_validation: whether clients read a second split of their data in a round.

    Returns:
      The training.
    """
    return Training(
        trainer.config,
        num_steps or trainer.num_steps,
        record or claim_of(trainer, lambda hyper: hyper.local),
        partial(trainer.check_noised, sent) if sends_models else lambda: None,
        reads_validation,
        trainer.ranges,
    )


def claim_of(trainer: LocalTrainer, *numbers: Callable[[Hyper], LocalConfig]) -> RecordClaim | None:
    """Composes a round's claim of runs of local training, each with a `(hyper) -> LocalConfig`."""
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
