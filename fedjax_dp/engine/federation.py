"""A federation as a value: algorithm, population and participation, bound to one pure step."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from chex import PRNGKey

from fedjax_dp.algorithms.base import FederatedAlgorithm, Hyper, SharedModel, model_of
from fedjax_dp.algorithms.schedules import table_of
from fedjax_dp.clients.client_data import ClientData
from fedjax_dp.core import argument_checks, checks
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.core.forks import require_not_forked
from fedjax_dp.core.keys import Purpose, fold
from fedjax_dp.core.made import exchanged, made
from fedjax_dp.core.trees import PyTree
from fedjax_dp.data.federated import FederatedData
from fedjax_dp.data.participants import Participation
from fedjax_dp.engine.client_store import state_of
from fedjax_dp.engine.cohort import Cohort, Examples, typed
from fedjax_dp.engine.cohorts import Cohorts, of_federation
from fedjax_dp.engine.facts import FederationFacts, Population, population_of
from fedjax_dp.engine.layout import Layout
from fedjax_dp.engine.one_round import Watched, of_one_round
from fedjax_dp.engine.record import OTHERS, Fate, RoundInfo, RoundRecord
from fedjax_dp.engine.round import ByClient, SimulationState, Unpublished, innermost, run_round
from fedjax_dp.engine.wrapping import BUILT_IN, UNDECLARED, Change, Wrapper
from fedjax_dp.evaluation.evaluate import require_targets
from fedjax_dp.privacy.claims import Claims
from fedjax_dp.server.secure.aggregator import masks_of


class Init(Protocol):
    """Makes the state before the first round."""

    def __call__(self, key: PRNGKey, layout: Layout = Layout()) -> SimulationState:
        """Makes it from the root key of the run."""


class Step(Protocol):
    """Runs one round with a given cohort."""

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


class StateViews(NamedTuple):
    """The models that a state holds."""

    # The model for the whole population; None if there is none, or clients hold a part of it.
    shared: SharedModel | None = None
    # The model that one client would use, as of `Views`; None if it is the shared one.
    personal: Callable[[Any, ClientData], PyTree] | None = None


class Federation(NamedTuple):
    """Algorithm, population and participation as pure functions, without `jit` or host work.

    `jax.jit`, `vmap`, `scan` and `make_jaxpr` apply to all of them; a wrapper maps a federation
    to another.

    Attributes:
      init: makes the state before the first round.
      cohorts: who is drawn in each round, and at what price.
      step: runs one round with a given cohort.
      views: the models that a state holds.
      hyper: the numbers that a run starts with.
      check: `(hyper) -> None` raises a ValueError for a number out of its range.
      algorithm: the declaration; like the population, a wrapper leaves it as it was bound where
        privacy is claimed, since it sets the price of what `step` runs.
      population: sizes and shapes of the clients' data.
      facts: shapes, messages, frozen parameters and costs.
      declared: the wrappers that were applied by `wrapped`, outermost first.
      made: the federation as the last of these left it.
    """

    init: Init
    cohorts: Cohorts
    step: Step
    views: StateViews
    hyper: Hyper
    check: Callable[[Hyper], None]
    algorithm: FederatedAlgorithm
    population: Population
    facts: FederationFacts
    declared: tuple[Wrapper, ...] = ()
    made: "Federation | None" = None

    @property
    def claims(self) -> Claims:
        """The guarantees, by unit of privacy."""
        return self.algorithm.claims

    @property
    def wrappers(self) -> tuple[Wrapper, ...]:
        """All wrappers, outermost first; one that declares nothing changes everything."""
        changed = exchanged(self, "init", "cohorts", "step")
        return (UNDECLARED, *self.declared) if changed else self.declared

    @property
    def has_server(self) -> bool:
        """Whether clients send their messages to a server, and not to each other."""
        # One that declares nothing may change anything, and is not known to do without a server.
        known = (wrapper.changes for wrapper in self.declared if wrapper.changes != set(Change))
        return not any(Change.NO_SERVER in changes for changes in known)

    @property
    def shared(self) -> Callable[[Any], PyTree] | None:
        """`(state) -> params`, the model for the whole population; None if there is none."""
        hides = bool(self.claims.units and exchanged(self, "views"))
        view = (_of_released(self.views) if hides else self.views).shared
        return None if view is None else view.read

    @property
    def personal(self) -> Callable[[Any, ClientData], PyTree] | None:
        """`(state, client) -> params`, one client's model; None if it is the shared one."""
        view = self.views.personal
        return None if view is None else lambda state, client: model_of(view(state, client))

    @property
    def amplifies(self) -> bool:
        """Whether secret cohorts amplify privacy of clients.

        Raises:
          ValueError: for a claim and cohorts without a joint analysis.
        """
        return _amplifies(self.claims, self.cohorts, self.hyper)

    def check_numbers(self, hyper: Hyper) -> None:
        """Refuses numbers out of their ranges, also those that a wrapper's `check` leaves out.

        Args:
          hyper: the numbers of a run.

        Raises:
          ValueError: for a number out of its range.
        """
        argument_checks.check_fields(hyper, "hyper.")
        is_traced = any(map(checks.is_traced, hyper.factors.values()))
        for name, table in () if is_traced else hyper.factors.items():
            rule = "be that of a number of hyper"
            checks.require(hyper.number(name) is not None, "a name in hyper.factors", rule, name)
            table_of(table, 1, f"hyper.factors {name!r}")
        for numbers in map(hyper.at, {0} if is_traced else sorted(set(hyper.alike()))):
            for part in filter(None, (self.made, self)):
                part.check(numbers)

    def run_round(
        self,
        state: SimulationState,
        hyper: Hyper,
        examples: Examples,
        key: PRNGKey,
        layout: Layout = Layout(),
        cohort: Cohort | None = None,
    ) -> tuple[SimulationState, RoundRecord, RoundInfo]:
        """Draws a cohort and runs one round with it.

        Args:
          state: the state before the round.
          hyper: the numbers of the run, of which this round's are taken.
          examples: all clients' examples, see `examples_of`.
          key: the root key of the run, the same in every round.
          layout: the layout of the round, which affects speed and memory alone.
          cohort: the cohort of the round where it was drawn before.

        Returns:
          The state after the round, its record and its info. Where privacy is claimed the state has
          the next round, so that no step draws a cohort or noise again, and the record
          has all clients that were drawn, also those that the step of a wrapper leaves out;
          `OTHERS` stands for those that it adds, which no ledger charges.
        """
        hyper = hyper.at(state.round)
        if cohort is None:
            cohort = self.cohorts.draw(state, hyper, key, layout)
        step = self.step
        if exchanged(self, "step"):
            step = self._of_one_round(step)
        after, record, info = step(state, hyper, examples, cohort, key, layout)
        if self.claims.units:
            record = _as_drawn(record, cohort)
            after = after._replace(round=state.round + 1)
        return after, record, info

    @checked
    def wrapped(self, wrapper: Wrapper, **parts: Any) -> "Federation":
        """Replaces parts, as a wrapper that says what it changes.

        Args:
          wrapper: what it says about itself.
          **parts: the fields that it replaces, any of `init`, `cohorts`, `step`, `views` and
            `check`; a check is in addition to that of the federation.

        Returns:
          The federation.

        Raises:
          ValueError: for a federation that this wrapper does not go around, cohorts that it
            replaces and does not declare, or parts that set prices and were exchanged before.
        """
        wrapper.require_around(self.wrappers)
        check_wrapped(self)
        kept = {"init", "cohorts", "step", "views", "check"}
        others = sorted(parts.keys() - kept)
        rule = f"replace fields among {sorted(kept)}"
        checks.require(not others, "a wrapper", rule, others)
        rule = f"declare {Change.COHORTS} to replace cohorts"
        fits = "cohorts" not in parts or Change.COHORTS in wrapper.changes
        changes = sorted(map(str, wrapper.changes))
        checks.require(fits, f"the wrapper {wrapper.name!r}", rule, changes)
        added, before = parts.get("check"), self

        def check(hyper: Hyper) -> None:
            before.check_numbers(hyper)
            if added is not None:
                added(hyper)

        declared = (wrapper, *self.wrappers)
        init = parts.get("init", self.init)

        def num_outer() -> int:
            return len(jax.eval_shape(lambda: init(jax.random.key(0))).outer)

        if isinstance(parts.get("cohorts"), Cohorts):
            parts["cohorts"] = of_federation(parts["cohorts"], num_outer)
        is_own = not any(wrapper is one for one in BUILT_IN)
        shows = is_own if "views" in parts else bool(exchanged(self, "views"))
        views = parts.get("views", self.views)
        checks.require(isinstance(views, StateViews), "views", "be StateViews", views)
        if "views" in parts:
            views = _of_federation(views, num_outer())
        if shows and self.claims.units:
            views = _of_released(views)
        parts["views"] = views
        other = self._replace(declared=declared, **{**parts, "check": check})
        check_wrapped(other)
        if not self.claims.units:
            return made(other)
        step = parts.get("step", self.step)
        if is_own and ("step" in parts or exchanged(self, "step")):
            step = other._of_one_round(step)
        return made(other._replace(step=Watched(step)))

    def _of_one_round(self, step: Step) -> Step:
        """Requires of the step of a wrapper that it costs what a ledger charges for it."""
        if not self.claims.units:
            return step
        _check_bound(self)
        paid = self.made and self.made.step
        assert isinstance(paid, Watched)
        return of_one_round(
            step,
            paid,
            are_cohorts_secret=lambda: self.amplifies,
            adds_shares=self.claims.min_participants > 0,
        )

    def with_numbers(self, values: Mapping[str, Any], ranges: Mapping[str, Any]) -> "Federation":
        """Adds the numbers of a wrapper to those of the algorithm.

        Args:
          values: by name.
          ranges: of these numbers, see `core.ranges`.

        Returns:
          The federation; its check includes these numbers.

        Raises:
          ValueError: for a number out of its range.
        """
        algorithm, inner, first = self.algorithm.with_numbers(values, ranges), self.check, self.made
        if first is not None and not exchanged(self, "algorithm"):
            first = first._replace(algorithm=algorithm)
        added = {name: np.float32(number) for name, number in values.items()}

        def check(hyper: Hyper) -> None:
            algorithm.check(hyper, self.population.num_clients)
            inner(hyper)

        hyper = self.hyper._replace(algorithm={**self.hyper.algorithm, **added})
        return self._replace(algorithm=algorithm, hyper=hyper, check=check, made=first)


