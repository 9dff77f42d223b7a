"""Estimates the rounds of an experiment on devices that are not here, by their compilers."""

import json
import os
import pathlib
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

from fedjax_dp.core import checks, program_text, targets
from fedjax_dp.core.backend import traced_for
from fedjax_dp.experiment.assembly.assemble import execution_of, federation_of, population_of
from fedjax_dp.experiment.reading.config_files import load_config

# Of what takes the time, so many kinds of operations are listed.
_LISTED = 8


class Part(NamedTuple):
    """Operations of one kind in one loop."""

    loops: str  # The loops that run them, see `core.program_text`.
    kind: str  # What they do.
    share: float  # Of the seconds of a round.
    seconds: float  # A round.


class Estimate(NamedTuple):
    """What compilers say of an experiment's rounds; all but counts of devices is of one device."""

    device: str  # The target, as `core.targets.target` reads it.
    devices: int  # How many.
    fits: bool  # Whether examples, states and all that a round computes fit in its memory.
    argument_bytes: float  # Examples, states and frozen parameters.
    temporary_bytes: float  # What rounds hold besides.
    memory_bytes: float  # Of the device.
    clients_per_chunk: int  # The clients that are computed side by side.
    trace_seconds: float  # To trace the rounds on this machine.
    compile_seconds: float  # To compile them on this machine.
    round_seconds: float  # A round, by the compiler's estimates; nothing was measured.
    round_bytes: float  # That a round reads and writes in the device's memory.
    round_operations: float  # That a round starts; kernels on a GPU.
    exchanged_bytes: dict[str, float]  # That devices exchange in a round, by kind.
    parts: list[Part]  # What takes the time, most first.


def estimate(file: str | None, overrides: Sequence[str], device: str) -> Estimate:
    """Estimates rounds on a device, in a process of its own, which its compiler may end."""
    wanted = targets.target(device)
    load_config(file, overrides)
    targets.compiler(wanted)
    with tempfile.TemporaryDirectory() as folder:
        result = pathlib.Path(folder) / "estimate.json"
        words = [sys.executable, "-m", __name__, str(result), device, file or "", *overrides]
        ended = subprocess.run(
            words,
            env=os.environ | targets.environment(wanted),
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
        if not result.exists():
            last = (ended.stderr.strip().splitlines() or ["it wrote nothing"])[-1]
            raise RuntimeError(
                f"the compiler for {device} ended with status {ended.returncode}: {last}"
            )
        estimated = json.loads(result.read_text(encoding="utf-8"))
    if "error" in estimated:
        raise ValueError(estimated["error"])
    parts = [Part(**part) for part in estimated.pop("parts")]
    return Estimate(**estimated, parts=parts)


def _here(file: str | None, overrides: Sequence[str], device: str) -> Estimate:
    """Estimates in this process, which has the environment of its target."""
    from fedjax_dp.engine.execution.elsewhere import compiled_for

    config, wanted = load_config(file, overrides), targets.target(device)

    def build():
        population = population_of(config)
        federation = federation_of(config, population)
        return federation, population.train, population.validation

    rule, size = "be 1 for devices that are not here", config.execution.model_devices
    checks.require(size == 1, "execution.model_devices", rule, size)
    section = config.execution.model_copy(update={"devices": 1, "measured": None})
    # What a device can compute decides which choices are refused.
    with traced_for(wanted.device.facts):
        execution = execution_of(section, config.run)
    compiled = compiled_for(wanted, build, execution)
    spent: dict[tuple[str, str], float] = defaultdict(float)
    for one in compiled.operations:
        seconds = program_text.with_start(one, wanted.device)
        spent[one.loops, one.kind] += one.times * seconds * compiled.passes.get(one.loops, 0.0)
    whole = compiled.round
    exchanged: dict[str, float] = defaultdict(float)
    for loops, by_kind in compiled.collectives.items():
        for kind, count in by_kind.items():
            exchanged[kind] += count * compiled.passes.get(loops, 0.0)
    heaviest = sorted(spent.items(), key=lambda item: -item[1])[:_LISTED]
    return Estimate(
        device,
        wanted.num_devices,
        compiled.memory.fits,
        compiled.memory.arguments,
        compiled.memory.temporaries,
        compiled.memory.available,
        compiled.clients_per_chunk,
        compiled.trace_seconds,
        compiled.compile_seconds,
        whole.seconds,
        whole.bytes,
        whole.operations,
        dict(exchanged),
        [Part(*key, seconds / max(whole.seconds, 1e-12), seconds) for key, seconds in heaviest],
    )


def main() -> None:
    """Writes the estimate, or the error, of the words of a command: FILE DEVICE CONFIG [KEY…]."""
    result, device, file, *overrides = sys.argv[1:]
    try:
        estimated: dict[str, Any] = _here(file or None, overrides, device)._asdict()
        estimated["parts"] = [part._asdict() for part in estimated["parts"]]
    except (ValueError, MemoryError) as error:
        estimated = {"error": str(error)}
    except RuntimeError as error:
        # JAX has no type of its own for it.
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        first = str(error).partition("\n")[0]
        hint = (
            "use a smaller execution.clients_per_chunk, a smaller batch or model, or more devices"
        )
        estimated = {"error": f"rounds do not fit in the memory of {device}; {hint}: {first}"}
    pathlib.Path(result).write_text(json.dumps(estimated), encoding="utf-8")


if __name__ == "__main__":
    main()
