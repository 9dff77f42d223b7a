"""The numbers of a metric in the rows of a run, for the rules that follow one."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import numpy as np

from fedjax_dp.core import checks
from fedjax_dp.core.ranges import Pattern
from fedjax_dp.evaluation.noised import METRIC

# A name in `metrics.jsonl`. Tables of built-in metrics are refused by it before data are read;
# those of a user's metrics when their values are.
Measured = Annotated[
    str,
    Pattern(
        r"(?!(.*_)?(confusion|per_class)(_after_local)?$).+",
        "a metric that is one number, such as test_loss; confusion and per_class are tables",
    ),
]

# Metrics that are released with noise, by the key that has them released: what follows from them
# costs no more ε. All others are exact.
RELEASED: Mapping[str, str] = {
    "noised_unclipped_share": "privacy.client.adaptive_clipping",
    METRIC: "evaluation.noise_multiplier",
}


def measured(rows: Sequence[Mapping[str, Any]], metric: str, name: str) -> np.ndarray:
    """Returns the values of a metric in order; a ValueError if the rows have no such number."""
    numbers = [{k: v for k, v in row.items() if isinstance(v, int | float)} for row in rows]
    values = [row[metric] for row in numbers if metric in row]
    checks.require(bool(values), name, f"be one of {sorted(numbers[-1])}", metric)
    return np.array(values, float)
