"""What an optimized program of XLA does, read from its text.

Loops are counted by the scope that they run: a call, a round, a chunk of clients, a local step. The
text of programs for TPUs has estimated cycles for each operation, that for GPUs the seconds of each
fusion if XLA was asked for them; calls of libraries have no estimate. Nor have kernels in Pallas:
theirs is the arithmetic that they state.
"""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from fedjax_dp.core.targets import Kind

# The names that a round's loops give to what they run, outermost first; before them, a call.
SCOPES = ("call", "round", "chunk", "local_step")

_BITS = {"pred": 8, "s4": 4, "u4": 4, "c64": 64, "c128": 128}
_SHAPE = re.compile(r"\b(pred|bf16|[sufc]\d+(?:e\dm\d\w*)?)\[([\d,]*)\]")
_HEAD = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\) -> .*\{$")
_LINE = re.compile(r"^\s*(ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([a-z][\w\-]*)\((.*)$")
# They do nothing when a program runs.
_FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all"}
_COLLECTIVES = (
    *("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute"),
    *("ragged-all-to-all", "collective-broadcast"),
)
_SLICES = {"dynamic-slice", "slice", "gather"}
# The seconds from one kernel of a GPU to the next, where both are in one graph.
_LAUNCH = 2e-6


class Line(NamedTuple):
    """One operation of a program's text; `rest` follows the bracket that opens its operands."""

    name: str
    shape: str
    kind: str
    rest: str
    is_root: bool

    @property
    def operands(self) -> list[str]:
        """The names of the values that it reads."""
        depth = 0
        for end, letter in enumerate(self.rest):
            depth += (letter == "(") - (letter == ")")
            if depth < 0:
                return re.findall(r"%([\w.\-]+)", self.rest[:end])
        return re.findall(r"%([\w.\-]+)", self.rest)

    def named(self, key: str) -> str | None:
        """The computation that it calls as `key`."""
        match = re.search(rf"{key}=%?([\w.\-]+)", self.rest)
        return match and match[1]

    @property
    def source(self) -> str:
        """Where it was traced."""
        match = re.search(r'op_name="([^"]*)"', self.rest)
        return match[1] if match else ""


class Operation(NamedTuple):
    """An operation that runs."""

    # The scopes of `SCOPES` whose loops run it, joined by "/"; "call" outside of loops. A compiler
    # may move the first pass of a loop in front of it: chunks are then in "round" and in
    # "round/chunk".
    loops: str
    times: float  # In one pass of the innermost; loops of unknown length count once.
    kind: str  # XLA's name, for a fusion with the heaviest part of it.
    shape: str  # Of its result.
    bytes: float  # Read and written by one run.
    products: float  # Floating-point operations of products and convolutions of one run.
    # Of one run; by the compiler's estimate, of a call of a library or of a kernel in Pallas the
    # larger of those that its bytes and its products take at their peaks.
    seconds: float
    is_estimated: bool  # Whether they are the compiler's.
    source: str  # Where it was traced.


class Cost(NamedTuple):
    """What one pass of a scope costs, without the loops in it that are scopes of their own."""

    operations: float = 0.0  # Kernels on a GPU.
    bytes: float = 0.0  # Read and written.
    products: float = 0.0  # Floating-point operations of products and convolutions.
    estimate: float = 0.0  # Seconds by the compiler's own estimates alone.
    seconds: float = 0.0  # With calls of libraries and, on a GPU, the start of each kernel.

    def plus(self, other: "Cost", times: float = 1.0) -> "Cost":
        """Adds a cost that is paid so many times."""
        return Cost(*(a + times * b for a, b in zip(self, other, strict=True)))


def operations(text: str, kind: Kind) -> list[Operation]:
    """Lists all operations that a program for a kind of device runs."""
    return list(_Program(text, kind).run())


def by_loop(ran: Sequence[Operation], kind: Kind) -> dict[str, Cost]:
    """Adds up one pass of each loop, without the loops in it."""
    costs: dict[str, Cost] = defaultdict(Cost)
    for one in ran:
        estimate = one.seconds if one.is_estimated else 0.0
        cost = Cost(1.0, one.bytes, one.products, estimate, with_start(one, kind))
        costs[one.loops] = costs[one.loops].plus(cost, one.times)
    return dict(costs)


def with_start(one: Operation, kind: Kind) -> float:
    """Returns the seconds of one run, on a GPU with the start of its kernel."""
    return one.seconds + (_LAUNCH if kind.backend == "gpu" else 0.0)


def collectives(ran: Sequence[Operation]) -> dict[str, dict[str, float]]:
    """Adds up the bytes that devices exchange in one pass of each loop, by kind."""
    exchanged: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for one in ran:
        name = one.kind.removesuffix("-start")
        if name in _COLLECTIVES:
            exchanged[one.loops][name] += one.times * _size(one.shape)
    return {loops: dict(each) for loops, each in exchanged.items()}


class _Program:
    """A program's text by computation."""

    def __init__(self, text: str, kind: Kind) -> None:
        self.kind, self.entry = kind, ""
        self.parts: dict[str, list[Line]] = {}
        self.shapes: dict[str, str] = {}
        name = ""
        for line in text.splitlines():
            head = _HEAD.match(line)
            if head:
                name = head[2]
                self.parts[name] = []
                self.entry = name if head[1] else self.entry
            elif name and (found := _LINE.match(line)):
                one = Line(found[2], found[3], found[4], found[5], bool(found[1]))
                self.parts[name].append(one)
                self.shapes[one.name] = one.shape
            elif line == "}":
                name = ""
            elif name and self.parts[name]:
                # The configuration of a kernel may take several lines.
                last = self.parts[name][-1]
                self.parts[name][-1] = last._replace(rest=last.rest + line)

    def run(self) -> Iterator[Operation]:
        """Walks through all that the program runs."""
        yield from self._walk(self.entry, 1.0, ())

    def _walk(self, part: str, times: float, loops: tuple[int, ...]) -> Iterator[Operation]:
        lines = self.parts.get(part, ())
        inner = {line.name: self._scope_of(line, loops) for line in lines if line.kind == "while"}
        beside = Counter(inner.values())
        for line in lines:
            if line.kind in _FREE or line.kind.endswith("-done"):
                continue
            if line.kind == "while":
                body, scope = line.named("body") or "", inner[line.name]
                if scope:
                    # What is in a scope of its own is counted by pass, which loops share.
                    yield from self._walk(body, times / beside[scope], (*loops, scope))
                else:
                    yield from self._walk(body, times * _trips(line), loops)
            elif line.kind in ("call", "conditional"):
                called = self._called(line)
                # One branch runs: the dearest that there is.
                branches = [list(self._walk(name, times, loops)) for name in called]
                yield from max(
                    branches, key=lambda b: sum(x.times * x.seconds for x in b), default=[]
                )
            else:
                yield self._operation(line, times, loops)

    def _called(self, line: Line) -> list[str]:
        many = re.search(r"branch_computations=\{([^}]*)\}", line.rest)
        if many:
            return [name.strip().lstrip("%") for name in many[1].split(",")]
        names = ("to_apply", "calls", "true_computation", "false_computation")
        return [name for key in names if (name := line.named(key))]

    def _scope_of(self, loop: Line, loops: tuple[int, ...]) -> int:
        """Finds the first scope after those around a loop that part of it is in, or 0."""
        after = max((max(_scopes(loop.source)), *loops))
        lines = self.parts.get(loop.named("body") or "", ())
        # What the compiler adds, such as copies, has no source.
        inside = [_scopes(line.source) for line in lines if line.kind not in _FREE and line.source]
        counts: Counter[int] = Counter(scope for scopes in inside for scope in scopes)
        return next((s for s in range(after + 1, len(SCOPES)) if 4 * counts[s] > len(inside)), 0)

    def _operation(self, line: Line, times: float, loops: tuple[int, ...]) -> Operation:
        kind, products = line.kind, self._products(line)
        moved = _size(line.shape) + sum(_size(self.shapes.get(o, "")) for o in line.operands)
        inside: Sequence[Line] = ()
        if kind == "fusion":
            inside = self.parts.get(line.named("calls") or "", [])
            moved, products = self._fused(line, inside)
            heavy = ("convolution", "dot", "sort", "scatter", "gather", "reduce-window", "reduce")
            kinds = {one.kind for one in inside}
            kind = f"fusion of {next((name for name in heavy if name in kinds), 'a loop')}"
        elif kind == "custom-call":
            target = re.search(r'custom_call_target="([^"]+)"', line.rest)
            kind = target[1] if target else kind
        elif kind in ("slice", "dynamic-slice"):
            moved = 2 * _size(line.shape)
        elif kind == "dynamic-update-slice":
            moved = 2 * _size(self.shapes.get(line.operands[1], ""))
        stated = [bytes for one in (line, *inside) if (bytes := _stated(one, "bytes_accessed"))]
        moved = max(moved, *stated) if stated else moved
        seconds = None if stated else self._estimate(line)
        device = self.kind
        least = max(moved / device.bandwidth, products / device.products)
        return Operation(
            "/".join(SCOPES[i] for i in loops) or SCOPES[0],
            times,
            kind,
            line.shape,
            moved,
            products,
            least if seconds is None else seconds,
            seconds is not None,
            line.source,
        )

    def _estimate(self, line: Line) -> float | None:
        """Reads the seconds that the compiler expects of an operation."""
        if self.kind.clock:
            # A TPU's compiler estimates all that takes time.
            cycles = re.search(r'estimated_cycles":"(\d{1,17})"', line.rest)
            return float(cycles[1]) / self.kind.clock if cycles else 0.0
        micro = re.search(r'exec_time_us":([\d.e+\-]+)', line.rest)
        return float(micro[1]) / 1e6 if micro else None

    def _products(self, line: Line) -> float:
        """Counts the floating-point operations of a product or convolution."""
        result, operands = math.prod(_dims(line.shape)), line.operands
        if line.kind == "dot":
            contracted = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", line.rest)
            sides = _dims(self.shapes.get(operands[0], ""))
            places = [int(d) for d in contracted[1].split(",") if d] if contracted else []
            return 2.0 * result * math.prod(sides[place] for place in places)
        if stated := _stated(line, "flops"):
            return stated
        labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", line.rest)
        if labels is None or len(operands) < 2:
            return 0.0
        shapes = [_dims(self.shapes.get(o, "")) for o in operands[:2]] + [_dims(line.shape)]
        kernel_labels = labels[2]
        if line.kind == "convolution":
            # Each entry of the result reads the kernel of its feature.
            read = math.prod(shapes[1]) / shapes[1][kernel_labels.index("o")]
            return 2.0 * result * read / _batches(line)
        if "cudnn$conv" not in line.rest:
            return 0.0
        kernel, output = shapes[1], shapes[2]
        if "BackwardFilter" in line.rest:
            kernel, output = shapes[2], shapes[1]
        elif "BackwardInput" in line.rest:
            output = shapes[0]
        return 2.0 * math.prod(output) * math.prod(kernel) / kernel[kernel_labels.index("o")]

    def _fused(self, line: Line, inside: Sequence[Line]) -> tuple[float, float]:
        """Counts the bytes and products of a fusion; of an operand that it slices the slice."""
        users: dict[str, list[Line]] = defaultdict(list)
        for one in inside:
            for operand in one.operands:
                users[operand].append(one)

        def read(name: str, shape: str) -> float:
            uses = users[name]
            if uses and all(use.kind in _SLICES for use in uses):
                return min(sum(_size(use.shape) for use in uses), _size(shape))
            written = "dynamic-update-slice"
            if uses and all(use.kind == written and use.operands[0] == name for use in uses):
                return 0.0
            return _size(shape)

        moved = sum(read(one.name, one.shape) for one in inside if one.kind == "parameter")
        root = next((one for one in inside if one.is_root), None)
        if root is not None and root.kind == "dynamic-update-slice":
            moved += _size(self.shapes.get(root.operands[1], ""))
        else:
            moved += _size(line.shape)
        return moved, sum(self._products(one) for one in inside)


def _stated(line: Line, key: str) -> float:
    """Reads what a kernel in Pallas states of its cost; 0 for all else."""
    match = re.search(rf'"{key}":\s*"?(\d+)', line.rest) if line.kind == "custom-call" else None
    return float(match[1]) if match else 0.0


def _scopes(source: str) -> set[int]:
    """Lists the scopes of a source; a call is around all."""
    parts = set(re.split(r"[/()]", source))
    return {0} | {i for i, name in enumerate(SCOPES) if name in parts}


def _trips(line: Line) -> float:
    match = re.search(r'known_trip_count":\{"n":"(\d+)"', line.rest)
    return float(match[1]) if match else 1.0


def _batches(line: Line) -> float:
    """Counts the independent products that a TPU's compiler writes as one dilated convolution."""
    window = re.search(r"window=\{([^}]*)\}", line.rest)
    given = dict(part.split("=") for part in window[1].split()) if window else {}
    sizes, strides, dilations = (
        [int(n) for n in given.get(name, "").split("x") if n]
        for name in ("size", "stride", "lhs_dilate")
    )
    pairs = zip(sizes, strides, dilations, strict=False)
    return math.prod(
        n for n, stride, dilation in pairs if n > 1 and (stride, dilation) == (n - 1, n)
    )


def _dims(shape: str) -> list[int]:
    match = _SHAPE.search(shape)
    return [int(d) for d in match[2].split(",") if d] if match else []


def _size(shape: str) -> float:
    """Counts the bytes of a shape, or of all shapes of a tuple."""
    return sum(
        math.prod(int(d) for d in dims.split(",") if d) * _bits(kind) / 8
        for kind, dims in _SHAPE.findall(shape)
    )


def _bits(kind: str) -> int:
    if kind in _BITS:
        return _BITS[kind]
    match = re.search(r"\d+", kind)
    return int(match[0]) if match else 32


def passes(ran: Sequence[Operation], chunks: float, steps: float) -> dict[str, float]:
    """Counts the passes of a round of `chunks`, each of `steps`, by `Operation.loops`."""
    known = {one.loops for one in ran}
    # Where the first chunk is in front of the loop of chunks, the loop has one pass less.
    is_peeled = "round/local_step" in known and "round/chunk/local_step" in known
    times = {"round": 1.0, "chunk": max(0.0, chunks - is_peeled), "local_step": steps}
    return {
        loops: math.prod(times[scope] for scope in loops.split("/"))
        for loops in known
        if loops != SCOPES[0]
    }


def total(costs: Mapping[str, Cost], passes: Mapping[str, float]) -> Cost:
    """Adds up a round: each loop as often as a round passes through it."""
    cost_of_all = Cost()
    for loops, cost in costs.items():
        cost_of_all = cost_of_all.plus(cost, passes.get(loops, 0.0))
    return cost_of_all
