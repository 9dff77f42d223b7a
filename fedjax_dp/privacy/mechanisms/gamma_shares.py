"""Laplace noise in gamma shares: no party draws it alone, and the sum of all shares has its law."""

import math
from typing import Annotated, Any, Literal, NamedTuple

import attr
import jax
import jax.numpy as jnp
import numpy as np
from annotated_types import Gt, Le
from chex import PRNGKey

from fedjax_dp.core import checks, keys
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.core.ranges import Count, NonNegative, Positive
from fedjax_dp.privacy.events import CurveDpEvent, DpEvent, concrete
from fedjax_dp.privacy.mechanisms import random_bits
from fedjax_dp.privacy.sensitivities import Sensitivity

# In (0, 1], and may be traced.
Probabilities = Annotated[jax.typing.ArrayLike, Gt(0), Le(1)]
Form = Literal["one", "pairs"]
Calibration = Literal["corrected", "variance", "paper"]


@attr.s(frozen=True, slots=True, auto_attribs=True)
class GammaSharesDpEvent(CurveDpEvent):
    """A sum of vectors with Laplace noise in gamma shares, all of which are in the sum.

    It holds for those who see the sum and none of the shares. A coalition of parties knows shares,
    and is not covered.

    Attributes:
      noise_multiplier: scale of one Laplace over the largest L1 norm of one contribution: ε of one
        release is 1/`noise_multiplier` under add/remove, and twice that under replace-one.
      num_parties: how many parties the shares come from.
    """

    noise_multiplier: float
    num_parties: int

    def rdp(self, orders: np.ndarray, relation: str) -> np.ndarray:
        """Computes the curve of one Laplace; further ones in the sum only add to the protection.

        Args:
          orders: `[orders]`, above 1.
          relation: "add_remove", "zero_out" or "replace_one".

        Returns:
          `[orders]`; inf where there is no noise.

        Source: Mironov 2017, proposition 6.
        """
        if self.noise_multiplier == 0:
            return np.full(np.shape(orders), np.inf)
        epsilon = (2 if relation == "replace_one" else 1) / self.noise_multiplier
        far = np.log(orders / (2 * orders - 1)) + (orders - 1) * epsilon
        near = np.log((orders - 1) / (2 * orders - 1)) - orders * epsilon
        # The logarithms cancel where orders are near 1; ε-DP bounds what that could hide.
        lost = 16 * np.finfo(float).eps * (1 + epsilon) / np.minimum(orders - 1, 1.0)
        curve = np.logaddexp(far, near) / (orders - 1) + lost
        return np.minimum(curve, np.minimum(epsilon, orders * epsilon**2 / 2))


