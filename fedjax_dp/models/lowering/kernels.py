"""Convolutions with stride 1 of several clients, each with a kernel of its own, by our own kernels.

Compilers know no convolution batched over kernels: they run one with a group for each client, or as
many small ones. Two primitives have an axis of clients; batched further, they stay two operations.
Each one's gradients are the other or itself, so that they are differentiable any number of times.
On TPUs they are programs in Pallas where these hold, and elsewhere what JAX makes of them.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fedjax_dp.core import jaxprs
from fedjax_dp.models.lowering import bilinear
from fedjax_dp.models.lowering.bilinear import Padding

NAME, GRADIENT = "convolution_of_clients", "kernel_gradient_of_clients"
_LAST = ("NHWC", "HWIO", "NHWC")
# Channels lie along the 128 lanes of a TPU: with fewer, most of what is moved is padding.
_FEWEST_CHANNELS = 16


def is_possible(eqn: jaxprs.JaxprEqn) -> bool:
    """Decides whether a traced convolution has a form that the primitives have."""
    if eqn.primitive.name != "conv_general_dilated" or not jaxprs.has_parameters(eqn):
        return False
    operands: list[Any] = [v.aval for v in eqn.invars]
    params, (x, w) = eqn.params, operands
    numbers = params["dimension_numbers"]
    steps = (*params["window_strides"], *params["lhs_dilation"], *params["rhs_dilation"])
    groups = params["feature_group_count"], params["batch_group_count"]
    is_one = len(x.shape) == 4 and {*steps, *groups} == {1}
    return (
        is_one
        and min(w.shape[i] for i in numbers.rhs_spec[:2]) >= _FEWEST_CHANNELS
        and x.dtype == w.dtype
        and x.dtype in (jnp.float32, jnp.bfloat16)
        and params["preferred_element_type"] in (None, x.dtype)
        and isinstance(params["precision"], tuple | type(None))
    )


def conv_general_dilated(
    lhs: jax.Array,
    rhs: jax.Array,
    *,
    padding: Sequence[tuple[int, int]],
    dimension_numbers: lax.ConvDimensionNumbers,
    precision: Any,
    **_: Any,
) -> jax.Array:
    """Convolves as the primitive of the same name does, one that `is_possible`."""
    of_lhs, of_rhs, of_out = dimension_numbers
    x = jnp.transpose(lhs, (of_lhs[0], *of_lhs[2:], of_lhs[1]))
    w = jnp.transpose(rhs, (*of_rhs[2:], of_rhs[1], of_rhs[0]))
    out = _convolve_p.bind(x[None], w[None], padding=tuple(padding), precision=precision)[0]
    last = (of_out[0], *of_out[2:], of_out[1])
    return jnp.transpose(out, [last.index(i) for i in range(4)])


def _shape(x: Any, w: Any, *, padding: Padding, precision: Any) -> Any:
    del precision
    one = bilinear.shape_of(
        x.update(shape=x.shape[1:]), w.update(shape=w.shape[1:]), padding=padding
    )
    return x.update(shape=(x.shape[0], *one))


def _native(x: jax.Array, w: jax.Array, *, padding: Padding, precision: Any) -> jax.Array:
    convolve = functools.partial(
        lax.conv_general_dilated,
        window_strides=(1, 1),
        padding=padding,
        dimension_numbers=_LAST,
        precision=precision,
    )
    return jax.vmap(convolve)(x, w)


def _native_gradient(x: jax.Array, g: jax.Array, *, padding: Padding, precision: Any) -> jax.Array:
    shape = _kernel_shape(x, g, padding)

    def one(x: jax.Array, g: jax.Array) -> jax.Array:
        def forwards(w: jax.Array) -> jax.Array:
            return _native(x[None], w[None], padding=padding, precision=precision)[0]

        return jax.linear_transpose(forwards, jax.ShapeDtypeStruct(shape[1:], x.dtype))(g)[0]

    return jax.vmap(one)(x, g)


def _kernel_shape(x: Any, g: Any, padding: Padding) -> tuple[int, ...]:
    pairs = zip(x.shape[2:4], padding, g.shape[2:4], strict=True)
    return (x.shape[0], *[n + sum(p) - m + 1 for n, p, m in pairs], x.shape[4], g.shape[4])


def _gradient_shape(x: Any, g: Any, *, padding: Padding, precision: Any) -> Any:
    del precision
    return x.update(shape=_kernel_shape(x, g, padding))


def _of_input(cotangent: jax.Array, w: jax.Array, *, padding: Padding, precision: Any) -> jax.Array:
    """Convolves the cotangent with the kernel, mirrored and transposed."""
    mirrored = jnp.swapaxes(jnp.flip(w, (1, 2)), 3, 4)
    pairs = zip(w.shape[1:3], padding, strict=True)
    around = tuple((k - 1 - low, k - 1 - high) for k, (low, high) in pairs)
    return _convolve_p.bind(cotangent, mirrored, padding=around, precision=precision)


def _clients_first(operands: Sequence[jax.Array], axes: Sequence[Any]) -> list[jax.Array]:
    """Merges a batch axis of both operands, of one of them repeated, into that of clients."""
    ((size,),) = [
        {x.shape[axis] for x, axis in zip(operands, axes, strict=True) if axis is not None}
    ]
    moved = [
        jnp.broadcast_to(x, (size, *x.shape)) if axis is None else jnp.moveaxis(x, axis, 0)
        for x, axis in zip(operands, axes, strict=True)
    ]
    return [x.reshape(-1, *x.shape[2:]) for x in moved]


def _batch(operands: Any, axes: Any, **params: Any) -> tuple[jax.Array, int]:
    x, w = operands
    if axes[1] is None:
        # One kernel for all: more examples.
        x = jnp.moveaxis(x, axes[0], 1)
        merged = x.reshape(x.shape[0], -1, *x.shape[3:])
        out = _convolve_p.bind(merged, w, **params)
        return out.reshape(*x.shape[:3], *out.shape[2:]), 1
    out = _convolve_p.bind(*_clients_first(operands, axes), **params)
    return out.reshape(w.shape[axes[1]], -1, *out.shape[1:]), 0


def _batch_gradient(operands: Any, axes: Any, **params: Any) -> tuple[jax.Array, int]:
    size = next(x.shape[a] for x, a in zip(operands, axes, strict=True) if a is not None)
    out = _gradient_p.bind(*_clients_first(operands, axes), **params)
    return out.reshape(size, -1, *out.shape[1:]), 0


def _convolve_on_tpu(x: jax.Array, w: jax.Array, **params: Any) -> jax.Array:
    # Pallas takes a second to import.
    from fedjax_dp.models.lowering import tpu

    return tpu.convolve(x, w, otherwise=_native, **params)


def _gradient_on_tpu(x: jax.Array, g: jax.Array, **params: Any) -> jax.Array:
    from fedjax_dp.models.lowering import tpu

    return tpu.kernel_gradient(x, g, otherwise=_native_gradient, **params)


_convolve_p: jaxprs.Primitive = jaxprs.define(
    NAME,
    _native,
    abstract=_shape,
    batch=_batch,
    gradients=(
        lambda ct, x, w, **params: _of_input(ct, w, **params),
        lambda ct, x, w, **params: _gradient_p.bind(x, ct, **params),
    ),
    on={"tpu": _convolve_on_tpu},
)
_gradient_p: jaxprs.Primitive = jaxprs.define(
    GRADIENT,
    _native_gradient,
    abstract=_gradient_shape,
    batch=_batch_gradient,
    gradients=(
        lambda ct, x, g, **params: _of_input(g, ct, **params),
        lambda ct, x, g, **params: _convolve_p.bind(x, ct, **params),
    ),
    on={"tpu": _gradient_on_tpu},
)
