"""A simulated clock of any federation: latencies, stragglers and drop-outs."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_dp.core import checks, sums
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.core.keys import Purpose, fold
from fedjax_dp.core.ranges import Decay, NonNegative, Positive
from fedjax_dp.engine.cohort import Cohort
from fedjax_dp.engine.federation import Federation
from fedjax_dp.engine.layout import Layout
from fedjax_dp.engine.record import Fate
from fedjax_dp.engine.wrappers.latencies import Compute, Latencies, schedule

# Numbers of `Hyper.algorithm`, beside those of the algorithm itself.
_RANGES: dict[str, Any] = {"clock_deadline": Positive, "clock_dropout": Decay}
# What a client's key of the clock is folded with.
_JITTER, _DROPOUT = 1, 2


@checked
def clocked(
    federation: Federation,
    *,
    latencies: Latencies,
    compute: Compute,
    server_seconds: NonNegative,
    deadline: Positive | None = None,
    dropout: Decay | None = None,
    start_seconds: NonNegative = 0.0,
) -> Federation:
    """Simulates the time of a federation's rounds, late clients, and drop-outs.

    A round starts when the server sends its broadcast, and ends when it has the new model; the next
    broadcast carries that model to the clients. Times depend on places, devices, steps and random
    draws by client and round, so neither layout nor a resumed run changes them. Times of a
    round are float32; their sum is compensated.

    Without `deadline` and `dropout` a clock changes nothing but the info.

    Guarantee: that of the federation, whose claims are unchanged: late clients and those that drop
    out are charged as all that were drawn. If noise is added by clients in shares, a round with
    fewer messages in time than the claim counts is abandoned: all its clients are late, and the sum
    is empty.

    Args:
      federation: what is simulated.
      latencies: of messages between clients and server.
      compute: seconds of clients' computation.
      server_seconds: what the server takes to make a new model, at least 0.
      deadline: when the server stops waiting, in seconds from the start of a round, above 0; a
        client whose message arrives later is late, and its update does not count. None if the
        server waits for all clients that have not dropped out, whom it is assumed to know.
      dropout: the probability that a drawn client drops out of a round, in [0, 1). With a deadline
        the server waits for it until then.
      start_seconds: simulated seconds before the first round, such as `key_exchange_seconds`, at
        least 0.

    Returns:
      The federation. Its info of the server gains `round_seconds`; `simulated_seconds`, the sum so
      far; `received_seconds`, when the last client would have the new model, in seconds from the
      start of the round; `num_late`; `num_dropouts`; and `is_abandoned`. `deadline` and `dropout`,
      if given, are numbers of `hyper.algorithm`, with `clock_` before their names.

    Raises:
      ValueError: for a number out of its range, other numbers of clients, or a deadline that no
        client can meet.

    Source: the times of a round of PrivacyFL (Mugunthan and others 2020), see `round_times`.
    """
    num_clients = federation.population.num_clients
    for name, count in (("latencies", latencies.clients), ("compute", compute.per_step)):
        rule = f"be of the {num_clients} clients of the federation"
        checks.require(len(count) == num_clients, name, rule, len(count))
    if deadline is not None:
        shortest = float(np.min(latencies.down + compute.per_round + latencies.up))
        rule = f"be at least {shortest:g}, the shortest time of any client without its steps"
        checks.require(deadline >= shortest, "deadline", rule, deadline)
    numbers = {"clock_deadline": deadline, "clock_dropout": dropout}
    given = {name: number for name, number in numbers.items() if number is not None}
    clock = _Clock(federation, latencies, compute, server_seconds, start_seconds, tuple(given))
    wrapped = federation._replace(init=clock.init, step=clock.step)
    if not given:
        return wrapped
    return wrapped.with_numbers(given, {name: _RANGES[name] for name in given})


class _Travel(NamedTuple):
    """Seconds of each slot's messages, `[slots]`: broadcast, update, and the next broadcast."""

    down: jax.Array
    up: jax.Array
    back: jax.Array


