"""Opacus's claims: noise multiplier 1 and clip norm 1, batches of 4 records expected of 32."""

from fedjax_dp.audit.conformance import (
    Accounting,
    Poisson,
    Release,
    Run,
    Sampling,
    Served,
    Step,
    Training,
)
from fedjax_dp.audit.conformance.subjects import Subject

RELEASE = Release(1.0, 1.0, 4.0, (6, 2), 4)
LAW = Poisson(32, 0.125)


def subjects(served: Served) -> list[Subject]:
    """Lists the subjects."""
    by = served.function
    accounted = Training(RELEASE, Poisson(640, 0.05), 100)
    return [
        *(
            Accounting(f"accountant {name}", by(f"epsilon_{name}"), accounted)
            for name in ("prv", "rdp", "gdp")
        ),
        Sampling("Poisson loader", by("poisson_loader"), LAW),
        Sampling("shuffled loader, accounted as Poisson", by("shuffled_loader"), LAW),
        Step("step", by("step"), RELEASE),
        Step("step, clipped by layers", by("step_per_layer"), RELEASE),
        Run("training", by("run"), Training(RELEASE, LAW, 2)),
    ]
