"""Functions of the loss that a client minimises in place of its mean loss."""

from collections.abc import Callable
from typing import Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_dp.core import checks, ranges
from fedjax_dp.core.ranges import Positive

# `(loss) -> value`, both scalars; smooth wherever a gradient is to flow.
Objective: TypeAlias = Callable[[jax.Array], jax.Array]
Extension = Literal["smooth", "released", "released_huber"]


def check_margin(baseline: float | jax.Array, margin: float | jax.Array, prefix: str = "") -> None:
    """Requires a margin above 0 and below the baseline M of `proportional`, unless traced."""
    if checks.is_traced(baseline) or checks.is_traced(margin):
        return
    rule = f"be above 0 and below the baseline {np.asarray(baseline).tolist()}"
    fits = bool(np.all((np.asarray(margin) > 0) & (np.asarray(margin) < np.asarray(baseline))))
    checks.require(fits, f"{prefix}margin", rule, margin)


def proportional(
    baseline: float | jax.Array,
    margin: float | jax.Array = 0.2,
    extension: Extension = "smooth",
) -> Objective:
    """Builds `−ln(1 − ℓ/M)`, whose mean over clients proportional fairness minimises.

    Above M − ε it is linear: "smooth" with the slope 1/ε that it has there; "released" as `ℓ/M` and
    "released_huber" as `ℓ/ε`, the two forms of the authors' program, which are discontinuous.

    Source: Zhang and others 2022 (PropFair), equation 8.
    """
    checks.one_of("extension", extension, ("smooth", "released", "released_huber"))
    ranges.check({"baseline": baseline, "margin": margin}, {"baseline": Positive})
    check_margin(baseline, margin)

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
