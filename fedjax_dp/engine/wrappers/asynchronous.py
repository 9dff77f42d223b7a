"""Asynchronous rounds: clients work on models of different age, the server on a buffer of them."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from chex import PRNGKey
from dp_accounting import GaussianDpEvent, LaplaceDpEvent

from fedjax_dp.algorithms.base import Averaged, FederatedAlgorithm, FinishForAll, one_stage
from fedjax_dp.core import checks, sums, trees
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.core.keys import Purpose, fold
from fedjax_dp.core.made import changed
from fedjax_dp.core.ranges import Count, Index, NonNegative
from fedjax_dp.core.trees import PyTree
from fedjax_dp.data import participants
from fedjax_dp.data.sampling import Draw, Sampler, fixed_size
from fedjax_dp.engine.federation import Federation
from fedjax_dp.engine.federation import federation as bind
from fedjax_dp.engine.layout import Layout
from fedjax_dp.engine.record import Fate
from fedjax_dp.engine.round import run_round
from fedjax_dp.engine.wrappers.latencies import LONGEST, Compute, Latencies, require_times_of
from fedjax_dp.engine.wrapping import ASYNCHRONOUS
from fedjax_dp.privacy.claims import ClientClaim
from fedjax_dp.server.base import Summed

# What the key of participation is folded with for jitter: no round has this index.
_JITTER = 2**31 - 1


class InFlight(NamedTuple):
    """The clients at work before a round, and those whose updates make the round.

    Entries of clients are `[num_clients]`, times in seconds since the server had the round's model.
    """

    round: jax.Array  # The round, int32; -1 before the first.
    model: jax.Array  # The round whose model each client works on, or worked on last, int32.
    start: jax.Array  # When each client was sent it, float32.
    arrival: jax.Array  # When its update arrives, float32; infinite for idle clients.
    turn: jax.Array  # The number of clients that were sent a model before it, int32.
    last: jax.Array  # The last round that an update of the client arrived for, int32.
    times: jax.Array  # The updates of each client that have arrived, int32.
    place: jax.Array  # Of its update among those of this round, int32; `num_clients` for none.
    num_started: jax.Array  # The number of clients that were ever sent a model, int32.
    seconds: jax.Array  # How long the round takes, float32.

    @property
    def is_busy(self) -> jax.Array:
        """The clients at work, `[num_clients]`, bool."""
        return jnp.isfinite(self.arrival)

    @property
    def staleness(self) -> jax.Array:
        """The rounds since the model of each client's update, `[num_clients]`, int32."""
        return self.round - self.model

    def started(self, is_chosen: jax.Array, now: Any, turn: Any, seconds: jax.Array) -> "InFlight":
        """Sends the model of the round to some clients, `[num_clients]`, bool."""

        def chosen(new: Any, old: jax.Array) -> jax.Array:
            return jnp.where(is_chosen, new, old)

        return self._replace(
            model=chosen(self.round, self.model),
            start=chosen(now, self.start),
            arrival=chosen(now + seconds, self.arrival),
            turn=chosen(self.num_started + turn, self.turn),
            num_started=self.num_started + jnp.sum(is_chosen, dtype=jnp.int32),
        )


