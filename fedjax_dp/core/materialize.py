"""Arrays that a compiled program computes once, however many read them.

A compiler fuses what only adds, multiplies, slices or pads into each of its readers, and so
computes it once for every reader. That takes time, and it may round otherwise for one reader than
for another: a norm would not be that of what is summed. On a CPU a barrier does not prevent it,
since XLA removes it before fusion there. What a loop carries is never fused into its readers.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir


def materialize(x: jax.Array) -> jax.Array:
    """Has an array, and its cotangent, computed once for all of its readers."""
    return _materialize_p.bind(x)


def _through_a_loop(x: jax.Array) -> jax.Array:
    """Passes an array through a loop of no steps, which the compiler cannot know."""
    no_steps = lax.optimization_barrier(jnp.int32(0))

    def step(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        i, x = carry
        return i + 1, -x

    return lax.while_loop(lambda carry: carry[0] < no_steps, step, (jnp.int32(0), x))[1]


def _define() -> Primitive:
    primitive = Primitive("materialize")

    def batch(operands: Any, axes: Any) -> tuple[jax.Array, Any]:
        return primitive.bind(*operands), axes[0]

    def transpose(cotangent: Any, _: Any) -> list[Any]:
        return [primitive.bind(cotangent)]

    primitive.def_impl(lambda x: x)
    primitive.def_abstract_eval(lambda x: x)
    mlir.register_lowering(
        primitive, mlir.lower_fun(lax.optimization_barrier, multiple_results=False)
    )
    mlir.register_lowering(
        primitive, mlir.lower_fun(_through_a_loop, multiple_results=False), platform="cpu"
    )
    ad.deflinear2(primitive, transpose)
    batching.primitive_batchers[primitive] = batch
    return primitive


_materialize_p = _define()
