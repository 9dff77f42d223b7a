"""Federated learning under differential privacy, simulated in JAX.

All clients of a round are one batch dimension of one compiled program. Algorithms are declarations
of pure functions; the engine compiles them; a ledger is told what ran and answers ε at δ.
"""

from fedjax_dp.algorithms import (
    ClientOutput,
    FederatedAlgorithm,
    centralized,
    dp_fedavg,
    dp_sgd,
    fedadagrad,
    fedadam,
    fedavg,
    fedavgm,
    fedprox,
    fedyogi,
    ifca,
    local_only,
    minimum_epsilon,
    noise_oracle,
    pfa,
    pool,
    record_dp_fedavg,
    robust_hdp,
    scaffold,
    weiavg,
)
from fedjax_dp.clients import (
    LocalConfig,
    LocalTrainer,
    dp_sgd_trainer,
    local_trainer,
    update_transform,
)
from fedjax_dp.core.keys import secret_key
from fedjax_dp.data import (
    FederatedData,
    Participation,
    Sampler,
    cyclic,
    everybody,
    fixed_size,
    min_separated,
    participation,
    poisson,
    shuffled,
)
from fedjax_dp.engine import (
    ExecutionConfig,
    PrivacyAccounting,
    Simulation,
    SimulationState,
    evaluator,
    simulation,
)
from fedjax_dp.models import Model
from fedjax_dp.privacy import Ledger
from fedjax_dp.server import Aggregator, gaussian_mean, weighted_mean

__version__ = "0.1.0"

__all__ = [
    "Aggregator",
    "ClientOutput",
    "ExecutionConfig",
    "FederatedAlgorithm",
    "FederatedData",
    "Ledger",
    "LocalConfig",
    "LocalTrainer",
    "Model",
    "Participation",
    "PrivacyAccounting",
    "Sampler",
    "Simulation",
    "SimulationState",
    "centralized",
    "cyclic",
    "dp_fedavg",
    "dp_sgd",
    "dp_sgd_trainer",
    "evaluator",
    "everybody",
    "fedadagrad",
    "fedadam",
    "fedavg",
    "fedavgm",
    "fedprox",
    "fedyogi",
    "fixed_size",
    "gaussian_mean",
    "ifca",
    "local_only",
    "local_trainer",
    "min_separated",
    "minimum_epsilon",
    "noise_oracle",
    "participation",
    "pfa",
    "poisson",
    "pool",
    "record_dp_fedavg",
    "robust_hdp",
    "scaffold",
    "secret_key",
    "shuffled",
    "simulation",
    "update_transform",
    "weiavg",
    "weighted_mean",
]
