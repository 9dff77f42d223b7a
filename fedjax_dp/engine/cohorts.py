"""Who is drawn in each round, and at what price: one value, which all else asks."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from chex import PRNGKey
from dp_accounting import DpEvent

from fedjax_dp.algorithms.base import FederatedAlgorithm, Hyper, one_stage
from fedjax_dp.core import argument_checks, checks
from fedjax_dp.core.keys import Purpose, fold
from fedjax_dp.data.participants import Participation
from fedjax_dp.engine.cohort import Cohort, draw_cohort, placed
from fedjax_dp.engine.facts import Population
from fedjax_dp.engine.layout import Layout
from fedjax_dp.engine.record import Fate
from fedjax_dp.engine.round import SimulationState, innermost

# `(state, hyper, cohort) -> fates`, `[slots]`; the state has none of clients and aggregators.
Fates: TypeAlias = Callable[[SimulationState, Hyper, Cohort], Any]
# `(round, clients) -> keeps`, Booleans, `[slots]` or one for all.
Keeps: TypeAlias = Callable[[jax.Array, jax.Array], Any]
# The same, which may read the numbers of the round too.
_Keeps: TypeAlias = Callable[[Hyper, jax.Array, jax.Array], Any]


class Draw(Protocol):
    """Draws the cohort of the next round."""

    def __call__(
        self, state: SimulationState, hyper: Hyper, key: PRNGKey, layout: Layout = Layout()
    ) -> Cohort | jax.Array:
        """Draws it from the root key of the run, the same in every round.

        It may return a cohort of other cohorts, or the indices of clients, `[drawn]`, int32, -1 for
        none.
        """


class _Rule(NamedTuple):
    """A function of a wrapper, and whether it reads more of the state than its round."""

    function: Any
    reads_state: bool
    # How many of the innermost wrappers' states it sees; None for all.
    num_outer: int | None = None


class Coming(NamedTuple):
    """The next rounds, as far as they are known before they run."""

    # Who will be drawn, `[rounds, slots]`, int32, -1 in empty slots; None where every client is
    # charged for every round, so that this is not asked.
    clients: np.ndarray | None
    stages: np.ndarray  # The stage of each round, `[rounds]`, int32.


# Compared and hashed by identity, so that `jax.jit` takes it: populations hold arrays.
@dataclasses.dataclass(frozen=True, eq=False)
class Cohorts:
    """Who is drawn in each round, and at what price; nothing else draws.

    `thinned`, `given` and `with_fates` make others of it, and are all that a wrapper has to change
    who takes part.

    Attributes:
      sampling: the sampling of clients that the federation was bound to.
      algorithm: the declaration, whose numbers of local steps order the slots.
      population: the clients.
      own: the draw of a wrapper in place of the sampling; None if there is none.
      start: `(state) -> state` of the sampler before the round; None if it has none.
      keeps: which clients may be drawn; all of these must keep a client.
      fates: change the fates of drawn clients, one after another; they cannot empty a slot.
    """

    sampling: Participation
    algorithm: FederatedAlgorithm
    population: Population
    own: _Rule | None = None
    start: Callable[[SimulationState], Any] | None = None
    keeps: tuple[_Keeps, ...] = ()
    fates: tuple[_Rule, ...] = ()

    @property
    def participation(self) -> Participation:
        """The participation that sets the price: the sampling, unless a wrapper draws.

        A draw of a wrapper amplifies nothing, and those drawn are charged; all clients in every
        round if it reads the state, since other records might then have drawn others.
        """
        found = self.sampling
        if self.own is not None:
            found = found.of_any_draw(charges_all=self.own.reads_state)
        return found.of_at_least(0) if self.keeps else found

    @property
    def min_sent(self) -> int:
        """The fewest clients whose updates a round may sum, as far as the rules of wrappers say."""
        return 0 if self.fates else self.participation.min_drawn

    @property
    def reads_state(self) -> bool:
        """Whether a draw reads more of the state than its round, and thus waits for it."""
        rules = self.fates if self.own is None else (self.own, *self.fates)
        return self.start is not None or any(rule.reads_state for rule in rules)

    @property
    def is_adaptive(self) -> bool:
        """Whether the state decides who is drawn, so that all clients pay for every round."""
        return self.own is not None and self.own.reads_state

    @property
    def name(self) -> str:
        """The name of the sampler, "any_draw" for a wrapper's own."""
        return self.participation.sampler.name

    @property
    def charges_all(self) -> bool:
        """Whether every client pays for every round, drawn or not.

        So it is where cohorts are secret, as amplification needs, or depend on released models.
        """
        return self.participation.sampler.charges_all

    def event(self, release: DpEvent) -> DpEvent:
        """Returns the privacy event of a round.

        Args:
          release: the event of the mechanism on a given cohort.

        Returns:
          The event, amplified if cohorts are secret.

        Raises:
          ValueError: if the combination has no valid analysis, or parts were exchanged.
        """
        event: DpEvent = self.participation.event(release)
        return event

    def draw(
        self, state: SimulationState, hyper: Hyper, key: PRNGKey, layout: Layout = Layout()
    ) -> Cohort:
        """Draws the cohort of the next round, from nothing that shows a record without noise.

        Args:
          state: the state before the round.
          hyper: the numbers of the run, of which this round's are taken.
          key: the root key of the run, the same in every round.
          layout: the layout of the round.

        Returns:
          The cohort.

        Raises:
          ValueError: for a draw of a wrapper that reads more than it receives.
        """
        argument_checks.check_fields(layout, "layout.")
        hyper = hyper.at(state.round)
        cohort = self._drawn(state, hyper, key, layout)
        for keeps in self.keeps:
            is_kept = _kept(keeps, hyper, state.round, cohort.ids)
            fate = jnp.where(is_kept, cohort.fate, Fate.EMPTY)
            cohort = cohort._replace(fate=fate.astype(cohort.fate.dtype))
        for rule in self.fates:
            cohort = _with_fates(cohort, rule, state, hyper)
        return cohort

    def _drawn(self, state: SimulationState, hyper: Hyper, key: PRNGKey, layout: Layout) -> Cohort:
        sizes = jnp.asarray(self.population.sizes)
        place = self.algorithm, self.sampling, layout, sizes, hyper
        if self.own is None:
            return draw_cohort(*place, state.round, key, self._start_of(state))
        shows_all = self.own.reads_state and not self.algorithm.claims.units
        shown = _shown(state, self.own)
        if shows_all:
            shown = state._replace(outer=shown.outer)
        try:
            cohort = self.own.function(shown, hyper, key, layout)
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            rule = (
                "read no states of clients and aggregators where privacy is claimed, and nothing "
                "of the state but its round unless reads_state is true"
            )
            raise ValueError(f"draw must {rule}, got one that fails then: {error}") from error
        capacity = self.participation.capacity
        if not isinstance(cohort, Cohort):
            cohort = _cohort_of(cohort, capacity)
        cohort = _of_clients(cohort, self.population.num_clients, capacity)
        return placed(*place, cohort.ids, cohort.is_drawn, cohort.overflow, cohort.fate)

    def _start_of(self, state: SimulationState) -> Any:
        """Reads the state of the sampler before the next round; None if it has none."""
        return None if self.start is None else self.start(state)

    def coming(self, state: SimulationState, hyper: Hyper, key: PRNGKey, num_rounds: int) -> Coming:
        """Draws the next rounds before they run, for budgets and plans.

        Args:
          state: the state before them.
          hyper: their numbers.
          key: the root key of the run.
          num_rounds: how many, at least 1.

        Returns:
          Who will be drawn, and the stages of these rounds.
        """
        rounds = int(state.round) + np.arange(num_rounds, dtype=np.int32)

        def stage(round_index: Any) -> jax.Array:
            numbers = hyper.at(round_index)
            found = self.algorithm.stages.stage_of(state.server, numbers, round_index)
            return jnp.asarray(found, jnp.int32)

        # Each number of rounds would compile programs of its own.
        is_one = self.algorithm.stages.stage_of is one_stage
        stages = np.zeros_like(rounds) if is_one else np.asarray(jax.vmap(stage)(rounds))
        if self.charges_all:
            return Coming(None, stages)
        if self.own is not None:
            found = jax.lax.map(lambda r: self._clients(r, hyper, key), jnp.asarray(rounds))
            return Coming(np.asarray(found), stages)
        # Who is at work in asynchronous rounds follows from the keys of all earlier calls.
        start = jax.tree.map(jnp.asarray, self._start_of(state))
        drawn = self.sampling.draws(fold(key, Purpose.PARTICIPATION), rounds, start)
        is_drawn = drawn.is_real
        for keeps in self.keeps:
            is_drawn &= jax.vmap(partial(_kept, keeps, hyper))(rounds, drawn.indices)
        return Coming(np.where(is_drawn, drawn.indices, -1), stages)

    def _clients(self, round_index: jax.Array, hyper: Hyper, key: PRNGKey) -> jax.Array:
        """Lists the clients of a round whose draw reads nothing else of the state."""
        # Fates, which may read the state, change none of them.
        drawn = dataclasses.replace(self, fates=())
        cohort = drawn.draw(SimulationState((), (), None, round_index), hyper, key)
        return jnp.where(cohort.is_drawn, cohort.ids, -1)

    def given(self, draw: Draw, *, reads_state: bool = False) -> "Cohorts":
        """Draws by a rule of a wrapper's own.

        Guarantee: nothing is amplified. Those drawn are charged; every client in every round with
        `reads_state`, because who is drawn then follows from records, through released models.

        Args:
          draw: the rule. It returns a cohort that other cohorts drew, or the indices of clients,
            `[drawn]`, -1 for none, at most `capacity` of them. Slots are emptied where they hold no
            client of the population, or one that an earlier slot has.
          reads_state: whether it reads more of the state than its round: the server's and those of
            wrappers; where no privacy is claimed, all that is on the device. Streamed rounds then
            draw one cohort at a time.

        Returns:
          The cohorts.
        """
        own = _Rule(draw, reads_state)
        return dataclasses.replace(self, own=own, start=None, keeps=(), fates=())

    def thinned(self, keeps: Keeps) -> "Cohorts":
        """Leaves clients out by public facts, at the same price.

        Guarantee: the price of these cohorts. Which of the drawn clients are left depends on no
        draw and on no record: the rule receives one client at a time, so that none displaces
        another.

        Args:
          keeps: `(round, clients) -> keeps`, whether a client, in an array of shape `[1]`, may take
            part in a round: a Boolean, or an array of one.

        Returns:
          The cohorts, of which one may have no client at all.
        """

        def by_facts(hyper: Hyper, round_index: jax.Array, clients: jax.Array) -> Any:
            return keeps(round_index, clients)

        return dataclasses.replace(self, keeps=(*self.keeps, by_facts))

    def with_fates(self, fates: Fates, *, reads_state: bool = False) -> "Cohorts":
        """Changes the fates of those that are drawn, at the same price.

        Guarantee: the price of these cohorts. They have the same clients, who pay whatever their
        fates, and a client's fate depends on none that was drawn with it: the rule receives one
        client at a time, so that none displaces another.

        Args:
          fates: `(state, hyper, cohort) -> fate`, a `Fate` for the client in a cohort of one slot,
            as an integer or an array with one entry. A slot that is empty stays so, and one that
            holds a client holds it. The state has its round alone unless `reads_state` is true.
          reads_state: whether it reads more of the state than its round: the server's and those of
            wrappers, never those of clients and aggregators.

        Returns:
          The cohorts.
        """
        return dataclasses.replace(self, fates=(*self.fates, _Rule(fates, reads_state)))