class GammaShares(NamedTuple):
    """The public numbers of Laplace noise in gamma shares.

    A share is g − g' with g, g' independent Gamma(1/n, scale); n of them sum to one Laplace.

    Attributes:
      num_parties: n, the parties that contribute.
      scale: of the Laplace that n shares sum to, in units of the sum.
      sensitivity: how far one unit moves the sum of the parties' vectors, in L2 norm.
      shares_per_party: how many shares a party adds: 1, or n or n − 1 where each got one from every
        other; the sum of all parties holds as many independent Laplaces.
    """

    num_parties: int
    scale: float
    sensitivity: Sensitivity
    shares_per_party: int

    @property
    def share_shape(self) -> float:
        """The shape of the gamma numbers of one share."""
        return 1 / self.num_parties

    @property
    def party_shape(self) -> float:
        """The shape of the gamma numbers of all that one party adds, at most 1."""
        return self.shares_per_party / self.num_parties

    @property
    def share_variance(self) -> float:
        """The variance of one share, 2 scale²/n."""
        return 2 * self.scale**2 / self.num_parties

    @property
    def sum_variance(self) -> float:
        """The variance of the noise on the sum over all parties."""
        return 2 * self.scale**2 * self.shares_per_party

    @property
    def average_stddev(self) -> float:
        """The standard deviation of the noise on the average over all parties."""
        return math.sqrt(self.sum_variance) / self.num_parties

    @property
    def coordinate_epsilon(self) -> float:
        """The ε of one coordinate of one release, under the relation of `sensitivity`."""
        return concrete("sensitivity", self.sensitivity.l2) / self.scale

    def epsilon(self, num_weights: Count, num_rounds: Count = 1) -> float:
        """Computes ε of all coordinates over all rounds, by basic composition of rounds.

        A vector of d coordinates that moves by Δ in L2 norm moves by up to √d·Δ in L1 norm, to
        which Laplace noise is calibrated: ε of a release is √d times that of a coordinate.

        Args:
          num_weights: d, coordinates of a release, at least 1.
          num_rounds: releases, at least 1.

        Returns:
          ε, under the relation of `sensitivity`.
        """
        checks.whole("num_weights", num_weights)
        checks.whole("num_rounds", num_rounds)
        return num_rounds * math.sqrt(num_weights) * self.coordinate_epsilon

    def event(self, num_weights: Count, resolution: NonNegative = 0.0) -> DpEvent:
        """Builds the event of one release of a vector, for a ledger of any relation.

        Vectors that are rounded to a lattice of width r before noise is added may be further apart
        than they were, by r in each coordinate: a bound Δ on the L2 norm of a contribution then
        bounds its L1 norm by √d·Δ + d·r/2. That noise in shares is rounded too, share by share, is
        in no event: a sum of rounded shares has not quite the law of a Laplace number.

        Args:
          num_weights: d, coordinates of a release, at least 1; 1 is the price of one coordinate.
          resolution: r, at least 0, such as `FixedPoint.resolution`; 0 without rounding.

        Returns:
          The event.
        """
        checks.whole("num_weights", num_weights)
        contribution = concrete("sensitivity", self.sensitivity.contribution)
        l1 = math.sqrt(num_weights) * contribution + num_weights * resolution / 2
        return GammaSharesDpEvent(self.scale / l1, self.num_parties)


@checked
def gamma_shares(
    num_parties: Count,
    sensitivity: Sensitivity,
    epsilon: Positive,
    *,
    form: Form = "pairs",
    calibration: Calibration = "corrected",
    self_noise: bool = True,
) -> GammaShares:
    """Calibrates Laplace noise in gamma shares to an ε of each coordinate of a sum.

    With "one", every party adds a share that it draws itself. With "pairs", as in the protocol
    Π_PPFL, each adds one share from every party, itself included, so that the sum holds n Laplaces.
    Calibrations are, for the sensitivity S of the sum over n parties:

    - "corrected": scale S/ε, so that one Laplace of the sum alone makes a coordinate ε-DP.
    - "variance": the sum has the variance of that one Laplace, `S/(ε·√m)` for m Laplaces in it.
      The ε that holds is √m times the ε asked for, which is what `coordinate_epsilon` is.
    - "paper": scale S/(n·ε), the printed one. It is the sensitivity of the average over ε, but
      the noise is divided by n too; the ε that holds is n times the ε asked for.

    Guarantee: for one coordinate, `coordinate_epsilon`-DP against those who see sums alone, if all
    parties add their shares; a release of d coordinates costs up to √d times that, and every round
    is a release (`GammaShares.epsilon`). Nothing is claimed against a coalition of parties, or a
    server that fakes parties.

    Args:
      num_parties: n, parties that contribute, at least 2.
      sensitivity: of the sum of the parties' vectors; its L2 norm bounds the move of a coordinate.
      epsilon: of one coordinate of one release, above 0, under the relation of `sensitivity`.
      form: "one" for n shares in the sum, "pairs" for n shares of each party.
      calibration: "corrected", "variance" or "paper".
      self_noise: whether a party's shares include one from itself; for "pairs" only.

    Returns:
      The numbers of the noise.

    Raises:
      ValueError: if there is one party only, or nothing to hide.

    Source: Mugunthan 2022 (Π_PPFL), protocol 1 and appendix A.4, corrected: the paper's scale is n
    times too small. Dwork and others 2006 for the Laplace mechanism.
    """
    checks.whole("num_parties", num_parties, at_least=2)
    checks.positive("sensitivity.l2", sensitivity.l2)
    checks.require(self_noise or form == "pairs", "self_noise", 'be True for form "one"', False)
    shares = 1 if form == "one" else num_parties - (not self_noise)
    divisor = {"corrected": 1.0, "variance": math.sqrt(shares), "paper": float(num_parties)}
    scale = concrete("sensitivity", sensitivity.l2) / epsilon / divisor[calibration]
    return GammaShares(num_parties, scale, sensitivity, shares)


