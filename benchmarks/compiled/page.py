"""Writes `results/compiled.md` from `results/compiled.jsonl`: `python -m benchmarks.compiled.page`.

The lines are those that `python -m benchmarks.compiled.one` prints.
"""

import json
import pathlib

RESULTS = pathlib.Path(__file__).parents[1] / "results"
_HEAD = """\
# Rounds compiled for devices that are not here

By XLA's compilers for a TPU v5e (`libtpu`) and an H100 (`jax[cuda13]`, no autotuning), JAX {jax}. Nothing was run.
*In a round* is all passes together: Mcycles (v5e) and microseconds of fusions (H100) are the compiler's estimates, GB
what operations read and write. On an H100 convolutions and large products are calls of cuDNN and cuBLAS, without an
estimate: their bytes and operations are in the other columns. *By hand* is the same round in plain JAX, with the whole
cohort side by side and default precision (`benchmarks/compiled/by_hand.py`).

| workload | device | clients side by side | estimate of a round | operations of a round | GB of a round | GFLOP of a round | temporaries, MB | seconds to compile |
|---|---|---:|---:|---:|---:|---:|---:|---:|
"""  # noqa: E501


def page(rows: list[dict]) -> str:
    """Writes the table."""
    lines = [_HEAD.format(jax=rows[0]["jax"])]
    for row in rows:
        unit = "Mcycles" if row["target"].startswith("v") else "µs"
        whole = {
            key: sum(
                cost[key] * row["passes"].get(scope, 0.0) for scope, cost in row["costs"].items()
            )
            for key in (unit, "operations", "GB", "GFLOP")
        }
        lines.append(
            f"| {row['workload']} | {row['target']} | {row['clients_per_chunk']} "
            f"| {whole[unit]:,.1f} {unit} | {whole['operations']:,.0f} | {whole['GB']:.2f} "
            f"| {whole['GFLOP']:,.1f} | {row['temporaries_MB']:,.0f} "
            f"| {row['trace_s'] + row['compile_s']:.0f} |\n"
        )
    return "".join(lines)


def main() -> None:
    text = (RESULTS / "compiled.jsonl").read_text(encoding="utf-8")
    rows = [json.loads(line) for line in text.splitlines()]
    (RESULTS / "compiled.md").write_text(page(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
