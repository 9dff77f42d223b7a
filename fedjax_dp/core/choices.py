"""What automatic execution chooses: a function of what a backend reports, and of measured speeds.

Every constant that depends on the backend is named here, with its reason; those that depend on the
work alone are beside the code that reads them.
"""

import math
from typing import Literal, NamedTuple, get_args

from fedjax_dp.core.backend import Facts

Products = Literal["exact", "split"]
Convolutions = Literal["products", "native", "kernel"]
KernelGradients = Literal["rows", "native"]
Factored = Literal["fewer_operations", "fewer_bytes", "never"]

# A chunk grows until a pass through its loop body does this many floating-point operations: small
# models gain from wide chunks, as long as a cache holds them, and large ones use the whole device
# alone. On CPUs it is measured (benchmarks/notes.md, "Narrow products").
_CPU_OPERATIONS = 1.5e7
# On a GPU a pass of a small network, with 12 products, starts about 40 kernels of 5 µs each, 0.2 ms
# in all. Ten times as long are 2 ms, in which a multiprocessor does 1e9 operations: 5e11 a second,
# 128 multiply-adds at 2 GHz. A deeper network starts more kernels, and takes as many more.
_OPERATIONS_OF_A_CORE = 1e9
_GPU_PRODUCTS = 12
# Where the number of multiprocessors is unknown: a card with 100 of them.
_GPU_OPERATIONS = 1e11
# On a TPU 1 ms at 1e14 operations a second, since a program starts as a whole and not by kernel.
_TPU_OPERATIONS = 1e11
# A convolution with a kernel of each client is a grouped one, of which a TPU computes a few groups
# at a time: W1's round takes 36 ms on a v5e with 2 clients side by side, 40 with 5 and 71 with 50,
# P1's 36 with 5 and 55 with 50, W3's with records 277 with one and 428 with 21; users and F1 are
# fastest with 5 to 25. All by the compiler, with 0.3 to 1.5 GFLOP of a client's convolutions.
_TPU_CONVOLVED = 5e9
# On backends of other kinds, of which nothing is known: between a CPU and a GPU.
_OTHER_OPERATIONS = 1e9
# Wider chunks have not been found faster on CPUs.
_CPU_WIDEST = 256
# Elsewhere a chunk of small models is bound by this: on TPUs, since arrays of wider ones leave the
# memory on the chip (W4dp on a v5e: 10.1 Mcycles a round with 1,000 clients, 16.7 with 5,000); on
# GPUs by memory alone, since a chunk of 1,000 clients starts as many kernels as one of 4,000.
_WIDEST = 1024
_GPU_WIDEST = 4096
# Of a device's memory a quarter each is for the values of a chunk, the examples and the client
# states; the rest is for models, sums and what the compiler adds.
_SHARE = 0.25
# Examples of up to this size are held in memory in any case: streaming them costs more.
_LEAST_RESIDENT = 2.0 * 2**30
# Client states of a chunk stay in a CPU's caches; measured, as above.
_CACHED_STATE_BYTES = 2**19
# A choice that costs precision, or memory for gradients of records, has to be this much faster
# than the default; a measurement on a shared machine varies by a tenth.
_GAIN = 1.25
# A chunk is wide enough when it reaches this share of the best speed: wider ones take memory.
_NEARLY_ALL = 0.9
# How convolutions are computed where each client has kernels of its own. By the compilers' counts
# (benchmarks/results/compiled.md) products of patches take 2 to 25 times the cycles of native ones
# on TPUs, and write patches to memory, which are most of the bytes that a GPU moves. How fast
# cuDNN's grouped convolutions are is in no count: measured speeds override. AMD's compiler was not
# asked. Kernels of our own ("kernel", models/lowering/kernels.py) have no estimate by a compiler.
_ACCELERATED: Convolutions = "native"
_OTHERWISE: Convolutions = "products"
# Factors of gradients of records take an elimination, a loop of small steps: a GPU starts several
# kernels for each.
_FACTORED: dict[str, Factored] = {
    "cpu": "fewer_operations",
    "gpu": "fewer_bytes",
    "tpu": "fewer_bytes",
}
# A TPU copies images before it reads batches of them, to bfloat16 where products round to it. By
# the compiler for a v5e the copy takes 10.6 Mcycles for P1, 12.9 for F1, 4.7 for W4dp and 0.6 for
# "users", and saves 5, 75, 1.2 and 22 whenever all examples are read: rows pay for P1 and F1, whose
# calls read a half and 3 % of them. The gathers themselves have no estimate.
_READS_OF_A_COPY = 0.75
# The first NVIDIA cards with units for bfloat16 (Ampere).
_FIRST_CAPABILITY = (8, 0)


