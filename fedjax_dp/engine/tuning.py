"""Layouts by measurement: a short trial of several chunk sizes on the work itself."""

import time
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import jax

from fedjax_dp.core import checks


class Trial(NamedTuple):
    """What one layout took.

    Attributes:
      clients_per_chunk: clients that were computed side by side.
      seconds: of a round, the better of two, after compilation.
      compile_seconds: of its compilation.
    """

    clients_per_chunk: int
    seconds: float
    compile_seconds: float


_CHOSEN: dict[Hashable, tuple[Trial, ...]] = {}


def candidates(guess: int, widest: int) -> list[int]:
    """Lists the chunks that are worth a trial: the guess and its neighbours, eight times apart.

    Args:
      guess: the chunk that the number of operations suggests.
      widest: clients of one device; no chunk is wider.

    Returns:
      Two or three chunks in rising order, one where there is no choice.
    """
    return sorted({min(max(chunk, 1), widest) for chunk in (guess // 8, guess, guess * 8)})


def trials(
    key: Hashable,
    chunks: list[int],
    build: Callable[[int], Any],
    clock: Callable[[], float] | None = None,
) -> tuple[Trial, ...]:
    """Runs two rounds in every layout, once for all simulations of the same work in this process.

    Args:
      key: names the work; the same key is not tried again.
      chunks: the clients per chunk to try.
      build: `(clients_per_chunk) -> Simulation`.
      clock: `() -> seconds`; the process's own where it is None.

    Returns:
      The trials, fastest first.

    Raises:
      ValueError: if there is nothing to try.
    """
    checks.require(len(chunks) > 0, "chunks", "hold a candidate", chunks)
    if key not in _CHOSEN:
        tick = clock or time.perf_counter
        done = [_try(build(chunk), chunk, tick) for chunk in chunks]
        _CHOSEN[key] = tuple(sorted(done, key=lambda trial: trial.seconds))
    return _CHOSEN[key]


def _try(simulation: Any, chunk: int, tick: Callable[[], float]) -> Trial:
    run_key = jax.random.key(0)
    started = tick()
    state = jax.block_until_ready(simulation.compile(simulation.init(run_key), run_key))
    compiled = tick()
    seconds = float("inf")
    for _ in range(2):
        before = tick()
        state, *_ = simulation.run(state, run_key, 1)
        jax.block_until_ready(state)
        seconds = min(seconds, tick() - before)
    return Trial(chunk, seconds, compiled - started)
