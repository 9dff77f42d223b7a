"""The time of one round by kernel, from a trace of it."""

import collections
import glob
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any

import jax
from jax.profiler import ProfileData

from fedjax_dp.engine import ExecutionConfig
from fedjax_dp.experiment.studies import timing
from fedjax_dp.experiment.studies.workloads import WORKLOADS, prepare


def rows(name: str, changes: Mapping[str, Any], top: int = 25) -> Iterator[dict[str, Any]]:
    """Traces one round; a row for all kernels together, and one for each that takes most time."""
    workload = WORKLOADS[name]._replace(**changes)
    case = timing.Case(timing.compiled(prepare(workload), ExecutionConfig(rounds_per_call=1)))
    untraced = min(case.time_round() for _ in range(3))
    with tempfile.TemporaryDirectory() as traces:
        with jax.profiler.trace(traces):
            traced = case.time_round()
        [file] = glob.glob(f"{traces}/**/*.xplane.pb", recursive=True)
        found = of(ProfileData.from_file(file))
    whole = sum(seconds for seconds, _ in found.values())
    shared = {"name": name, **changes}
    count = sum(runs for _, runs in found.values())
    yield {
        **shared, "kernel": f"all {len(found)}", "runs": count, "milliseconds": whole * 1e3,
        "share": whole / traced, "seconds_per_round": untraced, "seconds_traced": traced,
    }  # fmt: skip
    for kernel, (seconds, runs) in sorted(found.items(), key=lambda one: -one[1][0])[:top]:
        named = {"kernel": kernel[:120], "runs": runs}
        yield {**shared, **named, "milliseconds": seconds * 1e3, "share": seconds / traced}


def of(profile: ProfileData) -> dict[str, tuple[float, int]]:
    """Adds up seconds and runs by kernel: those on the streams of a GPU, or operations of a CPU,
    of which some contain others."""
    lines = [(plane.name, line) for plane in profile.planes for line in plane.lines]
    chosen = [line for _, line in lines if line.name.startswith("Stream")]
    # A TPU has one line of operations, and a CPU a line for each thread that runs them.
    chosen = chosen or [line for _, line in lines if line.name == "XLA Ops"]
    chosen = chosen or [line for _, line in lines if "xla" in line.name.lower()]
    found: dict[str, list[float]] = collections.defaultdict(list)
    for line in chosen:
        for event in line.events:
            found[event.name].append(event.duration_ns / 1e9)
    return {name: (sum(seconds), len(seconds)) for name, seconds in found.items()}
