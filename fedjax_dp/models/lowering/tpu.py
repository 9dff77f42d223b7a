"""Convolutions of several clients on a TPU, in Pallas, without patches in the device's memory.

An image is flat, with zeros at the end of each row, and an entry of the kernel shifts it all: what
is left of a row is the zeros of the row before. `rows` holds the image shifted by each column
of the kernel, side by side along the lanes; a row of the kernel is one product with `rows` from
that row on. Results beyond the end of a row are dropped, and cotangents there are zero.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from fedjax_dp.models.lowering.bilinear import Padding

# Memory is in tiles of 4 KiB, with 128 entries in a row.
_LANES, _BYTES_OF_ROWS = 128, 32
# A step of the program reads and writes about so much: some microseconds of memory.
_BYTES_OF_STEP = 2**20
# Of the 16 MiB that a program may take by default.
_MOST_BYTES = 12 * 2**20
# What is computed in one piece is unrolled, and larger programs gain nothing.
_MOST_ROWS = 1024


class Tiling(NamedTuple):
    """How a convolution is cut."""

    padding: Padding  # In the two dimensions, as the convolution's.
    wide: int  # Entries of a row with its zeros.
    examples: int  # Of a step of the program.
    rows: int  # Of an image's result that are one product.
    cost: pl.CostEstimate  # Operations, and bytes of memory, which is in tiles.
    held: int  # Bytes of the core's memory.


def tiling_of(x: Any, w: Any, y: Any, padding: Padding) -> Tiling | None:
    """Cuts a convolution of images, kernels and results; None if it is too large."""
    (clients, examples, _, _, inputs), (_, height, width, _, outputs) = x.shape, w.shape
    out_high = y.shape[2]
    wide = _whole(max(x.shape[3] + max(0, *padding[1]), y.shape[3]), _tile(x.dtype))
    most = max(1, _MOST_ROWS // wide)
    rows = max(n for n in range(1, out_high + 1) if out_high % n == 0 and n <= most)
    image, result = (a.shape[2] * _bytes(a.shape[3], a.shape[4], a.dtype) for a in (x, y))
    kernel = height * _bytes(width * inputs, outputs, w.dtype)
    # Each has two buffers, one of which is filled or emptied meanwhile.
    fixed = 2 * kernel + _bytes((rows + height - 1) * wide, width * inputs, x.dtype)
    fixed += _bytes((out_high + height - 1) * wide, inputs, x.dtype)
    one = image + result
    counts = [n for n in range(1, examples + 1) if examples % n == 0]
    count = max(n for n in counts if n == 1 or n * one <= _BYTES_OF_STEP)
    held = fixed + 2 * count * one
    cost = pl.CostEstimate(
        flops=2 * math.prod(y.shape[:4]) * height * width * inputs * outputs,
        transcendentals=0,
        bytes_accessed=clients * (examples * one + kernel),
    )
    return Tiling(padding, wide, count, rows, cost, held) if held <= _MOST_BYTES else None


def _bytes(rows: int, channels: int, dtype: Any) -> int:
    return _whole(rows, _tile(dtype)) * _whole(channels, _LANES) * dtype.itemsize


def _tile(dtype: Any) -> int:
    return _BYTES_OF_ROWS // dtype.itemsize


def _whole(size: int, part: int) -> int:
    return -(-size // part) * part


def convolve(
    x: jax.Array,
    w: jax.Array,
    *,
    padding: Padding,
    precision: Any,
    otherwise: Callable[..., jax.Array],
    interpret: bool = False,
) -> jax.Array:
    """Convolves `[clients, examples, *spatial, in]` with `[clients, *kernel, in, out]`."""
    clients, height, width, inputs, outputs = w.shape
    sizes = [
        n + sum(p) - k + 1 for n, p, k in zip(x.shape[2:4], padding, w.shape[1:3], strict=True)
    ]
    result = jax.ShapeDtypeStruct((*x.shape[:2], *sizes, outputs), x.dtype)
    tiling = tiling_of(x, w, result, padding) if clients > 1 and result.size > 0 else None
    if tiling is None:
        return otherwise(x, w, padding=padding, precision=precision)
    call = pl.pallas_call(
        functools.partial(_convolve, width=width, tiling=tiling, precision=_exact(precision)),
        grid=(clients, x.shape[1] // tiling.examples),
        in_specs=[_images(x, tiling), _kernels(height, width * inputs, outputs)],
        out_specs=_images(result, tiling),
        out_shape=result,
        scratch_shapes=_scratch(x, w, result, tiling),
        compiler_params=_params("parallel", result, tiling),
        cost_estimate=tiling.cost,
        interpret=interpret,
        name="convolution_of_clients",
    )
    return call(x, w.reshape(clients, height, width * inputs, outputs))


def kernel_gradient(
    x: jax.Array,
    g: jax.Array,
    *,
    padding: Padding,
    precision: Any,
    otherwise: Callable[..., jax.Array],
    interpret: bool = False,
) -> jax.Array:
    """Computes the gradients of kernels from inputs and cotangents, summed over examples."""
    (clients, *_, inputs), outputs = x.shape, g.shape[4]
    pairs = zip(x.shape[2:4], padding, g.shape[2:4], strict=True)
    height, width = (n + sum(p) - m + 1 for n, p, m in pairs)
    kernel = jax.ShapeDtypeStruct((clients, height, width, inputs, outputs), jnp.float32)
    tiling = tiling_of(x, kernel, g, padding) if clients > 1 and g.size > 0 else None
    if tiling is None:
        return otherwise(x, g, padding=padding, precision=precision)
    call = pl.pallas_call(
        functools.partial(_gradient, width=width, tiling=tiling, precision=_exact(precision)),
        grid=(clients, x.shape[1] // tiling.examples),
        in_specs=[_images(x, tiling), _images(g, tiling)],
        out_specs=_kernels(height, width * inputs, outputs),
        out_shape=jax.ShapeDtypeStruct((clients, height, width * inputs, outputs), jnp.float32),
        scratch_shapes=_scratch(x, kernel, g, tiling),
        compiler_params=_params("arbitrary", g, tiling),
        cost_estimate=tiling.cost,
        interpret=interpret,
        name="kernel_gradient_of_clients",
    )
    return call(x, g).reshape(kernel.shape).astype(x.dtype)


def _convolve(
    x_ref: Any,
    w_ref: Any,
    y_ref: Any,
    image_ref: Any,
    rows_ref: Any,
    *,
    width: int,
    tiling: Tiling,
    precision: Any,
) -> None:
    rows, wide = tiling.rows, tiling.wide

    def piece(i: Any, at: Any) -> None:
        _shift(image_ref, at, rows_ref, width, tiling)
        total = jnp.zeros((rows * wide, w_ref.shape[2]), jnp.float32)
        for d in range(w_ref.shape[0]):
            total += _dot(rows_ref[pl.ds(d * wide, rows * wide)], w_ref[d], 1, precision)
        result = total.reshape(rows, wide, -1)[:, : y_ref.shape[2]]
        y_ref[i, pl.ds(at, rows)] = result.astype(y_ref.dtype)

    _each(piece, x_ref, image_ref, y_ref.shape[1], tiling)


def _gradient(
    x_ref: Any,
    g_ref: Any,
    w_ref: Any,
    image_ref: Any,
    rows_ref: Any,
    *,
    width: int,
    tiling: Tiling,
    precision: Any,
) -> None:
    rows, wide = tiling.rows, tiling.wide
    end = wide - g_ref.shape[2]

    @pl.when(pl.program_id(1) == 0)
    def _() -> None:
        w_ref[...] = jnp.zeros_like(w_ref)

    def piece(i: Any, at: Any) -> None:
        _shift(image_ref, at, rows_ref, width, tiling)
        g = g_ref[i, pl.ds(at, rows)]
        if end:
            g = jnp.concatenate([g, jnp.zeros((rows, end, g.shape[2]), g.dtype)], 1)
        g = g.reshape(rows * wide, -1)
        for d in range(w_ref.shape[0]):
            w_ref[d] += _dot(rows_ref[pl.ds(d * wide, rows * wide)], g, 0, precision)

    _each(piece, x_ref, image_ref, g_ref.shape[1], tiling)


def _each(
    piece: Callable[[Any, Any], None], x_ref: Any, image_ref: Any, out_high: int, tiling: Tiling
) -> None:
    """Computes all pieces of all examples of a step, of images with zeros around."""
    (low, high), _ = tiling.padding
    count = x_ref.shape[1] + min(0, low) + min(0, high)
    taken, placed = pl.ds(max(0, -low), count), pl.ds(max(0, low), count)
    image_ref[...] = jnp.zeros_like(image_ref)

    def one(i: Any) -> None:
        image_ref[placed, pl.ds(0, x_ref.shape[2])] = x_ref[i, taken]
        _loop(out_high // tiling.rows, lambda t: piece(i, t * tiling.rows))

    _loop(tiling.examples, one)


def _shift(image_ref: Any, at: Any, rows_ref: Any, width: int, tiling: Tiling) -> None:
    """Writes rows of an image, from one on, shifted by each column of a kernel."""
    rows, channels = rows_ref.shape[0] // tiling.wide, image_ref.shape[2]
    flat = image_ref[pl.ds(at, rows)].reshape(-1, channels)
    for j in range(width):
        by = j - tiling.padding[1][0]
        shifted = jnp.concatenate([flat[by:], flat[:by]]) if by else flat
        rows_ref[:, pl.ds(j * channels, channels)] = shifted


def _loop(count: int, do: Callable[[Any], None]) -> None:
    if count == 1:
        do(0)
    else:
        lax.fori_loop(0, count, lambda i, carry: do(i), None)


def _dot(a: jax.Array, b: jax.Array, contracted: int, precision: Any) -> jax.Array:
    dimensions = (((contracted,), (0,)), ((), ()))
    return lax.dot_general(
        a, b, dimensions, precision=precision, preferred_element_type=jnp.float32
    )


def _params(of_examples: Any, y: Any, tiling: Tiling) -> pltpu.CompilerParams:
    """Lets the compiler compute operands, such as an activation of their entries, as they are read.

    That is worth more than operands of bfloat16, which it would write first. Where a step of the
    program has a loop, it fails to (libtpu 0.0.52: "Allocation … dematerialized").
    """
    is_whole = tiling.examples == 1 and tiling.rows == y.shape[2]
    return pltpu.CompilerParams(
        dimension_semantics=("parallel", of_examples), allow_input_fusion=[is_whole, is_whole]
    )


def _images(x: Any, tiling: Tiling) -> pl.BlockSpec:
    return pl.BlockSpec((None, tiling.examples, *x.shape[2:]), lambda c, i: (c, i, 0, 0, 0))


def _kernels(*shape: int) -> pl.BlockSpec:
    return pl.BlockSpec((None, *shape), lambda c, i: (c, 0, 0, 0))


def _scratch(x: Any, w: Any, y: Any, tiling: Tiling) -> list[Any]:
    """The image with its zeros, and rows of it, shifted."""
    (_, height, width, inputs, _), wide = w.shape, tiling.wide
    image = pltpu.VMEM((y.shape[2] + height - 1, wide, inputs), x.dtype)
    return [image, pltpu.VMEM(((tiling.rows + height - 1) * wide, width * inputs), x.dtype)]


def _exact(precision: Any) -> Any:
    """Returns the highest precision, or None for the default one."""
    is_default = precision is None or set(precision) == {lax.Precision.DEFAULT}
    return None if is_default else lax.Precision.HIGHEST
