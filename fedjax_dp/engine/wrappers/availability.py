"""Availability: which clients can be reached at a round and a simulated time."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing

from fedjax_dp.core import checks
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.core.keys import fold
from fedjax_dp.core.ranges import Count, Positive, ProperFraction
from fedjax_dp.core.trees import PyTree

_HOUR, _HOURS = 3600.0, 24.0
# Clients that never return do so in a round that no run has.
_NEVER = np.int32(checks.COUNT_LIMIT - 1)
# What a client's key of the clock is folded with, beside those of the clock itself.
_LEAVES = 3
# Added to the place of a part of `all_of`, whose key is then none of a client's.
_PARTS = np.uint32(2**31)


class Moment(NamedTuple):
    """The start of a round.

    Attributes:
      round: rounds done, int32.
      seconds: simulated seconds so far, float32; 0 is midnight.
    """

    round: jax.Array
    seconds: jax.Array


class Availability(NamedTuple):
    """Which clients can be reached; a client that cannot be is not notified if it is drawn.

    Attributes:
      init: `(num_clients) -> memory` before the first round: arrays, or an empty tuple.
      reaches: `(memory, clients, moment) -> is_reachable`, `[slots]`, bool.
      after: `(memory, moment, key) -> memory` at the end of a round: the start of the next one, and
        the root of the clock's random draws in the round, which is folded with a client before use.
      num_clients: the clients that it is made for; None for any number.
      reads_times: whether it depends on simulated seconds, and thus on who was drawn before.
    """

    init: Callable[[int], PyTree]
    reaches: Callable[[PyTree, jax.Array, Moment], jax.Array]
    after: Callable[[PyTree, Moment, Any], PyTree] = lambda memory, moment, key: memory
    num_clients: int | None = None
    reads_times: bool = False


@checked
def in_rounds(
    first: np.typing.ArrayLike = 0, end: np.typing.ArrayLike | None = None
) -> Availability:
    """Builds the availability of clients that join or leave a run at given rounds.

    Args:
      first: the first round of each client, from 0: a whole number, or `[num_clients]`.
      end: the first round without it, above `first`, in the same forms; None for no end.

    Returns:
      The availability.

    Raises:
      ValueError: for a number out of its range, different numbers of clients, or if no client is
        there in round 0.
    """
    begin = _rounds("first", first)
    stop = np.int64(_NEVER) if end is None else _rounds("end", end)
    shapes = {x.shape for x in (begin, stop) if x.ndim}
    checks.require(len(shapes) <= 1, "end", f"be of the {begin.shape[:1]} clients of first", end)
    checks.require(bool(np.all(stop > begin)), "end", "be above first for every client", end)
    checks.require(bool(np.any(begin == 0)), "first", "be 0 for one client or more", first)
    count = shapes.pop()[0] if shapes else None

    def reaches(memory, clients, moment):
        del memory
        low, high = (jnp.asarray(x, jnp.int32) for x in (begin, stop))
        low, high = (x[clients] if x.ndim else x for x in (low, high))
        return jnp.broadcast_to((low <= moment.round) & (moment.round < high), clients.shape)

    return Availability(_nothing, reaches, num_clients=count)


@checked
def daily(
    hours: np.typing.ArrayLike | Mapping[str, Any], classes: Sequence[str] | None = None
) -> Availability:
    """Builds the availability of clients by the time of day.

    Args:
      hours: when clients can be reached, from and to, in hours of simulated time since midnight,
        in [0, 24]; past midnight if the end is before the start. One window `[2]` or several
        `[windows, 2]` for all clients, or by class of client.
      classes: the class of each client, `[num_clients]`; needed for hours by class.

    Returns:
      The availability.

    Raises:
      ValueError: for an unknown class, or windows that are empty or out of their range.
    """
    if isinstance(hours, Mapping):
        rule = "name the class of each client where hours are by class"
        checks.require(classes is not None and len(classes) > 0, "classes", rule, classes)
        assert classes is not None
        for one in dict.fromkeys(classes):
            checks.one_of("classes", one, hours)
        names = list(hours)
        tables = [_windows(f"hours.{name}", hours[name]) for name in names]
        kinds = np.array([names.index(one) for one in classes])
    else:
        checks.require(classes is None, "classes", "be left out unless hours are by class", classes)
        tables, kinds = [_windows("hours", hours)], np.zeros(1, int)
    # An empty window is added where a class has fewer.
    widest = max(map(len, tables))
    table = np.stack([np.pad(t, ((0, widest - len(t)), (0, 0))) for t in tables])
    by_client = _HOUR * table[kinds]

    def reaches(memory, clients, moment):
        del memory
        opens, closes = jnp.moveaxis(jnp.asarray(by_client, jnp.float32), -1, 0)
        if classes is not None:
            opens, closes = opens[clients], closes[clients]
        now = jnp.mod(moment.seconds, _HOUR * _HOURS)
        is_after, is_before = now >= opens, now < closes
        is_open = jnp.where(opens <= closes, is_after & is_before, is_after | is_before)
        return jnp.broadcast_to(jnp.any(is_open, axis=-1), clients.shape)

    count = None if classes is None else len(classes)
    return Availability(_nothing, reaches, num_clients=count, reads_times=True)


@checked
def absences(
    chance: ProperFraction, *, rounds: Count | None = None, seconds: Positive | None = None
) -> Availability:
    """Builds the availability of clients that leave by chance at the end of a round and may return.

    Each client leaves by a draw of its own, whether it was in the round or not. One that returns
    has its state of before. Clients that leave because they have converged are those of `leaving`.

    Args:
      chance: the probability that a client leaves at the end of a round, in (0, 1).
      rounds: how many rounds it is absent, at least 1.
      seconds: simulated seconds that it is absent, above 0, from the start of the next round, which
        it misses. It does not return if neither is given.

    Returns:
      The availability.

    Raises:
      ValueError: for a number out of its range, or both rounds and seconds.
    """
    checks.require(rounds is None or seconds is None, "seconds", "be left out with rounds", seconds)
    in_seconds = seconds is not None

    def init(num_clients):
        return jnp.zeros(num_clients, jnp.float32 if in_seconds else jnp.int32)

    def reaches(memory, clients, moment):
        return (moment.seconds if in_seconds else moment.round) >= memory[clients]

    def after(memory, moment, key):
        everyone = jnp.arange(len(memory))
        draws = jax.vmap(lambda i: jax.random.uniform(fold(key, i, _LEAVES)))(everyone)
        if in_seconds:
            # Shorter absences than float32 tells apart at that time: the next round is missed.
            later = jnp.nextafter(moment.seconds, jnp.float32(jnp.inf))
            back = jnp.maximum(moment.seconds + jnp.float32(seconds), later)
        else:
            # A longer absence than a run would overflow.
            left = _NEVER - moment.round
            back = moment.round + (left if rounds is None else jnp.minimum(left, rounds))
        leaves = (draws < chance) & reaches(memory, everyone, moment)
        return jnp.where(leaves, back, memory).astype(memory.dtype)

    return Availability(init, reaches, after, reads_times=in_seconds)


@checked
def all_of(parts: Sequence[Availability]) -> Availability:
    """Builds the availability of clients that several rules allow to be reached.

    Args:
      parts: the rules, at least one.

    Returns:
      The availability, by which a client can be reached where it can be by every rule.

    Raises:
      ValueError: without parts, or for parts of different numbers of clients.
    """
    checks.require(len(parts) > 0, "parts", "hold an availability", parts)
    counts = {part.num_clients for part in parts} - {None}
    checks.require(len(counts) <= 1, "parts", "be of the same clients", sorted(map(str, counts)))

    def reaches(memory, clients, moment):
        each = [p.reaches(m, clients, moment) for p, m in zip(parts, memory, strict=True)]
        return jnp.all(jnp.stack(each), axis=0)

    def after(memory, moment, key):
        # Each part draws by itself: with equal draws, clients would leave by all parts at once.
        keys = [fold(key, _PARTS + np.uint32(i)) for i in range(len(parts))]
        each = zip(parts, memory, keys, strict=True)
        return tuple(part.after(own, moment, draws) for part, own, draws in each)

    return Availability(
        lambda num_clients: tuple(part.init(num_clients) for part in parts),
        reaches,
        after,
        counts.pop() if counts else None,
        any(part.reads_times for part in parts),
    )


def _nothing(num_clients: int) -> tuple[()]:
    """Remembers nothing."""
    del num_clients
    return ()


def _rounds(name: str, value: Any) -> np.ndarray:
    """Reads a round, or one for each client."""
    array = np.asarray(value)
    fits = array.ndim < 2 and array.size > 0 and array.dtype.kind in "iu"
    fits = fits and bool(np.all((array >= 0) & (array < checks.COUNT_LIMIT)))
    rule = "be a whole number of at least 0, or one for each client"
    checks.require(fits, name, rule, value)
    return array.astype(np.int64)


def _windows(name: str, value: Any) -> np.ndarray:
    """Reads windows of hours, `[windows, 2]`."""
    checks.numbers(name, "be hours from and to, or several such windows", value)
    array = np.asarray(value, np.float64)
    array = array[None] if array.ndim == 1 else array
    fits = array.ndim == 2 and array.shape[0] > 0 and array.shape[1] == 2
    checks.require(fits, name, "be hours from and to, or several such windows", value)
    is_inside = bool(np.all((array >= 0) & (array <= _HOURS)))
    checks.require(is_inside, name, "be in [0, 24]", value)
    # 24 to 0 is from midnight to the same midnight.
    begin, end = array.T
    differ = bool(np.all((begin != end) & (begin % _HOURS != end)))
    checks.require(differ, name, "end at another hour than they begin", value)
    return array
