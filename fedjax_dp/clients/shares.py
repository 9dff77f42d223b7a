"""Shares of a batch: what each of several devices computes of it."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from chex import PRNGKey

from fedjax_dp.core import sums
from fedjax_dp.core.trees import PyTree
from fedjax_dp.data.sampling import Draw


class Share(NamedTuple):
    """Every n-th example of a batch for each of n devices, or all of it for one.

    Attributes:
      axis: the mesh axis of the devices that divide the batch; None for one device.
    """

    axis: str | None = None

    @property
    def is_whole(self) -> bool:
        """Whether one device computes the batch."""
        return self.axis is None

    @property
    def num_devices(self) -> int:
        """The number of devices."""
        return 1 if self.axis is None else jax.lax.axis_size(self.axis)

    def capacity(self, capacity: int) -> int:
        """Bounds the examples of a share by those of the batch."""
        return -(-capacity // self.num_devices)

    def num_own(self, count: jax.Array) -> jax.Array:
        """Counts the examples of this device's share of a batch of `count`."""
        if self.axis is None:
            return count
        return (count + self.num_devices - 1 - jax.lax.axis_index(self.axis)) // self.num_devices

    def positions(self, positions: jax.Array) -> jax.Array:
        """Returns where positions of the share are in the batch."""
        if self.axis is None:
            return positions
        return jax.lax.axis_index(self.axis) + self.num_devices * positions

    def of(self, draw: Draw) -> Draw:
        """Returns the share of a draw, its real examples first."""
        if self.axis is None:
            return draw
        count, place = self.capacity(len(draw.indices)), jax.lax.axis_index(self.axis)

        def part(x: jax.Array) -> jax.Array:
            padded = jnp.pad(x, (0, count * self.num_devices - len(x)))
            return padded.reshape(count, self.num_devices)[:, place]

        return draw._replace(indices=part(draw.indices), is_real=part(draw.is_real))

    def key(self, key: PRNGKey) -> PRNGKey:
        """Returns the device's own key."""
        return key if self.axis is None else jax.random.fold_in(key, jax.lax.axis_index(self.axis))

    def added_up(self, total: PyTree) -> PyTree:
        """Adds the running sums of all shares; each device gets the same bits."""
        return total if self.axis is None else sums.over_devices(total, self.axis)
