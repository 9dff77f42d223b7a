"""The engine: a federation as a value, and what compiles, lays out and accounts its rounds."""

from fedjax_dp.engine.accounts.calibration import calibrate
from fedjax_dp.engine.accounts.communication import Communication, communication
from fedjax_dp.engine.accounts.privacy_accounting import PrivacyAccounting
from fedjax_dp.engine.cohort import Cohort, Examples
from fedjax_dp.engine.evaluation import Evaluator, evaluator
from fedjax_dp.engine.execution.compile import Simulation, compile_federation, simulation
from fedjax_dp.engine.federation import Federation, federation
from fedjax_dp.engine.layout import ExecutionConfig, Layout
from fedjax_dp.engine.population import examples_of, population_of
from fedjax_dp.engine.record import Fate, RoundInfo, RoundRecord, TrainingInfo, as_metrics
from fedjax_dp.engine.round import SimulationState
from fedjax_dp.engine.wrappers.anderson import anderson

__all__ = [
    "Cohort",
    "Communication",
    "Evaluator",
    "Examples",
    "ExecutionConfig",
    "Fate",
    "Federation",
    "Layout",
    "PrivacyAccounting",
    "RoundInfo",
    "RoundRecord",
    "Simulation",
    "SimulationState",
    "TrainingInfo",
    "anderson",
    "as_metrics",
    "calibrate",
    "communication",
    "compile_federation",
    "evaluator",
    "examples_of",
    "federation",
    "population_of",
    "simulation",
]