def of_federation(cohorts: Cohorts, num_outer: Callable[[], int]) -> Cohorts:
    """Fixes which states of wrappers new rules read: those of their federation.

    A wrapper around it puts its own state before these.
    """
    rules = [rule for rule in (cohorts.own, *cohorts.fates) if rule is not None]
    if not any(rule.reads_state and rule.num_outer is None for rule in rules):
        return cohorts
    num = num_outer()

    def fixed(rule: _Rule) -> _Rule:
        return rule._replace(num_outer=num) if rule.num_outer is None else rule

    own = None if cohorts.own is None else fixed(cohorts.own)
    return dataclasses.replace(cohorts, own=own, fates=tuple(map(fixed, cohorts.fates)))


def _shown(state: SimulationState, rule: _Rule) -> SimulationState:
    """Hides what shows a record without noise, and all but the round if no more is asked for."""
    if not rule.reads_state:
        return SimulationState((), (), None, state.round, ())
    return innermost(state._replace(aggregator=(), clients=None), rule.num_outer)


def _kept(keeps: _Keeps, hyper: Hyper, round_index: Any, clients: Any) -> jax.Array:
    """Asks a rule about each client by itself, `[slots]`."""

    def one(client: jax.Array) -> jax.Array:
        answer = keeps(hyper, round_index, client[None])
        is_one = np.size(answer) == 1 and jnp.issubdtype(jnp.result_type(answer), bool)
        checks.require(is_one, "keeps", "return a Boolean for each client", answer)
        return jnp.reshape(answer, ())

    return jax.vmap(one)(clients)


