"""NVFlare's claims: what filters send of one site's update of 8 numbers."""

import math

from fedjax_dp.audit.conformance import (
    Accounting,
    Aggregation,
    FixedSize,
    Release,
    Served,
    Training,
)
from fedjax_dp.audit.conformance.subjects import Subject


def subjects(served: Served) -> list[Subject]:
    """Lists the subjects."""
    by = served.function

    # Every number is truncated to gamma, and no noise is claimed.
    def truncated(gamma: float) -> Release:
        return Release(8 * gamma, 0.0, 1.0, (6, 2), 4, norm="l1")

    # Every number that is sent is truncated to 1 and has Laplace noise.
    noisy = Release(8.0, math.sqrt(2) * 4.0, 1.0, (6, 2), 4, norm="l1", law="laplace")
    # Two numbers of one site, whose budgets of selection and of noise are 1 each.
    budget = Release(1.0, math.sqrt(2) / 2, 1.0, (6, 2), 4, norm="l1", law="laplace")
    return [
        Aggregation("percentile filter", by("percentile"), truncated(0.01)),
        Aggregation("percentile filter, scalars", by("percentile_scalars"), truncated(0.01)),
        Aggregation("sparse vector filter", by("svt"), noisy),
        Aggregation("sparse vector filter, scalars", by("svt_scalars"), noisy),
        Accounting(
            "accountant of the sparse vector filter",
            by("svt_spent"),
            Training(budget, FixedSize(1, 1), 5),
        ),
    ]
