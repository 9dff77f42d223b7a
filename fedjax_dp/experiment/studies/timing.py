"""Times rounds, compares them with the machine's peak and other versions, and projects them."""

import math
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from fedjax_dp.core import checks, trees
from fedjax_dp.engine.cohort import Cohort, traced, typed
from fedjax_dp.engine.execution.compile import Simulation, simulation
from fedjax_dp.engine.execution.tuning import local_steps
from fedjax_dp.engine.layout import AXIS, ExecutionConfig, Layout
from fedjax_dp.engine.record import Fate, as_metrics
from fedjax_dp.experiment.assembly.assemble import assemble
from fedjax_dp.experiment.schema.config import Config
from fedjax_dp.experiment.studies.workloads import WORKLOADS, Prepared, Workload, prepare
from fedjax_dp.models.cost import training_cost

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
    """Counts the steps of each device, by the longest of a chunk; all share the first clients."""
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


_GEMM_SIZE = 2048
SCALES = ("clients", "cohort", "chunk", "devices", "model")
# What has to be equal, or times are not of the same work.
_SAME = ("backend", "devices")
# One figure each, shown as a ratio alone.
_ONCE = ("compile_seconds", "peak_rss_mb", "peak_device_mb")
_LEVEL = 0.95


def gemm_peak(seconds: float = 1.0) -> float:
    """Measures the best GFLOP/s of a large float32 matrix product."""
    a = jnp.ones((_GEMM_SIZE, _GEMM_SIZE), jnp.float32)
    multiply = jax.jit(lambda a, b: jnp.dot(a, b, precision="float32"))
    multiply(a, a).block_until_ready()
    best, started = 0.0, time.perf_counter()
    while time.perf_counter() - started < seconds:
        before = time.perf_counter()
        multiply(a, a).block_until_ready()
        best = max(best, 2 * _GEMM_SIZE**3 / (time.perf_counter() - before) / 1e9)
    return best


class Case:
    """A simulation that is timed call by call."""

    def __init__(self, simulation: Simulation):
        """Compiles it; no round runs."""
        self.simulation = simulation
        self._key = jax.random.key(0)
        state = self.simulation.init(self._key)
        started = time.perf_counter()
        self._state = jax.block_until_ready(self.simulation.compile(state, self._key))
        self.compile_seconds = time.perf_counter() - started
        self.info: dict[str, Any] = {}

    def time_round(self, rounds: int = 1) -> float:
        """Runs rounds, and returns the seconds of each."""
        started = time.perf_counter()
        self._state, record, info = self.simulation.run(self._state, self._key, rounds)
        jax.block_until_ready(self._state)
        elapsed = time.perf_counter() - started
        self.info = as_metrics(record, info)
        return elapsed / rounds


def timed_case(name: str, execution: ExecutionConfig) -> Case:
    """Compiles a workload, to be timed round by round."""
    checks.one_of("NAME", name, WORKLOADS)
    return Case(compiled(prepare(WORKLOADS[name]), execution))


class Projecting(NamedTuple):
    """Numbers of devices to project rounds to, and their assumed network."""

    devices: Sequence[int]
    network: Network = Network()

    def of(self, case: Case, seconds: Sequence[float]) -> dict[str, Any]:
        """Projects measured rounds; the first was round 1, after one that is not counted."""
        return projection(case.simulation, seconds, 1, self.devices, self.network)


def measure(
    name: str,
    execution: ExecutionConfig,
    num_rounds: int,
    projecting: Projecting | None = None,
    **changes: Any,
) -> dict[str, Any]:
    """Times a workload next to its base, in alternating rounds as machine speed drifts."""
    checks.one_of("NAME", name, WORKLOADS)
    checks.whole("--rounds", num_rounds)
    workload = WORKLOADS[name]._replace(**changes)
    parts = prepare(workload)
    cases = [Case(compiled(parts, execution))]
    if workload.base is not None:
        base = WORKLOADS[workload.base]._replace(**changes)
        cases.append(Case(compiled(prepare(base), execution)))
    times: list[list[float]] = [[] for _ in cases]
    peaks = []
    for i in range(num_rounds + 1):
        for case, seconds in zip(cases, times, strict=True):
            elapsed = case.time_round()
            if i > 0:
                seconds.append(elapsed)
        peaks.append(gemm_peak(0.2))
    case, medians = cases[0], [statistics.median(seconds) for seconds in times]
    found = {
        "name": name,
        **figures(workload, parts, case, times[0], peaks[1:]),
        "dp_overhead": medians[0] / medians[1] if len(cases) > 1 else None,
    }
    return found if projecting is None else found | {"model": projecting.of(case, times[0])}