class Arrivals(NamedTuple):
    """The rules by which clients start and updates arrive; all randomness follows the key."""

    first: Sampler  # Draws the clients of a round that are chosen first, as many as make a round.
    seconds: np.ndarray  # Of a client's round without jitter, `[num_clients]`, float64.
    latencies: Latencies  # For the jitter of its two messages.
    server_seconds: float  # Seconds that the server takes to make a new model.
    buffer_size: int  # The updates that make a round.
    concurrency: int  # The clients at work at any time.
    max_staleness: int  # The largest staleness of an update that counts.
    separation: int  # The fewest rounds from one update of a client to its next.
    max_participations: int | None  # The most updates of a client; None without a limit.

    @property
    def num_clients(self) -> int:
        """The population."""
        return len(self.seconds)

    def sampler(self) -> Sampler:
        """Makes the sampler whose state is what is in flight; it draws the clients that arrive."""
        return changed(
            fixed_size(),
            name="asynchronous",
            init=self.none,
            draw=self.draw,
            capacity=lambda limit, batch_size: min(limit, batch_size + self.concurrency),
            analysis=lambda base, size, batch_size: base,
            charges_all=False,
            separation=lambda size, batch_size: self.separation,
            min_drawn=lambda size, batch_size: 0,
            law=None,
        )

    def none(self, limit: int) -> InFlight:
        """Returns the state before the first round: no client is at work."""
        rule = f"be the {self.num_clients} clients whose times are known"
        checks.require(limit == self.num_clients, "num_clients", rule, limit)

        def full(value: Any, dtype: Any = jnp.int32) -> jax.Array:
            return jnp.full(self.num_clients, value, dtype)

        idle, zero = full(jnp.inf, jnp.float32), full(0)
        return InFlight(
            round=jnp.int32(-1),
            model=zero,
            start=full(0, jnp.float32),
            arrival=idle,
            turn=zero,
            last=full(-self.separation),
            times=zero,
            place=full(self.num_clients),
            num_started=jnp.int32(0),
            seconds=jnp.float32(0),
        )

    def draw(self, state, key, step, size, batch_size, limit, capacity, any_of=None):
        """Draws the clients of a round, in the order of their updates, as `Sampler.draw` does."""
        state = jax.lax.fori_loop(
            state.round + 1,
            jnp.asarray(step, jnp.int32) + 1,
            lambda r, s: self.after(s, key),
            state,
        )
        indices = jnp.argsort(state.place)[:capacity].astype(jnp.int32)
        return state, Draw(indices, state.place[indices] < self.num_clients, jnp.int32(0))

    def after(self, state: InFlight, key: PRNGKey) -> InFlight:
        """Simulates the arrivals of the next round; `key` is that of participation."""
        state = state._replace(
            round=state.round + 1,
            arrival=state.arrival - state.seconds,
            place=jnp.full_like(state.place, self.num_clients),
        )
        n, order = self.num_clients, self.order(key, state.round)
        seconds = self.durations(key, state.round)
        # Idle places are filled by the first eligible clients in the order of this round.
        is_free = self.is_eligible(state)[order]
        turn = jnp.cumsum(is_free) - 1
        num_idle = self.concurrency - jnp.sum(state.is_busy)
        turn, is_chosen = (
            jnp.zeros(n, x.dtype).at[order].set(x) for x in (turn, is_free & (turn < num_idle))
        )
        state = state.started(is_chosen, jnp.float32(0), turn, seconds)
        rank = jnp.zeros(n, jnp.int32).at[order].set(jnp.arange(n, dtype=jnp.int32))

        def continues(carry):
            state, count, _, _ = carry
            return (count < self.buffer_size) & jnp.any(state.is_busy)

        def one(carry):
            state, count, place, _ = carry
            is_first = state.arrival == jnp.min(state.arrival)
            client = jnp.argmin(jnp.where(is_first, state.turn, jnp.iinfo(jnp.int32).max))
            # While the server makes a model, updates wait for it.
            now = jnp.maximum(state.arrival[client], 0.0)
            count += (state.staleness[client] <= self.max_staleness).astype(jnp.int32)
            state = state._replace(
                arrival=state.arrival.at[client].set(jnp.inf),
                last=state.last.at[client].set(state.round),
                times=state.times.at[client].add(1),
                place=state.place.at[client].set(place),
            )
            is_free = self.is_eligible(state)
            following = jnp.argmin(jnp.where(is_free, rank, n))
            is_chosen = is_free & (jnp.arange(n) == following)
            return state.started(is_chosen, now, 0, seconds), count, place + 1, now

        start = state, jnp.int32(0), jnp.int32(0), jnp.float32(0)
        state, _, _, end = jax.lax.while_loop(continues, one, start)
        # Who would start in the moment in which the round ends is sent the next model instead.
        is_sent = (state.model < state.round) | (state.start < end)
        return state._replace(
            arrival=jnp.where(is_sent, state.arrival, jnp.inf),
            seconds=end + jnp.float32(self.server_seconds),
        )

    def order(self, key: PRNGKey, round_index: jax.Array) -> jax.Array:
        """Draws the order in which clients are chosen in a round: its cohort first, then all."""
        n, size, every = self.num_clients, self.buffer_size, fixed_size()
        others = every.draw(every.init(n), key, round_index, n, n, n, n)[1].indices
        cohort = self.first.draw(self.first.init(n), key, round_index, n, size, n, size)[1]
        places = jnp.zeros(n, jnp.int32).at[others].set(jnp.arange(size, n + size, dtype=jnp.int32))
        target = jnp.where(cohort.is_real, cohort.indices, n)
        return jnp.argsort(places.at[target].set(jnp.arange(size, dtype=jnp.int32), mode="drop"))

    def is_eligible(self, state: InFlight) -> jax.Array:
        """Finds the clients that may start to work on the model of the round, bool."""
        is_eligible = ~state.is_busy & (state.last + self.separation <= state.round)
        if self.max_participations is not None:
            is_eligible &= state.times < self.max_participations
        return is_eligible

    def durations(self, key: PRNGKey, round_index: jax.Array) -> jax.Array:
        """Computes the seconds of the clients that start in a round, `[num_clients]`."""
        seconds = jnp.asarray(self.seconds, jnp.float32)
        here, server, jitter = self.latencies.clients, self.latencies.server, self.latencies.jitter
        if not np.any(jitter):
            return seconds
        keys = jax.vmap(lambda i: fold(key, _JITTER, round_index, i))(jnp.arange(len(seconds)))
        down, up = jax.vmap(lambda k: jax.random.exponential(k, (2,)))(keys).T
        extra = (jnp.asarray(x, jnp.float32) for x in (jitter[server, here], jitter[here, server]))
        return seconds + sum(mean * drawn for mean, drawn in zip(extra, (down, up), strict=True))


