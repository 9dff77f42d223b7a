"""Work on the host between rounds: where rounds are split for it, and how it is run."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from chex import PRNGKey

from fedjax_dp.algorithms.base import HostStep, Hyper
from fedjax_dp.core import checks
from fedjax_dp.core.devices import of_first_process
from fedjax_dp.core.keys import Purpose, fold
from fedjax_dp.core.trees import PyTree
from fedjax_dp.engine.client_store import ClientStore
from fedjax_dp.engine.cohort import Examples


def rounds_and_host_steps(
    host_steps: Sequence[HostStep], first_round: int, num_rounds: int
) -> list[tuple[int, list[HostStep]]]:
    """Splits `num_rounds` rounds after `first_round` into blocks, each with the steps after it."""
    last = first_round + num_rounds
    ends = {s.after for s in host_steps if first_round < s.after <= last} | {last}
    blocks, done = [], first_round
    for end in sorted(ends):
        blocks.append((end - done, [s for s in host_steps if s.after == end]))
        done = end
    return blocks


class Table:
    """The states of all clients in memory, `[num_clients, ...]` and padding for devices."""

    def __init__(self, table: PyTree, num_clients: int | None = None):
        """Wraps a table; without `num_clients` each entry is a client."""
        self._table, self._num_clients = table, num_clients

    def of_all(self, select: Callable[[PyTree], PyTree]) -> PyTree:
        """Reads a part of every client's state."""
        return jax.tree.map(lambda x: np.asarray(x)[: self._num_clients], select(self._table))

    def of(self, client: int) -> PyTree:
        """Reads the state of one client."""
        return jax.tree.map(lambda x: np.asarray(x[client]), self._table)


class Scored:
    """The `ClientStates` of a host step: states, and their scores on validation data."""

    def __init__(self, states: Table | ClientStore, step: HostStep, validation: Examples | None):
        """Joins the states with the step's score and the second split of all clients."""
        self.of_all, self.of = states.of_all, states.of
        self._score, self._validation = step.score, validation
        self._is_placed = False

        def by_all(own: PyTree, validation: Examples) -> jax.Array:
            assert step.score is not None
            score, clients = step.score, jnp.arange(len(validation.sizes))
            return jax.lax.map(lambda i: score(own, validation.client(i)), clients)

        self._by_all = jax.jit(by_all)

    def scores(self, client: int) -> np.ndarray:
        """Scores one client's state at every client, `[num_clients]`."""
        rule = "be declared by the host step that reads scores"
        checks.require(self._score is not None, "score", rule, None)
        rule = "be given for a host step that scores clients' states"
        checks.require(self._validation is not None, "validation", rule, None)
        if not self._is_placed:
            self._validation, self._is_placed = jax.device_put(self._validation), True
        assert self._validation is not None
        return np.asarray(self._by_all(self.of(client), self._validation))


def after_host_step(
    step: HostStep,
    state: Any,
    hyper: Hyper,
    key: PRNGKey,
    num_clients: int | None = None,
    validation: Examples | None = None,
) -> Any:
    """Runs a host step, on the first process for all; `validation` is for scores."""
    before = jax.device_get(state.server)
    states = None
    if step.reads_clients and state.clients is not None:
        stored = state.clients
        table = stored if isinstance(stored, ClientStore) else Table(stored, num_clients)
        states = Scored(table, step, validation)
    numbers = jax.tree.map(np.asarray, hyper)
    server = before
    if jax.process_index() == 0:
        server = step.step(before, states, numbers, fold(key, Purpose.SERVER, step.after))
    kinds = [jax.tree.map(lambda x: (np.shape(x), jnp.result_type(x)), t) for t in (before, server)]
    checks.require(
        kinds[0] == kinds[1],
        f"the host step after round {step.after}",
        f"keep structure, shapes and types {kinds[0]}",
        kinds[1],
    )
    return state._replace(server=of_first_process(server))
