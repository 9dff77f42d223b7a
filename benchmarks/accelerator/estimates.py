"""The compilers' estimates of rounds (`results/compiled.jsonl`), beside which figures stand."""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from benchmarks.accelerator.runner import ROOT
from fedjax_dp.core.choices import choices
from fedjax_dp.core.targets import KINDS

FILE = ROOT / "benchmarks" / "results" / "compiled.jsonl"
# Facts of a row by which its round is another than the one that was compiled.
_CHANGED = ("num_clients", "cohort", "shape", "products", "width_asked")


class Estimates(NamedTuple):
    """Estimates for one kind of device.

    Attributes:
      target: its name in `core.targets`; empty if no rounds were compiled for it.
      rounds: seconds of a round by workload.
      form: of convolutions, which the device chooses by itself.
    """

    target: str = ""
    rounds: Mapping[str, float] = {}
    form: str = ""

    def seconds(self, row: Mapping[str, Any]) -> float | None:
        """Returns the estimate of a measured row; None if that round was not compiled."""
        is_other = any(row.get(key) is not None for key in _CHANGED)
        if is_other or row.get("form", self.form) != self.form:
            return None
        return self.rounds.get(str(row.get("name")))


def read(machine: Mapping[str, Any]) -> Estimates:
    """Reads the estimates for a machine's device, or for one of the same compute capability."""
    text = FILE.read_text(encoding="utf-8") if FILE.exists() else ""
    rows = [json.loads(line) for line in text.splitlines()]
    for target in _targets(machine):
        # A later row replaces an earlier one.
        rounds = {r["workload"]: r["round_seconds"] for r in rows if r["target"] == target}
        if rounds:
            return Estimates(target, rounds, choices(KINDS[target].facts).convolutions)
    return Estimates()


def _targets(machine: Mapping[str, Any]) -> list[str]:
    """Lists names of targets, the nearest to the device first."""
    device, capability = str(machine.get("device", "")), machine.get("compute_capability")
    named = [name for name, kind in KINDS.items() if device == kind.device]
    named += [name for name in KINDS if name.upper() in device.upper().split()]
    alike = [name for name, kind in KINDS.items() if capability and kind.capability == capability]
    return list(dict.fromkeys([*named, *alike]))
