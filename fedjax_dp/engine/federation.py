"""A federation as a value: algorithm, population and participation, bound to one pure step."""

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from chex import PRNGKey

from fedjax_dp.algorithms.base import FederatedAlgorithm, SharedModel
from fedjax_dp.algorithms.values import Hyper
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
from fedjax_dp.engine.draws import Draw, Fates, Sampled, thinned, with_fates
from fedjax_dp.engine.facts import Facts
from fedjax_dp.engine.layout import Layout
from fedjax_dp.engine.population import Population, population_of
from fedjax_dp.engine.record import OTHERS, Fate, RoundInfo, RoundRecord
from fedjax_dp.engine.round import SimulationState, run_round
from fedjax_dp.evaluation.targets import require_targets
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


class Federation(NamedTuple):
    """Algorithm, population and participation as pure functions, without `jit` or host work.

    `jax.jit`, `vmap`, `scan` and `make_jaxpr` apply to all of them; a wrapper maps a federation
    to another.

    Attributes:
      init: makes the state before the first round.
      draw: draws the cohort of the next round; a `Sampled` if a participation sets its price.
      step: runs one round with a given cohort.
      shared: `(state) -> params`, the model for the whole population; None if there is none, or if
        clients hold a part of it.
      with_shared: `(state, params) -> state` with another such model; None if there is none.
      personal: `(state, client) -> params`, the model that one client would use, `Sparse` if the
        client has a mask; None if it is the shared model.
      hyper: the numbers that a run starts with.
      check: `(hyper) -> None` raises a ValueError for a number out of its range.
      algorithm: the declaration; like the next two, a wrapper leaves it as it was bound where
        privacy is claimed, since it sets the price of what `step` runs.
      sampling: the sampling of clients that it was bound to.
      population: sizes and shapes of the clients' data.
      facts: shapes, messages, frozen parameters and costs.
      draws_ahead: whether `draw` reads nothing of the state but its round, so that streamed rounds
        draw cohorts ahead; false for a wrapper whose cohorts depend on the state.
      made: the federation before wrappers.
    """

    init: Init
    draw: Draw
    step: Step
    shared: Callable[[Any], PyTree] | None
    with_shared: Callable[[Any, PyTree], Any] | None
    personal: Callable[[Any, ClientData], PyTree] | None
    hyper: Hyper
    check: Callable[[Hyper], None]
    algorithm: FederatedAlgorithm
    sampling: Participation
    population: Population
    facts: Facts
    draws_ahead: bool = True
    made: "Federation | None" = None

    @property
    def claims(self) -> Claims:
        """The guarantees, by unit of privacy."""
        return self.algorithm.claims

    @property
    def sampled(self) -> Sampled | None:
        """The draw where a participation sets its price; None for a wrapper's own."""
        # Not one that derives from it, which may draw others.
        return self.draw if type(self.draw) is Sampled else None

    @property
    def participation(self) -> Participation:
        """The participation that sets the price of `draw`.

        A draw that is not `Sampled` amplifies nothing, and those drawn are charged; all clients in
        every round if it depends on the state, since other records might then have drawn others.
        """
        if self.sampled is not None:
            return self.sampled.participation
        return self.sampling.of_any_draw(charges_all=self.is_adaptive)

    @property
    def is_adaptive(self) -> bool:
        """Whether the state decides who is drawn, so that all clients pay for every round."""
        return not self.draws_ahead and self.sampled is None

    def check_numbers(self, hyper: Hyper) -> None:
        """Refuses numbers out of their ranges, also those that a wrapper's `check` leaves out.

        Args:
          hyper: the numbers of a run.

        Raises:
          ValueError: for a number out of its range.
        """
        for part in filter(None, (self.made, self)):
            part.check(hyper)

    def stages(self, state: SimulationState, hyper: Hyper, rounds: Any) -> jax.Array:
        """Computes the expected stages of rounds.

        Args:
          state: the state before them.
          hyper: their numbers.
          rounds: their indices, `[rounds]`, int32.

        Returns:
          The stages, `[rounds]`, int32.
        """
        one = partial(self.algorithm.stages.stage_of, state.server, hyper)
        return jnp.asarray(jax.vmap(lambda r: jnp.asarray(one(r), jnp.int32))(rounds))

    def drawn(
        self, state: SimulationState, hyper: Hyper, key: PRNGKey, layout: Layout = Layout()
    ) -> Cohort:
        """Draws the cohort of the next round, from nothing that shows a record without noise.

        Args:
          state: the state before the round. A draw of a wrapper's own, where privacy is claimed,
            receives the number of the round alone; with `draws_ahead` false also the server's
            state and those of wrappers. Its slots are empty where they hold no client of the
            population, or one that an earlier slot has.
          hyper: the numbers of the round.
          key: the root key of the run, the same in every round.
          layout: the layout of the round.

        Returns:
          The cohort.

        Raises:
          ValueError: for a draw that reads more than it receives.
        """
        if not self.claims.units or self.sampled is not None:
            return self.draw(state, hyper, key, layout)
        server, outer = (state.server, state.outer) if self.is_adaptive else ((), ())
        shown = SimulationState(server, (), None, state.round, outer)
        try:
            cohort = self.draw(shown, hyper, key, layout)
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            rule = (
                "read no states of clients and aggregators where privacy is claimed, and nothing "
                "of the state but its round unless draws_ahead is false"
            )
            raise ValueError(f"draw must {rule}, got one that fails then: {error}") from error
        return _of_clients(cohort, self.population.num_clients)

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
          hyper: the numbers of the round.
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
        if cohort is None:
            cohort = self.drawn(state, hyper, key, layout)
        after, record, info = self.step(state, hyper, examples, cohort, key, layout)
        if self.claims.units:
            record = _as_drawn(record, cohort)
            after = after._replace(round=state.round + 1)
        return after, record, info

    def with_fates(self, fates: Fates) -> "Federation":
        """Changes the fates of those that are drawn, at the same price.

        Guarantee: that of the federation. Cohorts have the same clients, who pay whatever their
        fates.

        Args:
          fates: `(state, hyper, cohort) -> fates`, a `Fate` for each slot, of which one that is
            empty stays so, and one that holds a client holds it. The state has none of clients and
            aggregators; with `draws_ahead` nothing of it but its round may be read, since streamed
            rounds are drawn without the rest.

        Returns:
          The federation.
        """

        def change(cohort: Cohort, state: SimulationState, hyper: Hyper) -> Cohort:
            return with_fates(cohort, fates, state, hyper)

        return self._with_cohorts(
            change, lambda draw: dataclasses.replace(draw, fates=(*draw.fates, fates))
        )

    def thinned(self, keeps: Callable[[jax.Array, jax.Array], Any]) -> "Federation":
        """Leaves clients out of cohorts by public facts, at the same price.

        Guarantee: that of the federation. Which of the drawn clients are left depends on no draw
        and on no record.

        Args:
          keeps: `(round, clients) -> keeps`, which of some clients, `[slots]`, may take part in a
            round: Booleans, `[slots]` or one for all.

        Returns:
          The federation, which may draw no client at all.
        """

        def keeping(hyper: Hyper, round_index: jax.Array, clients: jax.Array) -> Any:
            return keeps(round_index, clients)

        def change(cohort: Cohort, state: SimulationState, hyper: Hyper) -> Cohort:
            return thinned(cohort, keeps(state.round, cohort.ids))

        def priced(draw: Sampled) -> Sampled:
            fewer = draw.participation.of_at_least(0)
            return dataclasses.replace(draw, participation=fewer, keeps=(*draw.keeps, keeping))

        return self._with_cohorts(change, priced)

    def _with_cohorts(
        self,
        change: Callable[[Cohort, SimulationState, Hyper], Cohort],
        priced: Callable[[Sampled], Sampled],
    ) -> "Federation":
        """Changes the parts of a draw that has a price, or the cohorts of any other."""
        inner = self.draw
        if self.sampled is not None:
            return self._replace(draw=priced(self.sampled))

        def draw(state, hyper, key, layout=Layout()):
            return change(inner(state, hyper, key, layout), state, hyper)

        return self._replace(draw=draw)

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
        algorithm, inner, before = (
            self.algorithm.with_numbers(values, ranges),
            self.check,
            self.made,
        )
        if before is not None and not exchanged(self, "algorithm"):
            before = before._replace(algorithm=algorithm)
        added = {name: np.float32(number) for name, number in values.items()}

        def check(hyper: Hyper) -> None:
            algorithm.check(hyper, self.population.num_clients)
            inner(hyper)

        hyper = self.hyper._replace(algorithm={**self.hyper.algorithm, **added})
        return self._replace(algorithm=algorithm, hyper=hyper, check=check, made=before)


