"""Distributed discrete noise: clients send noised integers, the server only ever sees their sum."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_dp.core import checks, trees
from fedjax_dp.core.keys import fold
from fedjax_dp.core.trees import PyTree
from fedjax_dp.privacy import distributed
from fedjax_dp.privacy.clipping import sensitivity_of_sum
from fedjax_dp.server.base import Aggregator


class DiscreteState(NamedTuple):
    """Nothing: tables of noise are made from the plan, whose numbers are therefore static."""


def discrete_mean(structure: PyTree, plan: distributed.Plan, cohort_size: int) -> Aggregator:
    """Builds the mean of DDGauss: rotate, round, noise at the client, sum modulo 2^B.

    Guarantee: unit of privacy is one client, which may send zeros instead of its update; the event
    is the plan's own. It holds as long as `plan.num_shares` clients add their share of the noise,
    so that the cohort must have a fixed size; secure aggregation is simulated by the exact modular
    sum. A client whose update is not finite sends zeros and its share.

    Args:
      structure: the parameters, as arrays or shapes.
      plan: from `privacy.distributed.make_plan`, for this number of parameters.
      cohort_size: the public divisor; at least `plan.num_shares`.

    Returns:
      The aggregator; its info holds the bits that a client sends for each parameter.

    Raises:
      ValueError: if fewer clients take part than shares of noise are accounted.

    Source: Kairouz, Liu, Steinke 2021, algorithms 1 and 2; `user_level_dp` section 6.
    """
    checks.whole("cohort_size", cohort_size)
    checks.require(
        plan.num_shares <= cohort_size,
        "plan.num_shares",
        f"be at most the cohort of {cohort_size} clients",
        plan.num_shares,
    )
    mechanism = distributed.discrete_mechanism(structure, plan)
    size = trees.num_parameters(structure)

    def contribute(state, update, weight):
        del weight
        return jax.tree.map(trees.at_least_float32, update)

    def encode(state, contribution, round_key, client_key):
        return mechanism.encode(fold(round_key, 0), client_key, contribution)

    def combine(state, total, key):
        summed = mechanism.decode(fold(key, 0), mechanism.add_noise(fold(key, 1), total))
        info = {
            "bits_per_parameter": jnp.float32(plan.bits * plan.dimension / size),
            "noise_stddev": jnp.float32(plan.noise_stddev / cohort_size),
        }
        return state, trees.scale(summed, 1.0 / cohort_size), info

    return Aggregator(
        lambda params: DiscreteState(),
        contribute,
        combine,
        encode=encode,
        sensitivity=lambda state: sensitivity_of_sum(plan.l2_norm * plan.granularity),
        event=lambda state: mechanism.event(),
        min_participants=plan.num_shares if plan.num_shares > 1 else 0,
    )
