"""What an accountant is told for a neighbouring relation, or why it is told nothing."""

from collections.abc import Callable
from typing import Any

import attr
import dp_accounting as dpa
from dp_accounting import dp_event as standard
from dp_accounting.dp_event import DpEvent

from fedjax_dp.core import checks
from fedjax_dp.privacy.clipping import RELATIONS
from fedjax_dp.privacy.events import (
    CurveDpEvent,
    UnsupportedEvent,
    effective_noise_multiplier,
    flatten,
)

ACCOUNTANTS = ("rdp", "pld", "rdp-classic-64")


def accountant_name(accountant: str) -> str:
    """Checks the name of an accountant.

    Args:
      accountant: "rdp", "pld" or "rdp-classic-64".

    Returns:
      The name.

    Raises:
      ValueError: if it is not known.
    """
    checks.one_of("accountant", accountant, ACCOUNTANTS)
    return accountant


def _refuse(event: DpEvent, relation: str, accountant: str, reason: str, nearest: str) -> None:
    raise UnsupportedEvent(
        f"{type(event).__name__} under relation {relation!r} has no valid analysis by accountant "
        f"{accountant!r}: {reason}; nearest valid choice: {nearest}"
    )


def translate(event: DpEvent, relation: str, accountant: str) -> DpEvent:
    """Writes a part of a composition as dp-accounting must be told it for a relation.

    Noise multipliers come in as standard deviation over the largest contribution of one unit.
    Replacing a unit moves a sum twice that far; the PLD accountant of dp-accounting knows it,
    its RDP accountant does not and is given half the multiplier. Zeroing a unit out moves a sum as
    removing it does, and none of the samplers that are accounted for add/remove reads more of a
    unit than its place.

    Args:
      event: a part as `flatten` returns it.
      relation: "add_remove", "zero_out" or "replace_one".
      accountant: "rdp", "pld" or "rdp-classic-64".

    Returns:
      The event to compose.

    Raises:
      UnsupportedEvent: if there is no valid analysis; the message holds the reason and the
        nearest valid choice.
    """
    checks.one_of("relation", relation, RELATIONS)
    if isinstance(event, dpa.NonPrivateDpEvent | dpa.NoOpDpEvent):
        return event
    family = "pld" if accountant_name(accountant) == "pld" else "rdp"
    rule = _RULES[family].get(type(event))
    if isinstance(event, CurveDpEvent):
        rule = _same if family == "rdp" or event.has_loss_masses else _rdp_only
    if rule is None:
        _refuse(event, relation, accountant, *_NO_RULE.get(type(event), _UNKNOWN)[family])
    return rule(event, relation, accountant)  # type: ignore[misc]


def _same(event: DpEvent, relation: str, accountant: str) -> DpEvent:
    return event


def _rdp_only(event: DpEvent, relation: str, accountant: str) -> DpEvent:
    reason = "only a Rényi curve is known, and it fixes no privacy loss distribution"
    _refuse(event, relation, accountant, reason, "accountant 'rdp'")
    return event


def _half_multiplier(event: Any, relation: str, accountant: str) -> DpEvent:
    if event.noise_multiplier == 0:
        return dpa.NonPrivateDpEvent()
    if relation != "replace_one":
        return event
    return attr.evolve(event, noise_multiplier=event.noise_multiplier / 2)


def _add_remove_only(nearest: str) -> Callable[[DpEvent, str, str], DpEvent]:
    def rule(event: DpEvent, relation: str, accountant: str) -> DpEvent:
        if relation == "replace_one":
            reason = "its privacy loss distribution is known for add/remove and zeroing out only"
            _refuse(event, relation, accountant, reason, nearest)
        return event

    return rule


def _randomized_response(event: DpEvent, relation: str, accountant: str) -> DpEvent:
    if relation != "replace_one":
        reason = "one who answers cannot be absent"
        _refuse(event, relation, accountant, reason, "relation 'replace_one'")
    return event


def _poisson_rdp(event: Any, relation: str, accountant: str) -> DpEvent:
    if relation == "replace_one":
        reason = "the Rényi analysis of Poisson sampling holds for add/remove and zeroing out"
        _refuse(event, relation, accountant, reason, "accountant 'pld', which doubles the shift")
    z = effective_noise_multiplier(event.event)
    if z is not None:
        return dpa.PoissonSampledDpEvent(event.sampling_probability, dpa.GaussianDpEvent(z))
    for part, _ in flatten(event.event):
        translate(part, relation, accountant)
    return event


