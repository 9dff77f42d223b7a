"""Asynchronous rounds of a configuration, on its clock."""

from collections.abc import Callable
from typing import Any

from fedjax_dp.core import checks
from fedjax_dp.engine.federation import Federation
from fedjax_dp.engine.wrappers.asynchronous import SAMPLERS, asynchronous
from fedjax_dp.experiment.components.clock import Clock
from fedjax_dp.experiment.schema.config import ClockSection, Config
from fedjax_dp.experiment.schema.sections import given_in

_WAITING = "be left out with asynchronous rounds, which wait for no client"
_NOT_BUILT = "be left out with asynchronous rounds, for which it is not built"
# Keys of a clock that asynchronous rounds do not have.
_OF_ROUNDS = {
    "edges": "be left out with asynchronous rounds: an edge server waits for all its clients",
    "deadline": _WAITING,
    "keep": _WAITING,
    "dropout": _NOT_BUILT,
    "key_rounds": _NOT_BUILT,
    "availability": _NOT_BUILT,
}


def asynchrony_of(config: Config, clock: Clock | None) -> Callable[[Federation], Federation] | None:
    """Returns the wrapper that makes rounds asynchronous, or None; it replaces the clock."""
    section = config.asynchronous
    if section.concurrency is None:
        return None
    assert clock is not None
    latencies, compute = clock.latencies, clock.compute
    options: dict[str, Any] = section.model_dump() | {"num_rounds": config.run.rounds}
    options |= {name: clock.options[name] for name in ("server_seconds", "start_seconds")}

    def named(federation: Federation) -> Federation:
        try:
            return asynchronous(federation, latencies=latencies, compute=compute, **options)
        except ValueError as error:
            name = str(error).partition(" ")[0]
            prefix = "asynchronous." if name in type(section).model_fields else ""
            raise ValueError(f"{prefix}{error}") from error

    return named


def check_asynchronous(config: Config) -> None:
    """Checks what asynchronous rounds need of other sections."""
    section, clock = config.asynchronous, config.clock
    if section.concurrency is None:
        return
    rule = "be left out without a clock, which has the times of messages and computation"
    has_clock = bool(given_in(clock))
    checks.require(has_clock, "asynchronous.concurrency", rule, section.concurrency)
    given, usual = clock.model_dump(), ClockSection().model_dump()
    for name, rule in _OF_ROUNDS.items():
        checks.require(given[name] == usual[name], f"clock.{name}", rule, given[name])
    rule = "be left out with asynchronous rounds: no cohort is known when a client masks its update"
    form = config.secure_aggregation.form
    checks.require(form is None, "secure_aggregation.form", rule, form)
    if "client" in config.privacy.units:
        rule = "be min_separated with asynchronous rounds: their cohorts amplify nothing"
        sampler = config.participation.sampler
        fits = sampler == "min_separated"
        checks.require(fits, "participation.sampler", rule, sampler)
    rule = (
        "be fixed_size, full_participation or min_separated with asynchronous rounds: times decide "
        "whose updates arrive, so that a cohort is no random sample"
    )
    fits = config.participation.sampler in SAMPLERS
    checks.require(fits, "participation.sampler", rule, config.participation.sampler)
