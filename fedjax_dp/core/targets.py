"""Devices that programs are compiled for where they are not: what XLA has to know of them."""

import importlib.util
import os
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from jax.experimental import topologies

from fedjax_dp.core import checks
from fedjax_dp.core.backend import Facts
from fedjax_dp.core.packages import installing

_GiB = 2.0**30


class Kind(NamedTuple):
    """A kind of device, named as JAX reports it."""

    backend: str
    device: str
    capability: str  # The compute capability of a GPU; empty for a TPU.
    cores: int  # Multiprocessors, or the cores that one program uses.
    memory: float  # Bytes.
    bandwidth: float  # Bytes a second to and from its memory.
    products: float  # Of float32 a second, at JAX's default precision.
    clock: float = 0.0  # Cycles a second of a TPU's estimates; those of a GPU are seconds.
    of_gpu: Mapping[str, float] = {}  # What XLA's cost model reads besides.

    @property
    def facts(self) -> Facts:
        """Returns what a backend would report of such a device."""
        return Facts(self.backend, self.device, self.capability, self.cores, self.memory)


# Data sheets of NVIDIA, and openxla/xla, xla/backends/gpu/target_config/specs, for the GPUs; their
# products are of TF32 without sparsity. Google's pages on TPU v4, v5e, v5p and v6e for the TPUs:
# products of bfloat16, which is what JAX multiplies float32 with by default. Clocks are such that
# XLA's estimate of a large product of bfloat16 is its operations over that peak.
KINDS: Mapping[str, Kind] = {
    "a100": Kind(
        "gpu", "NVIDIA A100-SXM4-80GB", "8.0", 108, 85100068864, 2.039e12, 156e12,
        of_gpu={"fpus": 64, "clock": 1.41, "cache": 41943040, "shared": 167936, "block": 166912},
    ),
    "h100": Kind(
        "gpu", "NVIDIA H100 80GB HBM3", "9.0", 132, 84942979072, 3.352e12, 494e12,
        of_gpu={"fpus": 128, "clock": 1.98, "cache": 52428800, "shared": 233472, "block": 232448},
    ),
    "h200": Kind(
        "gpu", "NVIDIA H200 141GB HBM3e", "9.0", 132, 151397597184, 4.8e12, 494e12,
        of_gpu={"fpus": 128, "clock": 1.98, "cache": 52428800, "shared": 233472, "block": 232448},
    ),
    "v4": Kind("tpu", "TPU v4", "", 1, 32 * _GiB, 1.2e12, 275e12, 1.05e9),
    "v5e": Kind("tpu", "TPU v5 lite", "", 1, 16 * _GiB, 0.819e12, 197e12, 1.5e9),
    "v5p": Kind("tpu", "TPU v5", "", 1, 95 * _GiB, 2.765e12, 459e12, 1.75e9),
    "v6e": Kind("tpu", "TPU v6 lite", "", 1, 32 * _GiB, 1.64e12, 918e12, 1.75e9),
}  # fmt: skip

_COUNT = "[0-9]{1,5}"
_NAME = re.compile(
    rf"(?P<kind>[a-z][0-9]+[a-z]?)(?:x(?P<count>{_COUNT})|:(?P<grid>{_COUNT}(?:x{_COUNT})*))?"
)
_PLUGINS = ("jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12")
# The smallest topology of a kind of TPU: compilers know no part of it.
_SMALLEST = {"v4": "2x2x1", "v5e": "2x2", "v5p": "2x2x1", "v6e": "2x2"}


class Target(NamedTuple):
    """Devices of one kind that work together, named as users write it, and by XLA (`topology`)."""

    name: str
    kind: str
    num_devices: int
    topology: str

    @property
    def device(self) -> Kind:
        """Returns the kind of its devices."""
        return KINDS[self.kind]


