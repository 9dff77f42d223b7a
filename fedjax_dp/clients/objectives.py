"""What a client minimises in place of its mean loss, until when, and on which parameters."""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_dp.core import checks, ranges
from fedjax_dp.core.ranges import Positive
from fedjax_dp.core.trees import PyTree

# `(loss, params) -> value`, scalars; smooth wherever a gradient is to flow.
Value: TypeAlias = Callable[[jax.Array, PyTree], jax.Array]
Extension = Literal["smooth", "released", "released_huber"]


class Objective(NamedTuple):
    """What local training minimises, until when, and on which entries.

    Attributes:
      value: of the mean loss of a batch; if training is private, of the loss of each example, and
        clipped with it. None for the loss itself.
      until: `(state of the gradient transform) -> bool`, ends training early, which costs as much
        as all its steps; None for all steps.
      mask: the entries to train, bools of the structure of the parameters, None for what is trained
        whole; all others stay unchanged, bit for bit.
    """

    value: Value | None = None
    until: Callable[[Any], jax.Array] | None = None
    mask: PyTree = None


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
) -> Value:
    """Builds `−ln(1 − ℓ/M)`, whose mean over clients proportional fairness minimises.

    Above M − ε it is linear: "smooth" with the slope 1/ε that it has there; "released" as `ℓ/M` and
    "released_huber" as `ℓ/ε`, the two forms of the authors' program, which are discontinuous.

    Source: Zhang and others 2022 (PropFair), equation 8.
    """
    checks.one_of("extension", extension, ("smooth", "released", "released_huber"))
    ranges.check({"baseline": baseline, "margin": margin}, {"baseline": Positive})
    check_margin(baseline, margin)

    def value(loss, params):
        del params
        last = baseline - margin
        is_inside = loss <= last
        inside = -jnp.log1p(-jnp.where(is_inside, loss, 0.0) / baseline)
        beyond = {
            "smooth": (loss - last) / margin - jnp.log(margin / baseline),
            "released": loss / baseline,
            "released_huber": loss / margin,
        }[extension]
        return jnp.where(is_inside, inside, beyond)

    return value
