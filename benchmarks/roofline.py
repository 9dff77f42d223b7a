"""Splits the time of a workload's round by part, beside what the machine could do at best.

`python -m benchmarks.roofline W1 W2 W3 W5` traces one round of each in a process of its own, reads
how long every operation of the compiled program took, and what it computes and moves, from the
program itself, and writes `results/roofline.json` and `results/roofline.md`. CPU only: there, the
trace names the operations of the program.
"""

import argparse
import glob
import json
import math
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

RESULTS = pathlib.Path(__file__).parent / "results"
DEFAULT = ("W1", "W2", "W3", "W3nodp", "W5", "W5nodp")
PRODUCTS = ("dot", "convolution")
# They contain other operations, whose times are counted, or take none.
CONTAINERS = ("while", "call", "conditional")
ARITHMETIC = (
    "add", "subtract", "multiply", "divide", "maximum", "minimum", "exponential", "log", "rsqrt",
    "sqrt", "tanh", "power", "negate", "abs", "compare", "select", "and", "or", "xor",
    "shift-left", "shift-right-logical", "reduce", "erf", "log-plus-one", "exponential-minus-one",
)  # fmt: skip
# They read or write a part of an operand.
PARTS = {"slice", "dynamic-slice", "dynamic-update-slice", "gather"}
BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s64": 8, "u64": 8, "f64": 8}

