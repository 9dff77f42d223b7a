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

# Shares for each expected client where cohorts vary: what is left over after an even split, and
# then falls to the server, is below one share a client.
_SHARES_PER_CLIENT = 4


class DiscreteState(NamedTuple):
    """Who adds how many shares of noise; tables of noise are made from the plan and are static.

    Attributes:
      shares_each: shares that every client of the round adds, int32.
      shares_left: shares that the server adds, int32.
    """

    shares_each: jax.Array
    shares_left: jax.Array


def num_shares(cohort_size: float) -> int:
    """Chooses into how many shares the noise of cohorts of varying size is cut.

    Args:
      cohort_size: expected clients a round, above 0.

    Returns:
      Four for each expected client.
    """
    checks.positive("cohort_size", cohort_size)
    return _SHARES_PER_CLIENT * max(1, round(cohort_size))


def discrete_mean(
    structure: PyTree, plan: distributed.Plan, cohort_size: float, *, is_split: bool = False
) -> Aggregator:
    """Builds the mean of DDGauss: rotate, round, noise at the client, sum modulo 2^B.

    Guarantee: unit of privacy is one client, which may send zeros instead of its update; the event
    is the plan's own, with `plan.num_shares` shares of noise in every sum. Either each of a cohort
    of fixed size adds one, or the clients of a cohort of any size split them: the server announces
    how many take part, each adds as many shares as fit evenly, and the server adds those left over.
    The noise then has one law whatever the cohort, as sampling needs. Secure aggregation is
    simulated by the exact modular sum. A client whose update is not finite sends zeros with its
    noise. A plan of one share is noise that a trusted server adds, to cohorts of any size.

    Args:
      structure: the parameters, as arrays or shapes.
      plan: from `privacy.distributed.make_plan`, for this number of parameters.
      cohort_size: the public divisor; where clients add a share each, a whole number of at least
        `plan.num_shares`.
      is_split: whether the clients split the noise; for cohorts that vary.

    Returns:
      The aggregator; its info holds the bits that a client sends for each parameter.

    Raises:
      ValueError: if fewer clients take part than shares of noise are accounted.

    Source: Kairouz, Liu, Steinke 2021, algorithms 1 and 2; `user_level_dp` section 6.
    """
    if is_split or plan.num_shares == 1:
        checks.positive("cohort_size", cohort_size)
    else:
        checks.whole("cohort_size", cohort_size)
        rule = f"be at most the cohort of {cohort_size} clients"
        checks.require(plan.num_shares <= cohort_size, "plan.num_shares", rule, plan.num_shares)
    mechanism = distributed.discrete_mechanism(structure, plan)
    size = trees.num_parameters(structure)

    def announce(state, num_participants):
        each = plan.num_shares // jnp.maximum(num_participants, 1)
        each = jnp.where(num_participants > 0, each, 0).astype(jnp.int32)
        return DiscreteState(each, plan.num_shares - each * num_participants)

    def contribute(state, update, weight):
        del weight
        return jax.tree.map(trees.at_least_float32, update)

    def encode(state, contribution, round_key, client_key):
        was_clipped = (trees.l2_norm(contribution) > plan.clip_norm).astype(jnp.float32)
        rotation_key = fold(round_key, 0)
        if not is_split:
            return mechanism.encode(rotation_key, client_key, contribution), was_clipped
        message = mechanism.to_lattice(rotation_key, client_key, contribution)
        message = mechanism.add_shares(fold(client_key, 1), message, state.shares_each)
        return message, was_clipped

    def combine(state, total, key):
        messages, num_clipped = total
        if is_split:
            noised = mechanism.add_shares(fold(key, 1), messages, state.shares_left)
        else:
            noised = mechanism.add_noise(fold(key, 1), messages)
        summed = mechanism.decode(fold(key, 0), noised)
        info = {
            "bits_per_parameter": jnp.float32(plan.bits * plan.dimension / size),
            "noise_stddev": jnp.float32(plan.noise_stddev / cohort_size),
            "num_clipped": num_clipped,
        }
        return state, trees.scale(summed, 1.0 / cohort_size), info

    return Aggregator(
        lambda params: DiscreteState(jnp.int32(1), jnp.int32(0)),
        contribute,
        combine,
        encode=encode,
        announce=announce if is_split else None,
        sensitivity=lambda state: sensitivity_of_sum(plan.l2_norm * plan.granularity),
        event=lambda state: mechanism.event(),
        min_participants=plan.num_shares if plan.num_shares > 1 and not is_split else 0,
    )
