"""The steps in the order of their worth: on an accelerator whole, on a CPU with tiny sizes."""

import importlib.util
import json
import pathlib
import sys
from collections.abc import Mapping
from typing import Any

from benchmarks.accelerator.runner import ROOT, Step
from benchmarks.peers.install import is_installed, python_of
from fedjax_dp.experiment.studies.measuring import COUNTS

VENVS = ROOT / "benchmarks" / "peers" / ".venvs"
# How convolutions are computed where each client has kernels of its own, in the words of
# `core.choices`, with the precisions in which their steps are timed. JAX splits no convolution.
FORMS: Mapping[str, tuple[str, ...]] = {
    "native": ("float32", "default", "bfloat16"),
    "products": ("float32", "default", "bfloat16", "split"),
}
# Of our own kernels, which are for TPUs.
_KERNEL = ("float32", "default", "bfloat16")
# Those in which whole rounds of workloads are timed.
ROUND_FORMS = tuple(FORMS)
# Files of the quick suite that say whether results hold on another backend.
SUITE = (
    "tests/core/test_sums.py",
    "tests/server/test_limbs.py",
    "tests/server/test_secure_sum.py",
    "tests/server/test_secure_aggregation.py",
    "tests/clients/test_split_products.py",
    "tests/privacy/test_clipping.py",
    "tests/models/test_per_example.py",
    "tests/privacy/test_noise.py",
    "tests/engine/test_federation.py",
    "tests/engine/test_laws.py",
    "tests/engine/test_execution.py",
)
# Published settings and workloads with their twins, which share data and programs of a process:
# seconds, and the rounds of one call beside calls of one round. Tracing and compiling take most:
# for an H100 that is not there, 25 s of a processor for P1dp and 50 for W5.
FAMILIES: Mapping[str, tuple[float, int | None, tuple[str, ...]]] = {
    "P1": (40, 20, ("P1", "P1dp")),
    "F1": (25, 50, ("F1",)),
    "F4": (12, 100, ("F4",)),
    "W1": (30, None, ("W1", "W1dp")),
    "W2": (30, None, ("W2", "W2dp")),
    "W3": (35, None, ("W3nodp", "W3")),
    "W4": (15, None, ("W4", "W4dp")),
    "W5": (55, None, ("W5nodp", "W5")),
}
# Without convolutions, and therefore without a choice of their form.
_PLAIN = ("F4", "W4", "W4dp")
# Clipped gradients of records, whose choice is that of products.
_OF_RECORDS = ("W3", "W5")
COHORTS = (10, 100, 1000, 10_000)
# A client of 1 KiB, so that a million fit beside their model.
MILLION = {
    "num_clients": 1_000_000, "cohort": 1000, "shape": [64], "examples_per_client": 4,
    "batch_size": 4,
}  # fmt: skip
# Processes of pfl-research on one device; its own benchmark of CIFAR-10 had five.
PROCESSES = (1, 5, 10)
# Peers whose runners compute on the accelerator, with their workloads and their seconds.
PEERS: Mapping[str, tuple[float, tuple[str, ...]]] = {
    "opacus": (90, ("W3", "W5")),
    "jax_privacy": (45, ("W3",)),
    "fedjax": (45, ("W1", "W4")),
    "drjax": (45, ("W1", "W4")),
}
CPU_PEERS = ("flower",)
# Fields of workloads on a CPU: two clients of two steps.
_TINY = {"num_clients": 4, "cohort": 2, "examples_per_client": 4, "batch_size": 2}


def measuring(
    name: str,
    group: str,
    seconds: float,
    decides: str,
    limit: float | None = None,
    /,
    **arguments: Any,
) -> Step:
    """Makes a step of a function of `measurements`; its limit is three times its seconds."""
    command = ("-m", "benchmarks.accelerator.measurements", json.dumps(arguments))
    return Step(name, group, command, seconds, limit or max(75.0, 3 * seconds), "", decides)


MACHINE = measuring("machine", "machine", 10, "which device this is", 120, do="machine")


def on_accelerator(venvs: pathlib.Path = VENVS) -> list[Step]:
    """Lists all steps."""
    return _steps(venvs, is_tiny=False)


def on_cpu(venvs: pathlib.Path = VENVS) -> list[Step]:
    """Lists the same steps with tiny sizes: they show that all works; figures say little."""
    # Processors may be busy with other work.
    return [step._replace(limit=600.0) for step in _steps(venvs, is_tiny=True)]


