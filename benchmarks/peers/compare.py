"""Compares all implementations on all workloads: makes environments, measures, checks, writes.

    python -m benchmarks.peers.compare [--repeats 3] [--peers ours pfl ...] [WORKLOAD ...]

Runs in the environment of fedjax_dp; peers run in theirs, which are made if they are missing
(`install.py`). The runners of a workload are started one after another, each compiles and warms up
in a round that is not counted, and then they are asked for one round at a time, in an order that
rotates, with a matrix product measured before each. Runners that wait use no core. Results are
written after each workload (`book.py`); if the command is stopped, the same command continues.
"""

import argparse
import datetime
import json
import os
import pathlib
import select
import signal
import statistics
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

# Runners are scripts in other environments: what they import too is found beside them.
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

import install
import problem as problems
import report
from book import Book

HERE = pathlib.Path(__file__).resolve().parent


class Entry(NamedTuple):
    """One implementation in the line-up of a workload.

    Attributes:
      peer: "ours" or the name of an environment.
      variant: which way, where a peer has several.
      clients: the cohort where the whole one takes too long, else None.
    """

    peer: str
    variant: str = ""
    clients: int | None = None

    @property
    def title(self) -> str:
        return f"{self.peer} {self.variant}".strip()


OURS = Entry("ours")
_CLIENT_LEVEL = (OURS, Entry("pfl"), Entry("fedjax"), Entry("flower"))
_RECORD_LEVEL = (OURS, Entry("opacus", "hooks"), Entry("opacus", "ghost"))
_CNN = (*_CLIENT_LEVEL, Entry("drjax", clients=10))
_LOGISTIC = (OURS, Entry("pfl"), Entry("fedjax"), Entry("drjax"), Entry("flower", clients=200))
LINEUP: dict[str, tuple[Entry, ...]] = {
    "W1": _CNN,
    "W1dp": _CNN,
    "W2": _CNN,
    "W2dp": _CNN,
    "W3": (*_RECORD_LEVEL, Entry("jax_privacy", clients=5)),
    "W3nodp": (OURS, Entry("opacus", "plain"), Entry("pfl"), Entry("fedjax")),
    "W4": _LOGISTIC,
    "W4dp": _LOGISTIC,
    "W5": (*_RECORD_LEVEL, Entry("jax_privacy", "1", clients=1)),
    "W5nodp": (OURS, Entry("opacus", "plain"), Entry("fedjax")),
}
CHECKED_CLIENTS = {"W1": 10, "W2": 10, "W3": 2, "W4": 200, "W5": 1}
"""Clients whose mean delta is compared, by the first two letters of the workload."""


class Failed(Exception):
    """A runner gave no answer."""


