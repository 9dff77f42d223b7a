"""Window reductions as slices and elementwise operations, one dimension after another."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fedjax_dp.core import trees

# Windows up to this long are unrolled into slices; longer ones are gathered and reduced.
_LONGEST_UNROLLED = 16


class _Operation(NamedTuple):
    """A reduction, over a list of arrays or along one dimension of a single one."""

    identity: Callable[[Any], jax.Array]
    unrolled: Callable[[list[jax.Array]], jax.Array]
    gathered: Callable[[jax.Array, int], jax.Array]


def reduce_window_sum(operand: jax.Array, **params: Any) -> jax.Array:
    """Sums over windows as the primitive of the same name does, in float32 or better."""
    wide = trees.at_least_float32(operand)
    return _reduce(wide, _SUM, **params).astype(operand.dtype)


def reduce_window_max(operand: jax.Array, **params: Any) -> jax.Array:
    """Takes maxima over windows; the first of equal entries receives the gradient."""
    return _reduce(operand, _MAX, **params)


def reduce_window_min(operand: jax.Array, **params: Any) -> jax.Array:
    """Takes minima over windows; the first of equal entries receives the gradient."""
    is_inexact = jnp.issubdtype(operand.dtype, jnp.inexact)
    reverse = lax.neg if is_inexact else lax.bitwise_not
    return reverse(reduce_window_max(reverse(operand), **params))


def select_and_scatter_add(
    source: jax.Array, operand: jax.Array, *, select_prim: Any, **params: Any
) -> jax.Array:
    """Sends each source entry to the selected entry of its window, as the primitive does."""
    ones = (1,) * operand.ndim
    params = {"base_dilation": ones, "window_dilation": ones, **params}
    _, pullback = jax.vjp(lambda x: _selected(select_prim)(x, **params), operand)
    return pullback(source)[0]


def select_and_gather_add(
    tangents: jax.Array, operand: jax.Array, *, select_prim: Any, **params: Any
) -> jax.Array:
    """Takes the tangent of the selected entry of every window, as the primitive does."""
    return jax.jvp(lambda x: _selected(select_prim)(x, **params), (operand,), (tangents,))[1]


def _selected(select_prim: Any) -> Callable[..., jax.Array]:
    return reduce_window_max if select_prim is lax.ge_p else reduce_window_min


def _reduce(
    x: jax.Array,
    operation: _Operation,
    *,
    window_dimensions: Sequence[int],
    window_strides: Sequence[int],
    padding: Sequence[tuple[int, int]],
    base_dilation: Sequence[int],
    window_dilation: Sequence[int],
) -> jax.Array:
    config = [(*p, d - 1) for p, d in zip(padding, base_dilation, strict=True)]
    if any(map(any, config)):
        x = lax.pad(x, operation.identity(x.dtype), config)
    # Last dimension first: the first maximum of a row, then the first row, is the first maximum.
    for axis in reversed(range(x.ndim)):
        size, stride, dilation = (
            window_dimensions[axis],
            window_strides[axis],
            window_dilation[axis],
        )
        count = max((x.shape[axis] - (size - 1) * dilation - 1) // stride + 1, 0)
        if size > _LONGEST_UNROLLED:
            x = operation.gathered(_gather(x, axis, size, stride, dilation, count), axis + 1)
        elif size > 1 or stride > 1:
            span = (count - 1) * stride + 1 if count else 0
            starts = [i * dilation if count else 0 for i in range(size)]
            x = operation.unrolled(
                [lax.slice_in_dim(x, start, start + span, stride, axis) for start in starts]
            )
    return x


def _gather(
    x: jax.Array, axis: int, size: int, stride: int, dilation: int, count: int
) -> jax.Array:
    """Splits one dimension into windows and their entries."""
    if dilation == 1 and (stride == size or count == 1):
        x = lax.slice_in_dim(x, 0, count * size, 1, axis)
        return x.reshape(*x.shape[:axis], count, size, *x.shape[axis + 1 :])
    index = np.arange(count)[:, None] * stride + np.arange(size) * dilation
    return jnp.take(x, index, axis=axis)


def _sum_unrolled(taps: list[jax.Array]) -> jax.Array:
    return functools.reduce(lax.add, taps)


@jax.custom_jvp
def _max_unrolled(taps: list[jax.Array]) -> jax.Array:
    return functools.reduce(lax.max, taps)


@_max_unrolled.defjvp
def _max_unrolled_jvp(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    (best, *rest), (tangent, *rest_tangents) = primals[0], tangents[0]
    for tap, t in zip(rest, rest_tangents, strict=True):
        tangent = lax.select(lax.gt(tap, best), t, tangent)
        best = lax.max(best, tap)
    return best, tangent


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _max_gathered(windows: jax.Array, axis: int) -> jax.Array:
    return jnp.max(windows, axis)


@_max_gathered.defjvp
def _max_gathered_jvp(axis: int, primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    (windows,), (tangent,) = primals, tangents
    first = jnp.expand_dims(lax.argmax(windows, axis, jnp.int32), axis)
    is_first = lax.broadcasted_iota(jnp.int32, windows.shape, axis) == first
    return jnp.max(windows, axis), jnp.sum(jnp.where(is_first, tangent, 0), axis)


def _zero(dtype: Any) -> jax.Array:
    return jnp.zeros((), dtype)


def _lowest(dtype: Any) -> jax.Array:
    if jnp.issubdtype(dtype, jnp.inexact):
        return jnp.array(-jnp.inf, dtype)
    return jnp.array(False if dtype == jnp.bool_ else jnp.iinfo(dtype).min, dtype)


_SUM = _Operation(_zero, _sum_unrolled, jnp.sum)
_MAX = _Operation(_lowest, _max_unrolled, _max_gathered)
