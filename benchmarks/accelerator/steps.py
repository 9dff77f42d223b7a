"""The steps: on an accelerator all, on a CPU a few that are tiny."""

import json
import pathlib
from collections.abc import Mapping
from typing import Any

from benchmarks.accelerator.runner import ROOT, Step
from benchmarks.peers.install import is_installed

VENVS = ROOT / "benchmarks" / "peers" / ".venvs"
# Files of the quick suite that say whether results hold on another backend.
SUITE = {
    "tests of rounds": (
        "tests/engine/test_execution.py",
        "tests/engine/test_federation.py",
        "tests/engine/test_laws.py",
    ),
    "tests of the contract": ("tests/algorithms/test_contract.py",),
    "tests of clipping": ("tests/privacy/test_clipping.py", "tests/models/test_per_example.py"),
    "tests of noise": (
        "tests/privacy/test_noise.py",
        "tests/privacy/test_discrete.py",
        "tests/privacy/test_distributed.py",
    ),
    "tests of secure sums": (
        "tests/core/test_sums.py",
        "tests/server/test_limbs.py",
        "tests/server/test_secure_sum.py",
        "tests/server/test_secure_aggregation.py",
    ),
    "tests of resume": ("tests/experiment/test_resume.py",),
}
# Workloads with the seconds of their steps. A workload without privacy precedes its twin, whose
# step compiles it again, from the cache of compiled programs.
WORKLOADS: Mapping[str, float] = {
    "W1": 25, "W1dp": 30, "W2": 25, "W2dp": 30, "W3nodp": 25, "W3": 40,
    "W4": 20, "W4dp": 25, "W5nodp": 40, "W5": 60,
}  # fmt: skip
# Published settings, with the rounds of one call beside the calls of one round.
SETTINGS: Mapping[str, tuple[float, int]] = {
    "P1": (40, 20), "P1dp": (45, 20), "F1": (40, 50), "F4": (25, 100), "P2": (75, 5),
}  # fmt: skip
COUNTS = (1, 4, 16, 64, 256, 1024)
COHORTS = (10, 100, 1000, 10_000)
# A client of 1 KiB, so that a million fit beside their model.
MILLION = {
    "num_clients": 1_000_000, "cohort": 1000, "shape": [64], "examples_per_client": 4,
    "batch_size": 4,
}  # fmt: skip
# Peers whose runners compute on the default device of JAX.
PEERS = {"fedjax": ("W1", "W4"), "drjax": ("W1", "W4"), "jax_privacy": ("W3",)}
CPU_PEERS = ("flower", "opacus", "pfl")


def measuring(
    name: str, group: str, seconds: float, limit: float | None = None, /, **arguments: Any
) -> Step:
    """Makes a step of a function of `measurements`; its limit is three times its seconds."""
    command = ("-m", "benchmarks.accelerator.measurements", json.dumps(arguments))
    return Step(name, group, command, seconds, limit or max(60.0, 3 * seconds))


MACHINE = measuring("machine", "machine", 10, 120, do="machine")


def on_accelerator(venvs: pathlib.Path = VENVS) -> list[Step]:
    """Lists all steps."""
    steps = [measuring(k, "tests", 60, 300, do="tests", files=v) for k, v in SUITE.items()]
    for name, seconds in WORKLOADS.items():
        steps.append(measuring(name, "workloads", seconds, do="workload", name=name, rounds=5))
    for name in ("W3", "W5"):
        asked = {"do": "workload", "name": name, "rounds": 5, "products": "split"}
        steps.append(measuring(f"{name} split", "workloads", WORKLOADS[name], **asked))
    for name, (seconds, together) in SETTINGS.items():
        asked = {"do": "workload", "name": name, "rounds": 10, "together": together}
        steps.append(measuring(name, "workloads", seconds, **asked))
    # JAX splits no convolution, and gradients of records are computed in no other way than these.
    steps += _layouts("native", ("float32", "default", "bfloat16"), COUNTS, 40)
    steps += _layouts("products", ("float32", "default", "bfloat16", "split"), COUNTS, 40)
    steps += _layouts("records", ("float32", "split"), COUNTS, 60)
    steps.append(measuring("peaks", "peaks", 20, do="peaks", size=8192, copied_mb=2048))
    steps.append(measuring("rounding", "rounding", 15, do="rounding"))
    steps += _peers(venvs)
    cohorts = [{"cohort": n, "num_clients": COHORTS[-1]} for n in COHORTS]
    some = [{"cohort": n} for n in COHORTS[:3]]
    for name, each, seconds in (("W4", cohorts, 60), ("P1", some, 90)):
        asked = {"do": "workload", "name": name, "rounds": 5, "each": each}
        steps.append(measuring(f"cohorts of {name}", "scale", seconds, **asked))
    asked = {"do": "workload", "name": "W4dp", "rounds": 5, "each": [MILLION]}
    return [*steps, measuring("a million clients", "scale", 60, **asked)]


def on_cpu(venvs: pathlib.Path = VENVS) -> list[Step]:
    """Lists a few steps, which show that the command works; their figures say little."""
    few = {"num_clients": 20, "cohort": 4}
    f4 = {"do": "workload", "name": "F4", "rounds": 1, "each": [few], "together": 2}
    options = ["-k", "sum"]
    files = ("tests/server/test_limbs.py",)
    w4 = {"do": "workload", "name": "W4", "rounds": 1, "each": [few | {"cohort": 2}]}
    steps = [
        measuring("tests of secure sums", "tests", 10, do="tests", files=files, options=options),
        measuring("F4", "workloads", 10, **f4),
        *_layouts("native", ("float32",), (2,), 15),
        *_layouts("products", ("float32",), (2,), 15),
        *_layouts("records", ("float32",), (2,), 20),
        measuring("peaks", "peaks", 10, do="peaks", size=512, copied_mb=16),
        measuring("rounding", "rounding", 10, do="rounding", width=64),
        *_peers(venvs, only=("fedjax",)),
        measuring("cohorts of W4", "scale", 15, **w4),
    ]
    # Processors may be busy with other work.
    return [step._replace(limit=300.0) for step in steps]


def _layouts(
    form: str, precisions: tuple[str, ...], counts: tuple[int, ...], seconds: float
) -> list[Step]:
    return [
        measuring(
            f"{form} {precision}",
            "layouts",
            seconds,
            do="layouts",
            form=form,
            precision=precision,
            counts=counts,
        )
        for precision in precisions
    ]


def _peers(venvs: pathlib.Path, only: tuple[str, ...] = (*PEERS, *CPU_PEERS)) -> list[Step]:
    """Compares with the peers that are installed and compute on the accelerator."""
    steps = []
    for peer in only:
        names = PEERS.get(peer, ())
        asked = {"do": "peers", "peer": peer, "names": names, "rounds": 3, "venvs": str(venvs)}
        step = measuring(f"peer {peer}", "peers", 90, 300, **asked)
        if peer in CPU_PEERS:
            step = step._replace(missing="its runner in benchmarks/peers computes on the CPU")
        elif not is_installed(peer, venvs):
            step = step._replace(missing=f"not installed: no environment {venvs / peer}")
        steps.append(step)
    return steps
