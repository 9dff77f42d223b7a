"""Compiles a federation: places its arrays, donates its state, runs its rounds."""

import warnings
import weakref
from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from chex import PRNGKey
from jax.sharding import Mesh

from fedjax_dp.algorithms.base import FederatedAlgorithm, HostStep, Hyper
from fedjax_dp.core import backend, checks
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.core.devices import is_distributed
from fedjax_dp.core.forks import require_not_forked
from fedjax_dp.core.inspection import Watch
from fedjax_dp.core.trees import PyTree
from fedjax_dp.data import participants
from fedjax_dp.data.federated import FederatedData
from fedjax_dp.data.participants import Participation
from fedjax_dp.data.record_file import Folder
from fedjax_dp.data.sampling import poisson
from fedjax_dp.engine.client_store import ClientStore
from fedjax_dp.engine.cohort import Examples, traced, typed
from fedjax_dp.engine.execution.joint import Program
from fedjax_dp.engine.execution.placement import Placement, Slabs, placement_of
from fedjax_dp.engine.execution.round_loop import (
    Count,
    OneRound,
    Rounds,
    after_host_step,
    one_round,
    resident_examples,
    resident_rounds,
    rounds_and_host_steps,
    streamed_rounds,
)
from fedjax_dp.engine.execution.tuning import (
    Memory,
    explained,
    layout_of,
    memory_of,
    require_host_memory,
    require_memory,
)
from fedjax_dp.engine.facts import examples_of, population_of
from fedjax_dp.engine.federation import Federation, check_wrapped, federation
from fedjax_dp.engine.layout import (
    AXIS,
    EqualWork,
    ExecutionConfig,
    Layout,
    Trial,
    require_on_each_device,
    require_split,
)
from fedjax_dp.engine.model_axis import ModelAxis
from fedjax_dp.engine.record import RoundInfo, RoundRecord, compact, joined, joined_info
from fedjax_dp.engine.round import ByClient, SimulationState
from fedjax_dp.evaluation.evaluate import require_targets

# A public divisor that is off by more than this factor gets a warning.
_DIVISOR_FACTOR = 2.0


class Simulation(NamedTuple):
    """A compiled federation.

    Attributes:
      init: `(key) -> SimulationState` before the first round.
      run: `(state, key, num_rounds=1, hyper=None) -> (state, record, info)`. Donates a state that
        `init` or `run` returned; do not reuse it after the call. Other arrays are copied. All of
        `record` and `info` are host arrays `[num_rounds, ...]`, the record as wide as the largest
        cohort. The key is the root of cohorts, batches and noise, the same in every call; with it
        the noise can be subtracted, see `secret_key`. `hyper` holds the numbers of these rounds, by
        default the federation's.
      compile: `(state, key) -> state` compiles the round without running one; donates too.
      portable: `(state, *, copies=True) -> state` on the host, as one device would hold it; without
        copies, client state in host memory is shared with the state, and later rounds write to it.
      for_checkpoint: `(state) -> state` for `Checkpoints`: as `portable` without copies, but with
        several processes each client's state is held by its own process alone.
      federation: the compiled federation.
      layout: the layout of its rounds.
      num_traces: `() -> int`, how often the round was traced.
      layouts: the trials that chose the layout, fastest first; empty unless it was tuned.
      program: its rounds as a program that other simulations may share, see `joint`; None if
        examples or states are streamed, rounds have work on the host between them, several
        processes share them, or devices divide the model.
    """

    init: Callable[[PRNGKey], SimulationState]
    run: Callable[..., tuple[SimulationState, RoundRecord, RoundInfo]]
    compile: Callable[[SimulationState, PRNGKey], SimulationState]
    portable: Callable[..., SimulationState]
    for_checkpoint: Callable[[SimulationState], SimulationState]
    federation: Federation
    layout: Layout
    num_traces: Callable[[], int]
    layouts: tuple[Trial, ...] = ()
    program: Program | None = None

    @property
    def algorithm(self) -> FederatedAlgorithm:
        """The algorithm."""
        return self.federation.algorithm

    @property
    def participation(self) -> Participation:
        """The participation of clients in rounds."""
        return self.federation.cohorts.participation

    @property
    def hyper(self) -> Hyper:
        """The numbers of rounds by default."""
        return self.federation.hyper

    @property
    def sizes(self) -> np.ndarray:
        """The number of examples of each client, `[num_clients]`."""
        return self.federation.population.sizes


