"""The engine: compiles a declared algorithm on a population into rounds that run."""

from fedjax_dp.engine.accounting import PrivacyAccounting
from fedjax_dp.engine.calibration import calibrate, run_event
from fedjax_dp.engine.evaluation import Evaluator, evaluator
from fedjax_dp.engine.execution import ExecutionConfig
from fedjax_dp.engine.round import SimulationState
from fedjax_dp.engine.simulate import Simulation, simulation

__all__ = [
    "Evaluator",
    "ExecutionConfig",
    "PrivacyAccounting",
    "Simulation",
    "SimulationState",
    "calibrate",
    "evaluator",
    "run_event",
    "simulation",
]
