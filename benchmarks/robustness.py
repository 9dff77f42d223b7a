"""What runs survive: kills, full disks, two processes, a million clients, lost workers of sweeps.

Every run is a process of its own, `python -m fedjax_dp run`, and what it leaves is compared, bit
for bit, with what an undisturbed run leaves. A part that fails ends the script with status 1.

    python benchmarks/robustness.py [kills disk two million rounds workers] [--repeats 10]
    python benchmarks/robustness.py jax --python VENV/bin/python

The last runs the quick suite in another environment, such as one with the oldest JAX.
"""

import argparse
import contextlib
import json
import os
import pathlib
import random
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import orbax.checkpoint as ocp

# Noise at records and at the server, and cohorts and batches that are drawn at random.
RUN = (
    "--data.num_clients=3",
    "--run.rounds=60",
    "--run.checkpoint_every=7",
    "--run.evaluate_every=5",
    "--privacy.unit=both",
    "--algorithm.name=dp_fedavg",
    "--participation.sampler=poisson",
    "--participation.cohort_size=2",
    "--execution.clients_per_chunk=1",
    "--execution.devices=1",
)
WHOLE = ("metrics.jsonl", "privacy.json", "privacy.md", "config.toml")


def command(*words: str) -> list[str]:
    """The command line of a process of its own."""
    return [sys.executable, "-m", "fedjax_dp", *words]


def call(*words: str, **options: Any) -> subprocess.CompletedProcess:
    """Runs a command to its end."""
    return subprocess.run(command(*words), capture_output=True, text=True, check=False, **options)


def answer(done: subprocess.CompletedProcess) -> dict[str, Any]:
    """The document of a command that ran with `--json`."""
    return json.loads(done.stdout)


def saved(folder: pathlib.Path) -> tuple[dict[str, bytes], Any]:
    """The newest checkpoint as Orbax alone reads it: the bytes of its arrays, its ledgers."""
    with ocp.CheckpointManager((folder / "checkpoint").absolute()) as manager:
        found = manager.restore(
            manager.latest_step(),
            args=ocp.args.Composite(state=ocp.args.StandardRestore(), extra=ocp.args.JsonRestore()),
        )
    arrays = {name: np.asarray(array).tobytes() for name, array in found["state"].items()}
    return arrays, found["extra"]["ledgers"]


def differences(folder: pathlib.Path, other: pathlib.Path) -> list[str]:
    """What differs between two runs, but for the time that they took and warnings of damage."""
    found = [name for name in WHOLE if (folder / name).read_bytes() != (other / name).read_bytes()]
    summaries = [json.loads((each / "summary.json").read_text()) for each in (folder, other)]
    for name in summaries[0].keys() | summaries[1].keys():
        may_differ = name.startswith("seconds") or name == "warnings"
        if not may_differ and summaries[0].get(name) != summaries[1].get(name):
            found.append(f"summary.json: {name}")
    return found + (["checkpoint"] if saved(folder) != saved(other) else [])


def rounds_in(folder: pathlib.Path) -> int:
    """How many rounds are logged."""
    path = folder / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


class Failed(Exception):
    """A part that did not hold."""


def require(condition: bool, text: str) -> None:
    """Ends a part that does not hold."""
    if not condition:
        raise Failed(text)


