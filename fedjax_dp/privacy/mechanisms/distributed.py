"""Discrete noise on sums of integers modulo 2^B, in shares by the clients or by the server."""

import math
from collections.abc import Callable
from typing import Annotated, Any, NamedTuple

import attr
import jax
import jax.numpy as jnp
import numpy as np
from annotated_types import Ge, Le
from chex import PRNGKey

from fedjax_dp.core import checks, keys, trees
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.core.ranges import (
    Count,
    Decay,
    Index,
    NonNegative,
    Positive,
    Probability,
    ProperFraction,
)
from fedjax_dp.core.trees import PyTree
from fedjax_dp.privacy.events import CurveDpEvent, DpEvent
from fedjax_dp.privacy.mechanisms import clipping, discrete

_MAX_TRIES = 64
# Norms of rounded vectors are summed in float32, with an error below 2^-18 for up to 2^30 entries;
# this margin is kept between the sum and the bound.
_NORM_MARGIN = 1 - 2.0**-14


@attr.s(frozen=True, slots=True, auto_attribs=True)
class DistributedDiscreteGaussianDpEvent(CurveDpEvent):
    """A sum of integer vectors with a discrete Gaussian share of noise from every party.

    Attributes:
      noise_scale: σ of one share, in units of the lattice.
      num_shares: the fewest shares in the sum; 1 is noise that is added centrally.
      l2_norm: largest Euclidean norm of one contribution, in units of the lattice.
      l1_norm: largest sum of absolute values of one contribution.
      dimension: number of coordinates.
    """

    noise_scale: float
    num_shares: int
    l2_norm: float
    l1_norm: float
    dimension: int

    def rdp(self, orders: np.ndarray, relation: str) -> np.ndarray:
        """Computes the curve; replacing a unit moves the sum twice as far as removing it.

        Args:
          orders: `[orders]`, above 1.
          relation: "add_remove", "zero_out" or "replace_one".

        Returns:
          `[orders]`; inf without noise, or if one of several shares has a scale below 1/2, for
          which nothing is proven.

        Source: Kairouz, Liu, Steinke 2021, proposition 14 and theorem 1.
        """
        is_too_small = self.num_shares > 1 and self.noise_scale < 0.5
        if self.noise_scale == 0 or is_too_small:
            return np.full(len(orders), np.inf)
        factor = 2 if relation == "replace_one" else 1
        total = math.sqrt(self.num_shares) * self.noise_scale
        s2, s1 = factor * self.l2_norm / total, factor * self.l1_norm / total
        k = np.arange(1, self.num_shares)
        # Sums of discrete Gaussians are not quite discrete Gaussians: that costs τ for each
        # coordinate.
        tau = 10 * np.sum(np.exp(-2 * np.pi**2 * self.noise_scale**2 * k / (k + 1)))
        d = self.dimension
        return np.minimum.reduce(
            [
                orders * s2**2 / 2 + tau * d,
                orders / 2 * (s2**2 + 2 * s1 * tau + tau**2 * d),
                orders / 2 * (s2 + tau * math.sqrt(d)) ** 2,
            ]
        )


@attr.s(frozen=True, slots=True, auto_attribs=True)
class SkellamDpEvent(CurveDpEvent):
    """A sum of integer vectors with Skellam noise, from one party or in shares of many.

    Attributes:
      variance: of the noise on each coordinate of the sum, in units of the lattice squared.
      l2_norm: largest Euclidean norm of one contribution, in units of the lattice.
      l1_norm: largest sum of absolute values of one contribution.
    """

    variance: float
    l2_norm: float
    l1_norm: float

    def rdp(self, orders: np.ndarray, relation: str) -> np.ndarray:
        """Computes the curve, which is known at whole orders and rounded up to them.

        Args:
          orders: `[orders]`, above 1.
          relation: "add_remove", "zero_out" or "replace_one".

        Returns:
          `[orders]`; inf without noise.

        Source: Agarwal, Kairouz, Liu 2021, theorem 3.5.
        """
        if self.variance == 0:
            return np.full(len(orders), np.inf)
        factor = 2 if relation == "replace_one" else 1
        l2, l1, mu = factor * self.l2_norm, factor * self.l1_norm, self.variance
        alpha = np.ceil(orders)
        excess = np.minimum(((2 * alpha - 1) * l2**2 + 6 * l1) / (4 * mu**2), 3 * l1 / (2 * mu))
        return alpha * l2**2 / (2 * mu) + excess


