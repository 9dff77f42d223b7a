"""Blocks of rounds, on resident examples or streamed cohorts, and the work on the host between."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from chex import PRNGKey

from fedjax_dp.algorithms.base import HostStep, Hyper
from fedjax_dp.core import checks
from fedjax_dp.core.devices import of_first_process
from fedjax_dp.core.inspection import Watch, watched
from fedjax_dp.core.keys import Purpose, fold
from fedjax_dp.core.trees import PyTree
from fedjax_dp.data.federated import FederatedData
from fedjax_dp.engine.client_store import ClientStore
from fedjax_dp.engine.cohort import Cohort, Examples
from fedjax_dp.engine.execution.placement import Placement, Slabs, narrowed, own_part, stream_of
from fedjax_dp.engine.facts import examples_of
from fedjax_dp.engine.federation import Federation
from fedjax_dp.engine.layout import Layout
from fedjax_dp.engine.record import RoundInfo, RoundRecord
from fedjax_dp.engine.round import SimulationState
from fedjax_dp.models import kinds


def rounds_and_host_steps(
    host_steps: Sequence[HostStep], first_round: int, num_rounds: int
) -> list[tuple[int, list[HostStep]]]:
    """Splits `num_rounds` rounds after `first_round` into blocks, each with the steps after it."""
    last = first_round + num_rounds
    ends = {s.after for s in host_steps if first_round < s.after <= last} | {last}
    blocks, done = [], first_round
    for end in sorted(ends):
        blocks.append((end - done, [s for s in host_steps if s.after == end]))
        done = end
    return blocks


class Table:
    """The states of all clients in memory, `[num_clients, ...]` and padding for devices."""

    def __init__(self, table: PyTree, num_clients: int | None = None):
        """Wraps a table; without `num_clients` each entry is a client."""
        self._table, self._num_clients = table, num_clients

    def of_all(self, select: Callable[[PyTree], PyTree]) -> PyTree:
        """Reads a part of every client's state."""
        return jax.tree.map(lambda x: np.asarray(x)[: self._num_clients], select(self._table))

    def of(self, client: int) -> PyTree:
        """Reads the state of one client."""
        return jax.tree.map(lambda x: np.asarray(x[client]), self._table)


class Scored:
    """The `ClientStates` of a host step: states, and their scores on validation data."""

    def __init__(self, states: Table | ClientStore, step: HostStep, validation: Examples | None):
        """Joins the states with the step's score and the second split of all clients."""
        self.of_all, self.of = states.of_all, states.of
        self._score, self._validation = step.score, validation
        self._is_placed = False

        def by_all(own: PyTree, validation: Examples) -> jax.Array:
            assert step.score is not None
            score, clients = step.score, jnp.arange(len(validation.sizes))
            return jax.lax.map(lambda i: score(own, validation.client(i)), clients)

        self._by_all = jax.jit(by_all)

    def scores(self, client: int) -> np.ndarray:
        """Scores one client's state at every client, `[num_clients]`."""
        rule = "be declared by the host step that reads scores"
        checks.require(self._score is not None, "score", rule, None)
        rule = "be given for a host step that scores clients' states"
        checks.require(self._validation is not None, "validation", rule, None)
        if not self._is_placed:
            self._validation, self._is_placed = jax.device_put(self._validation), True
        assert self._validation is not None
        return np.asarray(self._by_all(self.of(client), self._validation))


def after_host_step(
    step: HostStep,
    state: Any,
    hyper: Hyper,
    key: PRNGKey,
    num_clients: int | None = None,
    validation: Examples | None = None,
) -> Any:
    """Runs a host step, on the first process for all; `validation` is for scores."""
    before = jax.device_get(state.server)
    states = None
    if step.reads_clients and state.clients is not None:
        stored = state.clients
        table = stored if isinstance(stored, ClientStore) else Table(stored, num_clients)
        states = Scored(table, step, validation)
    # Those of the round that it follows.
    numbers = jax.tree.map(np.asarray, hyper).at(step.after - 1)
    server = before
    if jax.process_index() == 0:
        server = step.step(before, states, numbers, fold(key, Purpose.SERVER, step.after))
    kinds = [jax.tree.map(lambda x: (np.shape(x), jnp.result_type(x)), t) for t in (before, server)]
    checks.require(
        kinds[0] == kinds[1],
        f"the host step after round {step.after}",
        f"keep structure, shapes and types {kinds[0]}",
        kinds[1],
    )
    return state._replace(server=of_first_process(server))


