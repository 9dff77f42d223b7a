"""A simulated clock of any federation: latencies, stragglers and drop-outs."""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_dp.core import checks, sums
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.core.keys import Purpose, fold
from fedjax_dp.core.ranges import Count, Decay, Index, NonNegative, Positive
from fedjax_dp.core.trees import PyTree
from fedjax_dp.data.participants import Participation
from fedjax_dp.engine.cohort import Cohort
from fedjax_dp.engine.federation import Federation
from fedjax_dp.engine.layout import Layout
from fedjax_dp.engine.record import Fate
from fedjax_dp.engine.wrappers.availability import Availability, Moment, in_rounds
from fedjax_dp.engine.wrappers.latencies import (
    Compute,
    Latencies,
    drawn_legs,
    heard,
    require_times_of,
    schedule,
)
from fedjax_dp.engine.wrapping import CLOCKED
from fedjax_dp.server.secure.aggregator import masks_of

# Numbers of `Hyper.algorithm`, beside those of the algorithm itself.
_RANGES: dict[str, Any] = {"clock_deadline": Positive, "clock_dropout": Decay}
# What a client's key of the clock is folded with.
_DROPOUT = 2


@checked
def clocked(
    federation: Federation,
    *,
    latencies: Latencies,
    compute: Compute,
    server_seconds: NonNegative,
    deadline: Positive | None = None,
    dropout: Decay | None = None,
    keep: Count | None = None,
    availability: Availability | None = None,
    key_seconds: NonNegative = 0.0,
    key_rounds: Sequence[Index] = (0,),
    start_seconds: NonNegative = 0.0,
) -> Federation:
    """Simulates the time of a federation's rounds, late clients, and drop-outs.

    A round starts when the server sends its broadcast, and ends when it has the new model; the next
    broadcast carries that model to the clients. Times depend on places, devices, steps and random
    draws by client and round, so neither layout nor a resumed run changes them. Times of a
    round are float32; their sum is compensated.

    Without `deadline`, `dropout`, `keep` and `availability` a clock changes nothing but the info.
    With `keep` and a cohort of more clients, clients are over-selected: the sum holds the updates
    that arrive first.

    Guarantee: that of the federation, whose claims are unchanged: clients that are late, drop out
    or cannot be reached are charged as all that were drawn. If noise is added by clients in shares,
    a round with fewer messages in time than the claim counts is abandoned: all its clients are
    late, and the sum is empty. Where sampling amplifies privacy of clients, sums and availability
    that depend on who else was drawn are refused, which no analysis covers; so are masked sums with
    a deadline or availability, of which one is lost if few of those that were drawn send. Edge
    servers see sums of their clients: under noise that the server adds they are trusted as it is,
    and noise in shares of clients needs masks with them.

    Args:
      federation: the federation to simulate.
      latencies: of messages between clients and server, or between clients for a federation that
        is `serverless`: a round then ends when each client has the messages of all others.
      compute: seconds of clients' computation.
      server_seconds: seconds that the server, or each client without one, takes to make a new
        model, at least 0.
      deadline: when the server stops waiting, in seconds from the start of a round, above 0; a
        client whose message arrives later is late, and its update does not count. None if the
        server waits for all clients that have not dropped out, whom it is assumed to know.
      dropout: the probability that a drawn client drops out of a round, in [0, 1). With a deadline
        the server waits for it until then.
      keep: K, the number of updates after which the server stops waiting, at least 1; all others
        are late.
      availability: which clients can be reached, such as `daily` or `absences`; a drawn client that
        cannot be is not notified, and the server does not wait for it. None for all clients.
      key_seconds: seconds that an agreement on keys takes, such as `key_exchange_seconds`, at least
        0.
      key_rounds: the rounds, from 0, that begin with an agreement on keys.
      start_seconds: simulated seconds before the first round, at least 0, such as the time of day.

    Returns:
      The federation. Its info of the server gains `round_seconds`; `simulated_seconds`, the sum so
      far; `received_seconds`, when the last client would have the new model, in seconds from the
      start of the round; `num_late`; `num_dropouts`; `num_unreachable`; and `is_abandoned`.
      `deadline` and `dropout`,
      if given, are numbers of `hyper.algorithm`, with `clock_` before their names.

    Raises:
      ValueError: for a number out of its range, other numbers of clients, a deadline that no client
        can meet, availability by the hour without a deadline, asynchronous rounds, or what no claim
        covers.

    Source: Mugunthan and others 2020 (PrivacyFL), times of a round, see `round_times`.
    """
    require_times_of(federation.population.num_clients, latencies, compute)
    _check_server(federation, latencies)
    check_rules(latencies, deadline, keep, availability)
    check_deadline(latencies, compute, deadline)
    _check_keep(federation, keep)
    _check_lost(federation, {"deadline": deadline, "availability": availability})
    if availability is not None:
        _check_availability(federation, availability)
    numbers = {"clock_deadline": deadline, "clock_dropout": dropout}
    given = {name: number for name, number in numbers.items() if number is not None}
    clock = _Clock(
        federation=federation,
        latencies=latencies,
        compute=compute,
        server_seconds=server_seconds,
        start_seconds=start_seconds,
        numbers=tuple(given),
        keep=keep,
        availability=in_rounds() if availability is None else availability,
        key_seconds=key_seconds,
        key_rounds=tuple(key_rounds),
    )
    wrapped = federation.wrapped(CLOCKED, init=clock.init, step=clock.step)
    if not given:
        return wrapped
    return wrapped.with_numbers(given, {name: _RANGES[name] for name in given})


