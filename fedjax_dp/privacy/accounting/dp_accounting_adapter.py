"""Translates events for dp-accounting under a relation, or explains why there is no analysis."""

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

import attr
import dp_accounting as dpa
import numpy as np
from dp_accounting import dp_event as standard
from dp_accounting.dp_event import DpEvent
from dp_accounting.pld import privacy_loss_distribution as dpa_pld

from fedjax_dp.core import checks
from fedjax_dp.privacy.events import (
    Advice,
    CurveDpEvent,
    UnsupportedEvent,
    effective_noise_multiplier,
    flatten,
    sampling_rate,
)
from fedjax_dp.privacy.sensitivities import RELATIONS

ACCOUNTANTS = ("rdp", "pld", "rdp-classic-64")


def require_accountant(accountant: str) -> None:
    """Requires a known accountant."""
    checks.one_of("accountant", accountant, ACCOUNTANTS)


class _Refusal(Exception):
    """The reason why an event has no analysis; the caller searches for an alternative."""


def _refuse(reason: str) -> NoReturn:
    raise _Refusal(reason)


def translate(event: DpEvent, relation: str, accountant: str) -> DpEvent:
    """Writes a part of a composition as dp-accounting needs it for a relation.

    Input noise multipliers are standard deviations over the largest contribution of one unit.
    Replacing a unit moves a sum twice that far; the PLD accountant of dp-accounting accounts for
    it, its RDP accountant does not and is given half the multiplier. Zeroing a unit out moves a sum
    as removing it does, and no sampler with an add/remove analysis reads more of a unit than its
    index. Without a valid analysis, `UnsupportedEvent` holds the reason and the nearest valid
    choice.
    """
    checks.one_of("relation", relation, RELATIONS)
    require_accountant(accountant)
    try:
        return _translated(event, relation, accountant)
    except _Refusal as refusal:
        raise UnsupportedEvent(
            f"{type(event).__name__} under relation {relation!r} has no valid analysis by "
            f"accountant {accountant!r}: {refusal}",
            nearest_choice([event], relation, accountant),
        ) from None


def _translated(event: DpEvent, relation: str, accountant: str) -> DpEvent:
    """Applies the rule of an event, or refuses."""
    if isinstance(event, dpa.NonPrivateDpEvent | dpa.NoOpDpEvent):
        return event
    family = "pld" if accountant == "pld" else "rdp"
    rule = _RULES[family].get(type(event))
    if isinstance(event, CurveDpEvent):
        rule = _same if family == "rdp" or event.has_loss_masses else _rdp_only
    if rule is None:
        _refuse(_NO_RULE.get(type(event), _UNKNOWN)[family])
    return rule(event, relation, accountant)


def nearest_choice(
    events: Sequence[DpEvent], relation: str, accountant: str | None = None
) -> Advice | None:
    """Searches for the smallest change after which all events have an analysis together.

    Fewer changes come first, then the accountant, the relation, the sampler, the mechanism. With
    `accountant=None` any accountant will do. None if no change helps.
    """
    parts = [part for event in events for part, _ in flatten(event)]
    asked = Advice(accountant, relation)
    advice: list[Advice] = []
    for mechanism, sampler, other, asked_of in itertools.product(*CHOICES.values()):
        values = (asked_of, other, sampler, mechanism)
        choice = Advice(*(None if v == a else v for v, a in zip(values, asked, strict=True)))
        if all(_has_analysis(follow(part, choice), str(other), str(asked_of)) for part in parts):
            advice.append(choice)
    return min(advice, key=distance, default=None)


def distance(choice: Advice) -> tuple[int, ...]:
    """Sorts advice by the number of changes, and then by kind, the accountant first."""
    is_changed = [int(value is not None) for value in choice]
    return sum(is_changed), *reversed(is_changed)


def follow(event: DpEvent, advice: Advice) -> DpEvent:
    """Changes sampler or mechanism of an event as advised; a new mechanism has multiplier 1."""
    inner = getattr(event, "event", None)
    base = event if inner is None else inner
    if isinstance(event, dpa.TruncatedSubsampledGaussianDpEvent) or advice.mechanism is not None:
        base = dpa.GaussianDpEvent(1.0)
    rate = sampling_rate(event)
    if rate is not None and advice.sampler is not None:
        return dpa.PoissonSampledDpEvent(rate, base)
    if advice.mechanism is None:
        return event
    is_sampled = inner is not None and rate is not None
    return attr.evolve(event, event=base) if is_sampled else base


