"""A federation as a value: algorithm, population and participation, bound to one pure step."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from chex import PRNGKey

from fedjax_dp.algorithms.base import FederatedAlgorithm, HostStep, Hyper, SharedModel
from fedjax_dp.clients.client_data import ClientData
from fedjax_dp.core import argument_checks, checks
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.core.keys import Purpose, fold
from fedjax_dp.core.trees import PyTree
from fedjax_dp.data.federated import FederatedData, nested
from fedjax_dp.data.participants import Participation
from fedjax_dp.engine.cohort import Cohort, Examples, draw_cohort, typed
from fedjax_dp.engine.execution.client_store import state_of
from fedjax_dp.engine.execution.layout import Layout
from fedjax_dp.engine.record import RoundInfo, RoundRecord
from fedjax_dp.engine.record_access import run_client
from fedjax_dp.engine.round import SimulationState, play_round
from fedjax_dp.privacy.claims import Claims
from fedjax_dp.server.base import Stacked


class Population(NamedTuple):
    """What a federation knows of its clients' data before it sees them.

    Attributes:
      sizes: examples of each client, `[num_clients]`, int32.
      structure: shapes of all examples, by name.
      validation: of a second split of the same clients, or None.
    """

    sizes: np.ndarray
    structure: PyTree
    validation: "Population | None" = None

    @property
    def limit(self) -> int:
        """Finds the largest client, at least 1."""
        return max(1, int(self.sizes.max()))


@checked
def population_of(data: FederatedData, validation: FederatedData | None = None) -> Population:
    """Reads off data what a federation must know of them.

    Args:
      data: the clients' training examples.
      validation: a second split of the same clients' own data.

    Returns:
      The population.

    Raises:
      ValueError: if a split has no examples, or too many, or they are not of the same clients, or
        their examples do not look alike.
    """
    first = _population("data", data)
    if validation is None:
        return first
    rule = f"hold a second split of the {data.num_clients} clients"
    same = validation.num_clients == data.num_clients
    checks.require(same, "validation", rule, validation.num_clients)
    expected, found = (_looks(split) for split in (data, validation))
    rule = f"hold examples that look like those of data, {expected}"
    checks.require(found == expected, "validation", rule, found)
    return first._replace(validation=_population("validation", validation))


def _population(name: str, data: FederatedData) -> Population:
    rule = "hold at least one and fewer than 2**31 examples"
    checks.require(0 < data.num_examples < 2**31, name, rule, data.num_examples)
    kept = jax.dtypes.canonicalize_dtype
    shapes = {k: jax.ShapeDtypeStruct(v.shape, kept(v.dtype)) for k, v in data.examples.items()}
    return Population(data.sizes.astype(np.int32), nested(shapes))


def _looks(data: FederatedData) -> dict[str, str]:
    """Says of every array what one example of it is, such as `float32[28, 28]`."""
    return {k: f"{v.dtype}{list(v.shape[1:])}" for k, v in sorted(data.examples.items())}


@checked
def examples_of(data: FederatedData, validation: FederatedData | None = None) -> Examples:
    """Gives all examples of a population as a round reads them.

    Args:
      data: the clients' training examples.
      validation: a second split of the same clients' own data.

    Returns:
      The examples on the host; `jax.device_put` brings them to a device.
    """
    return Examples(
        nested({name: np.asarray(array) for name, array in data.examples.items()}),
        data.offsets[:-1].astype(np.int32),
        data.sizes.astype(np.int32),
        None if validation is None else examples_of(validation),
        max(1, int(data.sizes.max())),
    )


class Init(Protocol):
    """Makes the state before the first round."""

    def __call__(self, key: PRNGKey, layout: Layout = Layout()) -> SimulationState:
        """Makes it from the root key of the run."""


class Draw(Protocol):
    """Draws the cohort of the next round."""

    def __call__(
        self, state: SimulationState, hyper: Hyper, key: PRNGKey, layout: Layout = Layout()
    ) -> Cohort:
        """Draws it from the root key of the run, the same in every round."""


class Step(Protocol):
    """Plays one round with a given cohort."""

    def __call__(
        self,
        state: SimulationState,
        hyper: Hyper,
        examples: Examples,
        cohort: Cohort,
        key: PRNGKey,
        layout: Layout = Layout(),
    ) -> tuple[SimulationState, RoundRecord, RoundInfo]:
        """Returns state, record and info; the key is the root of the run."""


class Federation(NamedTuple):
    """Algorithm, population and participation as pure functions, without `jit` or host work.

    `jax.jit`, `vmap`, `scan` and `make_jaxpr` reach all of them; a wrapper takes a federation and
    gives one.

    Attributes:
      init: the state before the first round.
      draw: the cohort of the next round.
      step: one round with a given cohort.
      shared: `(state) -> params`, the model for the whole population; None where there is none, or
        where some of it stays at home.
      with_shared: `(state, params) -> state` with another such model; None where there is none.
      personal: `(state, client) -> params`, the model that one client would use, `Sparse` where a
        mask of its own decides which weights it has; None where it is the shared one.
      stages: `(state, hyper, rounds) -> stages` that are foreseen, both `[rounds]`, int32.
      hyper: the numbers that a run starts with.
      check: `(hyper) -> None` raises a ValueError for a number out of its range.
      claims: what is promised, by unit of privacy.
      host_steps: what is done on the host between rounds.
      algorithm: what is run.
      participation: who joins a round.
      population: the clients' sizes.
      draws_ahead: whether `draw` reads nothing of the state but its round, so that streamed rounds
        draw cohorts ahead; false for a wrapper whose cohorts depend on the state.
    """

    init: Init
    draw: Draw
    step: Step
    shared: Callable[[Any], PyTree] | None
    with_shared: Callable[[Any, PyTree], Any] | None
    personal: Callable[[Any, ClientData], PyTree] | None
    stages: Callable[[Any, Hyper, Any], Any]
    hyper: Hyper
    check: Callable[[Hyper], None]
    claims: Claims
    host_steps: tuple[HostStep, ...]
    algorithm: FederatedAlgorithm
    participation: Participation
    population: Population
    draws_ahead: bool = True

    def play(
        self,
        state: SimulationState,
        hyper: Hyper,
        examples: Examples,
        key: PRNGKey,
        layout: Layout = Layout(),
    ) -> tuple[SimulationState, RoundRecord, RoundInfo]:
        """Draws a cohort and plays one round with it.

        Args:
          state: the state before the round.
          hyper: the numbers of the round.
          examples: all clients' examples, see `examples_of`.
          key: the root key of the run, the same in every round.
          layout: how the round is laid out; it changes speed and memory alone.

        Returns:
          The state after the round, its record and its info.
        """
        cohort = self.draw(state, hyper, key, layout)
        return self.step(state, hyper, examples, cohort, key, layout)

    def with_numbers(self, values: Mapping[str, Any], ranges: Mapping[str, Any]) -> "Federation":
        """Adds numbers to those of the algorithm, for a wrapper that has numbers of its own.

        Args:
          values: by name.
          ranges: of these numbers, see `core.ranges`.

        Returns:
          The federation; its check includes these numbers.

        Raises:
          ValueError: for a number out of its range.
        """
        algorithm, inner = self.algorithm.with_numbers(values, ranges), self.check
        added = {name: np.float32(number) for name, number in values.items()}

        def check(hyper: Hyper) -> None:
            algorithm.check(hyper, len(self.population.sizes))
            inner(hyper)

        hyper = self.hyper._replace(algorithm={**self.hyper.algorithm, **added})
        return self._replace(algorithm=algorithm, hyper=hyper, check=check)


@checked
def federation(
    algorithm: FederatedAlgorithm,
    data: FederatedData | Population,
    participation: Participation,
) -> Federation:
    """Binds an algorithm to a population and to who joins a round.

    Args:
      algorithm: the declaration.
      data: the clients' training examples, or what is known of them.
      participation: who joins a round; bound to as many clients as the data have.

    Returns:
      The federation.

    Raises:
      ValueError: for a population that does not match, numbers out of range, a mechanism behind a
        participation without a valid analysis, or an aggregator whose noise would move what
        training leaves alone.
    """
    population = data if isinstance(data, Population) else population_of(data)
    num_clients = len(population.sizes)
    checks.require(
        participation.num_clients == num_clients,
        "participation",
        f"be bound to the {num_clients} clients of the data",
        participation.num_clients,
    )
    _check_validation(algorithm, population)
    hyper = typed(algorithm.hyper)

    def check(hyper: Hyper) -> None:
        algorithm.check(hyper, num_clients)
        built, asked = hyper_limit, hyper.local.batch_size
        if not isinstance(asked, jax.core.Tracer):
            largest = hyper.local.max_batch_size()
            rule = f"be at most {built}, as it was built"
            checks.require(largest <= built, "hyper.local.batch_size", rule, largest)

    hyper_limit = algorithm.hyper.local.max_batch_size()
    check(algorithm.hyper)
    _check_claims(algorithm, participation, hyper)
    sizes = population.sizes

    def init(key: PRNGKey, layout: Layout = Layout()) -> SimulationState:
        argument_checks.check_fields(layout, "layout.")
        server = algorithm.init(init_key(key))
        clients = None
        if algorithm.client_state is not None:
            num_rows = layout.clients_per_device(num_clients) * layout.num_devices
            clients = jax.tree.map(
                lambda x: jnp.broadcast_to(x, (num_rows, *jnp.shape(x))),
                algorithm.client_state.init(server),
            )
        aggregator = algorithm.aggregator.init(update_structure(algorithm, population))
        state = SimulationState(server, aggregator, clients, jnp.int32(0), ())
        # A weak type, such as a filled array has, would be another one behind a step.
        return jax.tree.map(lambda x: jnp.asarray(x, jnp.result_type(x)), state)

    def draw(state, hyper, key, layout=Layout()):
        argument_checks.check_fields(layout, "layout.")
        table = jnp.asarray(sizes)
        return draw_cohort(algorithm, participation, layout, table, hyper, state.round, key)

    def step(state, hyper, examples, cohort, key, layout=Layout()):
        # Examples on the host may be closed over.
        examples = jax.tree.map(jnp.asarray, examples)
        return play_round(algorithm, layout, state, hyper, examples, cohort, key)

    def stages(state, hyper, rounds):
        one = partial(algorithm.stages.stage_of, state.server, hyper)
        return jnp.asarray(jax.vmap(lambda r: jnp.asarray(one(r), jnp.int32))(rounds))

    shared: SharedModel | None = algorithm.views.shared
    if shared is not None and not shared.is_whole:
        shared = None
    of_client = algorithm.views.personal

    def personal(state: SimulationState, client: ClientData) -> PyTree:
        assert of_client is not None
        own = None if state.clients is None else state_of(state.clients, client.index)
        return of_client(state.server, own, client)

    return Federation(
        init=init,
        draw=draw,
        step=step,
        shared=None if shared is None else lambda state: shared.read(state.server),
        with_shared=None
        if shared is None
        else lambda state, params: state._replace(server=shared.write(state.server, params)),
        personal=None if of_client is None else personal,
        stages=stages,
        hyper=hyper,
        check=check,
        claims=algorithm.claims,
        host_steps=algorithm.stages.host_steps,
        algorithm=algorithm,
        participation=participation,
        population=population,
    )


def init_key(key: PRNGKey) -> PRNGKey:
    """Gives the key that an algorithm makes its first model from.

    Args:
      key: the root key of the run.

    Returns:
      The key that `FederatedAlgorithm.init` is given.
    """
    return fold(key, Purpose.INIT)


def one_client(
    algorithm: FederatedAlgorithm, population: Population
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Gives one client's round as a function, with the shapes of its arguments.

    Args:
      algorithm: the declaration.
      population: the clients' sizes and shapes.

    Returns:
      `(key, examples, validation, index) -> ClientOutput`, for shapes and costs, and its arguments'
      shapes.
    """

    def run(key, examples, validation, index):
        server = algorithm.init(key)
        own = None if algorithm.client_state is None else algorithm.client_state.init(server)
        client = ClientData(examples, index, index, index, population.limit)
        if population.validation is not None:
            second = ClientData(validation, index, index, index, population.validation.limit)
            client = client.replace(validation=second)  # type: ignore[attr-defined]
        hyper = jax.tree.map(jnp.asarray, typed(algorithm.hyper)).of_client(index)
        return run_client(algorithm, server, own, client, hyper, key)

    second = None if population.validation is None else population.validation.structure
    index = jax.ShapeDtypeStruct((), jnp.int32)
    return run, (jax.random.key(0), population.structure, second, index)