def _steps(venvs: pathlib.Path, is_tiny: bool) -> list[Step]:
    return [
        *_tests(is_tiny),
        *_workloads(is_tiny),
        *_best_peers(venvs, is_tiny),
        *_layouts(is_tiny),
        *_settings(is_tiny),
        *_scale(is_tiny),
        _trace(is_tiny),
        *_more(venvs, is_tiny),
    ]


def _tests(is_tiny: bool) -> list[Step]:
    options, workers = ([], 2) if is_tiny else (["--optimized"], 8)
    right = "whether clipping, noise, rounds, secure sums and split products are right here"
    asked = {"do": "tests", "files": SUITE, "options": options, "workers": workers}
    bound = "whether products may be split: an error above the bound voids the privacy statement"
    width = 64 if is_tiny else 512
    return [
        # Starting and collecting take the rest.
        measuring("quick suite", "tests", 75, right, 180, **asked, seconds=60),
        measuring("rounding", "rounding", 15, bound, do="rounding", width=width),
    ]


def _changes(name: str, is_tiny: bool) -> dict[str, Any]:
    if not is_tiny:
        return {}
    if name.startswith("W3"):
        return _TINY | {"num_steps": 2}
    # Their one step reads all examples.
    return _TINY | ({"batch_size": 4} if name.startswith(("W4", "W5")) else {})


def _workloads(is_tiny: bool) -> list[Step]:
    steps = []
    for family, (seconds, together, names) in FAMILIES.items():
        cases: list[dict[str, Any]] = []
        for name in names:
            case = {"name": name, "changes": _changes(name, is_tiny)}
            cases.append(case)
            # A CPU has one form of convolutions and of products; privacy of clients changes none.
            if is_tiny or name in _PLAIN:
                continue
            if name in _OF_RECORDS:
                cases.append(case | {"products": "split"})
            elif not name.endswith("dp") or name.endswith("nodp"):
                cases[-1:] = [case | {"form": form} for form in ROUND_FORMS]
        decides = "the speed to publish; the cost of privacy"
        if family not in _PLAIN:
            decides += f"; {' or '.join(ROUND_FORMS)} convolutions"
        several = 2 if together and is_tiny else together
        rounds = 1 if is_tiny else 5
        asked = {"do": "rounds", "cases": cases, "rounds": rounds, "together": several}
        steps.append(measuring(family, "workloads", seconds, decides, **asked))
    return steps


def _best_peers(venvs: pathlib.Path, is_tiny: bool) -> list[Step]:
    few = ["--cohort", "4", "--users", "8"] if is_tiny else []
    processes, rounds = ((1, 2), 1) if is_tiny else (PROCESSES, 5)
    asked = {"do": "pfl", "processes": processes, "options": few, "rounds": rounds}
    python = sys.executable if _is_here("pfl") else str(python_of("pfl", venvs))
    decides = "how much faster P1 is than pfl-research with its best number of processes"
    pfl = measuring("peer pfl", "peers", 45, decides, 150, python=python, **asked)
    pfl = pfl._replace(missing=_missing("pfl", venvs))
    return [pfl, _peer("opacus", venvs, is_tiny)]


def _peer(peer: str, venvs: pathlib.Path, is_tiny: bool) -> Step:
    seconds, names = PEERS[peer]
    # Peers train on whole workloads, of which this one is small.
    names, rounds = (names[-1:], 1) if is_tiny else (names, 3)
    asked = {"peer": peer, "names": names, "rounds": rounds, "venvs": str(venvs)}
    here = {"here": _is_here(peer)}
    decides = f"how much faster {' and '.join(names)} are than {peer}"
    step = measuring(f"peer {peer}", "peers", seconds, decides, 200, do="peers", **asked, **here)
    return step._replace(missing=_missing(peer, venvs))


def _layouts(is_tiny: bool) -> list[Step]:
    forms: dict[str, tuple[str, ...]] = {**FORMS, "records": ("float32", "split")}
    counts = COUNTS
    if is_tiny:
        forms, counts = dict.fromkeys(forms, ("float32",)), (2,)
    chosen = "the width of chunks and the form of convolutions; "
    product, copied = (512, 16) if is_tiny else (8192, 2048)
    peaks = {"do": "peaks", "size": product, "copied_mb": copied}
    return [
        measuring("peaks", "peaks", 12, "what the shares are of", **peaks),
        *(
            measuring(
                f"{form} steps",
                "layouts",
                # Starting, and a program for each precision and count.
                10 + 8 * len(precisions),
                ("exact or split products of records" if form == "records" else chosen + form),
                do="layouts",
                form=form,
                precisions=precisions,
                counts=counts,
            )
            for form, precisions in forms.items()
        ),
    ]


