"""Window reductions as slices and elementwise operations, one dimension after another."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


def reduce_window_sum(operand: jax.Array, **params: Any) -> jax.Array:
    """Sums over windows as the primitive of the same name does.

    Args:
      operand: an array of any shape.
      **params: the parameters of the primitive, one entry a dimension.

    Returns:
      The sums, one a window.
    """
    return _reduce(operand, jnp.zeros((), operand.dtype), _sum_taps, **params)


def reduce_window_max(operand: jax.Array, **params: Any) -> jax.Array:
    """Takes maxima over windows; the first of equal entries receives the gradient.

    Args:
      operand: an array of any shape.
      **params: the parameters of the primitive, one entry a dimension.

    Returns:
      The maxima, one a window.
    """
    return _reduce(operand, _lowest(operand.dtype), _max_taps, **params)


def reduce_window_min(operand: jax.Array, **params: Any) -> jax.Array:
    """Takes minima over windows; the first of equal entries receives the gradient.

    Args:
      operand: an array of any shape.
      **params: the parameters of the primitive, one entry a dimension.

    Returns:
      The minima, one a window.
    """
    return _reduce(operand, _highest(operand.dtype), _min_taps, **params)


def select_and_scatter_add(
    source: jax.Array,
    operand: jax.Array,
    *,
    select_prim: Any,
    window_dimensions: Sequence[int],
    window_strides: Sequence[int],
    padding: Sequence[tuple[int, int]],
) -> jax.Array:
    """Sends each source entry to the selected entry of its window, as the primitive does.

    Args:
      source: the cotangent of a pool, one entry a window.
      operand: the input of the pool.
      select_prim: the comparison that selects, `ge` for maxima and `le` for minima.
      window_dimensions: the window's size in each dimension.
      window_strides: the window's stride in each dimension.
      padding: (low, high) of each dimension.

    Returns:
      An array shaped like `operand`.
    """
    ones = (1,) * operand.ndim
    pool = functools.partial(
        reduce_window_max if select_prim.name == "ge" else reduce_window_min,
        window_dimensions=window_dimensions,
        window_strides=window_strides,
        padding=padding,
        base_dilation=ones,
        window_dilation=ones,
    )
    _, pullback = jax.vjp(pool, operand)
    return pullback(source)[0]


def _reduce(
    x: jax.Array,
    identity: jax.Array,
    reduce_taps: Any,
    *,
    window_dimensions: Sequence[int],
    window_strides: Sequence[int],
    padding: Sequence[tuple[int, int]],
    base_dilation: Sequence[int],
    window_dilation: Sequence[int],
    **_: Any,
) -> jax.Array:
    config = tuple((*p, d - 1) for p, d in zip(padding, base_dilation, strict=True))
    if any(any(c) for c in config):
        x = lax.pad(x, identity, config)
    # Last dimension first: the first maximum of a row, then the first row, is the first maximum.
    for axis in reversed(range(x.ndim)):
        size, stride = window_dimensions[axis], window_strides[axis]
        dilation = window_dilation[axis]
        if size == 1 and stride == 1:
            continue
        count = max((x.shape[axis] - (size - 1) * dilation - 1) // stride + 1, 0)
        span = (count - 1) * stride + 1 if count else 0
        x = reduce_taps(
            [
                lax.slice_in_dim(x, i * dilation, i * dilation + span, stride, axis)
                for i in range(size)
            ]
        )
    return x


def _sum_taps(taps: list[jax.Array]) -> jax.Array:
    return functools.reduce(lax.add, taps)


@jax.custom_jvp
def _max_taps(taps: list[jax.Array]) -> jax.Array:
    return functools.reduce(lax.max, taps)


@_max_taps.defjvp
def _max_taps_jvp(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    return _select_taps(primals[0], tangents[0], lax.gt)


@jax.custom_jvp
def _min_taps(taps: list[jax.Array]) -> jax.Array:
    return functools.reduce(lax.min, taps)


@_min_taps.defjvp
def _min_taps_jvp(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    return _select_taps(primals[0], tangents[0], lax.lt)


def _select_taps(
    taps: list[jax.Array], tangents: list[jax.Array], better: Any
) -> tuple[jax.Array, jax.Array]:
    """Chooses the first best tap and the tangent that belongs to it."""
    best, tangent = taps[0], tangents[0]
    for tap, t in zip(taps[1:], tangents[1:], strict=True):
        replace = better(tap, best)
        best, tangent = lax.select(replace, tap, best), lax.select(replace, t, tangent)
    return best, tangent


def _lowest(dtype: Any) -> jax.Array:
    if jnp.issubdtype(dtype, jnp.inexact):
        return jnp.array(-jnp.inf, dtype)
    return jnp.array(np.iinfo(dtype).min if dtype != jnp.bool_ else False, dtype)


def _highest(dtype: Any) -> jax.Array:
    if jnp.issubdtype(dtype, jnp.inexact):
        return jnp.array(jnp.inf, dtype)
    return jnp.array(np.iinfo(dtype).max if dtype != jnp.bool_ else True, dtype)
