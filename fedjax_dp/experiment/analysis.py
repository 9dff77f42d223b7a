"""Whether a configuration's samplers, mechanisms, relation and accountant go together."""

import dataclasses
import itertools
from typing import Any

import dp_accounting
import numpy as np

from fedjax_dp.data import participants, sampling
from fedjax_dp.experiment.config import Config
from fedjax_dp.experiment.validate import check_one_for_each
from fedjax_dp.privacy import translation
from fedjax_dp.privacy.distributed import DistributedDiscreteGaussianDpEvent
from fedjax_dp.privacy.events import Advice, DpEvent, UnsupportedEvent
from fedjax_dp.privacy.scalar_noise import BoundedLaplaceDpEvent, StaircaseDpEvent

SAMPLERS = {
    "shuffled": sampling.shuffled,
    "poisson": sampling.poisson,
    "fixed_size": sampling.fixed_size,
    "everybody": sampling.everybody,
    "cyclic": sampling.cyclic,
}
# What each mechanism is to an accountant; whether there is an analysis depends on no number of it.
_EVENTS: dict[str, DpEvent] = {
    "gaussian": dp_accounting.GaussianDpEvent(1.0),
    "correlated_gaussian": dp_accounting.GaussianDpEvent(1.0),
    "laplace": dp_accounting.LaplaceDpEvent(1.0),
    "staircase": StaircaseDpEvent(1.0, 1),
    "bounded_laplace": BoundedLaplaceDpEvent(1.0, 1, 1e-9),
    "discrete_gaussian": DistributedDiscreteGaussianDpEvent(1.0, 1, 1.0, 1.0, 1),
    "central_discrete_gaussian": DistributedDiscreteGaussianDpEvent(1.0, 1, 1.0, 1.0, 1),
}
_DRAWN = ("poisson", "fixed_size", "shuffled")


def participation_of(config: Config, num_clients: int) -> participants.Participation:
    """Builds who joins a round.

    Args:
      config: the configuration.
      num_clients: the population.

    Returns:
      The participation.

    Raises:
      ValueError: as `participants.participation`.
    """
    section = config.participation
    if section.sampler == "poisson":
        sampler = sampling.poisson(section.capacity)
    elif section.sampler == "min_separated":
        sampler = sampling.min_separated(section.separation)
    else:
        sampler = SAMPLERS[section.sampler]()
    return participants.participation(sampler, num_clients, section.cohort_size)


def require_analysis(config: Config, sizes: np.ndarray) -> None:
    """Requires that all units of privacy have an analysis by the accountant that is asked.

    Args:
      config: the configuration.
      sizes: examples of each client, `[num_clients]`.

    Raises:
      UnsupportedEvent: holding the reason, and what to change so that nothing is refused.
    """
    check_one_for_each("training.batch_size", config.training.batch_size, len(sizes))
    try:
        _tell(config, sizes)
    except ValueError as error:
        reason = str(error).split("; nearest valid choice")[0].split("; the nearest valid")[0]
        raise UnsupportedEvent(reason, _nearest(config, sizes)) from None


def follow(config: Config, advice: Advice) -> Config:
    """Changes a configuration as advised.

    Args:
      config: the configuration.
      advice: what to change. Another sampler takes the place of those that draw by chance.

    Returns:
      The configuration with these changes.
    """
    privacy, participation, training = config.privacy, config.participation, config.training
    asked = {"accountant": advice.accountant, "relation": advice.relation}
    changes = {key: value for key, value in asked.items() if value is not None}
    if advice.mechanism is not None:
        mechanism: Any = advice.mechanism
        client = dataclasses.replace(privacy.client, mechanism=mechanism)
        changes["client"] = client  # type: ignore[assignment]
    privacy = dataclasses.replace(privacy, **changes)  # type: ignore[arg-type]
    if advice.sampler is not None:
        name = advice.sampler
        if participation.sampler in _DRAWN:
            participation = dataclasses.replace(
                participation,
                sampler=name,  # type: ignore[arg-type]
                capacity=None,
            )
        if training.sampler in _DRAWN:
            training = dataclasses.replace(training, sampler=name)  # type: ignore[arg-type]
    return dataclasses.replace(
        config, privacy=privacy, participation=participation, training=training
    )


def _tell(config: Config, sizes: np.ndarray) -> None:
    """Tells the accountant the kinds of event of a run, which it may refuse."""
    relation, accountant = config.privacy.relation, config.privacy.accountant
    events: list[DpEvent] = []
    # Behind a divisor that depends on who came nothing is claimed.
    if "client" in config.privacy.units and config.privacy.client.denominator == "expected":
        base = _EVENTS[config.privacy.client.mechanism]
        events.append(participation_of(config, len(sizes)).event(base))
    if "record" in config.privacy.units:
        name = {"auto": "poisson"}.get(config.training.sampler, config.training.sampler)
        batches = np.broadcast_to(np.asarray(config.training.batch_size, float), sizes.shape)
        sampler, gaussian = SAMPLERS[name](), _EVENTS["gaussian"]
        for size, batch in sorted(set(zip(sizes.tolist(), batches.tolist(), strict=True))):
            if size > 0:
                events.append(sampler.event(gaussian, size, batch))
    for event in events:
        translation.translate(event, relation, accountant)


def _nearest(config: Config, sizes: np.ndarray) -> Advice | None:
    """Searches for the smallest change of a configuration that nothing is refused behind."""
    found: list[Advice] = []
    asked = config.privacy
    for values in itertools.product(*translation.CHOICES.values()):
        mechanism, sampler, relation, accountant = values
        if relation == "add_remove":
            # No run claims it.
            continue
        choice = Advice(
            None if accountant == asked.accountant else accountant,
            None if relation == asked.relation else relation,
            sampler,
            mechanism,
        )
        followed = follow(config, choice)
        try:
            _tell(followed, sizes)
        except ValueError:
            continue
        if _keeps_distance(followed, len(sizes)):
            found.append(choice)
    return min(found, key=translation.distance, default=None)


def _keeps_distance(config: Config, num_clients: int) -> bool:
    """Tells whether participations are as far apart as correlated noise needs."""
    client = config.privacy.client
    if "client" not in config.privacy.units or client.mechanism != "correlated_gaussian":
        return True
    return participation_of(config, num_clients).separation >= client.bands
