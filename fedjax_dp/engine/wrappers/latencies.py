"""Latencies between places, seconds of computation, and times of messages, on the host."""

import numbers
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import zip_longest
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing
from chex import PRNGKey

from fedjax_dp.core import checks
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.core.keys import Purpose, fold
from fedjax_dp.core.ranges import Count, Index, NonNegative, Positive, Seed

# Seconds of one message or one step are below this, so that sums of them stay finite.
LONGEST = 1e9
# What a client's key of the clock is folded with.
JITTER = 1
# What a short row of a table has for its last places.
_NOTHING = "nothing"
# A table with holes is refused by the function, which names the places.
Table = np.typing.ArrayLike | Sequence[Sequence[Any]]
# Added to the place of an edge server, whose key is then none of a client's.
_EDGES = np.uint32(2**31)


class Latencies(NamedTuple):
    """One-way latencies between places, and the places of clients and server.

    Attributes:
      places: names of the places.
      minimum: seconds of a message, row to column, `[places, places]`, float64, at least 0.
      jitter: the mean extra delay of each message, exponentially distributed, in seconds,
        `[places, places]`, float64, at least 0.
      clients: the place of each client, `[num_clients]`, integers.
      server: the place of the server; None without a server.
      edges: the place of each client's edge server, `[num_clients]`, integers: it passes the
        broadcast on, and sends the server one sum for all its clients. None without edge servers.
    """

    places: tuple[str, ...]
    minimum: np.ndarray
    jitter: np.ndarray
    clients: np.ndarray
    server: int | None
    edges: np.ndarray | None = None

    @property
    def down(self) -> np.ndarray:
        """The shortest seconds from the server to each client, `[num_clients]`."""
        return sum(self.minimum[a, b] for a, b in self.path)

    @property
    def up(self) -> np.ndarray:
        """The shortest seconds from each client to the server, `[num_clients]`."""
        return sum(self.minimum[b, a] for a, b in self.path)

    @property
    def path(self) -> tuple[tuple[Any, Any], ...]:
        """The legs from the server to each client: pairs of places, `[num_clients]` or one."""
        if self.edges is None:
            return ((self.server, self.clients),)
        return (self.edges, self.clients), (self.server, self.edges)


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
      is_late: which messages arrive after the server has stopped waiting, `[num_clients]`, bool.
      server: when the server has the new model.
      receive: when each client has it, `[num_clients]`; NaN for inactive clients.
      begin: when the broadcast arrives and each client begins to compute, `[num_clients]`.
      send: when each client sends its message, `[num_clients]`.
      closes: when the server stops waiting.
    """

    arrive: np.ndarray
    is_late: np.ndarray
    server: float
    receive: np.ndarray
    begin: np.ndarray
    send: np.ndarray
    closes: float


class Legs(NamedTuple):
    """Seconds of clients' messages, `[clients]`: broadcast, update, and the next broadcast."""

    down: Any
    up: Any
    back: Any


