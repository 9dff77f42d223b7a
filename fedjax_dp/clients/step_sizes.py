"""Step sizes that change from round to round."""

from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeAlias, get_args

import jax
import jax.numpy as jnp

from fedjax_dp.core import checks

Schedule: TypeAlias = Literal[
    "constant", "inverse", "inverse_sqrt", "inverse_log10", "inverse_log", "exponential"
]

# A function of the rounds done, t, and the period, if any.
_FACTORS: Mapping[str, Callable[..., jax.Array]] = {
    "constant": lambda t, period: jnp.ones_like(t),
    "inverse": lambda t, period: 1 / (t + 1),
    "inverse_sqrt": lambda t, period: 1 / jnp.sqrt(t + 1),
    "inverse_log10": lambda t, period: 1 / (1 + jnp.log10(t + 1)),
    "inverse_log": lambda t, period: 1 / jnp.log(t + jnp.e),
    "exponential": lambda t, period: 2.0 ** -jnp.floor(t / period),
}
assert set(_FACTORS) == set(get_args(Schedule))


def check_schedule(schedule: str, period: Any) -> None:
    """Checks that a schedule exists, and has a period exactly if it needs one."""
    checks.one_of("schedule", schedule, _FACTORS)
    if schedule == "exponential":
        rule = "be given for the schedule 'exponential': the rounds between two halvings"
        checks.require(period is not None, "period", rule, period)
    else:
        rule = f"be left out for the schedule {schedule!r}; only 'exponential' has one"
        checks.require(period is None, "period", rule, period)


def step_factor(schedule: str, round_index: Any, period: Any = None) -> jax.Array:
    """Returns the step size of a round over that of the first, in (0, 1], float32.

    With t rounds done: "constant" 1; "inverse" 1/(t + 1); "inverse_sqrt" 1/√(t + 1);
    "inverse_log10" 1/(1 + log₁₀(t + 1)) and "inverse_log" 1/ln(t + e), the two meanings of 1/log t;
    "exponential" one half after every `period` rounds. Of these, "inverse" alone has a sum without
    bound and a bounded sum of squares, which convergence to the exact minimum needs.

    Source: Malekmohammadi 2025, theorem 3.
    """
    return _FACTORS[schedule](jnp.asarray(round_index, jnp.float32), period)