class Block(NamedTuple):
    """Rounds that ran in one call."""

    left: tuple[RoundRecord, RoundInfo]  # Of the rounds, `[capacity, ...]`, on the device.
    num_rounds: int  # The number of entries that are filled.

    def on_host(self) -> tuple[RoundRecord, RoundInfo]:
        """Waits for the rounds; returns the entries that are filled."""
        record, info = jax.tree.map(lambda x: np.asarray(x)[: self.num_rounds], self.left)
        return record, info


# `(state, hyper, key, num_rounds) -> (state, blocks)`: rounds without work on the host between
# them; with `num_rounds=0` the program is compiled and runs no round.
Rounds = Callable[[SimulationState, Hyper, PRNGKey, int], tuple[SimulationState, list[Block]]]


class OneRound(NamedTuple):
    """A compiled round, and the frozen parameters that it is called with."""

    # `(state, hyper, examples, cohort, key, frozen) -> (state, record, info)`; the cohort is drawn
    # where it is None.
    step: Callable[..., tuple[SimulationState, RoundRecord, RoundInfo]]
    frozen: Sequence[Sequence[jax.Array]]  # The values of `FederationFacts.frozen`, on the device.
    check: Callable[[jax.stages.Compiled], None] | None = None  # Refuses it before it runs.


class Count:
    """The number of times that the round was traced."""

    traces = 0


def resident_examples(
    federation: Federation,
    layout: Layout,
    data: FederatedData,
    validation: FederatedData | None,
    rounds_per_call: int,
) -> Examples:
    """Returns all examples, on the host, as calls of `rounds_per_call` rounds read them."""
    clients = federation.cohorts.participation.cohort_size / layout.num_devices
    reads = rounds_per_call * clients / data.num_clients
    return examples_of(data, validation).stored(reads)


def resident_rounds(
    one_round: OneRound, examples_of: Callable[[], Examples], rounds_per_call: int
) -> Rounds:
    """Runs blocks of up to `rounds_per_call` rounds on examples that are on the device."""
    block_of = _blocks_of(one_round, rounds_per_call)

    def run(state, hyper, key, num_rounds):
        examples = examples_of()
        if num_rounds == 0:
            return block_of(state, hyper, examples, None, key, np.int32(0))[0], []
        blocks: list[Block] = []
        while num_rounds > 0:
            block = min(num_rounds, rounds_per_call)
            state, left = block_of(state, hyper, examples, None, key, np.int32(block))
            blocks.append(Block(left, block))
            num_rounds -= block
        return state, blocks

    return run


