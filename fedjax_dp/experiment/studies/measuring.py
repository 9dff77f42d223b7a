"""Speeds of clients side by side on the GPU or TPU at hand, which `execution.measured` reads.

A step of the EMNIST CNN is timed in several forms: convolutions are native, which side by side are
grouped convolutions, or products of patches, or of another form that `core.choices` names; or the
gradients of records are clipped one by one.
"""

import concurrent.futures
import datetime
import functools
import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, cast

import flax.linen as nn
import jax
import jax.numpy as jnp

from fedjax_dp.clients import LocalConfig
from fedjax_dp.clients.gradients import clipped
from fedjax_dp.core import checks, files, products
from fedjax_dp.core.backend import backend, facts, require_backend
from fedjax_dp.core.choices import Convolutions, Measured, no_split
from fedjax_dp.core.products import Arithmetic, computed_with
from fedjax_dp.io import read_measured
from fedjax_dp.models import Model
from fedjax_dp.models.cost import training_cost

# Clients side by side.
COUNTS = (1, 4, 16, 64, 256, 1024)
# The speeds that `core.choices` reads: precisions by form.
_READ: Mapping[str, Sequence[str]] = {
    "native": ("default",),
    "products": ("float32", "default"),
    "records": ("float32", "split"),
    "kernel": ("default",),
}
_SHAPE = (28, 28, 1)
# For which each program is timed at least, in three calls or more.
_SECONDS = 0.3


@functools.cache
def precisions_and_types() -> dict[str, tuple[str, Any]]:
    """Lists precisions of products, each with the type of inputs.

    On NVIDIA cards the default is TF32; split products are three of bfloat16, which not every
    device can compute.
    """
    return {
        "float32": ("float32", jnp.float32),
        "default": ("default", jnp.float32),
        "bfloat16": ("default", jnp.bfloat16),
        "split": (products.precision("split"), jnp.float32),
    }


def measure(
    path: Path,
    say: Callable[[str], None],
    *,
    again: bool = False,
    counts: Sequence[int] = COUNTS,
) -> Measured:
    """Measures the speeds that automatic choices follow, those that a file of JSON lacks."""
    require_backend()
    rule = "run on a GPU or TPU: automatic choices on a CPU follow constants, which are measured"
    checks.require(backend() != "cpu", "measure", rule, "a CPU")
    forms = {f"{form} steps": (form, _possible(form)) for form in _READ}
    forms = {name: asked for name, asked in forms.items() if asked[1]}
    results = Results(path, machine(), forms if again else ())
    left = [name for name in forms if not results.has(name)]
    # A file that cannot be written is named before anything is measured.
    results.write()
    for number, name in enumerate(left, 1):
        form, precisions = forms[name]
        say(f"{name}, {number} of {len(left)}: compiling {len(precisions) * len(counts)} programs")
        started, found = time.monotonic(), []
        for row in speeds(form, precisions, counts):
            found.append(row)
            of = f"{form}, {row['precision']}, {row['clients']} clients side by side"
            rate = row.get("clients_per_second")
            say(f"{of}: {row['error'] if rate is None else f'{rate:,.0f} clients a second'}")
        seconds = round(time.monotonic() - started, 1)
        whole = {"status": "done", "error": "", "seconds": seconds, "rows": found}
        results.put(name, "layouts", whole)
        results.write()
    return read_measured(path)


def _possible(form: str) -> Sequence[str]:
    """Lists the precisions that are read of a form, as far as this device has them."""
    if form == "kernel" and backend() != "tpu":
        return ()
    return [each for each in _READ[form] if each != "split" or no_split(facts()) is None]


class Results:
    """What was measured on one machine, by step: a file of JSON, which later calls continue."""

    def __init__(self, path: Path, machine: Mapping[str, Any], again: Collection[str] = ()):
        """Reads what the file has, without the steps that are to be measured `again`."""
        self.path = path
        stored: Any = {"machine": machine, "steps": {}}
        if path.exists():
            stored = files.parse_json(files.read_text(path), path)
        found = stored if isinstance(stored, dict) else {}
        is_ours = all(isinstance(found.get(name), dict) for name in ("machine", "steps"))
        checks.require(is_ours, "output", "be a new file, or one of measured speeds", str(path))
        steps = {name: found for name, found in stored["steps"].items() if name not in again}
        differing = sorted(k for k in machine if stored["machine"].get(k) != machine[k])
        rule = "be a new file for this machine"
        other = f"{path}, with results of another machine (other {', '.join(differing)})"
        checks.require(not (steps and differing), "output", rule, other)
        self.document = {**({} if differing else stored), "machine": machine, "steps": steps}

    def has(self, name: str) -> bool:
        """Whether a step was measured whole."""
        return bool(self.document["steps"].get(name, {}).get("status") == "done")

    def put(self, name: str, group: str, found: Mapping[str, Any]) -> None:
        """Adds the result of a step."""
        today = datetime.date.today().isoformat()
        self.document["steps"][name] = {"group": group, "date": today, **found}

    def write(self) -> None:
        """Replaces the file as a whole: a stop at any time leaves the old or the new one."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        files.write_text(self.path, json.dumps(self.document, indent=2) + "\n")


def machine() -> dict[str, Any]:
    """Finds what figures depend on."""
    device, here = jax.devices()[0], facts()
    stats = device.memory_stats() or {}
    return {
        "device": device.device_kind,
        "devices": jax.device_count(),
        "device_memory_mb": round(stats.get("bytes_limit", 0) / 2**20) or None,
        "backend": jax.default_backend(),
        "compute_capability": here.compute_capability or None,
        "multiprocessors": here.cores if here.backend == "gpu" else None,
        "driver": _driver(),
        # With the versions of CUDA's libraries.
        "platform": device.client.platform_version.strip().replace("\n", ", "),
        **{name: metadata.version(name) for name in ("jax", "flax", "optax", "numpy")},
        "python": platform.python_version(),
        "cores": os.cpu_count(),
    }


def _driver() -> str | None:
    """Asks an NVIDIA driver for its version; None where there is none."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.split("\n")[0].strip() or None