def _settings(is_tiny: bool) -> list[Step]:
    """Lists what can be set: autotuning, and the cache of programs."""
    kept = "how long a second process compiles, with the programs of the first on disk"
    asked = {"do": "cache", "name": "P1", "changes": _changes("P1", is_tiny)}
    return [_autotuning(0, is_tiny), measuring("programs kept", "settings", 45, kept, **asked)]


def _widths(is_tiny: bool) -> Step:
    p1 = {"name": "P1", "changes": _changes("P1", is_tiny)}
    cases = [p1 | {"clients_per_chunk": width} for width in ((1, 2) if is_tiny else (10, 25))]
    how = {"do": "rounds", "cases": cases, "rounds": 1 if is_tiny else 5}
    return measuring(
        "widths of P1", "settings", 30, "its width of chunks, beside the cohort", **how
    )


def _autotuning(level: int, is_tiny: bool) -> Step:
    decides = f"whether autotuning gains what it takes: P1 at level {level}, where 4 is usual"
    asked = {"level": level, "name": "P1", "changes": _changes("P1", is_tiny)}
    asked |= {"do": "flags", "rounds": 1 if is_tiny else 5}
    return measuring(f"autotuning {level}", "settings", 22, decides, **asked)


def _scale(is_tiny: bool) -> list[Step]:
    cohorts = (2, 4) if is_tiny else COHORTS
    few = _TINY if is_tiny else {"num_clients": COHORTS[-1]}
    w4 = [{"name": "W4", "changes": few | {"batch_size": 4, "cohort": n}} for n in cohorts]
    p1 = [{"name": "P1", "changes": _changes("P1", is_tiny) | {"cohort": n}} for n in cohorts[:3]]
    if not is_tiny:
        for case in w4:
            del case["changes"]["batch_size"]
    million = MILLION | ({"num_clients": 10_000, "cohort": 10} if is_tiny else {})
    rounds = 1 if is_tiny else 5
    decides = "how time and memory grow with the cohort"
    how = {"do": "rounds", "rounds": rounds}
    population = "whether the size of the population costs anything in a round"
    return [
        measuring("cohorts of W4", "scale", 25, decides, **how, cases=w4),
        measuring("cohorts of P1", "scale", 35, decides, **how, cases=p1),
        measuring(
            "a million clients", "scale", 20, population,
            **how, cases=[{"name": "W4dp", "changes": million}],
        ),
    ]  # fmt: skip


def _trace(is_tiny: bool) -> Step:
    changes = _changes("P1", is_tiny)
    decides = "which kernels of P1 take the time, and how long the device waits"
    asked = {"do": "kernels", "name": "P1", "changes": changes}
    return measuring("trace of P1", "trace", 25, decides, **asked)


def _more(venvs: pathlib.Path, is_tiny: bool) -> list[Step]:
    """Lists what may be left when a quarter of an hour is over."""
    changes: dict[str, Any] = {}
    if is_tiny:
        small = {"width": 8, "num_heads": 2, "num_layers": 1, "intermediate_size": 8}
        changes = _TINY | {"num_classes": 16, "model_options": small}
    cases = [{"name": "P2", "changes": changes}]
    asked = {"do": "rounds", "cases": cases, "rounds": 1 if is_tiny else 5}
    asked["together"] = 2 if is_tiny else 5
    p2 = measuring("P2", "workloads", 45, "the speed to publish", **asked)
    asked = {"do": "layouts", "form": "kernel", "precisions": ("float32",) if is_tiny else _KERNEL}
    asked["counts"] = (2,) if is_tiny else COUNTS
    decides = "whether kernels of our own are chosen, on a TPU"
    kernel = measuring("kernel steps", "layouts", 30, decides, **asked)
    peers = [_peer(peer, venvs, is_tiny) for peer in PEERS if peer != "opacus"]
    for peer in CPU_PEERS:
        step = measuring(f"peer {peer}", "peers", 0, "nothing here", do="peers", peer=peer)
        peers.append(step._replace(missing="its runner in benchmarks/peers computes on the CPU"))
    return [p2, _widths(is_tiny), _autotuning(2, is_tiny), kernel, *peers]


def _is_here(peer: str) -> bool:
    """Whether this environment has a peer itself."""
    return importlib.util.find_spec(peer) is not None


def _missing(peer: str, venvs: pathlib.Path) -> str:
    """Says why a peer cannot run; empty if it can."""
    if _is_here(peer) or is_installed(peer, venvs):
        return ""
    return f"not installed, neither here nor in an environment {venvs.name}/{peer}"