@checked
def simulation(
    algorithm: FederatedAlgorithm,
    data: FederatedData,
    participation: Participation | None = None,
    execution: ExecutionConfig = ExecutionConfig(),
    *,
    cohort_size: float | None = None,
    validation: FederatedData | None = None,
    wrapper: Callable[[Federation], Federation] | None = None,
) -> Simulation:
    """Compiles an algorithm on a population.

    Args:
      algorithm: the declaration.
      data: the clients' training examples.
      participation: the sampling of clients, bound to as many clients as `data` has; None for
        Poisson sampling of `cohort_size` of them.
      execution: the layout of rounds.
      cohort_size: the expected number of clients a round where no participation is given, in (0,
        number of clients].
      validation: a second split of the same clients' own data, which they read as
        `client.validation`.
      wrapper: `(federation) -> federation`, such as `partial(anderson, memory=2)`.

    Returns:
      The simulation.

    Raises:
      ValueError: as `federation`, the wrapper and `compile_federation`; without a participation
        and a cohort size, or with both.
    """
    backend.require_settings()
    execution.validate()
    rule = "be given without a participation, and only then"
    fits = (participation is None) == (cohort_size is not None)
    checks.require(fits, "cohort_size", rule, cohort_size)
    if participation is None:
        participation = participants.participation(poisson(), data.num_clients, cohort_size)
    bound = federation(algorithm, population_of(data, validation), participation)
    _warn_of_divisor(bound)
    if wrapper is not None:
        bound = wrapper(bound)
    return compile_federation(bound, data, execution, validation=validation)


@checked
def compile_federation(
    federation: Federation,
    data: FederatedData,
    execution: ExecutionConfig = ExecutionConfig(),
    *,
    validation: FederatedData | None = None,
) -> Simulation:
    """Compiles a federation.

    One program does a whole round (draw, gather, train, reduce, add noise, step, scatter), and many
    rounds run in one call. The number of rounds of a call is traced, so that one compiled program
    runs any number up to `rounds_per_call`.

    Args:
      federation: the federation; its layout is chosen here.
      data: the clients' training examples.
      execution: the layout of rounds.
      validation: the second split that the federation was built with, if any.

    Returns:
      The simulation.

    Raises:
      ValueError: for targets that the loss is not for (if they are on disk, when they are read),
        for a layout that is not possible, or if JAX is set to 64-bit numbers, with which steps and
        draws would not be those that are accounted.
      MemoryError: if a round or the client states do not fit, with the estimate.
    """
    require_not_forked()
    backend.require_settings()
    execution.validate()
    check_wrapped(federation)
    splits = {"data": data} | ({} if validation is None else {"validation": validation})
    for name, split in splits.items():
        require_targets(name, split, federation.facts.targets)
    execution = execution.for_cohort(federation.cohorts.participation.cohort_size)
    layout, layouts = layout_of(
        federation,
        execution,
        lambda fixed: compile_federation(federation, data, fixed, validation=validation),
    )
    parts = _fitted(federation, layout, execution, data, validation)
    blocks = _blocks(parts, Watch() if execution.debug else None)
    runner = _Runner(parts, blocks)
    return Simulation(
        init=runner.init,
        run=runner.run,
        compile=runner.compile,
        portable=parts.place.portable,
        for_checkpoint=parts.place.for_checkpoint,
        federation=federation,
        layout=layout,
        num_traces=lambda: blocks.counter.traces,
        layouts=layouts,
        program=blocks.program,
    )


class _Parts(NamedTuple):
    """A federation with the layout of its rounds, and where its arrays are."""

    federation: Federation
    data: FederatedData
    validation: FederatedData | None
    execution: ExecutionConfig
    layout: Layout
    outer: PyTree  # The shapes of wrappers' states.
    place: Placement
    memory: Memory  # Of a round, which fits.


