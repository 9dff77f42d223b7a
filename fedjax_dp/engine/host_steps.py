"""Work on the host between rounds: where rounds are split for it, and how it is done."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from chex import PRNGKey

from fedjax_dp.algorithms.base import HostStep, Hyper
from fedjax_dp.core import checks
from fedjax_dp.core.keys import Purpose, fold
from fedjax_dp.core.trees import PyTree
from fedjax_dp.engine.rows import Rows


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


def after_host_step(
    step: HostStep, state: Any, hyper: Hyper, key: PRNGKey, num_clients: int | None = None
) -> Any:
    """Does work on the host.

    Args:
      step: the work.
      state: the state before it.
      hyper: the numbers of the run.
      key: the root key of the run.
      num_clients: as for `Table`.

    Returns:
      The state after it, of the same structure; the server's part is on the host.

    Raises:
      ValueError: if the step changed structure, shapes or types.
    """
    before = jax.device_get(state.server)
    kept = None
    if step.reads_clients and state.clients is not None:
        kept = state.clients
        if not isinstance(kept, Rows):
            kept = Table(kept, num_clients)
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
