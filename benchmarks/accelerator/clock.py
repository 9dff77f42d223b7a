"""Precisions of products, and the clock around compiled calls."""

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_dp.core import products

# Precision of products, and type of inputs. On NVIDIA cards the default is TF32; split products are
# three of bfloat16, which not every device can compute.
PRECISIONS: dict[str, tuple[str, Any]] = {
    "float32": ("float32", jnp.float32),
    "default": ("default", jnp.float32),
    "bfloat16": ("default", jnp.bfloat16),
    "split": (products.precision("split"), jnp.float32),
}


def timed(fn: Callable[[], Any]) -> tuple[Any, float]:
    """Calls a function, and waits for its result; returns both the result and the seconds."""
    started = time.perf_counter()
    result = jax.block_until_ready(fn())
    return result, time.perf_counter() - started


def best(fn: Callable[[], Any], seconds: float = 1.0) -> float:
    """Measures the fastest call of those in `seconds`, after one that is not counted."""
    timed(fn)
    found: list[float] = []
    while sum(found) < seconds:
        found.append(timed(fn)[1])
    return min(found)
