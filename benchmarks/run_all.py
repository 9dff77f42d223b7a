"""Runs the CPU workloads one after another and writes a table.

    python benchmarks/run_all.py [--rounds 5] [NAME ...]

Each workload runs in a process of its own through `fedjax-dp bench NAME --json`. Peers on the same
shapes are timed by `benchmarks.peers.compare`; compare ratios to the GEMM peak, which is measured
in the same run, and not seconds of two machines.
"""

import argparse
import datetime
import json
import os
import pathlib
import platform
import subprocess
import sys

NAMES = ("W1", "W1dp", "W2", "W2dp", "W3nodp", "W3", "W4", "W4dp", "W5nodp", "W5")
COLUMNS = (
    "seconds_per_round",
    "gflops",
    "gemm_peak_gflops",
    "gemm_peak_share",
    "multiplied_share",
    "dp_overhead",
    "compile_seconds",
    "peak_rss_mb",
    "clients_per_chunk",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=NAMES)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path("benchmarks/results"))
    options = parser.parse_args()
    results = []
    for name in options.names:
        command = "from fedjax_dp.cli.main import main; main()"
        arguments = ["bench", name, "--rounds", str(options.rounds), "--json"]
        done = subprocess.run(
            [sys.executable, "-c", command, *arguments], capture_output=True, text=True, check=True
        )
        results += json.loads(done.stdout)["results"]
        print(results[-1]["name"], results[-1]["seconds_per_round"], flush=True)
    facts = {
        "date": datetime.date.today().isoformat(),
        "python": platform.python_version(),
        "jax": results[0]["jax"],
        "hardware": f"{os.cpu_count()} cores, {platform.machine()}",
        "results": results,
    }
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "cpu.json").write_text(json.dumps(facts, indent=2) + "\n")
    about = ", ".join(f"{key} {facts[key]}" for key in ("jax", "python", "hardware"))
    lines = [f"{facts['date']}, {about}, medians of {options.rounds} rounds.", ""]
    lines += ["| workload | " + " | ".join(COLUMNS) + " |", "|---" * (len(COLUMNS) + 1) + "|"]
    for result in results:
        cells = ["" if result[c] is None else f"{result[c]:.4g}" for c in COLUMNS]
        lines.append(f"| {result['name']} | " + " | ".join(cells) + " |")
    (options.output / "cpu.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
