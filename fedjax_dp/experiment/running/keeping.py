"""Keeps the state of the best round of a run, in memory and in its checkpoints."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from fedjax_dp.engine.client_store import ClientStore
from fedjax_dp.engine.round import SimulationState
from fedjax_dp.experiment.components.experiment import Experiment
from fedjax_dp.experiment.components.keeping import kept_metric, loss_of


class Kept(NamedTuple):
    """The best round so far."""

    round: int
    value: float  # Of its metric.
    state: SimulationState  # On the host, without client states that no model is read from.


def better(
    experiment: Experiment, kept: Kept | None, row: Mapping[str, Any], state: SimulationState
) -> Kept | None:
    """Returns the better of the round kept so far and one that was evaluated; ties keep it."""
    metric = kept_metric(experiment.config.run)
    # A noised metric is not released after a last round out of turn.
    if metric is None or not np.isfinite(row.get(metric, np.nan)):
        return kept
    value = float(row[metric])
    if kept is not None and loss_of(metric, value) >= loss_of(metric, kept.value):
        return kept
    return Kept(int(state.round), value, copied(experiment, state))


def with_kept(
    experiment: Experiment, state: SimulationState, kept: Kept | None = None
) -> SimulationState:
    """Adds the kept state to one for a checkpoint; a copy of its own where none is kept yet."""
    if kept_metric(experiment.config.run) is None:
        return state
    held = _without_clients(experiment, state) if kept is None else kept.state
    return state._replace(outer=(held, state.outer))


def facts_of_kept(kept: Kept | None) -> dict[str, Any] | None:
    """Returns what a checkpoint says of the kept state, for JSON."""
    return None if kept is None else {"round": kept.round, "value": kept.value}


def parted(
    experiment: Experiment, state: SimulationState, facts: Mapping[str, Any] | None
) -> tuple[SimulationState, Kept | None]:
    """Takes the kept state out of that of a checkpoint."""
    if kept_metric(experiment.config.run) is None:
        return state, None
    held, outer = state.outer
    found = None if facts is None else Kept(int(facts["round"]), float(facts["value"]), held)
    return state._replace(outer=outer), found


def _without_clients(experiment: Experiment, state: SimulationState) -> SimulationState:
    has_own = experiment.simulation.federation.personal is not None
    return state if has_own else state._replace(clients=None)


def copied(experiment: Experiment, state: SimulationState) -> SimulationState:
    """Copies a state to the host, where later rounds do not change it."""
    held = experiment.simulation.portable(_without_clients(experiment, state))
    if isinstance(held.clients, ClientStore):
        return held
    return jax.tree.map(np.array, held)
