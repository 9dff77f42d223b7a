"""Many clients a round, and many rounds of next to nothing.

`clients`: logistic regression of 7,850 parameters on 100,000 clients of four examples, one step of
FedAvg each. `rounds`: ten parameters, four clients of eight examples, one step; such a round has
nothing to compute, so that its time is what the host takes for it. The processor time of all
threads does not count other programs on the machine; the clock does.

    python benchmarks/many.py clients [--clients 100000] [--rounds 5]
    python benchmarks/many.py rounds [--rounds 1000 10000]
"""

import argparse
import time

import jax

from fedjax_dp.engine import ExecutionConfig, simulation
from fedjax_dp.experiment.assembly.devices import offer_devices
from fedjax_dp.experiment.studies.timing import measure
from fedjax_dp.experiment.studies.workloads import Workload, prepare

TEN_PARAMETERS = Workload("", (4,), 2, "logistic_regression", 4, 8, 8, num_steps=1)


def many_clients(clients: int, rounds: int) -> None:
    """Times rounds of W4 with more clients, of four examples each."""
    offer_devices("auto")
    changed = {"num_clients": clients, "examples_per_client": 4, "batch_size": 4}
    found = measure("W4", ExecutionConfig(rounds_per_call=1), rounds, **changed)
    wanted = ("seconds_per_round", "compile_seconds", "peak_rss_mb", "clients_per_chunk")
    print(f"{clients:,} clients:", ", ".join(f"{name} {found[name]:.4g}" for name in wanted))


def many_rounds(counts: list[int]) -> None:
    """Times rounds of a model of ten parameters, and prints microseconds a round."""
    parts = prepare(TEN_PARAMETERS)
    execution = ExecutionConfig(devices=1)
    sim = simulation(parts.algorithm, parts.data, parts.participation, execution)
    key = jax.random.key(0)
    state = sim.init(key)
    state, *_ = sim.run(state, key, execution.rounds_per_call)
    print("| rounds | µs of processors a round | µs of the clock a round |")
    print("|---|---|---|")
    for rounds in counts:
        clock, processors = time.perf_counter(), time.process_time()
        state, *_ = jax.block_until_ready(sim.run(state, key, rounds))
        spent = time.process_time() - processors, time.perf_counter() - clock
        print(f"| {rounds:,} | {' | '.join(f'{s / rounds * 1e6:.0f}' for s in spent)} |")


def main() -> None:
    """Runs one of the two."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["clients", "rounds"])
    parser.add_argument("--clients", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, nargs="+")
    given = parser.parse_args()
    if given.what == "clients":
        many_clients(given.clients, *(given.rounds or [5]))
    else:
        many_rounds(given.rounds or [1_000, 10_000])


if __name__ == "__main__":
    main()