def timed(fn: Callable[[], Any]) -> tuple[Any, float]:
    """Calls a function, and waits for its result; returns both the result and the seconds."""
    started = time.perf_counter()
    result = jax.block_until_ready(fn())
    return result, time.perf_counter() - started


class EmnistCnn(nn.Module):
    """The network of `models.emnist_cnn`, in any type of inputs."""

    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns the logits of images."""
        for width in (32, 64):
            x = nn.relu(nn.Conv(width, (3, 3), padding="VALID", dtype=self.dtype)(x))
        x = nn.max_pool(x, (2, 2), strides=(2, 2)).reshape(x.shape[0], -1)
        x = nn.relu(nn.Dense(128, dtype=self.dtype)(x))
        return nn.Dense(62, dtype=self.dtype)(x)


def speeds(
    form: str, precisions: Sequence[str], counts: Sequence[int], batch_size: int = 20
) -> Iterator[dict[str, Any]]:
    """Times a step of SGD by clients side by side, each with weights of its own.

    `form` is one of convolutions, or "records", in float32 or split. All programs are compiled
    before the first is timed. What does not fit has a row with its error instead of seconds. Our
    own kernels are not for GPUs.
    """
    if form == "kernel" and backend() == "gpu":
        return
    asked = [(precision, count) for precision in precisions for count in counts]
    with concurrent.futures.ThreadPoolExecutor(max(1, os.cpu_count() or 1)) as pool:
        making = [pool.submit(_compiled, form, *what, batch_size) for what in asked]
    for (precision, count), future in zip(asked, making, strict=True):
        named = {"clients": count, "form": form, "precision": precision}
        try:
            yield named | _timed(count, batch_size, *future.result())
        # XLA raises errors of several types; wider chunks need more memory.
        except Exception as error:
            yield named | {"error": f"{type(error).__name__}: {error}".partition("\n")[0][:300]}


def _compiled(form: str, precision: str, count: int, batch_size: int) -> tuple[Any, Model, float]:
    """Compiles a step of so many clients; also returns the model, and the seconds."""
    matmul_precision, dtype = precisions_and_types()[precision]
    example = jax.ShapeDtypeStruct(_SHAPE, jnp.float32)
    model = Model.from_flax(EmnistCnn(dtype), example, loss="softmax_cross_entropy")
    rule = clipped(model)
    config = LocalConfig(clip_norm=1.0, noise_multiplier=0.0, batch_size=batch_size)
    how = Arithmetic("split" if precision == "split" else "exact")
    if form != "records":
        how = how._replace(convolutions=cast(Convolutions, form))

    def step(params: Any, x: jax.Array, y: jax.Array) -> Any:
        if form == "records":
            real, batch = jnp.ones(batch_size, bool), {"x": x, "y": y}
            summed = rule.micro_batch(params, batch, real, None, config).gradient
            return jax.tree.map(lambda p, g: p - 0.1 / batch_size * g, params, summed)

        def loss(params: Any) -> jax.Array:
            return jnp.mean(model.losses(params, {"x": x, "y": y}, is_training=True)[0])

        return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params))

    one = jax.eval_shape(model.init, jax.random.key(0))
    params = jax.tree.map(lambda p: jax.ShapeDtypeStruct((count, *p.shape), p.dtype), one)
    x = jax.ShapeDtypeStruct((count, batch_size, *_SHAPE), jnp.float32)
    y = jax.ShapeDtypeStruct((count, batch_size), jnp.int32)
    with computed_with(how), jax.default_matmul_precision(matmul_precision):
        lowered = jax.jit(jax.vmap(step), donate_argnums=0).lower(params, x, y)
    compiled, seconds = timed(lowered.compile)
    return compiled, model, seconds


def _timed(
    count: int, batch_size: int, compiled: Any, model: Model, compile_seconds: float
) -> dict[str, Any]:
    operations = training_cost(model, _SHAPE, batch_size).direct_operations * batch_size
    start = model.init(jax.random.key(0))
    params = jax.tree.map(lambda p: jnp.tile(p, (count,) + (1,) * p.ndim), start)
    x = jax.random.uniform(jax.random.key(1), (count, batch_size, *_SHAPE))
    y = jax.random.randint(jax.random.key(2), (count, batch_size), 0, 62)
    params = jax.block_until_ready(compiled(params, x, y))
    seconds: list[float] = []
    while len(seconds) < 3 or (sum(seconds) < _SECONDS and len(seconds) < 100):
        params, elapsed = timed(functools.partial(compiled, params, x, y))
        seconds.append(elapsed)
    memory, median = compiled.memory_analysis(), statistics.median(seconds)
    cost = compiled.cost_analysis() or {}
    return {
        "seconds": median,
        "seconds_min": min(seconds),
        "seconds_max": max(seconds),
        "clients_per_second": count / median,
        # Beside others that compiled at the same time.
        "compile_seconds": compile_seconds,
        "temporary_mb": memory and memory.temp_size_in_bytes / 2**20,
        "arguments_mb": memory and memory.argument_size_in_bytes / 2**20,
        "gflops": operations * count / median / 1e9,
        # Of the program as XLA counts them; what fused kernels reread is not in it.
        "gb_per_second": cost.get("bytes accessed", 0) / median / 1e9 or None,
    }
