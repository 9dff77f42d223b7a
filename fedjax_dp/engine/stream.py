"""Streaming: the examples of cohorts, and what their clients keep, from host memory or disk."""

from typing import Any

import jax
import numpy as np

from fedjax_dp.core.trees import PyTree
from fedjax_dp.data.federated import FederatedData, nested
from fedjax_dp.data.participants import Participation
from fedjax_dp.engine.cohort import Cohort, Examples
from fedjax_dp.engine.record import Fate


class Slabs:
    """Gathers the examples of cohorts into slabs of few sizes."""

    def __init__(
        self,
        data: FederatedData,
        participation: Participation,
        placement: Any,
        validation: FederatedData | None = None,
    ):
        """Measures the slab that nearly every cohort fits into.

        Args:
          data: the population.
          participation: who joins a round.
          placement: the device or sharding that slabs go to.
          validation: a second split of the same clients.
        """
        self._data, self._placement = data, placement
        self._limit = max(1, int(data.sizes.max()))
        # No cohort can hold more rows than its largest possible members do together.
        largest = np.sort(data.sizes)[::-1][: participation.capacity]
        self._most_rows = max(1, int(largest.sum()))
        expected = participation.cohort_size * data.num_examples / data.num_clients
        self._usual_rows = min(self._most_rows, power_of_two(2 * expected))
        self._validation = None
        if validation is not None:
            self._validation = Slabs(validation, participation, placement)

    def gather(self, cohort: Cohort) -> Examples:
        """Reads a cohort's examples and puts them on the device.

        The slab has room for twice the expected rows, or for the next power of two where a cohort
        needs more, so that a round is compiled once or for very few sizes and no slab is as large
        as the population because a sampler might draw all of it.

        Args:
          cohort: the cohort, on the host.

        Returns:
          The examples by slot.
        """
        return jax.device_put(self._on_host(cohort), self._placement)

    def _on_host(self, cohort: Cohort) -> Examples:
        is_drawn = np.asarray(cohort.fate) != Fate.EMPTY
        ids = np.asarray(cohort.ids)[is_drawn]
        sizes = self._data.sizes[ids]
        num_rows = int(sizes.sum())
        slab_rows = max(self._usual_rows, min(self._most_rows, power_of_two(num_rows)))
        starts, sizes_by_slot = np.zeros((2, len(is_drawn)), np.int32)
        starts[is_drawn], sizes_by_slot[is_drawn] = np.cumsum(sizes) - sizes, sizes
        part = self._data.select(ids).examples if len(ids) else {}
        slab = {}
        for name, array in self._data.examples.items():
            slab[name] = np.zeros((slab_rows, *array.shape[1:]), array.dtype)
            if len(ids):
                slab[name][:num_rows] = part[name]
        second = None if self._validation is None else self._validation._on_host(cohort)
        return Examples(nested(slab), starts, sizes_by_slot, second, self._limit, is_by_slot=True)


class ClientStates:
    """What clients keep, in host memory; a cohort's part of it comes to the device and goes back.

    Attributes:
      table: `[num_clients, ...]`, NumPy arrays.
    """

    def __init__(self, table: PyTree):
        """Takes a table over.

        Args:
          table: what clients keep, `[num_clients, ...]`; it is copied to the host.
        """
        self.table = jax.tree.map(lambda x: np.array(x), table)

    def gather(self, cohort: Cohort, placement: Any) -> PyTree:
        """Brings a cohort's part to the device.

        Args:
          cohort: the cohort, on the host.
          placement: the device or sharding that it goes to.

        Returns:
          What the clients of all slots keep, `[slots, ...]`.
        """
        ids = np.asarray(cohort.ids)
        return jax.device_put(jax.tree.map(lambda a: a[ids], self.table), placement)

    def scatter(self, cohort: Cohort, part: PyTree) -> None:
        """Takes a cohort's part back.

        Args:
          cohort: the cohort, on the host.
          part: what the clients of all slots keep, `[slots, ...]`.
        """
        is_drawn = np.asarray(cohort.fate) != Fate.EMPTY
        ids = np.asarray(cohort.ids)[is_drawn]
        for array, new in zip(jax.tree.leaves(self.table), jax.tree.leaves(part), strict=True):
            array[ids] = np.asarray(new)[is_drawn]


def power_of_two(rows: float) -> int:
    """Rounds a number of rows up to a power of two, at least 1."""
    return 1 << max(int(np.ceil(rows)) - 1, 0).bit_length()
