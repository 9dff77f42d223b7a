"""Privacy events: flattening, serialisation, and Rényi curves."""

import json
import math
from typing import Any, ClassVar, NamedTuple

import attr
import dp_accounting as dpa
import jax
import numpy as np
from dp_accounting import dp_event as standard
from dp_accounting.dp_event import DpEvent

from fedjax_dp.core import checks

_OWN_EVENTS: dict[str, type[DpEvent]] = {}


class Advice(NamedTuple):
    """A valid alternative to refused settings; None for settings that may stay."""

    accountant: str | None = None  # "rdp" or "pld".
    relation: str | None = None
    sampler: str | None = None  # "poisson", without a capacity.
    mechanism: str | None = None  # "gaussian".

    def __str__(self) -> str:
        """Writes the advice as text for a message."""
        chosen = [f"{name} {value!r}" for name, value in self._asdict().items() if value]
        words = " with ".join(chosen)
        return words.replace("sampler 'poisson'", "sampler 'poisson' without a capacity")


class UnsupportedEvent(ValueError):
    """An event without a valid analysis for the requested relation and accountant.

    Attributes:
      advice: the nearest choice that has one; None if there is none.
    """

    def __init__(self, message: str, advice: Advice | None = None):
        """Builds the error; the advice is added to the message."""
        nearest = "" if advice is None else f"; nearest valid choice: {advice}"
        super().__init__(message + nearest)
        self.advice = advice


class CurveDpEvent(DpEvent):
    """An event of this package, with its own Rényi curve.

    Subclasses are attrs classes whose fields describe the mechanism in full, so that the curve can
    be recomputed from the stored event. `has_loss_masses` says whether a privacy loss distribution
    is known too.
    """

    has_loss_masses: ClassVar[bool] = False

    def __init_subclass__(cls) -> None:
        """Registers the class for `from_dict`."""
        _OWN_EVENTS[cls.__name__] = cls

    def rdp(self, orders: np.ndarray, relation: str) -> np.ndarray:
        """Computes the Rényi divergences of one run at orders above 1, `[orders]`."""
        raise NotImplementedError

    def loss_masses(self, interval: float) -> dict[int, float]:
        """Computes the probabilities of a dominating pair's losses, by multiple of `interval`.

        They sum to 1 and never understate a loss. One distribution has to serve both directions of
        both relations.
        """
        raise NotImplementedError

    def slack(self, relation: str) -> float:
        """Computes the δ that the curve does not cover: the probability of revealing everything."""
        del relation
        return 0.0


def to_dict(event: DpEvent) -> dict[str, Any]:
    """Writes an event as plain data that `json` can write: its class and its fields."""
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
    # JSON has no infinity, and libraries disagree on how to write it.
    return number if isinstance(number, int) or math.isfinite(number) else repr(number)


def from_dict(data: dict[str, Any]) -> DpEvent:
    """Reads an event that `to_dict` wrote: its class by the name under "type", and its fields."""
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
    """Writes an event as one line of text that equal events share."""
    return json.dumps(to_dict(event), sort_keys=True)


def flatten(event: DpEvent, count: int = 1) -> list[tuple[DpEvent, int]]:
    """Flattens compositions into parts with counts; drops free events, refuses bad numbers."""
    checks.require(isinstance(event, DpEvent), "event", "be a dp_accounting DpEvent", event)
    if isinstance(event, dpa.NoOpDpEvent):
        return []
    if isinstance(event, dpa.SelfComposedDpEvent):
        checks.whole("count", event.count, at_least=0, is_sized=False)
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
        elif field.name == "noise_multiplier":
            require_noise(field.name, value)
        elif field.name in ("standard_deviation", "rho", "xi"):
            is_valid = bool(np.all(np.asarray(value) >= 0))
            checks.require(is_valid, field.name, "be at least 0", value)
        elif field.name == "sampling_probability":
            checks.probability(field.name, value, allow_zero=True)


def slack_of(event: DpEvent, relation: str) -> float:
    """Bounds the δ that the Rényi curves of an event do not cover; it adds up over compositions.

    A mechanism that is (ε, δ)-DP is ε-DP except on an event of probability δ; under
    Poisson sampling that event needs the unit to be drawn.

    Source: Murtagh and Vadhan 2016, lemma 3.2, for the decomposition.
    """
    total = 0.0
    for part, count in flatten(event):
        if isinstance(part, CurveDpEvent):
            total += count * part.slack(relation)
        elif isinstance(part, dpa.PoissonSampledDpEvent):
            total += count * part.sampling_probability * slack_of(part.event, relation)
    return total


def concrete(argument: str, value: jax.typing.ArrayLike) -> float:
    """Reads a number of an event, which is built on the host: a traced one is refused."""
    is_traced = checks.is_traced(value)
    checks.require(not is_traced, argument, "be concrete when an event is built", value)
    return float(value)  # type: ignore[arg-type]


def sampling_rate(event: Any) -> float | None:
    """The probability that a unit is drawn, for events with secret sampling."""
    if isinstance(event, dpa.SampledWithoutReplacementDpEvent | dpa.SampledWithReplacementDpEvent):
        return float(event.sample_size / event.source_dataset_size)
    rate = getattr(event, "sampling_probability", None)
    return None if rate is None else float(rate)


def require_noise(name: str, noise_multiplier: Any) -> None:
    """Requires noise of which accountants compute ordinary numbers: 0, or from 1e-100 to 1e9."""
    noise = np.asarray(noise_multiplier, float)
    inside = (noise == 0) | ((noise >= 1e-100) & (noise <= 1e9))
    checks.require(bool(np.all(inside)), name, "be 0, or from 1e-100 to 1e9", noise_multiplier)


def effective_noise_multiplier(event: DpEvent) -> float | None:
    """Finds the Gaussian equivalent to a composition; None if it has other events."""
    precision = 0.0
    for part, count in flatten(event):
        if not isinstance(part, dpa.GaussianDpEvent):
            return None
        square = float(part.noise_multiplier) * float(part.noise_multiplier)
        # Noise whose square underflows counts as none.
        if square == 0:
            return 0.0
        precision += count / square
    return precision**-0.5 if precision else None
