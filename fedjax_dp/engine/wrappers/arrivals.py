"""The order in which updates arrive if clients work at the same time on models of different age."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from chex import PRNGKey

from fedjax_dp.core import checks
from fedjax_dp.core.keys import fold
from fedjax_dp.core.made import changed
from fedjax_dp.data.sampling import Draw, Sampler, fixed_size
from fedjax_dp.engine.wrappers.latencies import Latencies

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
