"""Clipping of one unit's contribution, and clip norms that follow a quantile of update norms."""

import math
from collections.abc import Callable
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from annotated_types import Gt, Le
from chex import PRNGKey

from fedjax_dp.core import checks, trees
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.core.decimals import rounded_up
from fedjax_dp.core.materialize import materialize
from fedjax_dp.core.ranges import Fraction, NonNegative, Norms, Positive
from fedjax_dp.core.trees import PyTree
from fedjax_dp.privacy.mechanisms import random_bits
from fedjax_dp.privacy.sensitivities import Scalar

# Scales below this count as 0: rounded to the next float, they could be much larger.
SMALLEST_FACTOR = 2.0**-120
# A bound on entries is 2^12 to 2^13 units of its lattice; float32 holds every integer up to 2^24.
_UNITS_LOG2, _MOST_UNITS = 12, 2.0**24
# Bounds up to this one have units that are too small for float32.
_LEAST_LATTICE_BOUND = 2.0**-100
# A bound on entries that has a lattice; the same for numbers that may be traced, or inf.
LatticeNorm = Annotated[float, Gt(_LEAST_LATTICE_BOUND)]
LatticeNorms = Annotated[jax.typing.ArrayLike, Gt(_LEAST_LATTICE_BOUND), Le(math.inf)]
# Squares of float32 entries below this vanish; see `_factor`.
_SMALLEST_SEEN = float(np.sqrt(np.finfo(np.float32).tiny))
# An adapted clip norm outside of this range has diverged; it is held there.
_SMALLEST, _LARGEST = 1e-12, 1e12


def _leaves_of(tree: PyTree) -> tuple[list[jax.Array], Any]:
    """Checks and flattens a tree, in float32 or better, computed once: twice could round twice."""
    leaves, treedef = jax.tree.flatten(tree)
    leaves = [jnp.asarray(leaf) for leaf in leaves]
    for leaf in leaves:
        is_float = jnp.issubdtype(leaf.dtype, jnp.floating)
        checks.require(is_float, "tree", "hold floats only", leaf.dtype.name)
    return [materialize(trees.at_least_float32(leaf)) for leaf in leaves], treedef


def _norm(leaves: list[jax.Array]) -> jax.Array:
    """Computes a norm in float32 or better; inf for leaves with an entry that is not finite."""
    norm = trees.l2_norm(leaves)
    return jnp.where(jnp.isfinite(norm), norm, jnp.inf)


def _factor(norm: jax.Array, clip_norm: Scalar, size: int) -> jax.Array:
    """Computes the factor in [0, 1] that brings `norm` to at most `clip_norm`; 0 if norm is inf.

    The summand below bounds the norm of what vanished when squares underflowed, also at zero.
    """
    unseen = _SMALLEST_SEEN * math.sqrt(max(size, 1))
    bound = jnp.asarray(clip_norm, norm.dtype)
    bound = jnp.where(bound > 0, bound, 0)
    factor = jnp.minimum(1, bound / (norm + unseen))
    # A barely representable factor has a large relative rounding error, and might be rounded up.
    return jnp.where(jnp.isinf(norm) | (factor < SMALLEST_FACTOR), 0, factor)


def _scaled(leaf: jax.Array, factor: jax.Array, is_finite: jax.Array) -> jax.Array:
    return jnp.where(is_finite, leaf * factor.astype(leaf.dtype), 0)


@checked
def clip_by_global_norm(tree: PyTree, clip_norm: Norms) -> tuple[PyTree, jax.Array]:
    """Scales a tree down to a bound on its Euclidean norm over all leaves.

    The result is float32 or better: rounding it to a narrower type could lift its norm above
    the bound again.

    Guarantee: the result's norm is at most `clip_norm` up to rounding, for any input. A tree
    with an entry that is not finite, or with a norm beyond float32 (1.8e19), becomes zero.

    Args:
      tree: a tree of float arrays.
      clip_norm: the bound, above 0; may be traced; inf means no clipping. A traced bound that is
        NaN or not positive makes the result zero.

    Returns:
      `(clipped, norm)`, the clipped tree and the norm before clipping, a scalar in float32 or
      better, inf if the tree was not finite. The norm is not private.
    """
    leaves, treedef = _leaves_of(tree)
    norm = _norm(leaves)
    factor = _factor(norm, clip_norm, trees.num_parameters(leaves))
    is_finite = jnp.isfinite(norm)
    clipped = [_scaled(x, factor, is_finite) for x in leaves]
    return jax.tree.unflatten(treedef, clipped), norm