def _with_fates(cohort: Cohort, rule: _Rule, state: SimulationState, hyper: Hyper) -> Cohort:
    """Changes the fates of drawn clients, who stay drawn, each by itself."""
    # An array of NumPy cannot be indexed by a client that is traced.
    shown = jax.tree.map(jnp.asarray, _shown(state, rule))

    def one(client: jax.Array, fate: jax.Array) -> jax.Array:
        alone = Cohort(client[None], fate[None], jnp.zeros_like(cohort.overflow))
        try:
            answer = rule.function(shown, hyper, alone)
        except jax.errors.JAXTypeError:
            raise
        except (AttributeError, LookupError, TypeError) as error:
            text = "read nothing of the state but its round unless reads_state is true"
            checks.require(rule.reads_state, "a function of fates", text, error)
            raise
        is_fate = isinstance(answer, int | np.ndarray | np.integer | jax.Array)
        is_fate = is_fate and jnp.issubdtype(jnp.result_type(answer), jnp.integer)
        text = "return fates, integers, one for the client in its slot"
        checks.require(is_fate and np.size(answer) == 1, "a function of fates", text, answer)
        return jnp.reshape(jnp.asarray(answer), ())

    found = jax.vmap(one)(cohort.ids, cohort.fate)
    found = jnp.where((found >= min(Fate)) & (found <= max(Fate)), found, cohort.fate)
    fate = jnp.where(cohort.is_drawn & (found != Fate.EMPTY), found, cohort.fate)
    return cohort._replace(fate=fate.astype(cohort.fate.dtype))


