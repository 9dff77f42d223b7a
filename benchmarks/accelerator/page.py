"""The page of results: a table for each group, what failed, and what is left."""

from collections.abc import Mapping, Sequence
from typing import Any

COMMAND = "python -m benchmarks.accelerator"
# Headings, with the key of a row or a function of a row and the peaks.
_SPEED = {
    "workload": "name",
    "products": "products",
    "cohort": "cohort",
    "clients": "num_clients",
    "rounds a call": "rounds_per_call",
    "s a round": "seconds_per_round",
    "least": "seconds_per_round_min",
    "most": "seconds_per_round_max",
    "clients a s": "clients_per_second",
    "examples a s": "examples_per_second",
    "GFLOP/s": "gflops",
    "of float32 peak": lambda row, peaks: _share(row, peaks, "gflops", "float32"),
    "of default peak": lambda row, peaks: _share(row, peaks, "gflops", "default"),
    "over no privacy": "dp_overhead",
    "compiling, s": "compile_seconds",
    "device MB": "peak_device_mb",
    "chunk": "clients_per_chunk",
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
            "of peak": lambda row, peaks: _share(row, peaks, "gflops", row["precision"]),
            "of copy": lambda row, peaks: _share(row, peaks, "gb_per_second", "copy"),
            "compiling, s": "compile_seconds",
            "temporary MB": "temporary_mb",
            "arguments MB": "arguments_mb",
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
        {k: k for k in ("workload", "implementation", "ms_per_client", "verdict", "versions")},
    ),
    "scale": ("Cohorts and populations", _SPEED),
}
_NOTES = """\
Seconds are medians of rounds after one that is not counted; compiling is that of the round, without
data and imports. Default precision is TF32 on NVIDIA cards and bfloat16 on TPUs, split is three
products of bfloat16; record-level privacy (W3, W5) computes in float32. Shares are of the peaks
below, measured in a process of their own; operations are those of three forward passes with direct
sums. Bytes are those that XLA counts. Device memory is the most so far of the process, which
measures the rows of one step in order. W1 to W5 compute on random inputs; P1, P1dp, P2, F1 and F4
have the sizes of published settings, and learn nothing."""


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
    lines += [f"All of it: `{COMMAND}`. {_NOTES}", ""]
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
            head: get for head, get in columns.items() if any(_cell(r, get, peaks) for _, r in rows)
        }
        lines += [f"## {title}", "", "| " + " | ".join([*used, "command"]) + " |"]
        lines.append("|---" * (len(used) + 1) + "|")
        for name, row in rows:
            cells = [*(_cell(row, get, peaks) for get in used.values()), f"`{_again(name)}`"]
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


def _cell(row: Mapping[str, Any], get: Any, peaks: Mapping[str, Any]) -> str:
    value = get(row, peaks) if callable(get) else row.get(get)
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _share(row: Mapping[str, Any], peaks: Mapping[str, Any], key: str, peak: str) -> float | None:
    """The share of a peak; None while either is not measured."""
    measured, highest = row.get(key), peaks.get(peak, {}).get(key)
    return measured / highest if measured and highest else None


def summary(left: Sequence[str]) -> str:
    """Says what is left to do."""
    if not left:
        return "nothing is left"
    return f"left, for another call of the command: {', '.join(left)}"
