"""The kind of backend that programs are traced for."""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

import jax

# The names that JAX has for them.
BACKENDS = ("cpu", "gpu", "tpu")

_TARGET: ContextVar[str | None] = ContextVar("target", default=None)


def backend() -> str:
    """Returns the kind of backend that is traced for: that of the default device, or a target."""
    return _TARGET.get() or jax.default_backend()


@contextlib.contextmanager
def traced_for(kind: str) -> Iterator[None]:
    """Traces for another kind of backend than the default device, to export programs for it.

    What was traced before is dropped, and again at the end: it holds for one backend.
    """
    before = _TARGET.set(kind)
    jax.clear_caches()
    try:
        yield
    finally:
        _TARGET.reset(before)
        jax.clear_caches()