def check_rules(
    latencies: Latencies,
    deadline: float | None,
    keep: int | None,
    availability: Availability | None,
) -> None:
    """Refuses rules of a clock that do not go together, whatever its federation."""
    has_server = latencies.server is not None
    for name, value in (("deadline", deadline), ("keep", keep)):
        rule = "be left out without a server: each client waits for all others"
        checks.require(has_server or value is None, name, rule, value)
    rule = "be left out with edge servers, which send one sum each"
    checks.require(keep is None or latencies.edges is None, "keep", rule, keep)
    if availability is not None and availability.reads_times:
        rule = "depend on rounds alone without a server"
        checks.require(has_server, "availability", rule, "times")
        rule = "be given for availability by simulated time: it ends rounds that reach no client"
        checks.require(deadline is not None, "deadline", rule, deadline)


def check_deadline(latencies: Latencies, compute: Compute, deadline: float | None) -> None:
    """Refuses a deadline that no client can meet."""
    if deadline is not None:
        shortest = float(np.min(latencies.down + compute.per_round + latencies.up))
        rule = f"be at least {shortest:g}, the shortest time of any client without its steps"
        checks.require(deadline >= shortest, "deadline", rule, deadline)


def check_keep(participation: Participation, keep: int | None) -> None:
    """Refuses more updates than a round may have clients."""
    if keep is not None:
        most = participation.capacity
        rule = f"be at most the {most} clients that a round may draw"
        checks.require(keep <= most, "keep", rule, keep)


def _check_server(federation: Federation, latencies: Latencies) -> None:
    """Refuses a server on one side alone, and edge servers that would need each update."""
    has_server = latencies.server is not None
    rule = "name the place of a server" if federation.has_server else "name no server"
    found = "one" if has_server else None
    checks.require(has_server == federation.has_server, "latencies.server", rule, found)
    is_flat = latencies.edges is None or not federation.facts.is_stacked
    rule = f"be left out for {federation.algorithm.name}, whose server reads the update of each"
    name = type(federation.algorithm.aggregator).__name__
    checks.require(is_flat, "edges", rule, name)
    least = federation.claims.min_participants
    is_masked = masks_of(federation.algorithm.aggregator) is not None
    rule = (
        f"be left out without secure.masked(): the claim counts on the noise of {least} clients, "
        "and each edge server would see the sum of fewer"
    )
    fits = latencies.edges is None or least == 0 or is_masked
    checks.require(fits, "edges", rule, "edge servers")