@checked
def federation(
    algorithm: FederatedAlgorithm,
    data: FederatedData | Population,
    participation: Participation,
) -> Federation:
    """Binds an algorithm to a population and a sampling of clients.

    Args:
      algorithm: the declaration.
      data: the clients' training examples, or their population.
      participation: the sampling of clients, bound to as many clients as the data have.

    Returns:
      The federation.

    Raises:
      ValueError: for a population that does not match, targets that the loss is not for, numbers
        out of range, a mechanism and a participation without a joint analysis, or an aggregator
        whose noise would move parameters that training does not.
    """
    require_not_forked()
    population = data if isinstance(data, Population) else population_of(data)
    num_clients = population.num_clients
    _check_population(participation, population)
    _check_validation(algorithm, population)
    hyper = typed(algorithm.hyper)

    def check(hyper: Hyper) -> None:
        algorithm.check(hyper, num_clients)
        built, asked = hyper_limit, hyper.local.batch_size
        if not checks.is_traced(asked):
            largest = hyper.local.max_batch_size()
            rule = f"be at most {built}, as it was built"
            checks.require(largest <= built, "hyper.local.batch_size", rule, largest)

    hyper_limit = algorithm.hyper.local.max_batch_size()
    check(algorithm.hyper)
    _check_claims(algorithm, participation, hyper)
    facts = Facts(algorithm, population)
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

    shared: SharedModel | None = algorithm.views.shared
    if shared is not None and not shared.is_whole:
        shared = None
    of_client = algorithm.views.personal

    def personal(state: SimulationState, client: ClientData) -> PyTree:
        assert of_client is not None
        own = None if state.clients is None else state_of(state.clients, client.index)
        return of_client(state.server, own, client)

    bound = Federation(
        init=init,
        draw=Sampled(participation, algorithm, population),
        step=step,
        shared=None if shared is None else lambda state: shared.read(state.server),
        with_shared=None
        if shared is None
        else lambda state, params: state._replace(server=shared.write(state.server, params)),
        personal=None if of_client is None else personal,
        hyper=hyper,
        check=check,
        algorithm=algorithm,
        sampling=participation,
        population=population,
        facts=facts,
    )
    return made(bound)


