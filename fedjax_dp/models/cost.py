"""Counts the arithmetic of a model."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_dp.core import jaxprs
from fedjax_dp.core.trees import PyTree
from fedjax_dp.models.base import Model
from fedjax_dp.models.lowering import kernels, narrow, winograd


class Cost(NamedTuple):
    """The cost of a function, as counted on its jaxpr."""

    # Of products and convolutions as they are computed; a multiplication and an addition are two.
    operations: float
    # With each convolution a direct sum; exact for traces without gradients and batched kernels.
    direct_operations: float
    largest_bytes: int  # Of the largest value that is computed.
    convolved: float = 0.0  # Of the operations, those of native convolutions.
    products: int = 0  # The number of products and convolutions, of any form.


def training_cost(
    model: Model, shape: tuple[int, ...], batch_size: int = 1, dtype: Any = jnp.float32
) -> Cost:
    """Counts the arithmetic of a training step for one example, at the given batch size.

    `operations` are those of a forward and a backward pass; `direct_operations` are those of three
    forward passes with direct sums, so that implementations can be compared.
    """
    params = jax.eval_shape(model.init, jax.random.key(0))
    batch = jax.ShapeDtypeStruct((batch_size, *shape), dtype)

    def total(params: PyTree, batch: jax.Array) -> jax.Array:
        return jnp.sum(model.predict(params, batch))

    forward, both = cost_of(total, params, batch), cost_of(jax.grad(total), params, batch)
    return Cost(
        both.operations / batch_size, 3 * forward.direct_operations / batch_size, both.largest_bytes
    )


def cost_of(fn: Callable[..., Any], *arguments: Any) -> Cost:
    """Counts what a function computes; a loop whose length is not static counts once."""
    return cost_of_jaxpr(jax.make_jaxpr(fn)(*arguments))


def cost_of_jaxpr(closed: jaxprs.ClosedJaxpr) -> Cost:
    """Counts what a traced function computes, as `cost_of`."""
    return _cost(closed)


def _cost(closed: jaxprs.ClosedJaxpr) -> Cost:
    total, direct, largest, convolved, products = 0.0, 0.0, 0, 0.0, 0
    for eqn in closed.jaxpr.eqns:
        structure = jaxprs.layout(eqn)
        repeats = structure.options["length"] if isinstance(structure, jaxprs.Scan) else 1
        inside = 0.0
        for body in map(_cost, jaxprs.inner_jaxprs(eqn)):
            total += repeats * body.operations
            convolved += repeats * body.convolved
            products += repeats * body.products
            inside += repeats * body.direct_operations
            largest = max(largest, body.largest_bytes)
        largest = max([largest, *map(_num_bytes, eqn.outvars)])
        own, share = 0.0, 1.0
        is_known = jaxprs.has_parameters(eqn)
        if eqn.primitive.name == "dot_general" and is_known:
            ((contracted, _), _) = eqn.params["dimension_numbers"]
            lhs, out = _shape(eqn.invars[0]), _shape(eqn.outvars[0])
            own = 2 * math.prod(out) * math.prod(lhs[i] for i in contracted)
        elif eqn.primitive.name == "conv_general_dilated" and is_known:
            kernel, out = _shape(eqn.invars[1]), _shape(eqn.outvars[0])
            features = eqn.params["dimension_numbers"].rhs_spec[0]
            own = 2 * math.prod(out) * math.prod(kernel) / kernel[features]
        elif eqn.primitive.name in (kernels.NAME, kernels.GRADIENT):
            kernel, result = _shape(eqn.invars[1]), _shape(eqn.outvars[0])
            if eqn.primitive.name == kernels.GRADIENT:
                kernel, result = result, kernel
            own = 2 * math.prod(result) * math.prod(kernel[1:-1])
        elif eqn.primitive.name in (narrow.NAME, winograd.NAME):
            result, kernel = _shape(eqn.outvars[0]), _shape(eqn.invars[1])
            entries = math.prod(kernel) // max(1, result[-1])
            own = 2 * math.prod(result) * entries
            if eqn.primitive.name == narrow.NAME:
                # Its patches are not in the trace.
                largest = max(largest, _num_bytes(eqn.outvars[0]) // max(1, result[-1]) * entries)
            else:
                share = winograd.share_of_direct(*(v.aval for v in eqn.invars), **eqn.params)
        convolved += own if eqn.primitive.name == "conv_general_dilated" else 0.0
        products += own > 0
        total += own * share
        direct += own + inside
    return Cost(total, direct, largest, convolved, products)


def _num_bytes(v: Any) -> int:
    # Random keys have a type of their own, without a size.
    size = getattr(v.aval.dtype, "itemsize", 4) if hasattr(v.aval, "dtype") else 0
    return math.prod(_shape(v)) * size if size else 0


def _shape(v: Any) -> tuple[int, ...]:
    return tuple(v.aval.shape)
