"""Experiments as a library: configurations, runs and their folders, sweeps, audits.

The public names are those of `__init__.pyi`, each imported when it is first used.
"""

import lazy_loader as _lazy

__getattr__, __dir__, __all__ = _lazy.attach_stub(__name__, __file__)