class _Clock(NamedTuple):
    """The wrapper's functions; its state is the sum of the seconds of all rounds."""

    federation: Federation
    latencies: Latencies
    compute: Compute
    server_seconds: float
    start_seconds: float
    numbers: tuple[str, ...]

    def init(self, key: Any, layout: Layout = Layout()) -> Any:
        """Makes the first state."""
        state = self.federation.init(key, layout)
        start = sums.Sum(jnp.float32(self.start_seconds), jnp.float32(0))
        return state._replace(outer=(start, *state.outer))

    def step(self, state, hyper, examples, cohort, key, layout=Layout()):
        """Finds who is late, runs the round with the others, and adds its seconds."""
        total, *others = state.outer
        before = state._replace(outer=tuple(others))
        fate, metrics = self.simulated(before, hyper, cohort, key)
        cohort = cohort._replace(fate=fate)
        after, record, info = self.federation.step(before, hyper, examples, cohort, key, layout)
        total = sums.add(total, metrics["round_seconds"])
        metrics = {**info.server, **metrics, "simulated_seconds": sums.value(total)}
        after = after._replace(outer=(total, *after.outer))
        return after, record, info._replace(server=metrics)

    def simulated(
        self, state: Any, hyper: Any, cohort: Cohort, key: Any
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Simulates the times of a round; returns the fates and metrics by name."""
        ids, fate = cohort.ids, cohort.fate
        keys = jax.vmap(lambda i: fold(key, Purpose.CLOCK, state.round, i))(ids)
        if "clock_dropout" in self.numbers:
            drawn = jax.vmap(lambda k: jax.random.uniform(fold(k, _DROPOUT)))(keys)
            drops = (fate == Fate.CONTRIBUTED) & (drawn < hyper.algorithm["clock_dropout"])
            fate = jnp.where(drops, Fate.DROPPED, fate)
        is_there = (fate == Fate.CONTRIBUTED) | (fate == Fate.LATE)
        travel = self.travel(ids, keys)
        deadline = None
        if "clock_deadline" in self.numbers:
            deadline = hyper.algorithm["clock_deadline"]
        is_asked = is_there | (fate == Fate.DROPPED)
        _, is_late, closes = schedule(
            jnp, travel.down, self.work(ids, hyper), travel.up, is_asked, is_there, deadline
        )
        fate = jnp.where(is_late, Fate.LATE, fate)
        is_abandoned = jnp.bool_(False)
        claim = self.federation.claims.client
        if self.numbers and claim is not None and claim.min_participants > 0:
            is_abandoned = jnp.sum(fate == Fate.CONTRIBUTED) < claim.min_participants
            is_too_few = is_abandoned & (fate == Fate.CONTRIBUTED)
            fate = jnp.where(is_too_few, Fate.LATE, fate)
        seconds = closes + jnp.float32(self.server_seconds)
        received = jnp.max(jnp.where(is_there, travel.back, 0.0), initial=0.0)
        metrics = {
            "round_seconds": seconds,
            "received_seconds": seconds + received,
            "num_late": jnp.sum(fate == Fate.LATE),
            "num_dropouts": jnp.sum(fate == Fate.DROPPED),
            "is_abandoned": is_abandoned.astype(jnp.float32),
        }
        return fate.astype(jnp.int8), metrics

    def travel(self, ids: jax.Array, keys: Any) -> _Travel:
        """Draws the seconds of messages, `[slots]`."""
        here, server = self.latencies.clients, self.latencies.server
        tables = self.latencies.minimum, self.latencies.jitter
        (down, extra_down), (up, extra_up) = (
            [jnp.asarray(table[legs], jnp.float32)[ids] for table in tables]
            for legs in ((server, here), (here, server))
        )
        if not np.any(self.latencies.jitter):
            return _Travel(down, up, down)
        extra = jax.vmap(lambda k: jax.random.exponential(fold(k, _JITTER), (3,)))(keys)
        return _Travel(
            down + extra_down * extra[:, 0],
            up + extra_up * extra[:, 1],
            down + extra_down * extra[:, 2],
        )

    def work(self, ids: jax.Array, hyper: Any) -> jax.Array:
        """Computes the seconds of clients' computation, `[slots]`."""
        sizes = jnp.asarray(self.federation.population.sizes)
        num_steps = self.federation.algorithm.training.num_steps
        steps = jax.vmap(lambda i: num_steps(sizes[i], hyper.local.row(i)))(ids)
        per_step, per_round = (jnp.asarray(x, jnp.float32)[ids] for x in self.compute)
        return per_step * steps + per_round
