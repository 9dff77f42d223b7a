"""How a configuration draws the clients of a round, and the batches of a client."""

from collections.abc import Callable, Mapping
from functools import partial

from fedjax_dp.data import participants, sampling
from fedjax_dp.experiment.schema.config import (
    CyclicCohort,
    FixedSizeCohort,
    FullParticipation,
    MinSeparatedCohort,
    ParticipationSection,
    PoissonCohort,
    TrainingSection,
)
from fedjax_dp.experiment.schema.constraints import keyed

_BATCHES: Mapping[str, Callable[[], sampling.Sampler]] = {
    "shuffled": sampling.shuffled,
    "shuffled_whole": partial(sampling.shuffled, only_whole=True),
    "poisson": sampling.poisson,
    "fixed_size": sampling.fixed_size,
    "full_batch": lambda: sampling.full_participation()._replace(name="full_batch"),
}


def participation_of(section: ParticipationSection, num_clients: int) -> participants.Participation:
    """Builds the participation."""
    with keyed("participation"):
        match section:
            case FullParticipation():
                return participants.participation(sampling.full_participation(), num_clients)
            case PoissonCohort():
                sampler = sampling.poisson(section.capacity)
            case FixedSizeCohort():
                sampler = sampling.fixed_size()
                if section.full_participation_first > 0:
                    first = section.full_participation_first
                    sampler = sampling.full_participation_first(first, sampler)
            case CyclicCohort():
                sampler = sampling.cyclic()
            case MinSeparatedCohort():
                sampler = sampling.min_separated(section.separation)
        return participants.participation(sampler, num_clients, section.cohort_size)


def batches_of(section: TrainingSection, *, is_private: bool) -> sampling.Sampler:
    """Builds the sampler of a client's batches; "auto" is Poisson for protected records."""
    name = section.sampler
    if name == "auto":
        name = "poisson" if is_private else "shuffled"
    return _BATCHES[name]()