def _fitted(
    federation: Federation,
    layout: Layout,
    execution: ExecutionConfig,
    data: FederatedData,
    validation: FederatedData | None,
) -> _Parts:
    """Chooses where arrays are, and refuses what the layout cannot run or memory cannot hold."""
    outer = jax.eval_shape(federation.init, jax.random.key(0)).outer
    num_clients, facts = federation.population.num_clients, federation.facts
    state_bytes = facts.own_bytes * layout.clients_per_device(num_clients)
    place = placement_of(
        layout,
        execution.device_list()[0],
        num_clients,
        is_resident=execution.is_resident(data, state_bytes),
        kind=execution.placement,
    )
    if place.is_resident:
        # Those that are streamed are checked as they are read.
        require_targets("data", data, facts.targets, on_disk=True)
        if validation is not None:
            require_targets("validation", validation, facts.targets, on_disk=True)
    if is_distributed():
        _require_distributable(federation, place)
    if layout.splits_longest:
        _require_divisible(federation, layout, place)
    memory = memory_of(
        federation,
        layout,
        outer=outer,
        clients=state_bytes if place.is_resident else facts.own_bytes * _slots(federation, layout),
        examples=_resident_bytes(data, validation) if place.is_resident else 0,
        model_axis=execution.model_axis,
    )
    require_memory(memory, layout.mesh_size)
    if not place.is_resident and not place.is_on_disk:
        require_host_memory(num_clients, facts.own_bytes)
    return _Parts(federation, data, validation, execution, layout, outer, place, memory)


class _Blocks(NamedTuple):
    """What runs blocks of rounds."""

    planned: Rounds  # By the numbers of the layout.
    general: Rounds  # By any numbers, with loops of any length.
    counter: Count
    watch: Watch | None
    program: Program | None = None  # See `Simulation.program`.


def _blocks(parts: _Parts, watch: Watch | None) -> _Blocks:
    """Compiles the round, and how blocks of it get their examples."""
    federation, data, validation, execution, layout, outer, place, memory = parts
    with explained(memory):
        frozen = _placed_frozen(federation, layout, place, execution.model_axis)
    count, of_state = Count(), place.of_state(outer) if layout.divides_model else None

    def round_in(layout: Layout) -> OneRound:
        compiled = one_round(federation, layout, frozen, count, of_state, watch)
        if execution.model_axis is not None and jax.default_backend() == "cpu":
            compiled = compiled._replace(check=execution.model_axis.require_separate_groups)
        return compiled

    round_of, general = round_in(layout), layout._replace(equal_work=None)
    round_of_any = round_of if layout.equal_work is None else round_in(general)
    if not place.is_resident:
        _require_streamable(federation, outer, execution.placement)
        targets = federation.facts.targets
        slabs = Slabs(data, federation.cohorts.participation, layout, place, validation, targets)
        return _Blocks(
            streamed_rounds(round_of, federation, layout, slabs, place),
            streamed_rounds(round_of_any, federation, general, slabs, place),
            count,
            watch,
        )
    # An error is raised after the round that it is of.
    calls = 1 if execution.debug else execution.rounds_per_call

    @cache
    def examples() -> Examples:
        return place.share(resident_examples(federation, layout, data, validation, calls))

    planned = resident_rounds(round_of, examples, calls)
    blocks = _Blocks(planned, resident_rounds(round_of_any, examples, calls), count, watch)
    splits = layout.splits_longest and layout.num_devices > 1
    is_alone = is_distributed() or layout.divides_model or splits or watch is not None
    if is_alone or federation.algorithm.stages.host_steps:
        return blocks
    program = Program(round_of_any, federation, general, data, validation, calls)
    return blocks._replace(program=program)