@checked
def federation(
    algorithm: FederatedAlgorithm, data: FederatedData | Population, participation: Participation
) -> Federation:
    """Binds an algorithm to a population and a sampling of clients.

    Args:
      algorithm: the declaration.
      data: the clients' training examples, or their population.
      participation: the sampling of clients, bound to as many clients as the data have.

    Returns:
      The federation.

    Raises:
      ValueError: for a part of the declaration of a wrong kind, a population that does not match,
        targets that the loss is not for, numbers out of range, a mechanism and a participation
        without a joint analysis, or an aggregator whose noise would move parameters that training
        does not.
    """
    require_not_forked()
    _check_declaration(algorithm)
    population = data if isinstance(data, Population) else population_of(data)
    num_clients = population.num_clients
    cohorts = Cohorts(participation, algorithm, population)
    _check_population(cohorts, population)
    _check_validation(algorithm, population)
    hyper = typed(algorithm.hyper)

    def check(hyper: Hyper) -> None:
        algorithm.check(hyper, num_clients)
        built, asked = hyper_limit, hyper.local.batch_size
        if not checks.is_traced(asked):
            largest = hyper.local.max_batch_size()
            rule = f"be at most {built}, as it was built"
            checks.require(largest <= built, "batch_size", rule, largest)

    hyper_limit = algorithm.hyper.local.max_batch_size()
    check(algorithm.hyper)
    _check_claims(algorithm, cohorts, hyper)
    facts = FederationFacts(algorithm, population)
    if isinstance(data, FederatedData):
        require_targets("data", data, facts.targets)

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
        aggregator = algorithm.aggregator.init(facts.update)
        state = SimulationState(server, aggregator, clients, jnp.int32(0), ())
        # A weak type, such as that of a filled array, would change in a step.
        return jax.tree.map(lambda x: jnp.asarray(x, jnp.result_type(x)), state)

    def step(state, hyper, examples, cohort, key, layout=Layout()):
        # Examples on the host may be closed over.
        examples = jax.tree.map(jnp.asarray, examples)
        return run_round(algorithm, layout, state, hyper, examples, cohort, key)

    shared, view = algorithm.views
    if shared is not None and not shared.is_whole:
        shared = None
    if shared is not None:
        read, write = shared.read, shared.write
        shared = shared._replace(
            read=lambda state: read(state.server),
            write=lambda state, params: state._replace(server=write(state.server, params)),
        )

    def personal(state: SimulationState, client: ClientData) -> PyTree:
        assert view is not None
        own = None if state.clients is None else state_of(state.clients, client.index)
        return view(state.server, own, client)

    bound = Federation(
        init=init,
        cohorts=cohorts,
        step=Watched(step) if algorithm.claims.units else step,
        views=StateViews(shared, None if view is None else personal),
        hyper=hyper,
        check=check,
        algorithm=algorithm,
        population=population,
        facts=facts,
    )
    return made(bound)