class Runner:
    """A process that runs one implementation of one workload."""

    def __init__(
        self,
        entry: Entry,
        python: pathlib.Path,
        problem: pathlib.Path,
        options: Any,
        *,
        is_double: bool = False,
    ):
        script = "ours.py" if entry.peer == "ours" else f"run_{entry.peer}.py"
        command = [str(python), str(HERE / script), str(problem)]
        if entry.clients is not None:
            command += ["--clients", str(entry.clients)]
        if entry.variant:
            command += ["--variant", entry.variant]
        if is_double:
            command += ["--double"]
        self.entry, self._limit = entry, options.limit
        logs = options.folder / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        self._log = logs / f"{problem.stem}-{entry.title.replace(' ', '-')}.log"
        cores = str(len(os.sched_getaffinity(0)))
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=os.environ | {"OMP_NUM_THREADS": cores, "MKL_NUM_THREADS": cores},
                start_new_session=True,
            )
        self.times: list[float] = []
        self.differences: dict[int, float] = {}
        self.double_difference: float | None = None
        try:
            self.ready = self._answer()
        except BaseException:
            self.kill()
            raise

    def ask(self, **command: Any) -> dict[str, Any]:
        try:
            self._process.stdin.write((json.dumps(command) + "\n").encode())
            self._process.stdin.flush()
        except BrokenPipeError:
            raise Failed(self._last_words()) from None
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        readable, _, _ = select.select([self._process.stdout], [], [], self._limit)
        if not readable:
            raise Failed(f"no answer within {self._limit:g} s")
        line = self._process.stdout.readline()
        if not line:
            raise Failed(self._last_words())
        return json.loads(line)

    def _last_words(self) -> str:
        lines = [line.strip() for line in self._log.read_text(errors="replace").splitlines()]
        telling = [line for line in lines if "Error" in line] or [x for x in lines if x] or ["?"]
        return telling[-1][:200]

    def quit(self) -> float:
        """Ends the process in order; returns its peak memory in MiB."""
        peak = self.ask(do="quit")["peak_rss_mb"]
        self._process.stdin.close()
        self._process.wait(timeout=60)
        return peak

    def kill(self) -> None:
        """Ends the process and what it started, if it still runs."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


def peers_of(workloads: Iterable[str], asked: Sequence[str] | None) -> list[str]:
    """Lists the peers that need an environment, in the order in which they first run."""
    entries = (entry for name in workloads for entry in LINEUP[name])
    named = (e.peer for e in entries if e != OURS and (not asked or e.peer in asked))
    return list(dict.fromkeys(named))


def environments(peers: Iterable[str], venvs: pathlib.Path, *, make: bool = True) -> dict[str, str]:
    """Makes the environments that are missing.

    Args:
      peers: their names.
      venvs: the folder of all environments.
      make: whether to make any; else those that are missing count as not installed.

    Returns:
      By peer, why it has no environment.
    """
    reasons: dict[str, str] = {}
    for peer in peers:
        if install.is_installed(peer, venvs):
            continue
        if not make:
            reasons[peer] = "not installed"
            continue
        _say(f"{peer}: making its environment")
        reason = install.install(peer, venvs)
        if reason is not None:
            reasons[peer] = f"its environment could not be made: {reason}"
            _say(f"{peer}: {reasons[peer]}")
    return reasons


def run_workload(
    name: str, options: Any, missing: Mapping[str, str]
) -> tuple[list[report.Row], list[str]]:
    """Measures and checks one workload.

    Args:
      name: the workload.
      options: of the command.
      missing: peers without an environment, and why.

    Returns:
      A row for each implementation that ran, and a note for each that did not.
    """
    from prepare import ensure

    from fedjax_dp.experiment.studies.timing import gemm_peak

    path = ensure(name, options.folder)
    num_checked = 1 if options.brief else CHECKED_CLIENTS[name[:2]]
    reference = _reference(path, num_checked, options.brief)
    runners: list[Runner] = []
    notes: list[str] = []
    peaks: list[float] = []
    rows: list[report.Row] = []

    def attempt(runner: Runner, action: Any) -> None:
        try:
            action()
        except (Failed, subprocess.TimeoutExpired) as error:
            notes.append(f"{runner.entry.title}: {error}")
            runner.kill()
            runners.remove(runner)

    try:
        for entry in LINEUP[name]:
            if options.peers and entry.peer not in options.peers:
                continue
            if entry.peer in missing:
                notes.append(f"{entry.title}: {missing[entry.peer]}")
                continue
            try:
                runners.append(Runner(entry, _python_of(entry.peer, options), path, options))
            except Failed as error:
                notes.append(f"{entry.title}: {error}")
                continue
            _say(f"{name} {entry.title}: ready in {runners[-1].ready['setup_seconds']:.1f} s")
        for i in range(options.repeats):
            turn = i % max(1, len(runners))
            for runner in (*runners[turn:], *runners[:turn]):
                peaks.append(gemm_peak(0.2))
                attempt(runner, lambda r=runner: r.times.append(r.ask(do="round")["seconds"]))
        for runner in list(runners):
            attempt(runner, lambda r=runner: _check(r, reference, num_checked, path, options))
        operations, whole = _work(path)
        for runner in list(runners):
            attempt(
                runner,
                lambda r=runner: rows.append(
                    _row(name, r, r.quit(), statistics.median(peaks), operations, whole, options)
                ),
            )
    finally:
        for runner in runners:
            runner.kill()
    for row in report.with_ratios(rows):
        _say(f"  {row.implementation}: {row.ms_per_client:.4g} ms/client, {row.verdict}")
        if row.seconds_max > 1.5 * row.seconds_min:
            _say(f"    {row.seconds_min:.3g} to {row.seconds_max:.3g} s: is the machine quiet?")
    return report.with_ratios(rows), notes


def _check(
    runner: Runner,
    reference: dict[int, problems.Params],
    num_clients: int,
    problem: pathlib.Path,
    options: Any,
) -> None:
    path = options.folder / "delta.npz"

    def difference(runner: Runner, steps: int) -> float:
        runner.ask(do="delta", clients=num_clients, steps=steps, path=str(path))
        return problems.difference(problems.load_delta(path), reference[steps])

    runner.differences = {steps: difference(runner, steps) for steps in reference}
    if runner.differences[1] <= report.TOLERANCE:
        return
    python = _python_of(runner.entry.peer, options)
    few = runner.entry._replace(clients=num_clients)
    double = Runner(few, python, problem, options, is_double=True)
    try:
        runner.double_difference = difference(double, 1)
        double.quit()
    finally:
        double.kill()


def _reference(path: pathlib.Path, num_clients: int, is_brief: bool) -> dict[int, problems.Params]:
    output = path.with_name(f"{path.stem}.reference.npz")
    if not output.exists():
        _say(f"{path.stem}: computing the float64 reference of {num_clients} clients")
        unfinished = output.with_name(f"{path.stem}.unfinished.npz")
        script = [str(HERE / "reference.py"), str(path), "--clients", str(num_clients)]
        script += ["--steps", "1"] if is_brief else []
        # Small products in float64 gain nothing from an accelerator.
        on_cpu = os.environ | {"JAX_PLATFORMS": "cpu"}
        command = [sys.executable, *script, "--output", str(unfinished)]
        subprocess.run(command, check=True, env=on_cpu)
        unfinished.rename(output)
    found: dict[int, problems.Params] = {}
    for name, value in problems.load_delta(output).items():
        steps, _, parameter = name.partition("/")
        found.setdefault(int(steps), {})[parameter] = value
    return found


def _work(path: pathlib.Path) -> tuple[float, int]:
    """Counts the operations of one client's round, and the clients of the whole workload."""
    import jax

    from fedjax_dp.experiment.studies.workloads import WORKLOADS
    from fedjax_dp.models import registry
    from fedjax_dp.models.cost import training_cost

    workload = WORKLOADS[path.stem]
    example = {"x": jax.ShapeDtypeStruct(workload.shape, "float32")}
    model = registry.build(workload.model, example, workload.num_classes, **workload.model_options)
    num_steps = workload.num_steps or workload.examples_per_client // workload.batch_size
    examples = num_steps * workload.batch_size
    cost = training_cost(model, workload.shape)
    return cost.direct_operations * examples, workload.num_clients


