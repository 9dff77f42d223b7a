"""The mechanism on clients' updates that a configuration asks for, calibrated to its budget."""

import math
from collections.abc import Callable
from typing import Any

import dp_accounting
import jax
import numpy as np

from fedjax_dp.core import trees
from fedjax_dp.core.trees import PyTree
from fedjax_dp.data import participants
from fedjax_dp.experiment.config import Config
from fedjax_dp.privacy.adaptive_clipping import make_adaptive_clipping
from fedjax_dp.privacy.calibration import calibrate_noise_multiplier
from fedjax_dp.privacy.correlated_noise import banded_noise
from fedjax_dp.privacy.distributed import choose_bits, make_plan
from fedjax_dp.server.base import Aggregator
from fedjax_dp.server.correlated import correlated_gaussian_mean
from fedjax_dp.server.distributed import discrete_mean, num_shares
from fedjax_dp.server.private import (
    adaptive_gaussian_mean,
    bounded_laplace_mean,
    by_realised_count,
    central_discrete_mean,
    gaussian_mean,
    laplace_mean,
    staircase_mean,
)


def client_aggregator(
    config: Config, participation: participants.Participation, structure: PyTree
) -> Aggregator:
    """Builds the private aggregator of an experiment.

    Args:
      config: the experiment; `privacy.client` is read.
      participation: who joins a round.
      structure: shapes of the parameters.

    Returns:
      The aggregator, with the noise multiplier that was given or one that spends the budget.

    Raises:
      ValueError: for a combination that has no valid analysis, or a budget that no noise reaches.
    """
    build = _builder(config, participation, structure)
    level, rounds = config.privacy.client, charged_rounds(config, participation)
    if level.noise_multiplier is not None:
        mean = build(float(level.noise_multiplier))  # type: ignore[arg-type]
        if level.denominator == "realised":
            return by_realised_count(mean, participation.cohort_size)
        return mean

    def run_of(noise_multiplier: float) -> Any:
        aggregator = build(noise_multiplier)
        assert aggregator.event is not None
        base = aggregator.event(aggregator.init(None))
        return dp_accounting.SelfComposedDpEvent(participation.event(base), rounds)

    calibrated = calibrate_noise_multiplier(
        run_of,
        float(level.epsilon),  # type: ignore[arg-type]
        level.dp_delta,
        accountant=config.privacy.accountant,
        relation=config.privacy.relation,
    )
    return build(float(rounded_up(calibrated)))


def _builder(
    config: Config, participation: participants.Participation, structure: PyTree
) -> Callable[[float], Aggregator]:
    level, cohort = config.privacy.client, participation.cohort_size
    clip_norm = float(level.clip_norm)  # type: ignore[arg-type]
    if level.mechanism == "laplace":
        return lambda z: laplace_mean(clip_norm, z, cohort)
    if level.mechanism == "staircase":
        return lambda z: staircase_mean(structure, clip_norm, z, cohort)
    if level.mechanism == "bounded_laplace":
        # Half of δ goes into what is cut off, in equal parts; the other half is left for ε.
        parts = 2 * trees.num_parameters(structure) * charged_rounds(config, participation)
        is_exchanged = config.privacy.relation == "replace_one"

        def bounded(z: float) -> Aggregator:
            group = 1 + math.exp(min(1 / z, 700.0)) if is_exchanged and z > 0 else 1.0
            entry_delta = max(level.dp_delta / parts / group, float(np.finfo(np.float32).tiny))
            return bounded_laplace_mean(structure, clip_norm, z, cohort, entry_delta)

        return bounded
    if level.mechanism == "central_discrete_gaussian":
        return lambda z: central_discrete_mean(structure, clip_norm, z, cohort)
    if level.mechanism == "discrete_gaussian":
        size, varies = trees.num_parameters(structure), participation.sampler.varies
        # A share from each client; the lattice has room for as many contributions.
        count = num_shares(participation.num_clients, cohort) if varies else int(cohort)
        bits = level.bits
        if bits == "auto":
            # Before the noise is known, that of an ordinary run.
            usual = float(level.noise_multiplier or 1.0)  # type: ignore[arg-type]
            bits = choose_bits(size, clip_norm, usual, num_clients=count)

        def discrete(z: float) -> Aggregator:
            plan = make_plan(size, clip_norm, z, num_clients=count, bits=bits)
            return discrete_mean(structure, plan, cohort if varies else count, varies=varies)

        return discrete
    if level.mechanism == "correlated_gaussian":
        noise = banded_noise(
            config.run.rounds,
            level.bands,
            min_separation=max(level.bands, participation.separation),
        )
        return lambda z: correlated_gaussian_mean(
            structure, noise, clip_norm, z, cohort, per_layer=level.per_layer
        )
    if level.adaptive_clipping:

        def adaptive(z: float) -> Aggregator:
            # The paper's choice for large cohorts; in small ones the count gets as much noise as
            # leaves the updates three quarters of what the round may cost.
            rule = make_adaptive_clipping(
                cohort,
                initial_clip_norm=clip_norm,
                target_quantile=level.target_quantile,
                count_stddev=max(cohort / 20, z),
            )
            return adaptive_gaussian_mean(rule, z, per_layer=level.per_layer)

        return adaptive
    return lambda z: gaussian_mean(clip_norm, z, cohort, per_layer=level.per_layer)


def charged_rounds(config: Config, participation: participants.Participation) -> int:
    """Counts the rounds that the client which takes part most often pays for.

    Args:
      config: the experiment.
      participation: who joins a round.

    Returns:
      All rounds, or fewer where turns are fixed.
    """
    if participation.sampler.charges_everybody:
        return config.run.rounds
    return -(-config.run.rounds // participation.separation)


def rounded_up(noise_multiplier: Any) -> np.ndarray:
    """Gives the next float32, so that the noise that runs is never below what was calibrated.

    Args:
      noise_multiplier: a number or an array of them.

    Returns:
      The same shape, float32.
    """
    # A Python number would be compared as float32, and never be found larger.
    exact = np.asarray(noise_multiplier, dtype=np.float64)
    rounded = exact.astype(np.float32)
    return np.where(rounded >= exact, rounded, np.nextafter(rounded, np.float32(np.inf)))


def structure_of(model: Any) -> PyTree:
    """Gives the shapes of a model's parameters.

    Args:
      model: the model.

    Returns:
      A tree of `jax.ShapeDtypeStruct`.
    """
    return jax.eval_shape(model.init, jax.random.key(0))
