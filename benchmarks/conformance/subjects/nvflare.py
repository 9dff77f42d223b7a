"""NVFlare's claims: what filters send of one site's update of 8 numbers."""

import math

from fedjax_dp.audit.conformance import (
    Accounting,
    Aggregation,
    FixedSize,
    Release,
    Run,
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

    # Each of 8 numbers is truncated to 1 and has noise of scale 16, so that ε is 1 for all of them,
    # whatever they are instead; the selection has another ε of 1.
    site = Release(8.0, math.sqrt(2) * 16.0, 1.0, (2, 6), 4, "replace_one", "l1", "laplace")
    one = FixedSize(1, 1)
    spent = Training(Release(2.0, math.sqrt(2), 1.0, norm="l1", law="laplace"), one, 5)
    return [
        Aggregation("percentile filter", by("percentile"), truncated(0.01)),
        Aggregation("percentile filter, scalars", by("percentile_scalars"), truncated(0.01)),
        Run("sparse vector filter", by("svt"), Training(site, one, 1)),
        Run("sparse vector filter, scalars", by("svt_scalars"), Training(site, one, 1)),
        Accounting("accountant of the sparse vector filter", by("svt_spent"), spent),
    ]
