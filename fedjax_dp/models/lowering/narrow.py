"""Convolution with few outputs relative to its kernel: patches forwards, rows backwards.

A patch repeats every entry of the input once for each entry of the kernel. Forwards one product of
patches gives the result as a whole, for all of its readers. Backwards, patches would be summed;
there a convolution is taken as what each *row* of the kernel adds, with patches of one row alone,
whose gradients are several times smaller. Which form is used depends on what is differentiated, so
that the convolution is a primitive.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_dp.models.lowering import bilinear
from fedjax_dp.models.lowering.bilinear import Padding
from fedjax_dp.models.lowering.patches import Window, gather_patches, scatter_patches

NAME = "narrow_convolution"
# With more outputs, reordering the kernel costs more than smaller patches gain.
_MOST_OUTPUTS = 63


def is_faster(w: jax.Array, window: Window) -> bool:
    """Decides whether patches of rows, in and out, are smaller than whole ones."""
    size, *row, inputs, outputs = w.shape
    is_plain = len(row) > 0 and max(window.strides) == max(window.dilation) == 1
    in_rows, whole = math.prod(row) * inputs, size * math.prod(row) * inputs
    return is_plain and outputs <= _MOST_OUTPUTS and in_rows + size * outputs < whole


def convolve(x: jax.Array, w: jax.Array, padding: tuple[int, int]) -> jax.Array:
    """Convolves with stride 1."""
    return _convolve_p.bind(x, w, padding=(tuple(padding),))


def _by_patches(x: jax.Array, w: jax.Array, *, padding: Padding) -> jax.Array:
    patches = bilinear.patches_of(x, w.shape[:-2], padding)
    return _multiply(patches, w.reshape(-1, w.shape[-1]))


def _by_rows(x: jax.Array, w: jax.Array, *, padding: Padding) -> jax.Array:
    size, *row, inputs, outputs = w.shape
    ((low, high),) = padding
    rows = gather_patches(x, bilinear.window_of((1, *row)))
    matrix = jnp.moveaxis(jnp.flip(w, 0), 0, -2).reshape(math.prod(row) * inputs, size * outputs)
    sizes = (x.shape[1] + size - 1, *rows.shape[2:-1])
    added = _multiply(rows, matrix)
    out = scatter_patches(added, bilinear.window_of((size, *[1] * len(row))), sizes)
    return bilinear.pad(out, ((low - size + 1, high - size + 1),))


def _multiply(x: jax.Array, matrix: jax.Array) -> jax.Array:
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    return (rows @ matrix).reshape(*x.shape[:-1], matrix.shape[-1])


def _gradient_of_input(cotangent: jax.Array, x: Any, w: jax.Array, *, padding: Padding) -> Any:
    forwards = functools.partial(_by_rows, w=w, padding=padding)
    return jax.linear_transpose(forwards, x)(cotangent)[0]


def _gradient_of_kernel(cotangent: jax.Array, x: jax.Array, w: Any, *, padding: Padding) -> Any:
    forwards = functools.partial(_by_rows, x, padding=padding)
    return jax.linear_transpose(forwards, w)(cotangent)[0]


_convolve_p = bilinear.define(
    NAME, bilinear.shape_of, _by_patches, _gradient_of_input, _gradient_of_kernel
)
