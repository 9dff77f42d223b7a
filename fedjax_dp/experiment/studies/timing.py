"""Times rounds of a workload, and compares them with the machine's peak and with other versions."""

import math
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_dp.core import checks
from fedjax_dp.engine.execution.compile import Simulation, simulation
from fedjax_dp.engine.layout import ExecutionConfig
from fedjax_dp.engine.record import as_metrics
from fedjax_dp.experiment.assembly.assemble import assemble
from fedjax_dp.experiment.schema.config import Config
from fedjax_dp.experiment.studies.projection import Network, projection
from fedjax_dp.experiment.studies.workloads import WORKLOADS, Prepared, Workload, prepare
from fedjax_dp.models.cost import training_cost

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
