"""Claims of TensorFlow Privacy: noise multiplier 1 and clip norm 1."""

from fedjax_dp.audit.conformance import (
    Accounting,
    Aggregation,
    Poisson,
    Release,
    Served,
    Step,
    Training,
)
from fedjax_dp.audit.conformance.subjects import Subject


def subjects(served: Served) -> list[Subject]:
    """Lists the subjects."""
    by = served.function
    total = Release(1.0, 1.0, 1.0, (6, 2), 4)
    # The optimizer divides by the examples that it gets.
    mean = Release(1.0, 1.0, None, (6, 2), 4, "zero_out")
    accounted = Training(Release(1.0, 1.0, 50.0), Poisson(1000, 0.05), 100)
    return [
        Accounting("accountant of DP-SGD", by("epsilon"), accounted),
        Aggregation("Gaussian sum query", by("gaussian_sum"), total),
        Step("optimizer", by("optimizer_step"), mean),
    ]
