"""Weights of Anderson acceleration: the shortest mix of residuals."""

from typing import Any

import jax
import jax.numpy as jnp


def mixing_weights(
    products: jax.Array, counts: jax.Array, newest: jax.Array, ridge: Any, damping: Any
) -> jax.Array:
    """Computes the weights, of sum 1, that minimise the norm of the mix of residuals.

    Solves `(G + ridge · tr(G) I) w = 1` and divides by the sum; weights may be negative. With the
    damping a in [0, 1] they become (1 − a) w, and the newest gains a. Not finite without a
    solution.

    Source: Malekmohammadi 2025, section 2.5, the closed form under "Acceleration".
    """
    both = counts[:, None] & counts[None, :]
    products = jnp.where(both, products, 0)
    # Scaled first, so that small residuals do not vanish.
    trace = jnp.trace(products)
    scaled = products / jnp.where(trace > 0, trace, 1)
    system = scaled + jnp.diag(jnp.where(counts, ridge, 1.0).astype(scaled.dtype))
    found = jnp.linalg.solve(system, counts.astype(scaled.dtype))
    found = jnp.where(counts, found, 0)
    found = found / jnp.sum(found)
    found = jnp.where(trace > 0, found, jnp.nan)
    return (1 - damping) * found + damping * (jnp.arange(len(found)) == newest).astype(found.dtype)
