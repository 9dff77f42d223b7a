"""The names of the metrics of a run, of which those that decide something must be."""

import math
from collections.abc import Collection, Mapping
from typing import Any

import jax
import numpy as np

from fedjax_dp.core import checks
from fedjax_dp.engine.record import RoundInfo, RoundRecord, as_metrics
from fedjax_dp.engine.round import SimulationState
from fedjax_dp.evaluation.noised import METRIC
from fedjax_dp.experiment.components.experiment import Experiment
from fedjax_dp.experiment.components.keeping import KEY, kept_metric
from fedjax_dp.experiment.components.noised import followed_in_rows
from fedjax_dp.experiment.running.results import evaluate

# A fact of a study: the metric that its search compares, which each of its runs must have.
OBJECTIVE = "objective"


class MetricError(ValueError):
    """A metric that a run will not have."""


def followed_metrics(experiment: Experiment) -> tuple[dict[str, str], dict[str, str]]:
    """Returns by key the metrics that decide something: of evaluations, and of any row."""
    config, objective = experiment.config, experiment.stated.get(OBJECTIVE)
    best = kept_metric(config.run)
    of_evaluations = {f"the metric of {KEY}": best, "--metric": objective}
    given = {key: metric for key, metric in of_evaluations.items() if metric is not None}
    return given, followed_in_rows(config)


def require_metrics(experiment: Experiment, state: SimulationState) -> None:
    """Refuses a metric that decides something and that no evaluation or round will have.

    The model of a state is evaluated, as the metrics of users are known by their values alone.
    Metrics of rounds are those of its program; where rounds have none, their names are unknown.
    """
    of_evaluations, of_rows = followed_metrics(experiment)
    if not of_evaluations and not of_rows:
        return
    seed = experiment.config.run.seed
    found = evaluate(experiment.evaluator, state, experiment.simulation.hyper, seed)
    is_noised = experiment.config.evaluation.noise_multiplier is not None
    evaluated = _numbers(found.figures) | {METRIC} if is_noised else _numbers(found.figures)
    for key, metric in of_evaluations.items():
        _require(key, metric, evaluated)
    others = {key: metric for key, metric in of_rows.items() if metric not in evaluated}
    of_rounds = _of_rounds(experiment) if others else None
    if of_rounds is not None:
        for key, metric in others.items():
            _require(key, metric, evaluated | of_rounds)


def _require(key: str, metric: str, known: Collection[str]) -> None:
    try:
        checks.one_of(key, metric, known)
    except ValueError as error:
        raise MetricError(str(error)) from None


def _numbers(row: Mapping[str, Any]) -> frozenset[str]:
    """Names the numbers of a row; a model without an accuracy has NaN for it."""
    return frozenset(k for k, v in row.items() if isinstance(v, int | float) and not math.isnan(v))


def _of_rounds(experiment: Experiment) -> frozenset[str] | None:
    """Names the numbers of each round; None if its program cannot be traced alone."""
    program = experiment.simulation.program
    if program is None:
        return None
    _, *left = jax.eval_shape(program.one_round.step, *program.arguments)
    record, info = jax.tree.map(lambda x: np.zeros((1, *x.shape), x.dtype), left)
    (row,) = shown_rows(experiment, record, info)
    numbers = {name for name, value in row.items() if np.ndim(value) == 0}
    spent = {f"epsilon_{unit}" for unit in experiment.simulation.federation.claims.units}
    return frozenset(numbers | {"round", "bytes_up", "bytes_down"} | spent)


def shown_rows(
    experiment: Experiment, record: RoundRecord, info: RoundInfo
) -> list[dict[str, Any]]:
    """Lists the metrics of some rounds, without bytes and ε."""
    shown, rows = as_metrics(record, info), []
    for i in range(len(record.stage)):
        row = {name: value[i] for name, value in shown.items()}
        if "record" not in experiment.config.privacy.units:
            # Gradients of examples have no bound to exceed.
            row.pop("clipped_example_share", None)
        if "num_clipped" in row:
            joined = max(int(row["num_participants"]), 1)
            row["clipped_client_share"] = float(row["num_clipped"]) / joined
        rows.append(row)
    return rows
