"""Secure aggregation and oblivious noise: the experiments of chapter 2 and appendix A.

python -m experiments.secure_aggregation.study collusion [--parties 100] [--seeds 20]
python -m experiments.secure_aggregation.study adult --parties 100 500 [--corrected 1]
python -m experiments.secure_aggregation.study growth [--parties 25 50 100 200]
python -m experiments.secure_aggregation.study asynchronous [--updates 4000]
python -m experiments.secure_aggregation.study privacyfl [--parties 3 10] [--parts grid]
python -m experiments.secure_aggregation.study released [--parts scenarios] [--seeds 100]
python -m experiments.secure_aggregation.study audit [--form masked] [--runs 600]
python -m experiments.secure_aggregation.study error
python -m experiments.secure_aggregation.study timing
python -m experiments.secure_aggregation.study serverless
"""

import argparse
import itertools
import json
import os
import pathlib
import platform
import resource
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from rich.console import Console

from experiments.secure_aggregation import (
    adult,
    asynchronous,
    colluders,
    costs,
    privacyfl,
    released,
    serverless,
)
from experiments.secure_aggregation import audited as audited_sums
from fedjax_dp.io import plots
from fedjax_dp.server.oblivious import run_iteration, set_up_protocol

HARDWARE = f"{os.cpu_count()} CPU cores, {platform.machine()}"


def collusion(options: argparse.Namespace) -> str:
    """Attacks recorded iterations, and draws r² of the attacks, and estimates beside values."""
    result, cost = _measured(
        lambda: colluders.run(options.parties[0], options.trials, options.seeds)
    )
    samples = result.pop("samples")
    _write(options.output / "collusion.json", {**result, "cost": cost})
    plots.save(colluders.draw(result), options.output / "collusion.png")
    plots.save(colluders.draw_estimates(samples), options.output / "collusion_2_6.png")
    plots.save(colluders.draw_violins(samples), options.output / "collusion_2_7.png")
    return colluders.as_markdown(result) + _in_words(cost)


def on_adult(options: argparse.Namespace) -> str:
    """Runs every number of parties without noise, with the printed and with corrected noise.

    Runs that `adult.json` has are not repeated.
    """
    name = options.name = options.data
    path = options.output / f"{name}.json"
    known = json.loads(path.read_text("utf-8")) if path.exists() else {}
    results: list[dict[str, Any]] = known.get("runs", [])
    moves = known.get("moves", {})
    x, y = adult.load(options.data)
    wanted = adult.settings(options.printed, options.corrected)
    splits = [adult.split(x, y, seed) for seed in range(options.seeds)]
    for n, objective in itertools.product(options.parties, adult.OBJECTIVES):
        there = {_key(one) for one in results}
        own = [setting for setting in wanted if setting.objective == objective]
        missing = [
            (seed, setting)
            for seed, setting in itertools.product(range(options.seeds), own)
            if (n, seed, *setting) not in there
        ]
        if not missing:
            continue
        if objective not in moves:
            moves[objective] = adult.move_of_one_record(*splits[0][:2], objective)
        sim = adult.federation_of(splits[0][0].shape, n, objective)
        for seed, setting in missing:
            results.append(adult.run(sim, n, setting, seed, splits[seed]))
            _write(path, {"hardware": HARDWARE, "moves": moves, "runs": results})
    plots.save(adult.draw_levels(results), options.output / f"{name}.png")
    rounds = adult.draw_rounds(results, (5e-4, 5e-6, 5e-7))
    plots.save(rounds, options.output / f"{name}_2_4b.png")
    return adult.as_markdown(results)


def _key(one: dict[str, Any]) -> tuple[Any, ...]:
    """Names a run by its parties, its seed and its setting."""
    return tuple(one[name] for name in ("num_parties", "seed", *adult.Setting._fields))


