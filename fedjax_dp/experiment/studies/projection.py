"""Projects the seconds of a round on other numbers of devices: a model, not a measurement."""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from fedjax_dp.core import checks, trees
from fedjax_dp.engine.cohort import Cohort, traced, typed
from fedjax_dp.engine.execution.compile import Simulation
from fedjax_dp.engine.execution.tuning import local_steps
from fedjax_dp.engine.layout import AXIS, Layout
from fedjax_dp.engine.record import Fate

_KEY, _DRAWS, _REPEATS = 0, 20, 5


class Network(NamedTuple):
    """The assumed connection of each device to the others."""

    bandwidth: float = 35e9  # Bytes a second; 70 % of 400 Gb/s by default.
    latency: float = 1e-5  # Seconds of a message.

    def seconds_to_gather(self, num_devices: int, num_bytes: float) -> float:
        """Returns the seconds until each device has received `num_bytes` from the others."""
        return num_bytes / self.bandwidth + math.ceil(math.log2(num_devices)) * self.latency


class Rates(NamedTuple):
    """The measured speed of one device."""

    step: float  # Seconds of a local step of one client.
    # Seconds of a round without clients, such as those of noise and the server's step.
    fixed: float


class Loads(NamedTuple):
    """The work of rounds."""

    by_device: np.ndarray  # Steps times clients that each device computes, `[rounds, devices]`.
    split: np.ndarray  # Steps that all devices take together, `[rounds]`.

    @property
    def most(self) -> np.ndarray:
        """The largest load of a device, `[rounds]`."""
        return self.by_device.max(axis=1)


def loads(layout: Layout, steps: np.ndarray, num_split: int = 0) -> np.ndarray:
    """Counts the steps that each device computes, where a chunk takes those of its longest client.

    All devices train the clients of the `num_split` first slots together.
    """
    share = steps[:num_split].sum() / layout.num_devices
    own = np.concatenate([np.zeros_like(steps[:num_split]), steps[num_split:]])
    return share + _own_loads(layout, own)


def _own_loads(layout: Layout, steps: np.ndarray) -> np.ndarray:
    """Counts the steps of the clients that one device trains, `[devices]`."""
    by_chunk = steps.reshape(layout.num_devices, -1, layout.chunk)
    is_alone = np.asarray(layout.is_alone(jnp.asarray(by_chunk)))
    alone = np.where(is_alone, by_chunk, 0).sum(axis=(1, 2))
    return alone + layout.chunk * np.where(is_alone, 0, by_chunk).max(axis=2).sum(axis=1)


def cohort_loads(simulation: Simulation, layout: Layout, rounds: Sequence[int]) -> Loads:
    """Draws and packs the cohorts of rounds, and counts their loads."""
    federation = simulation.federation
    steps, key = local_steps(federation), jax.random.key(_KEY)
    hyper = traced(federation.algorithm, typed(federation.hyper))
    state = simulation.init(key)

    @jax.jit
    def slots_of(state: Any, index: Any) -> Cohort:
        return federation.cohorts.draw(state._replace(round=index), hyper, key, layout)

    loads_of_rounds = []
    for index in rounds:
        cohort = jax.device_get(slots_of(state, np.int32(index)))
        taken = np.where(cohort.fate == Fate.EMPTY, 0, steps[cohort.ids])
        count = int(cohort.num_split)
        loads_of_rounds.append((loads(layout, taken, count), taken[:count].sum()))
    return Loads(*map(np.stack, zip(*loads_of_rounds, strict=True)))


def on_devices(simulation: Simulation, num_devices: int) -> Layout:
    """Makes the layout that a simulation would have on other devices, which need not exist."""
    layout, cohort_size = simulation.layout, simulation.participation.cohort_size
    mesh = None if num_devices == 1 else AbstractMesh((num_devices,), (AXIS,))
    chunk = min(layout.chunk, max(1, round(cohort_size / num_devices)))
    return layout._replace(mesh=mesh, chunk=chunk)


