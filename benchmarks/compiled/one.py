"""Compiles the round of one workload for one target: `python -m benchmarks.compiled.one W1 v5e`.

Prints one line of JSON; `--text FILE` writes the program, and `--top 20` lists what costs most.
"""

import argparse
import json
import os
import pathlib
import sys
import time
from importlib import metadata

from fedjax_dp.core import targets

# Narrower chunks are not tried where a round is slower by so much.
_SLOWER = 1.1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workload")
    parser.add_argument("target")
    parser.add_argument("--by-hand", action="store_true", help="as written in plain JAX")
    parser.add_argument(
        "--exact", action="store_true", help="by hand, with full products for gradients of records"
    )
    parser.add_argument(
        "--clients",
        type=int,
        help="side by side; by default as `auto` chooses, by hand as are fastest",
    )
    parser.add_argument("--kernel", action="store_true", help="convolutions by our own kernels")
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

    from benchmarks.compiled.by_hand import ByHand, rounds_by_hand, widths
    from fedjax_dp.core.backend import traced_for
    from fedjax_dp.core.choices import Measured, Speed, choices
    from fedjax_dp.engine import ExecutionConfig, federation
    from fedjax_dp.engine.execution.elsewhere import Compiled, compiled_for, finished
    from fedjax_dp.engine.facts import population_of
    from fedjax_dp.experiment.studies.workloads import WORKLOADS, prepare

    workload, tried = WORKLOADS[options.workload], list[dict[str, float]]()

    def build():
        parts = prepare(workload)
        bound = federation(
            parts.algorithm, population_of(parts.data, parts.validation), parts.participation
        )
        if parts.wrapper is not None:
            bound = parts.wrapper(bound)
        return bound, parts.data, parts.validation

    def compiled_by_hand(written: ByHand) -> Compiled:
        begin, device = time.perf_counter(), SingleDeviceSharding(targets.devices(wanted)[0])
        jitted = jax.jit(
            written.rounds, in_shardings=device, out_shardings=device, donate_argnums=0
        )
        lowered = jitted.trace(*written.arguments).lower()
        traced = time.perf_counter() - begin
        return finished(
            wanted, lowered, written.chunks, written.steps, written.side_by_side, traced
        )

    def by_hand() -> Compiled:
        best: Compiled | None = None
        with traced_for(wanted.device.facts):
            parts = prepare(workload)
            for width in [options.clients] if options.clients else widths(workload):
                written = rounds_by_hand(workload, parts, width, is_exact=options.exact)
                try:
                    found = compiled_by_hand(written)
                except jax.errors.JaxRuntimeError as error:
                    if "RESOURCE_EXHAUSTED" not in str(error):
                        raise
                    continue
                if found.memory.fits:
                    tried.append(
                        {
                            "clients": width,
                            "round_seconds": float(f"{found.round.seconds:.4g}"),
                            "temporaries_MB": round(found.memory.temporaries / 1e6, 1),
                        }
                    )
                if best is not None and found.round.seconds > _SLOWER * best.round.seconds:
                    break
                if found.memory.fits and (best is None or found.round.seconds < best.round.seconds):
                    best = found
        if best is None:
            raise SystemExit(f"{options.workload} does not fit in the memory of {options.target}")
        return best

    if options.by_hand:
        found = by_hand()
    else:
        here = choices(wanted.device.facts)
        measured = None
        if options.kernel:
            # As if they had been measured, and were faster; chunks are as wide as otherwise.
            forms = {here.convolutions: 1.0, "kernel": 2.0}
            speeds = tuple(
                Speed(form, "default", 1, rate, here.operations_per_chunk)
                for form, rate in forms.items()
            )
            measured = Measured(wanted.device.device, speeds)
        execution = ExecutionConfig(clients_per_chunk=options.clients or "auto", measured=measured)
        found = compiled_for(wanted, build, execution)
    if options.text is not None:
        options.text.write_text(found.text, encoding="utf-8")
    for one in sorted(found.operations, key=lambda x: -x.times * x.seconds)[: options.top]:
        print(
            f"{one.loops:22s} x{one.times:<4g} {one.seconds * 1e6:9.1f} µs "
            f"{one.bytes / 1e9:7.3f} GB {one.products / 1e9:8.2f} GF {one.kind:28s} "
            f"{one.shape[:50]:50s} {one.source[-70:]}",
            file=sys.stderr,
        )
    ours = "ours, kernel" if options.kernel else "ours"
    program = "by hand, exact" if options.exact else "by hand" if options.by_hand else ours
    clock = wanted.device.clock
    compiler = "libtpu" if wanted.device.backend == "tpu" else "jax-cuda13-plugin"
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
                "workload": options.workload,
                "program": program,
                "target": options.target,
                "jax": jax.__version__,
                "compiler": f"{compiler} {metadata.version(compiler)}",
                "clients_per_chunk": found.clients_per_chunk,
                "passes": found.passes,
                "trace_s": round(found.trace_seconds, 1),
                "compile_s": round(found.compile_seconds, 1),
                "fits": found.memory.fits,
                "arguments_MB": round(found.memory.arguments / 1e6, 1),
                "temporaries_MB": round(found.memory.temporaries / 1e6, 1),
                "costs": costs,
                "round_seconds": float(f"{found.round.seconds:.4g}"),
                "collectives": found.collectives,
                **({"tried": tried} if tried else {}),
            }
        )
    )


if __name__ == "__main__":
    main()
