"""Explicit casts to common types, which strict promotion leaves to its callers."""

from typing import Any

import jax
import jax.numpy as jnp


def library_promotion() -> Any:
    """Standard promotion, inside a `with`, for libraries such as Optax that count on it."""
    return jax.numpy_dtype_promotion("standard")


def promoted(*values: Any) -> tuple[Any, ...]:
    """Casts to the type of JAX's standard promotion; host values alone are left to NumPy."""
    if not any(isinstance(value, jax.Array) for value in values):
        return values
    with library_promotion():
        dtype = jnp.result_type(*values)
    return tuple(jnp.asarray(value, dtype) for value in values)
