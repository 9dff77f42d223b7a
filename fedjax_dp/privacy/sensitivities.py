"""Sensitivity of released values, and the noise of a multiplier."""

import dataclasses

import jax
import jax.numpy as jnp

from fedjax_dp.core import checks, ranges
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.core.ranges import Bounds, NonNegativeNumbers, PositiveNumbers

Scalar = jax.typing.ArrayLike

RELATIONS = ("add_remove", "zero_out", "replace_one")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sensitivity:
    """How far one unit of privacy can move a released value.

    Attributes:
      l2: the largest Euclidean distance between the values on neighbouring data, in units of
        the value; may be traced.
      relation: which data are neighbours: "add_remove" (one unit is present or absent), "zero_out"
        (its contribution is replaced by zeros, while it is counted as before) or "replace_one"
        (one unit's data are exchanged for others).
    """

    l2: Scalar
    relation: str = dataclasses.field(metadata={"static": True})

    @property
    def contribution(self) -> Scalar:
        """The largest norm of what one unit adds to the value.

        It is half of the sensitivity under replace-one and the sensitivity otherwise, and the
        length in which every noise multiplier of this package is measured.
        """
        return self.l2 / 2 if self.relation == "replace_one" else self.l2


@checked
def sensitivity_of_sum(
    bound: Bounds,
    relation: str = "add_remove",
    *,
    max_weight: NonNegativeNumbers = 1.0,
    denominator: PositiveNumbers = 1.0,
) -> Sensitivity:
    """Computes the sensitivity of a weighted sum of bounded contributions over a public constant.

    Adding, removing or zeroing out a unit moves `Σ_i w_i x_i / denominator` by `w_i ‖x_i‖ /
    denominator`; replacing one can move it twice as far, since old and new may point in opposite
    directions.

    Guarantee: holds only if weights and denominator do not depend on the data of the other
    units: no realised count, no normalisation of weights over the cohort.

    Args:
      bound: the largest Euclidean norm of one contribution, at least 0, or inf; may be traced.
      relation: "add_remove", "zero_out" or "replace_one".
      max_weight: the largest weight that a contribution may get, at least 0; may be traced.
      denominator: a public constant, above 0; may be traced.

    Returns:
      The sensitivity.
    """
    checks.one_of("relation", relation, RELATIONS)
    factor = 2 if relation == "replace_one" else 1
    return Sensitivity(l2=factor * bound * max_weight / denominator, relation=relation)


def noise_stddev(sensitivity: Sensitivity, noise_multiplier: NonNegativeNumbers) -> Scalar:
    """Computes the noise of a multiplier, in units of the noised value.

    The multiplier counts in contributions (`Sensitivity.contribution`), as `GaussianDpEvent`
    does; a ledger that claims replace-one takes the factor 2 into its accounting.

    Args:
      sensitivity: of the value that is noised.
      noise_multiplier: standard deviation over contribution, at least 0; may be traced.

    Returns:
      The standard deviation; 0 for multiplier 0, whatever the sensitivity.

    Raises:
      ValueError: if no sensitivity is given.
    """
    if not isinstance(sensitivity, Sensitivity):
        raise ValueError(
            "sensitivity must be stated: noise needs a stated Sensitivity, of a clipped function "
            f"or an aggregator, got {sensitivity!r}; nearest valid choice: clip every contribution "
            "before it is summed"
        )
    if not isinstance(noise_multiplier, jax.Array):
        ranges.check(
            {"noise_multiplier": noise_multiplier}, {"noise_multiplier": NonNegativeNumbers}
        )
    contribution = jnp.asarray(sensitivity.contribution)
    if isinstance(noise_multiplier, int):
        # Large ones do not fit into int32.
        noise_multiplier = float(noise_multiplier)
    multiplier = jnp.asarray(noise_multiplier)
    return jnp.where(multiplier == 0, 0.0, multiplier * contribution)
