"""Algorithms: one file a method, each a declaration of pure functions."""

from fedjax_dp.algorithms.base import ClientOutput, FederatedAlgorithm
from fedjax_dp.algorithms.centralized import centralized, pool
from fedjax_dp.algorithms.dp_fedavg import dp_fedavg
from fedjax_dp.algorithms.dp_sgd import dp_sgd
from fedjax_dp.algorithms.fedavg import fedavg
from fedjax_dp.algorithms.fedopt import fedadagrad, fedadam, fedavgm, fedyogi
from fedjax_dp.algorithms.fedprox import fedprox
from fedjax_dp.algorithms.ifca import ifca
from fedjax_dp.algorithms.local_only import local_only
from fedjax_dp.algorithms.registry import ALGORITHMS, build
from fedjax_dp.algorithms.scaffold import scaffold

__all__ = [
    "ALGORITHMS",
    "ClientOutput",
    "FederatedAlgorithm",
    "build",
    "centralized",
    "dp_fedavg",
    "dp_sgd",
    "fedadagrad",
    "fedadam",
    "fedavg",
    "fedavgm",
    "fedprox",
    "fedyogi",
    "ifca",
    "local_only",
    "pool",
    "scaffold",
]