def growth(options: argparse.Namespace) -> str:
    """Times the protocol with every message, 105 weights, by number of parties."""
    rows = []
    for n in options.parties:
        noise = adult.shares_of(n, adult.Setting("regularized", "corrected", 1.0))
        start = time.perf_counter(), time.process_time()
        set_up = set_up_protocol(noise, options.seed)
        rng = np.random.default_rng(options.seed)
        for _ in range(options.iterations):
            set_up, _ = run_iteration(set_up, rng.normal(size=(n, 105)), rng, records=False)
        wall, cpu = time.perf_counter() - start[0], time.process_time() - start[1]
        rows.append({"parties": n, "seconds": wall, "cpu_seconds": cpu})
    _write(options.output / "growth.json", {"hardware": HARDWARE, "rows": rows})
    lines = [f"{options.iterations} iterations, 105 weights", "", "| parties | s | CPU s |"]
    lines += ["|---|---|---|"]
    lines += [f"| {r['parties']} | {r['seconds']:.1f} | {r['cpu_seconds']:.1f} |" for r in rows]
    return "\n".join(lines) + "\n"


def by_arrival(options: argparse.Namespace) -> str:
    """Trains synchronously and asynchronously on MNIST by writer, and draws both by time."""
    result = asynchronous.run(options.seed, options.updates)
    _write(options.output / "asynchronous.json", result)
    plots.save(asynchronous.draw(result), options.output / "asynchronous.png")
    return asynchronous.as_markdown(result)


def on_digits_and_kdd(options: argparse.Namespace) -> str:
    """Runs PrivacyFL's scenarios on growing digits, and n × ε on KDD."""
    runs: dict[str, Callable[[], Any]] = {
        "sweep": lambda: privacyfl.sweep(options.seeds),
        "scenarios": lambda: privacyfl.scenarios(options.seeds),
        "times": privacyfl.times,
        "grid": lambda: privacyfl.grid(options.parties, options.seeds),
    }
    path = options.output / "privacyfl.json"
    result: dict[str, Any] = {"hardware": HARDWARE}
    if path.exists():
        result |= json.loads(path.read_text("utf-8"))
    for part in options.parts:
        result[part], cost = _measured(runs[part])
        result["costs"] = {**result.get("costs", {}), part: cost}
        _write(path, result)
    if "sweep" in options.parts:
        plots.save(privacyfl.draw(result["sweep"]), options.output / "privacyfl.png")
    return privacyfl.as_markdown(result)


def as_released(options: argparse.Namespace) -> str:
    """Runs PrivacyFL's experiments by the solvers and numbers of its released configuration."""
    tables = {}
    for name in options.parts:
        part = released.PARTS[name]
        tables[name], cost = _measured(partial(part.rows, options.seeds or part.seeds))
        digits = [{k: _rounded(v) for k, v in row.items()} for row in tables[name]]
        audited_sums.write(options.output / f"released_{name}.csv", digits)
        Console().print(name, _in_words(cost), markup=False)
    if "growing" in tables and "serverless" in tables:
        figure = released.draw(tables["growing"], tables["serverless"])
        plots.save(figure, options.output / "released.png")
    return ""


def _rounded(value: Any) -> Any:
    return round(value, 5) if isinstance(value, float) else value


def audited(options: argparse.Namespace) -> str:
    """Audits masked sums as the server and colluders see them, of which clients drop out."""
    numbers = options.noise_multiplier, options.runs, options.rounds, options.seed
    kinds = list(itertools.product(options.cohorts, (True, False)))

    def all_kinds() -> list[dict[str, Any]]:
        return [
            bound
            for cohorts, counts in kinds
            for bound in audited_sums.run(
                *numbers, counts_colluders=counts, cohorts=cohorts, form=options.form
            )
        ]

    results, cost = _measured(all_kinds)
    audited_sums.write(options.output / "audit.csv", results)
    return audited_sums.as_markdown(results) + _in_words(cost)


def error(options: argparse.Namespace) -> str:
    """Computes and measures the error of the released sum, by Definition 2."""
    return costs.errors(options.parties, options.seed, options.largest_run)


def timing(options: argparse.Namespace) -> str:
    """Times the parts of Table A.1, and simulates runs with them on three maps of latencies."""
    return f"{HARDWARE}; CPU time of one party or the server\n\n" + costs.timing(options.seed)


def without_server(options: argparse.Namespace) -> str:
    """Runs three clients without a server on digits, and computes the times of table 5.3."""
    result = {
        "accuracy": serverless.run(options.iterations, options.seed),
        "times": serverless.times(),
    }
    _write(options.output / "serverless.json", result)
    return serverless.as_markdown(result)


