"""The engine: a federation as a value, and what compiles, lays out and accounts its rounds."""

from fedjax_dp.engine.accounts.calibration import calibrate
from fedjax_dp.engine.accounts.communication import Communication, communication
from fedjax_dp.engine.accounts.privacy_accounting import PrivacyAccounting
from fedjax_dp.engine.cohort import Cohort, Examples
from fedjax_dp.engine.cohorts import Cohorts
from fedjax_dp.engine.evaluation import Evaluator, evaluator
from fedjax_dp.engine.execution.compile import Simulation, compile_federation, simulation
from fedjax_dp.engine.facts import examples_of, population_of
from fedjax_dp.engine.federation import Federation, federation
from fedjax_dp.engine.layout import ExecutionConfig, KeptTrials, Layout, Trial, Tuned
from fedjax_dp.engine.model_axis import ModelAxis
from fedjax_dp.engine.record import Fate, RoundInfo, RoundRecord, TrainingInfo, as_metrics
from fedjax_dp.engine.round import ByClient, SimulationState, Unpublished
from fedjax_dp.engine.schedules import scheduled
from fedjax_dp.engine.wrappers.anderson import anderson
from fedjax_dp.engine.wrappers.asynchronous import asynchronous
from fedjax_dp.engine.wrappers.availability import (
    Availability,
    Moment,
    absences,
    all_of,
    daily,
    in_rounds,
)
from fedjax_dp.engine.wrappers.budgets import within_budgets
from fedjax_dp.engine.wrappers.clock import clocked
from fedjax_dp.engine.wrappers.latencies import (
    Compute,
    Latencies,
    RoundTimes,
    compute_seconds,
    key_exchange_seconds,
    latencies,
    round_times,
    serverless_times,
)
from fedjax_dp.engine.wrappers.leaving import leaving
from fedjax_dp.engine.wrappers.servers import serverless, several_servers
from fedjax_dp.engine.wrapping import Change, Wrapper

__all__ = [
    "Availability",
    "ByClient",
    "Change",
    "Cohort",
    "Cohorts",
    "Communication",
    "Compute",
    "Evaluator",
    "Examples",
    "ExecutionConfig",
    "Fate",
    "Federation",
    "KeptTrials",
    "Latencies",
    "Layout",
    "ModelAxis",
    "Moment",
    "PrivacyAccounting",
    "RoundInfo",
    "RoundRecord",
    "RoundTimes",
    "Simulation",
    "SimulationState",
    "TrainingInfo",
    "Trial",
    "Tuned",
    "Unpublished",
    "Wrapper",
    "absences",
    "all_of",
    "anderson",
    "as_metrics",
    "asynchronous",
    "calibrate",
    "clocked",
    "communication",
    "compile_federation",
    "compute_seconds",
    "daily",
    "evaluator",
    "examples_of",
    "federation",
    "in_rounds",
    "key_exchange_seconds",
    "latencies",
    "leaving",
    "population_of",
    "round_times",
    "scheduled",
    "serverless",
    "serverless_times",
    "several_servers",
    "simulation",
    "within_budgets",
]
