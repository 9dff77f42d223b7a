"""Conformance: whether code of any framework does what it claims about privacy, as a black box."""

from fedjax_dp.audit.conformance.check import assert_conforms, check
from fedjax_dp.audit.conformance.claims import (
    AdaptiveRelease,
    FixedSize,
    Masked,
    MaskLaw,
    Poisson,
    Release,
    Shuffled,
    Training,
    WithReplacement,
)
from fedjax_dp.audit.conformance.findings import Finding
from fedjax_dp.audit.conformance.ours import (
    aggregation_of,
    mask_source_of,
    masking_of,
    sampling_of,
    step_of,
)
from fedjax_dp.audit.conformance.process import Served
from fedjax_dp.audit.conformance.report import Report
from fedjax_dp.audit.conformance.subjects import (
    Accounting,
    AdaptiveAggregation,
    Aggregation,
    Masking,
    MaskSource,
    Run,
    Sampling,
    Step,
    WeightedAggregation,
    subjects_of,
)

__all__ = [
    "Accounting",
    "AdaptiveAggregation",
    "AdaptiveRelease",
    "Aggregation",
    "Finding",
    "FixedSize",
    "MaskLaw",
    "MaskSource",
    "Masked",
    "Masking",
    "Poisson",
    "Release",
    "Report",
    "Run",
    "Sampling",
    "Served",
    "Shuffled",
    "Step",
    "Training",
    "WeightedAggregation",
    "WithReplacement",
    "aggregation_of",
    "assert_conforms",
    "check",
    "mask_source_of",
    "masking_of",
    "sampling_of",
    "step_of",
    "subjects_of",
]