def _has_analysis(event: DpEvent, relation: str, accountant: str) -> bool:
    try:
        return all(
            _translated(part, relation, accountant) is not None for part, _ in flatten(event)
        )
    except (_Refusal, UnsupportedEvent):
        return False


def _same(event: DpEvent, relation: str, accountant: str) -> DpEvent:
    return event


def _rdp_only(event: DpEvent, relation: str, accountant: str) -> DpEvent:
    _refuse(_NEEDS_RDP["pld"])


def _half_multiplier(event: Any, relation: str, accountant: str) -> DpEvent:
    if event.noise_multiplier == 0:
        return dpa.NonPrivateDpEvent()
    if relation != "replace_one":
        return event
    return attr.evolve(event, noise_multiplier=event.noise_multiplier / 2)


def _add_remove_only(event: DpEvent, relation: str, accountant: str) -> DpEvent:
    if relation == "replace_one":
        _refuse("its privacy loss distribution is known for add/remove and zeroing out only")
    return event


def _randomized_response(event: DpEvent, relation: str, accountant: str) -> DpEvent:
    if relation != "replace_one":
        _refuse("randomised response has no add/remove analysis: every unit answers")
    return event


def _poisson_rdp(event: Any, relation: str, accountant: str) -> DpEvent:
    if relation == "replace_one":
        _refuse("the Rényi analysis of Poisson sampling holds for add/remove and zeroing out")
    z = effective_noise_multiplier(event.event)
    if z is not None:
        return dpa.PoissonSampledDpEvent(event.sampling_probability, dpa.GaussianDpEvent(z))
    for part, _ in flatten(event.event):
        _translated(part, relation, accountant)
    return event


def _poisson_pld(event: Any, relation: str, accountant: str) -> DpEvent:
    z = effective_noise_multiplier(event.event)
    if z is not None:
        return dpa.PoissonSampledDpEvent(event.sampling_probability, dpa.GaussianDpEvent(z))
    if not flatten(event.event):
        return dpa.NoOpDpEvent()
    if not isinstance(event.event, dpa.LaplaceDpEvent):
        _refuse("the sampled mechanism is neither Gaussian nor Laplace")
    return _add_remove_only(event, relation, accountant)


def _fixed_size_rdp(event: Any, relation: str, accountant: str) -> DpEvent:
    if relation != "replace_one":
        _refuse(
            "its analysis is for a unit that is exchanged for any other, which covers one that is "
            "zeroed out, at twice the distance"
        )
    z = effective_noise_multiplier(event.event)
    if z is None:
        _refuse("its analysis is known for Gaussian noise only")
    if z == 0:
        return dpa.NonPrivateDpEvent()
    return attr.evolve(event, event=dpa.GaussianDpEvent(z / 2))


def _repeat_and_select(event: Any, relation: str, accountant: str) -> DpEvent:
    if any(isinstance(part, CurveDpEvent) for part, _ in flatten(event.event)):
        _refuse("the repeated event has a Rényi curve, which dp-accounting cannot read")
    parts = [
        dpa.SelfComposedDpEvent(_translated(part, relation, accountant), count)
        for part, count in flatten(event.event)
    ]
    return attr.evolve(event, event=dpa.ComposedDpEvent(parts))


_RULES: dict[str, dict[type, Callable[[Any, str, str], DpEvent]]] = {
    "rdp": {
        dpa.GaussianDpEvent: _half_multiplier,
        dpa.LaplaceDpEvent: _half_multiplier,
        dpa.ZCDpEvent: _same,
        dpa.PoissonSampledDpEvent: _poisson_rdp,
        dpa.SampledWithoutReplacementDpEvent: _fixed_size_rdp,
        dpa.RandomizedResponseDpEvent: _randomized_response,
        standard.RepeatAndSelectDpEvent: _repeat_and_select,
    },
    "pld": {
        dpa.GaussianDpEvent: _same,
        dpa.LaplaceDpEvent: _add_remove_only,
        standard.DiscreteLaplaceDpEvent: _add_remove_only,
        standard.MixtureOfGaussiansDpEvent: _add_remove_only,
        dpa.PoissonSampledDpEvent: _poisson_pld,
        dpa.TruncatedSubsampledGaussianDpEvent: _same,
    },
}