def figures(
    workload: Workload,
    parts: Prepared,
    case: Case,
    seconds: Sequence[float],
    peaks: Sequence[float],
) -> dict[str, Any]:
    """Relates measured rounds of a workload to its arithmetic, and to the peak of the machine."""
    median, info = statistics.median(seconds), case.info
    dtype = parts.data.examples["x"].dtype
    cost = training_cost(parts.model, workload.shape, workload.batch_size, dtype)
    rate, peak = float(info["num_examples"][0]) / median / 1e9, statistics.median(peaks)
    achieved = cost.direct_operations * rate
    return {
        "about": workload.about,
        **_speed(case, seconds, peaks),
        "gflops": achieved,
        "gemm_peak_gflops": peak,
        "gemm_peak_share": achieved / peak,
        "multiplied_share": cost.operations * rate / peak,
        "padding_share": float(info["padding_share"][0]),
        "layouts": [trial._asdict() for trial in case.simulation.layouts],
    }


def measure_experiment(
    config: Config, num_rounds: int, projecting: Projecting | None = None
) -> dict[str, Any]:
    """Times rounds of an experiment, without its evaluations and checkpoints."""
    checks.whole("--rounds", num_rounds)
    case = Case(assemble(config).simulation)
    timed = [(case.time_round(), gemm_peak(0.2)) for _ in range(num_rounds + 1)][1:]
    seconds, peaks = zip(*timed, strict=True)
    speed = _speed(case, seconds, peaks)
    figures = {"name": config.title, "about": "rounds of an experiment", **speed}
    return figures if projecting is None else figures | {"model": projecting.of(case, seconds)}


def compiled(parts: Prepared, execution: ExecutionConfig) -> Simulation:
    """Builds the simulation of a workload."""
    return simulation(
        parts.algorithm,
        parts.data,
        parts.participation,
        execution,
        validation=parts.validation,
        wrapper=parts.wrapper,
    )


def _speed(case: Case, seconds: Sequence[float], peaks: Sequence[float]) -> dict[str, Any]:
    """Collects what is measured of every simulation."""
    median, info = statistics.median(seconds), case.info
    stats = jax.local_devices()[0].memory_stats() or {}
    return {
        "seconds_per_round": median,
        "seconds_per_round_min": min(seconds),
        "seconds_per_round_max": max(seconds),
        "clients_per_second": float(info["num_participants"][0]) / median,
        "examples_per_second": float(info["num_examples"][0]) / median,
        "compile_seconds": case.compile_seconds,
        "peak_rss_mb": _peak_rss_mb(),
        "peak_device_mb": stats.get("peak_bytes_in_use", 0) / 2**20 or None,
        "clients_per_chunk": case.simulation.layout.chunk,
        "devices": case.simulation.layout.mesh_size,
        "backend": jax.default_backend(),
        "jax": jax.__version__,
        "rounds": len(seconds),
        "seconds": list(seconds),
        "gemm_gflops": list(peaks),
    }


def _peak_rss_mb() -> float:
    """Reads the most memory that the process has had; NaN where the system does not say."""
    try:
        import resource
    except ImportError:
        return math.nan
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**20 if sys.platform == "darwin" else 2**10)


def settings(
    name: str, layout: int | str, devices: int | str, scale: str | None
) -> list[tuple[ExecutionConfig, dict[str, Any]]]:
    """Lists the points of a benchmark: a layout, and changed fields of the workload."""
    execution = ExecutionConfig(clients_per_chunk=layout, devices=devices, rounds_per_call=1)
    if scale is None:
        return [(execution, {})]
    checks.one_of("--scale", scale, SCALES)
    if scale == "clients":
        return [(execution, {"num_clients": n}) for n in (50, 200, 800, 2000)]
    if scale == "cohort":
        # The population is constant, so that any growth of memory is due to the cohort.
        most = WORKLOADS[name].num_clients
        return [(execution, {"cohort": n}) for n in (50, 200, 800, 2000) if n <= most]
    if scale == "chunk":
        chunks = (1, 2, 4, 8, 16, 32)
        return [(execution._replace(clients_per_chunk=chunk), {}) for chunk in chunks]
    if scale == "devices":
        counts = [n for n in (1, 2, 4, 8) if n <= jax.device_count()]
        return [(execution._replace(devices=n), {}) for n in counts]
    if WORKLOADS[name].is_text:
        texts = ("char_lstm", "char_transformer")
        return [(execution, {"model": model, "model_options": {}}) for model in texts]
    flat = len(WORKLOADS[name].shape) == 1
    models = ("logistic_regression", "mlp") if flat else ("thesis_cnn", "emnist_cnn", "resnet18")
    return [(execution, {"model": model, "model_options": {}}) for model in models]