def target(name: str) -> Target:
    """Reads the name of a target: "h100", "h100x8", "v5e", or a topology of TPUs, "v5e:4x4"."""
    match = _NAME.fullmatch(name.lower())
    kinds = ", ".join(sorted(KINDS))
    rule = f"be a device ({kinds}), several GPUs such as h100x8, or TPUs such as v5e:2x2"
    checks.require(match is not None and match["kind"] in KINDS, "device", rule, name)
    assert match is not None
    kind = KINDS[match["kind"]]
    if kind.backend == "gpu":
        count = int(match["count"] or 1)
        checks.require(match["grid"] is None and count > 0, "device", rule, name)
        return Target(name, match["kind"], count, f"1x1x{count}")
    checks.require(match["count"] is None, "device", rule, name)
    smallest = _SMALLEST[match["kind"]]
    if match["grid"] is None:
        return Target(name, match["kind"], 1, f"{match['kind']}:{smallest}")
    sides = [int(side) for side in match["grid"].split("x")]
    sides += [1] * (smallest.count("x") + 1 - len(sides))
    count = 1
    for side in sides:
        count *= side
    rule = f"be a topology of at least {smallest} for {match['kind']}"
    checks.require(count >= 4 and len(sides) == smallest.count("x") + 1, "device", rule, name)
    return Target(name, match["kind"], count, f"{match['kind']}:{'x'.join(map(str, sides))}")


def environment(wanted: Target) -> dict[str, str]:
    """Returns the variables that a process must start with to compile for a target."""
    flags = os.environ.get("XLA_FLAGS", "").split()
    settings = {"JAX_PLATFORMS": "cpu"}
    if wanted.device.backend == "gpu":
        # Tuning needs the card; estimates are those of the cost model, written at each fusion.
        more = ["--xla_gpu_autotune_level=0", "--xla_gpu_collect_cost_model_stats=true"]
        if int(wanted.device.capability.split(".")[0]) < 9:
            # Without tuning there are no products by Triton, and one of the cost models, which only
            # orders operations, knows no card that is older.
            more += [
                "--xla_gpu_enable_triton_gemm=false",
                "--xla_gpu_enable_analytical_sol_latency_estimator=false",
            ]
        return settings | {"XLA_FLAGS": " ".join([*flags, *(f for f in more if f not in flags)])}
    # Otherwise the library asks a server of Google's cloud for the machine that it is on.
    return settings | {
        # Programs are compiled and not run, so that several processes do not disturb one another.
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_ACCELERATOR_TYPE": "v5litepod-4",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_WORKER_ID": "0",
    }


def compiler(wanted: Target) -> str:
    """Finds the module that compiles for a target, or says what to install."""
    is_gpu = wanted.device.backend == "gpu"
    modules = _PLUGINS if is_gpu else ("libtpu",)
    module = next((name for name in modules if _is_installed(name)), None)
    if module is None:
        kind = "NVIDIA GPUs" if is_gpu else "TPUs"
        how = installing("cuda") if is_gpu else installing("tpu")
        advice = f"XLA's compiler for {kind} is not installed; run `{how}`"
        raise ValueError(f"device {wanted.name!r} cannot be compiled for: {advice}")
    return module


def devices(wanted: Target) -> list[Any]:
    """Lists devices of a target for the compiler; the process has to have its `environment`."""
    is_gpu, plugin = wanted.device.backend == "gpu", compiler(wanted)
    options: dict[str, Any] = {}
    if is_gpu:
        # The plugin makes the platform known.
        importlib.import_module(plugin)
        options = {"topology": wanted.topology, "target_config": _config(wanted.device)}
    try:
        described = topologies.get_topology_desc(
            platform="cuda" if is_gpu else "tpu", topology_name=wanted.topology, **options
        )
    # JAX and its plugins raise errors of several types for a topology that they do not know.
    except (RuntimeError, NotImplementedError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        rule = f"be one that the installed compiler knows ({reason})"
        raise ValueError(f"device must {rule}, got {wanted.name!r}") from error
    return list(described.devices)[: wanted.num_devices]


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    # Of a module in a package that is missing.
    except ModuleNotFoundError:
        return False


def _config(kind: Kind) -> str:
    """Writes what XLA's GPU compiler asks of a device, as a text of protocol buffers."""
    more, (major, minor) = kind.of_gpu, kind.capability.split(".")
    extension = "ACCELERATED_FEATURES" if int(major) >= 9 else "NONE"
    return f"""
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {more["shared"]:.0f}
  shared_memory_per_block_optin: {more["block"]:.0f}
  threads_per_core_limit: 2048
  core_count: {kind.cores}
  fpus_per_core: {more["fpus"]:.0f}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {kind.bandwidth:.0f}
  l2_cache_size: {more["cache"]:.0f}
  clock_rate_ghz: {more["clock"]}
  device_memory_size: {kind.memory:.0f}
  cuda_compute_capability {{ major: {major} minor: {minor} feature_extension: {extension} }}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 12 patch: 0 }}
device_description_str: "{kind.device}"
"""
