"""Means with a weight for each client: a given one, or one by the noise that robust PCA finds.

In robust PCA updates are rows, `[clients, parameters]`: the matrix of the papers is the transpose,
and the decomposition of a transpose is the transpose of the decomposition.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_dp.core import checks, trees
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.core.ranges import Count
from fedjax_dp.core.trees import PyTree
from fedjax_dp.server.base import Stacked, Summed, stateless

# Noise levels are at least this share of the largest, which limits the weight of a clean update and
# prevents division by zero.
_SMALLEST_LEVEL = 1e-9
MODES = ("fixed", "inexact")
# Growth rate and limit of the penalty in inexact mode. With dense noise, faster growth, or a start
# from the penalty of the fixed mode, stops far from the minimum.
_GROWTH, _LARGEST_GROWTH = 1.05, 1e7
# Products of updates are summed over millions of parameters, so they need full precision.
_EXACT = jax.lax.Precision.HIGHEST


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
            lambda d: jnp.tensordot(weights, d, axes=1, precision=jax.lax.Precision.HIGHEST), update
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


class Decomposition(NamedTuple):
    """A matrix as a sum of a low-rank and a sparse part.

    Attributes:
      low_rank: `[clients, parameters]`.
      sparse: `[clients, parameters]`.
      num_iterations: iterations that were run, int32.
      residual: norm of the remainder over the norm of the matrix.
      rank: rank of the low-rank part, int32.
    """

    low_rank: jax.Array
    sparse: jax.Array
    num_iterations: jax.Array
    residual: jax.Array
    rank: jax.Array


class NoiseEstimate(NamedTuple):
    """The noise in each update, and the convergence of the estimate.

    Attributes:
      noise_levels: squared norm of each update's sparse part, `[clients]`; 0 in empty slots.
      signal_levels: squared norm of each update's low-rank part, `[clients]`.
      num_iterations: the largest number of iterations of a block, int32.
      residual: the largest relative residual of a block.
      rank: the largest rank of a block's low-rank part, int32.
    """

    noise_levels: jax.Array
    signal_levels: jax.Array
    num_iterations: jax.Array
    residual: jax.Array
    rank: jax.Array


def check_options(
    mode: str,
    tolerance: float,
    max_iterations: int,
    num_blocks: int | None = None,
    reads_tail: bool = False,
) -> None:
    """Checks the static options of the pursuit, and of the blocks that it reads."""
    checks.one_of("mode", mode, MODES)
    checks.positive("tolerance", tolerance)
    checks.whole("max_iterations", max_iterations)
    if num_blocks is not None:
        checks.whole("num_blocks", num_blocks)
        rule = "be None if reads_tail is set, which reads all parameters"
        checks.require(not reads_tail, "num_blocks", rule, num_blocks)


def blocks_of(
    num_parameters: int, block_size: int, num_blocks: int | None, reads_tail: bool = False
) -> tuple[int, list[int]]:
    """Returns the width of a block of parameters and the first parameter of each block to read."""
    checks.whole("block_size", block_size)
    width = min(block_size, num_parameters)
    starts = [b * width for b in range(num_parameters // width)]
    if reads_tail and num_parameters % width:
        starts.append(num_parameters - width)
    if num_blocks is None:
        return width, starts
    rule = f"be at most {len(starts)}, the blocks of {width} in {num_parameters} parameters"
    checks.require(num_blocks <= len(starts), "num_blocks", rule, num_blocks)
    return width, starts[:num_blocks]


@checked
def principal_component_pursuit(
    matrix: jax.Array,
    is_real: jax.Array | None = None,
    *,
    mode: str = "fixed",
    tolerance: float = 1e-6,
    max_iterations: int = 1000,
) -> Decomposition:
    """Splits a matrix into a low-rank and a sparse part by augmented Lagrangian iterations.

    Minimises `‖L‖_* + λ‖S‖_1` over `L + S = M` with `λ = 1/√max(p, n)`. Singular values come from
    the Gram matrix of the clients, so that an iteration costs O(p n²) and its large arrays are as
    wide as the matrix. The matrix is scaled to mean absolute value one first, so that its scale
    does not matter.

    Args:
      matrix: `[clients, parameters]`, computed in float32 or better.
      is_real: which rows count, `[clients]`; all if None.
      mode: "fixed" keeps the penalty at `μ = p n/(4 Σ|M|)`; "inexact" starts from `1.25/‖M‖_2` and
        lets it grow by a twentieth in every iteration; about a hundred iterations are enough.
      tolerance: stop when `‖M − L − S‖ ≤ tolerance ‖M‖`, above 0; rounding bounds it below near
        1e-7 in float32.
      max_iterations: the largest number of iterations, at least 1.

    Returns:
      The decomposition; zeros for a matrix of zeros.

    Raises:
      ValueError: for a mode or number that is not valid.

    Source: Candès and others 2011, algorithm 1; Lin, Chen, Ma 2010 for the growing penalty.
    """
    check_options(mode, tolerance, max_iterations)
    num_slots, num_parameters = matrix.shape
    is_real = jnp.ones(num_slots, bool) if is_real is None else is_real
    matrix = jnp.where(is_real[:, None], trees.at_least_float32(matrix), 0.0)
    num_clients = jnp.sum(is_real)
    num_entries = jnp.maximum(num_clients * num_parameters, 1).astype(matrix.dtype)
    mean = jnp.sum(jnp.abs(matrix)) / num_entries
    scale = jnp.where(mean > 0, mean, 1.0)
    matrix = matrix / scale
    norm = jnp.sqrt(jnp.sum(jnp.square(matrix)))
    sparsity = 1 / jnp.sqrt(jnp.maximum(num_parameters, num_clients)).astype(matrix.dtype)
    # The mean absolute value is one, so that p n/(4 Σ|M|) is a quarter.
    penalty = largest = jnp.asarray(0.25, matrix.dtype)
    if mode == "inexact":
        squares, _ = _gram_eigenvalues(matrix)
        penalty = 1.25 / jnp.sqrt(jnp.where(norm > 0, squares[-1], 1.0))
        largest = penalty * _LARGEST_GROWTH

    def iterate(carry):
        i, mu, _, sparse, dual, *_ = carry
        low_rank, rank = _shrink_singular_values(matrix - sparse + dual / mu, 1 / mu)
        rest = matrix - low_rank + dual / mu
        sparse = _shrink(rest, sparsity / mu)
        dual = mu * (rest - sparse)
        residual = jnp.sqrt(jnp.sum(jnp.square(matrix - low_rank - sparse)))
        residual = residual / jnp.where(norm > 0, norm, 1.0)
        return i + 1, jnp.minimum(mu * _GROWTH, largest), low_rank, sparse, dual, residual, rank

    def is_unfinished(carry):
        i, *_, residual, _ = carry
        return (i < max_iterations) & (residual > tolerance)

    zeros = jnp.zeros_like(matrix)
    start = (norm > 0).astype(matrix.dtype)
    carry = (jnp.int32(0), penalty, zeros, zeros, zeros, start, jnp.int32(0))
    done, _, low_rank, sparse, _, residual, rank = jax.lax.while_loop(is_unfinished, iterate, carry)
    # Rounding may leave residue of other rows in rows of zeros.
    low_rank, sparse = (jnp.where(is_real[:, None], x * scale, 0.0) for x in (low_rank, sparse))
    return Decomposition(low_rank, sparse, done, residual, rank)


@checked
def estimate_noise(
    updates: PyTree,
    is_real: jax.Array | None = None,
    *,
    block_size: int = 200_000,
    num_blocks: int | None = None,
    reads_tail: bool = False,
    mode: str = "inexact",
    tolerance: float = 1e-6,
    max_iterations: int = 1000,
) -> NoiseEstimate:
    """Estimates how much noise each update holds, block of parameters by block.

    Only one block is copied and decomposed at a time: beyond the updates themselves the memory is
    that of about ten arrays `[clients, block_size]`.

    Args:
      updates: each leaf `[clients, ...]`.
      is_real: which rows hold an update, `[clients]`; all if None.
      block_size: p', parameters that are decomposed together, at least 1; all if the model has
        fewer.
      num_blocks: Q, blocks that are read, the first ones in the order of the leaves; all ⌊p/p'⌋ if
        None.
      reads_tail: read the last p' parameters as one more block, which overlaps the one before it,
        if ⌊p/p'⌋ blocks leave a rest; such a block weighs as much as any other.
      mode: as for `principal_component_pursuit`.
      tolerance: as for `principal_component_pursuit`.
      max_iterations: as for `principal_component_pursuit`.

    Returns:
      The estimate; levels are those of a whole update, scaled up from the blocks that were read.

    Raises:
      ValueError: for a choice that is not valid, more blocks than the model has, or a number of
        blocks together with the tail.

    Source: Malekmohammadi and others 2024 (Robust-HDP), algorithm 1; Malekmohammadi 2025, section
    3.5.5, for blocks and the tail.
    """
    check_options(mode, tolerance, max_iterations, num_blocks, reads_tail)
    leaves = [x.reshape(x.shape[0], -1) for x in jax.tree.leaves(updates)]
    num_slots, num_parameters = leaves[0].shape[0], sum(x.shape[1] for x in leaves)
    is_real = jnp.ones(num_slots, bool) if is_real is None else is_real
    width, starts = blocks_of(num_parameters, block_size, num_blocks, reads_tail)
    count = len(starts)

    def decompose(block: jax.Array) -> NoiseEstimate:
        parts = principal_component_pursuit(
            block, is_real, mode=mode, tolerance=tolerance, max_iterations=max_iterations
        )
        return NoiseEstimate(
            jnp.sum(jnp.square(parts.sparse), axis=1),
            jnp.sum(jnp.square(parts.low_rank), axis=1),
            *parts[2:],
        )

    def body(i, total: NoiseEstimate) -> NoiseEstimate:
        readers = [_reader(leaves, start, width) for start in starts]
        one = decompose(jax.lax.switch(i, readers))
        return NoiseEstimate(
            total.noise_levels + one.noise_levels,
            total.signal_levels + one.signal_levels,
            *(jnp.maximum(a, b) for a, b in zip(total[2:], one[2:], strict=True)),
        )

    if count == 1:
        summed = decompose(_reader(leaves, 0, width)())
    else:
        shapes = jax.eval_shape(lambda: decompose(_reader(leaves, 0, width)()))
        zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
        summed = jax.lax.fori_loop(0, count, body, zeros)
    scale = num_parameters / (count * width)
    return summed._replace(
        noise_levels=summed.noise_levels * scale, signal_levels=summed.signal_levels * scale
    )


def _reader(leaves: list[jax.Array], start: int, width: int) -> Any:
    """Builds a function that copies a range of columns of all leaves."""

    def read() -> jax.Array:
        parts, offset = [], 0
        for leaf in leaves:
            low, high = max(start - offset, 0), min(start + width - offset, leaf.shape[1])
            if low < high:
                parts.append(trees.at_least_float32(leaf[:, low:high]))
            offset += leaf.shape[1]
        return jnp.concatenate(parts, axis=1)

    return read


def _shrink(x: jax.Array, threshold: jax.Array) -> jax.Array:
    return jnp.sign(x) * jnp.maximum(jnp.abs(x) - threshold, 0.0)


def _gram_eigenvalues(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Decomposes the Gram matrix of the rows; eigenvalues are ascending and at least 0."""
    squares, vectors = jnp.linalg.eigh(jnp.matmul(x, x.T, precision=_EXACT))
    return jnp.maximum(squares, 0.0), vectors


def _shrink_singular_values(x: jax.Array, threshold: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Soft-thresholds the singular values; returns the matrix and its rank."""
    squares, vectors = _gram_eigenvalues(x)
    values = jnp.sqrt(squares)
    kept = jnp.where(values > threshold, 1 - threshold / jnp.maximum(values, threshold), 0.0)
    projection = jnp.matmul(vectors * kept, vectors.T, precision=_EXACT)
    return jnp.matmul(projection, x, precision=_EXACT), jnp.sum(kept > 0, dtype=jnp.int32)