class Change(NamedTuple):
    """How the seconds of a round changed."""

    name: str  # The workload.
    ratio: float  # New over old, by the median of all pairs of rounds.
    low: float  # The lower end of its interval.
    high: float  # The upper end.
    verdict: str  # "faster", "slower" or "within noise".
    once: Mapping[str, float]  # Ratios of figures that were measured once, by name.


def compare(
    old: Sequence[Mapping[str, Any]], new: Sequence[Mapping[str, Any]], level: float = _LEVEL
) -> list[Change]:
    """Compares workloads with what an older benchmark measured of them.

    Each round counts in operations that the machine's matrix products do in its time, by their
    speed measured right after it, so that a slower minute of the machine is not a change. The
    interval is that of Hodges and Lehmann, which assumes no distribution: the rounds of either
    version are taken as independent, and as differing by a factor.

    Source: Hodges and Lehmann 1963; Mann and Whitney 1947 for the ranks.
    """
    checks.require(0 < level < 1, "level", "be in (0, 1)", level)
    for result in new:
        require_comparable(old, result["name"], len(result["seconds"]), level)
    before = {result["name"]: result for result in old}
    return [_change(before[result["name"]], result, level) for result in new]


def require_comparable(
    old: Sequence[Mapping[str, Any]], name: str, num_rounds: int, level: float = _LEVEL
) -> None:
    """Requires that rounds of a workload can be compared with older results."""
    before = {result["name"]: result for result in old}
    checks.one_of("NAME", name, before)
    result = before[name]
    rule = "have the seconds of each round, as `fedjax-dp bench NAME --json` writes them"
    has_rounds = "seconds" in result and "gemm_gflops" in result
    checks.require(has_rounds, f"the older results of {name}", rule, sorted(result))
    counts = len(result["seconds"]), num_rounds
    rule = f"have more rounds for an interval of {level:.0%}: 4 in both are enough for 95%"
    checks.require(_rank(*counts, level) > 0, f"results of {name}", rule, counts)


def _change(old: Mapping[str, Any], new: Mapping[str, Any], level: float) -> Change:
    name = new["name"]
    for key in _SAME:
        rule = f"be {old[key]}, as in the older results"
        checks.require(new[key] == old[key], f"{key} of {name}", rule, new[key])
    earlier, later = _work(old), _work(new)
    rank = _rank(len(earlier), len(later), level)
    ratios = np.sort(np.divide.outer(later, earlier).ravel())
    low, high = float(ratios[rank - 1]), float(ratios[-rank])
    verdict = "faster" if high < 1 else "slower" if low > 1 else "within noise"
    once = {key: new[key] / old[key] for key in _ONCE if old.get(key) and new.get(key)}
    return Change(name, float(np.median(ratios)), low, high, verdict, once)


def _work(result: Mapping[str, Any]) -> np.ndarray:
    """Returns the operations that products would have done in each round's time."""
    return np.asarray(result["seconds"]) * np.asarray(result["gemm_gflops"])


def _rank(first: int, second: int, level: float) -> int:
    """Counts the smallest, and largest, pairs that an interval leaves out, plus one; 0 if none."""
    # How many orders of two samples have a Mann-Whitney statistic of 0, 1, ...: the coefficients
    # of a Gaussian binomial.
    orders = np.zeros(first * second + 1, object)
    orders[0] = 1
    for i in range(1, first + 1):
        for j in range(len(orders) - 1, second + i - 1, -1):
            orders[j] -= orders[j - second - i]
        for j in range(i, len(orders)):
            orders[j] += orders[j - i]
    share = np.cumsum(orders) / math.comb(first + second, first)
    return int(np.sum(share.astype(float) <= (1 - level) / 2))
