"""Federations on Flower: the algorithm, aggregator and ledger that were simulated, deployed.

Needs the extra `flower`.
"""

from fedjax_dp.core.packages import needed_for

with needed_for("fedjax_dp.flower", "flower"):
    import flwr  # noqa: F401

from fedjax_dp.flower.grid import GridNodes
from fedjax_dp.flower.journal import JournalFile
from fedjax_dp.flower.node import Node, client_app
from fedjax_dp.flower.server import deployed

__all__ = ["GridNodes", "JournalFile", "Node", "client_app", "deployed"]
