"""The simulated clock of a configuration."""

from collections.abc import Sequence
from itertools import cycle, islice
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from fedjax_dp.core import checks, files
from fedjax_dp.data.datasets.tabular import is_finite
from fedjax_dp.data.participants import Participation
from fedjax_dp.engine.federation import Federation
from fedjax_dp.engine.wrappers.availability import Availability, absences, all_of, daily, in_rounds
from fedjax_dp.engine.wrappers.clock import check_deadline, check_keep, check_rules, clocked
from fedjax_dp.engine.wrappers.latencies import (
    Compute,
    Latencies,
    RoundTimes,
    compute_seconds,
    key_exchange_seconds,
    latencies,
    round_times,
    serverless_times,
)
from fedjax_dp.experiment.components.numbers_by_client import check_cycle
from fedjax_dp.experiment.schema.config import AvailabilitySection, ClockSection, Config
from fedjax_dp.experiment.schema.constraints import keyed
from fedjax_dp.experiment.schema.sections import given_in


class Clock(NamedTuple):
    """The parts of a clock, bound to clients; `options` are those of `clocked` besides."""

    latencies: Latencies
    compute: Compute
    options: dict[str, Any]

    def __call__(self, federation: Federation) -> Federation:
        """Wraps a federation."""
        with keyed("clock"):
            return clocked(
                federation, latencies=self.latencies, compute=self.compute, **self.options
            )

    def times(self, federation: Federation) -> RoundTimes:
        """Computes the times of a round of all clients, without jitter."""
        hyper, sizes = federation.hyper, jnp.asarray(federation.population.sizes)
        steps = federation.algorithm.training.steps_of(jnp.arange(len(sizes)), sizes, hyper.local)
        if self.latencies.server is not None:
            names = ("server_seconds", "deadline", "keep")
            chosen = {name: self.options[name] for name in names}
            return round_times(self.latencies, self.compute, num_steps=np.asarray(steps), **chosen)
        # Each client begins at once, and has the new model when it has all messages.
        ready = self.compute.seconds(np.asarray(steps))
        heard = serverless_times(self.latencies, self.compute, num_steps=np.asarray(steps))
        heard = np.maximum(heard, ready)
        closes = float(np.max(heard))
        end = closes + self.options["server_seconds"]
        never = np.zeros(len(ready), bool)
        return RoundTimes(heard, never, end, np.full(len(ready), end), 0 * ready, ready, closes)


def with_latencies(config: Config) -> Config:
    """Replaces the file of latencies, if any, by places and seconds."""
    section = config.clock
    if section.latencies is None:
        return config
    for name in ("places", "seconds"):
        is_given = name in section.model_fields_set
        rule = "be left out with a file of clock.latencies"
        checks.require(not is_given, f"clock.{name}", rule, getattr(section, name))
    places, seconds = _table(section.latencies)
    found = {"latencies": None, "places": places, "seconds": seconds}
    return config.model_copy(update={"clock": section.model_copy(update=found)})


def clock_of(
    config: Config, num_clients: int | None, participation: Participation | None = None
) -> Clock | None:
    """Builds the clock of a configuration, or None without one; checks all but the federation.

    `num_clients` is None while it is unknown, and then assumed to be that of the longest list.
    """
    section = config.clock
    if not given_in(section):
        return None
    count = _longest(section) if num_clients is None else num_clients
    needs_server = not config.communication.serverless
    rule = "name a place" if needs_server else "be left out with communication.serverless"
    fits = (section.server is not None) == needs_server
    checks.require(fits, "clock.server", rule, section.server)
    rule = "be false under a clock of one client, which has no other to send its message to"
    checks.require(needs_server or count > 1, "communication.serverless", rule, True)
    rule = "be left out with one client, which has no other to exchange keys with"
    rounds = section.key_rounds
    checks.require(count > 1 or not rounds, "clock.key_rounds", rule, rounds)

    def in_turn(names: Sequence[str]) -> list[str] | None:
        return list(islice(cycle(names), count)) or None

    available = _availability(section.availability, in_turn(section.classes), num_clients)
    with keyed("clock"):
        between = latencies(
            section.places,
            section.seconds,
            in_turn(section.clients) or [],
            section.server,
            jitter=section.jitter,
            edges=in_turn(section.edges),
        )
        compute = compute_seconds(
            count,
            per_step=section.per_step,
            per_round=section.per_round,
            classes=in_turn(section.classes),
            spread=section.spread,
            seed=config.run.seed,
        )
        check_rules(between, section.deadline, section.keep, available)
        if num_clients is not None:
            check_deadline(between, compute, section.deadline)
        if participation is not None:
            check_keep(participation, section.keep)
        names = ("server_seconds", "start_seconds", "deadline", "dropout", "keep")
        options = {name: getattr(section, name) for name in names}
        options["availability"] = available
        if rounds:
            options["key_seconds"] = key_exchange_seconds(between, compute)
            options["key_rounds"] = tuple(rounds)
    for name in ("clients", "edges", "classes"):
        check_cycle(f"clock.{name}", getattr(section, name), count)
    return Clock(between, compute, options)


def _longest(section: ClockSection) -> int:
    """Finds the length of the longest list of clients, at least 2."""
    rounds = section.availability.first, section.availability.end
    lists = [section.clients, section.edges, section.classes]
    return max(2, *(len(each) for each in (*lists, *rounds) if isinstance(each, list)))


def _availability(
    section: AvailabilitySection, classes: Sequence[str] | None, num_clients: int | None
) -> Availability | None:
    """Builds who can be reached; None for all clients."""
    parts: list[Availability] = []
    begin_and_end = {name: getattr(section, name) for name in ("first", "end")}
    away = {name: getattr(section, f"return_{name}") for name in ("rounds", "seconds")}
    if num_clients is not None:
        for name, value in begin_and_end.items():
            checks.one_for_each(f"clock.availability.{name}", value, num_clients)
    names = {name: f"clock.availability.return_{name}" for name in away}
    with keyed("clock.availability", {**names, "classes": "clock.classes"}):
        if section.hours is not None:
            by_class = isinstance(section.hours, dict)
            parts.append(daily(section.hours, classes if by_class else None))
        if any(value is not None for value in begin_and_end.values()):
            parts.append(in_rounds(**{k: v for k, v in begin_and_end.items() if v is not None}))
        if section.chance is not None:
            parts.append(absences(section.chance, **away))
        for name, value in away.items():
            rule = "be left out without a chance to leave"
            checks.require(value is None or section.chance is not None, name, rule, value)
        return all_of(parts) if parts else None


def _table(file: str) -> tuple[list[str], list[list[float]]]:
    """Reads a table of latencies: names of places in the first line and the first column."""
    files.require_file(file, "clock.latencies")
    numbered = files.lines(files.read_text(file))
    lines = [(n, files.cells(line, files.at_line(file, n))) for n, line in numbered]
    checks.require(len(lines) > 1, file, "hold a line of places and one for each place", "")
    places = lines[0][1][1:]
    names = [cells[0] for _, cells in lines[1:]]
    rule = f"have a line for each place of its first line, in the same order, {places}"
    checks.require(names == places, file, rule, names)
    seconds = []
    for number, (_, *cells) in lines[1:]:
        where = files.at_line(file, number)
        rule = f"have a number for each of the {len(places)} places"
        checks.require(len(cells) == len(places), where, rule, len(cells))
        checks.require(all(map(is_finite, cells)), where, rule, cells)
        seconds.append([float(cell) for cell in cells])
    return places, seconds
