"""What a sampler makes of a mechanism: the event of one release from a sampled set of units."""

from collections.abc import Callable
from typing import NamedTuple

import dp_accounting as dpa

from fedjax_dp.core import checks
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.privacy import events as ev
from fedjax_dp.privacy.accounting.dp_accounting_adapter import (
    nearest_choice,
    require_some_accountant,
)
from fedjax_dp.privacy.events import Advice, DpEvent, UnsupportedEvent
from fedjax_dp.privacy.sensitivities import RELATIONS


class SamplingFacts(NamedTuple):
    """The public numbers of a sampler.

    Attributes:
      sampling_rate: probability that a given unit is drawn, in (0, 1].
      population: how many units there are.
      sample_size: how many are drawn, where that number is fixed.
      capacity: slots that a draw has, where it is cut to them.
    """

    sampling_rate: float | None = None
    population: int | None = None
    sample_size: int | None = None
    capacity: int | None = None

    def require(self, sampler: str, *names: str) -> None:
        """Requires the facts that a sampler's event needs.

        Args:
          sampler: the sampler's name.
          *names: the fields that must be there.

        Raises:
          ValueError: naming the first that is missing or out of range.
        """
        for name in names:
            value = getattr(self, name)
            checks.require(value is not None, name, f"be given for sampler {sampler!r}", value)
            if name == "sampling_rate":
                checks.probability(name, value)
            else:
                checks.whole(name, value)


@checked
def sampled_event(
    sampler: str, base: DpEvent, *, relation: str = "add_remove", **facts: float | int | None
) -> DpEvent:
    """Names the event of one release, by what really draws the units.

    Guarantee: what is returned can be accounted under `relation` by at least one accountant;
    where no analysis is known, nothing is returned.

    Args:
      sampler: "poisson" (each unit on its own), "truncated_poisson" (a Poisson draw cut to a
        capacity at random), "fixed_size" (without replacement), "everybody", "cyclic" or
        "min_separated" (no chance involved: each participation pays in full), or "shuffled".
      base: the event of the mechanism on a given set of units.
      relation: "add_remove", "zero_out" or "replace_one".
      **facts: the fields of `SamplingFacts` that the sampler has.

    Returns:
      The event.

    Raises:
      UnsupportedEvent: if sampler, mechanism and relation have no joint analysis; the message
        holds the reason and the nearest valid choice.
      ValueError: if a name is not known, or a fact is missing or out of range.
    """
    checks.one_of("sampler", sampler, _EVENTS)
    checks.one_of("relation", relation, RELATIONS)
    event = _EVENTS[sampler](base, SamplingFacts(**facts), relation)  # type: ignore[arg-type]
    for part, _ in ev.flatten(event):
        require_some_accountant(part, relation)
    return event


def _poisson(base: DpEvent, facts: SamplingFacts, relation: str) -> DpEvent:
    facts.require("poisson", "sampling_rate")
    return base if facts.sampling_rate == 1 else _poisson_event(facts.sampling_rate, base)


def _poisson_event(rate: float | None, base: DpEvent) -> DpEvent:
    return dpa.PoissonSampledDpEvent(rate, base)


def _truncated_poisson(base: DpEvent, facts: SamplingFacts, relation: str) -> DpEvent:
    facts.require("truncated_poisson", "sampling_rate", "population", "capacity")
    assert facts.capacity is not None and facts.population is not None
    if facts.capacity >= facts.population:
        return _poisson(base, facts, relation)
    multiplier = ev.effective_noise_multiplier(base)
    if multiplier is None:
        raise UnsupportedEvent(
            f"sampler 'truncated_poisson' with {type(base).__name__} has no valid analysis: what "
            "cutting a draw costs is known for Gaussian noise only",
            _instead(base, facts, relation),
        )
    return dpa.TruncatedSubsampledGaussianDpEvent(
        dataset_size=facts.population,
        sampling_probability=facts.sampling_rate,
        truncated_batch_size=facts.capacity,
        noise_multiplier=multiplier,
    )


def _fixed_size(base: DpEvent, facts: SamplingFacts, relation: str) -> DpEvent:
    facts.require("fixed_size", "population", "sample_size")
    assert facts.sample_size is not None and facts.population is not None
    rule = f"be at most the population of {facts.population}"
    checks.require(facts.sample_size <= facts.population, "sample_size", rule, facts.sample_size)
    if facts.sample_size == facts.population:
        return base
    return dpa.SampledWithoutReplacementDpEvent(facts.population, facts.sample_size, base)


def _no_chance(base: DpEvent, facts: SamplingFacts, relation: str) -> DpEvent:
    del facts, relation
    return base


def _shuffled(base: DpEvent, facts: SamplingFacts, relation: str) -> DpEvent:
    raise UnsupportedEvent(
        "sampler 'shuffled' has no amplification that is accounted here: batches of one epoch "
        "depend on each other, and their ε is not that of Poisson sampling",
        _instead(base, facts, relation),
    )


def _instead(base: DpEvent, facts: SamplingFacts, relation: str) -> Advice | None:
    """Names the nearest choice of another sampler, Poisson sampling where it is accounted."""
    rate = facts.sampling_rate or 0.5
    advice = nearest_choice([base if rate == 1 else _poisson_event(rate, base)], relation)
    return None if advice is None else advice._replace(sampler="poisson")


_EVENTS: dict[str, Callable[[DpEvent, SamplingFacts, str], DpEvent]] = {
    "poisson": _poisson,
    "truncated_poisson": _truncated_poisson,
    "fixed_size": _fixed_size,
    "everybody": _no_chance,
    "cyclic": _no_chance,
    "min_separated": _no_chance,
    "shuffled": _shuffled,
}
