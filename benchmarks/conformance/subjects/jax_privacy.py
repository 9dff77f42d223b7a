"""Claims of jax-privacy and Optax: noise multiplier 1 and clip norm 1."""

from fedjax_dp.audit.conformance import (
    Accounting,
    FixedSize,
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
# Optax divides by the rows that it gets, whose number is in the shape of its input.
MEAN = Release(1.0, 1.0, None, (6, 2), 4, "zero_out")


def subjects(served: Served) -> list[Subject]:
    """Lists the subjects."""
    by = served.function
    accounted = Training(RELEASE, Poisson(1000, 0.05), 100)
    plan = Poisson(32, 0.125)
    return [
        Accounting("accountant of the plan", by("plan_epsilon"), accounted),
        Accounting("training accountant, PLD", by("epsilon_pld"), accounted),
        Accounting("training accountant, RDP", by("epsilon_rdp"), accounted),
        Sampling("batches of the plan", by("plan_sampling"), plan),
        Sampling("fixed batches", by("fixed_sampling"), FixedSize(32, 4)),
        Step("clipped gradient", by("clipped_step"), RELEASE),
        Step("step of the plan", by("plan_step"), RELEASE),
        Run("training by the plan", by("plan_run"), Training(RELEASE, plan, 2)),
        Step("Optax, private aggregate", by("optax_aggregate"), MEAN),
    ]
