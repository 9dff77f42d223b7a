"""Chooses a layout, by a count of operations or by short trials on the work itself."""

import tempfile
import time
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from fedjax_dp.core import checks, trees
from fedjax_dp.core.checks import COUNT_LIMIT
from fedjax_dp.core.devices import MODEL_AXIS
from fedjax_dp.engine.federation import Federation
from fedjax_dp.engine.layout import AXIS, ExecutionConfig, Layout, alone_above


class Trial(NamedTuple):
    """The seconds of a layout: of a round, the better of two, and of its compilation."""

    clients_per_chunk: int
    seconds: float
    compile_seconds: float


_CHOSEN: dict[Hashable, tuple[Trial, ...]] = {}


def layout_of(
    federation: Federation, execution: ExecutionConfig, build: Callable[[ExecutionConfig], Any]
) -> tuple[Layout, tuple[Trial, ...]]:
    """Chooses chunk and mesh; also returns the trials that chose them, fastest first, if any."""
    # Neighbours on the mesh where they are devices of one process.
    devices = sorted(execution.device_list(), key=lambda device: device.process_index)
    participation = federation.participation
    mesh = Mesh(np.array(devices), (AXIS,)) if len(devices) > 1 else None
    if execution.model_axis is not None:
        groups = np.array(devices).reshape(-1, execution.model_axis.size)
        mesh = Mesh(groups, (AXIS, MODEL_AXIS))
    # There may be many more slots than expected clients, which fill a chunk.
    count = 1 if mesh is None else mesh.shape[AXIS]
    expected = max(1, round(participation.cohort_size / count))

    facts = federation.facts
    chunk, tried = (
        execution.chunk(lambda: facts.cost, expected, facts.own_bytes),
        tuple[Trial, ...](),
    )
    if execution.clients_per_chunk == "tuned":
        with tempfile.TemporaryDirectory() as folder:

            def forced(chunk: int) -> Any:
                # Client states of trials go to a folder of their own, which is removed.
                return build(execution._replace(clients_per_chunk=chunk, folder=folder))

            tried = trials(_work(federation, execution), candidates(chunk, expected), forced)
        chunk = tried[0].clients_per_chunk
    share = participation.cohort_size / federation.population.num_clients
    steps, splits = local_steps(federation), execution.split_clients
    if splits and mesh is not None:
        # Those that are split are in no chunk.
        steps = np.where(steps > share * steps.sum() / len(devices), 0, steps)
    above = alone_above(steps, chunk, share)
    has_spare_slots = not facts.is_stacked
    layout = Layout(
        chunk,
        mesh,
        has_spare_slots=has_spare_slots,
        alone_above=above,
        splits_longest=splits,
        arithmetic=execution.arithmetic(),
    )
    return layout, tried


def candidates(guess: int, widest: int) -> list[int]:
    """Lists the chunks to try: the guess, an eighth and eight times of it, up to `widest`."""
    return sorted({min(max(chunk, 1), widest) for chunk in (guess // 8, guess, guess * 8)})


def trials(
    key: Hashable,
    chunks: list[int],
    build: Callable[[int], Any],
    clock: Callable[[], float] | None = None,
) -> tuple[Trial, ...]:
    """Times two rounds of each chunk, once for each `key` in this process; fastest first."""
    checks.require(len(chunks) > 0, "chunks", "not be empty", chunks)
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


def local_steps(federation: Federation) -> np.ndarray:
    """Counts the local steps of every client."""
    sizes, local = jnp.asarray(federation.population.sizes), federation.hyper.local
    one = jax.vmap(lambda i: federation.algorithm.training.num_steps(sizes[i], local.row(i)))
    steps = np.asarray(jax.jit(one)(jnp.arange(len(sizes))))
    # An int32 saturates.
    rule = "give each client fewer than 2^31 - 1 local steps a round"
    checks.require(
        int(steps.max()) < COUNT_LIMIT - 1, "num_epochs or num_steps", rule, int(steps.max())
    )
    return steps


def _work(federation: Federation, execution: ExecutionConfig) -> Hashable:
    """Returns a key of all that speed depends on: shapes, numbers, cohort, devices."""
    algorithm, participation = federation.algorithm, federation.participation
    shapes = [(str(x.dtype), x.shape) for x in jax.tree.leaves(federation.facts.server)]
    structure = federation.population.structure
    leaves = zip(trees.paths(structure), jax.tree.leaves(structure), strict=True)
    examples = [(path, str(x.dtype), x.shape[1:]) for path, x in leaves]
    numbers = [np.asarray(x).tobytes() for x in jax.tree.leaves(federation.hyper)]
    return (
        algorithm.name,
        str(shapes),
        str(examples),
        tuple(numbers),
        federation.population.sizes.tobytes(),
        participation.sampler.name,
        participation.cohort_size,
        str(execution.device_list()),
        str(execution.model_axis),
        execution.split_clients,
        execution.arithmetic(),
    )
