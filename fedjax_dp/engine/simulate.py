"""Compiles a declared algorithm on a population into rounds that run."""

from collections.abc import Callable, Hashable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from chex import PRNGKey
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from fedjax_dp.algorithms.base import FederatedAlgorithm, HostStep
from fedjax_dp.clients.base import ClientData, LocalConfig
from fedjax_dp.core import checks
from fedjax_dp.core.keys import Purpose, fold
from fedjax_dp.data.federated import FederatedData
from fedjax_dp.data.participants import Participation
from fedjax_dp.engine import tuning
from fedjax_dp.engine.cohort import ClientTable, Cohort, HostCohorts, draw_cohort
from fedjax_dp.engine.execution import ExecutionConfig
from fedjax_dp.engine.reads import run_client
from fedjax_dp.engine.round import AXIS, RoundShape, SimulationState, run_round
from fedjax_dp.engine.tuning import Trial
from fedjax_dp.models.cost import Cost, cost_of

RunFn = Callable[..., tuple[SimulationState, dict[str, np.ndarray]]]


class Simulation(NamedTuple):
    """A compiled simulation.

    Attributes:
      init: `(key) -> SimulationState` before the first round.
      run: `(state, key, num_rounds) -> (state, info)`; runs that many rounds and donates `state`,
        which must not be used again. Every entry of `info` is a host array `[num_rounds, ...]`.
        The key is the root of cohorts, batches and noise, the same in every call; whoever has it
        can take the noise away, see `secret_key`.
      compile: `(state, key) -> state` compiles the round by running none; donates `state` too.
      algorithm: what is run.
      participation: who joins a round.
      sizes: examples of each client, `[num_clients]`.
      shape: the static choices that were made.
      num_traces: `() -> int`, how often the round was traced.
      layouts: the trials that chose the layout, fastest first; empty where it was not tuned.
    """

    init: Callable[[PRNGKey], SimulationState]
    run: RunFn
    compile: Callable[[SimulationState, PRNGKey], SimulationState]
    algorithm: FederatedAlgorithm
    participation: Participation
    sizes: np.ndarray
    shape: RoundShape
    num_traces: Callable[[], int]
    layouts: tuple[Trial, ...] = ()


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
      ValueError: for a population that does not match, numbers out of range, a mechanism behind a
        participation without a valid analysis, an aggregator whose noise would move what training
        leaves alone, or while JAX is set to 64-bit numbers, for which steps and draws would not be
        those that are accounted.
    """
    _require_32_bits()
    execution.validate()
    checks.require(
        participation.num_clients == data.num_clients,
        "participation",
        f"be bound to the {data.num_clients} clients of the data",
        participation.num_clients,
    )
    checks.require(
        0 < data.num_examples < 2**31,
        "data",
        "hold at least one and fewer than 2**31 examples",
        data.num_examples,
    )
    execution = execution.for_cohort(participation.cohort_size)
    algorithm.config.validate(data.num_clients)
    _check_host_steps(algorithm)
    if algorithm.aggregator.is_noised and algorithm.check_noised is not None:
        algorithm.check_noised()
    if algorithm.aggregator.event is not None:
        # Asked for now, so that a combination without an analysis is refused before any work.
        server = jax.eval_shape(algorithm.init, jax.random.key(0))
        participation.event(algorithm.aggregator.event(algorithm.aggregator.init(server)))
        _check_participation(algorithm, participation)
    sizes = data.sizes.astype(np.int32)
    devices = execution.device_list()
    per_device = -(-participation.capacity // len(devices))
    limit = max(1, int(sizes.max()))
    # Slots may be many more than clients that are expected; a chunk is filled by the latter.
    expected = max(1, round(participation.cohort_size / len(devices)))
    chunk = execution.chunk(partial(_cost_of_a_client, algorithm, data, limit), expected)
    layouts: tuple[Trial, ...] = ()
    if execution.clients_per_chunk == "tuned":

        def forced(chunk: int) -> Simulation:
            layout = execution._replace(clients_per_chunk=chunk)
            return simulation(algorithm, data, participation, layout)

        work = _work(algorithm, data, participation, execution)
        layouts = tuning.trials(work, tuning.candidates(chunk, expected), forced)
        chunk = layouts[0].clients_per_chunk
    num_slots = -(-per_device // chunk) * chunk * len(devices)
    mesh = Mesh(np.array(devices), (AXIS,)) if len(devices) > 1 else None
    shape = RoundShape(limit=limit, chunk=chunk, mesh=mesh)
    placement = NamedSharding(mesh, P()) if mesh else devices[0]
    starts = data.offsets[:-1].astype(np.int32)
    table = ClientTable(*jax.device_put((starts, sizes), placement))
    traces = 0

    def init(key: PRNGKey) -> SimulationState:
        build = jax.jit(partial(_initial_state, algorithm, data.num_clients))
        return placed(build(key))

    def placed(state: SimulationState) -> SimulationState:
        """Gives every leaf the type and place that the program was traced for.

        States from a checkpoint hold host arrays, those of a sweep may hold Python numbers; neither
        may cost a second trace.
        """
        typed = jax.tree.map(lambda x: jnp.asarray(x, jnp.result_type(x)), state)
        return jax.device_put(typed, placement)

    def draw(key, round_index, config, table) -> Cohort:
        return draw_cohort(
            algorithm, participation, num_slots, len(devices), table, config, key, round_index
        )

    def rounds(cohort_of, state, key, examples, source, num_rounds, num_infos):
        """Runs a traced number of rounds; their infos fill the first of `num_infos` places."""

        # The inner jit is traced once, for the shapes of the info as for the loop.
        @jax.jit
        def step(state, key, examples, source):
            nonlocal traces
            traces += 1
            cohort = cohort_of(state, key, source)
            return run_round(algorithm, shape, state, examples, cohort, key)

        infos = jax.tree.map(
            lambda s: jnp.zeros((num_infos, *s.shape), s.dtype),
            jax.eval_shape(step, state, key, examples, source)[1],
        )

        def body(i, carry):
            state, infos = carry
            state, info = step(state, key, examples, source)
            return state, jax.tree.map(lambda all_, new: all_.at[i].set(new), infos, info)

        return jax.lax.fori_loop(0, num_rounds, body, (state, infos))

    if execution.is_resident(data):
        examples = jax.device_put({k: np.asarray(v) for k, v in data.examples.items()}, placement)

        @partial(jax.jit, donate_argnums=0)
        def resident_rounds(state, key, examples, table, num_rounds):
            def cohort_of(state, key, table):
                return draw(key, state.round, state.config, table)

            num_infos = execution.rounds_per_call
            return rounds(cohort_of, state, key, examples, table, num_rounds, num_infos)

        def run_blocks(state, key, num_rounds):
            infos = []
            while num_rounds > 0:
                block = min(num_rounds, execution.rounds_per_call)
                state, info = resident_rounds(state, key, examples, table, np.int32(block))
                infos.append((info, block))
                num_rounds -= block
            return state, infos

        def compile_(state, key):
            return resident_rounds(state, key, examples, table, np.int32(0))[0]

    else:
        host = HostCohorts(data, participation, placement)
        drawn = jax.jit(draw)

        @partial(jax.jit, donate_argnums=0)
        def streamed_round(state, key, examples, cohort, num_rounds):
            return rounds(lambda s, k, c: c, state, key, examples, cohort, num_rounds, 1)

        def run_blocks(state, key, num_rounds):
            first, config = int(state.round), jax.tree.map(jnp.copy, state.config)

            def cohort_of(i):
                return jax.device_get(drawn(key, first + i, config, table))

            infos, slab = [], host.gather(cohort_of(0))
            following = cohort_of(min(1, num_rounds - 1))
            for i in range(num_rounds):
                state, info = streamed_round(state, key, *slab, np.int32(1))
                infos.append((info, 1))
                # The call above returns before the round is done. Who comes next is known already,
                # so that the rows are gathered while it computes; the draw after that waits for it.
                if i + 1 < num_rounds:
                    slab = host.gather(following)
                if i + 2 < num_rounds:
                    following = cohort_of(i + 2)
            return state, infos

        def compile_(state, key):
            slab = host.gather(jax.device_get(drawn(key, int(state.round), state.config, table)))
            return streamed_round(state, key, *slab, np.int32(0))[0]

    def run(state, key, num_rounds=1):
        _require_32_bits()
        checks.whole("num_rounds", num_rounds)
        _check_batch_size(algorithm, state.config)
        state, infos = placed(state), []
        for block, steps in rounds_and_host_steps(algorithm, int(state.round), num_rounds):
            state, more = run_blocks(state, key, block)
            infos += [_on_host(info, done) for info, done in more]
            for step in steps:
                state = placed(after_host_step(step, state, key))
        return state, _concatenate(infos)

    return Simulation(
        init=init,
        run=run,
        compile=lambda state, key: compile_(placed(state), key),
        algorithm=algorithm,
        participation=participation,
        sizes=sizes,
        shape=shape,
        num_traces=lambda: traces,
        layouts=layouts,
    )


def _require_32_bits() -> None:
    checks.require(
        jnp.result_type(float) == jnp.float32,
        "jax_enable_x64",
        "be off while a simulation is built and run: rounds are defined in 32-bit numbers",
        True,
    )


def _work(
    algorithm: FederatedAlgorithm,
    data: FederatedData,
    participation: Participation,
    execution: ExecutionConfig,
) -> Hashable:
    """Names what decides over a layout: shapes, numbers of local training, cohort, devices."""
    server = jax.eval_shape(algorithm.init, jax.random.key(0))
    shapes = [(str(x.dtype), x.shape) for x in jax.tree.leaves(server)]
    examples = [(k, str(v.dtype), v.shape[1:]) for k, v in sorted(data.examples.items())]
    numbers = [np.asarray(x).tobytes() for x in jax.tree.leaves(algorithm.config)]
    return (
        algorithm.name,
        str(shapes),
        str(examples),
        tuple(numbers),
        data.sizes.tobytes(),
        participation.sampler.name,
        participation.cohort_size,
        str(execution.device_list()),
    )


def init_key(key: PRNGKey) -> PRNGKey:
    """Gives the key that an algorithm makes its first model from.

    Args:
      key: the root key of the run.

    Returns:
      The key that `FederatedAlgorithm.init` is given.
    """
    return fold(key, Purpose.INIT)


def rounds_and_host_steps(
    algorithm: FederatedAlgorithm, first_round: int, num_rounds: int
) -> list[tuple[int, list[HostStep]]]:
    """Splits rounds where work on the host comes between them.

    Args:
      algorithm: the declaration.
      first_round: rounds done.
      num_rounds: rounds to come, at least 1.

    Returns:
      Numbers of rounds, and what is done on the host after them.
    """
    last = first_round + num_rounds
    ends = {s.after for s in algorithm.host_steps if first_round < s.after <= last} | {last}
    blocks, done = [], first_round
    for end in sorted(ends):
        blocks.append((end - done, [s for s in algorithm.host_steps if s.after == end]))
        done = end
    return blocks


def after_host_step(step: HostStep, state: SimulationState, key: PRNGKey) -> SimulationState:
    """Does work on the host.

    Args:
      step: the work.
      state: the state before it.
      key: the root key of the run.

    Returns:
      The state after it, of the same structure, on the host.

    Raises:
      ValueError: if the step changed structure, shapes or types.
    """
    before = jax.device_get((state.server, state.rows if step.reads_rows else None))
    server, rows = step.step(before[0], before[1], fold(key, Purpose.SERVER, step.after))
    kinds = [
        jax.tree.map(lambda x: (np.shape(x), jnp.result_type(x)), t)
        for t in (before, (server, rows))
    ]
    checks.require(
        kinds[0] == kinds[1],
        f"the host step after round {step.after}",
        f"keep structure, shapes and types {kinds[0]}",
        kinds[1],
    )
    return state._replace(server=server, rows=rows if step.reads_rows else state.rows)


def _check_host_steps(algorithm: FederatedAlgorithm) -> None:
    protects_clients = algorithm.aggregator.event is not None
    for step in algorithm.host_steps:
        checks.whole("host_steps.after", step.after)
        checks.require(
            not (protects_clients and algorithm.init_row is not None and step.reads_rows),
            "host_steps.reads_rows",
            "be false under privacy of clients: what they keep was never noised, and no event "
            "covers who reads it",
            step.reads_rows,
        )


def _check_batch_size(algorithm: FederatedAlgorithm, config: LocalConfig) -> None:
    built, asked = algorithm.config.max_batch_size(), config.max_batch_size()
    checks.require(
        asked <= built, "state.config.batch_size", f"be at most {built}, as it was built", asked
    )


def _check_participation(algorithm: FederatedAlgorithm, participation: Participation) -> None:
    needed, kept = algorithm.aggregator.min_separation, participation.separation
    checks.require(
        kept >= needed,
        "participation",
        f"keep {needed} rounds from one participation of a client to its next, as the aggregator's "
        f"noise needs; the nearest valid choices are cyclic() and min_separated({needed})",
        f"{participation.sampler.name}, which keeps {kept}",
    )
    checks.require(
        participation.min_drawn >= algorithm.aggregator.min_participants,
        "participation",
        f"draw at least {algorithm.aggregator.min_participants} clients in every round, since each "
        "adds its share of the noise; the nearest valid choices are everybody() and fixed_size()",
        f"{participation.sampler.name}, which may draw {participation.min_drawn}",
    )


def _cost_of_a_client(algorithm: FederatedAlgorithm, data: FederatedData, limit: int) -> Cost:
    """Counts what one client computes in a pass through its loop body."""

    def one_client(key, examples, index):
        server = algorithm.init(key)
        row = None if algorithm.init_row is None else algorithm.init_row(server)
        client = ClientData(examples, index, index, index, limit=limit)
        config = algorithm.config.row(index)
        return run_client(algorithm, server, row, client, config, key).update

    examples = {k: jax.ShapeDtypeStruct(v.shape, v.dtype) for k, v in data.examples.items()}
    return cost_of(one_client, jax.random.key(0), examples, jax.ShapeDtypeStruct((), jnp.int32))


def _initial_state(
    algorithm: FederatedAlgorithm, num_clients: int, key: PRNGKey
) -> SimulationState:
    server = algorithm.init(init_key(key))
    rows = None
    if algorithm.init_row is not None:
        rows = jax.tree.map(
            lambda x: jnp.broadcast_to(x, (num_clients, *jnp.shape(x))), algorithm.init_row(server)
        )
    aggregator = algorithm.aggregator.init(server)
    return SimulationState(server, aggregator, rows, algorithm.config, jnp.int32(0))


def _on_host(info: dict[str, jax.Array], num_rounds: int) -> dict[str, np.ndarray]:
    return {name: np.asarray(value)[:num_rounds] for name, value in info.items()}


def _concatenate(infos: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    return {name: np.concatenate([info[name] for info in infos]) for name in infos[0]}
