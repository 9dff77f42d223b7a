"""Draws of cohorts: what a participation draws, and what a wrapper may change of it."""

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from chex import PRNGKey

from fedjax_dp.algorithms.base import FederatedAlgorithm
from fedjax_dp.algorithms.values import Hyper
from fedjax_dp.core import argument_checks, checks
from fedjax_dp.data.participants import Participation
from fedjax_dp.engine.cohort import Cohort, draw_cohort
from fedjax_dp.engine.layout import Layout
from fedjax_dp.engine.population import Population
from fedjax_dp.engine.record import Fate
from fedjax_dp.engine.round import SimulationState

# `(state, hyper, cohort) -> fates`, `[slots]`; the state has none of clients and aggregators.
Fates: TypeAlias = Callable[[SimulationState, Hyper, Cohort], Any]
# `(hyper, round, clients) -> keeps`, Booleans, `[slots]` or one for all.
Keeps: TypeAlias = Callable[[Hyper, jax.Array, jax.Array], Any]


class Draw(Protocol):
    """Draws the cohort of the next round."""

    def __call__(
        self, state: SimulationState, hyper: Hyper, key: PRNGKey, layout: Layout = Layout()
    ) -> Cohort:
        """Draws it from the root key of the run, the same in every round."""


# Compared and hashed by identity, so that `jax.jit` takes it: populations hold arrays.
@dataclasses.dataclass(frozen=True, eq=False)
class Sampled:
    """The draw of a participation, which also sets its price: no other clients can be drawn.

    Attributes:
      participation: the sampling of clients.
      algorithm: the declaration, whose numbers of local steps order the slots.
      population: the clients.
      start: `(state) -> state` of the sampler before the round; None if it has none.
      keeps: which clients may be drawn; all of these must keep a client.
      fates: change the fates of drawn clients, one after another; they cannot empty a slot.
    """

    participation: Participation
    algorithm: FederatedAlgorithm
    population: Population
    start: Callable[[SimulationState], Any] | None = None
    keeps: tuple[Keeps, ...] = ()
    fates: tuple[Fates, ...] = ()

    def __call__(
        self, state: SimulationState, hyper: Hyper, key: PRNGKey, layout: Layout = Layout()
    ) -> Cohort:
        """Draws the cohort of the next round."""
        argument_checks.check_fields(layout, "layout.")
        sizes, start = jnp.asarray(self.population.sizes), self.start_of(state)
        facts = self.algorithm, self.participation, layout, sizes, hyper, state.round, key
        cohort = draw_cohort(*facts, start)
        for keeps in self.keeps:
            cohort = thinned(cohort, keeps(hyper, state.round, cohort.ids))
        for fates in self.fates:
            cohort = with_fates(cohort, fates, state, hyper)
        return cohort

    def start_of(self, state: SimulationState) -> Any:
        """Reads the state of the sampler before the next round; None if it has none."""
        return None if self.start is None else self.start(state)


def thinned(cohort: Cohort, keeps: Any) -> Cohort:
    """Empties slots."""
    fate = jnp.where(keeps, cohort.fate, Fate.EMPTY)
    return cohort._replace(fate=fate.astype(cohort.fate.dtype))


def with_fates(cohort: Cohort, fates: Fates, state: SimulationState, hyper: Hyper) -> Cohort:
    """Changes the fates of drawn clients, who stay drawn, by a state that shows no record."""
    found = fates(SimulationState(state.server, (), None, state.round, state.outer), hyper, cohort)
    is_fate = isinstance(found, int | np.ndarray | np.integer | jax.Array)
    is_fate = is_fate and jnp.issubdtype(jnp.result_type(found), jnp.integer)
    is_fate = is_fate and jnp.shape(found) in ((), cohort.fate.shape)
    rule = f"return fates, integers of shape {list(cohort.fate.shape)}"
    checks.require(is_fate, "a function of fates", rule, found)
    found = jnp.where((found >= min(Fate)) & (found <= max(Fate)), found, cohort.fate)
    fate = jnp.where(cohort.is_drawn & (found != Fate.EMPTY), found, cohort.fate)
    return cohort._replace(fate=fate.astype(cohort.fate.dtype))
