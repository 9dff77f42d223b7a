"""Extreme records and updates, on which a private step must satisfy its stated bounds."""

from collections.abc import Iterator, Mapping

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_dp.core.trees import PyTree

_VALUES = (0.0, 1e-30, 1e30, -1e30, np.nan, np.inf, -np.inf)
# Rows that nearly cancel: their size, and the relative size of their sum.
_SIZES = (1.0, 1e3, 1e6)
_SHARES = (0.0, 1e-4, 3e-4, 5e-4, 7e-4, 1e-3, 1.5e-3, 2e-3, 3e-3)


def extreme_records(
    record: Mapping[str, np.ndarray], rng: np.random.Generator
) -> Iterator[dict[str, np.ndarray]]:
    """Lists extreme records, whose clipped gradients must respect the bound.

    The record itself; one value from 0 to 1e30, NaN and infinities; rows that nearly cancel, for
    which norms that are not computed from the gradient are wrong. Integers are 0 or the largest.
    """
    yield {name: np.asarray(array) for name, array in record.items()}
    for value in _VALUES:
        yield {name: _filled(np.asarray(array), value) for name, array in record.items()}
    for size in _SIZES:
        for share in _SHARES:
            yield {
                name: _cancelling(np.asarray(array), size, share, rng)
                for name, array in record.items()
            }


def _filled(array: np.ndarray, value: float) -> np.ndarray:
    if array.dtype.kind == "f":
        return np.full_like(array, value)
    return np.full_like(array, np.iinfo(array.dtype).max if value > 1 else 0)


def _cancelling(
    array: np.ndarray, size: float, share: float, rng: np.random.Generator
) -> np.ndarray:
    if array.dtype.kind != "f":
        return array
    if array.ndim == 0:
        return np.asarray(size, array.dtype)
    row = size * rng.normal(size=array.shape[1:])
    signs = (-1.0) ** np.arange(array.shape[0]).reshape(-1, *[1] * (array.ndim - 1))
    return (signs * row + size * share * rng.normal(size=array.shape)).astype(array.dtype)


def extreme_updates(structure: PyTree) -> Iterator[tuple[PyTree, float]]:
    """Lists extreme updates of weight 1, and an ordinary update with extreme weights."""

    def filled(value: float) -> PyTree:
        return jax.tree.map(lambda s: jnp.full(s.shape, value).astype(s.dtype), structure)

    for value in (*_VALUES, 1e-3, 1.0, 1e12):
        yield filled(value), 1.0
    for weight in (0.0, 1e20, 1e30, -1e30, np.nan, np.inf):
        yield filled(1.0), weight
