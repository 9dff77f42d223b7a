"""The page of results: a table for each group, what failed, and what is left."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from benchmarks.accelerator.estimates import Estimates, read
from benchmarks.accelerator.runner import Step

COMMAND = "python -m benchmarks.accelerator"


class Beside(NamedTuple):
    """What rows are compared with: rows of peaks by precision or "copy", and estimates."""

    peaks: Mapping[str, Mapping[str, Any]]
    estimates: Estimates


# Headings, with the key of a row or a function of a row and of what is beside it.
_SPEED = {
    "what": "what",
    "workload": "name",
    "convolutions": "form",
    "products": "products",
    "cohort": "cohort",
    "clients": "num_clients",
    "rounds a call": "rounds_per_call",
    "s a round": "seconds_per_round",
    "least": "seconds_per_round_min",
    "most": "seconds_per_round_max",
    "estimated": lambda row, beside: beside.estimates.seconds(row),
    "over the estimate": lambda row, beside: _over(row, beside.estimates.seconds(row)),
    "clients a s": "clients_per_second",
    "examples a s": "examples_per_second",
    "GFLOP/s": "gflops",
    "of float32 peak": lambda row, beside: _share(row, beside.peaks, "gflops", "float32"),
    "of default peak": lambda row, beside: _share(row, beside.peaks, "gflops", "default"),
    "over no privacy": "dp_overhead",
    "compiling, s": "compile_seconds",
    "the process, s": "seconds_of_the_process",
    "device MB": "peak_device_mb",
    "chunk": "clients_per_chunk",
    "error": "error",
}
_TABLES: dict[str, tuple[str, dict[str, Any]]] = {
    "tests": (
        "Tests",
        {k: k for k in ("file", "passed", "failed", "skipped", "seconds")},
    ),
    "workloads": ("Workloads", _SPEED),
    "layouts": (
        "Clients side by side, a step of the EMNIST CNN on 20 images each",
        {
            "form": "form",
            "precision": "precision",
            "clients": "clients",
            "s": "seconds",
            "least": "seconds_min",
            "most": "seconds_max",
            "clients a s": "clients_per_second",
            "of peak": lambda row, beside: _share(row, beside.peaks, "gflops", row["precision"]),
            "of copy": lambda row, beside: _share(row, beside.peaks, "gb_per_second", "copy"),
            "compiling, s": "compile_seconds",
            "temporary MB": "temporary_mb",
            "arguments MB": "arguments_mb",
            "error": "error",
        },
    ),
    "peaks": (
        "Peaks",
        {k: k for k in ("what", "precision", "gflops", "gb_per_second")},
    ),
    "rounding": (
        "Errors of split products, and the bound that record-level privacy relies on",
        {k: k for k in ("family", "terms", "bound", "of bound")},
    ),
    "peers": (
        "Peers",
        {
            "workload": lambda row, beside: row.get("workload", row.get("name")),
            "implementation": "implementation",
            "processes": "processes",
            "clients": lambda row, beside: row.get("clients", row.get("cohort")),
            "s a round": lambda row, beside: float(row.get("seconds") or row["seconds_per_round"]),
            "ms a client": lambda row, beside: _milliseconds(row),
            "one step": "verdict",
            "versions": "versions",
        },
    ),
    "settings": ("Widths of chunks, autotuning, kept programs", _SPEED),
    "scale": ("Cohorts and populations", _SPEED),
    "trace": (
        "A round by kernel",
        {
            "workload": "name",
            "kernel": "kernel",
            "runs": "runs",
            "ms": "milliseconds",
            "of the traced round": "share",
            "s a round": "seconds_per_round",
            "s traced": "seconds_traced",
        },
    ),
}
_NOTES = """\
Seconds are medians of rounds after one that is not counted; compiling is that of the round, beside
others of the same step, without data and imports. Default precision is TF32 on NVIDIA cards and
bfloat16 on TPUs, split is three products of bfloat16; record-level privacy (W3, W5) computes in
float32. Shares are of the peaks below, measured in a process of their own; operations are those of
three forward passes with direct sums. Bytes are those that XLA counts. Device memory is the most so
far of the process, which holds all workloads of a step. W1 to W5 compute on random inputs; P1,
P1dp, P2, F1 and F4 have the sizes of published settings, and learn nothing."""
_PEERS = """\
Opacus and pfl-research round factors of convolutions to TF32 by default; the step of a client that
is compared with float64 is computed without. Processes of pfl-research share the device."""


def page(results: Mapping[str, Any]) -> str:
    """Writes the page."""
    steps: Mapping[str, Mapping[str, Any]] = results["steps"]
    peaks = {
        "copy" if row["what"] == "copy" else row["precision"]: row
        for row in steps.get("peaks", {}).get("rows", ())
    }
    facts = ", ".join(f"{k} {v}" for k, v in results["machine"].items() if v is not None)
    dates = sorted({found["date"] for found in steps.values()}) or ["no results"]
    lines = ["# Accelerator", "", f"{dates[0]} to {dates[-1]}. {facts}.", ""]
    lines += [f"All of it: `{COMMAND}`. {_NOTES} {_PEERS}", ""]
    beside = Beside(peaks, read(results["machine"]))
    if beside.estimates.target:
        lines += [f"Estimates are those of a {beside.estimates.target} in compiled.md.", ""]
    for group, (title, columns) in _TABLES.items():
        rows = [
            (name, row)
            for name, found in steps.items()
            if found["group"] == group
            for row in found["rows"]
        ]
        if not rows:
            continue
        used = {
            head: get
            for head, get in columns.items()
            if any(_cell(r, get, beside) for _, r in rows)
        }
        lines += [f"## {title}", "", "| " + " | ".join([*used, "command"]) + " |"]
        lines.append("|---" * (len(used) + 1) + "|")
        for name, row in rows:
            cells = [*(_cell(row, get, beside) for get in used.values()), f"`{_again(name)}`"]
            lines.append("| " + " | ".join(cells) + " |")
        lines.append("")
    bad = [(name, found) for name, found in steps.items() if found["status"] != "done"]
    if bad:
        lines += ["## Without a whole result", ""]
        lines += [f"- {k}: {v['status']}, {v['error'].replace('|', ' ')}" for k, v in bad] + [""]
    lines += ["## Left", "", ", ".join(results["left"]) or "Nothing.", ""]
    return "\n".join(lines)


def _again(name: str) -> str:
    return f'{COMMAND} --again --only "{name}"'


def _cell(row: Mapping[str, Any], get: Any, beside: Beside) -> str:
    value = get(row, beside) if callable(get) else row.get(get)
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value).replace("|", " ")


def _share(row: Mapping[str, Any], peaks: Mapping[str, Any], key: str, peak: str) -> float | None:
    """The share of a peak; None while either is not measured."""
    measured, highest = row.get(key), peaks.get(peak, {}).get(key)
    return measured / highest if measured and highest else None


def _over(row: Mapping[str, Any], estimate: float | None) -> float | None:
    measured = row.get("seconds_per_round")
    return measured / estimate if measured and estimate else None


def _milliseconds(row: Mapping[str, Any]) -> float:
    if "ms_per_client" in row:
        return float(row["ms_per_client"])
    return float(1e3 / row["clients_per_second"])


def summary(left: Sequence[str]) -> str:
    """Says what is left to do."""
    if not left:
        return "nothing is left"
    return f"left, for another call of the command: {', '.join(left)}"


def plan(steps: Sequence[Step]) -> str:
    """Lists steps with their seconds, the sum so far, their limits, and what they decide."""
    lines, whole = [f"{'step':24} {'seconds':>7} {'sum':>5} {'limit':>5}  decides"], 0.0
    for step in steps:
        if step.missing:
            lines.append(f"{step.name:24} {'-':>7} {whole:5.0f} {'-':>5}  {step.missing}")
            continue
        whole += step.seconds
        numbers = f"{step.seconds:7.0f} {whole:5.0f} {step.limit:5.0f}"
        lines.append(f"{step.name:24} {numbers}  {step.decides}")
    minutes = f"{whole / 60:.1f} minutes of expected seconds, and at most the limit of each"
    return "\n".join([*lines, f"{minutes}; what does not fit a call is left for the next"])