@checked
def minimizer_sensitivity(
    smallest: Count, regularizer: Positive, *, lipschitz: Positive = 1.0
) -> Sensitivity:
    """Bounds how far one record moves a sum of regularised minimisers, of which it is in one.

    The bound is 2L/(k·α) under replacement, L for Lipschitz, for a mean loss over k records and a
    regulariser α‖w‖²/2. It holds too after any number of full-batch gradient steps from a start
    that does not depend on the record, at rates of at most 2/(β + 2α) for a β-smooth loss: each
    step shrinks a distance by 1 − rate·α and adds at most 2·rate·L/k to it.

    Guarantee: for one record of one party; a record that several parties hold moves the sum several
    times as far.

    Args:
      smallest: k, records of the smallest local data set, at least 1.
      regularizer: α, above 0.
      lipschitz: L, largest gradient norm of one record's loss, above 0; 1 for logistic loss and
        rows of norm at most 1.

    Returns:
      The sensitivity, in L2 norm, of the sum over parties under replace-one; that of their average
      is an n-th of it.

    Source: Chaudhuri, Monteleoni, Sarwate 2011, corollary 8; Mugunthan 2022, section 2.2.3.
    """
    return Sensitivity(2 * lipschitz / (smallest * regularizer), "replace_one")


@checked
def draw_shares(key: PRNGKey, shape: tuple[int, ...], share_shape: Probabilities) -> jax.Array:
    """Draws numbers g − g' for independent gamma numbers of scale 1 and one shape.

    Gamma(a) is Exponential · Beta(a, 1 − a), drawn from logarithms. What float32 cannot hold, below
    2^-126, becomes 0: each draw errs by at most that. For a = 1/5000 this is 98 % of the numbers,
    and so many of them sum to the right law all the same: all of a sum is in a few large shares.

    Guarantee: none by itself; see `gamma_shares`. Tails reach 67 scales.

    Args:
      key: used for this draw and nothing else.
      shape: of the result.
      share_shape: a in (0, 1], may be traced; 1/n for shares of which n sum to one Laplace
        number, 1 for Laplace numbers.

    Returns:
      The numbers, float32.

    Source: Jöhnk 1964; Devroye 1986, section IX.3.5.
    """
    # Both numbers of all shares in one draw, which compiles once.
    first, second = _gamma(key, (2, *shape), share_shape)
    return first - second


def _gamma(key: PRNGKey, shape: tuple[int, ...], a: Any) -> jax.Array:
    size = random_bits.exponential(keys.fold(key, 0), shape)
    is_whole = not checks.is_traced(a) and a == 1
    return size if is_whole else size * jnp.exp(_log_beta(keys.fold(key, 1), shape, a))


def _log_beta(key: PRNGKey, shape: tuple[int, ...], a: Any) -> jax.Array:
    """Draws logarithms of Beta(a, 1 − a) by rejection; at least π/4 of the tries are accepted."""

    def attempt(carry: tuple[Any, ...]) -> tuple[Any, ...]:
        count, found, is_done = carry
        x, y = -random_bits.exponential(keys.fold(key, count), (2, *shape))
        x, y = x / a, y / (1 - a)
        both = jnp.logaddexp(x, y)
        return count + 1, jnp.where(is_done, found, x - both), is_done | (both <= 0)

    start = jnp.int32(0), jnp.zeros(shape, jnp.float32), jnp.zeros(shape, bool)
    return jax.lax.while_loop(lambda carry: ~jnp.all(carry[2]), attempt, start)[1]