class Plan(NamedTuple):
    """The public numbers of a discrete mechanism, which determine its event.

    Attributes:
      noise: "gaussian" or "skellam".
      clip_norm: bound on the L2 norm of one update, in units of the parameters.
      granularity: width γ of the lattice, in units of the parameters.
      noise_stddev: standard deviation of the noise on the sum, in units of the parameters.
      num_shares: the number of clients' shares of that noise; 1 is noise that is added centrally.
      bits: B; sums are taken modulo 2^B, at most 32.
      dimension: number of coordinates, after padding to a power of two if rotated.
      rounding_bias: β of the conditional rounding, in [0, 1); 0 bounds the norm by the worst case.
      is_rotated: whether updates are rotated, so that few bits hold every coordinate of the sum.
      colluders: how many more shares a sum holds, which colluding clients may subtract.
    """

    noise: str
    clip_norm: float
    granularity: float
    noise_stddev: float
    num_shares: int
    bits: int
    dimension: int
    rounding_bias: float
    is_rotated: bool = True
    colluders: int = 0

    @property
    def shares_in_sum(self) -> int:
        """The fewest shares in a sum: those that make up the noise, and those of colluders."""
        return self.num_shares + self.colluders

    @property
    def l2_norm(self) -> float:
        """Largest Euclidean norm of a rounded contribution, in units of the lattice."""
        return math.sqrt(self.l2_norm_squared)

    @property
    def l2_norm_squared(self) -> float:
        """Square of `l2_norm`: the smaller of the worst case and the bound of conditional rounding.

        Source: Kairouz, Liu, Steinke 2021, proposition 22.
        """
        length, root = self.clip_norm / self.granularity, math.sqrt(self.dimension)
        worst = (length + root) ** 2
        if self.rounding_bias == 0:
            return worst
        spread = math.sqrt(2 * math.log(1 / self.rounding_bias)) * (length + root / 2)
        return min(worst, length**2 + self.dimension / 4 + spread)

    @property
    def l1_norm(self) -> float:
        """Largest sum of absolute values of a rounded contribution, in units of the lattice."""
        return min(math.sqrt(self.dimension) * self.l2_norm, self.l2_norm_squared)

    @property
    def share_stddev(self) -> float:
        """Standard deviation of one share of the noise, in units of the lattice."""
        return self.noise_stddev / self.granularity / math.sqrt(self.num_shares)

    def event(self) -> DpEvent:
        """Builds the event of one release; sampling comes on top.

        Guarantee: holds if at least `num_shares` shares of noise are in the sum. A zeroed-out unit
        sends zeros, and its share of the noise stays in.

        Returns:
          The event.
        """
        if self.noise == "skellam":
            variance = self.num_shares * self.share_stddev**2
            return SkellamDpEvent(variance, self.l2_norm, self.l1_norm)
        return DistributedDiscreteGaussianDpEvent(
            self.share_stddev, self.num_shares, self.l2_norm, self.l1_norm, self.dimension
        )


@checked
def make_plan(
    dimension: Count,
    clip_norm: Positive,
    noise_multiplier: NonNegative,
    *,
    num_clients: Count,
    num_shares: Count | None = None,
    colluders: Index = 0,
    bits: Annotated[int, Ge(2), Le(32)] = 20,
    noise: str = "gaussian",
    rounding_bias: Decay = math.exp(-0.5),
    num_deviations: Positive = 4.0,
) -> Plan:
    """Chooses the finest lattice on which a sum of clients fits into B bits.

    Solves `2^B = 2k·√(S²n²/d + (γ²/4 + τ²)n)/γ` for γ, τ being one share of the noise.

    Args:
      dimension: number of parameters, at least 1; padded to a power of two.
      clip_norm: S, above 0.
      noise_multiplier: standard deviation of the noise on the sum over `clip_norm`, at least 0.
      num_clients: n, the most contributions of a sum.
      num_shares: the fewest shares of noise in a sum; `num_clients` if None, 1 for noise that is
        added centrally.
      colluders: t, how many of these shares clients who collude with the server may subtract; the
        others, two at least, make up the noise.
      bits: B, from 2 to 32.
      noise: "gaussian" or "skellam".
      rounding_bias: β in [0, 1).
      num_deviations: k, the number of standard deviations of the sum that must fit.

    Returns:
      The plan. Rounding makes contributions longer than `clip_norm`; calibrate with the plan's
      own `event`.

    Raises:
      ValueError: if an argument is out of range, or no lattice fits.

    Source: Kairouz, Liu, Steinke 2021, theorem 34 and equation (61).
    """
    checks.one_of("noise", noise, ("gaussian", "skellam"))
    in_sum = num_clients if num_shares is None else num_shares
    rule = f"leave 2 of the {in_sum} shares of noise"
    checks.require(colluders == 0 or in_sum - colluders >= 2, "colluders", rule, colluders)
    shares = in_sum - colluders
    padded = 1 << max(dimension - 1, 0).bit_length()
    stddev = noise_multiplier * clip_norm
    capacity = (2.0**bits / (2 * num_deviations)) ** 2 - num_clients / 4
    checks.require(capacity > 0, "bits", f"be enough for {num_clients} clients", bits)
    spread = (clip_norm * num_clients) ** 2 / padded + stddev**2 * (in_sum / shares)
    # A lattice on which the noise spans 2^15 points is as fine as continuous noise in all respects.
    finest_useful = stddev / math.sqrt(shares) / discrete.MAX_STDDEV
    return Plan(
        noise=noise,
        clip_norm=clip_norm,
        granularity=max(math.sqrt(spread / capacity), finest_useful),
        noise_stddev=stddev,
        num_shares=shares,
        bits=bits,
        dimension=padded,
        rounding_bias=rounding_bias,
        colluders=colluders,
    )