def _check_keep(federation: Federation, keep: int | None) -> None:
    """Refuses numbers of updates that no round has, or that no claim covers."""
    check_keep(federation.cohorts.participation, keep)
    if keep is None:
        return
    least = federation.claims.min_participants
    rule = f"be at least {least}, the clients whose noise the claim counts"
    checks.require(keep >= least, "keep", rule, keep)
    masks = masks_of(federation.algorithm.aggregator)
    if masks is not None:
        graph = masks.graph
        least = max(federation.cohorts.participation.min_drawn, graph.num_clients) - graph.dropouts
        rule = f"be at least {least}, with fewer of whose messages a round is lost"
        checks.require(keep >= least, "keep", rule, keep)
    # Of cohorts of fixed size, two that differ in one client keep updates that differ in one.
    is_covered = not (federation.cohorts.participation.sampler.varies and federation.amplifies)
    rule = (
        "be left out where Poisson cohorts amplify privacy of clients: a drawn client replaces "
        "another in the sum, and the event counts its own update alone; the nearest valid cohorts "
        "are of fixed_size()"
    )
    checks.require(is_covered, "keep", rule, keep)


def _check_lost(federation: Federation, who: dict[str, Any]) -> None:
    """Refuses rounds that few messages lose, where who sends them has to be secret."""
    is_masked = masks_of(federation.algorithm.aggregator) is not None
    can_be_lost = is_masked and federation.amplifies
    rule = (
        "be left out for masked sums where secret cohorts amplify privacy of clients: whether a "
        "round is lost would depend on who was drawn; the nearest valid cohorts are of "
        "full_participation() and cyclic()"
    )
    for name, value in who.items():
        checks.require(value is None or not can_be_lost, name, rule, "one")


def _check_availability(federation: Federation, availability: Availability) -> None:
    """Refuses what does not fit the clients, or depends on what no claim covers."""
    num_clients, name = federation.population.num_clients, "availability"
    fits = availability.num_clients in (None, num_clients)
    rule = f"be of the {num_clients} clients of the federation"
    checks.require(fits, name, rule, availability.num_clients)
    rule = (
        f"be left out for {federation.algorithm.name}, whose rounds end with a message to all "
        "clients, which those that cannot be reached would miss"
    )
    checks.require(not federation.facts.is_finished_for_all, name, rule, "one")
    rule = (
        "depend on rounds alone where secret cohorts amplify privacy of clients: simulated "
        "times depend on who was drawn before"
    )
    fits = not (availability.reads_times and federation.amplifies)
    checks.require(fits, name, rule, "one that depends on times")


class _State(NamedTuple):
    """The wrapper's state: seconds of all rounds so far, and what the availability remembers."""

    seconds: sums.Sum
    memory: PyTree


