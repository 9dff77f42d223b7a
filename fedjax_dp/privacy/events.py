"""What an accountant may be told: events taken apart, translated to a relation, and as text."""

import json
import math
from collections.abc import Callable
from typing import Any

import attr
import dp_accounting as dpa
import numpy as np
from dp_accounting import dp_event as standard
from dp_accounting.dp_event import DpEvent

from fedjax_dp.core import checks
from fedjax_dp.privacy.clipping import RELATIONS

ACCOUNTANTS = ("rdp", "pld", "rdp-classic-64")

_OWN_EVENTS: dict[str, type[DpEvent]] = {}


class UnsupportedEvent(ValueError):
    """An event without a valid analysis for the relation and accountant that were asked for."""


class CurveDpEvent(DpEvent):
    """An event of this package that brings its own Rényi curve.

    Subclasses are attrs classes whose fields describe the mechanism in full, so that anybody
    can recompute the curve from the stored event.
    """

    def __init_subclass__(cls) -> None:
        """Makes the class known to `from_json`."""
        _OWN_EVENTS[cls.__name__] = cls

    def rdp(self, orders: np.ndarray, relation: str) -> np.ndarray:
        """Computes the Rényi divergences of one run of the mechanism.

        Args:
          orders: `[orders]`, above 1.
          relation: "add_remove" or "replace_one".

        Returns:
          `[orders]`.
        """
        raise NotImplementedError


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


def to_dict(event: DpEvent) -> dict[str, Any]:
    """Writes an event as plain data: its class and its fields.

    Args:
      event: any event of dp-accounting or of this package.

    Returns:
      A dictionary that `json` can write.
    """
    fields = {f.name: _plain(getattr(event, f.name)) for f in attr.fields(type(event))}
    return {"type": type(event).__name__, **fields}


def _plain(value: Any) -> Any:
    if isinstance(value, DpEvent):
        return to_dict(value)
    if isinstance(value, list | tuple):
        return [_plain(x) for x in value]
    if isinstance(value, str | bool):
        return value
    number = np.asarray(value).item()
    # JSON has no infinity, and its writers disagree on how to pretend.
    return number if isinstance(number, int) or math.isfinite(number) else repr(number)


def from_dict(data: dict[str, Any]) -> DpEvent:
    """Reads an event that `to_dict` wrote.

    Args:
      data: the class name under "type" and the fields.

    Returns:
      The event.

    Raises:
      ValueError: if the class is not known.
    """
    name = data.get("type", "")
    cls = _OWN_EVENTS.get(name) or getattr(standard, name, None)
    is_event = isinstance(cls, type) and issubclass(cls, DpEvent)
    checks.require(is_event, "type", "name a class of events", name)
    return cls(**{k: _restored(v) for k, v in data.items() if k != "type"})  # type: ignore[misc]


def _restored(value: Any) -> Any:
    if isinstance(value, dict):
        return from_dict(value)
    if isinstance(value, list):
        return [_restored(x) for x in value]
    return float(value) if value in ("inf", "-inf", "nan") else value


def key_of(event: DpEvent) -> str:
    """Writes an event as one line of text that equal events share.

    Args:
      event: any event.

    Returns:
      The text.
    """
    return json.dumps(to_dict(event), sort_keys=True)


def flatten(event: DpEvent, count: int = 1) -> list[tuple[DpEvent, int]]:
    """Takes compositions apart; every accountant here adds up, in any order.

    Args:
      event: any event.
      count: how often it ran, at least 0.

    Returns:
      The parts with their counts, without events that cost nothing.

    Raises:
      ValueError: if `event` is no event, a count is not whole, or a parameter is out of range.
    """
    checks.require(isinstance(event, DpEvent), "event", "be a dp_accounting DpEvent", event)
    if isinstance(event, dpa.NoOpDpEvent):
        return []
    if isinstance(event, dpa.SelfComposedDpEvent):
        checks.whole("count", event.count, at_least=0)
        return flatten(event.event, count * int(event.count))
    if isinstance(event, dpa.ComposedDpEvent):
        return [part for e in event.events for part in flatten(e, count)]
    _check_parameters(event)
    return [(event, count)] if count else []


