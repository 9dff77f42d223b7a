"""Gradients of a convolution's kernel for single examples, where convolutions are native."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from fedjax_dp.core import jaxprs
from fedjax_dp.core.jaxprs import JaxprEqn
from fedjax_dp.models.lowering import bilinear
from fedjax_dp.models.lowering.patches import Window, gather_patches, slices


class Convolution(NamedTuple):
    """A convolution of one example: no groups, no dilation, at most two spatial dimensions.

    The window moves over the input with zeros before and after each dimension, cropped if negative.
    `channels_last` permutes input, kernel and output to `[1, *spatial, features]`,
    `[*kernel, inputs, outputs]` and `[1, *positions, features]`.
    """

    window: Window
    padding: tuple[tuple[int, int], ...]
    channels_last: tuple[tuple[int, ...], ...]
    num_outputs: int

    def patches(self, x: jax.Array) -> jax.Array:
        """Gathers the inputs of every output, `[num_rows, entries · inputs]`."""
        found = gather_patches(self._padded(x), self.window)
        return found.reshape(-1, found.shape[-1])

    def columns(self, cotangent: jax.Array) -> jax.Array:
        """Lists the cotangents of every output, `[num_rows, outputs]`."""
        moved = jnp.transpose(cotangent, self.channels_last[2])
        return moved.reshape(-1, moved.shape[-1])

    def matrix(self, kernel: jax.Array) -> jax.Array:
        """Writes a kernel as the matrix that multiplies patches, `[entries · inputs, outputs]`."""
        moved = jnp.transpose(kernel, self.channels_last[1])
        return moved.reshape(-1, moved.shape[-1])

    def by_rows(self, x: jax.Array, cotangent: jax.Array) -> jax.Array:
        """Computes the gradient of the kernel, a row at a time, `[entries · inputs, outputs]`.

        Shifts along the last spatial dimension are features; for each row of the kernel they and
        the cotangents are matrices that lie in memory as the product reads them. Compilers for TPUs
        compute the gradients of examples apart as one convolution of as many groups, most of whose
        products are of zeros.
        """
        columns = lax.optimization_barrier(self.columns(cotangent))
        x = self._padded(x)
        window = self.window
        if len(window.kernel) == 1:
            x, window = x[:, None], Window(*((1, *sizes) for sizes in window))
        stacked = jnp.concatenate(slices(x, window, 1), axis=-1)[0]
        width, stride = stacked.shape[1], window.strides[0]
        # Rows of one remainder by the stride are one after another.
        rows = [
            lax.optimization_barrier(part.reshape(-1, part.shape[-1]))
            for part in (stacked[first::stride] for first in range(min(stride, window.kernel[0])))
        ]
        products = []
        for row in range(window.kernel[0]):
            first = row // stride * width
            shifted = lax.slice_in_dim(rows[row % stride], first, first + len(columns))
            products.append(jnp.einsum("to,ti->oi", columns, shifted))
        found = jnp.stack(products)
        return jnp.swapaxes(found, 1, 2).reshape(-1, found.shape[1])

    def _padded(self, x: jax.Array) -> jax.Array:
        return bilinear.pad(jnp.transpose(x, self.channels_last[0]), self.padding)


def convolution_of(eqn: JaxprEqn) -> Convolution | None:
    """Describes a native convolution of one example; None if it is of another kind."""
    if eqn.primitive.name != "conv_general_dilated" or not jaxprs.has_parameters(eqn):
        return None
    of, numbers = eqn.params, eqn.params["dimension_numbers"]
    num_spatial = len(of["window_strides"])
    is_plain = (
        num_spatial in (1, 2)
        and of["feature_group_count"] == of["batch_group_count"] == 1
        and max(*of["lhs_dilation"], *of["rhs_dilation"]) == 1
        and _shape(eqn.invars[0])[numbers.lhs_spec[0]] == 1
        and min(_shape(eqn.outvars[0])) > 0
    )
    if not is_plain:
        return None
    output, inputs, *spatial = numbers.rhs_spec
    kernel = tuple(_shape(eqn.invars[1])[i] for i in spatial)
    ones = (1,) * num_spatial
    padding = tuple((int(low), int(high)) for low, high in of["padding"])
    return Convolution(
        Window(kernel, tuple(of["window_strides"]), ones),
        padding,
        (_last(numbers.lhs_spec), (*spatial, inputs, output), _last(numbers.out_spec)),
        _shape(eqn.invars[1])[output],
    )


def _last(spec: Sequence[int]) -> tuple[int, ...]:
    batch, feature, *spatial = spec
    return (batch, *spatial, feature)


def _shape(v: Any) -> tuple[int, ...]:
    return tuple(v.aval.shape)
