"""Rounds compiled for devices that are not here."""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from fedjax_dp.core import checks, program_text, targets
from fedjax_dp.core.backend import traced_for
from fedjax_dp.core.program_text import Cost, Operation
from fedjax_dp.core.targets import Target
from fedjax_dp.data.federated import FederatedData
from fedjax_dp.engine.execution.joint import Program
from fedjax_dp.engine.execution.placement import placement_of
from fedjax_dp.engine.execution.round_loop import Count, block_function, one_round
from fedjax_dp.engine.execution.tuning import layout_of, local_steps
from fedjax_dp.engine.federation import Federation
from fedjax_dp.engine.layout import ExecutionConfig


class Memory(NamedTuple):
    """Bytes of a program on one device."""

    arguments: float  # Examples, states and frozen parameters.
    temporaries: float  # What it holds besides while it runs.
    available: float  # Of the device.

    @property
    def fits(self) -> bool:
        """Whether the device can hold them."""
        return self.arguments + self.temporaries <= self.available


class Compiled(NamedTuple):
    """Rounds as compiled for devices that are not here; all numbers are of one device."""

    target: Target  # The devices.
    clients_per_chunk: int  # The clients that are computed side by side.
    passes: dict[str, float]  # How often a round passes through each loop, in the mean.
    costs: dict[str, Cost]  # One pass of each loop, named as in `program_text.Operation.loops`.
    operations: list[Operation]  # All that runs.
    collectives: dict[str, dict[str, float]]  # Bytes exchanged, in one pass of each loop, by kind.
    memory: Memory  # Bytes.
    trace_seconds: float  # To trace the program here.
    compile_seconds: float  # To compile it here.
    text: str  # The program.

    @property
    def round(self) -> Cost:
        """What a round costs."""
        return program_text.total(self.costs, self.passes)


def compiled_for(
    target: Target,
    build: Callable[[], tuple[Federation, FederatedData, FederatedData | None]],
    execution: ExecutionConfig = ExecutionConfig(),
) -> Compiled:
    """Compiles rounds for a target, which is the backend within `build`."""
    rule = "be a number or 'auto' for devices that are not here, which measure nothing"
    checks.require(execution.tuned is None, "clients_per_chunk", rule, "tuned")
    rule = "be 'device' or 'auto' to be compiled for a device that is not here"
    placement = execution.placement
    checks.require(placement in ("auto", "device"), "placement", rule, placement)
    devices = targets.devices(target)
    begin = time.perf_counter()
    with traced_for(target.device.facts):
        federation, data, validation = build()
        execution = execution._replace(devices=devices)
        layout, _ = layout_of(federation, execution, lambda _: None)
        num_clients = federation.population.num_clients
        place = placement_of(layout, devices[0], num_clients, is_resident=True, kind="device")
        frozen: Any = tuple(part.constants for part in federation.facts.frozen)
        step = one_round(federation, layout, frozen, Count())
        calls = execution.rounds_per_call
        given = Program(step, federation, layout, data, validation, calls).arguments
        alone = place.everywhere
        of_state = place.of_state(given[0].outer)
        shardings = of_state, alone, alone, None, alone, alone, alone
        block = jax.jit(
            block_function(step.step, calls),
            in_shardings=shardings,
            out_shardings=(of_state, alone),
            donate_argnums=0,
        )
        chunks, steps = _passes(federation, layout.chunk, layout.num_devices)
        arguments = *given, jax.ShapeDtypeStruct((), np.int32)
        lowered, seconds = block.trace(*arguments).lower(), time.perf_counter() - begin
    return finished(target, lowered, chunks, steps, layout.chunk, seconds)


def finished(
    target: Target,
    lowered: jax.stages.Lowered,
    chunks: float,
    steps: float,
    clients_per_chunk: int,
    trace_seconds: float = 0.0,
) -> Compiled:
    """Compiles a lowered program and counts what it does."""
    begin = time.perf_counter()
    program = lowered.compile()
    seconds = time.perf_counter() - begin
    text, memory = program.as_text(), program.memory_analysis()
    # Both are there for compilers of devices.
    assert text is not None and memory is not None
    ran = program_text.operations(text, target.device)
    held = Memory(memory.argument_size_in_bytes, memory.temp_size_in_bytes, target.device.memory)
    return Compiled(
        target,
        clients_per_chunk,
        program_text.passes(ran, chunks, steps),
        program_text.by_loop(ran, target.device),
        ran,
        program_text.collectives(ran),
        held,
        trace_seconds,
        seconds,
        text,
    )


def _passes(federation: Federation, chunk: int, num_devices: int) -> tuple[float, float]:
    """Counts the chunks of a device in a round and the steps of a chunk, in the mean."""
    steps, cohort = local_steps(federation), federation.cohorts.participation.cohort_size
    chunks = max(1.0, np.ceil(cohort / num_devices / chunk))
    # The clients of a chunk take the steps of the longest of them: at least those of the mean.
    return float(chunks), float(np.mean(steps))