def _row(
    name: str,
    runner: Runner,
    peak_rss_mb: float,
    gemm_peak_gflops: float,
    operations: float,
    whole_cohort: int,
    options: Any,
) -> report.Row:
    clients, times = runner.ready["clients"], report.summary(runner.times)
    steps = sorted(runner.differences)
    first, last = runner.differences[steps[0]], runner.differences[steps[-1]]
    versions = ", ".join(f"{k} {v}" for k, v in runner.ready["versions"].items())
    return report.Row(
        workload=name,
        implementation=runner.entry.title,
        clients=clients,
        whole_cohort=whole_cohort,
        steps=runner.ready["steps"],
        repeats=len(runner.times),
        **times,
        ms_per_client=times["seconds"] / clients * 1e3,
        ours_over_this=None,
        gflops=operations * clients / times["seconds"] / 1e9,
        gemm_peak_gflops=gemm_peak_gflops,
        first_round_seconds=runner.ready["first_round_seconds"],
        peak_rss_mb=peak_rss_mb,
        step_difference=first,
        round_difference=last,
        double_difference=runner.double_difference,
        verdict=report.verdict(first, last, runner.double_difference),
        date=datetime.date.today().isoformat(),
        hardware=options.hardware,
        versions=versions,
    )


def _python_of(peer: str, options: Any) -> pathlib.Path:
    is_here = peer in ("ours", *options.here)
    return pathlib.Path(sys.executable) if is_here else install.python_of(peer, options.venvs)


