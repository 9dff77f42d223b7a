"""Federated learning under differential privacy, simulated in JAX.

All clients of a round are one batch dimension of one compiled program. Algorithms are declarations
of pure functions; the engine compiles them; a ledger is told what ran and answers ε at δ.

The public names are those of `__init__.pyi`, each imported when it is asked for.
"""

from typing import Any as _Any

import lazy_loader as _lazy

__version__ = "0.1.0"

_listed, __dir__, __all__ = _lazy.attach_stub(__name__, __file__)


def __getattr__(name: str) -> _Any:
    """Finds a listed name, or an algorithm by its name, so that a new one needs no line here."""
    if name in __all__:
        return _listed(name)
    if not name.startswith("_"):
        from fedjax_dp.algorithms import ALGORITHMS

        if name in ALGORITHMS:
            return ALGORITHMS[name].factory
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