@checked
def latencies(
    places: Sequence[str],
    seconds: Table,
    clients: Sequence[str],
    server: str | None = None,
    *,
    jitter: Table = 0.0,
    edges: Sequence[str] | None = None,
) -> Latencies:
    """Builds a table of latencies, and puts clients and server at its places.

    Args:
      places: names of the places, all different.
      seconds: the shortest one-way seconds of a message from the place of the row to that of the
        column, `[places, places]`, at least 0; also within a place, on the diagonal.
      clients: the place of each client, `[num_clients]`.
      server: the place of the server; None without a server, where clients send messages to all
        others.
      jitter: the mean extra delay of each message, exponentially distributed, in seconds, at
        least 0: a number, or `[places, places]`.
      edges: the place of each client's edge server, `[num_clients]`, between client and server;
        None without edge servers.

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
    if server is not None:
        checks.one_of("server", server, names)
    tables: list[np.ndarray] = []
    for name, table in (("seconds", seconds), ("jitter", jitter)):
        if name == "jitter" and not isinstance(table, Sequence) and np.ndim(table) == 0:
            table = np.full((len(names), len(names)), table)
        tables.append(_read_table(name, table, names))
    if edges is not None:
        checks.require(server is not None, "edges", "be left out without a server", edges)
        rule = f"name the edge server of each of the {len(clients)} clients"
        checks.require(len(edges) == len(clients), "edges", rule, len(edges))
        for place in dict.fromkeys(edges):
            checks.one_of("edges", place, names)

    def indices(chosen: Sequence[str]) -> np.ndarray:
        return np.array([names.index(place) for place in chosen])

    between = None if edges is None else indices(edges)
    least, extra = tables
    root = None if server is None else names.index(server)
    return Latencies(names, least, extra, indices(clients), root, between)


def _read_table(name: str, table: Any, names: Sequence[str]) -> np.ndarray:
    """Reads seconds from places to places; names a pair that has none, or others than allowed."""
    size = len(names)
    rule = f"be a table of {size} × {size} numbers, one for each pair of places"
    rows = table.tolist() if hasattr(table, "tolist") else table
    is_table = isinstance(rows, Sequence) and all(isinstance(row, list | tuple) for row in rows)
    fits = is_table and len(rows) == size and all(len(row) <= size for row in rows)
    checks.require(fits, name, rule, table)
    rule = f"be at least 0 and below {LONGEST:g} for every pair of places"
    for place, row in zip(names, rows, strict=True):
        for other, cell in zip_longest(names, row, fillvalue=_NOTHING):
            is_number = isinstance(cell, numbers.Real) and not isinstance(cell, bool)
            if not (is_number and _is_duration(np.asarray(cell))):
                found = repr(cell) if isinstance(cell, str) and cell is not _NOTHING else cell
                raise ValueError(f"{name} must {rule}, got {found} from {place} to {other}")
    return np.asarray(rows, np.float64)


@checked
def compute_seconds(
    num_clients: Count,
    *,
    per_step: np.typing.ArrayLike | Mapping[str, Any] = 0.0,
    per_round: np.typing.ArrayLike | Mapping[str, Any] = 0.0,
    classes: Sequence[str] | None = None,
    spread: NonNegative | Mapping[str, Any] = 0.0,
    seed: Seed = 0,
) -> Compute:
    """Builds the seconds of each client's computation.

    With a spread devices of a class differ: the seconds of each client are multiplied by a
    lognormal factor of median 1, drawn once from the seed and the client's index.

    Args:
      num_clients: the number of clients, at least 1.
      per_step: seconds of one local step, at least 0: a number, `[num_clients]`, or by class of
        device.
      per_round: seconds of a round apart from its steps, such as measured ones, at least 0, in the
        same forms.
      classes: the class of each client's device, `[num_clients]`; needed for numbers by class.
      spread: standard deviation of the factor's logarithm, at least 0, one or by class.
      seed: of the factors.

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
        checks.one_for_each(name, array, num_clients)
        rule = f"be at least 0 and below {LONGEST:g}"
        checks.require(bool(np.all(_is_duration(array))), name, rule, value)
        return np.broadcast_to(array, (num_clients,))

    deviations = by_client("spread", spread)
    factors = np.ones(num_clients)
    for i in np.flatnonzero(deviations):
        factors[i] = np.exp(deviations[i] * np.random.default_rng([seed, int(i)]).normal())
    seconds = [by_client(*pair) for pair in (("per_step", per_step), ("per_round", per_round))]
    found = Compute(*(factors * each for each in seconds))
    fits = all(bool(np.all(_is_duration(each))) for each in found)
    checks.require(fits, "spread", f"leave all seconds below {LONGEST:g}", spread)
    return found