def check_wrapped(federation: Federation) -> None:
    """Refuses wrappers that break what claims need, or change prices without the rounds."""
    before, cohorts = federation.made, federation.cohorts
    # One that derives from it may draw others.
    rule = "be those that it had, changed by thinned(), given() and with_fates()"
    fits = type(cohorts) is Cohorts
    checks.require(fits, "the cohorts of a federation", rule, type(cohorts).__name__)
    _check_bound(federation)
    federation.check_numbers(federation.hyper)
    if before is None or cohorts is not before.cohorts:
        _check_population(cohorts, federation.population)
        _check_claims(federation.algorithm, cohorts, federation.hyper)


def _check_bound(federation: Federation) -> None:
    """Refuses other parts that set prices than those of the rounds that run."""
    before, cohorts = federation.made, federation.cohorts
    if not federation.claims.units and (before is None or not before.claims.units):
        return
    parts = exchanged(federation, "algorithm", "population")
    if before is not None:
        first = before.cohorts
        is_bound = cohorts.algorithm is first.algorithm and cohorts.population is first.population
        parts += [] if is_bound else ["cohorts"]
    rule = (
        "be as federation() bound them where privacy is claimed, since its step runs those: "
        "bind others by federation(), and wrap what it returns"
    )
    checks.require(not parts, "the parts of a wrapped federation", rule, f"another {parts}")