def hardware_class(num_cores: int, flags: str) -> str:
    """Names the kind of machine, from the number of cores and the flags of the processor."""
    names = {"avx512f": "AVX-512", "avx2": "AVX2", "asimd": "NEON"}
    known = set(flags.split())
    vectors = next((name for flag, name in names.items() if flag in known), "no vector unit known")
    return f"{num_cores} CPU cores, {vectors}"


def _say(text: str) -> None:
    print(text, flush=True)


def compare(options: Any) -> list[str]:
    """Measures what the same run has left, and writes after each workload.

    Returns:
      What did not run.
    """
    settings = {
        "peers": options.peers,
        "repeats": options.repeats,
        "limit": options.limit,
        "hardware": options.hardware,
    }
    book = Book(options.results, options.workloads, settings, again=options.again)
    if len(book.left) < len(options.workloads):
        _say(f"continues a run that was stopped; left: {', '.join(book.left)}")
    peers = [peer for peer in peers_of(book.left, options.peers) if peer not in options.here]
    missing = environments(peers, options.venvs, make=not options.installed)
    for name in book.left:
        try:
            rows, notes = run_workload(name, options, missing)
        except (subprocess.CalledProcessError, OSError) as error:
            rows, notes = [], [f"the whole workload: {error}"]
        book.put(name, rows, notes)
    return book.notes


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("workloads", nargs="*", metavar="WORKLOAD", help="all where left out")
    parser.add_argument("--peers", nargs="+", help="all where left out; ours is one")
    parser.add_argument("--repeats", type=int, default=3, help="timed rounds of each, 3")
    parser.add_argument("--cores", type=int, default=2, help="of all that runs, 2")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds to wait for an answer")
    parser.add_argument("--installed", action="store_true", help="make no environment")
    parser.add_argument("--here", nargs="+", default=(), help="peers of this environment itself")
    parser.add_argument("--brief", action="store_true", help="check one step of one client alone")
    parser.add_argument("--again", action="store_true", help="continue no run, measure everything")
    parser.add_argument("--venvs", type=pathlib.Path, default=HERE / ".venvs")
    parser.add_argument("--folder", type=pathlib.Path, default=HERE / ".work")
    parser.add_argument("--results", type=pathlib.Path, default=HERE.parent / "results")
    options = parser.parse_args(arguments)
    options.workloads = list(dict.fromkeys(options.workloads)) or list(LINEUP)
    for what, asked, known in (
        ("workload", options.workloads, list(LINEUP)),
        ("peer", options.peers or [], [OURS.peer, *install.PEERS]),
        ("peer", options.here, list(install.PEERS)),
    ):
        if unknown := [name for name in asked if name not in known]:
            parser.error(f"unknown {what} {unknown[0]!r}; there are {', '.join(known)}")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    options = _options(arguments)
    # Runners are ended on the way out, whatever ends the program.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    # Before JAX starts its threads; what is started from here inherits it.
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: options.cores])
    information = pathlib.Path("/proc/cpuinfo")
    flags = information.read_text(encoding="utf-8") if information.exists() else ""
    options.hardware = hardware_class(len(os.sched_getaffinity(0)), flags)
    options.folder = options.folder.resolve()
    options.venvs = options.venvs.resolve()
    for note in compare(options):
        _say(f"did not run: {note}")
    _say(f"results are in {options.results / 'peers.md'}")


if __name__ == "__main__":
    main()