def changed_parts(federation: Federation) -> list[str]:
    """Names the functions that wrappers have replaced."""
    return exchanged(federation, "init", "draw", "step")


def check_wrapped(federation: Federation) -> None:
    """Refuses wrappers that break what claims need, or change what sets prices without the rounds.

    Raises:
      ValueError: alike.
    """
    before = federation.made
    if federation.claims.units or (before is not None and before.claims.units):
        parts = exchanged(federation, "algorithm", "sampling", "population")
        rule = (
            "be as federation() bound them where privacy is claimed, since its step runs those: "
            "bind others by federation(), and wrap what it returns"
        )
        checks.require(not parts, "the parts of a wrapped federation", rule, f"another {parts}")
    federation.check_numbers(federation.hyper)
    if federation.participation != federation.sampling:
        _check_population(federation.participation, federation.population)
        _check_claims(federation.algorithm, federation.participation, federation.hyper)


def _of_clients(cohort: Cohort, num_clients: int) -> Cohort:
    """Empties slots that hold no client of the population, or one that an earlier slot has."""
    ids = jnp.where(cohort.is_drawn, cohort.ids, -1)
    is_client = (ids >= 0) & (ids < num_clients)
    slots = jnp.arange(len(ids))
    held = jnp.where(is_client, ids, num_clients)
    first = jnp.full(num_clients + 1, len(ids)).at[held].min(slots)
    is_kept = is_client & (first[held] == slots)
    fate = jnp.where(is_kept, cohort.fate, Fate.EMPTY).astype(cohort.fate.dtype)
    return cohort._replace(fate=fate)


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
    """Returns the key that an algorithm makes its first model from.

    Args:
      key: the root key of the run.

    Returns:
      The key for `FederatedAlgorithm.init`.
    """
    return fold(key, Purpose.INIT)