def _of_federation(views: StateViews, num_outer: int) -> StateViews:
    """Shows views the states of their own wrapper and of those inside it, wherever it stands."""
    shared, view = views

    def read(state: SimulationState) -> PyTree:
        assert shared is not None
        return shared.read(innermost(state, num_outer))

    def write(state: SimulationState, params: PyTree) -> SimulationState:
        assert shared is not None
        after: SimulationState = shared.write(innermost(state, num_outer), params)
        others = state.outer[: len(state.outer) - num_outer]
        return after._replace(outer=(*others, *after.outer))

    return StateViews(
        None if shared is None else shared._replace(read=read, write=write),
        None if view is None else lambda state, client: view(innermost(state, num_outer), client),
    )


def _of_released(views: StateViews) -> StateViews:
    """Hides from a view of the shared model what a round leaves with clients or does not noise."""
    if views.shared is None:
        return views
    read = views.shared.read

    def shared(state: SimulationState) -> PyTree:
        kinds = ByClient, Unpublished
        outer = jax.tree.map(
            lambda part: None if isinstance(part, kinds) else part,
            state.outer,
            is_leaf=lambda part: isinstance(part, kinds),
        )
        shown = state._replace(clients=None, aggregator=(), outer=outer)
        try:
            return read(shown)
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            rule = "read no states of clients and aggregators where privacy is claimed"
            found = f"one that fails then: {error}"
            raise ValueError(f"views.shared must {rule}, got {found}") from error

    return views._replace(shared=views.shared._replace(read=shared))


def _as_drawn(record: RoundRecord, cohort: Cohort) -> RoundRecord:
    """Makes the record of a step one of the cohort that was drawn."""
    own = jnp.where(cohort.is_drawn, cohort.ids, -1)
    is_empty = record.fate == Fate.EMPTY
    is_other = ~is_empty & (record.clients != own)
    left_out = is_empty & cohort.is_drawn
    return record._replace(
        clients=jnp.where(is_other, OTHERS, own).astype(record.clients.dtype),
        fate=jnp.where(left_out, Fate.UNANNOUNCED, record.fate).astype(record.fate.dtype),
    )


def init_key(key: PRNGKey) -> PRNGKey:
    """Returns the key that an algorithm makes its first model from, of a run's root key."""
    return fold(key, Purpose.INIT)


def _check_declaration(algorithm: FederatedAlgorithm) -> None:
    """Requires the fields of a declaration, and those of its parts, to be what they are for."""
    argument_checks.check_fields(algorithm, "algorithm.")
    for name in ("training", "numbers", "views", "client_state", "stages"):
        part = getattr(algorithm, name)
        if part is not None:
            argument_checks.check_fields(part, f"algorithm.{name}.")


def _check_population(cohorts: Cohorts, population: Population) -> None:
    rule = f"be bound to the {population.num_clients} clients of the data"
    fits = cohorts.participation.num_clients == population.num_clients
    checks.require(fits, "participation", rule, cohorts.participation.num_clients)


