"""Convolutions as primitives, with separate methods for the forward and backward pass.

The transpose of the fastest method for a result is not the fastest for its gradients; a primitive
defines a method for each. It is differentiable any number of times, since its gradients are made of
differentiable functions.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fedjax_dp.core import jaxprs
from fedjax_dp.models.lowering.patches import Window, gather_patches

Padding = tuple[tuple[int, int], ...]


def window_of(kernel: tuple[int, ...]) -> Window:
    """Describes how a kernel moves with stride 1."""
    ones = (1,) * len(kernel)
    return Window(tuple(kernel), ones, ones)


def channels_last(spec: Sequence[int]) -> tuple[int, ...]:
    """Orders the dimensions that a specification numbers, batch and feature first."""
    batch, feature, *spatial = spec
    return (batch, *spatial, feature)


def pad(
    x: jax.Array, padding: Sequence[tuple[int, int]], dilation: Sequence[int] = ()
) -> jax.Array:
    """Pads, crops and dilates the first spatial dimensions of `[batch, *spatial, features]`."""
    holes = [d - 1 for d in dilation] or [0] * len(padding)
    config = [(0, 0, 0), *[(*ends, hole) for ends, hole in zip(padding, holes, strict=True)]]
    config += [(0, 0, 0)] * (x.ndim - len(config))
    return lax.pad(x, jnp.zeros((), x.dtype), config) if any(map(any, config)) else x


def patches_of(x: jax.Array, kernel: tuple[int, ...], padding: Padding) -> jax.Array:
    """Gathers the inputs of every output, `[batch, *positions, entries * inputs]`."""
    return gather_patches(pad(x, padding), window_of(kernel))


def shape_of(x: Any, w: Any, *, padding: Padding) -> tuple[int, ...]:
    """Returns the shape of the output of a convolution with stride 1."""
    *kernel, _inputs, outputs = w.shape
    ends = [*map(sum, padding), *[0] * (len(kernel) - len(padding))]
    sizes = zip(x.shape[1:-1], ends, kernel, strict=True)
    return (x.shape[0], *[max(size + end - k + 1, 0) for size, end, k in sizes], outputs)


def define(
    name: str,
    shape: Callable[..., tuple[int, ...]],
    convolve: Callable[..., jax.Array],
    gradient_of_input: Callable[..., jax.Array],
    gradient_of_kernel: Callable[..., jax.Array],
) -> jaxprs.Primitive:
    """Defines a convolution with stride 1 of `[batch, *spatial, in]` and `[*kernel, in, out]`.

    All functions also get the primitive's parameters, with `padding` (negative to crop); each
    gradient gets the cotangent, then input and kernel, one of the two as a shape.
    """

    def abstract(x: Any, w: Any, **params: Any) -> Any:
        return x.update(shape=shape(x, w, **params))

    def batch(operands: Any, axes: Any, **params: Any) -> tuple[jax.Array, int]:
        x, w = operands
        if axes[1] is not None:
            return jax.vmap(lambda x, w: convolve(x, w, **params), in_axes=tuple(axes))(x, w), 0
        x = jnp.moveaxis(x, axes[0], 0)
        merged = x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])
        out = primitive.bind(merged, w, **params)
        return out.reshape(*x.shape[:2], *out.shape[1:]), 0

    def of_input(cotangent: Any, x: Any, w: Any, **params: Any) -> jax.Array:
        return gradient_of_input(cotangent, x.aval, w, **params)

    def of_kernel(cotangent: Any, x: Any, w: Any, **params: Any) -> jax.Array:
        return gradient_of_kernel(cotangent, x, w.aval, **params)

    primitive = jaxprs.define(
        name, convolve, abstract=abstract, batch=batch, gradients=(of_input, of_kernel)
    )
    return primitive