@checked
def round_times(
    latencies: Latencies,
    compute: Compute,
    *,
    num_steps: np.typing.ArrayLike = 0,
    server_seconds: NonNegative = 0.0,
    deadline: Positive | None = None,
    keep: Count | None = None,
    active: np.typing.ArrayLike | None = None,
    key: PRNGKey | None = None,
    round_index: Index = 0,
) -> RoundTimes:
    """Computes the times of a round with a server.

    Args:
      latencies: of messages.
      compute: seconds of computation.
      num_steps: local steps of each client, a number or `[num_clients]`.
      server_seconds: seconds that the server takes to make the new model, at least 0.
      deadline: when the server stops waiting, in seconds from the start of the round, above 0; None
        if it waits for all active clients.
      keep: how many updates the server waits for, at least 1; None for all.
      active: which clients take part, `[num_clients]`, bool; None for all.
      key: the root key of a run whose jitter is drawn; None for no jitter.
      round_index: the round of that run, from 0.

    Returns:
      The times.

    Raises:
      ValueError: if the arguments are not of the same clients, no client is active, or a number is
        out of its range.

    Source: arriveₖ = Lₖ + compₖ + Lₖ, server = max arriveₖ + server seconds, receiveₖ = server +
    Lₖ, as in Mugunthan and others 2020 (PrivacyFL), with latencies of either direction.
    """
    rule = "have a server; the times of rounds without one are serverless_times"
    checks.require(latencies.server is not None, "latencies", rule, None)
    is_active = _active(latencies, compute, active, least=1)
    steps = _of_clients("num_steps", num_steps, len(is_active))
    legs = Legs(latencies.down, latencies.up, latencies.down)
    everyone = np.arange(len(is_active))
    if key is not None:
        drawn = drawn_legs(latencies, everyone, round_index, key)
        legs = Legs(*(np.asarray(x, np.float64) for x in drawn))
    seconds = compute.seconds(steps)
    plan = schedule(np, everyone, legs, seconds, is_active, is_active, deadline, keep)
    server = float(plan.closes + server_seconds)
    times = plan.arrive, server + legs.back, legs.down, legs.down + seconds
    arrive, receive, begin, send = (np.where(is_active, x, np.nan) for x in times)
    return RoundTimes(arrive, plan.is_late, server, receive, begin, send, float(plan.closes))


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

    Source: receiveₖ = max over j ≠ k of (compⱼ + Lⱼₖ), Mugunthan and others 2020 (PrivacyFL).
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
    latencies: Latencies, compute: Compute, *, active: np.typing.ArrayLike | None = None
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


class Schedule(NamedTuple):
    """Arrivals `[clients]`, those that are late, and when the server stops waiting."""

    arrive: Any
    is_late: Any
    closes: Any


def schedule(
    xp: Any,
    clients: Any,
    legs: Legs,
    seconds: Any,
    is_asked: Any,
    has_joined: Any,
    deadline: Any,
    keep: int | None = None,
) -> Schedule:
    """Finds arrivals, late clients, and when a server stops waiting for `keep` or a deadline."""
    arrive = legs.down + seconds + legs.up
    is_late, is_waiting = xp.zeros_like(has_joined), False
    if deadline is not None:
        is_late = has_joined & (arrive > deadline)
        is_waiting = xp.any(is_late | (is_asked & ~has_joined))
    if keep is not None:
        order = xp.lexsort((clients, xp.where(has_joined & ~is_late, arrive, xp.inf)))
        is_first = xp.argsort(order) < keep
        is_full = xp.sum(has_joined & ~is_late) >= keep
        is_late, is_waiting = has_joined & (is_late | ~is_first), is_waiting & ~is_full
    last = xp.max(xp.where(has_joined & ~is_late, arrive, 0.0), initial=0.0)
    return Schedule(
        arrive, is_late, last if deadline is None else xp.where(is_waiting, deadline, last)
    )