class Speed(NamedTuple):
    """The measured speed of steps of SGD of clients side by side."""

    # One of `Convolutions`, as they were computed; "records" for clipped gradients.
    form: str
    precision: str  # "float32", "default", "bfloat16" or "split".
    clients: int
    clients_per_second: float
    operations: float  # Floating-point operations of the step of one client.


class Measured(NamedTuple):
    """The measured speeds of the device of this name."""

    device: str
    speeds: tuple[Speed, ...] = ()

    def best(self, form: str, precision: str) -> float | None:
        """Returns the most clients a second, of any number of clients; None if not measured."""
        speeds = [s.clients_per_second for s in self._of(form, precision)]
        return max(speeds, default=None)

    def enough(self, form: str, precision: str) -> Speed | None:
        """Returns the fewest clients that reach nearly the best speed."""
        best = self.best(form, precision)
        if best is None:
            return None
        fast = [s for s in self._of(form, precision) if s.clients_per_second >= _NEARLY_ALL * best]
        return min(fast, key=lambda s: s.clients)

    def widths(self, form: str) -> int:
        """Counts the numbers of clients side by side that were measured."""
        return len({s.clients for s in self.speeds if s.form == form})

    def _of(self, form: str, precision: str) -> list[Speed]:
        return [s for s in self.speeds if (s.form, s.precision) == (form, precision)]


class Choices(NamedTuple):
    """What `auto` stands for on a backend."""

    operations_per_chunk: float  # Floating-point ones of one pass that occupy a device.
    widest_chunk: int  # The most clients of a chunk.
    chunk_bytes: float  # The memory that the values of a chunk may take.
    # The client states of a chunk that stay in a cache; None if that gains nothing.
    cached_state_bytes: int | None
    resident_bytes: float  # Examples of up to this size are held in device memory.
    state_bytes: float  # Client states of up to this size of one device are held in its memory.
    # Whether work is cut so that values stay in a processor's cache: small micro-batches,
    # convolutions in tiles and rows.
    has_caches: bool
    # How training without record-level privacy computes those of lowered models: "products" of
    # patches, "native" ones, or by a "kernel" of our own where there is one.
    convolutions: Convolutions = "products"
    products: Products = "exact"  # How gradients of records are computed.
    # How the gradients of kernels of native convolutions are formed for single records: by "rows"
    # of the kernel (`models.per_example`), or "native".
    kernel_gradients: KernelGradients = "native"
    # Where the gradient of a record stays a product of factors, and is not formed: with
    # "fewer_operations", with "fewer_bytes" in memory, or "never".
    factored: Factored = "never"
    # Whether loops over local steps get a length that the compiler knows where clients do equal
    # work (`engine.layout.EqualWork`): a GPU then asks no host before each step, and no step
    # selects between old and new parameters.
    has_known_lengths: bool = False
    convolved_per_chunk: float = math.inf  # The most operations that native convolutions do.
    # How often a call of a program has to read the examples so that a copy of all of them pays, in
    # the layout that the compiler wants; with fewer reads they are stored as rows
    # (`clients.client_data.Rows`). 0 where no program makes such a copy.
    reads_of_a_copy: float = 0.0
    # The products and convolutions of a pass that `operations_per_chunk` is for: one of more needs
    # as many more operations, since it starts more kernels; inf where a pass starts as a whole.
    products_per_pass: float = math.inf


