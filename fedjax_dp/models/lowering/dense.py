"""Dense layers with few outputs, whose gradients are computed transposed.

The gradient of a kernel sums products of inputs and cotangents over the rows of a batch. CPU
libraries compute it faster if the shorter axis comes first in the result.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fedjax_dp.core import jaxprs
from fedjax_dp.core.backend import facts
from fedjax_dp.core.choices import choices

# An identity, which marks a matrix whose gradient is computed transposed.
NAME = "transposed_gradient"
# Measured: with 63 it gains or loses, with 100 it loses (benchmarks/notes.md, "Narrow products").
_MOST_OUTPUTS = 32


def is_narrow(eqn: jaxprs.JaxprEqn) -> bool:
    """Decides whether an equation multiplies rows by a kernel with few outputs."""
    if eqn.primitive.name != "dot_general" or not choices(facts()).has_caches:
        return False
    if not jaxprs.has_parameters(eqn):
        return False
    operands: list[Any] = [v.aval for v in eqn.invars]
    x, w = (a.shape for a in operands)
    contracted, batched = eqn.params["dimension_numbers"]
    is_dense = len(w) == 2 and contracted == ((len(x) - 1,), (0,)) and not any(batched)
    return is_dense and any(n != 1 for n in x[:-1]) and w[1] <= min(w[0], _MOST_OUTPUTS)


def multiply(eqn: jaxprs.JaxprEqn, x: Any, w: Any) -> list[jax.Array]:
    """Evaluates a narrow product, its kernel marked."""
    return jaxprs.evaluate_equation(eqn, x, _marked_p.bind(w))


def _transposed(gradient: jax.Array) -> jax.Array:
    """Transposes twice around a barrier, so that a product is computed transposed."""
    return jnp.swapaxes(lax.optimization_barrier(jnp.swapaxes(gradient, -1, -2)), -1, -2)


_marked_p: jaxprs.Primitive = jaxprs.define(
    NAME,
    lambda w: w,
    eager=lambda w: w,
    abstract=lambda w: w,
    batch=lambda operands, axes: (_marked_p.bind(jnp.moveaxis(operands[0], axes[0], 0)), 0),
    transpose=lambda cotangent, _: [_transposed(cotangent)],
)
