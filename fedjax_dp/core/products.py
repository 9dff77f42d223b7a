"""How products are computed: exactly, or as three of bfloat16 with sums in float32."""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from fedjax_dp.core.backend import backend, traced_with
from fedjax_dp.core.choices import Convolutions, Products
from fedjax_dp.core.materialize import materialize


class Arithmetic(NamedTuple):
    """How the products of gradients of records and the convolutions of lowered models are computed.

    For gradients of records "kernel" convolutions are "native".
    """

    products: Products = "exact"
    convolutions: Convolutions = "products"


class Rounding(NamedTuple):
    """Bounds the error of a sum of n products by `n * per_addition + per_product`.

    Both are relative to the sum of the products' absolute values.
    """

    per_addition: float
    per_product: float


# Any order of rounded additions and products: a bit more than half the relative distance between
# float32 numbers.
EXACT = Rounding(6e-8, 0.0)
# Derived in docs/privacy/proofs.md, "Split products". A float32 number is x = h + l + r, of which h
# and l are bfloat16 and |l| ≤ 2^-8 |x|, |r| ≤ 2^-17 |x|, or 2^-24 |x| more if a compiler takes l
# from an x that is not rounded yet. The product of two lacks l·l and what the rests r contribute:
# 2 · 2^-16 and a bit. Units for matrices add with an error of up to 2^-22 of the sum of absolute
# values, which the three sums exceed by 1.6 %; adding them is two roundings.
SPLIT = Rounding(1.02 * (2.0**-22 + 2 * 2.0**-24), 2.0**-15 + 2.0**-22)

# Parts of smaller numbers could vanish; such numbers are left out.
_SMALLEST_SPLIT = 2.0**-100
# Of bfloat16, as float32 has 8 and 23.
_EXPONENT_BITS, _MANTISSA_BITS = 8, 7

_CURRENT: ContextVar[Arithmetic | None] = ContextVar("arithmetic", default=None)


def arithmetic() -> Arithmetic:
    """Returns how products are computed in what is being traced."""
    return _CURRENT.get() or Arithmetic()


def computed_with(how: Arithmetic) -> contextlib.AbstractContextManager[None]:
    """Traces products in this way."""
    return traced_with(_CURRENT, how)


@contextlib.contextmanager
def of_records() -> Iterator[None]:
    """Traces gradients of records: no product rounds its factors as backends do by default.

    Split products are for products alone: convolutions of lowered models are then products too.
    """
    how = arithmetic()
    is_native = how.convolutions != "products" and how.products == "exact"
    how = how._replace(convolutions="native" if is_native else "products")
    with computed_with(how), jax.default_matmul_precision(precision(how.products)):
        yield


def precision(products: Products) -> str:
    """Names the precision that JAX computes such products with, where they state none."""
    if products == "exact":
        return "highest"
    # On a TPU "high" is three passes of bfloat16; on a GPU it would be one of TF32.
    return "high" if backend() == "tpu" else "BF16_BF16_F32_X3"


def rounding() -> Rounding:
    """Returns the bound on the error of `outer_products` in what is being traced."""
    return SPLIT if arithmetic().products == "split" else EXACT


def outer_products(rows: jax.Array, columns: jax.Array) -> jax.Array:
    """Sums outer products of rows and columns, `[examples, num_rows, ...]` each, over both axes.

    The error is within `rounding()`. For split products entries below 2^-100 count as 0, and those
    of 2^127 or more may overflow.
    """
    if arithmetic().products == "exact":
        return jnp.einsum("bti,bto->io", rows, columns)

    def one(a: jax.Array, b: jax.Array) -> jax.Array:
        # The factors are bfloat16, and their products exact in float32.
        return jnp.einsum(
            "bti,bto->io", a, b, precision=lax.Precision.DEFAULT, preferred_element_type=jnp.float32
        )

    (high, low), (other_high, other_low) = parts(rows), parts(columns)
    return one(high, other_high) + (one(high, other_low) + one(low, other_high))


def parts(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Splits float32 numbers into two of bfloat16, whose sum differs from it by up to 2^-17 of it.

    Written with `reduce_precision`: a compiler may leave out a conversion to bfloat16 and back, and
    the lower part would be 0.
    """
    # Computed once: both parts have to be of the same number.
    x = materialize(jnp.where(jnp.abs(x) < _SMALLEST_SPLIT, 0, x))
    high = lax.reduce_precision(x, _EXPONENT_BITS, _MANTISSA_BITS)
    low = lax.reduce_precision(x - high, _EXPONENT_BITS, _MANTISSA_BITS)
    return high.astype(jnp.bfloat16), low.astype(jnp.bfloat16)