def _check_validation(algorithm: FederatedAlgorithm, population: Population) -> None:
    """Requires a second split if clients read one."""
    if not algorithm.training.reads_validation:
        return
    second = population.validation
    rule = f"be given for {algorithm.name}, whose clients read it in their rounds"
    checks.require(second is not None, "validation", rule, None)
    assert second is not None
    lacking = np.flatnonzero((population.sizes > 0) & (second.sizes == 0))
    rule = f"hold an example of every client that has training data for {algorithm.name}"
    found = f"none of client {lacking[0]}" if len(lacking) else ""
    checks.require(not len(lacking), "validation", rule, found)


def _check_claims(algorithm: FederatedAlgorithm, cohorts: Cohorts, hyper: Hyper) -> None:
    aggregator, claim = algorithm.aggregator, algorithm.claims.client
    if aggregator.claim is not None:
        algorithm.training.check_noised()
    _check_host_steps(algorithm)
    check_masks(algorithm, cohorts.participation.capacity)
    least, most = algorithm.claims.min_participants, cohorts.participation.capacity
    rule = f"draw {least} clients in a round, without whose shares of noise every one is lost"
    checks.require(most >= least, "participation", rule, f"at most {most}")
    if claim is None:
        return
    # Computed now, so that a combination without an analysis is refused before any work.
    if _amplifies(algorithm.claims, cohorts, hyper):
        _check_lost(algorithm, cohorts)
    needed, kept = claim.min_separation, cohorts.participation.separation
    checks.require(
        kept >= needed,
        "participation",
        f"keep {needed} rounds from one participation of a client to its next, as the aggregator's "
        f"noise needs; the nearest valid choices are cyclic() and min_separated({needed})",
        f"{cohorts.name}, which keeps {kept}",
    )
    # Under masks, a sum of fewer clients is lost.
    checks.require(
        masks_of(aggregator) is not None or cohorts.min_sent >= claim.min_participants,
        "participation",
        f"give the updates of at least {claim.min_participants} clients in every round, since each "
        "adds its share of the noise; the nearest valid choices are full_participation() and "
        "fixed_size(), without fates that leave clients out",
        f"as few as {cohorts.min_sent} with {cohorts.name}",
    )


def check_masks(algorithm: FederatedAlgorithm, most: int) -> None:
    """Refuses masks that lose every round of at most so many clients, or sum too few shares."""
    masks = masks_of(algorithm.aggregator)
    if masks is None:
        return
    rule = f"share masks among at most {most} clients, the most of a round at one server"
    needed = masks.graph.num_clients
    checks.require(needed <= most, "aggregator", rule, f"a graph of {needed}")
    least, needed = masks.graph.min_senders, algorithm.claims.min_participants
    rule = f"let no round be summed of fewer than the {needed} clients whose noise is counted"
    checks.require(least >= needed, "aggregator", rule, f"a graph that recovers sums of {least}")


def _amplifies(claims: Claims, cohorts: Cohorts, hyper: Hyper) -> bool:
    """Whether secret cohorts amplify a claim for clients; refuses what has no analysis."""
    if claims.client is None:
        return False
    event = claims.client.event(hyper.aggregator)
    return cohorts.event(event) != event


def _check_lost(algorithm: FederatedAlgorithm, cohorts: Cohorts) -> None:
    """Refuses sums that are lost if few clients are drawn, or many, which has to be secret."""
    masks = masks_of(algorithm.aggregator)
    if masks is None:
        return
    fewest, most = masks.graph.num_clients, masks.encoding.max_clients
    rule = (
        f"give {fewest} to {most} updates in every round: masked sums of fewer or more are lost, "
        "which would show how many were drawn, and secret cohorts amplify privacy of clients; the "
        "nearest valid choices are fixed_size() and without_amplification(poisson()), without "
        "fates that leave clients out"
    )
    least, largest = cohorts.min_sent, cohorts.participation.capacity
    fits = fewest <= least and largest <= most
    checks.require(fits, "participation", rule, f"{least} to {largest} with {cohorts.name}")


def _check_host_steps(algorithm: FederatedAlgorithm) -> None:
    protects_clients = algorithm.claims.client is not None
    for step in algorithm.stages.host_steps:
        checks.whole("host_steps.after", step.after)
        checks.require(
            not (protects_clients and algorithm.client_state is not None and step.reads_clients),
            "host_steps.reads_clients",
            "be false under privacy of clients: their states are not noised, and no event covers "
            "reading them",
            step.reads_clients,
        )
        checks.require(
            step.score is None or step.reads_clients,
            "host_steps.score",
            "be None for a step that reads no client states: there is nothing to score",
            step.score,
        )
        checks.require(
            step.score is None or algorithm.claims.record is None,
            "host_steps.score",
            "be None under privacy of records: scores on validation data are exact, and no event "
            "covers them",
            step.score,
        )