@checked
def make_central_plan(
    dimension: Count,
    clip_norm: Positive,
    noise_multiplier: NonNegative,
    *,
    rounding_bias: ProperFraction = math.exp(-0.5),
    tolerance: Probability = 0.01,
) -> Plan:
    """Chooses the lattice for discrete Gaussian noise that a trusted server adds.

    Nothing is sent, so that bits cost nothing: sums are taken modulo 2^32, which n clients cannot
    reach while n·S/γ is below 2^31, and updates need no rotation. The lattice is the coarsest on
    which rounding lengthens a contribution by no more than a tolerance.

    Args:
      dimension: number of parameters, at least 1.
      clip_norm: S, above 0.
      noise_multiplier: standard deviation of the noise on the sum over `clip_norm`, at least 0.
      rounding_bias: β in (0, 1).
      tolerance: the share by which rounding may lengthen a contribution, in (0, 1]; larger if the
        noise would need more points than its table holds, which is for z·√dimension beyond 9,000.
        The event has the actual length.

    Returns:
      The plan. Calibrate with the plan's own `event`.

    Source: Kairouz, Liu, Steinke 2021, proposition 22, solved for the width of the lattice.
    """
    # l² + d/4 + s·(l + √d/2) = (1 + tolerance)²·l², for the length l of S on the lattice.
    spread = math.sqrt(2 * math.log(1 / rounding_bias))
    growth = (1 + tolerance) ** 2 - 1
    added = dimension / 4 + spread * math.sqrt(dimension) / 2
    length = (spread + math.sqrt(spread**2 + 4 * growth * added)) / (2 * growth)
    stddev = noise_multiplier * clip_norm
    return Plan(
        noise="gaussian",
        clip_norm=clip_norm,
        granularity=max(clip_norm / length, stddev / discrete.MAX_STDDEV),
        noise_stddev=stddev,
        num_shares=1,
        bits=32,
        dimension=dimension,
        rounding_bias=rounding_bias,
        is_rotated=False,
    )


@checked
def choose_bits(
    dimension: Count,
    clip_norm: Positive,
    noise_multiplier: Positive,
    *,
    num_clients: Count,
    tolerance: Positive = 0.01,
    num_deviations: Positive = 4.0,
    **options: Any,
) -> int:
    """Chooses the fewest bits at which the lattice costs almost nothing.

    A coarse lattice costs twice: rounding makes contributions longer, which the noise has to cover,
    and adds a variance of up to γ²/4 for each client to the sum.

    Args:
      dimension: number of parameters, at least 1.
      clip_norm: S, above 0.
      noise_multiplier: standard deviation of the noise on the sum over `clip_norm`, above 0.
      num_clients: the most contributions of a sum.
      tolerance: the share by which the length of a contribution, and the variance of the sum, may
        grow; above 0.
      num_deviations: as for `make_plan`.
      **options: further options of `make_plan`, except `bits`.

    Returns:
      B, from 2 to 32.

    Raises:
      ValueError: if 32 bits are too few.

    Source: Kairouz, Liu, Steinke 2021, section 4.
    """
    # Fewer do not hold the rounding of this many clients.
    fewest = max(2, math.floor(math.log2(num_deviations) + 0.5 * math.log2(num_clients)) + 1)
    options |= {"num_clients": num_clients, "num_deviations": num_deviations}
    for bits in range(fewest, 33):
        plan = make_plan(dimension, clip_norm, noise_multiplier, bits=bits, **options)
        longer = plan.l2_norm * plan.granularity / clip_norm - 1
        wider = num_clients * plan.granularity**2 / 4 / plan.noise_stddev**2
        if longer <= tolerance and wider <= tolerance:
            return bits
    raise ValueError(f"tolerance must be attainable with 32 bits, got {tolerance!r}")