class _Runner:
    """Runs blocks of rounds and the host steps between them."""

    def __init__(self, parts: _Parts, blocks: _Blocks) -> None:
        federation, place = parts.federation, parts.place
        self._parts, self._blocks, self._made = parts, blocks, _Made()
        # Few examples, for rare work: they are placed on a device when first used.
        self._scoring = None if parts.validation is None else examples_of(parts.validation)
        self._first = _initial(federation, parts.layout, place, parts.outer, parts.execution.folder)
        self._start = place.share(traced(federation.algorithm, federation.hyper))
        self._checked: Hyper | None = None

    def init(self, key: PRNGKey) -> SimulationState:
        """Returns the state before the first round."""
        with explained(self._parts.memory):
            return self._made.noted(self._parts.place.put(self._first(key)))

    def compile(self, state: SimulationState, key: PRNGKey) -> SimulationState:
        """Compiles the round without running one."""
        with explained(self._parts.memory):
            own = self._made.or_copies(self._parts.place.put(state))
            return self._made.noted(self._blocks.planned(own, self._start, key, 0)[0])

    def run(
        self, state: SimulationState, key: PRNGKey, num_rounds: int = 1, hyper: Hyper | None = None
    ) -> tuple[SimulationState, RoundRecord, RoundInfo]:
        """Runs rounds, see `Simulation.run`."""
        with explained(self._parts.memory):
            backend.require_settings()
            checks.whole("num_rounds", num_rounds)
            rounds, numbers = self._rounds_by(hyper)
            host_steps = self._parts.federation.algorithm.stages.host_steps
            state, left = self._made.or_copies(self._parts.place.put(state)), []
            for block, steps in rounds_and_host_steps(host_steps, int(state.round), num_rounds):
                state, more = rounds(state, numbers, key, block)
                left += [(compact(record), info) for record, info in (b.on_host() for b in more)]
                if self._blocks.watch is not None:
                    self._blocks.watch.require_finite()
                for step in steps:
                    state = self._after(step, state, numbers, key)
            records, infos = zip(*left, strict=True)
            return self._made.noted(state), joined(records), joined_info(infos)

    def _rounds_by(self, hyper: Hyper | None) -> tuple[Rounds, Hyper]:
        """Chooses what runs rounds by some numbers, and places these."""
        if hyper is None:
            return self._blocks.planned, self._start
        federation, known = self._parts.federation, self._parts.layout.equal_work
        # Those of each round are checked, which blocks of one run need once.
        if hyper is not self._checked or not hyper.factors:
            federation.check_numbers(hyper)
            self._checked = hyper
        is_planned = known is None or known == EqualWork.of(federation.population.sizes, hyper)
        numbers = self._parts.place.share(_same_kind(federation.algorithm, hyper, self._start))
        return self._blocks.planned if is_planned else self._blocks.general, numbers

    def _after(
        self, step: HostStep, state: SimulationState, numbers: Hyper, key: PRNGKey
    ) -> SimulationState:
        """Runs a host step, which may read the states of all processes' clients."""
        place, whole = self._parts.place, state
        if is_distributed() and step.reads_clients:
            whole = place.portable(state, copies=False)
        after = after_host_step(step, whole, numbers, key, place.num_clients, self._scoring)
        return place.put(state._replace(server=after.server))


def _warn_of_divisor(bound: Federation) -> None:
    """Warns of a public divisor that makes steps much longer or shorter than those of a mean."""
    claim, cohort_size = bound.claims.client, bound.cohorts.participation.cohort_size
    if claim is None or claim.divisor is None:
        return
    factor = cohort_size / float(np.max(claim.divisor(bound.hyper.aggregator)))
    if not 1 / _DIVISOR_FACTOR <= factor <= _DIVISOR_FACTOR:
        warnings.warn(
            f"the public divisor should be near {cohort_size:g}, the clients that a round draws, "
            f"and is {cohort_size / factor:g}: steps are {factor:.3g} times as long as those of a "
            "mean",
            stacklevel=4,
        )


def _placed_frozen(
    federation: Federation, layout: Layout, place: Placement, model_axis: ModelAxis | None
) -> tuple[tuple[jax.Array, ...], ...]:
    """Copies frozen parameters to every device, or to each of a group its part."""
    frozen = federation.facts.frozen
    if model_axis is None:
        return place.share(tuple(part.constants for part in frozen))
    assert isinstance(layout.mesh, Mesh)
    return model_axis.placed(frozen, layout.mesh)


def _slots(federation: Federation, layout: Layout) -> int:
    """Counts the slots of a device whose client states are in its memory at once."""
    participation = federation.cohorts.participation
    if participation.sampler.varies:
        return layout.usual_slots(participation)
    # If the number drawn is not random, some round may draw all clients.
    return layout.slots_per_device(participation, is_owned=True)