def _cohort_of(clients: Any, capacity: int) -> Cohort:
    """Makes a cohort of clients by their indices, -1 for none."""
    is_index = isinstance(clients, np.ndarray | jax.Array) and clients.ndim == 1
    is_index = is_index and jnp.issubdtype(clients.dtype, jnp.integer)
    rule = f"return a cohort, or indices of at most {capacity} clients, integers of shape [drawn]"
    checks.require(is_index and len(clients) <= capacity, "draw", rule, clients)
    ids = jnp.full(capacity, -1, jnp.int32).at[: len(clients)].set(clients)
    fate = jnp.where(ids >= 0, Fate.CONTRIBUTED, Fate.EMPTY)
    return Cohort(ids, fate, jnp.int32(0))


def _of_clients(cohort: Cohort, num_clients: int, capacity: int) -> Cohort:
    """Empties slots that hold no client of the population, or one that an earlier slot has.

    Clients beyond the capacity overflow, whatever the layout.
    """
    ids = jnp.where(cohort.is_drawn, cohort.ids, -1)
    is_client = (ids >= 0) & (ids < num_clients)
    slots = jnp.arange(len(ids))
    held = jnp.where(is_client, ids, num_clients)
    first = jnp.full(num_clients + 1, len(ids)).at[held].min(slots)
    is_kept = is_client & (first[held] == slots)
    fits = is_kept & (jnp.cumsum(is_kept) <= capacity)
    fate = jnp.where(fits, cohort.fate, Fate.EMPTY).astype(cohort.fate.dtype)
    overflow = cohort.overflow + jnp.sum(is_kept & ~fits, dtype=jnp.int32)
    return cohort._replace(fate=fate, overflow=overflow)
