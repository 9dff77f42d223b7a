"""Takes one measurement: `-m benchmarks.accelerator.measurements JSON ROWS` appends
its rows to a file, as lines of JSON.

The JSON object names a function of `MEASUREMENTS` under "do", and its arguments.
"""

import collections
import csv
import json
import os
import pathlib
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.accelerator.clock import PRECISIONS, best, timed
from fedjax_dp.core.backend import facts
from fedjax_dp.core.choices import Products, no_split

ROOT = pathlib.Path(__file__).resolve().parents[2]
Rows = Iterator[dict[str, Any]]


def machine() -> Rows:
    """Finds what figures depend on."""
    device = jax.devices()[0]
    stats = device.memory_stats() or {}
    yield {
        "device": device.device_kind,
        "devices": jax.device_count(),
        "device_memory_mb": round(stats.get("bytes_limit", 0) / 2**20) or None,
        "backend": jax.default_backend(),
        # The nearest to a driver's version that JAX knows.
        "platform": device.client.platform_version.strip().replace("\n", ", "),
        "jax": jax.__version__,
        "python": platform.python_version(),
        "cores": os.cpu_count(),
    }


def tests(files: Sequence[str], options: Sequence[str] = ()) -> Rows:
    """Runs files of the quick suite; a row for each, and an error if a test fails."""
    import pytest

    found: dict[str, Any] = collections.defaultdict(collections.Counter)
    names: list[str] = []

    class Counting:
        def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
            count = found[report.nodeid.partition("::")[0]]
            count["seconds"] += report.duration
            is_call = report.when == "call"
            if report.failed:
                names.append(report.nodeid)
            if report.failed or is_call or report.skipped:
                count[report.outcome] += 1

    os.chdir(ROOT)
    chosen = ["-m", "not slow", "-p", "no:cacheprovider", *options, *files]
    code = pytest.main(chosen, plugins=[Counting()])
    for file, count in found.items():
        numbers = {key: count[key] for key in ("passed", "failed", "skipped")}
        yield {"file": file, **numbers, "seconds": round(count["seconds"], 2)}
    if names or code:
        raise SystemExit(f"Error: {len(names)} failed, code {int(code)}: {' '.join(names)}")


def workload(
    name: str,
    rounds: int,
    each: Sequence[dict[str, Any]] = ({},),
    together: int | None = None,
    products: Products = "exact",
) -> Rows:
    """Times rounds one by one, with changed fields, and `together` in one call."""
    from fedjax_dp.engine import ExecutionConfig, simulation
    from fedjax_dp.experiment.studies.timing import measure
    from fedjax_dp.experiment.studies.workloads import WORKLOADS, prepare

    for changes in each:
        changes = {k: tuple(v) if isinstance(v, list) else v for k, v in changes.items()}
        execution = ExecutionConfig(rounds_per_call=1, products=products)
        found = measure(name, execution, rounds, **changes)
        named = {} if products == "exact" else {"products": products}
        yield found | changes | {"rounds_per_call": 1} | named
    if together is None:
        return
    changed = WORKLOADS[name]._replace(**changes)
    parts = prepare(changed)
    execution = ExecutionConfig(rounds_per_call=together)
    sim = simulation(parts.algorithm, parts.data, parts.participation, execution)
    key = jax.random.key(0)
    state = sim.run(sim.init(key), key, together)[0]
    seconds = []
    for _ in range(3):
        state, elapsed = timed(lambda state=state: sim.run(state, key, together)[0])
        seconds.append(elapsed / together)
    median = statistics.median(seconds)
    yield {
        "name": name,
        "about": changed.about,
        "rounds_per_call": together,
        "seconds_per_round": median,
        "seconds_per_round_min": min(seconds),
        "seconds_per_round_max": max(seconds),
        "clients_per_second": (changed.cohort or changed.num_clients) / median,
        "clients_per_chunk": sim.layout.chunk,
        **changes,
    }


def peaks(size: int, copied_mb: int) -> Rows:
    """Measures square products in each precision, and a pass that reads and writes memory."""
    for precision, (products, dtype) in PRECISIONS.items():
        if precision == "split" and no_split(facts()) is not None:
            continue
        a = jnp.ones((size, size), dtype)
        multiply = jax.jit(lambda a, b, p=products: jnp.dot(a, b, precision=p))
        seconds = best(lambda a=a, f=multiply: f(a, a))
        yield {"what": "product", "precision": precision, "gflops": 2 * size**3 / seconds / 1e9}
    x = jnp.zeros(copied_mb * 2**18, jnp.float32)
    negate = jax.jit(jnp.negative)
    seconds = best(lambda: negate(x))
    yield {"what": "copy", "precision": "float32", "gb_per_second": 2 * x.nbytes / seconds / 1e9}


def peers(peer: str, names: Sequence[str], rounds: int, venvs: str) -> Rows:
    """Compares ours with a peer by `benchmarks/peers/compare.py`, on the same device."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            *(sys.executable, str(ROOT / "benchmarks/peers/compare.py"), *names),
            *("--peers", "ours", peer, "--repeats", str(rounds), "--venvs", venvs),
            *("--folder", f"{folder}/work", "--results", f"{folder}/results"),
            *("--cores", str(os.cpu_count()), "--installed"),
        ]
        # Both processes hold the device at once.
        shared = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        subprocess.run(command, env=shared, check=True)
        with pathlib.Path(folder, "results/peers.csv").open(encoding="utf-8", newline="") as table:
            yield from csv.DictReader(table)


def layouts(**arguments: Any) -> Rows:
    """Times clients side by side."""
    from benchmarks.accelerator.layouts import rows

    yield from rows(**arguments)


def rounding(**arguments: Any) -> Rows:
    """Compares the errors of split products with their bound."""
    from benchmarks.accelerator.rounding import rows

    yield from rows(**arguments)


MEASUREMENTS: dict[str, Callable[..., Rows]] = {
    fn.__name__: fn for fn in (machine, tests, workload, layouts, peaks, rounding, peers)
}


def main() -> None:
    arguments, path = json.loads(sys.argv[1]), sys.argv[2]
    rows = MEASUREMENTS[arguments.pop("do")](**arguments)
    with open(path, "a", encoding="utf-8") as file:
        for row in rows:
            print(json.dumps(row), file=file, flush=True)


if __name__ == "__main__":
    main()