def _check_population(participation: Participation, population: Population) -> None:
    rule = f"be bound to the {population.num_clients} clients of the data"
    fits = participation.num_clients == population.num_clients
    checks.require(fits, "participation", rule, participation.num_clients)


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


def _check_claims(
    algorithm: FederatedAlgorithm, participation: Participation, hyper: Hyper
) -> None:
    aggregator, claim = algorithm.aggregator, algorithm.claims.client
    if aggregator.claim is not None:
        algorithm.training.check_noised()
    _check_host_steps(algorithm)
    check_masks(algorithm, participation.capacity)
    least, most = algorithm.claims.min_participants, participation.capacity
    rule = f"draw {least} clients in a round, without whose shares of noise every one is lost"
    checks.require(most >= least, "participation", rule, f"at most {most}")
    if claim is None:
        return
    # Computed now, so that a combination without an analysis is refused before any work.
    if amplifies(algorithm.claims, participation, hyper):
        _check_lost(algorithm, participation)
    needed, kept = claim.min_separation, participation.separation
    checks.require(
        kept >= needed,
        "participation",
        f"keep {needed} rounds from one participation of a client to its next, as the aggregator's "
        f"noise needs; the nearest valid choices are cyclic() and min_separated({needed})",
        f"{participation.sampler.name}, which keeps {kept}",
    )
    # Under masks, a sum of fewer clients is lost.
    checks.require(
        masks_of(aggregator) is not None or participation.min_drawn >= claim.min_participants,
        "participation",
        f"draw at least {claim.min_participants} clients in every round, since each adds its share "
        "of the noise; the nearest valid choices are full_participation() and fixed_size()",
        f"{participation.sampler.name}, which may draw {participation.min_drawn}",
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


def amplifies(claims: Claims, participation: Participation, hyper: Hyper) -> bool:
    """Whether secret cohorts amplify a claim for clients; refuses what has no analysis."""
    if claims.client is None:
        return False
    event = claims.client.event(hyper.aggregator)
    return participation.event(event) != event


def _check_lost(algorithm: FederatedAlgorithm, participation: Participation) -> None:
    """Refuses sums that are lost if few clients are drawn, or many, which has to be secret."""
    masks = masks_of(algorithm.aggregator)
    if masks is None:
        return
    fewest, most = masks.graph.num_clients, masks.encoding.max_clients
    rule = (
        f"draw {fewest} to {most} clients in every round: masked sums of fewer or more are lost, "
        "which would show how many were drawn, and secret cohorts amplify privacy of clients; the "
        "nearest valid choices are fixed_size() and without_amplification(poisson())"
    )
    least, largest = participation.min_drawn, participation.capacity
    fits = fewest <= least and largest <= most
    found = f"{participation.sampler.name}, which may draw {least} to {largest}"
    checks.require(fits, "participation", rule, found)


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
