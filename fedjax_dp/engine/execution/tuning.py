"""Chooses a layout: by estimates of memory and operations, or by trials on the work itself."""

import tempfile
import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from fedjax_dp.core import checks, files, trees
from fedjax_dp.core.checks import COUNT_LIMIT
from fedjax_dp.core.decimals import in_bytes
from fedjax_dp.core.devices import MODEL_AXIS, memory_of_host, memory_per_device
from fedjax_dp.core.trees import PyTree
from fedjax_dp.engine.federation import Federation
from fedjax_dp.engine.layout import (
    AXIS,
    EqualWork,
    ExecutionConfig,
    KeptTrials,
    Layout,
    Trial,
    alone_above,
)
from fedjax_dp.engine.model_axis import ModelAxis
from fedjax_dp.engine.round import ByClient


class Memory(NamedTuple):
    """The least number of bytes that one device holds at the same time, without activations."""

    state: int  # The server's state.
    training: int  # A model for each client of a chunk; 0 where the server has no one model.
    stack: int  # An update for each slot of a cohort, for a stacked aggregator; 0 as above.
    clients: int  # The clients' states.
    examples: int  # The examples, where they are resident.
    wrappers: int = 0  # The states of wrappers.
    frozen: int = 0  # The frozen parameters.

    def __str__(self) -> str:
        """Lists the parts, largest first."""
        names = (
            "the server's state",
            "clients in training",
            "stacked updates",
            "clients' states",
            "examples",
            "states of wrappers",
            "frozen parameters",
        )
        parts = sorted(zip(self, names, strict=True), reverse=True)
        listed = ", ".join(f"{name} {in_bytes(count)}" for count, name in parts if count)
        return f"at least {in_bytes(sum(self))} ({listed})"


def memory_of(
    federation: Federation,
    layout: Layout,
    *,
    outer: PyTree = (),
    clients: int = 0,
    examples: int = 0,
    model_axis: ModelAxis | None = None,
) -> Memory:
    """Estimates a round's memory on one device, where `clients` and `examples` take these bytes."""
    facts, shared = federation.facts, federation.algorithm.views.shared
    server = facts.server
    model = 0 if shared is None else trees.num_bytes(jax.eval_shape(shared.read, server))
    slots = layout.slots_per_device(federation.cohorts.participation) if facts.is_stacked else 0
    at_once = min(layout.chunk, federation.cohorts.participation.capacity)
    training, stack = model * at_once, model * slots
    wrappers = sum(
        trees.num_bytes(part) // (layout.num_devices if isinstance(part, ByClient) else 1)
        for part in jax.tree.leaves(outer, is_leaf=lambda x: isinstance(x, ByClient))
    )
    if model_axis is None:
        frozen = trees.num_bytes([part.constants for part in facts.frozen])
    else:
        frozen = model_axis.bytes_per_device(facts.frozen)
    return Memory(trees.num_bytes(server), training, stack, clients, examples, wrappers, frozen)


def require_memory(memory: Memory, num_devices: int = 1) -> None:
    """Refuses an estimate for one device that it cannot hold, before anything is allocated."""
    room = memory_per_device(num_devices)
    if sum(memory) > room:
        raise MemoryError(
            f"a round must fit in the {in_bytes(room)} of a device, but takes {memory}"
        )


def require_host_memory(num_clients: int, num_bytes: int) -> None:
    """Refuses clients' states, of `num_bytes` each, that host memory cannot hold."""
    room, needed = memory_of_host(), num_clients * num_bytes
    if needed > room:
        raise MemoryError(
            f"the states of {num_clients:,} clients, {in_bytes(num_bytes)} each and "
            f"{in_bytes(needed)} in all, must fit the {in_bytes(room)} of this machine; "
            "placement='disk' stores them in a file, which holds those of participants alone"
        )


@contextmanager
def explained(memory: Memory) -> Iterator[None]:
    """Adds the estimate to an error of the device or the system about memory."""
    try:
        yield
    except MemoryError as error:
        raise MemoryError(_message(error, memory)) from error
    except RuntimeError as error:
        # JAX has no type of its own for it.
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise MemoryError(_message(error, memory)) from error


def _message(error: Exception, memory: Memory) -> str:
    words = str(error).splitlines()[0] if str(error) else "the system has no more memory"
    return f"{words}; a round takes {memory}, and the model's activations"


# By work and candidates.
_CHOSEN: dict[Hashable, tuple[Trial, ...]] = {}


