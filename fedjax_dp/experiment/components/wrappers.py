"""The wrappers of a configuration: in which order they are applied, and which go together."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial, reduce
from typing import Any, NamedTuple

from fedjax_dp.core import checks
from fedjax_dp.engine import wrapping
from fedjax_dp.engine.federation import Federation
from fedjax_dp.engine.wrappers import anderson, asynchronous, leaving, servers
from fedjax_dp.engine.wrappers.budgets import within_budgets
from fedjax_dp.engine.wrapping import Wrapper
from fedjax_dp.experiment.components.clock import Clock
from fedjax_dp.experiment.components.numbers_by_client import check_cycle
from fedjax_dp.experiment.components.planned import KEY
from fedjax_dp.experiment.components.schedules import with_schedules
from fedjax_dp.experiment.components.secure_aggregation import servers_of
from fedjax_dp.experiment.schema.config import ClockSection, Config
from fedjax_dp.experiment.schema.constraints import keyed
from fedjax_dp.experiment.schema.sections import given_in
from fedjax_dp.models.base import Model

Wrap = Callable[[Federation], Federation]

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


class _Asked(NamedTuple):
    """A wrapper that a configuration asks for, by which key and value."""

    wrapper: Wrapper
    key: str
    value: Any


def _asked(config: Config) -> list[_Asked]:
    """Lists the wrappers of a configuration, innermost first; the clock goes around all."""
    of_clients = config.acceleration.of == "clients"
    fast = wrapping.ANDERSON_OF_CLIENTS if of_clients else wrapping.ANDERSON
    section, concurrency = config.communication, config.asynchronous.concurrency
    privacy = config.privacy
    planned = privacy.record.planned_participations if "record" in privacy.units else None
    every = [
        _Asked(wrapping.WITHIN_BUDGETS, KEY, planned),
        _Asked(fast, "acceleration.memory", config.acceleration.memory),
        _Asked(wrapping.LEAVING, "leaving.tolerance", config.leaving.tolerance),
        _Asked(wrapping.SERVERLESS, "communication.serverless", section.serverless or None),
        _Asked(wrapping.SEVERAL_SERVERS, "communication.servers", section.servers or None),
        _Asked(wrapping.ASYNCHRONOUS, "asynchronous.concurrency", concurrency),
    ]
    return [one for one in every if one.value is not None]


def _named(key: str) -> AbstractContextManager[None]:
    """Names keys in errors of the wrapper that a key asks for."""
    parts = ("federation", "aggregator", "participation")
    keys = {part: f"{key} must be left out: its {part}" for part in parts}
    times = ("latencies", "compute", "server_seconds", "start_seconds")
    return keyed(key.rpartition(".")[0], keys | {name: f"clock.{name}" for name in times})


def check_wrappers(config: Config) -> None:
    """Refuses wrappers that do not go together, or whose arguments or methods do not fit."""
    inside: list[_Asked] = []
    for outer in _asked(config):
        for inner in inside:
            refusal = outer.wrapper.refusal(inner.wrapper)
            rule = f"be left out with {inner.key}: its federation must {refusal}"
            checks.require(refusal is None, outer.key, rule, outer.value)
        inside.append(outer)
    section, name, masks = config.communication, config.algorithm.name, config.secure_aggregation
    in_shares = ("mechanism", "gamma_shares") in config.algorithm.options.items()
    fast, protects_clients = config.acceleration, "client" in config.privacy.units
    for key in [one.key for one in inside]:
        with _named(key):
            match key:
                case "acceleration.memory":
                    arguments = fast.model_dump(include={"memory", "of", "first", "weights"})
                    anderson.check_memory(**arguments, num_rounds=config.run.rounds)
                case "leaving.tolerance":
                    leaving.check_method(name in leaving.METHODS, name)
                    leaving.check_noise(in_shares)
                case "communication.serverless":
                    servers.check_noise(protects_clients, in_shares)
                case "communication.servers":
                    servers.check_servers(section.servers)
                    servers.check_shares(int(in_shares))
    if config.asynchronous.concurrency is not None:
        _check_asynchronous(config)
    rule = "secure_aggregation.colluders must be at least 1: its aggregator"
    with keyed("secure_aggregation", {"aggregator": rule}):
        has_masks = masks.form is not None and section.serverless
        servers.check_colluders(masks.colluders if has_masks else None)
    rule = "be left out without communication.servers"
    period = section.exchange_every
    is_used = bool(section.servers) or period is None
    checks.require(is_used, "communication.exchange_every", rule, period)
    rule = (
        "be left out under privacy of clients: a server divides by the expected number of its own "
        "clients, for which no configuration calibrates"
    )
    fits = not (section.servers and protects_clients)
    checks.require(fits, "communication.servers", rule, section.servers)


def check_numbers(config: Config, num_clients: int) -> None:
    """Refuses arguments of wrappers that do not fit the number of clients."""
    with keyed("acceleration"):
        anderson.check_weights(config.acceleration.weights, num_clients)
    if config.leaving.tolerance is not None:
        with keyed("leaving"):
            leaving.check_min_active(config.leaving.min_active, num_clients)
    check_cycle("communication.servers", config.communication.servers, num_clients)


def _check_asynchronous(config: Config) -> None:
    """Refuses what asynchronous rounds do not have, or lacks what they need."""
    rule = "be left out without a clock, which has the times of messages and computation"
    concurrency = config.asynchronous.concurrency
    has_clock = bool(given_in(config.clock))
    checks.require(has_clock, "asynchronous.concurrency", rule, concurrency)
    given, usual = config.clock.model_dump(), ClockSection().model_dump()
    for name, rule in _OF_ROUNDS.items():
        checks.require(given[name] == usual[name], f"clock.{name}", rule, given[name])
    with keyed("", {"aggregator": "secure_aggregation.form must be left out: its aggregator"}):
        asynchronous.check_messages(config.secure_aggregation.form is not None)
    sampler = config.participation.sampler
    with keyed("", {"participation": "participation.sampler"}):
        asynchronous.check_sampler(sampler)
    fits = sampler == "min_separated" or "client" not in config.privacy.units
    rule = "be min_separated with asynchronous rounds: their cohorts amplify nothing"
    checks.require(fits, "participation.sampler", rule, sampler)


def wrapper_of(config: Config, model: Model, num_clients: int, clock: Clock | None) -> Wrap | None:
    """Returns the wrappers of a federation as one, the clock outermost; None without any."""
    section, away = config.acceleration, config.leaving
    is_buffer = model.is_buffer if model.buffer_keys else None
    period = config.communication.exchange_every or 1
    level = config.privacy.record
    # Lists by name are in the clients' order by now.
    budget: dict[str, Any] = {"epsilon": level.epsilon, "dp_delta": level.dp_delta}
    budget |= config.privacy.promise
    made: dict[str, Callable[[], Wrap]] = {
        KEY: lambda: partial(within_budgets, **budget),
        "acceleration.memory": lambda: partial(
            anderson.anderson,
            num_rounds=config.run.rounds,
            is_buffer=is_buffer,
            **section.model_dump(),
        ),
        "leaving.tolerance": lambda: partial(
            leaving.leaving, tolerance=away.tolerance or 0.0, min_active=away.min_active
        ),
        "communication.serverless": lambda: servers.serverless,
        "communication.servers": lambda: partial(
            servers.several_servers, servers=servers_of(config, num_clients), exchange_every=period
        ),
        "asynchronous.concurrency": lambda: _asynchrony(config, clock),
    }

    def named(key: str, wrap: Wrap) -> Wrap:
        def wrapped(federation: Federation) -> Federation:
            with _named(key):
                return wrap(federation)

        return wrapped

    wraps = [named(one.key, made[one.key]()) for one in _asked(config)]
    if clock is not None and config.asynchronous.concurrency is None:
        wraps.append(clock.__call__)
    # Numbers of all wrappers can change.
    if (schedules := with_schedules(config)) is not None:
        wraps.append(schedules)
    if not wraps:
        return None
    return lambda federation: reduce(lambda inner, wrap: wrap(inner), wraps, federation)


def _asynchrony(config: Config, clock: Clock | None) -> Wrap:
    """Makes the wrapper that makes rounds asynchronous; it replaces the clock."""
    assert clock is not None
    options: dict[str, Any] = config.asynchronous.model_dump() | {"num_rounds": config.run.rounds}
    options |= {name: clock.options[name] for name in ("server_seconds", "start_seconds")}
    return partial(
        asynchronous.asynchronous, latencies=clock.latencies, compute=clock.compute, **options
    )