@checked
def clip_by_l1_norm(tree: PyTree, clip_norm: Norms) -> tuple[PyTree, jax.Array]:
    """Scales a tree down to a bound on its sum of absolute values over all leaves.

    Guarantee: as for `clip_by_global_norm`, in L1 norm, and therefore in L2 norm too.

    Args:
      tree: a tree of float arrays.
      clip_norm: the bound, above 0; may be traced; inf means no clipping.

    Returns:
      `(clipped, norm)`, the clipped tree and the L1 norm before clipping, inf if the tree was not
      finite. The norm is not private.
    """
    leaves, treedef = _leaves_of(tree)
    norm = trees.l1_norm(leaves)
    norm = jnp.where(jnp.isfinite(norm), norm, jnp.inf)
    factor = _factor(norm, clip_norm, trees.num_parameters(leaves))
    clipped = [_scaled(x, factor, jnp.isfinite(norm)) for x in leaves]
    return jax.tree.unflatten(treedef, clipped), norm


@checked
def clip_entries(tree: PyTree, bound: Norms) -> tuple[PyTree, jax.Array]:
    """Clips every entry of a tree to a largest absolute value, in float32 or better.

    Also returns the largest entry before clipping, inf if one is not finite, which is not private.

    Guarantee: no entry exceeds `bound` in absolute value, for any input; the whole tree is zero if
    an entry is not finite, or a traced bound not above 0.
    """
    leaves, treedef = _leaves_of(tree)
    largest = jnp.max(jnp.stack([jnp.max(jnp.abs(x), initial=0) for x in leaves]))
    # XLA's CPU backend ignores NaN in the maximum of more than 4,096 entries.
    is_finite = trees.is_finite(leaves)
    limit = jnp.asarray(bound, jnp.float32)
    limit = jnp.where(limit > 0, limit, 0)
    clipped = [jnp.where(is_finite, jnp.clip(x, -limit, limit), 0) for x in leaves]
    return jax.tree.unflatten(treedef, clipped), jnp.where(is_finite, largest, jnp.inf)


@checked
def clip_entries_to_lattice(tree: PyTree, bound: LatticeNorms) -> tuple[PyTree, jax.Array]:
    """Clips entries to a largest absolute value and rounds them, so that sums are exact.

    Entries become multiples of a power of two near `bound / 4096`. A sum of such trees holds no
    rounding as long as no entry of any partial sum is beyond 2^24 of these multiples, or if it is
    made by `core.sums`; `within_exact_sums` cuts sums off there. A bound of inf means neither a
    bound nor rounding; a traced one that is NaN or not above 2^-100 makes the result zero. Returns
    the same as `clip_entries`.

    Guarantee: as for `clip_entries`. One tree more or less moves an entry of
    `within_exact_sums(total, bound)` by at most `bound`, exactly, if `total` is summed as above. A
    plain running sum that exceeds 2^24 multiples on its way has been rounded: it is not covered.
    """
    limit, unit = _lattice(bound)
    clipped, largest = clip_entries(tree, jnp.where(limit > 0, limit, 1.0))

    def rounded(x: jax.Array) -> jax.Array:
        nearest = jnp.where(jnp.isinf(limit), x, jnp.round(x / unit) * unit)
        return jnp.where(limit > 0, nearest, 0).astype(x.dtype)

    return jax.tree.map(rounded, clipped), largest


def within_exact_sums(total: PyTree, bound: Scalar) -> PyTree:
    """Clips a sum where rounding would begin, 2,048 to 4,096 bounds from zero."""
    limit, unit = _lattice(bound)
    most = jnp.where(jnp.isinf(limit), jnp.inf, _MOST_UNITS * unit)
    return jax.tree.map(lambda x: jnp.clip(x, -most, most), total)


def _lattice(bound: Scalar) -> tuple[jax.Array, jax.Array]:
    """Finds the largest multiple of a unit within a bound, 0 if there is none, and the unit."""
    bound = jnp.asarray(bound, jnp.float32)
    is_ordinary = (bound > _LEAST_LATTICE_BOUND) & jnp.isfinite(bound)
    _, exponent = jnp.frexp(jnp.where(is_ordinary, bound, 1.0))
    unit = jnp.ldexp(jnp.float32(1.0), exponent - 1 - _UNITS_LOG2)
    limit = jnp.where(is_ordinary, jnp.floor(bound / unit) * unit, 0.0)
    return jnp.where(bound == jnp.inf, jnp.inf, limit), unit