def update_structure(algorithm: FederatedAlgorithm, population: Population) -> PyTree:
    """Finds the shapes of what a client sends.

    Args:
      algorithm: the declaration.
      population: the clients' sizes and shapes.

    Returns:
      The shapes of an update.
    """
    run, arguments = one_client(algorithm, population)
    return jax.eval_shape(lambda *a: run(*a).received, *arguments)


def _check_validation(algorithm: FederatedAlgorithm, population: Population) -> None:
    """Requires a second split for whoever reads one."""
    if not algorithm.training.reads_validation:
        return
    second = population.validation
    rule = f"be given for {algorithm.name}, whose clients look at it in their rounds"
    checks.require(second is not None, "validation", rule, None)
    assert second is not None
    lacking = np.flatnonzero((population.sizes > 0) & (second.sizes == 0))
    rule = f"hold an example of every client that has training data for {algorithm.name}"
    found = f"none of client {lacking[0]}" if len(lacking) else ""
    checks.require(not len(lacking), "validation", rule, found)


def _check_claims(
    algorithm: FederatedAlgorithm, participation: Participation, hyper: Hyper
) -> None:
    aggregator, claim = algorithm.aggregator, algorithm.claims.client
    if aggregator.claim is not None:
        algorithm.training.check_noised()
    _check_host_steps(algorithm)
    if claim is None:
        return
    # Asked now, so that a combination without an analysis is refused before any work.
    participation.event(claim.event(hyper.aggregator))
    needed, kept = claim.min_separation, participation.separation
    checks.require(
        kept >= needed,
        "participation",
        f"keep {needed} rounds from one participation of a client to its next, as the aggregator's "
        f"noise needs; the nearest valid choices are cyclic() and min_separated({needed})",
        f"{participation.sampler.name}, which keeps {kept}",
    )
    checks.require(
        participation.min_drawn >= claim.min_participants,
        "participation",
        f"draw at least {claim.min_participants} clients in every round, since each adds its share "
        "of the noise; the nearest valid choices are full_participation() and fixed_size()",
        f"{participation.sampler.name}, which may draw {participation.min_drawn}",
    )


def _check_host_steps(algorithm: FederatedAlgorithm) -> None:
    protects_clients = algorithm.claims.client is not None
    for step in algorithm.stages.host_steps:
        checks.whole("host_steps.after", step.after)
        checks.require(
            not (protects_clients and algorithm.client_state is not None and step.reads_clients),
            "host_steps.reads_clients",
            "be false under privacy of clients: what they keep was never noised, and no event "
            "covers who reads it",
            step.reads_clients,
        )
        checks.require(
            step.score is None or step.reads_clients,
            "host_steps.score",
            "be None for a step that reads nothing of what clients keep: there is no row to judge",
            step.score,
        )
        checks.require(
            step.score is None or algorithm.claims.record is None,
            "host_steps.score",
            "be None under privacy of records: what clients say of a row by validation data is "
            "exact, and no event covers it",
            step.score,
        )


def is_stacked(algorithm: FederatedAlgorithm) -> bool:
    """Tells whether a round keeps all updates of its cohort side by side.

    Args:
      algorithm: the declaration.

    Returns:
      True for a stacked aggregator.
    """
    return isinstance(algorithm.aggregator, Stacked)
