"""Processor time of a round under masks and of one with a clock, in turn with the same round bare.

    python benchmarks/masks.py [--rounds 3]

All workloads are compiled first, and take their rounds in turn. Processor time is user and system
time of all threads, and so holds on a machine that is busy with other work. Writes
`results/masks.json` and `results/masks.md`.
"""

import argparse
import datetime
import json
import os
import pathlib
import platform
import statistics
import time

import jax

from fedjax_dp.engine import ExecutionConfig, simulation
from fedjax_dp.experiment.assembly.devices import offer_devices
from fedjax_dp.experiment.studies.workloads import WORKLOADS, prepare

NAMES = ("W1", "W1masked", "W1masked64", "W1cancelled", "W1clock")
# Paired with W1, minimum of medians of wall seconds; typed in from a run whose figures by round
# were not stored.
QUIET = {"W1masked": 1.39, "W1cancelled": 0.96, "W1clock": 0.96}
QUIET_COMMIT = "8b8d341"


def measure(num_rounds: int) -> dict[str, list[float]]:
    """Measures processor seconds of rounds, all workloads in turn."""
    offer_devices("auto")
    key, sims, states = jax.random.key(0), {}, {}
    seconds: dict[str, list[float]] = {name: [] for name in NAMES}
    for name in NAMES:
        parts = prepare(WORKLOADS[name])
        execution = ExecutionConfig(clients_per_chunk="auto", devices="auto", rounds_per_call=1)
        sims[name] = simulation(
            parts.algorithm, parts.data, parts.participation, execution, wrapper=parts.wrapper
        )
        states[name] = sims[name].compile(sims[name].init(key), key)
    for _ in range(num_rounds):
        for name in NAMES:
            start = time.process_time()
            state, *_ = sims[name].run(states[name], key, 1)
            states[name] = jax.block_until_ready(state)
            seconds[name].append(round(time.process_time() - start, 3))
    return seconds


def as_markdown(facts: dict) -> str:
    """Writes the table of ratios."""
    seconds = facts["processor_seconds"]
    num_rounds, bare = len(seconds["W1"]), statistics.median(seconds["W1"])
    lines = [
        f"{facts['date']}, jax {facts['jax']}, {facts['hardware']}. Processor time: medians of "
        f"{num_rounds} rounds, all workloads in turn in one process, on a machine busy with other "
        "work. Wall time: on two quiet cores, in pairs with W1, the smaller of two medians, at "
        f"commit {QUIET_COMMIT}; figures by round were not stored.",
        "",
        "| workload | processor s a round | fastest | × W1, processor time | × W1, wall time |",
        "|---|---|---|---|---|",
    ]
    for name, each in seconds.items():
        median, quiet = statistics.median(each), QUIET.get(name, "")
        lines.append(f"| {name} | {median:.2f} | {min(each):.2f} | {median / bare:.2f} | {quiet} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measures, and writes both files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path("benchmarks/results"))
    options = parser.parse_args()
    facts = {
        "date": datetime.date.today().isoformat(),
        "jax": jax.__version__,
        "hardware": f"{os.cpu_count()} cores, {platform.machine()}",
        "processor_seconds": measure(options.rounds),
        "wall_ratios_when_quiet": {"commit": QUIET_COMMIT, **QUIET},
    }
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "masks.json").write_text(json.dumps(facts, indent=2) + "\n")
    (options.output / "masks.md").write_text(as_markdown(facts))


if __name__ == "__main__":
    main()
