"""Rounds in debug mode: what was not finite first, in which client, step and array."""

from contextlib import AbstractContextManager
from contextvars import ContextVar
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_dp.core import trees
from fedjax_dp.core.backend import traced_with
from fedjax_dp.core.trees import PyTree


class NotFinite(ValueError):
    """A number of a round was not finite."""


class Watch:
    """Remembers what was not finite, in the order in which it was computed."""

    def __init__(self) -> None:
        """Begins with nothing."""
        self._first: str | None = None

    def require_finite(self) -> None:
        """Waits for what is under way, and raises `NotFinite` for what was found first."""
        jax.effects_barrier()
        first, self._first = self._first, None
        if first is not None:
            raise NotFinite(first)

    def _note(self, what: str, names: list[str], is_finite: Any, where: dict[str, Any]) -> None:
        """Receives the flags of the arrays of one tree, `[arrays]`."""
        if self._first is not None or np.all(is_finite):
            return
        # For people rounds and steps count from 1; clients have their indices.
        first = {"round": 1, "client": 0, "local step": 1}
        place = ", ".join(f"{n} {int(where[n]) + first[n]}" for n in first if n in where)
        name = names[int(np.argmin(is_finite))]
        self._first = f"{place}: {what} must be finite, got {name or 'an array'} that is not"


_WATCH: ContextVar[Watch | None] = ContextVar("watch", default=None)


def watched(watch: Watch | None) -> AbstractContextManager[None]:
    """Traces rounds in which `require_finite` reports to a watch; None for nothing."""
    return traced_with(_WATCH, watch)


def note_finite(what: str, tree: PyTree, counts: Any = True, **where: Any) -> None:
    """Reports in debug mode whether arrays that count are finite, and where; values never leave."""
    watch = _WATCH.get()
    if watch is None:
        return
    named = zip(trees.paths(tree), jax.tree.leaves(tree), strict=True)
    kept = [
        (n, jnp.asarray(x)) for n, x in named if jnp.issubdtype(jnp.result_type(x), jnp.floating)
    ]
    if not kept:
        return
    names, arrays = map(list, zip(*kept, strict=True))
    flags = jnp.stack([jnp.all(jnp.isfinite(x)) for x in arrays]) | ~jnp.asarray(counts)
    places = {name.replace("_", " "): jnp.asarray(value) for name, value in where.items()}
    jax.debug.callback(partial(watch._note, what, names), flags, places)
