"""Simulations that share a program, such as the points of a sweep, run together."""

import hashlib
from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from chex import PRNGKey
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from fedjax_dp.algorithms.base import Hyper
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.core.ranges import Count
from fedjax_dp.core.trees import PyTree
from fedjax_dp.data.federated import FederatedData
from fedjax_dp.engine.cohort import Examples, traced, typed
from fedjax_dp.engine.execution.round_loop import Block, OneRound, block_function, resident_examples
from fedjax_dp.engine.federation import Federation
from fedjax_dp.engine.layout import Layout
from fedjax_dp.engine.record import compact
from fedjax_dp.engine.round import SimulationState

_AXIS = "simulations"


class Program:
    """The rounds of a simulation whose examples and states are in device memory."""

    def __init__(
        self,
        one_round: OneRound,
        federation: Federation,
        layout: Layout,
        data: FederatedData,
        validation: FederatedData | None,
        rounds_per_call: int,
    ) -> None:
        """Collects the parts; nothing is traced yet."""
        self.one_round, self.federation, self.layout = one_round, federation, layout
        self.data, self.validation = data, validation
        self.rounds_per_call = rounds_per_call

    def examples(self) -> Examples:
        """Arranges all examples as calls read them."""
        return resident_examples(
            self.federation, self.layout, self.data, self.validation, self.rounds_per_call
        )

    @cached_property
    def arguments(self) -> tuple[Any, ...]:
        """The shapes of a round's arguments."""
        federation, key = self.federation, jax.eval_shape(jax.random.key, 0)
        state = jax.eval_shape(partial(federation.init, layout=self.layout), key)
        hyper = _shapes(traced(federation.algorithm, typed(federation.hyper)))
        examples = _shapes(self.examples())
        return state, hyper, examples, None, key, _shapes(self.one_round.frozen)

    def exported(self, platform: str) -> jax.export.Exported:
        """Exports a round for "cpu", "cuda", "rocm" or "tpu"; built within its `traced_for` too."""
        return jax.export.export(jax.jit(self.one_round.step), platforms=[platform])(
            *self.arguments
        )

    @cached_property
    def digest(self) -> str:
        """The SHA-256 of the program before it is compiled: the first state, a round, the models.

        Programs of one digest differ in their arguments alone: states, numbers, keys, examples and
        frozen parameters. A program that calls Python back has a digest of its own: its text does
        not show what is called.
        """
        federation, layout = self.federation, self.layout
        init = jax.jit(partial(federation.init, layout=layout))
        state, _, examples, _, key, _ = arguments = self.arguments

        def models(state, examples, index):
            client = examples.client(index)
            of_all, of_one = federation.shared, federation.personal
            return of_all and of_all(state), of_one and of_one(state, client)

        index = jax.ShapeDtypeStruct((), jnp.int32)
        traced_parts = (
            init.lower(key),
            jax.jit(self.one_round.step).lower(*arguments),
            jax.jit(models).lower(state, examples, index),
        )
        texts = [part.as_text() for part in traced_parts]
        calls_back = any("_python_" in text for text in texts)
        facts = self.rounds_per_call, layout.mesh, id(self) if calls_back else None
        return hashlib.sha256("\n".join((*texts, repr(facts))).encode()).hexdigest()


class Request(NamedTuple):
    """The rounds that a simulation has to run next."""

    state: SimulationState  # Its state, which is donated.
    key: PRNGKey  # The root key of its run.
    hyper: Hyper  # The numbers of these rounds.
    num_rounds: int  # How many; 0 to compile the program alone.


class Finished(NamedTuple):
    """Rounds that have run: the state after them, their record and info on the host."""

    state: SimulationState
    record: Any
    info: Any