def _poisson_pld(event: Any, relation: str, accountant: str) -> DpEvent:
    z = effective_noise_multiplier(event.event)
    if z is not None:
        return dpa.PoissonSampledDpEvent(event.sampling_probability, dpa.GaussianDpEvent(z))
    if not flatten(event.event):
        return dpa.NoOpDpEvent()
    if not isinstance(event.event, dpa.LaplaceDpEvent):
        reason = "what is sampled is neither Gaussian nor Laplace"
        _refuse(event, relation, accountant, reason, "accountant 'rdp' with add/remove")
    return _add_remove_only("relation 'add_remove'")(event, relation, accountant)


def _fixed_size_rdp(event: Any, relation: str, accountant: str) -> DpEvent:
    if relation != "replace_one":
        _refuse(
            event,
            relation,
            accountant,
            "its analysis is for a unit that is exchanged for any other, which covers one that is "
            "zeroed out, at twice the distance",
            "relation 'replace_one', or Poisson sampling",
        )
    z = effective_noise_multiplier(event.event)
    if z is None:
        reason = "its analysis is known for Gaussian noise only"
        _refuse(event, relation, accountant, reason, "a Gaussian mechanism")
    if z == 0:
        return dpa.NonPrivateDpEvent()
    return attr.evolve(event, event=dpa.GaussianDpEvent(z / 2))  # type: ignore[operator]


def _repeat_and_select(event: Any, relation: str, accountant: str) -> DpEvent:
    if any(isinstance(part, CurveDpEvent) for part, _ in flatten(event.event)):
        reason = "what is repeated brings a curve that dp-accounting does not know"
        _refuse(event, relation, accountant, reason, "a Gaussian mechanism")
    parts = [
        dpa.SelfComposedDpEvent(translate(part, relation, accountant), count)
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
        dpa.LaplaceDpEvent: _add_remove_only("accountant 'rdp'"),
        standard.DiscreteLaplaceDpEvent: _add_remove_only("relation 'add_remove'"),
        standard.MixtureOfGaussiansDpEvent: _add_remove_only("relation 'add_remove'"),
        dpa.PoissonSampledDpEvent: _poisson_pld,
        dpa.TruncatedSubsampledGaussianDpEvent: _same,
    },
}

_NEEDS_PLD = {"rdp": ("its Rényi curve is not known", "accountant 'pld'")}
_NEEDS_RDP = {
    "pld": ("only a Rényi curve is known, and it fixes no distribution", "accountant 'rdp'")
}
_UNKNOWN = {
    family: ("the accountant does not know it", "a Gaussian mechanism under Poisson sampling")
    for family in ("rdp", "pld")
}
_NO_RULE: dict[type, dict[str, tuple[str, str]]] = {
    dpa.TruncatedSubsampledGaussianDpEvent: _NEEDS_PLD,
    standard.DiscreteLaplaceDpEvent: _NEEDS_PLD,
    standard.MixtureOfGaussiansDpEvent: _NEEDS_PLD,
    dpa.ZCDpEvent: _NEEDS_RDP,
    dpa.SampledWithoutReplacementDpEvent: _NEEDS_RDP,
    standard.RepeatAndSelectDpEvent: _NEEDS_RDP,
    # dp-accounting 0.6 composes it once under PLD, however often it ran.
    dpa.RandomizedResponseDpEvent: {
        "pld": ("repetitions would not be counted", "accountant 'rdp' with replace-one")
    },
}


def require_some_accountant(event: DpEvent, relation: str) -> None:
    """Requires that at least one accountant can analyse a part under a relation.

    Args:
      event: a part as `flatten` returns it.
      relation: "add_remove", "zero_out" or "replace_one".

    Raises:
      UnsupportedEvent: holding the reasons of all accountants.
    """
    reasons = []
    for accountant in ("rdp", "pld"):
        try:
            translate(event, relation, accountant)
            return
        except UnsupportedEvent as error:
            reasons.append(str(error))
    raise UnsupportedEvent("; ".join(reasons))
