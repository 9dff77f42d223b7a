"""Counts the operations of every workload's round as exported for CUDA and TPU.

`python -m benchmarks.operations` writes `results/operations.json` and `results/operations.md`. No
accelerator is needed: programs are lowered and not compiled. A test exports them again.
"""

import json
import pathlib
import re
from collections import Counter

import jax
import jax.export

from fedjax_dp.core.backend import traced_for
from fedjax_dp.core.choices import Products
from fedjax_dp.engine import ExecutionConfig, simulation
from fedjax_dp.experiment.studies.workloads import WORKLOADS, prepare

RESULTS = pathlib.Path(__file__).parent / "results"
# The platform of an export, and what JAX calls its backend.
PLATFORMS = {"cuda": "gpu", "tpu": "tpu"}
# Populations are cut: a round has the same operations, and synthetic data need less memory.
MOST_CLIENTS, MOST_SLOTS = 100, 50
# Kinds of operations that are slow, or count for the time of a round, on accelerators.
KINDS = {
    "products": r"stablehlo\.dot_general",
    "convolutions": r"stablehlo\.convolution",
    "gathers": r"stablehlo\.(?:dynamic_)?gather",
    "scatters": r"stablehlo\.scatter",
    "sorts": r"stablehlo\.sort",
    "loops": r"stablehlo\.while",
    "reductions": r"stablehlo\.reduce",
    "window reductions": r"stablehlo\.(?:reduce_window|select_and_scatter)",
    "custom calls": r"stablehlo\.custom_call",
    "all": r"(?:stablehlo|chlo)\.\w+",
}


def exported(name: str, platform: str, products: Products = "exact") -> jax.export.Exported:
    """Exports the round of a workload."""
    workload = WORKLOADS[name]
    workload = workload._replace(num_clients=min(workload.num_clients, MOST_CLIENTS))
    if workload.cohort is not None:
        workload = workload._replace(cohort=min(workload.cohort, MOST_SLOTS))
    with traced_for(PLATFORMS[platform]):
        parts = prepare(workload)
        sim = simulation(
            parts.algorithm,
            parts.data,
            parts.participation,
            ExecutionConfig(devices=None, placement="device", products=products),
            validation=parts.validation,
            wrapper=parts.wrapper,
        )
        return sim.program.exported(platform)


def counts(text: str) -> dict[str, int]:
    """Counts the operations of a program by kind, those of a loop's body once."""
    found = {kind: len(re.findall(rf"\b{op}\b", text)) for kind, op in KINDS.items()}
    # Of an operation's operands, those whose factors are rounded to fewer bits.
    exact = len(re.findall(r"precision = \[HIGHEST, HIGHEST\]", text))
    return found | {"exact products": exact}


def custom_calls(text: str) -> Counter[str]:
    """Counts the targets of custom calls."""
    return Counter(re.findall(r"custom_call @(\w+)", text))


def measured() -> dict[str, dict[str, dict[str, int]]]:
    """Counts the operations of all workloads, by platform."""
    return {
        platform: {name: counts(exported(name, platform).mlir_module()) for name in WORKLOADS}
        for platform in PLATFORMS
    }


def table(found: dict[str, dict[str, dict[str, int]]]) -> str:
    """Writes the counts as Markdown."""
    lines = [
        "# Operations of exported rounds",
        "",
        "Counted in the StableHLO of one round (a loop's body counts once), by",
        f"`python -m benchmarks.operations` with JAX {jax.__version__}, before it is compiled.",
        "*Exact products* keep all bits of float32 factors, which TF32 and bfloat16 round.",
    ]
    for platform, rows in found.items():
        kinds = list(next(iter(rows.values())))
        lines += ["", f"## {platform}", "", "| workload | " + " | ".join(kinds) + " |"]
        lines.append("|---|" + "---:|" * len(kinds))
        lines += [
            f"| {name} | " + " | ".join(f"{row[kind]:,}" for kind in kinds) + " |"
            for name, row in rows.items()
        ]
    return "\n".join([*lines, ""])


def main() -> None:
    """Writes the table."""
    found = measured()
    document = {"jax": jax.__version__, **found}
    (RESULTS / "operations.json").write_text(json.dumps(document, indent=1) + "\n", "utf-8")
    (RESULTS / "operations.md").write_text(table(found), encoding="utf-8")


if __name__ == "__main__":
    main()