def started(folder: pathlib.Path, *words: str) -> subprocess.Popen:
    """A run that has its folder, in which its work begins."""
    process = subprocess.Popen(
        command("run", *words), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    while not (folder / "config.toml").exists() and process.poll() is None:
        time.sleep(0.01)
    return process


def undisturbed(folder: pathlib.Path) -> tuple[pathlib.Path, float]:
    """A run that nothing disturbs, made once; gives its folder, and its seconds from there on."""
    whole, file = folder / "undisturbed", folder / "seconds"
    # The first compiles, the second is as fast as those that are disturbed.
    for run in () if whole.exists() else (folder / "first", whole):
        process = started(run, *RUN, "--output", str(run))
        begun = time.monotonic()
        require(process.wait() == 0, "an undisturbed run failed")
        file.write_text(str(time.monotonic() - begun))
    return whole, float(file.read_text())


def killed(process: subprocess.Popen) -> bool:
    """Kills a process; gives whether it was still at work."""
    process.send_signal(signal.SIGKILL)
    return process.wait() == -signal.SIGKILL


def disturbed(run: pathlib.Path, by_clock: bool, seconds: float, rng: random.Random) -> list[int]:
    """Kills a run once or twice; gives the rounds logged at each, none if it was over before."""
    logged = []
    for _ in range(rng.choice((1, 1, 2))):
        words = ("--resume", str(run)) if run.exists() else (*RUN, "--output", str(run))
        process = started(run, *words)
        # At any time from the folder on, or from any round on.
        wanted, until = rng.randrange(60), time.monotonic() + rng.uniform(0.0, 1.0) * seconds
        while time.monotonic() < until if by_clock else rounds_in(run) < wanted:
            if process.poll() is not None:
                break
            time.sleep(0.001)
        time.sleep(0 if by_clock else rng.uniform(0.0, 0.1))
        if not killed(process):
            require(process.returncode == 0, f"a run ended with status {process.returncode}")
            return []
        logged.append(rounds_in(run))
    return logged


def kills(folder: pathlib.Path, repeats: int) -> list[str]:
    """SIGKILL at random times, some twice; resumed to the same bits.

    A run that is over before its kill is not counted, and another is drawn in its place.
    """
    whole, seconds = undisturbed(folder)
    rng, times, over = random.Random(0), [], 0
    while len(times) < repeats:
        run = folder / f"killed-{len(times) + over}"
        logged = disturbed(run, len(times) % 2 == 1, seconds, rng)
        if not logged:
            over += 1
            continue
        done = call("run", "--resume", str(run), "--json")
        require(done.returncode == 0, f"killed after {logged} rounds: {done.stderr}")
        found = differences(run, whole)
        require(not found, f"killed after {logged} rounds, differs in {found}")
        times.append(" and ".join(map(str, logged)))
    return [
        f"{repeats} of {repeats} runs that SIGKILL ended were resumed to the bits of the "
        f"undisturbed one (60 rounds, {seconds:.1f} s from its folder on). {over} others were over "
        "before their kill and do not count.",
        f"Rounds logged when they were killed: {'; '.join(times)}.",
    ]


@contextlib.contextmanager
def small_disk(folder: pathlib.Path, kibibytes: int) -> Iterator[Callable[[int], None]]:
    """A file system in memory of a size; gives what changes it."""
    folder.mkdir()
    options = ["-t", "tmpfs", "tmpfs", str(folder)]
    subprocess.run(["mount", "-o", f"size={kibibytes}k", *options], check=True)

    def resize(size: int) -> None:
        subprocess.run(["mount", "-o", f"remount,size={size}k", str(folder)], check=True)

    try:
        yield resize
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def disk(folder: pathlib.Path, repeats: int) -> list[str]:
    """A disk that fills up at several points; resumed to the same bits once there is space."""
    whole, _ = undisturbed(folder)
    size = sum(path.stat().st_size for path in whole.rglob("*") if path.is_file()) // 1024
    lines = [f"An undisturbed folder has {size} KiB."]
    for kibibytes in (16, 128, 256, 340, 420):
        with small_disk(folder / f"disk-{kibibytes}", kibibytes) as resize:
            run = folder / f"disk-{kibibytes}" / "run"
            done = call("run", *RUN, "--output", str(run), "--json")
            logged, text = rounds_in(run), answer(done).get("error", "")
            if done.returncode == 0:
                lines.append(f"{kibibytes} KiB: enough.")
                require(not differences(run, whole), "a run on a small disk differs")
                continue
            require(done.returncode == 2 and "no room is left on the disk" in text, done.stderr)
            require("Traceback" not in done.stderr, done.stderr)
            resize(65536)
            has_begun = (run / "config.toml").exists()
            words = ["--resume", str(run)] if has_begun else [*RUN, "--output", str(run)]
            done = call("run", *words, "--json")
            require(done.returncode == 0, done.stderr)
            require(not differences(run, whole), f"{kibibytes} KiB: {differences(run, whole)}")
            how = "resumed" if has_begun else "started again"
            lines.append(
                f"{kibibytes} KiB: status 2 after {logged} rounds, one line; with more space {how} "
                "to the same bits."
            )
    limit = 4096

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    run = folder / "limited"
    done = call("run", *RUN, "--output", str(run), "--json", preexec_fn=limited)
    require(done.returncode == 2 and "Traceback" not in done.stderr, done.stderr)
    text = answer(done)["error"].replace(str(folder), "DIR")
    done = call("run", "--resume", str(run), "--json")
    require(done.returncode == 0, done.stderr)
    require(not differences(run, whole), "a run under a limit of file sizes differs")
    return [
        *lines,
        f"Files limited to {limit} bytes: status 2, `{text}`; resumed to the same bits.",
    ]


def two(folder: pathlib.Path, repeats: int) -> list[str]:
    """Two processes on one folder, started together or one beside the other; two without."""
    whole, _ = undisturbed(folder)
    rng = random.Random(1)

    def refused(run: pathlib.Path, status: int, output: str) -> bool:
        require(not differences(run, whole), f"two processes differ: {differences(run, whole)}")
        if status:
            text = json.loads(output)["error"]
            known = ("one process at a time", "a new or an empty folder")
            require(status == 2 and any(each in text for each in known), text)
        return status == 2

    together = 0
    for i in range(repeats // 2):
        run, processes = folder / f"together-{i}", []
        for _ in range(2):
            words = command("run", *RUN, "--output", str(run), "--json")
            processes.append(
                subprocess.Popen(
                    words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
                )
            )
            time.sleep(rng.uniform(0, 0.2))
        said = [process.communicate()[0] for process in processes]
        statuses = [process.returncode for process in processes]
        require(sorted(statuses) == [0, 2], f"{statuses}: {said}")
        together += sum(map(refused, [run] * 2, statuses, said))
    beside = 0
    for i in range(repeats // 2):
        run = folder / f"beside-{i}"
        first = started(run, *RUN, "--output", str(run))
        # It holds its folder for as long as the other needs to see that.
        first.send_signal(signal.SIGSTOP)
        done = call("run", "--resume", str(run), "--json")
        first.send_signal(signal.SIGCONT)
        require(first.wait() == 0, "the run at work failed")
        beside += refused(run, done.returncode, done.stdout)
    require(beside == repeats // 2, f"{beside} resumed beside a run at work were refused")
    own = folder / "own"
    own.mkdir()
    processes = [
        subprocess.Popen(
            command("run", *RUN, "--run.name=pair", "--quiet"),
            stdout=subprocess.PIPE,
            text=True,
            cwd=own,
        )
        for _ in range(2)
    ]
    names = {process.communicate()[0].strip() for process in processes}
    require(names == {"runs/pair-001", "runs/pair-002"}, str(names))
    return [
        f"{repeats // 2} pairs started together on one folder: one of each runs, the other ends "
        "with status 2 and one line; the folder has the bits of an undisturbed run.",
        f"{beside} of {repeats // 2} resumed beside a run at work were refused in the same way.",
        "Two without a folder took one each.",
    ]


def million(folder: pathlib.Path, repeats: int) -> list[str]:
    """A million clients of 20 examples on disk: DP-FedAvg and SCAFFOLD by exact Poisson cohorts."""
    store = folder / "store"
    store.mkdir()
    num_clients, size, num_features, block = 1_000_000, 20, 20, 1_000_000
    rows = num_clients * size
    np.save(store / "offsets.npy", np.arange(num_clients + 1) * size)
    shapes = {"x": (rows, num_features), "y": (rows,)}
    opened = {
        name: np.lib.format.open_memmap(
            store / f"{name}.npy", mode="w+", dtype=np.float32, shape=shape
        )
        for name, shape in shapes.items()
    }
    rng = np.random.default_rng(0)
    for start in range(0, rows, block):
        x = rng.random((block, num_features), dtype=np.float32) - 0.5
        opened["x"][start : start + block] = x
        opened["y"][start : start + block] = x[:, 0] + x[:, 1] > 0
    for array in opened.values():
        array.flush()
    lines = []
    for name in ("dp_fedavg", "scaffold"):
        done = subprocess.run(
            [sys.executable, __file__, "--of-million", name, "--folder", str(store)],
            capture_output=True,
            text=True,
            check=False,
        )
        require(done.returncode == 0, done.stderr)
        lines.append(done.stdout.strip().splitlines()[-1])
    for path in store.glob("*.npy"):
        path.unlink()
    return lines


def of_million(name: str, store: pathlib.Path) -> None:
    """Twenty rounds of one algorithm on the population of a store; prints a line."""
    import jax
    import jax.numpy as jnp

    import fedjax_dp as fdp

    started = time.perf_counter()
    data = fdp.FederatedData.open(store)
    model = fdp.Model.from_functions(
        lambda key: {"w": jnp.zeros(20), "b": jnp.zeros(())},
        lambda params, x: x @ params["w"] + params["b"],
        loss="sigmoid_binary_cross_entropy",
    )
    local = fdp.LocalConfig(learning_rate=0.5, batch_size=10, num_epochs=1)
    trainer = fdp.local_trainer(model, local)
    if name == "scaffold":
        algorithm = fdp.scaffold(model, trainer, num_clients=data.num_clients)
    else:
        mean = fdp.gaussian_mean(clip_norm=1.0, noise_multiplier=1.0, expected_cohort_size=1000)
        algorithm = fdp.dp_fedavg(model, trainer, aggregator=mean)
    cohorts = fdp.participation(fdp.poisson(), data.num_clients, cohort_size=1000)
    simulation = fdp.simulation(algorithm, data, cohorts)
    key = jax.random.key(0)
    state = jax.block_until_ready(simulation.compile(simulation.init(key), key))
    ready = time.perf_counter() - started
    started = time.perf_counter()
    state, record, info = simulation.run(state, key, 20)
    jax.block_until_ready(state)
    seconds = (time.perf_counter() - started) / 20
    require(bool(np.all(np.isfinite(info.training.train_loss))), "a loss is not finite")
    loss = info.training.train_loss
    text = f"{name}: ready after {ready:.1f} s, {seconds:.3f} s a round, "
    text += f"{np.min(record.num_drawn)} to {np.max(record.num_drawn)} clients a round, "
    text += f"training loss {loss[0]:.3f} to {loss[-1]:.3f}, "
    if name == "dp_fedavg":
        started = time.perf_counter()
        ledger = fdp.PrivacyAccounting(simulation)
        ledger.charge(record)
        spent = ledger.epsilon({"client": 1e-7})["client"]
        text += f"ε = {float(np.max(spent)):.3f} at δ = 1e-7 after "
        text += f"{time.perf_counter() - started:.1f} s, "
    print(f"{text}{peak_of_this() / 2**20:.0f} MiB at most.")


def peak_of_this() -> int:
    """The largest memory that this process had, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def rounds(folder: pathlib.Path, repeats: int) -> list[str]:
    """10,000 rounds of a small model; memory beside that of 1,000, killed once and resumed."""
    words = ("--data.num_clients=3", "--execution.clients_per_chunk=1", "--privacy.unit=both")
    words += ("--algorithm.name=dp_fedavg", "--participation.sampler=poisson")
    words += ("--participation.cohort_size=2", "--training.num_steps=1")
    words += ("--run.evaluate_every=500", "--run.checkpoint_every=500")
    code = "import resource, sys; from fedjax_dp.cli.main import main\n"
    code += "try: main()\nfinally: print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, "
    code += "file=sys.stderr)"
    lines, whole = [], folder / "rounds-10000"
    for count in (1000, 10_000):
        run, started = folder / f"rounds-{count}", time.monotonic()
        line = ["run", *words, f"--run.rounds={count}", "--output", str(run), "--json"]
        done = subprocess.run(
            [sys.executable, "-c", code, *line], capture_output=True, text=True, check=False
        )
        require(done.returncode == 0, done.stderr)
        seconds, peak = time.monotonic() - started, int(done.stderr.split()[-1]) / 1024
        require(rounds_in(run) == count, f"{rounds_in(run)} rounds are logged")
        shown = len(re.findall(r"^round ", done.stderr, re.MULTILINE))
        size = sum(path.stat().st_size for path in run.rglob("*") if path.is_file()) / 2**20
        spent = answer(done)["summary"]["epsilon"]
        lines.append(
            f"{count:,} rounds: {seconds:.0f} s, {peak:.0f} MiB at most, a folder of "
            f"{size:.1f} MiB, {shown} lines of progress, ε = {spent:.3f}."
        )
    run = folder / "rounds-killed"
    process = subprocess.Popen(
        command("run", *words, "--run.rounds=10000", "--output", str(run)),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    while rounds_in(run) < 6000 and process.poll() is None:
        time.sleep(0.05)
    require(killed(process), "the run was over before its kill")
    logged = rounds_in(run)
    done = call("run", "--resume", str(run), "--json")
    require(done.returncode == 0, done.stderr)
    require(not differences(run, whole), f"killed after {logged}: {differences(run, whole)}")
    return [*lines, f"Killed after {logged:,} rounds and resumed: the same bits."]


SMALL = ("--data.num_clients=3", "--run.rounds=40", "--run.checkpoint_every=5")
GRID = (
    *("--over", "training.batch_size=8,16", "--over", "training.learning_rate=0.1,0.2,0.5"),
    *("--over", "run.seed=0,1"),
)
SEARCH = ("--search=optuna", "--over", "training.learning_rate=0.01..1:log", "--trials=8")


def first_at_work(folder: pathlib.Path, rounds: int) -> int | None:
    """The process of the first worker that has completed so many rounds of its points."""
    for file in folder.glob(".workers-*/task-*.json"):
        with contextlib.suppress(OSError, ValueError):
            progress = json.loads(file.read_text())
            if progress["rounds"] >= rounds:
                return progress["process"]
    return None


def of_runs(folder: pathlib.Path) -> dict[str, Any]:
    """The table of a sweep and the metrics of its runs, but for the time that they took."""
    found: dict[str, Any] = {"table": (folder / "table.csv").read_text()}
    for file in folder.glob("*/metrics.jsonl"):
        rows = map(json.loads, file.read_text().splitlines())
        found[file.parent.name] = [
            {name: row[name] for name in row if not name.startswith("seconds")} for row in rows
        ]
    return found


def workers(folder: pathlib.Path, repeats: int) -> list[str]:
    """Twelve points and a search of eight on two workers, one of which SIGKILL ends in between."""
    lines = []
    for what, words, middle in (("grid", GRID, 120), ("search", SEARCH, 40)):
        found = dict[str, Any]()
        for on, is_killed in ((None, False), ("ray", False), ("ray", True), ("local", True)):
            name = f"{on or 'one process'}{', one worker killed' * is_killed}"
            output, started = folder / f"{what}-{len(found)}", time.monotonic()
            where = () if on is None else (f"--on={on}", "--workers=2")
            process = subprocess.Popen(
                command("sweep", *words, *SMALL, *where, "--output", str(output)),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
            while is_killed and process.poll() is None:
                if (worker := first_at_work(output, middle)) is not None:
                    os.kill(worker, signal.SIGKILL)
                    break
                time.sleep(0.02)
            said = process.communicate()[1]
            require(process.returncode == 0, said)
            lost = said.count("a worker died, and another resumes")
            require(lost == is_killed, f"{name}: {lost} workers died")
            found[name] = of_runs(output)
            num_runs = len(found[name]) - 1
            require(found[name] == found["one process"], f"{what}, {name}: another table")
            lines.append(f"{what} of {num_runs}, {name}: {time.monotonic() - started:.0f} s.")
    return [*lines, "All tables, and metrics of all runs, are those of one process."]


def of_jax(python: str, tests: list[str]) -> list[str]:
    """The quick suite, or some folders of it, in another environment."""
    code = "import jax, flax, optax; print(jax.__version__, flax.__version__, optax.__version__)"
    versions = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    root = pathlib.Path(__file__).parents[1]
    done = subprocess.run(
        [python, "-m", "pytest", "-p", "no:cacheprovider", *tests],
        capture_output=True,
        text=True,
        check=False,
        cwd=root,
    )
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    jax, flax, optax = versions.stdout.split()
    require(done.returncode == 0, "\n".join([*failed, *done.stdout.splitlines()[-1:]]))
    where = " ".join(tests)
    return [f"jax {jax}, flax {flax}, optax {optax}, {where}: {done.stdout.splitlines()[-1]}."]


PARTS = {
    **{"kills": kills, "disk": disk, "two": two, "million": million},
    **{"rounds": rounds, "workers": workers},
}


def main() -> None:
    """Runs the parts, and prints what each came to."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", help=", ".join([*PARTS, "jax"]))
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--folder", type=pathlib.Path, help="where runs go; a temporary one if not")
    parser.add_argument("--python", default=sys.executable, help="of the environment for `jax`")
    parser.add_argument("--tests", nargs="+", default=["tests"], help="of the suite, for `jax`")
    parser.add_argument("--of-million", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if unknown := set(given.parts) - {*PARTS, "jax"}:
        parser.error(f"there is no part {sorted(unknown)}")
    if given.of_million:
        of_million(given.of_million, given.folder)
        return
    has_failed = False
    with tempfile.TemporaryDirectory(dir=given.folder) as name:
        for part in given.parts or PARTS:
            started = time.monotonic()
            try:
                folder = pathlib.Path(name)
                lines = (
                    of_jax(given.python, given.tests)
                    if part == "jax"
                    else PARTS[part](folder, given.repeats)
                )
            except Failed as error:
                lines, has_failed = [f"FAILED: {error}"], True
            print(f"\n## {part}, {time.monotonic() - started:.0f} s\n", flush=True)
            print("\n".join(f"- {line}" for line in lines), flush=True)
    raise SystemExit(has_failed)


if __name__ == "__main__":
    main()