def choices(facts: Facts, measured: Measured | None = None) -> Choices:
    """Chooses layout and precision for a backend; measured speeds have no effect on a CPU."""
    is_cpu = facts.backend == "cpu"
    share = _SHARE * facts.memory
    found = Choices(
        operations_per_chunk=_operations(facts),
        widest_chunk={"cpu": _CPU_WIDEST, "gpu": _GPU_WIDEST}.get(facts.backend, _WIDEST),
        chunk_bytes=share,
        cached_state_bytes=_CACHED_STATE_BYTES if is_cpu else None,
        # A CPU's device memory is that of the host, where streamed examples are too.
        resident_bytes=_LEAST_RESIDENT
        if is_cpu or math.isinf(share)
        else max(_LEAST_RESIDENT, share),
        state_bytes=share,
        has_caches=is_cpu,
        convolutions=_ACCELERATED if facts.backend == "tpu" or _is_nvidia(facts) else _OTHERWISE,
        # By the compiler for TPUs (benchmarks/results/compiled.md): native ones take 1.9 times the
        # cycles of rows on W3.
        kernel_gradients="rows" if facts.backend == "tpu" else "native",
        factored=_FACTORED.get(facts.backend, "never"),
        has_known_lengths=not is_cpu,
        convolved_per_chunk=_TPU_CONVOLVED if facts.backend == "tpu" else math.inf,
        reads_of_a_copy=_READS_OF_A_COPY if facts.backend == "tpu" else 0.0,
        products_per_pass=_GPU_PRODUCTS if facts.backend == "gpu" else math.inf,
    )
    # On a CPU the constants are measured, and the benchmark takes a few tiny steps.
    if measured is None or is_cpu:
        return found
    forms = [form for form in get_args(Convolutions) if measured.best(form, "default")]
    fastest = max(forms, key=lambda form: measured.best(form, "default") or 0, default=None)
    form = found.convolutions
    if fastest is not None and _is_faster(measured, (fastest, "default"), (form, "default")):
        form = fastest
    # Rounds with and without record-level privacy have one rule: the wider of both.
    needed = [measured.enough(*of) for of in ((form, "default"), ("products", "float32"))]
    busy = max((s.clients * s.operations for s in needed if s is not None), default=None)
    is_split = _is_faster(measured, ("records", "split"), ("records", "float32"))
    return found._replace(
        operations_per_chunk=found.operations_per_chunk if busy is None else busy,
        convolved_per_chunk=math.inf if measured.widths(form) > 1 else found.convolved_per_chunk,
        convolutions=form,
        products="split" if is_split and no_split(facts) is None else "exact",
    )


def no_split(facts: Facts) -> str | None:
    """Returns why a backend cannot compute split products, or None if it can.

    A target of an export, which reports no compute capability, is taken to be a card that can.
    """
    if facts.backend == "tpu":
        return None
    if facts.backend != "gpu":
        return f"a {facts.backend} has no units for bfloat16 that outrun exact products"
    if not facts.compute_capability:
        return None
    if not _is_nvidia(facts):
        return f"the bound is proved for NVIDIA GPUs and TPUs, not for {facts.compute_capability}"
    if tuple(map(int, facts.compute_capability.split("."))) < _FIRST_CAPABILITY:
        return f"a GPU of compute capability {facts.compute_capability} has no units for bfloat16"
    return None


def _is_nvidia(facts: Facts) -> bool:
    """Whether a GPU is one of NVIDIA; one that reports no compute capability is taken for one."""
    parts = facts.compute_capability.split(".") if facts.compute_capability else []
    return facts.backend == "gpu" and all(part.isdigit() for part in parts)


def _operations(facts: Facts) -> float:
    if facts.backend == "gpu" and facts.cores is not None:
        return _OPERATIONS_OF_A_CORE * facts.cores
    known = {"cpu": _CPU_OPERATIONS, "gpu": _GPU_OPERATIONS, "tpu": _TPU_OPERATIONS}
    return known.get(facts.backend, _OTHER_OPERATIONS)


def _is_faster(measured: Measured, other: tuple[str, str], default: tuple[str, str]) -> bool:
    after, before = measured.best(*other), measured.best(*default)
    return after is not None and before is not None and after >= _GAIN * before
