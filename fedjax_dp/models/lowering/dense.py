"""Dense layers with few outputs, whose gradients are computed transposed.

The gradient of a matrix is a product of two tall matrices, and CPU libraries run it faster if a
narrow side comes first in its result.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fedjax_dp.core import jaxprs
from fedjax_dp.core.backend import facts
from fedjax_dp.core.choices import choices

# An identity, which marks a matrix whose gradient is computed transposed.
NAME = "transposed_gradient"
# With more outputs, transposing the gradient back costs more than it gains.
_MOST_OUTPUTS = 63


def is_narrow(eqn: jaxprs.JaxprEqn) -> bool:
    """Decides whether an equation multiplies rows by a matrix with few outputs for its inputs."""
    if eqn.primitive.name != "dot_general" or not choices(facts()).has_caches:
        return False
    operands: list[Any] = [v.aval for v in eqn.invars]
    x, w = (a.shape for a in operands)
    contracted, batched = eqn.params["dimension_numbers"]
    is_dense = len(w) == 2 and contracted == ((len(x) - 1,), (0,)) and not any(batched)
    return is_dense and math.prod(x[:-1]) > 1 and w[1] <= min(w[0], _MOST_OUTPUTS)


def multiply(eqn: jaxprs.JaxprEqn, x: Any, w: Any) -> list[jax.Array]:
    """Evaluates such an equation."""
    return jaxprs.evaluate_equation(eqn, x, _marked_p.bind(w))


def _transposed(gradient: jax.Array) -> jax.Array:
    """Keeps the compiler from computing a gradient in its final order."""
    return jnp.swapaxes(lax.optimization_barrier(jnp.swapaxes(gradient, -1, -2)), -1, -2)


_marked_p: jaxprs.Primitive = jaxprs.define(
    NAME,
    lambda w: w,
    eager=lambda w: w,
    abstract=lambda w: w,
    batch=lambda operands, axes: (_marked_p.bind(jnp.moveaxis(operands[0], axes[0], 0)), 0),
    transpose=lambda cotangent, _: [_transposed(cotangent)],
)