class DiscreteMechanism(NamedTuple):
    """A discrete mechanism on trees, in the pieces that clients and server run.

    Attributes:
      plan: the public numbers.
      encode: `(rotation_key, client_key, tree) → message`: clips, rotates or not, rounds, adds the
        client's share if noise is distributed; `[dimension]` uint32 below 2^B. Messages are summed
        as uint32, whose overflow is the modular sum.
      add_shares: `(key, message, count) → message` with `count` further shares of noise, which may
        be traced.
      add_noise: `(key, message sum) → sum`; adds noise only if it is central.
      decode: `(rotation_key, message sum) → tree`: the noised sum of updates, float32.
      event: `() → DpEvent` of one release from a given set of clients.
    """

    plan: Plan
    encode: Callable[[PRNGKey, PRNGKey, PyTree], jax.Array]
    add_shares: Callable[[PRNGKey, jax.Array, jax.Array], jax.Array]
    add_noise: Callable[[PRNGKey, jax.Array], jax.Array]
    decode: Callable[[PRNGKey, jax.Array], PyTree]
    event: Callable[[], DpEvent]


@checked
def discrete_mechanism(structure: PyTree, plan: Plan) -> DiscreteMechanism:
    """Builds the mechanism of a plan for trees of one structure.

    Guarantee: the encoded contribution has an L2 norm of at most `plan.l2_norm` in units of the
    lattice, for any input; an update that is not finite is sent as zero (with its noise).

    Args:
      structure: a tree of arrays or `jax.ShapeDtypeStruct`s, as the updates.
      plan: from `make_plan`, for this number of parameters.

    Returns:
      The mechanism. The rotation key is public and must differ from round to round; the client
      key is secret and used once.

    Raises:
      ValueError: if plan and structure differ in size, or the noise is too wide for the lattice.
    """
    layout = layout_of(structure, is_padded=plan.is_rotated)
    rule = f"be that of the structure, {layout.padded}"
    checks.require(plan.dimension == layout.padded, "plan.dimension", rule, plan.dimension)
    discrete.check_scale("sigma", plan.share_stddev)
    modulus_mask = np.uint32((1 << plan.bits) - 1)
    is_distributed = plan.num_shares > 1

    def law() -> discrete.IntegerLaw:
        # Built only to draw: calibration needs the events of many plans alone.
        if plan.noise == "skellam":
            return discrete.skellam(plan.share_stddev**2)
        return discrete.discrete_gaussian(plan.share_stddev)

    def noised(key: PRNGKey, message: jax.Array) -> jax.Array:
        share = discrete.draw(key, message.shape, law())
        return (message + share.astype(jnp.uint32)) & modulus_mask

    def add_shares(key: PRNGKey, message: jax.Array, count: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, count, lambda i, m: noised(keys.fold(key, i), m), message)

    def encode(rotation_key: PRNGKey, client_key: PRNGKey, tree: PyTree) -> jax.Array:
        clipped, _ = clipping.clip_by_global_norm(tree, plan.clip_norm)
        vector = flatten(clipped, layout)
        if plan.is_rotated:
            vector = rotate(rotation_key, vector)
        rounded = round_conditionally(
            keys.fold(client_key, 0), vector / plan.granularity, plan.l2_norm_squared
        )
        message = rounded.astype(jnp.uint32) & modulus_mask
        return noised(keys.fold(client_key, 1), message) if is_distributed else message

    def decode(rotation_key: PRNGKey, total: jax.Array) -> PyTree:
        centred = centre(total, plan.bits)
        vector = centred.astype(jnp.float32) * plan.granularity
        if plan.is_rotated:
            vector = rotate_back(rotation_key, vector)
        return unflatten(vector, layout)

    return DiscreteMechanism(
        plan=plan,
        encode=encode,
        add_shares=add_shares,
        add_noise=(lambda key, total: total) if is_distributed else noised,
        decode=decode,
        event=plan.event,
    )


def centre(total: jax.Array, bits: int) -> jax.Array:
    """Reads integers modulo 2^bits as numbers around zero; higher bits are ignored."""
    shift = 32 - bits
    return (total << shift).astype(jnp.int32) >> shift