_SHAPE = re.compile(r"\b(pred|[sufb]f?\d+)\[([\d,]*)\]")
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.-]+) = (.*?) ([a-z][\w-]*)\((.*)$")

# Part by the source of an operation: the first rule of which a file is in the chain of callers,
# from the innermost.
SOURCES = (
    ("lowering/pooling.py", "pooling"),
    ("lowering/winograd.py", "convolutions"),
    ("lowering/patches.py", "convolutions"),
    ("lowering/convolution.py", "convolutions"),
    ("lowering/bilinear.py", "convolutions"),
    ("lowering/narrow.py", "convolutions"),
    ("models/per_example.py", "gradients of examples"),
    ("models/outer_products.py", "gradients of examples"),
    ("clients/client_data.py", "batches"),
    ("data/sampling.py", "batches"),
    ("data/participants.py", "batches"),
    ("optax/", "update"),
    ("core/sums.py", "sums"),
    ("server/", "server"),
    ("core/keys.py", "random numbers"),
    ("models/", "other layers and loss"),
    ("clients/gradients.py", "gradients of examples"),
    ("clients/training_loop.py", "update"),
    ("engine/", "engine"),
)


class Operation(NamedTuple):
    """An operation of a compiled program.

    Attributes:
      kind: its HLO opcode; that of the product within it, if it is a fusion with one.
      flops: floating-point operations, products as two for each pair of factors.
      moved: bytes of its operands and its result, each counted once; of an operand from which a
        part is taken, no more than of the result.
      part: what it is for.
    """

    kind: str
    flops: float
    moved: float
    part: str


def _sizes(text: str) -> Iterator[tuple[int, int]]:
    """Lists the elements and bytes of the arrays in a type."""
    for kind, dims in _SHAPE.findall(text):
        count = math.prod(int(d) for d in dims.split(",") if d)
        yield count, count * BYTES.get(kind, 4)


def _table(text: str, name: str) -> dict[int, str]:
    """Reads a numbered table at the head of a program."""
    _, found, rest = text.partition(f"\n{name}\n")
    lines = rest.split("\n\n", 1)[0].splitlines() if found else ()
    return {int(line.split(" ", 1)[0]): line.split(" ", 1)[1] for line in lines}


class Program:
    """The operations of an optimized HLO module, from its text."""

    def __init__(self, text: str) -> None:
        """Reads the instructions of all computations."""
        self._files, self._locations, self._frames = (
            _table(text, name) for name in ("FileNames", "FileLocations", "StackFrames")
        )
        self._inside: dict[str, list[tuple[str, str, str, str]]] = {}
        name = ""
        for line in text.splitlines():
            head = re.match(r"^(?:ENTRY )?%?([\w.-]+) \(.*\{$", line)
            if head:
                name = head[1]
                self._inside[name] = []
            elif name and (found := _INSTRUCTION.match(line)):
                self._inside[name].append((found[1], found[2], found[3], found[4]))
        self._types = {i[0]: i[1] for part in self._inside.values() for i in part}

    def operations(self) -> dict[str, Operation]:
        """Describes all operations that are not part of a fusion, by name."""
        calls = [rest for part in self._inside.values() for *_, rest in part]
        fused = {found[1] for rest in calls if (found := re.search(r"calls=%?([\w.-]+)", rest))}
        return {
            name: self._operation(kind, result, rest)
            for computation, instructions in self._inside.items()
            if computation not in fused
            for name, result, kind, rest in instructions
        }

    def _operation(self, kind: str, result: str, rest: str) -> Operation:
        called = re.search(r"calls=%?([\w.-]+)", rest)
        inside = self._inside.get(called[1], []) if called else []
        flops = self._flops(kind, result, rest)
        flops += sum(self._flops(k, r, more) for _, r, k, more in inside)
        kinds = [kind, *(k for _, _, k, _ in inside)]
        product = next((k for k in kinds if k in PRODUCTS), None)
        operands = re.findall(r"%([\w.-]+)", rest.split("), ")[0])
        written = sum(size for _, size in _sizes(result))
        read = [sum(size for _, size in _sizes(self._types.get(name, ""))) for name in operands]
        if not product and PARTS.intersection(kinds):
            read = [min(size, written) for size in read]
        moved = written + sum(read)
        return Operation(product or kind, flops, moved, self._part(rest, product is not None))

    def _flops(self, kind: str, result: str, rest: str) -> float:
        count = sum(elements for elements, _ in _sizes(result))
        operands = re.findall(r"%([\w.-]+)", rest.split("), ")[0])
        if kind == "dot":
            dims = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", rest)
            shape = _SHAPE.search(self._types.get(operands[0], ""))
            if dims and shape:
                sides = [int(d) for d in shape[2].split(",") if d]
                return 2.0 * count * math.prod(sides[int(d)] for d in dims[1].split(",") if d)
        if kind == "reduce":
            return float(sum(n for n, _ in _sizes(self._types.get(operands[0], ""))))
        return float(count) if kind in ARITHMETIC else 0.0

    def _part(self, rest: str, is_product: bool) -> str:
        metadata = re.search(r"stack_frame_id=(\d+)", rest)
        found = "without a source"
        for path in self._sources(int(metadata[1]) if metadata else 0):
            match = next((part for piece, part in SOURCES if piece in path), None)
            if match:
                found = match
                break
        if "threefry" in rest or "random_bits" in rest:
            found = "random numbers"
        if found in ("convolutions", "other layers and loss", "gradients of examples"):
            work = "products" if is_product else "patches and transforms"
            found += f": {work if found == 'convolutions' or is_product else 'the rest'}"
        return found

    def _sources(self, frame: int) -> Iterator[str]:
        """The files of an operation's callers, from the innermost."""
        while frame:
            location, above = map(int, re.findall(r"=(\d+)", self._frames[frame]))
            file = re.search(r"file_name_id=(\d+)", self._locations[location])
            yield self._files[int(file[1])] if file else ""
            frame = above - 1


def by_part(
    operations: Mapping[str, Operation], seconds: Mapping[str, tuple[int, float]]
) -> dict[str, dict[str, float]]:
    """Adds up what ran by part: times that it ran, seconds, operations and bytes."""
    found: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for name, (count, taken) in seconds.items():
        operation = operations.get(name)
        if operation is None or operation.kind in CONTAINERS:
            continue
        row = found[operation.part]
        row["calls"] += count
        row["seconds"] += taken
        row["flops"] += count * operation.flops
        row["bytes"] += count * operation.moved
    return {part: dict(row) for part, row in found.items()}


def bandwidth(kilobytes: int, seconds: float = 0.5) -> float:
    """Measures the best bytes per second, read and written, of changing an array in place."""
    import jax
    import jax.numpy as jnp

    turns = max(1, 2**18 // kilobytes)
    x = jnp.ones(kilobytes * 256, jnp.float32)

    def change(x: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, turns, lambda _, x: x + 1, x)

    changed = jax.jit(change, donate_argnums=0)
    x = changed(x).block_until_ready()
    best, started = math.inf, time.perf_counter()
    while time.perf_counter() - started < seconds:
        before = time.perf_counter()
        x = changed(x).block_until_ready()
        best = min(best, time.perf_counter() - before)
    return 2 * x.nbytes * turns / best


def traced_round(name: str, folder: pathlib.Path) -> dict[str, Any]:
    """Traces one round of a workload; `folder` is where XLA writes its programs."""
    import jax
    from jax.profiler import ProfileData

    from fedjax_dp.engine import ExecutionConfig
    from fedjax_dp.experiment.assembly.devices import offer_devices
    from fedjax_dp.experiment.studies.timing import gemm_peak, timed_case

    offer_devices("auto")
    case = timed_case(name, ExecutionConfig(rounds_per_call=1))
    untraced = min(case.time_round() for _ in range(3))
    peak, memory, caches = gemm_peak(0.5), bandwidth(2**18), bandwidth(2**12)
    with tempfile.TemporaryDirectory() as traces:
        with jax.profiler.trace(traces):
            traced = case.time_round()
        [file] = glob.glob(f"{traces}/**/*.xplane.pb", recursive=True)
        planes = ProfileData.from_file(file).planes
    events = [e for plane in planes for line in plane.lines for e in line.events]
    texts = sorted(folder.glob("*block_of*after_optimizations.txt"))
    [text] = [path.read_text("utf-8") for path in texts][-1:]
    seconds: dict[str, tuple[int, float]] = defaultdict(lambda: (0, 0.0))
    for event in events:
        facts = dict(event.stats)
        if facts.get("hlo_module") == "jit_block_of":
            count, before = seconds[facts["hlo_op"]]
            seconds[facts["hlo_op"]] = count + 1, before + event.duration_ns / 1e9
    operations = Program(text).operations()
    longest = sorted(seconds, key=lambda op: -seconds[op][1])
    inner = [op for op in longest if op in operations and operations[op].kind not in CONTAINERS]
    return {
        "seconds": untraced,
        "traced_seconds": traced,
        "devices": case.simulation.layout.mesh_size,
        "gemm_gflops": peak,
        "memory_gb_per_second": memory / 1e9,
        "cache_gb_per_second": caches / 1e9,
        "parts": by_part(operations, seconds),
        "operations": [
            {"name": op, "calls": seconds[op][0], "seconds": seconds[op][1]}
            | operations[op]._asdict()
            for op in inner[:12]
        ],
        "jax": jax.__version__,
    }


def table(found: Mapping[str, Mapping[str, Any]]) -> str:
    """Writes the parts of all rounds as Markdown."""
    lines = [
        "# A round by part",
        "",
        "By `python -m benchmarks.roofline`: the time of each operation of the compiled round, as",
        "the CPU's trace has it, added up over devices and by the source that it comes from.",
        "*Bound*: what the operations of a part would take at the product peak, or its bytes at",
        "the bandwidth of arrays of 4 MiB, which caches hold, whichever is longer, as a share of",
        "the part's time: where it is small there is room. Peak and bandwidths are of all cores,",
        "measured in the same minute. Bytes count each operand and result of an operation once.",
    ]
    for name, row in found.items():
        total = sum(part["seconds"] for part in row["parts"].values())
        each = row["devices"]
        lines += [
            "",
            f"## {name}",
            "",
            f"{row['seconds']:.2f} s a round ({row['traced_seconds']:.2f} traced), devices {each}, "
            f"with {total / each:.2f} s of operations each; "
            f"product peak {row['gemm_gflops']:.0f} GFLOP/s, "
            f"memory {row['memory_gb_per_second']:.0f} GB/s, "
            f"caches {row['cache_gb_per_second']:.0f} GB/s.",
            "",
            "| part | share | calls | GFLOP | GB | GFLOP/s | GB/s | bound |",
            "|---|---:|---:|---:|---:|---:|---:|---:|",
        ]
        parts = sorted(row["parts"].items(), key=lambda item: -item[1]["seconds"])
        for part, sums in parts:
            if sums["seconds"] < 0.002 * total:
                continue
            flops, moved, taken = sums["flops"] / 1e9, sums["bytes"] / 1e9, sums["seconds"] / each
            bound = max(flops / row["gemm_gflops"], moved / row["cache_gb_per_second"])
            share, calls, work = sums["seconds"] / total, sums["calls"], (flops, moved)
            cells = (
                part, f"{share:.1%}", f"{calls:,.0f}", *(f"{x:,.1f}" for x in work),
                *(f"{x / taken:,.0f}" for x in work), f"{bound / taken:.2f}",
            )  # fmt: skip
            lines.append(f"| {' | '.join(cells)} |")
        lines += ["", "The longest operations:", "", "| operation | kind | part | share |"]
        lines.append("|---|---|---|---:|")
        lines += [
            f"| {op['name']} | {op['kind']} | {op['part']} | {op['seconds'] / total:.1%} |"
            for op in row["operations"]
        ]
    return "\n".join([*lines, ""])


def main(words: list[str] | None = None) -> None:
    """Traces workloads and writes the table, after each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workloads", nargs="*", default=DEFAULT)
    parser.add_argument("--output", type=pathlib.Path, default=RESULTS)
    parser.add_argument("--traced", type=pathlib.Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args(words)
    if arguments.traced:
        [name] = arguments.workloads
        print(json.dumps(traced_round(name, arguments.traced)))
        return
    file = arguments.output / "roofline.json"
    found = json.loads(file.read_text("utf-8")) if file.is_file() else {}
    for name in arguments.workloads:
        with tempfile.TemporaryDirectory() as folder:
            flags = (
                f"{os.environ.get('XLA_FLAGS', '')} --xla_dump_to={folder} "
                "--xla_dump_hlo_as_text --xla_dump_hlo_module_re=.*block_of.*"
            )
            # A program from a cache does not name its sources.
            settings = {"XLA_FLAGS": flags, "JAX_ENABLE_COMPILATION_CACHE": "false"}
            command = [sys.executable, "-m", "benchmarks.roofline", name, "--traced", folder]
            ended = subprocess.run(
                command, env=os.environ | settings, stdout=subprocess.PIPE, text=True
            )
        if ended.returncode != 0:
            raise SystemExit(f"the round of {name} could not be traced; see above")
        found[name] = json.loads(ended.stdout.splitlines()[-1])
        arguments.output.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(found, indent=1) + "\n", "utf-8")
        (arguments.output / "roofline.md").write_text(table(found), "utf-8")
        print(f"{name}: {found[name]['seconds']:.2f} s a round", flush=True)


if __name__ == "__main__":
    main()
