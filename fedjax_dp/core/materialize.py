"""Arrays that a compiled program computes once, however many operations read them.

A compiler fuses what only adds, multiplies, slices or pads into each of its readers, and so
computes it once for every reader. That takes time, and each copy may round differently: a norm
would not be that of what is summed. On a CPU a barrier does not prevent it, since XLA removes it
before fusion there. What a loop carries is never fused into its readers.
"""

from contextlib import AbstractContextManager
from contextvars import ContextVar

import jax
import jax.numpy as jnp
from jax import lax

from fedjax_dp.core import jaxprs, trees
from fedjax_dp.core.backend import backend, traced_with

_ARE_STORED: ContextVar[bool] = ContextVar("are_stored", default=False)


def materialize(x: jax.Array) -> jax.Array:
    """Computes an array, and its cotangent, once for all of its uses."""
    return _materialize_p.bind(x)


def materialize_equal(x: jax.Array, source: jax.Array) -> jax.Array:
    """Computes an array once for all of its uses and for those of equal ones of an equal source.

    A compiler merges equal computations, but no two loops of `materialize`.
    """
    return _materialize_equal_p.bind(x, lax.stop_gradient(source))


def updates_stored(are_stored: bool) -> AbstractContextManager[None]:
    """Traces clients whose updates will be materialized, if so, to be clipped."""
    return traced_with(_ARE_STORED, are_stored)


def as_stored(update: trees.PyTree) -> trees.PyTree:
    """Returns an update as clipping materializes it, if it does, for what is computed of it.

    An accelerator then computes that and the norm of clipping in one pass: equal expressions of an
    array that is materialized twice are one. On a CPU nothing changes.
    """
    is_read_once = _ARE_STORED.get() and backend() != "cpu"
    return jax.tree.map(materialize, update) if is_read_once else update


def _until_unknown(x: jax.Array) -> jax.Array:
    return _through_a_loop(x, lax.optimization_barrier(jnp.int32(0)))


def _until_read(x: jax.Array, source: jax.Array) -> jax.Array:
    """Reads the count of no steps off the first number of the source, by an equal expression.

    No float is above 0 after it is multiplied by 0; that is no identity of theirs, because of nan.
    """
    first = lax.slice(source, (0,) * source.ndim, (1,) * source.ndim).reshape(())
    return _through_a_loop(x, (first * 0 > 0).astype(jnp.int32))


def _through_a_loop(x: jax.Array, no_steps: jax.Array) -> jax.Array:
    """Passes an array through a loop of no steps, a count that the compiler cannot know."""

    def step(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        i, x = carry
        return i + 1, -x

    return lax.while_loop(lambda carry: carry[0] < no_steps, step, (jnp.int32(0), x))[1]


_materialize_p: jaxprs.Primitive = jaxprs.define(
    "materialize",
    lax.optimization_barrier,
    on={"cpu": _until_unknown},
    eager=lambda x: x,
    abstract=lambda x: x,
    batch=lambda operands, axes: (_materialize_p.bind(*operands), axes[0]),
    transpose=lambda cotangent, _: [_materialize_p.bind(cotangent)],
)

_materialize_equal_p: jaxprs.Primitive = jaxprs.define(
    "materialize_equal",
    lambda x, source: lax.optimization_barrier(x),
    on={"cpu": _until_read},
    eager=lambda x, source: x,
    abstract=lambda x, source: x,
    batch=lambda operands, axes: (_materialize_equal_p.bind(*operands), axes[0]),
    transpose=lambda cotangent, x, source: [_materialize_p.bind(cotangent), None],
)
