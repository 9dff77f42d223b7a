"""Experiments as a library: configurations, runs and their folders, sweeps, audits (extra `cli`).

The public names are those of `__init__.pyi`, each imported when it is first used.
"""

import lazy_loader as _lazy

from fedjax_dp.core.packages import needed_for as _needed_for

with _needed_for("the configuration of experiments", "cli"):
    import filelock as _filelock  # noqa: F401
    import platformdirs as _platformdirs  # noqa: F401
    import pydantic as _pydantic  # noqa: F401
    import tomli_w as _tomli_w  # noqa: F401

__getattr__, __dir__, __all__ = _lazy.attach_stub(__name__, __file__)
