"""Private low-rank adapters beside full fine-tuning: a small transformer, Shakespeare by role.

FEDJAX_DP_DATA=FOLDER python -m experiments.lora.study --output DIR
"""

import argparse
import csv
import pathlib
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from experiments.sweep import hardware
from fedjax_dp.core.trees import PyTree
from fedjax_dp.engine.accounts.communication import communication
from fedjax_dp.engine.accounts.privacy_accounting import PrivacyAccounting
from fedjax_dp.engine.cohort import traced, typed
from fedjax_dp.engine.facts import examples_of
from fedjax_dp.experiment import Experiment, assemble, load_config, load_run, run
from fedjax_dp.io.params import write_params

HERE = pathlib.Path(__file__).parent
METHODS = {
    "LoRA": (
        "--model.adapters.rank=4",
        "--model.adapters.targets="
        "['params/*/query/kernel', 'params/*/value/kernel', 'params/*/dense_in/kernel']",
    ),
    "full": (),
}
UNITS = {
    "client": (
        "--algorithm.name=dp_fedavg",
        "--privacy.unit=client",
        "--privacy.client.clip_norm=0.3",
        "--privacy.client.dp_delta=1e-4",
    ),
    "record": (
        "--algorithm.name=dp_sgd",
        "--privacy.unit=record",
        "--privacy.record.clip_norm=0.5",
        "--privacy.record.dp_delta=1e-5",
    ),
}
BUDGETS = (None, 8.0, 2.0)


def base_of(folder: pathlib.Path, words: Sequence[str]) -> pathlib.Path:
    """Trains the base on the public part, unless the folder has it."""
    file = folder / "base.safetensors"
    if not file.exists():
        outcome = run(load_config(HERE / "base.toml", list(words)), folder / "base")
        trained = load_run(outcome.folder)
        write_params(file, trained.model.full_params(trained.params))
    return file


def budget_words(unit: str, epsilon: float | None) -> list[str]:
    """Sets a budget; without one the bound stays, and there is no noise."""
    if epsilon is not None:
        return [f"--privacy.{unit}.epsilon={epsilon}"]
    return [f"--privacy.{unit}.epsilon=none", f"--privacy.{unit}.noise_multiplier=0"]


def memory_of(experiment: Experiment) -> dict[str, int]:
    """Reads the memory of the compiled round: temporaries, and the frozen base among arguments."""
    program = experiment.simulation.program
    assert program is not None
    federation, frozen = program.federation, program.one_round.frozen
    key = jax.random.key(0)
    arguments = (
        jax.eval_shape(experiment.simulation.init, key),
        traced(federation.algorithm, typed(federation.hyper)),
        examples_of(program.data, program.validation),
    )
    lowered = jax.jit(program.one_round.step).lower(*arguments, None, key, frozen)
    memory: Any = lowered.compile().memory_analysis()
    return {
        "temporary_bytes": memory.temp_size_in_bytes,
        "frozen_bytes": sum(x.nbytes for x in jax.tree.leaves(frozen)),
    }


def rows_of(base: pathlib.Path, unit: str, method: str, words: Sequence[str]) -> list[dict]:
    """Runs one program with every budget."""
    common = [f"--model.pretrained={base}", *METHODS[method], *UNITS[unit], *words]
    file, shared, rows = HERE / "federated.toml", None, list[dict[str, Any]]()
    for epsilon in BUDGETS:
        config = load_config(file, [*common, *budget_words(unit, epsilon)])
        experiment = assemble(config)
        if shared is None:
            # The budgets differ in numbers alone: all run the simulation of the first.
            shared, memory = experiment, memory_of(experiment)
            state = shared.simulation.init(jax.random.key(0))
            jax.block_until_ready(shared.simulation.compile(state, jax.random.key(0)))
        rows.append({"unit": unit, "method": method, "epsilon": epsilon})
        figures, _ = measured(shared, experiment, config.run.rounds, config.run.seed)
        rows[-1] |= figures | memory
        print(rows[-1], flush=True)
    return rows


def measured(
    shared: Experiment, own: Experiment, rounds: int, seed: int
) -> tuple[dict[str, Any], PyTree]:
    """Runs the rounds of one budget, charges them, and evaluates the last model."""
    sim, hyper, key = shared.simulation, own.simulation.hyper, jax.random.key(seed)
    whole = shared.evaluator.whole
    assert whole is not None
    state = sim.init(key)
    before = whole(state)
    clocks = time.perf_counter(), time.process_time()
    state, record, info = sim.run(state, key, rounds, hyper)
    jax.block_until_ready(state)
    seconds, cpu = time.perf_counter() - clocks[0], time.process_time() - clocks[1]
    after = whole(state)
    accounting = PrivacyAccounting(own.simulation.federation)
    accounting.charge(record, hyper)
    spent = accounting.epsilon(own.dp_delta)
    sent = communication(sim, record, info)
    clients = int(np.sum(np.asarray(record.clients) >= 0))
    figures = {
        "accuracy_before": before.accuracy,
        "loss_before": before.loss,
        "accuracy": after.accuracy,
        "loss": after.loss,
        "spent": max((float(np.max(each)) for each in spent.values()), default=None),
        "parameters": own.num_parameters,
        "bytes_down_of_a_client": sent.total("down") / clients,
        "bytes_up_of_a_client": sent.total("up") / clients,
        "clients": clients,
        "clients_a_second": clients / seconds,
        "clients_a_cpu_second": clients / cpu,
    }
    assert sim.federation.shared is not None
    return figures, sim.federation.shared(state)


def as_markdown(rows: Sequence[dict[str, Any]]) -> str:
    """Writes the table of the README."""
    lines = [
        "| unit | method | ε | accuracy | loss | parameters | kB a client and round, down + up | "
        "MB of temporaries | MB of base | clients a CPU second |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        budget = "no noise" if row["epsilon"] is None else f"{row['epsilon']:g}"
        sent = (row["bytes_down_of_a_client"] + row["bytes_up_of_a_client"]) / 1e3
        lines.append(
            f"| {row['unit']} | {row['method']} | {budget} | {row['accuracy']:.3f} | "
            f"{row['loss']:.3f} | {row['parameters']:,} | {sent:.1f} | "
            f"{row['temporary_bytes'] / 1e6:.1f} | {row['frozen_bytes'] / 1e6:.2f} | "
            f"{row['clients_a_cpu_second']:.0f} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Trains the base, runs both methods at both levels, and writes the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog="Further words, --section.key=VALUE, override the configuration of every run.",
    )
    parser.add_argument("--output", type=pathlib.Path, required=True)
    parser.add_argument("--unit", action="append", choices=list(UNITS), default=[])
    known, words = parser.parse_known_args()
    known.output.mkdir(parents=True, exist_ok=True)
    base = base_of(known.output, [])
    for unit in known.unit or UNITS:
        started = time.process_time()
        rows = [row for method in METHODS for row in rows_of(base, unit, method, words)]
        note = f"{hardware()}, {time.process_time() - started:.0f} CPU seconds. "
        note += f"Accuracy of the base: {rows[0]['accuracy_before']:.3f}.\n\n"
        with (known.output / f"{unit}.csv").open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
        (known.output / f"{unit}.md").write_text(note + as_markdown(rows), encoding="utf-8")
        print(note + as_markdown(rows), flush=True)


if __name__ == "__main__":
    main()
