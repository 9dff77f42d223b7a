"""How a batch is computed: in micro-batches, in shares of several devices, or of all records."""

from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from annotated_types import Ge, Lt
from chex import PRNGKey
from jax.flatten_util import ravel_pytree

from fedjax_dp.clients.base import LocalConfig
from fedjax_dp.clients.client_data import ClientData
from fedjax_dp.core import checks, sums
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.core.backend import facts
from fedjax_dp.core.checks import COUNT_LIMIT
from fedjax_dp.core.choices import choices
from fedjax_dp.core.keys import fold
from fedjax_dp.core.ranges import Positive
from fedjax_dp.core.trees import PyTree
from fedjax_dp.data.augmentation import (
    Augmentation,
    Transform,
    require_apart,
    transformed,
)
from fedjax_dp.data.sampling import Draw
from fedjax_dp.models.base import Model
from fedjax_dp.models.copies import Copies
from fedjax_dp.models.cost import cost_of

# The most bytes of the largest value of a pass that the next operation still finds in a cache.
_CACHED_BYTES = 4 * 2**20
# Every pass reads and writes the sum of gradients: its values must be far larger than that.
_PASSES_COST = 4
# Narrower products leave a core idle.
_FEWEST = 4


def size_for(
    model: Model, params: PyTree, client: ClientData, batch_size: int, num_copies: int = 1
) -> int:
    """Chooses a micro-batch of at most `batch_size` whose values stay in a CPU's cache."""
    stays_whole = model.mixes_examples or bool(model.buffer_keys) or client.chunk_axis is not None
    if stays_whole or not choices(facts()).has_caches or batch_size <= _FEWEST:
        return batch_size
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), params)
    one = jax.tree.map(lambda a: jax.ShapeDtypeStruct((1, *a.shape[1:]), a.dtype), client.examples)
    largest = cost_of(lambda p, batch: model.losses(p, batch)[0], shapes, one).largest_bytes
    size_of_params = sum(a.size * jnp.dtype(a.dtype).itemsize for a in jax.tree.leaves(shapes))
    budget = max(_CACHED_BYTES, _PASSES_COST * size_of_params)
    fitting = max(_FEWEST, budget // max(1, largest * num_copies))
    if fitting >= batch_size:
        return batch_size
    fewest_passes = -(-batch_size // fitting)
    # Up to twice as many passes, for those that leave the last one full.
    passes = range(fewest_passes, 2 * fewest_passes + 1)
    sizes = [-(-batch_size // p) for p in passes if -(-batch_size // p) >= _FEWEST]
    return min(sizes, key=lambda size: -(-batch_size // size) * size)


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
        count, device = self.capacity(len(draw.indices)), jax.lax.axis_index(self.axis)

        def part(x: jax.Array) -> jax.Array:
            padded = jnp.pad(x, (0, count * self.num_devices - len(x)))
            return padded.reshape(count, self.num_devices)[:, device]

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


# The batch size that stands for all records.
WHOLE = np.float32(np.inf)


class WholeBatches(NamedTuple):
    """A step on all records of a client, each as `num_copies` copies, itself included.

    A record's gradient is the mean of its copies' clipped gradients, so that its bound stays the
    same. `perturb`, `(example, key) -> example`, makes a copy; None without copies. `largest` is
    the largest batch of other steps, 0 if none exceeds those that training was built with.
    """

    num_copies: int = 1
    perturb: Transform | None = None
    largest: int = 0

    def copies(
        self, batch: PyTree, rows: jax.Array, copy: jax.Array, is_copied: jax.Array, key: PRNGKey
    ) -> PyTree:
        """Returns one copy of each record of a micro-batch; the first copy is the record itself."""
        perturb = self.perturb
        if perturb is None:
            return batch
        require_apart(perturb, batch)

        def one(example, row):
            return transformed("perturb", perturb, example, fold(key, row, copy))

        made = jax.vmap(one)(batch, rows)
        return jax.tree.map(lambda a, b: jnp.where(is_copied & (copy > 0), a, b), made, batch)


@checked
def gaussian_copies(
    num_copies: Annotated[int, Ge(2), Lt(COUNT_LIMIT)], stddev: Positive
) -> WholeBatches:
    """Perturbs copies of records by Gaussian noise, which RC-DPFL (2024), 4.3, does not define."""

    def perturb(example, key):
        has_inputs = isinstance(example, Mapping) and "x" in example
        rule = "hold inputs under 'x', or have a custom function `perturb`"
        names = sorted(example) if isinstance(example, Mapping) else type(example).__name__
        checks.require(has_inputs, "record", rule, names)
        leaves, structure = jax.tree.flatten(example["x"])
        is_float = [jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in leaves]
        checks.require(
            all(is_float),
            "num_copies",
            "be 1 if inputs are not floats, to which noise can be added",
            num_copies,
        )
        moved = [
            leaf
            + (stddev * jax.random.normal(jax.random.fold_in(key, i), leaf.shape)).astype(
                leaf.dtype
            )
            for i, leaf in enumerate(leaves)
        ]
        return {**example, "x": jax.tree.unflatten(structure, moved)}

    return WholeBatches(num_copies, perturb)


def check_copies(options: Mapping[str, Any]) -> None:
    """Requires `copy_stddev` if `num_copies` is above 1, and only then."""
    copies, stddev = options["num_copies"], options["copy_stddev"]
    rule = "be given if num_copies is above 1, and left out if it is 1"
    checks.require((stddev is not None) == (copies > 1), "copy_stddev", rule, stddev)


def is_whole(config: LocalConfig) -> Any:
    """Checks whether a step reads all records."""
    return jnp.isinf(jnp.asarray(config.batch_size, jnp.float32))


def augmented(
    augmentation: Augmentation, batch: PyTree, rows: jax.Array, key: PRNGKey, *, is_private: bool
) -> PyTree | Copies:
    """Replaces the records of a batch by their copies; `key` is the client's of a step."""
    if is_private:
        require_apart(augmentation.transform, batch)
    copies = augmentation.copies(batch, rows, key)
    if augmentation.num_copies > 1:
        return Copies(copies)
    return jax.tree.map(lambda a: a[:, 0], copies)


def with_size(config: LocalConfig, size: Any) -> LocalConfig:
    """Replaces a batch size that means all records by their number."""
    every = jnp.maximum(jnp.asarray(size, jnp.float32), 1.0)
    batch = jnp.where(is_whole(config), every, config.batch_size)
    return config._replace(batch_size=batch)