@checked
def clip_per_layer(tree: PyTree, clip_norm: Norms) -> tuple[PyTree, jax.Array]:
    """Scales every leaf down to its own share of a bound on the whole tree.

    Each of the L leaves gets `clip_norm / √L`, so that the whole stays within `clip_norm` while
    one large layer cannot shrink the others.

    Guarantee: as for `clip_by_global_norm`; one entry that is not finite makes the whole tree
    zero.

    Args:
      tree: a tree of float arrays; each leaf is a layer.
      clip_norm: the bound on the whole tree, above 0; may be traced; inf means no clipping.

    Returns:
      `(clipped, norm)`, the clipped tree and the norm of the whole tree before clipping, inf if it
      was not finite. The norm is not private.

    Source: McMahan and others 2018, section 3 ("per-layer clipping").
    """
    leaves, treedef = _leaves_of(tree)
    norm = _norm(leaves)
    is_finite = jnp.isfinite(norm)
    share = jnp.asarray(clip_norm, norm.dtype) / math.sqrt(max(len(leaves), 1))
    clipped = [_scaled(x, _factor(_norm([x]), share, jnp.size(x)), is_finite) for x in leaves]
    return jax.tree.unflatten(treedef, clipped), norm


METHODS: dict[str, Callable[[PyTree, Scalar], tuple[PyTree, jax.Array]]] = {
    "global": clip_by_global_norm,
    "per_layer": clip_per_layer,
}


class AdaptiveClipping(NamedTuple):
    """The rule by which a clip norm is adapted, and the noise that hides the count it needs.

    Attributes:
      initial_clip_norm: the clip norm of the first round, above 0.
      target_quantile: the target share of contributions that are not clipped, in [0, 1].
      learning_rate: the step size of the logarithm of the clip norm, at least 0.
      count_stddev: standard deviation of the noise on the count of unclipped contributions.
      expected_cohort_size: the public expected number of contributions of a round.
    """

    initial_clip_norm: float
    target_quantile: float
    learning_rate: float
    count_stddev: float
    expected_cohort_size: float

    def contribution(self, norm: jax.Array, clip_norm: Scalar) -> jax.Array:
        """Computes what one unit adds to the count.

        Guarantee: its absolute value is 1/2 for any input, so that the sum has sensitivity 1/2
        under add/remove and 1 under replace-one.

        Args:
          norm: the norm before clipping; inf for an update that was not finite.
          clip_norm: the bound of this round.

        Returns:
          1/2 if the contribution was not clipped, -1/2 if it was; float32. Padding must be
          masked after this, before the sum.
        """
        return jnp.where(norm <= clip_norm, 0.5, -0.5).astype(jnp.float32)

    def step(
        self, key: PRNGKey, clip_norm: Scalar, total: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Moves the clip norm towards the target quantile.

        Too many clipped contributions make it larger, too few make it smaller.

        Args:
          key: used for the noise on the count and nothing else.
          clip_norm: the bound of this round.
          total: sum of `contribution` over the real units of this round.

        Returns:
          `(next clip norm, noised share of unclipped contributions)`, both released.

        Source: Andrew, Thakkar, McMahan, Ramaswamy 2021, algorithm 1 and equation (1).
        """
        noised = total + self.count_stddev * random_bits.normal(key, ())
        unclipped = noised / self.expected_cohort_size + 0.5
        rate = jnp.exp(-self.learning_rate * (unclipped - self.target_quantile))
        return jnp.clip(clip_norm * rate, _SMALLEST, _LARGEST), unclipped


@checked
def make_adaptive_clipping(
    expected_cohort_size: Positive,
    *,
    initial_clip_norm: Positive = 0.1,
    target_quantile: Fraction = 0.5,
    learning_rate: NonNegative = 0.2,
    count_stddev: Positive | None = None,
) -> AdaptiveClipping:
    """Builds the rule with the defaults of the paper.

    Guarantee: round t's clip norm depends on rounds before t only, through noised counts that
    `update_noise_multiplier` pays for.

    Args:
      expected_cohort_size: the public expected number of contributions of a round, above 0.
      initial_clip_norm: above 0.
      target_quantile: in [0, 1].
      learning_rate: at least 0.
      count_stddev: above 0; `expected_cohort_size / 20` if None.

    Returns:
      The rule.
    """
    stddev = expected_cohort_size / 20 if count_stddev is None else count_stddev
    return AdaptiveClipping(
        initial_clip_norm,
        target_quantile,
        learning_rate,
        float(stddev),
        float(expected_cohort_size),
    )


@checked
def update_noise_multiplier(noise_multiplier: Positive, count_stddev: Positive) -> float:
    """Computes the multiplier of updates that leaves the count its share of a round's.

    Updates and count are one Gaussian release of the same sample: `z⁻² = z_Δ⁻² + (2σ_b)⁻²`, since
    contributions to the count are ±1/2. A round is charged with z. A count that alone costs more
    than the round is refused.

    Source: Andrew, Thakkar, McMahan, Ramaswamy 2021, theorem 1.
    """
    left = noise_multiplier**-2 - (2 * count_stddev) ** -2
    rule = f"exceed {rounded_up(noise_multiplier / 2, 6)} for this multiplier"
    checks.require(left > 0, "count_stddev", rule, count_stddev)
    return 1 / math.sqrt(left)