def _squared_norm(vector: jax.Array) -> jax.Array:
    """Sums squares in pairs, which errs by log2(d) + 1 roundings; a running sum errs by d."""
    squares = vector * vector
    while len(squares) > 1:
        odd = len(squares) % 2
        first, second = jnp.split(jnp.pad(squares, (0, odd)), 2)
        squares = first + second
    return jnp.sum(squares)


def round_conditionally(
    key: PRNGKey, vector: jax.Array, norm_squared: jax.typing.ArrayLike
) -> jax.Array:
    """Rounds each coordinate up or down at random, again until the whole is short enough.

    The vector is `[d]` floats in units of the lattice; the bound on its squared norm may be traced.
    After 64 attempts, of which each fails with probability below 0.61 at the default bound,
    coordinates are rounded towards zero.

    Guarantee: the result's squared norm is at most `norm_squared` wherever that is at least the
    squared norm of the vector. Without the condition it is unbiased; with it, nearly so.

    Source: Kairouz, Liu, Steinke 2021, definition 21.
    """
    low = jnp.floor(vector)
    chance = vector - low

    def attempt(tries: jax.Array) -> jax.Array:
        up = jax.random.uniform(keys.fold(key, tries), vector.shape, vector.dtype) < chance
        return low + up.astype(low.dtype)

    def is_long(rounded: jax.Array) -> jax.Array:
        return _squared_norm(rounded) > norm_squared * _NORM_MARGIN

    def again(carry: tuple[jax.Array, jax.Array]) -> jax.Array:
        tries, rounded = carry
        return is_long(rounded) & (tries < _MAX_TRIES)

    def next_attempt(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        tries, _ = carry
        return tries + 1, attempt(tries)

    first = (jnp.int32(1), attempt(jnp.int32(0)))
    _, rounded = jax.lax.while_loop(again, next_attempt, first)
    rounded = jnp.where(is_long(rounded), jnp.trunc(vector), rounded)
    return rounded.astype(jnp.int32)


class Layout(NamedTuple):
    """The layout of a tree as one vector."""

    treedef: Any
    shapes: tuple[tuple[int, ...], ...]  # Of the leaves.
    dimension: int  # The number of scalars.
    padded: int  # The length of the vector, a power of two if it is to be rotated.


def layout_of(tree: PyTree, *, is_padded: bool = True) -> Layout:
    """Reads the layout of a tree of arrays or shapes, padded to a power of two or not."""
    leaves, treedef = jax.tree.flatten(tree)
    dimension = trees.num_parameters(leaves)
    padded = 1 << max(dimension - 1, 0).bit_length() if is_padded else dimension
    return Layout(treedef, tuple(tuple(x.shape) for x in leaves), dimension, padded)


def flatten(tree: PyTree, layout: Layout) -> jax.Array:
    """Writes a tree as one vector, `[padded]` in float32 or better, padded with zeros."""
    leaves = [trees.at_least_float32(jnp.asarray(x)).ravel() for x in jax.tree.leaves(tree)]
    flat = jnp.concatenate(leaves) if leaves else jnp.zeros(0)
    return jnp.pad(flat, (0, layout.padded - layout.dimension))


def unflatten(vector: jax.Array, layout: Layout) -> PyTree:
    """Reads a tree back from its vector and drops the padding."""
    sizes = [math.prod(shape) for shape in layout.shapes]
    parts = jnp.split(vector[: layout.dimension], np.cumsum(sizes)[:-1])
    leaves = [part.reshape(shape) for part, shape in zip(parts, layout.shapes, strict=True)]
    return jax.tree.unflatten(layout.treedef, leaves)


def rotate(key: PRNGKey, vector: jax.Array) -> jax.Array:
    """Applies random signs and the orthonormal Walsh-Hadamard transform, d being a power of two.

    All parties of one sum use the same key, so that the rotated vectors add up.

    Source: Kairouz, Liu, Steinke 2021, section 4.2.
    """
    return _hadamard(vector * _signs(key, vector))


def rotate_back(key: PRNGKey, vector: jax.Array) -> jax.Array:
    """Undoes `rotate` with the same key."""
    return _hadamard(vector) * _signs(key, vector)


def _signs(key: PRNGKey, vector: jax.Array) -> jax.Array:
    return jax.random.rademacher(key, vector.shape, vector.dtype)


def _hadamard(vector: jax.Array) -> jax.Array:
    """The orthonormal transform, its own inverse, in log2(d) passes."""
    (d,) = vector.shape
    half = 1
    while half < d:
        pairs = vector.reshape(-1, 2, half)
        vector = jnp.stack([pairs[:, 0] + pairs[:, 1], pairs[:, 0] - pairs[:, 1]], axis=1)
        half *= 2
    return vector.reshape(d) / math.sqrt(d)