_NEEDS_PLD = {"rdp": "its Rényi curve is not known"}
_NEEDS_RDP = {"pld": "only its Rényi curve is known, which determines no loss distribution"}
_UNKNOWN = {family: "the accountant does not support it" for family in ("rdp", "pld")}
_NO_RULE: dict[type, dict[str, str]] = {
    dpa.TruncatedSubsampledGaussianDpEvent: _NEEDS_PLD,
    standard.DiscreteLaplaceDpEvent: _NEEDS_PLD,
    standard.MixtureOfGaussiansDpEvent: _NEEDS_PLD,
    dpa.ZCDpEvent: _NEEDS_RDP,
    dpa.SampledWithoutReplacementDpEvent: _NEEDS_RDP,
    standard.RepeatAndSelectDpEvent: _NEEDS_RDP,
    # dp-accounting 0.6 composes it once under PLD, however often it ran.
    dpa.RandomizedResponseDpEvent: {"pld": "repetitions would not be counted"},
}
# The choices that advice combines; of mechanisms and samplers the first is no change. No simulation
# claims add/remove, so that zeroing out, which has the same analysis, comes before it.
CHOICES: dict[str, tuple[str | None, ...]] = {
    "mechanism": (None, "gaussian"),
    "sampler": (None, "poisson"),
    "relation": ("zero_out", "add_remove", "replace_one"),
    "accountant": ("rdp", "pld"),
}


def require_analysis(events: Iterable[DpEvent], relation: str, accountant: str | None) -> None:
    """Requires an analysis of all events under a relation, by one accountant or, if None, any."""
    for event in events:
        for part, _ in flatten(event):
            if accountant is None:
                require_some_accountant(part, relation)
            else:
                translate(part, relation, accountant)


def require_some_accountant(event: DpEvent, relation: str) -> None:
    """Requires that some accountant can analyse a part under a relation."""
    reasons = []
    for accountant in ("rdp", "pld"):
        try:
            _translated(event, relation, accountant)
            return
        except _Refusal as refusal:
            reasons.append(f"by {accountant!r} {refusal}")
    raise UnsupportedEvent(
        f"{type(event).__name__} under relation {relation!r} has no valid analysis by any "
        f"accountant: {'; '.join(reasons)}",
        nearest_choice([event], relation),
    )


# Events whose lattices of privacy losses dp-accounting makes, from the differences of its curves.
_LOSS_LATTICES: dict[type, Callable[[Any, float], dpa_pld.PrivacyLossDistribution]] = {
    dpa.LaplaceDpEvent: lambda e, width: dpa_pld.from_laplace_mechanism(
        parameter=e.noise_multiplier, value_discretization_interval=width
    ),
    dpa.PoissonSampledDpEvent: lambda e, width: dpa_pld.from_laplace_mechanism(
        parameter=e.event.noise_multiplier,
        sampling_prob=e.sampling_probability,
        value_discretization_interval=width,
    ),
    standard.DiscreteLaplaceDpEvent: lambda e, width: dpa_pld.from_discrete_laplace_mechanism(
        parameter=e.noise_parameter, sensitivity=e.sensitivity, value_discretization_interval=width
    ),
    standard.MixtureOfGaussiansDpEvent: lambda e, width: dpa_pld.from_mixture_gaussian_mechanism(
        standard_deviation=e.standard_deviation,
        sensitivities=e.sensitivities,
        sampling_probs=e.sampling_probs,
        value_discretization_interval=width,
    ),
}


def loss_lattices(event: Any, width: float) -> list[tuple[int, np.ndarray, float]]:
    """Reads the lattices of dp-accounting: first multiple, masses, mass at infinity, by direction.

    The only place that reads private attributes of dp-accounting, which has no public ones for it.
    """
    lattice = _LOSS_LATTICES[type(event)](event, width)
    pmfs = (lattice._pmf_remove,) if lattice._symmetric else (lattice._pmf_remove, lattice._pmf_add)
    dense = [pmf.to_dense_pmf() for pmf in pmfs]
    return [
        (int(x._lower_loss), np.asarray(x._probs, float), float(x._infinity_mass)) for x in dense
    ]
