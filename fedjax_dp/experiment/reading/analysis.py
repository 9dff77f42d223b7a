"""Checks that the requested privacy has an analysis, and advises a change if not."""

import itertools
import typing
from typing import Any, NamedTuple

import dp_accounting
import numpy as np

from fedjax_dp.core import checks
from fedjax_dp.experiment.components.participation import batches_of, participation_of
from fedjax_dp.experiment.schema.config import (
    ClientLevel,
    CorrelatedGaussianLevel,
    ParticipationSection,
    PrivacySection,
    TrainingSection,
)
from fedjax_dp.experiment.schema.sections import Section
from fedjax_dp.privacy.accounting import dp_accounting_adapter
from fedjax_dp.privacy.events import Advice, DpEvent, UnsupportedEvent
from fedjax_dp.privacy.mechanisms.distributed import DistributedDiscreteGaussianDpEvent
from fedjax_dp.privacy.mechanisms.gamma_shares import GammaSharesDpEvent
from fedjax_dp.privacy.mechanisms.noise import BoundedLaplaceDpEvent, StaircaseDpEvent

# The event of each mechanism, with arbitrary numbers, on which no analysis depends: building a
# mechanism would start JAX before the devices of a run are made.
EVENTS: dict[str, DpEvent] = {
    "gaussian": dp_accounting.GaussianDpEvent(1.0),
    "correlated_gaussian": dp_accounting.GaussianDpEvent(1.0),
    "laplace": dp_accounting.LaplaceDpEvent(1.0),
    "staircase": StaircaseDpEvent(1.0, 1),
    "bounded_laplace": BoundedLaplaceDpEvent(1.0, 1, 1e-9),
    "discrete_gaussian": DistributedDiscreteGaussianDpEvent(1.0, 1, 1.0, 1.0, 1),
    "central_discrete_gaussian": DistributedDiscreteGaussianDpEvent(1.0, 1, 1.0, 1.0, 1),
    "oblivious": GammaSharesDpEvent(1.0, 2),
}
_DRAWN = ("poisson", "fixed_size", "shuffled", "shuffled_whole")


class Sections(NamedTuple):
    """The sections that an analysis depends on."""

    privacy: PrivacySection
    participation: ParticipationSection
    training: TrainingSection


def require_analysis(sections: Sections, num_clients: int, sizes: np.ndarray | None = None) -> None:
    """Requires an analysis of all units; an error advises a change.

    Before sizes are known, one for clients of some size is enough.
    """
    if sizes is not None:
        possible = [sizes]
    else:
        batches = sections.training.batch_size
        # Clients of one size and batch are alike; their number may be a mistake, of any size.
        largest = np.full(len(batches) if isinstance(batches, list) else 1, checks.COUNT_LIMIT)
        # A batch of all records of a client is not sampled, and may have an analysis.
        possible = [largest, np.ones_like(largest)]
    reasons = []
    for each in possible:
        try:
            _require(sections, each, num_clients)
            return
        except ValueError as error:
            reasons.append(str(error))
    reason = reasons[0].split("; nearest valid choice")[0].split("; the nearest valid")[0]
    raise UnsupportedEvent(reason, _nearest(sections, possible[0], num_clients))


def follow(sections: Sections, advice: Advice) -> Sections:
    """Changes sections as advised; another sampler replaces random ones."""
    privacy, participation, training = sections
    changes: dict[str, Any] = {"accountant": advice.accountant, "relation": advice.relation}
    changes = {key: value for key, value in changes.items() if value is not None}
    if advice.mechanism is not None:
        changes["client"] = _switched(privacy.client, ClientLevel, "mechanism", advice.mechanism)
    if advice.sampler is not None:
        if participation.sampler in _DRAWN:
            participation = _switched(
                participation, ParticipationSection, "sampler", advice.sampler
            )
        if training.sampler in _DRAWN:
            training = training.model_copy(update={"sampler": advice.sampler})
    return Sections(privacy.model_copy(update=changes), participation, training)


def _switched(section: Section, union: Any, tag: str, word: str) -> Any:
    """Returns the section of another tag, with the values that both of them have."""
    kinds = typing.get_args(typing.get_args(union)[0])
    (kind,) = (k for k in kinds if k.model_fields[tag].default == word)
    if isinstance(section, kind):
        # Advice is the plain form of a sampler: truncation has no analysis.
        kept = {k: v for k, v in section if k != "capacity"}
    else:
        kept = {k: v for k, v in section if k in kind.model_fields and k != tag}
    return kind(**kept)


def _require(sections: Sections, sizes: np.ndarray, num_clients: int) -> None:
    """Requires an analysis of the kinds of event of a run, without advice for the configuration."""
    privacy = sections.privacy
    events: list[DpEvent] = []
    if "client" in privacy.units and not privacy.client.is_realised:
        base = EVENTS[privacy.client.mechanism]
        events.append(participation_of(sections.participation, num_clients).event(base))
    if "record" in privacy.units:
        batches = np.broadcast_to(np.asarray(sections.training.batch_size, float), sizes.shape)
        sampler, gaussian = batches_of(sections.training, is_private=True), EVENTS["gaussian"]
        for size, batch in sorted(set(zip(sizes.tolist(), batches.tolist(), strict=True))):
            if size > 0:
                events.append(sampler.event(gaussian, size, batch))
    dp_accounting_adapter.require_analysis(events, privacy.relation, privacy.accountant)


def _nearest(sections: Sections, sizes: np.ndarray, num_clients: int) -> Advice | None:
    """Finds the smallest change after which everything has an analysis."""
    found: list[Advice] = []
    privacy = sections.privacy
    for values in itertools.product(*dp_accounting_adapter.CHOICES.values()):
        mechanism, sampler, relation, accountant = values
        if relation == "add_remove":
            # No run claims such a unit.
            continue
        choice = Advice(
            None if accountant == privacy.accountant else accountant,
            None if relation == privacy.relation else relation,
            sampler,
            mechanism,
        )
        followed = follow(sections, choice)
        try:
            _require(followed, sizes, num_clients)
        except ValueError:
            continue
        if _keeps_distance(followed, num_clients):
            found.append(choice)
    return min(found, key=dp_accounting_adapter.distance, default=None)


def _keeps_distance(sections: Sections, num_clients: int) -> bool:
    """Checks whether participations are as far apart as correlated noise requires."""
    client = sections.privacy.client
    if "client" not in sections.privacy.units or not isinstance(client, CorrelatedGaussianLevel):
        return True
    return participation_of(sections.participation, num_clients).separation >= client.bands