def drawn_legs(latencies: Latencies, ids: Any, round_index: Any, key: PRNGKey) -> Legs:
    """Draws the seconds of a round's messages, `[clients]`, by client and round."""
    extra: Any = [jnp.zeros((3, 1))] * len(latencies.path)
    if np.any(latencies.jitter):
        folded = [ids]
        if latencies.edges is not None:
            # One message between the servers serves all clients of an edge.
            folded.append(jnp.asarray(latencies.edges)[ids].astype(jnp.uint32) + _EDGES)
        extra = [_extra(key, round_index, each) for each in folded]
    totals = [jnp.zeros(len(ids)) for _ in Legs._fields]
    for (near, far), more in zip(latencies.path, extra, strict=True):
        for k, (start, end) in enumerate(((near, far), (far, near), (near, far))):
            least, mean = (
                jnp.asarray(np.broadcast_to(t[start, end], len(latencies.clients)), jnp.float32)[
                    ids
                ]
                for t in (latencies.minimum, latencies.jitter)
            )
            totals[k] = totals[k] + least + mean * more[k]
    return Legs(*totals)


def heard(
    latencies: Latencies, ids: Any, ready: Any, has_joined: Any, round_index: Any, key: PRNGKey
) -> Any:
    """Finds when each client has the messages of all others that are there, `[clients]`."""
    here = jnp.asarray(latencies.clients)[ids]
    least, mean = (jnp.asarray(t, jnp.float32) for t in (latencies.minimum, latencies.jitter))

    def one(receiver: Any) -> Any:
        place, index = receiver
        seconds = ready + least[here, place]
        if np.any(latencies.jitter):
            # By pair, so that no message has the jitter of another.
            fold_in = partial(fold, key, Purpose.CLOCK, round_index)
            draw = jax.vmap(lambda i: jax.random.exponential(fold_in(i, JITTER, index)))
            seconds = seconds + mean[here, place] * draw(ids)
        return jnp.max(jnp.where(has_joined & (ids != index), seconds, 0.0), initial=0.0)

    return jax.lax.map(one, (here, ids))


def _extra(key: PRNGKey, round_index: Any, folded: Any) -> jax.Array:
    """Draws exponential times of mean 1, `[3, clients]`."""

    def one(i: Any) -> jax.Array:
        return jax.random.exponential(fold(key, Purpose.CLOCK, round_index, i, JITTER), (3,))

    return jax.vmap(one)(jnp.asarray(folded)).T


def _is_duration(seconds: np.ndarray) -> np.ndarray:
    return (seconds >= 0) & (seconds < LONGEST)


def _of_clients(name: str, value: Any, num_clients: int) -> np.ndarray:
    """Reads a number of at least 0, or one for each client."""
    array = np.asarray(value, np.float64)
    checks.one_for_each(name, array, num_clients)
    checks.non_negative(name, array)
    return array


def require_times_of(num_clients: int, latencies: Latencies, compute: Compute) -> None:
    """Requires the times of all clients of a federation."""
    for name, times in (("latencies", latencies.clients), ("compute", compute.per_step)):
        rule = f"be of the {num_clients} clients of the federation"
        checks.require(len(times) == num_clients, name, rule, len(times))


def _active(latencies: Latencies, compute: Compute, active: Any, least: int) -> np.ndarray:
    """Reads which clients are active, `[num_clients]`."""
    num_clients = len(latencies.clients)
    rule = f"be of the {num_clients} clients of latencies"
    checks.require(len(compute.per_step) == num_clients, "compute", rule, len(compute.per_step))
    is_active = np.ones(num_clients, bool) if active is None else np.asarray(active)
    rule = f"be True or False for each of the {num_clients} clients"
    fits = is_active.shape == (num_clients,) and is_active.dtype == bool
    checks.require(fits, "active", rule, active)
    rule = "include a client" if least == 1 else f"include {least} clients or more"
    checks.require(bool(is_active.sum() >= least), "active", rule, active)
    return is_active
