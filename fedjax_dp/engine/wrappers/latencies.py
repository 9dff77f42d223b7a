"""Latencies between places, seconds of computation, and times of messages, on the host."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing

from fedjax_dp.core import checks
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.core.ranges import Count, NonNegative, Positive

# Seconds of one message or one step are below this, so that sums of them stay finite.
_LONGEST = 1e9


class Latencies(NamedTuple):
    """One-way latencies between places, and the places of clients and server.

    Attributes:
      places: names of the places.
      minimum: seconds of a message, row to column, `[places, places]`, float64, at least 0.
      jitter: the mean of what is added to each message, exponentially distributed, in seconds,
        `[places, places]`, float64, at least 0.
      clients: the place of each client, `[num_clients]`, integers.
      server: the place of the server.
    """

    places: tuple[str, ...]
    minimum: np.ndarray
    jitter: np.ndarray
    clients: np.ndarray
    server: int

    @property
    def down(self) -> np.ndarray:
        """The shortest seconds from the server to each client, `[num_clients]`."""
        return self.minimum[self.server, self.clients]

    @property
    def up(self) -> np.ndarray:
        """The shortest seconds from each client to the server, `[num_clients]`."""
        return self.minimum[self.clients, self.server]


class Compute(NamedTuple):
    """Seconds of each client's computation.

    Attributes:
      per_step: seconds of one local step, `[num_clients]`, float64, at least 0.
      per_round: seconds of a round apart from its steps, `[num_clients]`, float64, at least 0.
    """

    per_step: np.ndarray
    per_round: np.ndarray

    def seconds(self, num_steps: Any = 0) -> np.ndarray:
        """Computes the seconds of one round.

        Args:
          num_steps: local steps, a number or `[num_clients]`, at least 0.

        Returns:
          Seconds, `[num_clients]`.
        """
        return self.per_step * np.asarray(num_steps) + self.per_round


class RoundTimes(NamedTuple):
    """Simulated times of one round, in seconds from its start at the server.

    Attributes:
      arrive: when each client's message arrives, `[num_clients]`; NaN for inactive clients.
      is_late: which messages arrive after the deadline, `[num_clients]`, bool.
      server: when the server has the new model.
      receive: when each client has it, `[num_clients]`; NaN for inactive clients.
    """

    arrive: np.ndarray
    is_late: np.ndarray
    server: float
    receive: np.ndarray


@checked
def latencies(
    places: Sequence[str],
    seconds: np.typing.ArrayLike,
    clients: Sequence[str],
    server: str,
    *,
    jitter: np.typing.ArrayLike = 0.0,
) -> Latencies:
    """Builds a table of latencies, and puts clients and server at its places.

    Args:
      places: names of the places, all different.
      seconds: the shortest one-way seconds of a message from the place of the row to that of the
        column, `[places, places]`, at least 0; also within a place, on the diagonal.
      clients: the place of each client, `[num_clients]`.
      server: the place of the server.
      jitter: the mean of what is added to each message, exponentially distributed, in seconds, at
        least 0: a number, or `[places, places]`.

    Returns:
      The latencies.

    Raises:
      ValueError: for duplicate or unknown places, a hole in the table, or a number out of its
        range.
    """
    names = tuple(places)
    checks.require(len(names) > 0, "places", "name a place", names)
    twice = [name for name in names if names.count(name) > 1]
    checks.require(not twice, "places", "have different names", twice)
    checks.require(len(clients) > 0, "clients", "name the place of a client", clients)
    for place in dict.fromkeys(clients):
        checks.one_of("clients", place, names)
    checks.one_of("server", server, names)
    tables: list[np.ndarray] = []
    for name, table in (("seconds", seconds), ("jitter", jitter)):
        array = np.asarray(table, np.float64)
        if name == "jitter" and array.ndim == 0:
            array = np.full((len(names), len(names)), array)
        rule = f"be a table of {len(names)} × {len(names)} numbers, one for each pair of places"
        checks.require(array.shape == (len(names), len(names)), name, rule, np.shape(table))
        for row, column in np.argwhere(~_is_duration(array)):
            rule = f"be at least 0 and below {_LONGEST:g} for every pair of places"
            found = f"{array[row, column]} from {names[row]} to {names[column]}"
            raise ValueError(f"{name} must {rule}, got {found}")
        tables.append(array)
    indices = np.array([names.index(place) for place in clients])
    return Latencies(names, tables[0], tables[1], indices, names.index(server))


@checked
def compute_seconds(
    num_clients: Count,
    *,
    per_step: np.typing.ArrayLike | Mapping[str, Any] = 0.0,
    per_round: np.typing.ArrayLike | Mapping[str, Any] = 0.0,
    classes: Sequence[str] | None = None,
) -> Compute:
    """Builds the seconds of each client's computation.

    Args:
      num_clients: the number of clients, at least 1.
      per_step: seconds of one local step, at least 0: a number, `[num_clients]`, or by class of
        device.
      per_round: seconds of a round apart from its steps, such as measured ones, at least 0, in the
        same forms.
      classes: the class of each client's device, `[num_clients]`; needed for numbers by class.

    Returns:
      The seconds.

    Raises:
      ValueError: for an unknown class, another number of clients, or a number out of its range.
    """
    if classes is not None:
        rule = f"name the class of each of the {num_clients} clients"
        checks.require(len(classes) == num_clients, "classes", rule, len(classes))

    def by_client(name: str, value: Any) -> np.ndarray:
        if isinstance(value, Mapping):
            rule = "be given where seconds are by class of device"
            checks.require(classes is not None, "classes", rule, None)
            assert classes is not None
            for one in dict.fromkeys(classes):
                checks.one_of("classes", one, value)
            for number in value.values():
                checks.numbers(name, "have one number for each class", number)
            value = [value[one] for one in classes]
        array = np.asarray(value, np.float64)
        rule = f"be one number or have one for each of the {num_clients} clients"
        checks.require(array.shape in ((), (num_clients,)), name, rule, array.shape)
        rule = f"be at least 0 and below {_LONGEST:g}"
        checks.require(bool(np.all(_is_duration(array))), name, rule, value)
        return np.broadcast_to(array, (num_clients,))

    return Compute(by_client("per_step", per_step), by_client("per_round", per_round))


@checked
def round_times(
    latencies: Latencies,
    compute: Compute,
    *,
    num_steps: np.typing.ArrayLike = 0,
    server_seconds: NonNegative = 0.0,
    deadline: Positive | None = None,
    active: np.typing.ArrayLike | None = None,
) -> RoundTimes:
    """Computes the times of a round with a server, without jitter.

    Args:
      latencies: of messages.
      compute: seconds of computation.
      num_steps: local steps of each client, a number or `[num_clients]`.
      server_seconds: what the server takes to make the new model, at least 0.
      deadline: when the server stops waiting, in seconds from the start of the round, above 0; None
        if it waits for all active clients.
      active: which clients take part, `[num_clients]`, bool; None for all.

    Returns:
      The times.

    Raises:
      ValueError: if the arguments are not of the same clients, no client is active, or a number is
        out of its range.

    Source: arriveₖ = Lₖ + compₖ + Lₖ, server = max arriveₖ + server seconds, receiveₖ = server +
    Lₖ, as in PrivacyFL (Mugunthan and others 2020), with latencies of either direction.
    """
    is_active = _active(latencies, compute, active, least=1)
    steps = _of_clients("num_steps", num_steps, len(is_active))
    arrive, is_late, closes = schedule(
        np, latencies.down, compute.seconds(steps), latencies.up, is_active, is_active, deadline
    )
    server = float(closes + server_seconds)
    times = [np.where(is_active, x, np.nan) for x in (arrive, server + latencies.down)]
    return RoundTimes(times[0], is_late, server, times[1])


@checked
def serverless_times(
    latencies: Latencies,
    compute: Compute,
    *,
    num_steps: np.typing.ArrayLike = 0,
    active: np.typing.ArrayLike | None = None,
) -> np.ndarray:
    """Computes when each client has the messages of all others, in a round without a server.

    Args:
      latencies: of messages; the place of the server is not used.
      compute: seconds of computation.
      num_steps: local steps of each client, a number or `[num_clients]`.
      active: which clients take part, `[num_clients]`, bool; None for all.

    Returns:
      Seconds from the start of the round, `[num_clients]`; NaN for inactive clients.

    Raises:
      ValueError: if the arguments are not of the same clients, fewer than two clients are active,
        or a number is out of its range.

    Source: receiveₖ = max over j ≠ k of (compⱼ + Lⱼₖ), PrivacyFL (Mugunthan and others 2020).
    """
    is_active = _active(latencies, compute, active, least=2)
    seconds = compute.seconds(_of_clients("num_steps", num_steps, len(is_active)))
    found = np.full(len(is_active), np.nan)
    for k in np.flatnonzero(is_active):
        others = np.flatnonzero(is_active)
        others = others[others != k]
        legs = latencies.minimum[latencies.clients[others], latencies.clients[k]]
        found[k] = np.max(seconds[others] + legs)
    return found


@checked
def key_exchange_seconds(
    latencies: Latencies,
    compute: Compute,
    *,
    active: np.typing.ArrayLike | None = None,
) -> float:
    """Computes the seconds until all pairs of clients have exchanged keys, once before the run.

    All clients work and send at the same time: the longest time over clients, and over the peers of
    each, of a peer's computation and its message.

    Args:
      latencies: of messages; the place of the server is not used.
      compute: `per_round` is a client's seconds to make its keys.
      active: which clients take part, `[num_clients]`, bool; None for all.

    Returns:
      The seconds.

    Raises:
      ValueError: if the arguments are not of the same clients, or fewer than two clients are
        active.
    """
    return float(np.nanmax(serverless_times(latencies, compute, active=active)))


def schedule(
    xp: Any,
    down: Any,
    seconds: Any,
    up: Any,
    is_asked: Any,
    is_there: Any,
    deadline: Any,
) -> tuple[Any, Any, Any]:
    """Finds arrivals, late clients, and when the server stops waiting, with NumPy or JAX.

    With a deadline the server waits until then for a client that was asked and has dropped out;
    without one it does not.
    """
    arrive = down + seconds + up
    last = xp.max(xp.where(is_there, arrive, 0.0), initial=0.0)
    if deadline is None:
        return arrive, xp.zeros_like(is_there), last
    is_late = is_there & (arrive > deadline)
    is_waiting = xp.any(is_late | (is_asked & ~is_there))
    return arrive, is_late, xp.where(is_waiting, deadline, last)


def _is_duration(seconds: np.ndarray) -> np.ndarray:
    return (seconds >= 0) & (seconds < _LONGEST)


def _of_clients(name: str, value: Any, num_clients: int) -> np.ndarray:
    """Reads a number of at least 0, or one for each client."""
    array = np.asarray(value, np.float64)
    rule = f"be one number or have one for each of the {num_clients} clients"
    checks.require(array.shape in ((), (num_clients,)), name, rule, np.shape(value))
    checks.non_negative(name, array)
    return array


def _active(latencies: Latencies, compute: Compute, active: Any, least: int) -> np.ndarray:
    """Reads which clients are active, `[num_clients]`."""
    num_clients = len(latencies.clients)
    rule = f"be of the {num_clients} clients of latencies"
    checks.require(len(compute.per_step) == num_clients, "compute", rule, len(compute.per_step))
    is_active = np.ones(num_clients, bool) if active is None else np.asarray(active)
    rule = f"be True or False for each of the {num_clients} clients"
    fits = is_active.shape == (num_clients,) and is_active.dtype == bool
    checks.require(fits, "active", rule, active)
    checks.require(is_active.sum() >= least, "active", f"have {least} clients or more", active)
    return is_active
