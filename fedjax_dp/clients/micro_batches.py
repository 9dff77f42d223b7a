"""The default number of examples of a batch that are computed at once."""

import jax
import jax.numpy as jnp

from fedjax_dp.clients.client_data import ClientData
from fedjax_dp.core.backend import facts
from fedjax_dp.core.choices import choices
from fedjax_dp.core.trees import PyTree
from fedjax_dp.models.base import Model
from fedjax_dp.models.cost import cost_of

# The most bytes of the largest value of a pass that the next operation still finds in a cache.
_CACHED_BYTES = 4 * 2**20
# Every pass reads and writes the sum of gradients: its values must be far larger than that.
_PASSES_COST = 4
# Narrower products leave a core idle.
_FEWEST = 4


def size_for(model: Model, params: PyTree, client: ClientData, batch_size: int) -> int:
    """Chooses a micro-batch of at most `batch_size` whose values stay in a CPU's cache."""
    stays_whole = model.mixes_examples or bool(model.buffer_keys) or client.chunk_axis is not None
    if stays_whole or not choices(facts()).has_caches or batch_size <= _FEWEST:
        return batch_size
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), params)
    one = jax.tree.map(lambda a: jax.ShapeDtypeStruct((1, *a.shape[1:]), a.dtype), client.examples)
    largest = cost_of(lambda p, batch: model.losses(p, batch)[0], shapes, one).largest_bytes
    size_of_params = sum(a.size * jnp.dtype(a.dtype).itemsize for a in jax.tree.leaves(shapes))
    budget = max(_CACHED_BYTES, _PASSES_COST * size_of_params)
    fitting = max(_FEWEST, budget // max(1, largest))
    if fitting >= batch_size:
        return batch_size
    fewest_passes = -(-batch_size // fitting)
    # Up to twice as many passes, for those that leave the last one full.
    passes = range(fewest_passes, 2 * fewest_passes + 1)
    sizes = [-(-batch_size // p) for p in passes if -(-batch_size // p) >= _FEWEST]
    return min(sizes, key=lambda size: -(-batch_size // size) * size)