def layout_of(
    federation: Federation, execution: ExecutionConfig, build: Callable[[ExecutionConfig], Any]
) -> tuple[Layout, tuple[Trial, ...]]:
    """Chooses chunk and mesh; also returns the trials that chose them, fastest first, if any."""
    # Neighbours on the mesh where they are devices of one process.
    devices = sorted(execution.device_list(), key=lambda device: device.process_index)
    cohorts = federation.cohorts
    mesh = Mesh(np.array(devices), (AXIS,)) if len(devices) > 1 else None
    if execution.model_axis is not None:
        groups = np.array(devices).reshape(-1, execution.model_axis.size)
        mesh = Mesh(groups, (AXIS, MODEL_AXIS))
    # There may be many more slots than expected clients, which fill a chunk.
    count = 1 if mesh is None else mesh.shape[AXIS]
    expected = execution.clients_of_device(cohorts.participation.cohort_size, count)

    facts, steps = federation.facts, local_steps(federation)
    chunk, tried = (
        execution.chunk(lambda: facts.cost_by(execution.arithmetic()), expected, facts.own_bytes),
        tuple[Trial, ...](),
    )
    if execution.tuned is not None:
        with tempfile.TemporaryDirectory() as folder:

            def forced(chunk: int) -> Any:
                # Client states of trials go to a folder of their own, which is removed.
                return build(execution._replace(clients_per_chunk=chunk, folder=folder))

            work, kept = _work(federation, execution, steps), execution.tuned.kept
            tried = trials(work, candidates(chunk, expected), forced, kept)
        chunk = tried[0].clients_per_chunk
    share = cohorts.participation.cohort_size / federation.population.num_clients
    splits = execution.split_clients
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
        equal_work=EqualWork.of(federation.population.sizes, federation.hyper)
        if execution.choices().has_known_lengths
        else None,
        fewest_clients=cohorts.participation.min_drawn,
    )
    return layout, tried


def candidates(guess: int, widest: int) -> list[int]:
    """Lists the chunks to try: the guess, an eighth and eight times of it, up to `widest`."""
    return sorted({min(max(chunk, 1), widest) for chunk in (guess // 8, guess, guess * 8)})


def trials(
    work: Mapping[str, str],
    chunks: list[int],
    build: Callable[[int], Any],
    kept: KeptTrials | None = None,
    clock: Callable[[], float] | None = None,
) -> tuple[Trial, ...]:
    """Times two rounds of each chunk, unless trials of this work were kept; fastest first."""
    checks.require(len(chunks) > 0, "chunks", "not be empty", chunks)
    key = (*sorted(work.items()), *chunks)
    if key not in _CHOSEN:
        timed = None if kept is None else kept.read(work, chunks)
        if timed is None:
            tick = clock or time.perf_counter
            done = [_try(build(chunk), chunk, tick) for chunk in chunks]
            timed = tuple(sorted(done, key=lambda trial: trial.seconds))
            if kept is not None:
                kept.write(work, timed)
        _CHOSEN[key] = timed
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
    steps_of = federation.algorithm.training.steps_of
    steps = np.asarray(jax.jit(lambda ids: steps_of(ids, sizes, local))(jnp.arange(len(sizes))))
    # An int32 saturates.
    rule = "give each client fewer than 2^31 - 1 local steps a round"
    checks.require(
        int(steps.max()) < COUNT_LIMIT - 1, "num_epochs or num_steps", rule, int(steps.max())
    )
    return steps


def _work(federation: Federation, execution: ExecutionConfig, steps: np.ndarray) -> dict[str, str]:
    """Describes all that speed depends on besides the machine: shapes, numbers, cohort, devices."""
    algorithm, cohorts = federation.algorithm, federation.cohorts
    population, model_axis = federation.population, execution.model_axis
    numbers = [np.asarray(x).tobytes() for x in jax.tree.leaves(federation.hyper)]
    return {
        "algorithm": algorithm.name,
        "server": _shapes(federation.facts.server),
        "client state": _shapes(federation.facts.own),
        "examples": _shapes(population.structure),
        "validation": _shapes(population.validation and population.validation.structure),
        "cost of a client": str(tuple(federation.facts.cost)),
        "numbers": files.digest_of(numbers).hex(),
        "sizes": files.digest_of([population.sizes.tobytes()]).hex(),
        "steps": files.digest_of([steps.tobytes()]).hex(),
        "sampler": cohorts.name,
        "cohort": str(cohorts.participation.cohort_size),
        "devices": str(execution.device_list()),
        "placement": execution.placement,
        "model axis": str(model_axis),
        "split clients": str(execution.split_clients),
        "arithmetic": str(execution.arithmetic()),
    }


def _shapes(tree: Any) -> str:
    """Lists the shapes of arrays by path."""
    named = zip(trees.paths(tree), jax.tree.leaves(tree), strict=True)
    return ", ".join(f"{path} {x.dtype}{list(x.shape)}" for path, x in named)