def fixed_seconds(simulation: Simulation) -> float:
    """Measures a round without clients."""
    program, layout, key = simulation.program, simulation.layout, jax.random.key(_KEY)
    rule = "be with all in device memory, and without work on the host or a model axis"
    checks.require(program is not None, "a projected round", rule, "another")
    assert program is not None
    everywhere = None if layout.mesh is None else NamedSharding(layout.mesh, PartitionSpec())
    examples = jax.device_put(program.examples(), everywhere)
    frozen = program.one_round.frozen
    federation, state = simulation.federation, simulation.init(key)
    hyper = traced(federation.algorithm, typed(federation.hyper))
    cohort = federation.cohorts.draw(state, hyper, key, layout)
    no_client = cohort._replace(fate=jnp.full_like(cohort.fate, Fate.EMPTY))
    seconds = []
    for _ in range(_REPEATS + 1):
        before = time.perf_counter()
        jax.block_until_ready(
            program.one_round.step(state, hyper, examples, no_client, key, frozen)
        )
        seconds.append(time.perf_counter() - before)
    return statistics.median(seconds[1:])


def rates_of(simulation: Simulation, seconds: Sequence[float], first: int) -> Rates:
    """Divides measured rounds, of which the first is round `first`, by the steps they took."""
    fixed = fixed_seconds(simulation)
    rounds = range(first, first + len(seconds))
    most = cohort_loads(simulation, simulation.layout, rounds).most
    steps = [max(0.0, s - fixed) / max(1, load) for s, load in zip(seconds, most, strict=True)]
    return Rates(statistics.median(steps), fixed)


def projected(
    simulation: Simulation, rates: Rates, num_devices: int, network: Network = Network()
) -> dict[str, Any]:
    """Computes the expected seconds of a round, of real clients in the packing of real rounds.

    `T(n) = E[max_d steps_d] · step + fixed + (1 + E[split steps]) · ((n − 1) · B / w + ⌈log2 n⌉ ·
    α)`: every device receives the sums of all others, B bytes each, and adds them in the same
    order, once a round and in each step of a client that is split. Of a stacked aggregator it
    receives the updates of the others' slots.
    """
    layout, facts = on_devices(simulation, num_devices), simulation.federation.facts
    packed = cohort_loads(simulation, layout, range(_DRAWS))
    received = (num_devices - 1) * trees.num_bytes(facts.total)
    if facts.is_stacked:
        received *= layout.slots_per_device(simulation.participation)
    training = float(packed.most.mean()) * rates.step
    times = 1 + float(packed.split.mean())
    adding = times * network.seconds_to_gather(num_devices, received)
    return {
        "devices": num_devices,
        "seconds_per_round": training + rates.fixed + adding,
        "training_seconds": training,
        "fixed_seconds": rates.fixed,
        "adding_seconds": adding,
        "bytes_received": times * received,
        "balance": float((packed.by_device.mean(axis=1) / packed.most.clip(1)).mean()),
    }


def projection(
    simulation: Simulation,
    seconds: Sequence[float],
    first: int,
    devices: Sequence[int],
    network: Network = Network(),
    note: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Projects measured rounds to several numbers of devices, with all that was assumed."""
    note("measuring a round without clients")
    rates = rates_of(simulation, seconds, first)
    return {
        "kind": "model",
        "assumptions": {
            "seconds_per_client_step": rates.step,
            "fixed_seconds": rates.fixed,
            "bandwidth_bytes_per_second": network.bandwidth,
            "latency_seconds": network.latency,
            "cohorts": _DRAWS,
            "measured_on": f"{simulation.layout.num_devices} {jax.default_backend()} devices",
            "rule": "a client's step takes as long on each device, in a chunk of any width",
        },
        "rows": [projected(simulation, rates, count, network) for count in devices],
    }