def _check_parameters(event: DpEvent) -> None:
    for field in attr.fields(type(event)):
        value = getattr(event, field.name)
        if isinstance(value, DpEvent):
            flatten(value)
        elif field.name in ("noise_multiplier", "standard_deviation", "rho", "xi"):
            is_valid = bool(np.all(np.asarray(value) >= 0))
            checks.require(is_valid, field.name, "be at least 0", value)
        elif field.name == "sampling_probability":
            checks.probability(field.name, value, allow_zero=True)


def effective_noise_multiplier(event: DpEvent) -> float | None:
    """Finds the one Gaussian that a composition of Gaussians on the same sample amounts to.

    Args:
      event: any event.

    Returns:
      The noise multiplier, or None where something else than Gaussians is in it.
    """
    precision = 0.0
    for part, count in flatten(event):
        if not isinstance(part, dpa.GaussianDpEvent):
            return None
        if part.noise_multiplier == 0:
            return 0.0
        precision += count / part.noise_multiplier**2
    return precision**-0.5 if precision else None


def _refuse(event: DpEvent, relation: str, accountant: str, reason: str, nearest: str) -> None:
    raise UnsupportedEvent(
        f"{type(event).__name__} under relation {relation!r} has no valid analysis by accountant "
        f"{accountant!r}: {reason}; nearest valid choice: {nearest}"
    )


def translate(event: DpEvent, relation: str, accountant: str) -> DpEvent:
    """Writes a part of a composition as dp-accounting must be told it for a relation.

    Noise multipliers come in as standard deviation over the largest contribution of one unit.
    Replacing a unit moves a sum twice that far; the PLD accountant of dp-accounting knows it,
    its RDP accountant does not and is given half the multiplier.

    Args:
      event: a part as `flatten` returns it.
      relation: "add_remove" or "replace_one".
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
        rule = _own_curve if family == "rdp" else _rdp_only
    if rule is None:
        _refuse(event, relation, accountant, *_NO_RULE.get(type(event), _UNKNOWN)[family])
    return rule(event, relation, accountant)  # type: ignore[misc]


def _same(event: DpEvent, relation: str, accountant: str) -> DpEvent:
    return event


def _own_curve(event: DpEvent, relation: str, accountant: str) -> DpEvent:
    return event


def _rdp_only(event: DpEvent, relation: str, accountant: str) -> DpEvent:
    reason = "only a Rényi curve is known, and it fixes no privacy loss distribution"
    _refuse(event, relation, accountant, reason, "accountant 'rdp'")
    return event


def _half_multiplier(event: Any, relation: str, accountant: str) -> DpEvent:
    if relation == "add_remove":
        return event
    return attr.evolve(event, noise_multiplier=event.noise_multiplier / 2)


def _add_remove_only(nearest: str) -> Callable[[DpEvent, str, str], DpEvent]:
    def rule(event: DpEvent, relation: str, accountant: str) -> DpEvent:
        if relation != "add_remove":
            reason = "its privacy loss distribution is known for add/remove only"
            _refuse(event, relation, accountant, reason, nearest)
        return event

    return rule


def _randomized_response(event: DpEvent, relation: str, accountant: str) -> DpEvent:
    if relation != "replace_one":
        reason = "one who answers cannot be absent"
        _refuse(event, relation, accountant, reason, "relation 'replace_one'")
    return event


def _poisson_rdp(event: Any, relation: str, accountant: str) -> DpEvent:
    if relation != "add_remove":
        reason = "the Rényi analysis of Poisson sampling holds for add/remove"
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
            "the size of the sample tells whether a unit was added or removed only if it varies",
            "relation 'replace_one', or Poisson sampling",
        )
    z = effective_noise_multiplier(event.event)
    if z is None:
        reason = "its analysis is known for Gaussian noise only"
        _refuse(event, relation, accountant, reason, "a Gaussian mechanism")
    return attr.evolve(event, event=dpa.GaussianDpEvent(z / 2))  # type: ignore[operator]


def _repeat_and_select(event: Any, relation: str, accountant: str) -> DpEvent:
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
      relation: "add_remove" or "replace_one".

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
