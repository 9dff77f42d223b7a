"""Canaries: clients or records made by the auditor, planted in a population and observed."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_dp.algorithms.base import FederatedAlgorithm
from fedjax_dp.core import checks, trees
from fedjax_dp.core.trees import PyTree
from fedjax_dp.data.federated import FederatedData
from fedjax_dp.data.participants import Participation
from fedjax_dp.engine.record import RoundInfo, RoundRecord

# The array that marks the records that are canaries: -1 for an ordinary record,
# k for canary k that is included, -2 - k for canary k that is not.
MARK = "canary"
# A canary's contribution before clipping, in units of the parameters: far beyond any clip norm.
STRENGTH = 1e6
# The key of the attacker's observations of canaries in the algorithm's info.
SEEN = "seen_of_canaries"


class Planted(NamedTuple):
    """An algorithm and a population with canaries in it."""

    unit: str  # "client" or "record"
    relation: str  # "zero_out" or "replace_one"
    algorithm: FederatedAlgorithm  # Its info reports what an attacker sees of every canary.
    data: FederatedData  # The population, with all of the canaries' records.
    participation: Participation
    owners: np.ndarray  # [canaries]: the client that each canary is, or that holds it.
    # [canaries], or [observations, canaries], of one round or of several, higher if a canary was
    # more likely included.
    scores: Callable[[RoundRecord, RoundInfo], jax.Array]
    sends_votes: bool = False  # Distances between votes have no meaning.

    def marks(self, is_included: jax.Array) -> jax.Array:
        """Writes the auditor's coins, `[canaries]`, into the array `MARK` of `data`."""
        mark = jnp.asarray(self.data.examples[MARK])
        drawn = jnp.asarray(is_included)[jnp.maximum(mark, 0)]
        return jnp.where((mark >= 0) & ~drawn, -2 - mark, mark)


def read_mark(mark: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns whether a mark is a canary's, whether that is included, and its index."""
    return mark != -1, mark >= 0, jnp.where(mark >= 0, mark, jnp.maximum(-2 - mark, 0))


def flat(tree: PyTree) -> jax.Array:
    """Flattens the float leaves of a tree into one vector, in float32 or better."""
    leaves = [jnp.asarray(x) for x in jax.tree.leaves(tree)]
    floats = [x.reshape(-1) for x in leaves if jnp.issubdtype(x.dtype, jnp.floating)]
    return jnp.concatenate([trees.at_least_float32(x) for x in floats])


def draw_coordinates(
    is_open: np.ndarray, num_canaries: int, rng: np.random.Generator
) -> np.ndarray:
    """Draws distinct entries of the parameters, counted as in `flat`, one for each canary."""
    (entries,) = np.nonzero(is_open)
    checks.whole("num_canaries", num_canaries)
    rule = f"be at most {entries.size}, one for each entry of the update"
    checks.require(num_canaries <= entries.size, "num_canaries", rule, num_canaries)
    return rng.choice(entries, num_canaries, replace=False).astype(np.int32)
