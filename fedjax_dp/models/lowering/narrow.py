"""Convolution with few outputs for the size of its kernel: patches forwards, rows backwards.

A patch repeats every entry of the input once for each entry of the kernel. Forwards one product of
patches gives the result as a whole, for whoever reads it. Backwards, patches would be summed; there
a convolution is taken as what each *row* of the kernel adds, with patches of one row alone, whose
gradients are several times smaller. Which of the two is meant depends on what is differentiated, so
that the convolution is a primitive.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from fedjax_dp.models.lowering.patches import Window, gather_patches, scatter_patches

NAME = "narrow_convolution"
# With more outputs, putting the kernel in another order costs more than smaller patches bring.
_MOST_OUTPUTS = 63


def is_faster(w: jax.Array, window: Window) -> bool:
    """Tells whether patches of rows, in and out, are smaller than whole ones, of a narrow kernel.

    Args:
      w: `[*kernel, inputs, outputs]`.
      window: how the kernel walks.

    Returns:
      Whether to call `convolve`, for arrays of float32 or float64.
    """
    size, *row, inputs, outputs = w.shape
    is_plain = len(row) > 0 and max(window.strides) == max(window.dilation) == 1
    in_rows, whole = math.prod(row) * inputs, size * math.prod(row) * inputs
    return is_plain and outputs <= _MOST_OUTPUTS and in_rows + size * outputs < whole


def convolve(x: jax.Array, w: jax.Array, padding: tuple[int, int]) -> jax.Array:
    """Convolves with stride 1.

    Args:
      x: `[batch, *spatial, inputs]`, padded in all spatial dimensions but the first.
      w: `[*kernel, inputs, outputs]`.
      padding: of the first spatial dimension, negative to crop.

    Returns:
      `[batch, *positions, outputs]`.
    """
    return _convolve_p.bind(x, w, padding=tuple(padding))


def patches_of(x: jax.Array, kernel: tuple[int, ...], padding: tuple[int, int]) -> jax.Array:
    """Gathers what every output reads.

    Args:
      x: the input of `convolve`.
      kernel: the shape of the kernel.
      padding: of the first spatial dimension.

    Returns:
      `[batch, *positions, entries * inputs]`.
    """
    return gather_patches(_pad_first(x, padding), _window(kernel))


def _window(kernel: tuple[int, ...]) -> Window:
    ones = (1,) * len(kernel)
    return Window(tuple(kernel), ones, ones)


def _pad_first(x: jax.Array, padding: tuple[int, int]) -> jax.Array:
    config = [(0, 0, 0), (*padding, 0), *[(0, 0, 0)] * (x.ndim - 2)]
    return lax.pad(x, jnp.zeros((), x.dtype), config) if any(padding) else x


def _by_patches(x: jax.Array, w: jax.Array, *, padding: tuple[int, int]) -> jax.Array:
    patches = patches_of(x, w.shape[:-2], padding)
    return _multiply(patches, w.reshape(-1, w.shape[-1]))


def _by_rows(x: jax.Array, w: jax.Array, *, padding: tuple[int, int]) -> jax.Array:
    size, *row, inputs, outputs = w.shape
    rows = gather_patches(x, _window((1, *row)))
    matrix = jnp.moveaxis(jnp.flip(w, 0), 0, -2).reshape(math.prod(row) * inputs, size * outputs)
    sizes = (x.shape[1] + size - 1, *rows.shape[2:-1])
    out = scatter_patches(_multiply(rows, matrix), _window((size, *[1] * len(row))), sizes)
    return _pad_first(out, (padding[0] - size + 1, padding[1] - size + 1))


def _multiply(x: jax.Array, matrix: jax.Array) -> jax.Array:
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    return (rows @ matrix).reshape(*x.shape[:-1], matrix.shape[-1])


def _shape(x: Any, w: Any, *, padding: tuple[int, int]) -> Any:
    first, *rest = x.shape[1:-1]
    sizes = (max(first + sum(padding), 0), *rest)
    return x.update(shape=(x.shape[0], *_window(w.shape[:-2]).positions(sizes), w.shape[-1]))


def _gradient_of_input(cotangent: Any, x: Any, w: Any, *, padding: tuple[int, int]) -> Any:
    forwards = functools.partial(_by_rows, w=w, padding=padding)
    return jax.linear_transpose(forwards, x.aval)(cotangent)[0]


def _gradient_of_kernel(cotangent: Any, x: Any, w: Any, *, padding: tuple[int, int]) -> Any:
    forwards = functools.partial(_by_rows, x, padding=padding)
    return jax.linear_transpose(forwards, w.aval)(cotangent)[0]


def _batch(operands: Any, axes: Any, *, padding: tuple[int, int]) -> tuple[jax.Array, int]:
    x, w = operands
    if axes[1] is not None:
        forwards = functools.partial(_by_patches, padding=padding)
        return jax.vmap(forwards, in_axes=tuple(axes))(x, w), 0
    x = jnp.moveaxis(x, axes[0], 0)
    out = convolve(x.reshape(x.shape[0] * x.shape[1], *x.shape[2:]), w, padding)
    return out.reshape(*x.shape[:2], *out.shape[1:]), 0


def _define() -> Primitive:
    primitive = Primitive(NAME)
    primitive.def_impl(jax.jit(_by_patches, static_argnames="padding"))
    primitive.def_abstract_eval(_shape)
    mlir.register_lowering(primitive, mlir.lower_fun(_by_patches, multiple_results=False))
    ad.defbilinear(primitive, _gradient_of_input, _gradient_of_kernel)
    batching.primitive_batchers[primitive] = _batch
    return primitive


_convolve_p = _define()
