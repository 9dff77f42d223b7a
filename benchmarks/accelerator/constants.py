"""Prints what `core/choices` would choose by a file of results, and its constants for that device.

    python -m benchmarks.accelerator.constants benchmarks/results/accelerator-gpu.json

What `auto` stands for without and with the measured speeds, the speeds that decide it, and the
constants that would make it the default: to be copied into `fedjax_dp/core/choices.py` by hand,
with the file as their source.
"""

import argparse
import json
import math
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.accelerator.steps import FORMS
from fedjax_dp.core import choices as rules
from fedjax_dp.core.backend import Facts
from fedjax_dp.io import read_measured


def facts_of(machine: Mapping[str, Any]) -> Facts:
    """Reads what the backend reported."""
    memory = machine.get("device_memory_mb")
    return Facts(
        machine["backend"],
        machine["device"],
        machine.get("compute_capability") or "",
        machine.get("multiprocessors"),
        math.inf if memory is None else memory * 2.0**20,
    )


def lines(facts: Facts, measured: rules.Measured) -> Iterator[str]:
    """Says what speeds make of the choices, and of the constants."""
    before, after = rules.choices(facts), rules.choices(facts, measured)
    yield f"device: {facts.device} ({facts.backend}), {facts.cores or 'unknown'} multiprocessors"
    yield "choices: estimated, then measured"
    for field, old, new in zip(before._fields, before, after, strict=True):
        yield f"  {field}: {_number(old)}{'' if old == new else f' -> {_number(new)}'}"
    yield "fastest, clients a second (at so many clients side by side; enough at)"
    names = [(form, each) for form, precisions in FORMS.items() for each in precisions]
    for form, precision in [*names, ("records", "float32"), ("records", "split")]:
        best, enough = measured.best(form, precision), measured.enough(form, precision)
        if best is not None and enough is not None:
            [at] = [s.clients for s in measured.speeds if _is(s, form, precision, best)][:1]
            yield f"  {form} {precision}: {best:,.0f} (at {at}; enough at {enough.clients})"
    yield "constants"
    if facts.backend == "cpu":
        yield "  none: those of a CPU are measured on whole rounds (benchmarks/notes.md)"
        return
    busy = after.operations_per_chunk
    if facts.backend == "gpu" and facts.cores:
        yield f"  _OPERATIONS_OF_A_CORE = {busy / facts.cores:.2g}"
        yield f"  _GPU_OPERATIONS = {100 * busy / facts.cores:.2g}"
    elif facts.backend == "tpu":
        yield f"  _TPU_OPERATIONS = {busy:.2g}"
    yield f'  _ACCELERATED = "{after.convolutions}"'
    widest = [enough.clients for of in names if (enough := measured.enough(*of)) is not None]
    if widest:
        yield f"  _WIDEST = {max(widest)}"
    yield f'  products by default = "{after.products}"'


def _is(speed: rules.Speed, form: str, precision: str, rate: float) -> bool:
    return (speed.form, speed.precision, speed.clients_per_second) == (form, precision, rate)


def _number(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=pathlib.Path)
    path = parser.parse_args().file
    measured = read_measured(path)
    machine = json.loads(path.read_text(encoding="utf-8"))["machine"]
    print("\n".join(lines(facts_of(machine), measured)))


if __name__ == "__main__":
    main()
