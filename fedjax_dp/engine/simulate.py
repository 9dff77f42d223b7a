"""Compiles a declared algorithm on a population into rounds that run."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from chex import PRNGKey
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from fedjax_dp.algorithms.base import FederatedAlgorithm
from fedjax_dp.core import checks
from fedjax_dp.core.keys import Purpose, fold
from fedjax_dp.data.federated import FederatedData
from fedjax_dp.data.sampling import Participation
from fedjax_dp.engine.execution import ExecutionConfig
from fedjax_dp.engine.round import AXIS, Cohort, RoundShape, SimulationState, run_round

RunFn = Callable[..., tuple[SimulationState, dict[str, np.ndarray]]]


class Simulation(NamedTuple):
    """A compiled simulation.

    Attributes:
      init: `(key) -> SimulationState` before the first round.
      run: `(state, key, num_rounds) -> (state, info)`; runs that many rounds and donates `state`,
        which must not be used again. Every entry of `info` is a host array `[num_rounds, ...]`.
      compile: `(state, key) -> state` compiles the round by running none; donates `state` too.
      algorithm: what is run.
      participation: who joins a round.
      sizes: examples of each client, `[num_clients]`.
      shape: the static choices that were made.
      num_traces: `() -> int`, how often the round was traced.
    """

    init: Callable[[PRNGKey], SimulationState]
    run: RunFn
    compile: Callable[[SimulationState, PRNGKey], SimulationState]
    algorithm: FederatedAlgorithm
    participation: Participation
    sizes: np.ndarray
    shape: RoundShape
    num_traces: Callable[[], int]


def simulation(
    algorithm: FederatedAlgorithm,
    data: FederatedData,
    participation: Participation,
    execution: ExecutionConfig = ExecutionConfig(),
) -> Simulation:
    """Compiles an algorithm on a population.

    One program does a whole round (draw, gather, train, reduce, noise, step, scatter), and many
    rounds run inside one call. The number of rounds of a call is traced, so that any number up to
    `rounds_per_call` runs in the program that is compiled once.

    Args:
      algorithm: the declaration.
      data: the clients' training examples.
      participation: who joins a round; bound to as many clients as `data` has.
      execution: how it is laid out.

    Returns:
      The simulation.

    Raises:
      ValueError: for a population that does not match, numbers out of range, or a mechanism behind
        a participation without a valid analysis.
    """
    execution.validate()
    checks.require(
        participation.num_clients == data.num_clients,
        "participation",
        f"be bound to the {data.num_clients} clients of the data",
        participation.num_clients,
    )
    checks.require(
        data.num_examples < 2**31, "data", "hold fewer than 2**31 examples", data.num_examples
    )
    algorithm.config.validate(data.num_clients)
    sizes = data.sizes.astype(np.int32)
    limit = max(1, int(sizes.max()))
    devices = execution.device_list()
    server_shape = jax.eval_shape(algorithm.init, jax.random.key(0))
    if algorithm.aggregator.event is not None:
        participation.event(algorithm.aggregator.event(algorithm.aggregator.init(server_shape)))

    trained = algorithm.model_of or (lambda server: server)
    per_device = -(-participation.capacity // len(devices))
    chunk = execution.chunk(jax.eval_shape(trained, server_shape), per_device)
    num_slots = -(-per_device // chunk) * chunk * len(devices)
    mesh = Mesh(np.array(devices), (AXIS,)) if len(devices) > 1 else None
    shape = RoundShape(limit, chunk, mesh)
    replicated = NamedSharding(mesh, P()) if mesh else devices[0]
    traces = 0

    def init(key: PRNGKey) -> SimulationState:
        @jax.jit
        def build(key):
            server = algorithm.init(fold(key, Purpose.INIT))
            rows = None
            if algorithm.init_row is not None:
                row = algorithm.init_row(server)
                rows = jax.tree.map(
                    lambda x: jnp.broadcast_to(x, (data.num_clients, *jnp.shape(x))), row
                )
            aggregator = algorithm.aggregator.init(server)
            return SimulationState(server, aggregator, rows, algorithm.config, jnp.int32(0))

        return jax.device_put(build(key), replicated)

    def draw(key, round_index, config, offsets, sizes) -> Cohort:
        """Draws a cohort and orders its slots: the real ones first, like lengths side by side."""
        drawn = participation.draw(fold(key, Purpose.PARTICIPATION), round_index)
        padding = num_slots - participation.capacity
        ids = jnp.pad(drawn.indices, (0, padding))
        is_real = jnp.pad(drawn.is_real, (0, padding))
        work = sizes[ids].astype(jnp.float32)
        if algorithm.num_steps is not None:
            work = jax.vmap(lambda i: algorithm.num_steps(sizes[i], config.row(i)))(ids)
        order = jnp.argsort(jnp.where(is_real, -work.astype(jnp.float32), jnp.inf))
        order = order.reshape(-1, len(devices)).T.reshape(-1)
        ids, is_real = ids[order], is_real[order]
        sizes_of_slots = jnp.where(is_real, sizes[ids], 0)
        return Cohort(ids, offsets[ids], sizes_of_slots, is_real, drawn.overflow)

    def rounds(cohort_of, state, key, examples, arguments, num_rounds, num_slots_of_info):
        """Runs a traced number of rounds; their infos fill the first slots of static arrays."""

        # The inner jit is traced once, for the shapes of the info as for the loop.
        @jax.jit
        def step(state, key, examples, arguments):
            nonlocal traces
            traces += 1
            cohort = cohort_of(state, key, *arguments)
            return run_round(algorithm, shape, state, examples, cohort, key)

        infos = jax.tree.map(
            lambda s: jnp.zeros((num_slots_of_info, *s.shape), s.dtype),
            jax.eval_shape(step, state, key, examples, arguments)[1],
        )

        def body(i, carry):
            state, infos = carry
            state, info = step(state, key, examples, arguments)
            return state, jax.tree.map(lambda all_, new: all_.at[i].set(new), infos, info)

        return jax.lax.fori_loop(0, num_rounds, body, (state, infos))

    @partial(jax.jit, donate_argnums=0)
    def resident_rounds(state, key, examples, offsets, sizes, num_rounds):
        def cohort_of(state, key, offsets, sizes):
            return draw(key, state.round, state.config, offsets, sizes)

        arguments = (offsets, sizes)
        block = execution.rounds_per_call
        return rounds(cohort_of, state, key, examples, arguments, num_rounds, block)

    @partial(jax.jit, donate_argnums=0)
    def streamed_round(state, key, examples, cohort, num_rounds):
        return rounds(lambda state, key, c: c, state, key, examples, (cohort,), num_rounds, 1)

    population = jax.device_put((data.offsets[:-1].astype(np.int32), sizes), replicated)
    if execution.is_resident(data):
        examples = jax.device_put({k: np.asarray(v) for k, v in data.examples.items()}, replicated)

        def run_blocks(state, key, num_rounds):
            infos = []
            while num_rounds > 0:
                block = min(num_rounds, execution.rounds_per_call)
                state, info = resident_rounds(state, key, examples, *population, np.int32(block))
                infos.append((info, block))
                num_rounds -= block
            return state, infos

        def compile_(state, key):
            return resident_rounds(state, key, examples, *population, np.int32(0))[0]

    else:
        stream = _Stream(data, num_slots, participation.capacity, replicated)
        draw_jit = jax.jit(draw)

        def gather(round_index, key, config):
            return stream.gather(draw_jit(key, round_index, config, *population))

        def run_blocks(state, key, num_rounds):
            first, config = int(state.round), jax.tree.map(jnp.copy, state.config)
            ahead, infos = gather(first, key, config), []
            for i in range(num_rounds):
                state, info = streamed_round(state, key, *ahead, np.int32(1))
                # The call above returns before the round is done: the next cohort is gathered
                # from the host while it computes.
                if i + 1 < num_rounds:
                    ahead = gather(first + i + 1, key, config)
                infos.append((info, 1))
            return state, infos

        def compile_(state, key):
            ahead = gather(int(state.round), key, state.config)
            return streamed_round(state, key, *ahead, np.int32(0))[0]

    def run(state, key, num_rounds=1):
        checks.whole("num_rounds", num_rounds)
        state, infos = run_blocks(state, key, num_rounds)
        return state, _concatenate([_on_host(info, done) for info, done in infos])

    return Simulation(
        init=init,
        run=run,
        compile=compile_,
        algorithm=algorithm,
        participation=participation,
        sizes=sizes,
        shape=shape,
        num_traces=lambda: traces,
    )


class _Stream:
    """Gathers cohorts from host memory or disk into slabs of one size."""

    def __init__(self, data: FederatedData, num_slots: int, capacity: int, placement: Any):
        self._data, self._placement = data, placement
        # No cohort can hold more rows than its largest possible members do together.
        largest = np.sort(data.sizes)[::-1][:capacity]
        self._rows = max(1, int(largest.sum()))
        self._num_slots = num_slots

    def gather(self, cohort: Cohort) -> tuple[Any, Cohort]:
        ids, is_real = np.asarray(cohort.ids), np.asarray(cohort.is_real)
        part = self._data.select(ids[is_real])
        starts = np.zeros(self._num_slots, np.int32)
        starts[is_real] = part.offsets[:-1]
        slab = {}
        for name, array in part.examples.items():
            padded = np.zeros((self._rows, *array.shape[1:]), array.dtype)
            padded[: len(array)] = array
            slab[name] = padded
        moved = jax.device_put(slab, self._placement)
        return moved, cohort._replace(starts=jax.device_put(starts, self._placement))


def _on_host(info: dict[str, jax.Array], num_rounds: int) -> dict[str, np.ndarray]:
    return {name: np.asarray(value)[:num_rounds] for name, value in info.items()}


def _concatenate(infos: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    return {name: np.concatenate([info[name] for info in infos]) for name in infos[0]}
