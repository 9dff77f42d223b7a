"""Arrays that a compiled program computes once, however many operations read them.

A compiler fuses what only adds, multiplies, slices or pads into each of its readers, and so
computes it once for every reader. That takes time, and each copy may round differently: a norm
would not be that of what is summed. On a CPU a barrier does not prevent it, since XLA removes it
before fusion there. What a loop carries is never fused into its readers.
"""

import jax
import jax.numpy as jnp
from jax import lax

from fedjax_dp.core import jaxprs


def materialize(x: jax.Array) -> jax.Array:
    """Computes an array, and its cotangent, once for all of its uses."""
    return _materialize_p.bind(x)


def _through_a_loop(x: jax.Array) -> jax.Array:
    """Passes an array through a loop of no steps, a count that the compiler cannot know."""
    no_steps = lax.optimization_barrier(jnp.int32(0))

    def step(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        i, x = carry
        return i + 1, -x

    return lax.while_loop(lambda carry: carry[0] < no_steps, step, (jnp.int32(0), x))[1]


_materialize_p: jaxprs.Primitive = jaxprs.define(
    "materialize",
    lax.optimization_barrier,
    on={"cpu": _through_a_loop},
    eager=lambda x: x,
    abstract=lambda x: x,
    batch=lambda operands, axes: (_materialize_p.bind(*operands), axes[0]),
    transpose=lambda cotangent, _: [_materialize_p.bind(cotangent)],
)
