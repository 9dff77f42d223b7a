"""Takes one measurement: `-m benchmarks.accelerator.measurements JSON ROWS` appends
its rows to a file, as lines of JSON.

The JSON object names a function of `MEASUREMENTS` under "do", and its arguments.
"""

import collections
import csv
import importlib.util
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_dp.core.backend import facts
from fedjax_dp.core.choices import no_split
from fedjax_dp.experiment.studies import measuring

ROOT = pathlib.Path(__file__).resolve().parents[2]
Rows = Iterator[dict[str, Any]]


def machine() -> Rows:
    """Finds what figures depend on."""
    yield measuring.machine()


def tests(
    files: Sequence[str], seconds: float, options: Sequence[str] = (), workers: int = 0
) -> Rows:
    """Runs files of the quick suite; a row for each, and an error if a test fails.

    After so many seconds from the first test the rest are left out, which is an error too.
    Workers share the device, where pytest-xdist is there.
    """
    import pytest

    found: dict[str, Any] = collections.defaultdict(collections.Counter)
    names: list[str] = []
    is_over = threading.Event()

    def end(*_: Any) -> None:
        is_over.set()
        pytest.exit(f"{seconds:g} s are over", returncode=0)

    class Counting:
        def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
            if not found:
                signal.signal(signal.SIGALRM, end)
                signal.setitimer(signal.ITIMER_REAL, seconds)
            count = found[report.nodeid.partition("::")[0]]
            count["seconds"] += report.duration
            is_call = report.when == "call"
            if report.failed:
                names.append(report.nodeid)
            if report.failed or is_call or report.skipped:
                count[report.outcome] += 1

    os.chdir(ROOT)
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    # Those of pyproject.toml ask for pytest-xdist.
    addopts = "-o", "addopts=-q --strict-markers --strict-config"
    chosen = [*addopts, "-m", "not slow", "-p", "no:cacheprovider", *options]
    if workers and importlib.util.find_spec("xdist"):
        chosen += ["-n", str(workers), "--dist", "loadgroup"]
    code = pytest.main([*chosen, *files], plugins=[Counting()])
    signal.setitimer(signal.ITIMER_REAL, 0)
    for file, count in found.items():
        numbers = {key: count[key] for key in ("passed", "failed", "skipped")}
        yield {"file": file, **numbers, "seconds": round(count["seconds"], 2)}
    if names or code:
        raise SystemExit(f"Error: {len(names)} failed, code {int(code)}: {' '.join(names)}")
    if is_over.is_set():
        raise SystemExit(f"Error: not all tests ran within {seconds:g} s; of those, none failed")


def rounds(**arguments: Any) -> Rows:
    """Times rounds of several workloads."""
    from benchmarks.accelerator.rounds import rows

    yield from rows(**arguments)


def flags(level: int, name: str, changes: dict[str, Any], rounds: int) -> Rows:
    """Times rounds that XLA has compiled with a level of autotuning."""
    # Read when JAX starts. What another level has chosen is kept beside compiled programs.
    flag = f"--xla_gpu_autotune_level={level}"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}".strip()
    jax.config.update("jax_compilation_cache_dir", None)
    from benchmarks.accelerator.rounds import rows

    for row in rows([{"name": name, "changes": changes}], rounds):
        yield {"what": flag, **row}


def cache(name: str, changes: dict[str, Any]) -> Rows:
    """Compiles the same rounds in two processes, which share a new folder of compiled programs."""
    asked = {"do": "rounds", "cases": [{"name": name, "changes": changes}], "rounds": 1}
    with tempfile.TemporaryDirectory() as folder:
        for what in ("nothing is kept", "by the process before"):
            path = pathlib.Path(folder) / f"{what}.rows"
            started = time.perf_counter()
            subprocess.run(
                [
                    sys.executable,
                    "-m",
                    "benchmarks.accelerator.measurements",
                    json.dumps(asked),
                    path,
                ],
                env=os.environ | {"JAX_COMPILATION_CACHE_DIR": f"{folder}/programs"},
                check=True,
                cwd=ROOT,
            )
            whole = time.perf_counter() - started
            (row,) = map(json.loads, path.read_text(encoding="utf-8").splitlines())
            yield {"what": f"programs: {what}", **row, "seconds_of_the_process": whole}


def kernels(**arguments: Any) -> Rows:
    """Traces a round."""
    from benchmarks.accelerator.kernels import rows

    yield from rows(**arguments)


def peaks(size: int, copied_mb: int) -> Rows:
    """Measures square products in each precision, and a pass that reads and writes memory."""
    for precision, (products, dtype) in measuring.precisions_and_types().items():
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


def best(fn: Callable[[], Any], seconds: float = 1.0) -> float:
    """Measures the fastest call of those in `seconds`, after one that is not counted."""
    measuring.timed(fn)
    found: list[float] = []
    while sum(found) < seconds:
        found.append(measuring.timed(fn)[1])
    return min(found)


def peers(peer: str, names: Sequence[str], rounds: int, venvs: str, here: bool) -> Rows:
    """Times a peer by `benchmarks/peers/compare.py`; one step of a client is checked."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            *(sys.executable, str(ROOT / "benchmarks/peers/compare.py"), *names),
            *("--peers", peer, "--repeats", str(rounds), "--venvs", venvs, "--brief"),
            *("--folder", f"{folder}/work", "--results", f"{folder}/results"),
            *("--cores", str(os.cpu_count()), "--installed", *(["--here", peer] if here else [])),
        ]
        # Several processes hold the device at once.
        shared = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        subprocess.run(command, env=shared, check=True)
        with pathlib.Path(folder, "results/peers.csv").open(encoding="utf-8", newline="") as table:
            found = list(csv.DictReader(table))
        yield from found
        if not found:
            words = (
                pathlib.Path(folder, "results/peers.md").read_text(encoding="utf-8").split("\n- ")
            )
            raise SystemExit(f"Error: {words[-1].strip()}")


def pfl(processes: Sequence[int], python: str, options: Sequence[str], rounds: int) -> Rows:
    """Times P1 of pfl-research, in several numbers of processes on the device."""
    script = ROOT / "benchmarks" / "peers" / "rate_pfl.py"
    for count in processes:
        command = [
            python,
            str(script),
            "--processes",
            str(count),
            "--rounds",
            str(rounds),
            *options,
        ]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
        if done.returncode:
            raise SystemExit(f"Error: pfl ended with {done.returncode} in {count} processes")
        yield json.loads(done.stdout.splitlines()[-1])


def layouts(**arguments: Any) -> Rows:
    """Times clients side by side."""
    yield from measuring.speeds(**arguments)


def rounding(**arguments: Any) -> Rows:
    """Compares the errors of split products with their bound."""
    from benchmarks.accelerator.rounding import rows

    yield from rows(**arguments)


MEASUREMENTS: dict[str, Callable[..., Rows]] = {
    fn.__name__: fn
    for fn in (
        machine, tests, rounds, flags, cache, kernels, layouts, peaks, rounding, peers, pfl,
    )
}  # fmt: skip


def main() -> None:
    arguments, path = json.loads(sys.argv[1]), sys.argv[2]
    rows = MEASUREMENTS[arguments.pop("do")](**arguments)
    with open(path, "a", encoding="utf-8") as file:
        for row in rows:
            print(json.dumps(row), file=file, flush=True)


if __name__ == "__main__":
    main()
