"""The linear map from an array to its patches, and its adjoint, as two primitives.

Each is the other's transpose. They are primitives, and not plain functions, because the fastest way
to sum patches is not what transposing the fastest way to gather them would give.
"""

import itertools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from fedjax_dp.core import jaxprs, trees


class Window(NamedTuple):
    """How a kernel moves over an array that is padded already, for each spatial dimension."""

    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    dilation: tuple[int, ...]

    def positions(self, sizes: tuple[int, ...]) -> tuple[int, ...]:
        """Counts the positions at which the kernel fits, for each spatial dimension."""
        return tuple(
            max((n - (k - 1) * d - 1) // s + 1, 0) for n, k, s, d in zip(sizes, *self, strict=True)
        )


def gather_patches(x: jax.Array, window: Window) -> jax.Array:
    """Maps `[..., *spatial, features]`, padded, to `[..., *positions, entries * features]`."""
    return _gather_p.bind(x, window=window)


def scatter_patches(patches: jax.Array, window: Window, sizes: tuple[int, ...]) -> jax.Array:
    """Sums patches into `[..., *sizes, features]`, the adjoint of `gather_patches`."""
    return _scatter_p.bind(patches, window=window, sizes=sizes)


def slices(x: jax.Array, window: Window, axis: int) -> list[jax.Array]:
    """Slices along one spatial dimension, once for every entry of the kernel."""
    kernel, stride, dilation = (sizes[axis] for sizes in window)
    position = x.ndim - 1 - len(window.kernel) + axis
    count = _count(x.shape[position], kernel, stride, dilation)
    if count == 0:
        return [lax.slice_in_dim(x, 0, 0, 1, position)] * kernel
    starts = [i * dilation for i in range(kernel)]
    span = (count - 1) * stride + 1
    return [lax.slice_in_dim(x, start, start + span, stride, position) for start in starts]


def _count(size: int, kernel: int, stride: int, dilation: int) -> int:
    return max((size - (kernel - 1) * dilation - 1) // stride + 1, 0)


def _gather(x: jax.Array, *, window: Window) -> jax.Array:
    # Last dimension first, so that the others copy in long runs what it has gathered. Stacking on
    # a new axis compiles to one loop; concatenating along the features does not.
    for axis in reversed(range(len(window.kernel))):
        pieces = slices(x, window, axis)
        stacked = jnp.stack(pieces, axis=-2)
        x = stacked.reshape(*stacked.shape[:-2], -1)
    return x


def _scatter(patches: jax.Array, *, window: Window, sizes: tuple[int, ...]) -> jax.Array:
    # A single sum over all entries compiles to one pass over the patches; it is taken in float32 or
    # better.
    num_spatial = len(sizes)
    num_batch = patches.ndim - 1 - num_spatial
    positions = patches.shape[num_batch:-1]
    wide = trees.at_least_float32(patches)
    entries = wide.reshape(*wide.shape[:-1], math.prod(window.kernel), -1)
    zero = jnp.zeros((), wide.dtype)
    total = None
    for entry, offsets in enumerate(itertools.product(*map(range, window.kernel))):
        config = [(0, 0, 0)] * num_batch
        for n, count, stride, dilation, offset in zip(
            sizes, positions, window.strides, window.dilation, offsets, strict=True
        ):
            span = (count - 1) * stride + 1 if count else 0
            config.append((offset * dilation, n - offset * dilation - span, stride - 1))
        placed = lax.pad(entries[..., entry, :], zero, [*config, (0, 0, 0)])
        total = placed if total is None else total + placed
    assert total is not None
    return total.astype(patches.dtype)


def _gather_shape(x: Any, *, window: Window) -> Any:
    *batch_and_sizes, features = x.shape
    split = len(batch_and_sizes) - len(window.kernel)
    positions = window.positions(tuple(batch_and_sizes[split:]))
    entries = math.prod(window.kernel)
    return x.update(shape=(*batch_and_sizes[:split], *positions, entries * features))


def _scatter_shape(patches: Any, *, window: Window, sizes: tuple[int, ...]) -> Any:
    batch = patches.shape[: patches.ndim - 1 - len(sizes)]
    features = patches.shape[-1] // math.prod(window.kernel)
    return patches.update(shape=(*batch, *sizes, features))


def _gather_transpose(cotangent: Any, x: Any, *, window: Window) -> list[Any]:
    shape = x.aval.shape
    sizes = shape[len(shape) - 1 - len(window.kernel) : -1]
    return [scatter_patches(cotangent, window, sizes)]


def _scatter_transpose(cotangent: Any, _: Any, *, window: Window, sizes: Any) -> list[Any]:
    del sizes
    return [gather_patches(cotangent, window)]


def _define(name: str, fn: Any, abstract: Any, transpose: Any) -> jaxprs.Primitive:
    def batch(operands: Any, axes: Any, **params: Any) -> tuple[jax.Array, int]:
        return primitive.bind(jnp.moveaxis(operands[0], axes[0], 0), **params), 0

    primitive = jaxprs.define(name, fn, abstract=abstract, batch=batch, transpose=transpose)
    return primitive


_gather_p = _define("gather_patches", _gather, _gather_shape, _gather_transpose)
_scatter_p = _define("scatter_patches", _scatter, _scatter_shape, _scatter_transpose)
