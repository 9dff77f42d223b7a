"""Products with matrices of few outputs, whose gradients are computed transposed.

The gradient of a matrix sums products of inputs and cotangents over the rows of a batch, or over
the patches of a convolution. CPU libraries compute it faster if the shorter axis comes first in the
result.
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
    if eqn.primitive.name != "dot_general" or not jaxprs.has_parameters(eqn):
        return False
    operands: list[Any] = [v.aval for v in eqn.invars]
    x, w = (a.shape for a in operands)
    contracted, batched = eqn.params["dimension_numbers"]
    is_dense = len(w) == 2 and contracted == ((len(x) - 1,), (0,)) and not any(batched)
    return is_dense and any(n != 1 for n in x[:-1]) and _has_few_outputs(w)


def multiply(eqn: jaxprs.JaxprEqn, x: Any, w: Any) -> list[jax.Array]:
    """Evaluates a narrow product, its kernel marked."""
    return jaxprs.evaluate_equation(eqn, x, marked(w))


def marked(matrix: jax.Array) -> jax.Array:
    """Marks a matrix `[inputs, outputs]` if it has few outputs; returns any other as it is."""
    return _marked_p.bind(matrix) if _has_few_outputs(matrix.shape) else matrix


def _has_few_outputs(shape: tuple[int, ...]) -> bool:
    """Decides whether the gradient of a matrix of this shape is faster transposed."""
    inputs, outputs = shape
    return choices(facts()).has_caches and outputs <= min(inputs, _MOST_OUTPUTS)


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