def _initial(
    federation: Federation, layout: Layout, place: Placement, outer: PyTree, folder: Folder | None
) -> Callable[[PRNGKey], SimulationState]:
    """Compiles the state before the first round; each device holds its part alone."""
    clients = federation.algorithm.client_state
    if place.is_resident or clients is None:
        first = partial(federation.init, layout=layout)
        return jax.jit(first, out_shardings=place.of_state(outer))

    @jax.jit
    def of_one(key):
        state = federation.init(key)
        return state._replace(clients=clients.init(state.server))

    def init(key):
        state = of_one(key)
        if place.is_on_disk:
            store = ClientStore.unwritten(state.clients, place.num_clients, folder)
            return state._replace(clients=store)
        table = jax.tree.map(
            lambda x: np.broadcast_to(np.asarray(x), (place.num_clients, *x.shape)), state.clients
        )
        return state._replace(clients=table)

    return init


class _Made:
    """Remembers the arrays that a simulation has made, which alone it may donate."""

    def __init__(self) -> None:
        self._arrays: dict[int, weakref.ref[Any]] = {}

    def noted(self, state: SimulationState) -> SimulationState:
        """Remembers a state that is returned, in place of earlier ones."""
        leaves = (x for x in jax.tree.leaves(state) if isinstance(x, (jax.Array, np.ndarray)))
        self._arrays = {id(x): weakref.ref(x) for x in leaves}
        return state

    def or_copies(self, state: SimulationState) -> SimulationState:
        """Copies the arrays that the simulation has not made."""

        def own(x: Any) -> Any:
            known = self._arrays.get(id(x))
            is_own = known is not None and known() is x
            if isinstance(x, np.ndarray):
                return x if is_own and x.flags.writeable else np.array(x)
            return x if is_own or not isinstance(x, jax.Array) else jnp.copy(x)

        return jax.tree.map(own, state)


def _require_streamable(federation: Federation, outer: PyTree, placement: str) -> None:
    parts = jax.tree.leaves(outer, is_leaf=lambda x: isinstance(x, ByClient))
    rule = f"be 'device' for {federation.algorithm.name}, whose wrapper stores a state per client"
    is_by_client = any(isinstance(part, ByClient) for part in parts)
    checks.require(not is_by_client, "placement", rule, placement)
    name = federation.algorithm.name
    rule = f"be 'device' for {name}, which changes the state of every client in every round"
    checks.require(not federation.facts.is_finished_for_all, "placement", rule, placement)


def _require_distributable(federation: Federation, place: Placement) -> None:
    """Refuses what does not yet run in several processes."""
    num_own = len(place.own_rows)
    has_table = federation.algorithm.client_state is not None and not place.is_resident
    rule = f"be above {num_own}, or all clients would be of one process"
    is_shared = not has_table or place.num_clients > num_own
    checks.require(is_shared, "the number of clients", rule, place.num_clients)
    platforms: str | None = backend.setting("jax_platforms")
    rule = "include 'cpu' for client state in host memory of several processes"
    is_on_hosts = not has_table or not platforms or "cpu" in platforms.split(",")
    checks.require(is_on_hosts, "JAX_PLATFORMS", rule, platforms)


def _require_divisible(federation: Federation, layout: Layout, place: Placement) -> None:
    """Refuses clients that devices cannot split, by a trace of one on the axis of the devices."""
    algorithm = federation.algorithm
    require_on_each_device(algorithm, is_resident=place.is_resident)
    divides = federation.facts.divides_batches(AXIS, layout.num_devices)
    require_split(divides, f"for {algorithm.name}, whose clients sum no gradients over batches")


def _resident_bytes(*stores: FederatedData | None) -> int:
    """Counts the bytes of examples on a device, where numbers have at most 32 bits."""
    arrays = [array for store in stores if store is not None for array in store.examples.values()]
    return sum(array.size * min(array.dtype.itemsize, 4) for array in arrays)


def _same_kind(algorithm: FederatedAlgorithm, hyper: Hyper, built: Hyper) -> Hyper:
    """Converts numbers to the types that a simulation was built with, to avoid a second trace."""
    mine, own = str(jax.tree.structure(hyper)), str(jax.tree.structure(built))
    checks.require(mine == own, "hyper", f"hold the numbers {own}", mine)

    def like(x, b):
        # A number without a range has not been checked to be whole.
        is_kept = x.dtype == b.dtype or bool(np.any(np.asarray(x) != np.asarray(x).astype(b.dtype)))
        return x if is_kept else x.astype(b.dtype)

    return jax.tree.map(like, traced(algorithm, typed(hyper)), built)
