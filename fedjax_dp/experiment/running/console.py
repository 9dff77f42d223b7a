"""The progress and the result of a run in words, for terminals and logs."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from fedjax_dp.core.decimals import shown
from fedjax_dp.experiment.running.run import Outcome

# Share of padding in a round above which it is shown.
_MUCH_PADDING = 0.5


def round_in_words(rounds: int, total: int, row: Mapping[str, Any]) -> str:
    """Describes the progress of a run: completed rounds and the newest metrics."""
    text = f"round {rounds} of {total}"
    if math.isfinite(row.get("test_accuracy", math.nan)):
        text += f", accuracy {row['test_accuracy']:.3f}"
    if math.isfinite(row.get("shared_test_accuracy", math.nan)):
        text += f" (shared model {row['shared_test_accuracy']:.3f})"
    for name in ("epsilon_record", "epsilon_client"):
        if row.get(name) is not None:
            text += f", ε {shown(name, row[name])} ({name.removeprefix('epsilon_')})"
    if row.get("padding_share") is not None and row["padding_share"] > _MUCH_PADDING:
        text += f", padding {row['padding_share']:.2f}"
    return text


def describe_early_end(outcome: Outcome) -> str:
    """Describes why a run ended before its last round; empty if it did not."""
    rounds, stopped_by = outcome.summary["rounds"], outcome.summary.get("stopped_by")
    return {
        "finished": "",
        "interrupted": f"interrupted after round {rounds}",
        "budget": f"stopped after round {rounds}: one more would exceed the budget",
        "callback": f"stopped after round {rounds} by {stopped_by}",
    }[outcome.ended]


def summary_in_words(summary: Mapping[str, Any]) -> str:
    """Describes the result of a run in one line: rounds, accuracy, and ε with what it covers."""
    count = summary["rounds"]
    parts = [f"{count} {'round' if count == 1 else 'rounds'} in {summary['seconds']:.1f} s"]
    if "simulated_seconds" in summary:
        parts.append(f"{summary['simulated_seconds']:.6g} simulated seconds")
    of_all, shared = (summary.get(f"{of}test_accuracy", np.nan) for of in ("", "shared_"))
    if np.isfinite(of_all):
        parts.append(f"test accuracy of {summary['test_accuracy_of']} {of_all:.4f}")
    if np.isfinite(shared):
        parts.append(f"of the shared model {shared:.4f}")
    if summary.get("worst_client_accuracy") is not None:
        parts.append(f"worst client {summary['worst_client_accuracy']:.4f}")
    if summary["epsilon"] is not None:
        low, high = (shown("dp_delta", summary[f"dp_delta{of}"], 6) for of in ("_smallest", ""))
        delta = high if low == high else f"{low} to {high}"
        parts.append(f"ε = {shown('epsilon', summary['epsilon'])} at δ = {delta}")
        parts[-1] += f", which covers {summary['covered_models']}"
        if "epsilon_of_shared_record" in summary:
            parts.append(_of_shared_record(summary))
        if "not_covered" in summary:
            parts.append(f"NOT covered: {summary['not_covered']}")
    else:
        parts.append("no privacy is claimed")
    return ", ".join(parts)


def _of_shared_record(summary: Mapping[str, Any]) -> str:
    """Reports ε of a record that several clients hold."""
    epsilon = summary["epsilon_of_shared_record"]
    if epsilon is None:
        return "no ε can be stated for a record that one client holds several times"
    delta = shown("dp_delta", summary["dp_delta_of_shared_record"], 6)
    return f"for a record that several clients hold: ε = {shown('epsilon', epsilon)} at δ = {delta}"
