"""Noise that is correlated over rounds: banded matrix factorisation, for unsampled cohorts."""

import math
from typing import NamedTuple

import dp_accounting as dpa
import jax
import jax.numpy as jnp
import numpy as np
from chex import PRNGKey

from fedjax_dp.core import checks, trees
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.core.packages import needed_for
from fedjax_dp.core.ranges import Count
from fedjax_dp.core.trees import PyTree, library_promotion
from fedjax_dp.privacy.events import DpEvent
from fedjax_dp.privacy.mechanisms import random_bits
from fedjax_dp.privacy.mechanisms.noise import release


class BandedNoise(NamedTuple):
    """A run's correlated noise: the release is `C⁻¹(C x + z)` for a banded Toeplitz C.

    Rounds add up in the model, so that noise which partly cancels that of earlier rounds hurts less
    than independent noise of the same privacy.

    Attributes:
      coefficients: `[bands]` first column of C, float32; Euclidean norm 1.
      sensitivity: how far one unit of contribution 1 moves C x over the whole run.
      num_rounds: the number of rounds that it was built for.
    """

    coefficients: np.ndarray
    sensitivity: float
    num_rounds: int

    def init(self, tree: PyTree) -> PyTree:
        """Builds the state before the first round.

        Args:
          tree: the tree to be noised.

        Returns:
          The last noises, `[bands - 1, ...]` at every leaf, float32. It must be kept with the
          run: without it, later noise is not private.
        """
        rows = len(self.coefficients) - 1
        return jax.tree.map(lambda x: jnp.zeros((rows, *jnp.shape(x)), jnp.float32), tree)

    def add_noise(
        self, key: PRNGKey, state: PyTree, total: PyTree, stddev: jax.typing.ArrayLike
    ) -> tuple[PyTree, PyTree]:
        """Adds one round's noise to the sum of one round's clipped contributions.

        Args:
          key: used for this round and nothing else.
          state: from `init` or the round before.
          total: a tree of float arrays.
          stddev: `noise_multiplier · sensitivity · clip norm`, the same in every round; may be
            traced. A traced value that is negative or not finite releases zeros.

        Returns:
          `(state, noised)`, the noised tree float32 or better.

        Source: Choquette-Choo and others 2023, algorithm 9 (row by row solution of C z̃ = z).
        """
        leaves, treedef = jax.tree.flatten(total)
        past = jax.tree.leaves(state)
        first, *rest = [float(c) for c in self.coefficients]
        kept, noised = [], []
        parts = zip(leaves, past, random_bits.like(key, leaves, random_bits.normal), strict=True)
        for leaf, buffer, draw in parts:
            known = sum((c * buffer[i] for i, c in enumerate(rest)), start=jnp.float32(0))
            new = (draw - known) / first
            kept.append(jnp.concatenate([new[None], buffer[:-1]]) if rest else buffer)
            wide = trees.at_least_float32(jnp.asarray(leaf))
            noised.append(release(wide, stddev, new))
        return jax.tree.unflatten(treedef, kept), jax.tree.unflatten(treedef, noised)

    def event(self, noise_multiplier: float) -> DpEvent:
        """Builds the event of the whole run, which is one Gaussian release of C x.

        Guarantee: charged once, before the first round, it covers every prefix of the run. Adding
        or removing a unit means that its contributions are zero while all others take part as
        before.

        Args:
          noise_multiplier: as in `add_noise`, at least 0.

        Returns:
          The event.
        """
        checks.non_negative("noise_multiplier", noise_multiplier)
        return dpa.GaussianDpEvent(float(noise_multiplier))


# Of rounds times bands: as many floats are held while coefficients are optimised, 4 GB.
_MOST_TERMS = 2**30


@checked
def banded_noise(
    num_rounds: Count,
    bands: Count,
    *,
    min_separation: Count,
    max_participations: Count | None = None,
) -> BandedNoise:
    """Finds the best banded noise for a participation pattern.

    Guarantee: holds if two participations of a unit are at least `min_separation` rounds apart
    and there are at most `max_participations` of them; cyclic cohorts of a population always meet
    this. More than `num_rounds` rounds need new noise and another charge.

    Args:
      num_rounds: rounds of the run, at least 1.
      bands: the number of correlated rounds, from 1 (independent noise) to `min_separation`;
        the state holds `bands - 1` copies of the model.
      min_separation: rounds from one participation of a unit to its next, at least 1.
      max_participations: at least 1; as many as fit into the run if None.

    Returns:
      The noise.

    Source: Choquette-Choo and others 2023, theorem 2 (sensitivity) and section 4 (bands).
    """
    rule = f"be at most min_separation, {min_separation}"
    checks.require(bands <= min_separation, "bands", rule, bands)
    most = max(1, _MOST_TERMS // num_rounds)
    rule = f"be at most {most} in a run of {num_rounds} rounds, which are optimised together"
    checks.require(min(bands, num_rounds) <= most, "bands", rule, bands)
    fitting = math.ceil(num_rounds / min_separation)
    if max_participations is not None:
        fitting = min(fitting, max_participations)
    coefficients = best_coefficients(num_rounds, min(bands, num_rounds))
    # Rounded to float32 before the sensitivity is taken, which then is that of the noise that runs.
    coefficients = coefficients.astype(np.float32)
    norm = float(np.linalg.norm(coefficients.astype(float)))
    return BandedNoise(coefficients, math.sqrt(fitting) * norm, num_rounds)


def best_coefficients(num_rounds: int, bands: int) -> np.ndarray:
    """Finds the banded Toeplitz strategy of least error at fixed privacy, of norm 1."""
    if bands == 1:
        return np.ones(1)
    # Importing it takes a third of a second, which runs without correlated noise need not pay.
    with needed_for("correlated noise over several rounds", "correlated"):
        from jax_privacy.matrix_factorization import toeplitz

    with library_promotion():
        found = np.asarray(toeplitz.optimize_banded_toeplitz(num_rounds, bands), float)
    return found / np.linalg.norm(found)