# `(staleness) -> weight` in [0, 1], or a for (1 + staleness)^-a.
Discount = NonNegative | Callable[[int], float]

SAMPLERS = ("fixed_size", "full_participation", "min_separated")


class Asynchrony(NamedTuple):
    """The wrapper's state: clients at work, the last states of the server, and the seconds."""

    in_flight: InFlight  # The clients at work, and those whose updates make the next round.
    servers: PyTree  # At the start of the last rounds, `[max_staleness + 1, ...]`.
    seconds: sums.Sum  # The sum of the seconds of all rounds.


@checked
def asynchronous(
    federation: Federation,
    *,
    latencies: Latencies,
    compute: Compute,
    server_seconds: NonNegative,
    concurrency: Count,
    max_staleness: Index,
    discount: Discount = 0.5,
    max_participations: Count | None = None,
    num_rounds: Count | None = None,
    start_seconds: NonNegative = 0.0,
) -> Federation:
    """Makes the rounds of a federation asynchronous, as FedBuff does, on a simulated clock.

    `concurrency` clients work at any time, each on the model that the server had when it started. A
    round ends when as many updates have arrived as the federation's cohort has clients, the buffer
    size K: then the server takes its step. In place of a client that has finished, another one
    starts at once, chosen at random among those that are not at work; one that finishes with the
    round, or while the server makes the new model, is replaced when that model is there. Times
    depend on places, devices, local steps and random draws by client and round, never on what
    clients compute, so neither layout nor a resumed run changes who arrives when.

    If all clients take equally long, and K = `concurrency`, rounds equal those of the federation.

    Guarantee: of clients, that of the aggregator, without amplification: each update that arrives
    costs its client one release, as the ledger charges. `discount` multiplies a clipped update by
    at most 1, and the divisor is public, so that the sensitivity is that of the aggregator. A
    client takes part in at most `max_participations` rounds, at least as many rounds apart as the
    participation of the federation separates them, which correlated noise needs. Who takes part
    follows from public sizes and the clock, and is not secret. Of records, that of the federation:
    a record pays for the rounds in which an update of its client arrived.

    Args:
      federation: the federation to make asynchronous, as `federation` returned it; other wrappers
        are applied afterwards. Its cohort size is the buffer size; its participation is full, of
        fixed size, or min-separated.
      latencies: of messages between clients and server.
      compute: seconds of clients' computation.
      server_seconds: seconds that the server takes to make a new model, at least 0; it sends none
        meanwhile.
      concurrency: clients at work at any time, at least K; fewer where no more are eligible.
      max_staleness: the largest staleness of an update that counts, at least 0: rounds between the
        model that a client started from and the one that its update is applied to. The update of an
        older model is dropped, and the client has the fate `LATE`. So many server states and one
        more are held.
      discount: a, at least 0, for a weight of (1 + staleness)^-a of each update, or a function
        `(staleness) -> weight` in [0, 1]. Weights multiply updates and are in no divisor; under
        privacy of clients, noise must be Gaussian or Laplace for them, and they multiply clipped
        updates.
      max_participations: the most updates of one client in a run, at least 1; None without a limit.
        Once no client is left, rounds are empty.
      num_rounds: rounds of the run if known, so that too few participations are refused.
      start_seconds: simulated seconds before the first round, at least 0.

    Returns:
      The federation; a round's cohort are the clients whose updates arrived. Its info of the server
      gains `round_seconds`, `simulated_seconds`, `staleness_mean` and `staleness_max` of the
      updates that count, `num_too_stale`, those dropped, and `num_in_flight`, clients at work when
      the round has ended. An aggregator's own counts, such as `num_clipped`, are weighted. Numbers
      of steps other than those at the start are refused, since times depend on them; where they are
      traced, as in a `vmap` of rounds, no client is drawn, and seconds are NaN.

    Raises:
      ValueError: for a number out of its range, a population that is too small, or a federation
        whose guarantee or method does not hold in such rounds, with the reason.

    Source: Nguyen and others 2022, algorithm 1.
    """
    ASYNCHRONOUS.require_around(federation.wrappers)
    bound, population = federation, federation.population
    num_clients = population.num_clients
    require_times_of(num_clients, latencies, compute)
    rule = "be of a server, and without edge servers, which add updates up on their way"
    is_flat = bound.has_server and latencies.server is not None and latencies.edges is None
    checks.require(is_flat, "latencies", rule, "others")
    for name, seconds in (("server_seconds", server_seconds), ("start_seconds", start_seconds)):
        checks.require(seconds < LONGEST, name, f"be below {LONGEST:g}", seconds)
    check_sampler(bound.cohorts.name)
    _check_algorithm(bound)
    states = bound.algorithm.client_state
    is_average = states is not None and isinstance(states.iterate, Averaged)
    rule = (
        f"be 0 for {bound.algorithm.name}, which averages whole models: changes of older models, "
        "added to a newer one, make no average, and may grow from round to round"
    )
    checks.require(max_staleness == 0 or not is_average, "max_staleness", rule, max_staleness)
    participation = bound.cohorts.participation
    buffer_size, separation = int(participation.cohort_size), participation.separation
    rule = f"be at least {buffer_size}, the cohort size of the federation, which is the buffer size"
    checks.require(concurrency >= buffer_size, "concurrency", rule, concurrency)
    most = num_clients - (separation - 1) * buffer_size
    rule = f"be at most {most}, the clients that are always free to start"
    checks.require(concurrency <= most, "concurrency", rule, concurrency)
    if num_rounds is not None and max_participations is not None:
        least = -(-num_rounds * buffer_size // num_clients)
        rule = f"be at least {least}: {num_rounds} rounds of {buffer_size} updates are needed"
        checks.require(max_participations >= least, "max_participations", rule, max_participations)
    weights = _weights(discount, max_staleness)
    if np.any(weights != 1):
        _check_weighted(bound)
    steps = np.asarray(_num_steps(bound, bound.hyper))
    arrivals = Arrivals(
        bound.cohorts.sampling.sampler,
        latencies.down + compute.seconds(steps) + latencies.up,
        latencies,
        server_seconds,
        buffer_size,
        concurrency,
        max_staleness,
        separation,
        max_participations,
    )
    joined = participants.participation(arrivals.sampler(), num_clients, buffer_size)
    # All that can be claimed without amplification is checked again.
    bound = bind(bound.algorithm, population, joined)
    buffered = _Buffered(bound, arrivals, weights, start_seconds, steps)

    def check(hyper: Any) -> None:
        rule = "give each client as many local steps as at the start, since times depend on them"
        with jax.ensure_compile_time_eval():
            now = _num_steps(bound, hyper)
        is_traced = checks.is_traced(now)
        checks.require(not is_traced, "hyper.local", rule, "traced numbers that set steps")
        checks.require(np.array_equal(now, steps), "hyper.local", rule, now)

    return bound.wrapped(
        ASYNCHRONOUS,
        init=buffered.init,
        cohorts=dataclasses.replace(
            bound.cohorts.with_fates(buffered.fates, reads_state=True),
            start=lambda state: state.outer[-1].in_flight,
            keeps=(lambda hyper, round_index, clients: buffered.is_timed(hyper),),
        ),
        step=buffered.step,
        check=check,
    )


class _Buffered(NamedTuple):
    """The wrapper's functions; `weights` by staleness, `[max_staleness + 1]`, `steps` by client."""

    federation: Federation
    arrivals: Arrivals
    weights: np.ndarray
    start_seconds: float
    steps: np.ndarray

    def is_timed(self, hyper: Any) -> jax.Array:
        """Whether clients take the steps that their times are of; a sweep may trace other ones."""
        return jnp.all(_num_steps(self.federation, hyper) == self.steps)

    def init(self, key: Any, layout: Layout = Layout()) -> Any:
        """Makes the first state, with the clients of the first round."""
        state = self.federation.init(key, layout)
        servers = jax.tree.map(
            lambda x: jnp.broadcast_to(x, (len(self.weights), *x.shape)), state.server
        )
        first = self.arrivals.after(
            self.arrivals.none(self.arrivals.num_clients), fold(key, Purpose.PARTICIPATION)
        )
        seconds = sums.Sum(jnp.float32(self.start_seconds), jnp.float32(0))
        return state._replace(outer=(Asynchrony(first, servers, seconds),))

    def fates(self, state, hyper, cohort):
        """Updates that are too old are late."""
        staleness = state.outer[-1].in_flight.staleness[cohort.ids]
        return jnp.where(staleness >= len(self.weights), Fate.LATE, cohort.fate)

    def step(self, state, hyper, examples, cohort, key, layout=Layout()):
        """Runs the round of the updates that have arrived, and simulates who arrives next."""
        (own,) = state.outer
        place = state.round % len(self.weights)
        servers = jax.tree.map(lambda a, x: a.at[place].set(x), own.servers, state.server)
        algorithm = self.algorithm_of(own.in_flight, servers)
        examples = jax.tree.map(jnp.asarray, examples)
        after, record, info = run_round(
            algorithm, layout, state._replace(outer=()), hyper, examples, cohort, key
        )
        following = self.arrivals.after(own.in_flight, fold(key, Purpose.PARTICIPATION))
        round_seconds = jnp.where(self.is_timed(hyper), own.in_flight.seconds, jnp.nan)
        seconds = sums.add(own.seconds, round_seconds)
        counts = cohort.fate == Fate.CONTRIBUTED
        staleness = jnp.where(counts, own.in_flight.staleness[cohort.ids], 0)
        metrics = {
            **info.server,
            "round_seconds": round_seconds,
            "simulated_seconds": sums.value(seconds),
            "staleness_mean": jnp.sum(staleness) / jnp.maximum(jnp.sum(counts), 1),
            "staleness_max": jnp.max(staleness),
            "num_too_stale": jnp.sum(cohort.fate == Fate.LATE),
            "num_in_flight": jnp.sum(own.in_flight.is_busy),
        }
        after = after._replace(outer=(Asynchrony(following, servers, seconds),))
        return after, record, info._replace(server=metrics)

    def algorithm_of(self, in_flight: InFlight, servers: PyTree) -> FederatedAlgorithm:
        """Declares the algorithm with each client's own model, and its weight, in one round."""
        algorithm, size = self.federation.algorithm, len(self.weights)

        def broadcast(server, client):
            model = in_flight.model[client.index]
            return algorithm.broadcast(
                trees.take(servers, model % size), client.replace(round=model)
            )

        algorithm_of_round = algorithm._replace(broadcast=broadcast)
        if np.all(self.weights == 1):
            return algorithm_of_round
        mean = algorithm.aggregator
        is_bounded = isinstance(mean.claim, ClientClaim)

        def contribute(state, numbers, update, sender):
            staleness = jnp.minimum(in_flight.staleness[sender.index], size - 1)
            weight = jnp.asarray(self.weights)[staleness]
            if is_bounded:
                # After the clip, so that it is the contribution that shrinks.
                return trees.scale(mean.contribute(state, numbers, update, sender), weight)
            return mean.contribute(state, numbers, trees.scale(update, weight), sender)

        return algorithm_of_round._replace(aggregator=mean._replace(contribute=contribute))


def _weights(discount: Discount, max_staleness: int) -> np.ndarray:
    """Computes the weights by staleness, `[max_staleness + 1]`, float32."""
    by_staleness = []
    for staleness in range(max_staleness + 1):
        weight = discount(staleness) if callable(discount) else (1 + staleness) ** -float(discount)
        rule = f"be in [0, 1] for a staleness of {staleness}, so that no update grows"
        checks.numbers("discount", rule, weight)
        is_share = np.shape(weight) == () and 0 <= float(weight) <= 1
        checks.require(is_share, "discount", rule, weight)
        by_staleness.append(weight)
    return np.asarray(by_staleness, np.float32)


def _num_steps(federation: Federation, hyper: Any) -> jax.Array:
    """Computes the local steps of each client, `[num_clients]`."""
    sizes = jnp.asarray(federation.population.sizes)
    local = jax.tree.map(jnp.asarray, hyper.local)
    return federation.algorithm.training.steps_of(jnp.arange(len(sizes)), sizes, local)


def check_sampler(name: str) -> None:
    """Refuses cohorts that claim an amplification by sampling."""
    rule = (
        "be of fixed_size(), full_participation() or min_separated(): times decide whose updates "
        "arrive, so that a cohort is no random sample and nothing is amplified"
    )
    checks.require(name in SAMPLERS, "participation", rule, name)


def check_messages(are_encoded: bool) -> None:
    """Refuses messages that are made for a round."""
    rule = (
        "send plain updates: masks, noise shares and rotations need a round that a client at work "
        "does not know; the nearest valid choice under privacy of clients is gaussian_mean"
    )
    checks.require(not are_encoded, "aggregator", rule, "one that encodes messages")


def _check_algorithm(federation: Federation) -> None:
    """Refuses methods whose rounds cannot be asynchronous."""
    algorithm = federation.algorithm
    name, aggregator, stages = algorithm.name, algorithm.aggregator, algorithm.stages
    rule = "be Summed: a buffer of updates is a sum with weights"
    checks.require(isinstance(aggregator, Summed), "aggregator", rule, type(aggregator).__name__)
    check_messages(aggregator.encode is not None)
    rule = (
        "have no noise in shares of clients, which hide nothing unless all of them are in one sum: "
        "a round here is of the clients that arrive"
    )
    has_shares = federation.claims.min_participants > 0
    checks.require(not has_shares, "federation", rule, name)
    rule = (
        "send clients no state of its own, such as an adaptive clip norm: their updates would be "
        "bounded by that of an older round"
    )
    is_fixed = not jax.tree.leaves(federation.facts.down[1])
    checks.require(is_fixed, "aggregator", rule, "one that does")
    rule = f"have a single stage and no host steps, unlike {name}: clients of several stages mix"
    is_uniform = stages.stage_of is one_stage and not stages.host_steps
    checks.require(is_uniform, "federation", rule, name)
    rule = f"let no client choose a model by its records, as in {name}: no version offers the same"
    checks.require(stages.choice is None, "federation", rule, name)
    states = algorithm.client_state
    rule = f"leave the states of absent clients as they are, unlike {name}: some are at work"
    is_left = states is None or not isinstance(states.finish, FinishForAll)
    checks.require(is_left, "federation", rule, name)


def _check_weighted(federation: Federation) -> None:
    """Refuses weights where a part of an update is no change of the model that was sent."""
    name, facts = federation.algorithm.name, federation.facts
    claim = federation.algorithm.aggregator.claim
    if claim is not None:
        noise: Any = claim
        if isinstance(claim, ClientClaim):
            noise = claim.event(federation.hyper.aggregator)
        rule = (
            "be 0 unless noise is Gaussian or Laplace: a part of a clipped update is not on the "
            "lattice of other noise, and unclaimed noise bounds nothing"
        )
        is_continuous = isinstance(noise, GaussianDpEvent | LaplaceDpEvent)
        checks.require(is_continuous, "discount", rule, f"other weights for {noise}")
    rule = (
        f"be 0 for {name}: its clients' states or messages hold more than a change of the model "
        "that they are sent, which a smaller weight would not match"
    )
    shapes = [jax.tree.map(lambda s: s.shape, part) for part in (facts.update, facts.down[0])]
    fits = federation.algorithm.client_state is None and shapes[0] == shapes[1]
    checks.require(fits, "discount", rule, "other weights")
