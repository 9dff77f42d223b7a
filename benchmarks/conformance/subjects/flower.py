"""Flower's claims: noise multiplier 1 and clip norm 1 for four clients, as its pages set it up."""

from fedjax_dp.audit.conformance import (
    Accounting,
    AdaptiveAggregation,
    AdaptiveRelease,
    Aggregation,
    FixedSize,
    Masked,
    Masking,
    MaskLaw,
    MaskSource,
    Poisson,
    Release,
    Sampling,
    Served,
    Training,
    WeightedAggregation,
)
from fedjax_dp.audit.conformance.subjects import Subject

CLIENTS = 4
# The mean over the clients that are sampled; whose update is zeros is the neighbour.
RELEASE = Release(1.0, 1.0, CLIENTS, (6, 2), CLIENTS, "zero_out")
EVERYBODY = Training(RELEASE, FixedSize(CLIENTS, CLIENTS), 20)
# Every number is in a range of −8 to 8 before it is rounded; the mean is that of who replies.
QUANTIZED = Release(64.0, 0.0, None, (6, 2), CLIENTS, "zero_out", "l1")
# An error of a tenth of the noise, which fewer do not show.
DRAWS = {"adaptive clipping, server side": 256, "adaptive clipping, client side": 256}


def subjects(served: Served) -> list[Subject]:
    """Lists the subjects."""
    by, everybody = served.function, EVERYBODY
    sampled = Release(1.0, 1.0, 50.0)
    replaced = Release(1.0, 1.0, 50.0, relation="replace_one")
    adaptive = AdaptiveRelease(
        Release(1.0, float(by("adaptive_stddev")()), CLIENTS, (6, 2), CLIENTS, "zero_out"), 1.0
    )
    return [
        Accounting("accountant, no amplification", by("epsilon_accounted"), everybody),
        Accounting(
            "accountant, Poisson",
            by("epsilon_poisson"),
            Training(sampled, Poisson(1000, 0.05), 100),
        ),
        Accounting(
            "accountant, fixed size",
            by("epsilon_fixed_size"),
            Training(replaced, FixedSize(1000, 50), 100),
        ),
        Accounting("fixed clipping as set up", by("epsilon_unaccounted"), everybody),
        Accounting("adaptive clipping as set up", by("epsilon_adaptive"), everybody),
        Sampling("cohorts of FedAvg", by("cohorts"), FixedSize(64, 8)),
        WeightedAggregation("fixed clipping, server side", by("fixed_server"), RELEASE),
        WeightedAggregation(
            "fixed clipping, server side, no zeros", by("fixed_server_nonzero"), RELEASE
        ),
        WeightedAggregation(
            "fixed clipping, client side, no zeros", by("fixed_client_nonzero"), RELEASE
        ),
        Aggregation(
            "fixed clipping with accountant, no zeros", by("fixed_server_accounted"), RELEASE
        ),
        AdaptiveAggregation("adaptive clipping, server side", by("adaptive_server"), adaptive),
        AdaptiveAggregation("adaptive clipping, client side", by("adaptive_client"), adaptive),
        Masking("SecAgg+", by("secagg_plus"), Masked(2**32, 4, 8, dropped=1)),
        Aggregation("SecAgg+, mean of floats", by("secagg_plus_mean"), QUANTIZED),
        # Of seeds of 28 and of 32 bits, four pairs are expected to be equal.
        MaskSource("SecAgg+, masks of pairs", by("pairwise_masks"), MaskLaw(2**32, 46_341)),
        MaskSource("SecAgg+, masks of clients", by("masks_of_clients"), MaskLaw(2**32, 185_364)),
    ]
