"""Convolution as patches and one GEMM."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def conv_general_dilated(
    lhs: jax.Array,
    rhs: jax.Array,
    *,
    window_strides: Sequence[int],
    padding: Sequence[tuple[int, int]],
    lhs_dilation: Sequence[int],
    rhs_dilation: Sequence[int],
    dimension_numbers: lax.ConvDimensionNumbers,
    feature_group_count: int = 1,
    batch_group_count: int = 1,
    precision: Any = None,
    preferred_element_type: Any = None,
    **_: Any,
) -> jax.Array:
    """Convolves as the primitive of the same name does, by slices and matrix products alone.

    Args:
      lhs: the input, laid out as `dimension_numbers` says.
      rhs: the kernel, laid out as `dimension_numbers` says.
      window_strides: the stride of each spatial dimension.
      padding: (low, high) of each spatial dimension, negative to crop.
      lhs_dilation: the dilation of the input in each spatial dimension.
      rhs_dilation: the dilation of the kernel in each spatial dimension.
      dimension_numbers: the positions of batch, feature and spatial dimensions.
      feature_group_count: the number of groups of input features.
      batch_group_count: the number of groups of the batch.
      precision: passed on to the matrix product.
      preferred_element_type: the type of the result, or None for that of the input.

    Returns:
      The convolution, laid out as `dimension_numbers` says.
    """
    result_type = preferred_element_type or lhs.dtype
    x = jnp.transpose(lhs, _channels_last(dimension_numbers.lhs_spec))
    w = jnp.transpose(rhs, _kernel_last(dimension_numbers.rhs_spec))
    groups = feature_group_count
    if batch_group_count > 1:
        groups = batch_group_count
        x = x.reshape(groups, -1, *x.shape[1:])
        x = jnp.moveaxis(x, 0, -2).reshape(*x.shape[1:-1], -1)
    config = tuple((*p, d - 1) for p, d in zip(padding, lhs_dilation, strict=True))
    x = lax.pad(x, jnp.zeros((), x.dtype), ((0, 0, 0), *config, (0, 0, 0)))
    out = _convolve(x, w, tuple(window_strides), tuple(rhs_dilation), groups, precision)
    out = out.astype(result_type)
    return jnp.transpose(out, _inverse(_channels_last(dimension_numbers.out_spec)))


def _channels_last(spec: Sequence[int]) -> tuple[int, ...]:
    batch, feature, *spatial = spec
    return (batch, *spatial, feature)


def _kernel_last(spec: Sequence[int]) -> tuple[int, ...]:
    output, inputs, *spatial = spec
    return (*spatial, inputs, output)


def _inverse(permutation: Sequence[int]) -> tuple[int, ...]:
    return tuple(permutation.index(i) for i in range(len(permutation)))


def _convolve(
    x: jax.Array,
    w: jax.Array,
    strides: tuple[int, ...],
    dilation: tuple[int, ...],
    groups: int,
    precision: Any,
) -> jax.Array:
    """Convolves a padded `[batch, *spatial, inputs]` with `[*kernel, inputs / groups, outputs]`."""
    *kernel, inputs, outputs = w.shape
    wide = jnp.promote_types(x.dtype, jnp.float32) if _is_narrow(x.dtype) else x.dtype
    patches = jnp.concatenate(_taps(x, tuple(kernel), strides, dilation), axis=-1)
    spatial = patches.shape[:-1]
    taps = math.prod(kernel)
    if groups == 1:
        matrix = w.reshape(taps * inputs, outputs)
        return lax.dot(
            patches.reshape(-1, taps * inputs),
            matrix,
            precision=precision,
            preferred_element_type=wide,
        ).reshape(*spatial, outputs)
    patches = patches.reshape(math.prod(spatial), taps, groups, inputs)
    matrix = w.reshape(taps, inputs, groups, outputs // groups)
    dims = (((1, 3), (0, 1)), ((2,), (2,)))
    out = lax.dot_general(patches, matrix, dims, precision, preferred_element_type=wide)
    return jnp.moveaxis(out, 0, 1).reshape(*spatial, outputs)


def _is_narrow(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32


def _taps(
    x: jax.Array, kernel: tuple[int, ...], strides: tuple[int, ...], dilation: tuple[int, ...]
) -> list[jax.Array]:
    """Slices the input once for every position of the kernel, in row-major order."""
    sizes = [
        max((n - (k - 1) * d - 1) // s + 1, 0)
        for n, k, s, d in zip(x.shape[1:-1], kernel, strides, dilation, strict=True)
    ]
    taps = [x]
    for axis, (k, s, d, size) in enumerate(zip(kernel, strides, dilation, sizes, strict=True), 1):
        taps = [
            lax.slice_in_dim(tap, i * d, i * d + (size - 1) * s + 1 if size else i * d, s, axis)
            for tap in taps
            for i in range(k)
        ]
    return taps
