"""Federations on Flower: the algorithm, aggregator and ledger that were simulated, deployed.

Needs the extras `flower` and, for apps of configurations, `cli`.
"""

import lazy_loader as _lazy

from fedjax_dp.core.packages import needed_for as _needed_for

with _needed_for("fedjax_dp.flower", "flower"):
    import flwr as _flwr  # noqa: F401

__getattr__, __dir__, __all__ = _lazy.attach_stub(__name__, __file__)