def _measured(work: Callable[[], Any]) -> tuple[Any, dict[str, Any]]:
    """Runs a part, and measures its seconds and the peak memory of the process, in GB."""
    wall, cpu = time.perf_counter(), time.process_time()
    found = work()
    return found, {
        "hardware": HARDWARE,
        "seconds": round(time.perf_counter() - wall, 1),
        "cpu_seconds": round(time.process_time() - cpu, 1),
        # Linux counts in KiB.
        "peak_memory_gb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2),
    }


def _in_words(cost: dict[str, Any]) -> str:
    """Writes what a part has cost."""
    return (
        f"\n{cost['hardware']}, beside other work: {cost['seconds']:.0f} s, "
        f"{cost['cpu_seconds']:.0f} CPU seconds, at most {cost['peak_memory_gb']} GB of memory.\n"
    )


def _write(path: pathlib.Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, ensure_ascii=False) + "\n", "utf-8")


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs one of the experiments and writes its table, data and figure."""
    parser = argparse.ArgumentParser(description=__doc__)
    kinds = parser.add_subparsers(required=True, metavar="EXPERIMENT")
    for name, run, parties in (
        ("collusion", collusion, [100]),
        ("adult", on_adult, [50, 100, 200, 500]),
        ("growth", growth, [25, 50, 100, 200]),
        ("asynchronous", by_arrival, None),
        ("privacyfl", on_digits_and_kdd, [3, 10, 30, 100]),
        ("released", as_released, None),
        ("audit", audited, None),
        ("error", error, [5, 20, 50, 100, 200, 500, 1000, 5000]),
        ("timing", timing, None),
        ("serverless", without_server, [3]),
    ):
        one = kinds.add_parser(name, help=run.__doc__)
        if parties is not None:
            one.add_argument("--parties", type=int, nargs="+", default=parties)
        one.add_argument("--seed", type=int, default=0)
        output = pathlib.Path("runs/secure_aggregation")
        one.add_argument("--output", type=pathlib.Path, default=output)
        one.set_defaults(run=run, name=name)
        if name == "collusion":
            one.add_argument("--trials", type=int, default=1000)
            one.add_argument("--seeds", type=int, default=20)
        if name == "adult":
            tables_of = ["adult", "credit_card_fraud"]
            one.add_argument("--data", choices=tables_of, default="adult")
            printed = [5e-4, 1e-4, 5e-5, 2e-5, 1e-5, 5e-6, 5e-7]
            one.add_argument("--printed", type=float, nargs="*", default=printed)
            one.add_argument("--corrected", type=float, nargs="*", default=[10.0, 1.0])
            one.add_argument("--seeds", type=int, default=5)
        if name == "asynchronous":
            one.add_argument("--updates", type=int, default=4000)
        if name == "privacyfl":
            one.add_argument("--seeds", type=int, default=3)
            parts = ["sweep", "scenarios", "times", "grid"]
            one.add_argument("--parts", nargs="+", choices=parts, default=parts)
        if name == "released":
            one.add_argument("--seeds", type=int)
            kinds_of = list(released.PARTS)
            one.add_argument("--parts", nargs="+", choices=kinds_of, default=kinds_of)
        if name == "audit":
            one.add_argument("--form", choices=["masked", "cancelled"], default="masked")
            kinds_of = list(audited_sums.SPARE)
            one.add_argument("--cohorts", nargs="+", choices=kinds_of, default=kinds_of)
            one.add_argument("--runs", type=int, default=600)
            one.add_argument("--rounds", type=int, default=2)
            one.add_argument("--noise-multiplier", type=float, default=2.0)
        if name == "error":
            one.add_argument("--largest-run", type=int, default=100)
        if name == "growth":
            one.add_argument("--iterations", type=int, default=20)
        if name == "serverless":
            one.add_argument("--iterations", type=int, default=serverless.ITERATIONS)
    options = parser.parse_args(arguments)
    text = options.run(options)
    options.output.mkdir(parents=True, exist_ok=True)
    if text:
        (options.output / f"{options.name}.md").write_text(text, "utf-8")
    Console().print(text, markup=False)


if __name__ == "__main__":
    main()
