"""Convolution as patches and one GEMM."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fedjax_dp.core import trees
from fedjax_dp.core.backend import facts
from fedjax_dp.core.choices import choices
from fedjax_dp.models.lowering import bilinear, dense, narrow, winograd
from fedjax_dp.models.lowering.patches import Window, gather_patches, scatter_patches, slices

Dot = Callable[..., jax.Array]


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
    out_sharding: Any = None,
) -> jax.Array:
    """Convolves as the primitive of the same name does, by slices and matrix products alone."""
    x = jnp.transpose(lhs, bilinear.channels_last(dimension_numbers.lhs_spec))
    w = jnp.transpose(rhs, _kernel_last(dimension_numbers.rhs_spec))
    window = Window(w.shape[:-2], tuple(window_strides), tuple(rhs_dilation))
    dot = functools.partial(
        _multiply, precision=precision, preferred_element_type=preferred_element_type
    )
    groups = feature_group_count
    if batch_group_count > 1:
        groups = batch_group_count
        x = x.reshape(groups, -1, *x.shape[1:])
        x = jnp.moveaxis(x, 0, -2).reshape(*x.shape[1:-1], -1)

    if groups > 1 and w.shape[-2] == 1:
        out = _depthwise(bilinear.pad(x, padding, lhs_dilation), w, window, preferred_element_type)
    else:
        is_transposed = max(lhs_dilation) > 1 and max(window_strides) == 1
        # Tiles and rows are for one type of 32 bits or more.
        is_exact = x.dtype in (jnp.float32, jnp.float64)
        is_exact = is_exact and preferred_element_type in (None, x.dtype)
        convolve = functools.partial(
            _convolve_dilated if is_transposed else functools.partial(_convolve, is_exact=is_exact),
            padding=padding,
            lhs_dilation=lhs_dilation,
            window=window,
            dot=dot,
        )
        out = _grouped(convolve, groups)(x, w)
    if preferred_element_type is not None:
        out = out.astype(preferred_element_type)
    return jnp.transpose(out, _inverse(bilinear.channels_last(dimension_numbers.out_spec)))


def _kernel_last(spec: Sequence[int]) -> tuple[int, ...]:
    output, inputs, *spatial = spec
    return (*spatial, inputs, output)


def _inverse(permutation: Sequence[int]) -> tuple[int, ...]:
    return tuple(permutation.index(i) for i in range(len(permutation)))


def _grouped(fn: Callable[..., jax.Array], groups: int) -> Callable[..., jax.Array]:
    """Runs a convolution on every group of features as a batch of convolutions."""
    if groups == 1:
        return fn

    def grouped(x: jax.Array, w: jax.Array) -> jax.Array:
        x = jnp.moveaxis(x.reshape(*x.shape[:-1], groups, -1), -2, 0)
        w = jnp.moveaxis(w.reshape(*w.shape[:-1], groups, -1), -2, 0)
        out = jnp.moveaxis(jax.vmap(fn)(x, w), 0, -2)
        return out.reshape(*out.shape[:-2], -1)

    return grouped


def _convolve(
    x: jax.Array,
    w: jax.Array,
    *,
    padding: Sequence[tuple[int, int]],
    lhs_dilation: Sequence[int],
    window: Window,
    dot: Dot,
    is_exact: bool,
) -> jax.Array:
    is_dense = max(*window.strides, *window.dilation, *lhs_dilation) == 1
    may_be_tiled = is_exact and is_dense and window.kernel == winograd.KERNEL
    if may_be_tiled and winograd.is_faster(x, w, padding):
        return winograd.convolve(x, w, padding)
    is_plain = is_exact and lhs_dilation[0] == 1 and choices(facts()).has_caches
    if is_plain and narrow.is_faster(w, window):
        rest = bilinear.pad(x, ((0, 0), *padding[1:]), lhs_dilation)
        return narrow.convolve(rest, w, padding[0])
    x = bilinear.pad(x, padding, lhs_dilation)
    matrix = dense.marked(w.reshape(-1, w.shape[-1]))
    if max(window.kernel) == 1 and max(window.strides) == 1:
        return dot(x, matrix)
    # Patches are many times as large as their source and quickly gathered again: the backward pass
    # keeps the source.
    return jax.checkpoint(lambda x, matrix: dot(gather_patches(x, window), matrix))(x, matrix)


def _convolve_dilated(
    x: jax.Array,
    w: jax.Array,
    *,
    padding: Sequence[tuple[int, int]],
    lhs_dilation: Sequence[int],
    window: Window,
    dot: Dot,
) -> jax.Array:
    """Convolves a dilated input with stride 1 without multiplying the zeros in between.

    This is the transpose of a convolution whose stride is the dilation: one GEMM computes what each
    entry of the input adds to its surroundings, and the transpose of the patches sums it.
    """
    spatial = range(len(window.kernel))
    reach = [(k - 1) * d for k, d in zip(window.kernel, window.dilation, strict=True)]
    full = [(x.shape[1 + i] - 1) * lhs_dilation[i] + 1 + reach[i] for i in spatial]
    matrix = jnp.moveaxis(jnp.flip(w, tuple(spatial)), -2, 0).reshape(x.shape[-1], -1)
    window = window._replace(strides=tuple(lhs_dilation))
    out = scatter_patches(dot(x, dense.marked(matrix)), window, tuple(full))
    crop = [(low - r, high - r) for (low, high), r in zip(padding, reach, strict=True)]
    return bilinear.pad(out, crop)


def _depthwise(x: jax.Array, w: jax.Array, window: Window, result_type: Any) -> jax.Array:
    """Convolves every feature of a padded input separately, elementwise tap by tap."""
    result_type = result_type or x.dtype
    x, w = trees.at_least_float32(x), trees.at_least_float32(w)
    taps = [x]
    for axis in range(len(window.kernel)):
        taps = [piece for tap in taps for piece in slices(tap, window, axis)]
    weights = w.reshape(len(taps), x.shape[-1], -1)
    products = (tap[..., None] * weight for tap, weight in zip(taps, weights, strict=True))
    out = functools.reduce(jnp.add, products)
    return out.reshape(*out.shape[:-2], -1).astype(result_type)


def _multiply(
    x: jax.Array, matrix: jax.Array, *, precision: Any, preferred_element_type: Any
) -> jax.Array:
    """Multiplies `[..., inputs]` by `[inputs, outputs]`."""
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    out = lax.dot_general(
        rows,
        matrix,
        (((1,), (0,)), ((), ())),
        precision=precision,
        preferred_element_type=preferred_element_type,
    )
    return out.reshape(*x.shape[:-1], out.shape[-1])
