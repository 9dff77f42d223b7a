"""The wrappers of a configuration: in which order they are applied, and which go together."""

from collections.abc import Callable
from functools import partial, reduce
from typing import Any, NamedTuple

from fedjax_dp.core import checks
from fedjax_dp.engine import wrapping
from fedjax_dp.engine.federation import Federation
from fedjax_dp.engine.wrappers.anderson import anderson
from fedjax_dp.engine.wrappers.leaving import leaving
from fedjax_dp.engine.wrappers.servers import serverless, several_servers
from fedjax_dp.engine.wrapping import Wrapper
from fedjax_dp.experiment.components.asynchrony import asynchrony_of
from fedjax_dp.experiment.components.clock import clock_of
from fedjax_dp.experiment.components.secure_aggregation import servers_of
from fedjax_dp.experiment.schema.config import Config
from fedjax_dp.models.base import Model

Wrap = Callable[[Federation], Federation]


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
    every = [
        _Asked(fast, "acceleration.memory", config.acceleration.memory),
        _Asked(wrapping.LEAVING, "leaving.tolerance", config.leaving.tolerance),
        _Asked(wrapping.SERVERLESS, "communication.serverless", section.serverless or None),
        _Asked(wrapping.SEVERAL_SERVERS, "communication.servers", section.servers or None),
        _Asked(wrapping.ASYNCHRONOUS, "asynchronous.concurrency", concurrency),
    ]
    return [one for one in every if one.value is not None]


def check_wrappers(config: Config) -> None:
    """Refuses wrappers of which one does not go around another."""
    inside: list[_Asked] = []
    for outer in _asked(config):
        for inner in inside:
            refusal = outer.wrapper.refusal(inner.wrapper)
            rule = f"be left out with {inner.key}: its federation must {refusal}"
            checks.require(refusal is None, outer.key, rule, outer.value)
        inside.append(outer)


def wrapper_of(config: Config, model: Model, num_clients: int) -> Wrap | None:
    """Returns the wrappers of a federation as one, the clock outermost; None without any."""
    section = config.acceleration
    is_buffer = model.is_buffer if model.buffer_keys else None
    away, period = config.leaving, config.communication.exchange_every or 1
    clock = clock_of(config, num_clients)
    made: dict[str, Callable[[], Wrap | None]] = {
        "acceleration.memory": lambda: partial(
            anderson, num_rounds=config.run.rounds, is_buffer=is_buffer, **section.model_dump()
        ),
        "leaving.tolerance": lambda: partial(
            leaving, tolerance=away.tolerance or 0.0, min_active=away.min_active
        ),
        "communication.serverless": lambda: serverless,
        "communication.servers": lambda: partial(
            several_servers, servers=servers_of(config, num_clients), exchange_every=period
        ),
        "asynchronous.concurrency": lambda: asynchrony_of(config, clock),
    }
    wraps: list[Wrap | None] = [made[one.key]() for one in _asked(config)]
    if clock is not None and config.asynchronous.concurrency is None:
        wraps.append(clock.__call__)
    found = [wrap for wrap in wraps if wrap is not None]
    if not found:
        return None
    return lambda federation: reduce(lambda inner, wrap: wrap(inner), found, federation)
