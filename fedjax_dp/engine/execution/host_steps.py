"""Work on the host between rounds: where rounds are split for it, and how it is done."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from chex import PRNGKey

from fedjax_dp.algorithms.base import HostStep, Hyper
from fedjax_dp.clients.base import ClientData
from fedjax_dp.core import checks
from fedjax_dp.core.keys import Purpose, fold
from fedjax_dp.core.trees import PyTree
from fedjax_dp.engine.cohort import Examples
from fedjax_dp.engine.execution.client_store import Rows


def rounds_and_host_steps(
    host_steps: Sequence[HostStep], first_round: int, num_rounds: int
) -> list[tuple[int, list[HostStep]]]:
    """Splits rounds where work on the host comes between them.

    Args:
      host_steps: the work.
      first_round: rounds done.
      num_rounds: rounds to come, at least 1.

    Returns:
      Numbers of rounds, and what is done on the host after them.
    """
    last = first_round + num_rounds
    ends = {s.after for s in host_steps if first_round < s.after <= last} | {last}
    blocks, done = [], first_round
    for end in sorted(ends):
        blocks.append((end - done, [s for s in host_steps if s.after == end]))
        done = end
    return blocks


class Judges:
    """All clients with their validation data, who can be asked what a row is worth."""

    def __init__(
        self, judge: Callable[[PyTree, ClientData], jax.Array] | None, validation: Examples | None
    ):
        """Puts both together.

        Args:
          judge: as `HostStep.judge`.
          validation: the second split of all clients.
        """
        self._validation, self._placed = validation, False

        def by_all(row: PyTree, validation: Examples) -> jax.Array:
            assert judge is not None
            clients = jnp.arange(len(validation.sizes))
            return jax.lax.map(lambda i: judge(row, validation.client(i)), clients)

        self._by_all = None if judge is None else jax.jit(by_all)

    def of(self, row: PyTree) -> np.ndarray:
        """Asks everybody, as `Kept.judged` says.

        Args:
          row: what one client keeps.

        Returns:
          The answers, `[num_clients]`.

        Raises:
          ValueError: if the step has no judge, or there is no validation data.
        """
        rule = "be declared by the host step that asks for it"
        checks.require(self._by_all is not None, "judge", rule, None)
        rule = "be given for a host step whose clients judge by it"
        checks.require(self._validation is not None, "validation", rule, None)
        assert self._by_all is not None and self._validation is not None
        if not self._placed:
            self._validation, self._placed = jax.device_put(self._validation), True
        return np.asarray(self._by_all(row, self._validation))


class Table:
    """What clients keep, as one table in memory."""

    def __init__(self, table: PyTree, num_clients: int | None = None):
        """Looks at a table.

        Args:
          table: what clients keep, `[num_clients, ...]`, then rows of nobody that fill devices up.
          num_clients: how many clients there are; one for each row where it is None.
        """
        self._table, self._num_clients = table, num_clients

    def of_all(self, select: Callable[[PyTree], PyTree]) -> PyTree:
        """Reads a part of every row, as `Kept` says."""
        return jax.tree.map(lambda x: np.asarray(x)[: self._num_clients], select(self._table))

    def of(self, client: int) -> PyTree:
        """Reads one client's row, as `Kept` says."""
        return jax.tree.map(lambda x: np.asarray(x[client]), self._table)


class Judged:
    """What clients keep, wherever it lies, with those who judge it."""

    def __init__(self, kept: Table | Rows, judges: Judges):
        """Puts both together.

        Args:
          kept: what clients keep.
          judges: who is asked.
        """
        self.of_all, self.of, self._judges = kept.of_all, kept.of, judges

    def judged(self, client: int) -> np.ndarray:
        """Asks everybody, as `Kept` says."""
        return self._judges.of(self.of(client))


def after_host_step(
    step: HostStep,
    state: Any,
    hyper: Hyper,
    key: PRNGKey,
    num_clients: int | None = None,
    validation: Examples | None = None,
) -> Any:
    """Does work on the host.

    Args:
      step: the work.
      state: the state before it.
      hyper: the numbers of the run.
      key: the root key of the run.
      num_clients: as for `Table`.
      validation: the second split of all clients, for whoever judges by it.

    Returns:
      The state after it, of the same structure; the server's part is on the host.

    Raises:
      ValueError: if the step changed structure, shapes or types.
    """
    before = jax.device_get(state.server)
    kept = None
    if step.reads_clients and state.clients is not None:
        rows = state.clients
        table = rows if isinstance(rows, Rows) else Table(rows, num_clients)
        kept = Judged(table, Judges(step.judge, validation))
    numbers = jax.tree.map(np.asarray, hyper)
    server = step.step(before, kept, numbers, fold(key, Purpose.SERVER, step.after))
    kinds = [jax.tree.map(lambda x: (np.shape(x), jnp.result_type(x)), t) for t in (before, server)]
    checks.require(
        kinds[0] == kinds[1],
        f"the host step after round {step.after}",
        f"keep structure, shapes and types {kinds[0]}",
        kinds[1],
    )
    return state._replace(server=server)
