"""Compiles the round of one workload for one target: `python -m benchmarks.compiled.one W1 v5e`.

Prints one line of JSON; `--text FILE` writes the program, and `--top 20` lists what costs most.
"""

import argparse
import json
import os
import pathlib
import sys

from fedjax_dp.core import targets


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workload")
    parser.add_argument("target")
    parser.add_argument("--by-hand", action="store_true", help="as written in plain JAX")
    parser.add_argument("--text", type=pathlib.Path)
    parser.add_argument("--top", type=int, default=0)
    options = parser.parse_args()
    wanted = targets.target(options.target)
    needed = targets.environment(wanted)
    if any(os.environ.get(name) != value for name, value in needed.items()):
        # JAX and its plugins read these when they are imported.
        words = [sys.executable, "-m", "benchmarks.compiled.one", *sys.argv[1:]]
        os.execve(sys.executable, words, os.environ | needed)

    import jax
    from jax.sharding import SingleDeviceSharding

    from benchmarks.compiled.by_hand import rounds_by_hand
    from fedjax_dp.core.backend import traced_for
    from fedjax_dp.engine import federation
    from fedjax_dp.engine.execution.elsewhere import compiled_for, finished
    from fedjax_dp.engine.population import population_of
    from fedjax_dp.experiment.studies.workloads import WORKLOADS, prepare

    def build():
        parts = prepare(WORKLOADS[options.workload])
        bound = federation(
            parts.algorithm, population_of(parts.data, parts.validation), parts.participation
        )
        if parts.wrapper is not None:
            bound = parts.wrapper(bound)
        return bound, parts.data, parts.validation

    workload = WORKLOADS[options.workload]
    if options.by_hand:
        device = SingleDeviceSharding(targets.devices(wanted)[0])
        with traced_for(wanted.device.facts):
            cohort = workload.cohort or workload.num_clients
            rounds, arguments, steps = rounds_by_hand(workload, prepare(workload), cohort)
            jitted = jax.jit(rounds, in_shardings=device, out_shardings=device)
            lowered = jitted.trace(*arguments).lower()
        found = finished(wanted, lowered, 1.0, steps, cohort)
    else:
        found = compiled_for(wanted, build)
    if options.text is not None:
        options.text.write_text(found.text, encoding="utf-8")
    for one in sorted(found.operations, key=lambda x: -x.times * x.seconds)[: options.top]:
        print(
            f"{one.loops:22s} x{one.times:<4g} {one.seconds * 1e6:9.1f} µs "
            f"{one.bytes / 1e9:7.3f} GB {one.products / 1e9:8.2f} GF {one.kind:28s} "
            f"{one.shape[:50]:50s} {one.source[-70:]}",
            file=sys.stderr,
        )
    clock = wanted.device.clock
    costs = {
        loops: {
            "operations": cost.operations,
            "GB": round(cost.bytes / 1e9, 4),
            "GFLOP": round(cost.products / 1e9, 3),
            **(
                {"Mcycles": round(cost.estimate * clock / 1e6, 3)}
                if clock
                else {"µs": round(cost.estimate * 1e6, 1)}
            ),
            "seconds": float(f"{cost.seconds:.4g}"),
        }
        for loops, cost in found.costs.items()
    }
    print(
        json.dumps(
            {
                "workload": options.workload + (" by hand" if options.by_hand else ""),
                "target": options.target,
                "jax": jax.__version__,
                "clients_per_chunk": found.clients_per_chunk,
                "passes": found.passes,
                "trace_s": round(found.trace_seconds, 1),
                "compile_s": round(found.compile_seconds, 1),
                "arguments_MB": round(found.memory.arguments / 1e6, 1),
                "temporaries_MB": round(found.memory.temporaries / 1e6, 1),
                "costs": costs,
                "round_seconds": float(f"{found.round.seconds:.4g}"),
                "collectives": found.collectives,
            }
        )
    )


if __name__ == "__main__":
    main()
