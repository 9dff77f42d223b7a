"""Batches that hold several copies of each example, such as augmented ones."""

import flax.struct
import jax
import jax.numpy as jnp

from fedjax_dp.core.trees import PyTree


@flax.struct.dataclass
class Copies:
    """A batch of several copies of each example, whose mean loss is that of the example.

    Its gradient is the mean of theirs, so that a rule that clips by example clips this mean.
    """

    batch: PyTree  # Arrays `[examples, copies, ...]`.

    @property
    def num_copies(self) -> int:
        """Counts the copies of an example."""
        return jax.tree.leaves(self.batch)[0].shape[1]

    def flat(self) -> PyTree:
        """Returns the copies as examples of their own, `[examples · copies, ...]`."""
        return jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), self.batch)

    def repeated(self, of_examples: jax.Array) -> jax.Array:
        """Repeats the entry of each example for its copies, `[examples · copies]`."""
        return jnp.repeat(of_examples, self.num_copies)

    def mean(self, of_copies: jax.Array) -> jax.Array:
        """Averages over the copies of each example, `[examples]`."""
        return jnp.mean(of_copies.reshape(-1, self.num_copies), axis=1)
