"""Counts the arithmetic of a model's forward pass."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr

from fedjax_dp.models.base import Model


def forward_operations(model: Model, shape: tuple[int, ...], dtype: Any = jnp.float32) -> float:
    """Counts floating-point operations of matrix products and convolutions for one example.

    A training step costs about three times as much: the backward pass multiplies twice for each
    product.

    Args:
      model: the model.
      shape: shape of one input.
      dtype: type of the inputs.

    Returns:
      The number of operations, a multiplication and an addition counting as two.
    """
    params = jax.eval_shape(model.init, jax.random.key(0))
    return cost_of(model.predict, params, jax.ShapeDtypeStruct((1, *shape), dtype)).operations


class Cost(NamedTuple):
    """What a function takes, as its trace tells.

    Attributes:
      operations: floating-point operations of matrix products and convolutions.
      largest_bytes: size of the largest value that is computed on the way.
    """

    operations: float
    largest_bytes: int


def cost_of(fn: Callable[..., Any], *arguments: Any) -> Cost:
    """Counts what a function computes; the body of a loop whose length is not static counts once.

    Args:
      fn: a function of pytrees; it is traced and not run.
      *arguments: arrays or their shapes.

    Returns:
      Its cost.
    """
    return _cost(jax.make_jaxpr(fn)(*arguments).jaxpr)


def _cost(jaxpr: Jaxpr) -> Cost:
    total, largest = 0.0, 0
    for eqn in jaxpr.eqns:
        repeats = eqn.params.get("length", 1) if eqn.primitive.name == "scan" else 1
        for value in eqn.params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                if isinstance(inner, ClosedJaxpr | Jaxpr):
                    body = _cost(inner.jaxpr if isinstance(inner, ClosedJaxpr) else inner)
                    total += repeats * body.operations
                    largest = max(largest, body.largest_bytes)
        largest = max([largest, *map(_num_bytes, eqn.outvars)])
        if eqn.primitive.name == "dot_general":
            ((contracted, _), _) = eqn.params["dimension_numbers"]
            lhs, out = _shape(eqn.invars[0]), _shape(eqn.outvars[0])
            total += 2 * math.prod(out) * math.prod(lhs[i] for i in contracted)
        elif eqn.primitive.name == "conv_general_dilated":
            kernel, out = _shape(eqn.invars[1]), _shape(eqn.outvars[0])
            features = eqn.params["dimension_numbers"].rhs_spec[0]
            total += 2 * math.prod(out) * math.prod(kernel) / kernel[features]
    return Cost(total, largest)


def _num_bytes(v: Any) -> int:
    # Random keys have a type of their own, without a size.
    size = getattr(v.aval.dtype, "itemsize", 4) if hasattr(v.aval, "dtype") else 0
    return math.prod(_shape(v)) * size if size else 0


def _shape(v: Any) -> tuple[int, ...]:
    return tuple(v.aval.shape)
