"""Distributed discrete noise: clients send noised integers, the server sees only their sum."""

import jax
import jax.numpy as jnp
from scipy import stats

from fedjax_dp.core import checks, trees
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.core.messages import Coded
from fedjax_dp.core.ranges import Count, Positive
from fedjax_dp.core.trees import PyTree
from fedjax_dp.privacy.claims import ClientClaim
from fedjax_dp.privacy.mechanisms import distributed
from fedjax_dp.privacy.sensitivities import sensitivity_of_sum
from fedjax_dp.server.base import Diagnostic, Summed, stateless

# Probability that a Poisson cohort has more clients than shares of noise; such a round is lost.
_LOST_ROUNDS = 1e-4


@checked
def num_shares(num_clients: Count, cohort_size: Positive) -> int:
    """Computes the fewest shares of noise that 1 cohort in 10,000 exceeds.

    Args:
      num_clients: the population.
      cohort_size: the expected cohort, above 0.

    Returns:
      The number, at least 2.

    Raises:
      ValueError: for a number out of its range.
    """
    largest = stats.binom.isf(_LOST_ROUNDS, num_clients, min(1.0, cohort_size / num_clients))
    return max(2, int(largest))


@checked
def discrete_mean(
    structure: PyTree,
    plan: distributed.Plan,
    expected_cohort_size: float,
    *,
    varies: bool = False,
) -> Summed:
    """Builds the mean of DDGauss: rotate, round, noise at the client, sum modulo 2^B.

    Every client adds one share of noise. Nothing that it sends depends on the cohort, whose size it
    does not learn. If cohorts vary, the server adds the missing shares. It does not decode a round
    with more clients than shares but releases noise alone, since excess noise would reveal the
    size.

    Guarantee: unit of privacy is one client, which may send zeros instead of its update; the event
    is that of the plan, with `plan.num_shares` shares of noise in every release. If cohorts vary,
    there are exactly that many, so that the noise distribution does not depend on the cohort, as
    amplification by sampling requires; it also requires that the cohort and its size stay hidden
    from all untrusted parties, clients included. The server is trusted to add the missing shares,
    and knows the size. Secure aggregation is simulated by the exact modular sum: messages are in
    the highest B bits of words, so that the sum of words depends on the sum modulo 2^B alone. The
    count of clipped updates is exact, for the experimenter, and no claim covers it. A client whose
    update is not finite sends zeros with its noise. With `plan.colluders` above 0 the event also
    holds against an honest but curious server and that many clients, who may subtract the shares
    that they know, provided that messages are masked, see `server.secure.masked`. A plan with one
    share is noise that a trusted server adds, for cohorts of any size.

    Args:
      structure: the parameters, as arrays or shapes.
      plan: from `privacy.make_plan`, for this number of parameters.
      expected_cohort_size: the public divisor; unless cohorts vary, an integer of at least
        `plan.shares_in_sum` where each client adds a share.
      varies: whether cohorts vary, as under Poisson sampling, and the server adds the shares that
        are missing; the plan then has at least two, see `num_shares`. False where messages are
        masked: a sum of too few clients is lost.

    Returns:
      The aggregator; its info holds the bits that a client sends for each parameter, whether the
      round was lost and, unless messages are masked, `num_clipped`.

    Raises:
      ValueError: if fewer clients take part than shares of noise are accounted.

    Source: Kairouz, Liu, Steinke 2021, algorithms 1 and 2.
    """
    if plan.num_shares == 1:
        checks.positive("expected_cohort_size", expected_cohort_size)
        checks.require(not varies, "varies", "be false if the server adds all noise", varies)
    elif varies:
        checks.positive("expected_cohort_size", expected_cohort_size)
        checks.whole("plan.num_shares", plan.num_shares, at_least=2)
        rule = "be 0 if cohorts vary, since the server knows the shares that it adds"
        checks.require(plan.colluders == 0, "plan.colluders", rule, plan.colluders)
    else:
        checks.whole("expected_cohort_size", expected_cohort_size)
        rule = f"be at most the cohort of {expected_cohort_size} clients"
        fits = plan.shares_in_sum <= expected_cohort_size
        shares = "plan.shares_in_sum" if plan.colluders else "plan.num_shares"
        checks.require(fits, shares, rule, plan.shares_in_sum)
    mechanism = distributed.discrete_mechanism(structure, plan)
    size = trees.num_parameters(structure)
    # In the highest bits, sums of words lose what overflows 2^B, which no event covers.
    shift = 32 - plan.bits

    def contribute(state, numbers, update, sender):
        return jax.tree.map(trees.at_least_float32, update)

    def encode(state, numbers, contribution, sender):
        was_clipped = (trees.l2_norm(contribution) > plan.clip_norm).astype(jnp.float32)
        message = mechanism.encode(sender.public_key, sender.key, contribution)
        return message << shift, Diagnostic(was_clipped), jnp.int32(1)

    def filled(key, messages, count):
        is_lost = count > plan.num_shares
        messages = jnp.where(is_lost, jnp.zeros_like(messages), messages)
        missing = plan.num_shares - jnp.where(is_lost, 0, count)
        return mechanism.add_shares(key, messages, missing), is_lost

    def combine(state, numbers, total, close):
        words, clipped, count = total
        messages = words >> shift
        if varies:
            noised, is_lost = filled(close.private_key, messages, count)
        else:
            noised, is_lost = mechanism.add_noise(close.private_key, messages), False
        summed = mechanism.decode(close.public_key, noised)
        info = {
            "bits_per_parameter": jnp.float32(plan.bits * plan.dimension / size),
            "noise_stddev": jnp.float32(plan.noise_stddev / expected_cohort_size),
            "num_lost": jnp.int32(is_lost),
        }
        if clipped is not None:
            info["num_clipped"] = clipped.value
        return state, trees.scale(summed, 1.0 / expected_cohort_size), info

    claim = ClientClaim(
        sensitivity=lambda state, numbers: sensitivity_of_sum(plan.l2_norm * plan.granularity),
        event=lambda numbers: mechanism.event(),
        min_participants=plan.shares_in_sum if plan.num_shares > 1 and not varies else 0,
        divisor=lambda numbers: expected_cohort_size,
    )

    def message(update, weight):
        return Coded(jnp.zeros(plan.dimension, jnp.uint32), plan.bits)

    return Summed(stateless, contribute, combine, encode=encode, claim=claim, message=message)
