"""Means with a weight for each client: a given one, or one by the noise in its update."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_dp.core import checks, trees
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.core.ranges import Count
from fedjax_dp.server.base import Stacked, Summed, stateless
from fedjax_dp.server.robust_pca import check_options, estimate_noise

# Noise levels are at least this share of the largest, which limits the weight of a clean update and
# prevents division by zero.
_SMALLEST_LEVEL = 1e-9


class NoiseState(NamedTuple):
    """The server's estimates of its clients' noise: squared norms `[num_clients]`, 0 if unknown."""

    levels: jax.Array
    is_known: jax.Array
    rounds: jax.Array


def weighted_by_client(num_clients: int) -> Summed:
    """Averages updates by the given weights, and reports each client's share.

    Args:
      num_clients: the population, at least 1.

    Returns:
      The aggregator, streamed; the aggregate is zero if all weights are. Its info holds `weights`,
      `[num_clients]`, which sum to one over the cohort.
    """
    checks.whole("num_clients", num_clients)

    def contribute(state, numbers, update, sender):
        delta = jax.tree.map(trees.at_least_float32, update)
        share = sender.weight * jax.nn.one_hot(sender.index, num_clients)
        return trees.scale(delta, sender.weight), share

    def combine(state, numbers, total, close):
        summed, weights = total
        share = trees.reciprocal(jnp.sum(weights))
        return state, trees.scale(summed, share), {"weights": weights * share}

    return Summed(stateless, contribute, combine)


@checked
def inverse_noise_weights(levels: jax.Array, counts: jax.Array) -> jax.Array:
    """Computes weights inversely proportional to noise levels.

    Args:
      levels: at least 0, `[clients]`; smaller ones count as 1e-9 of the largest.
      counts: which clients take part, `[clients]`; the others get weight 0.

    Returns:
      Weights that sum to one, `[clients]`; equal ones if no update holds noise, zeros if no client
      takes part.

    Source: Malekmohammadi and others 2024 (Robust-HDP); Malekmohammadi 2025, section 3.5.3.
    """
    largest = jnp.max(jnp.where(counts, levels, 0.0))
    relative = levels / jnp.where(largest > 0, largest, 1.0)
    inverse = jnp.where(counts, _SMALLEST_LEVEL / jnp.maximum(relative, _SMALLEST_LEVEL), 0.0)
    total = jnp.sum(inverse)
    return inverse / jnp.where(total > 0, total, 1.0)


@checked
def noise_aware_mean(
    num_clients: Count,
    *,
    reestimate: str | int = "first",
    block_size: Count = 200_000,
    num_blocks: int | None = None,
    reads_tail: bool = False,
    mode: str = "inexact",
    tolerance: float = 1e-6,
    max_iterations: int = 1000,
) -> Stacked:
    """Averages updates by the inverse of the noise that robust PCA finds in them.

    The part that the updates of a round share is treated as signal, the rest as noise. Nothing that
    a client declares is read. As post-processing, it costs no privacy.

    Args:
      num_clients: the population, at least 1.
      reestimate: "first" estimates a client's level in the first round that it joins, "every" in
        every round, a number k in every k-th round.
      block_size: p', parameters that are decomposed together, at least 1.
      num_blocks: Q, blocks that are read, at least 1; all if None.
      reads_tail: as for `estimate_noise`; only without `num_blocks`.
      mode: "inexact" or "fixed", see `principal_component_pursuit`.
      tolerance: relative residual at which the pursuit stops, above 0.
      max_iterations: stops it in any case, at least 1.

    Returns:
      The aggregator; clients of weight 0, which have no examples, and updates of zeros are ignored.
      Its info holds `weights` and `noise_levels`, `[num_clients]` and 0 for absent clients,
      `signal_levels`, and diagnostics of the pursuit: `rpca_iterations`, `rpca_residual` and
      `rpca_rank`, 0 in rounds without an estimate.

    Raises:
      ValueError: naming the argument, the rule and the value.

    Source: Malekmohammadi and others 2024 (Robust-HDP), algorithm 1.
    """
    check_options(mode, tolerance, max_iterations, num_blocks, reads_tail)
    if isinstance(reestimate, str):
        checks.one_of("reestimate", reestimate, ("first", "every"))
        period = {"first": 0, "every": 1}[reestimate]
    else:
        checks.whole("reestimate", reestimate)
        period = reestimate

    def init(structure):
        zeros = jnp.zeros(num_clients, jnp.float32)
        return NoiseState(zeros, zeros > 0, jnp.int32(0))

    def contribute(state, numbers, update, sender):
        return jax.tree.map(trees.at_least_float32, update), sender.weight

    def combine(state: NoiseState, numbers, stack, close):
        update, weight = stack
        # An update of zeros has no noise, and would get all of the weight.
        squares = [
            jnp.sum(jnp.square(x.reshape(len(weight), -1)), 1) for x in jax.tree.leaves(update)
        ]
        counts = close.contributes & (weight > 0) & (sum(squares) > 0)
        clients = close.roster.clients
        is_due = (state.rounds % period == 0) if period else jnp.bool_(False)
        is_new = counts & (is_due | ~state.is_known[clients])

        def estimate(deltas):
            estimates = estimate_noise(
                deltas,
                counts,
                block_size=block_size,
                num_blocks=num_blocks,
                reads_tail=reads_tail,
                mode=mode,
                tolerance=tolerance,
                max_iterations=max_iterations,
            )
            return jax.tree.map(trees.at_least_float32, estimates)

        nothing = trees.zeros_like(jax.eval_shape(estimate, update))
        estimates = jax.lax.cond(jnp.any(is_new), estimate, lambda _: nothing, update)

        def by_client(values, which):
            # An index past the end drops clients that do not count.
            rows = jnp.where(which, clients, num_clients)
            return jnp.zeros(num_clients, values.dtype).at[rows].set(values, mode="drop")

        was_estimated = by_client(is_new, is_new)
        levels = jnp.where(was_estimated, by_client(estimates.noise_levels, is_new), state.levels)
        weights = inverse_noise_weights(levels[clients], counts)
        aggregate = jax.tree.map(
            lambda d: jnp.tensordot(weights, d, axes=1, precision=jax.lax.Precision.HIGHEST),
            update,
        )
        info = {
            "weights": by_client(weights, counts),
            "noise_levels": by_client(levels[clients], counts),
            "signal_levels": by_client(estimates.signal_levels, is_new),
            "rpca_iterations": estimates.num_iterations,
            "rpca_residual": estimates.residual,
            "rpca_rank": estimates.rank,
        }
        rounds = state.rounds + jnp.any(counts).astype(jnp.int32)
        return NoiseState(levels, state.is_known | was_estimated, rounds), aggregate, info

    return Stacked(init, contribute, combine)
