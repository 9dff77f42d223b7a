"""Federated learning under differential privacy, simulated in JAX.

All clients of a round are one batch dimension of one compiled program. Algorithms are declarations
of pure functions; the engine compiles them; a ledger records what ran and reports ε at δ.

The public names are those of `__init__.pyi`, each imported when it is first used.
"""

import lazy_loader as _lazy

# Notes a fork wherever it happens.
from fedjax_dp.core import forks as _forks  # noqa: F401

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = _lazy.attach_stub(__name__, __file__)
