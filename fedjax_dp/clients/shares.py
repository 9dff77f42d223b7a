"""Shares of a batch: what each of several devices computes of it."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from chex import PRNGKey
from jax.flatten_util import ravel_pytree

from fedjax_dp.core import sums
from fedjax_dp.core.trees import PyTree
from fedjax_dp.data.sampling import Draw


class Share(NamedTuple):
    """Every n-th example of a batch for each of n devices, or all of it for one."""

    # The mesh axis of the devices that divide the batch; None for one device.
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

    def counts(self, count: jax.Array) -> jax.Array:
        """Counts the examples of the share of each device, `[devices]`; all of them for one."""
        if self.axis is None:
            return count
        return (count + self.num_devices - 1 - jnp.arange(self.num_devices)) // self.num_devices

    def own(self, each: Any) -> Any:
        """Returns this device's entry of `[devices]`; the only one of one device."""
        return each if self.axis is None else each[jax.lax.axis_index(self.axis)]

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

    def value(self, total: PyTree) -> PyTree:
        """Reads running sums of floats over all shares; each device gets the same bits."""
        if self.axis is None:
            return sums.value(total)

        # One vector, so that the number of messages is not that of the arrays.
        vectors = (ravel_pytree(part)[0] for part in sums.parts(total))
        summed = sums.value(sums.over_devices(sums.Sum(*vectors), self.axis))
        return ravel_pytree(sums.value(total))[1](summed)