class Joint:
    """Rounds of several simulations by one compiled program.

    A call of the program advances `width` simulations on each device, side by side on the batch
    dimension of one round. Simulations of one call share examples and frozen parameters. The bits
    of a simulation do not depend on the others.
    """

    @checked
    def __init__(
        self, programs: Sequence[Program], width: Count = 1, devices: Sequence[Any] | None = None
    ) -> None:
        """Prepares the program of simulations whose programs are of one digest."""
        digests = sorted({program.digest for program in programs})
        if len(digests) != 1:
            raise ValueError(f"programs must be of one digest to run together, got {digests}")
        self._programs, self._width = list(programs), width
        self._devices = list(devices or [jax.devices()[0]])
        self._placed: dict[tuple[int, ...], Any] = {}
        self.num_traces = 0
        self._block = self._compiled()

    def run(self, requests: Mapping[int, Request]) -> dict[int, Finished]:
        """Runs rounds of some simulations, by place: of each as many as fit all and one call."""
        capacity = self._programs[0].rounds_per_call
        num_rounds = min(capacity, *(each.num_rounds for each in requests.values()))
        groups: dict[Any, list[int]] = {}
        for place in requests:
            groups.setdefault(_inputs(self._programs[place]), []).append(place)
        finished: dict[int, Finished] = {}
        size = self._width * len(self._devices)
        for places in groups.values():
            for first in range(0, len(places), size):
                some = places[first : first + size]
                finished |= self._run({place: requests[place] for place in some}, num_rounds)
        return finished

    def temporary_bytes(self, requests: Mapping[int, Request]) -> int:
        """Compiles a call and counts the bytes that it needs besides arguments and results."""
        compiled = self._block.lower(*self._arguments(requests), np.int32(1)).compile()
        return int(compiled.memory_analysis().temp_size_in_bytes)

    def _arguments(self, requests: Mapping[int, Request]) -> tuple[Any, ...]:
        """Stacks what a call is about; missing simulations repeat the last."""
        program = self._programs[next(iter(requests))]
        each = [(w.state, self._numbers(program, w.hyper), w.key) for w in requests.values()]
        if self._is_alone:
            return *each[0], *self._inputs_of(program)
        missing = self._width * len(self._devices) - len(each)
        stacked = jax.tree.map(lambda *x: jnp.stack(x), *(each + [each[-1]] * missing))
        if len(self._devices) > 1:
            stacked = jax.device_put(stacked, NamedSharding(self._mesh, P(_AXIS)))
        return *stacked, *self._inputs_of(program)

    def _run(self, requests: Mapping[int, Request], num_rounds: int) -> dict[int, Finished]:
        """Runs rounds in one call."""
        results = self._block(*self._arguments(requests), np.int32(num_rounds))
        if self._is_alone:
            state, left = results
            return {next(iter(requests)): _on_host(state, left, num_rounds)}
        parts = (self._part(results, i) for i in range(len(requests)))
        return {
            place: _on_host(state, left, num_rounds)
            for place, (state, left) in zip(requests, parts, strict=True)
        }

    def _part(self, found: PyTree, i: int) -> PyTree:
        """Takes what a call has left of one simulation, without a message between devices."""
        device, place = divmod(i, self._width)

        def of(x: jax.Array) -> jax.Array:
            return x.addressable_shards[device].data[place]

        return jax.device_put(jax.tree.map(of, found), self._devices[0])

    @property
    def _is_alone(self) -> bool:
        return self._width * len(self._devices) == 1

    def _numbers(self, program: Program, hyper: Hyper) -> Hyper:
        return traced(program.federation.algorithm, typed(hyper))

    def _inputs_of(self, program: Program) -> tuple[Examples, PyTree]:
        """Places the examples and frozen parameters of a program, once for those of one data."""
        name = _inputs(program)
        if name not in self._placed:
            given = program.examples(), program.one_round.frozen
            self._placed[name] = jax.device_put(given, self._everywhere)
        return self._placed[name]

    @property
    def _mesh(self) -> Mesh:
        return Mesh(np.array(self._devices), (_AXIS,))

    @property
    def _everywhere(self) -> Any:
        return self._devices[0] if len(self._devices) == 1 else NamedSharding(self._mesh, P())

    def _compiled(self) -> Any:
        """Compiles `(states, hypers, keys, examples, frozen, num_rounds) -> (states, left)`."""
        program = self._programs[0]
        block = block_function(program.one_round.step, program.rounds_per_call)

        def one(state, hyper, key, examples, frozen, num_rounds):
            self.num_traces += 1
            return block(state, hyper, examples, None, key, frozen, num_rounds)

        if self._is_alone:
            return jax.jit(one, donate_argnums=0)
        every = jax.vmap(one, in_axes=(0, 0, 0, None, None, None))
        if len(self._devices) > 1:
            every = jax.shard_map(
                every,
                mesh=self._mesh,
                in_specs=(P(_AXIS), P(_AXIS), P(_AXIS), P(), P(), P()),
                out_specs=P(_AXIS),
                check_vma=False,
            )
        return jax.jit(every, donate_argnums=0)


def _inputs(program: Program) -> tuple[int, ...]:
    """Names what simulations of one call share."""
    frozen = (id(x) for x in jax.tree.leaves(program.federation.facts.frozen))
    return id(program.data), id(program.validation), *frozen


def _on_host(state: SimulationState, left: PyTree, num_rounds: int) -> Finished:
    record, info = Block(left, num_rounds).on_host()
    return Finished(state, compact(record), info)


def _shapes(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(np.shape(x), jnp.result_type(x)), tree)
