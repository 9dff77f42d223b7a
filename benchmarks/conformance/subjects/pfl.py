"""Claims of pfl-research: relative noise 1 and clip norm 1, on sums of four users."""

import math

from fedjax_dp.audit.conformance import (
    Accounting,
    AdaptiveAggregation,
    AdaptiveRelease,
    Aggregation,
    Poisson,
    Release,
    Served,
    Training,
)
from fedjax_dp.audit.conformance.subjects import Subject

SUM = Release(1.0, 1.0, 1.0, (6, 2), 4)


def subjects(served: Served) -> list[Subject]:
    """Lists the subjects."""
    by = served.function
    accounted = Training(SUM, Poisson(1000, 0.05), 100)
    laplace = Release(1.0, math.sqrt(2), 1.0, (6, 2), 4, norm="l1", law="laplace")
    # The noise also pays for the indicator: half of its own standard deviation. That of the count
    # is 1: 2 on indicators of -1 and 1.
    first = Release(1.0, 1 / math.sqrt(1 - 0.5**2), 1.0, (6, 2), 4)
    return [
        *(
            Accounting(f"accountant {name}", by(f"epsilon_{name.lower()}"), accounted)
            for name in ("PLD", "PRV", "RDP")
        ),
        Aggregation("Gaussian mechanism", by("gaussian"), SUM),
        Aggregation("Gaussian mechanism, noise scale 0.1", by("gaussian_scaled"), SUM),
        Aggregation("Laplace mechanism", by("laplace"), laplace),
        AdaptiveAggregation("adaptive clipping", by("adaptive"), AdaptiveRelease(first, 1.0)),
        Aggregation("banded factorisation, a user of the first round", by("banded_first"), SUM),
        Aggregation("banded factorisation, a user of the last round", by("banded_last"), SUM),
    ]
