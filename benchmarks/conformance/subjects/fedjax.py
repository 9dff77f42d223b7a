"""Claims of FedJAX, which has clipping and samplers, but no noise: clip norm 1."""

from fedjax_dp.audit.conformance import (
    Aggregation,
    FixedSize,
    Release,
    Sampling,
    Served,
    Shuffled,
    WeightedAggregation,
)
from fedjax_dp.audit.conformance.subjects import Subject

MEAN = Release(1.0, 0.0, None, (6, 2), 4, "zero_out")


def subjects(served: Served) -> list[Subject]:
    """Lists the subjects."""
    by = served.function
    return [
        Sampling("uniform sampler", by("uniform"), FixedSize(32, 4)),
        Sampling("shuffled sampler", by("shuffled"), Shuffled(32, 4)),
        Aggregation("mean of clipped updates", by("clipped_mean"), MEAN),
        WeightedAggregation("weighted mean of clipped updates", by("weighted_mean"), MEAN),
    ]