class _Clock(NamedTuple):
    """The wrapper's functions."""

    federation: Federation
    latencies: Latencies
    compute: Compute
    server_seconds: float
    start_seconds: float
    numbers: tuple[str, ...]
    keep: int | None
    availability: Availability
    key_seconds: float
    key_rounds: tuple[int, ...]

    def init(self, key: Any, layout: Layout = Layout()) -> Any:
        """Makes the first state."""
        state = self.federation.init(key, layout)
        start = sums.Sum(jnp.float32(self.start_seconds), jnp.float32(0))
        memory = self.availability.init(self.federation.population.num_clients)
        return state._replace(outer=(_State(start, memory), *state.outer))

    def step(self, state, hyper, examples, cohort, key, layout=Layout()):
        """Finds who is late, runs the round with the others, and adds its seconds."""
        own, *others = state.outer
        before = state._replace(outer=tuple(others))
        fate, metrics = self.simulated(own, before, hyper, cohort, key)
        cohort = cohort._replace(fate=fate)
        after, record, info = self.federation.step(before, hyper, examples, cohort, key, layout)
        total = sums.add(own.seconds, metrics["round_seconds"])
        metrics = {**info.server, **metrics, "simulated_seconds": sums.value(total)}
        next_start = Moment(after.round, sums.value(total))
        chance = fold(key, Purpose.CLOCK, state.round)
        own = _State(total, self.availability.after(own.memory, next_start, chance))
        after = after._replace(outer=(own, *after.outer))
        return after, record, info._replace(server=metrics)

    def simulated(
        self, own: _State, state: Any, hyper: Any, cohort: Cohort, key: Any
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Simulates the times of a round; returns the fates and metrics by name."""
        ids, fate = cohort.ids, cohort.fate
        now = Moment(state.round, sums.value(own.seconds))
        is_away = (fate != Fate.EMPTY) & ~self.availability.reaches(own.memory, ids, now)
        fate = jnp.where(is_away, Fate.UNANNOUNCED, fate)
        if "clock_dropout" in self.numbers:
            fold_in = partial(fold, key, Purpose.CLOCK, state.round)
            drawn = jax.vmap(lambda i: jax.random.uniform(fold_in(i, _DROPOUT)))(ids)
            drops = (fate == Fate.CONTRIBUTED) & (drawn < hyper.algorithm["clock_dropout"])
            fate = jnp.where(drops, Fate.DROPPED, fate)
        has_joined = (fate == Fate.CONTRIBUTED) | (fate == Fate.LATE)
        # A round in which no client can be reached takes until the deadline.
        is_asked = has_joined | (fate == Fate.DROPPED) | (is_away & ~jnp.any(has_joined))
        deadline = None
        if "clock_deadline" in self.numbers:
            deadline = hyper.algorithm["clock_deadline"]
        work = self.work(ids, hyper)
        if self.latencies.server is None:
            arrive = heard(self.latencies, ids, work, has_joined, state.round, key)
            closes = jnp.max(jnp.where(has_joined, jnp.maximum(work, arrive), 0.0), initial=0.0)
            received = jnp.float32(0)
        else:
            legs = drawn_legs(self.latencies, ids, state.round, key)
            times = schedule(jnp, ids, legs, work, is_asked, has_joined, deadline, self.keep)
            fate, closes = jnp.where(times.is_late, Fate.LATE, fate), times.closes
            received = jnp.max(jnp.where(has_joined, legs.back, 0.0), initial=0.0)
        is_abandoned = jnp.bool_(False)
        least = self.federation.claims.min_participants
        if least > 0:
            is_abandoned = jnp.sum(fate == Fate.CONTRIBUTED) < least
            is_too_few = is_abandoned & (fate == Fate.CONTRIBUTED)
            fate = jnp.where(is_too_few, Fate.LATE, fate)
        has_keys = jnp.isin(state.round, jnp.array(self.key_rounds, jnp.int32))
        seconds = closes + jnp.float32(self.server_seconds)
        seconds += jnp.where(has_keys, jnp.float32(self.key_seconds), 0.0)
        metrics = {
            "round_seconds": seconds,
            "received_seconds": seconds + received,
            "num_late": jnp.sum(fate == Fate.LATE),
            "num_dropouts": jnp.sum(fate == Fate.DROPPED),
            "num_unreachable": jnp.sum(is_away),
            "is_abandoned": is_abandoned.astype(jnp.float32),
        }
        return fate.astype(jnp.int8), metrics

    def work(self, ids: jax.Array, hyper: Any) -> jax.Array:
        """Computes the seconds of clients' computation, `[slots]`."""
        sizes = jnp.asarray(self.federation.population.sizes)
        steps = self.federation.algorithm.training.steps_of(ids, sizes, hyper.local)
        per_step, per_round = (jnp.asarray(x, jnp.float32)[ids] for x in self.compute)
        return per_step * steps.astype(jnp.float32) + per_round
