"""Cohorts: who takes part in a round, and where their examples are."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from chex import PRNGKey

from fedjax_dp.algorithms.base import FederatedAlgorithm
from fedjax_dp.clients.base import LocalConfig
from fedjax_dp.core.keys import Purpose, fold
from fedjax_dp.core.trees import PyTree
from fedjax_dp.data.federated import FederatedData
from fedjax_dp.data.participants import Participation


class Cohort(NamedTuple):
    """The clients of one round in a fixed number of slots, the real ones first on every device.

    Attributes:
      ids: client indices, `[slots]`, int32.
      starts: first row of each in the store that the round reads, `[slots]`, int32.
      sizes: examples of each, `[slots]`, int32; 0 in empty slots.
      is_real: which slots hold a client, `[slots]`, bool.
      overflow: clients that were drawn and found no slot, int32.
    """

    ids: jax.Array
    starts: jax.Array
    sizes: jax.Array
    is_real: jax.Array
    overflow: jax.Array


class ClientTable(NamedTuple):
    """Where each client's examples are, on the device.

    Attributes:
      starts: first row of each client, `[num_clients]`, int32.
      sizes: examples of each client, `[num_clients]`, int32.
    """

    starts: jax.Array
    sizes: jax.Array


def draw_cohort(
    algorithm: FederatedAlgorithm,
    participation: Participation,
    num_slots: int,
    num_devices: int,
    table: ClientTable,
    config: LocalConfig,
    key: PRNGKey,
    round_index: jax.typing.ArrayLike,
) -> Cohort:
    """Draws the cohort of a round and orders its slots.

    Clients with like numbers of steps come to lie side by side, so that those that are computed
    together wait little for one another, and devices get every n-th client, so that they share the
    work evenly. The order changes no client's draws, which follow its index.

    Args:
      algorithm: tells how many steps a client takes.
      participation: who joins.
      num_slots: slots of the cohort, a multiple of `num_devices`.
      num_devices: devices that share the slots, in equal contiguous parts.
      table: where clients' examples are.
      config: the numbers of local training.
      key: the root key of the run.
      round_index: the round, from 0.

    Returns:
      The cohort.
    """
    drawn = participation.draw(fold(key, Purpose.PARTICIPATION), round_index)
    padding = num_slots - participation.capacity
    ids = jnp.pad(drawn.indices, (0, padding))
    is_real = jnp.pad(drawn.is_real, (0, padding))
    steps = jax.vmap(lambda i: algorithm.num_steps(table.sizes[i], config.row(i)))(ids)
    order = jnp.argsort(jnp.where(is_real, -steps.astype(jnp.float32), jnp.inf))
    order = order.reshape(-1, num_devices).T.reshape(-1)
    ids, is_real = ids[order], is_real[order]
    sizes = jnp.where(is_real, table.sizes[ids], 0)
    return Cohort(ids, table.starts[ids], sizes, is_real, drawn.overflow)


class HostCohorts:
    """Gathers the examples of cohorts from host memory or disk into slabs of few sizes."""

    def __init__(self, data: FederatedData, participation: Participation, placement: Any):
        """Measures the slab that nearly every cohort fits into.

        Args:
          data: the population.
          participation: who joins a round.
          placement: the device or sharding that slabs go to.
        """
        self._data, self._placement = data, placement
        # No cohort can hold more rows than its largest possible members do together.
        largest = np.sort(data.sizes)[::-1][: participation.capacity]
        self._most_rows = max(1, int(largest.sum()))
        expected = participation.cohort_size * data.num_examples / data.num_clients
        self._usual_rows = min(self._most_rows, _power_of_two(2 * expected))

    def gather(self, cohort: Cohort) -> tuple[PyTree, Cohort]:
        """Reads a cohort's examples and puts them on the device.

        The slab has room for twice the expected rows, or for the next power of two where a cohort
        needs more, so that a round is compiled once or for very few sizes and no slab is as large
        as the population because a sampler might draw all of it.

        Args:
          cohort: the cohort as it was drawn from the population, on the host.

        Returns:
          The slab, each array `[rows, ...]`, and the cohort with `starts` that point into it.
        """
        is_real = np.asarray(cohort.is_real)
        ids = np.asarray(cohort.ids)[is_real]
        sizes = self._data.sizes[ids]
        ends = np.cumsum(sizes)
        num_rows = int(sizes.sum())
        slab_rows = max(self._usual_rows, min(self._most_rows, _power_of_two(num_rows)))
        starts = np.zeros(len(is_real), np.int32)
        starts[is_real] = ends - sizes
        part = self._data.select(ids).examples if len(ids) else {}
        slab = {}
        for name, array in self._data.examples.items():
            slab[name] = np.zeros((slab_rows, *array.shape[1:]), array.dtype)
            if len(ids):
                slab[name][:num_rows] = part[name]
        slab, starts_there = jax.device_put((slab, starts), self._placement)
        return slab, cohort._replace(starts=starts_there)


def _power_of_two(rows: float) -> int:
    return 1 << max(int(np.ceil(rows)) - 1, 0).bit_length()
