"""Objectives of the loss: what a client minimises in place of its mean loss."""

from collections.abc import Callable
from typing import Literal, TypeAlias

import jax
import jax.numpy as jnp

from fedjax_dp.core import checks, ranges
from fedjax_dp.core.ranges import Positive

# `(loss) -> value`, both scalars; smooth wherever a gradient is to flow.
Objective: TypeAlias = Callable[[jax.Array], jax.Array]
Extension = Literal["smooth", "released", "released_huber"]


def proportional(
    baseline: float | jax.Array,
    margin: float | jax.Array = 0.2,
    extension: Extension = "smooth",
) -> Objective:
    """Builds `−ln(1 − ℓ/M)`, whose mean over clients proportional fairness minimises.

    Its slope, `1/(M − ℓ)`, lets a client whose loss is near the baseline M count for more. Where
    less than the margin is left to M it goes on in a straight line, so that every loss has a value.

    Args:
      baseline: M, above the losses that are to be told apart, above 0; may be traced.
      margin: ε, above 0 and below M; may be traced.
      extension: how it goes on beyond M − ε: "smooth" with the slope 1/ε that it has there;
        "released" as `ℓ/M` and "released_huber" as `ℓ/ε`, the two forms of the authors' program,
        which jump.

    Returns:
      The objective.

    Raises:
      ValueError: for a number out of its range, or an unknown extension.

    Source: Zhang and others 2022, "Proportional Fairness in Federated Learning", equation 8.
    """
    checks.one_of("extension", extension, ("smooth", "released", "released_huber"))
    ranges.check({"baseline": baseline, "margin": margin}, {"baseline": Positive})
    if not isinstance(baseline, jax.core.Tracer) and not isinstance(margin, jax.core.Tracer):
        rule = f"be above 0 and below the baseline {float(baseline):g}"
        checks.require(0 < float(margin) < float(baseline), "margin", rule, margin)

    def objective(loss):
        last = baseline - margin
        is_inside = loss <= last
        inside = -jnp.log1p(-jnp.where(is_inside, loss, 0.0) / baseline)
        beyond = {
            "smooth": (loss - last) / margin - jnp.log(margin / baseline),
            "released": loss / baseline,
            "released_huber": loss / margin,
        }[extension]
        return jnp.where(is_inside, inside, beyond)

    return objective