def streamed_rounds(
    one_round: OneRound, federation: Federation, layout: Layout, slabs: Slabs, place: Placement
) -> Rounds:
    """Runs rounds for which each process brings what the slots of its own devices need."""
    block_of = _blocks_of(one_round, 1)

    @jax.jit
    def draw_ahead(round_index, hyper, key):
        state = SimulationState((), (), None, round_index)
        return layout.on_all_devices(federation.cohorts.draw(state, hyper, key, layout))

    @jax.jit
    def draw(state, hyper, key):
        return layout.on_all_devices(federation.cohorts.draw(state, hyper, key, layout))

    def run(state, hyper, key, num_rounds):
        with stream_of(state.clients, place.own_rows.start) as kept:
            kept.require_space(federation.cohorts.participation, num_rounds)
            state, blocks = rounds(state, kept, hyper, key, num_rounds)
        return state._replace(clients=kept.left()), blocks

    def rounds(state, kept, hyper, key, num_rounds):
        first, is_ahead = int(state.round), not federation.cohorts.reads_state

        def cohort_of(i, state) -> Cohort:
            if is_ahead:
                drawn = draw_ahead(np.int32(first + i), hyper, key)
            else:
                drawn = draw(state._replace(clients=None), hyper, key)
            return narrowed(jax.device_get(drawn), layout, federation.cohorts.participation)

        def call(state, examples, cohort, num_rounds):
            own = kept.gather(cohort.of_process(layout))
            state = state._replace(clients=place.by_slot(own))
            return block_of(state, hyper, examples, place.share(cohort), key, np.int32(num_rounds))

        cohort, blocks = cohort_of(0, state), []
        examples = slabs.gather(cohort)
        if num_rounds == 0:
            state, _ = call(state, examples, cohort, 0)
        elif is_ahead:
            following = cohort_of(min(1, num_rounds - 1), state)
        for i in range(num_rounds):
            state, left = call(state, examples, cohort, 1)
            blocks.append(Block(left, 1))
            current = cohort
            # The call above returns before the round is done. The next cohort is known already, so
            # that its examples are gathered meanwhile; the draw after it waits for the round.
            if i + 1 < num_rounds:
                cohort = following if is_ahead else cohort_of(i + 1, state)
                kept.ahead(cohort.of_process(layout), under_way=current.of_process(layout))
                examples = slabs.gather(cohort)
            if is_ahead and i + 2 < num_rounds:
                following = cohort_of(i + 2, state)
            part = jax.tree.map(own_part, state.clients)
            kept.scatter(current.of_process(layout), part)
        return state, blocks

    return run


def one_round(
    federation: Federation,
    layout: Layout,
    frozen: Sequence[Sequence[jax.Array]],
    count: Count,
    of_state: SimulationState | None = None,
    watch: Watch | None = None,
) -> OneRound:
    """Compiles a round; `of_state` has the shardings of a state where devices divide the model."""

    # Traced once, for the shapes of its results and for the loop.
    @jax.jit
    def step(state, hyper, examples, cohort, key, frozen):
        count.traces += 1
        with kinds.given(federation.facts.frozen, frozen), watched(watch):
            state, *left = federation.run_round(state, hyper, examples, key, layout, cohort)
            if of_state is not None:
                state = jax.lax.with_sharding_constraint(state, of_state)
            return state, *layout.on_all_devices(left)

    return OneRound(step, frozen)


def _blocks_of(one_round: OneRound, capacity: int) -> Callable[..., Any]:
    """Compiles `(state, hyper, examples, cohort, key, num_rounds) -> (state, left)`."""
    block_of = jax.jit(block_function(one_round.step, capacity), donate_argnums=0)

    def run(state, hyper, examples, cohort, key, num_rounds):
        given = state, hyper, examples, cohort, key, one_round.frozen, num_rounds
        if one_round.check is not None:
            # The call uses the same program, which is compiled once for each shape.
            one_round.check(block_of.lower(*given).compile())
        return block_of(*given)

    return run


def block_function(step: Callable[..., Any], capacity: int) -> Callable[..., Any]:
    """Returns a function of a round's arguments and `num_rounds`: `-> (state, Block.left)`."""

    def block_of(state, hyper, examples, cohort, key, frozen, num_rounds):
        rest = hyper, examples, cohort, key, frozen
        left = jax.tree.map(
            lambda s: jnp.zeros((capacity, *s.shape), s.dtype),
            jax.eval_shape(step, state, *rest)[1:],
        )

        def body(i: Any, carry: Any) -> tuple[SimulationState, PyTree]:
            state, left = carry
            with jax.named_scope("round"):
                state, *new = step(state, *rest)
            return state, jax.tree.map(lambda a, n: a.at[i].set(n), left, tuple(new))

        return jax.lax.fori_loop(0, num_rounds, body, (state, left))

    return block_of
