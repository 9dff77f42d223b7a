"""Points of a sweep side by side (`vmap`) and one after another, in one compiled program.

Sixteen points that differ in seed and learning rate run one round of FedAvg, so many of them on the
batch dimension of a call. Widths take their rounds in turn. The processor time of all threads does
not count other programs on the machine; the memory is what the compiled call needs besides its
arguments and results.

    python benchmarks/side_by_side.py [--points 16] [--repeats 3]
"""

import argparse
import time

import jax

from fedjax_dp.engine import ExecutionConfig, simulation
from fedjax_dp.engine.execution.joint import Joint, Request
from fedjax_dp.experiment.studies.workloads import Workload, prepare

WIDTHS = (1, 4, 16)
WORKLOADS = {
    "logistic regression, 20 clients of 50": Workload(
        "", (784,), 10, "logistic_regression", 20, 50, 10
    ),
    "MLP of 200 units, 10 clients of 50": Workload("", (784,), 10, "mlp", 10, 50, 10),
}


def main() -> None:
    """Times the widths of each workload, and prints a row of each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--points", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    print("| workload | side by side | s of processors | s of the clock | compiling | MB |")
    print("|---|---|---|---|---|---|")
    for name, workload in WORKLOADS.items():
        parts = prepare(workload)
        execution = ExecutionConfig(devices=1, rounds_per_call=1)
        sim = simulation(parts.algorithm, parts.data, parts.participation, execution)
        jobs, least, compiling = {}, {}, {}
        for width in WIDTHS:
            joint = Joint([sim.program] * given.points, width)
            wanted = {
                i: Request(sim.init(jax.random.key(i)), jax.random.key(i), sim.hyper, 1)
                for i in range(given.points)
            }
            started = time.perf_counter()
            jobs[width] = joint, next_round(joint, wanted)
            compiling[width] = time.perf_counter() - started
        for _ in range(given.repeats):
            for width, (joint, wanted) in jobs.items():
                clock, processors = time.perf_counter(), time.process_time()
                wanted = next_round(joint, wanted)
                spent = time.process_time() - processors, time.perf_counter() - clock
                least[width] = min(spent, least.get(width, spent))
                jobs[width] = joint, wanted
        for width, (joint, wanted) in jobs.items():
            cpu, wall = least[width]
            some = {i: wanted[i] for i in range(min(width, given.points))}
            size = joint.temporary_bytes(some) / 1e6
            row = f"{cpu:.3f} | {wall:.3f} | {compiling[width]:.1f} | {size:.1f}"
            print(f"| {name} | {width} | {row} |", flush=True)


def next_round(joint: Joint, wanted: dict[int, Request]) -> dict[int, Request]:
    """Runs a round of all points, and asks for the next."""
    found = joint.run(wanted)
    jax.block_until_ready([each.state for each in found.values()])
    return {i: wanted[i]._replace(state=each.state) for i, each in found.items()}


if __name__ == "__main__":
    main()
