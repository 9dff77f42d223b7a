"""A step of the EMNIST CNN by clients side by side, in several forms.

Convolutions are native, which side by side are grouped convolutions, or products of patches, or of
another form that `core.choices` names; or the gradients of records are clipped one by one.
"""

import concurrent.futures
import os
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from benchmarks.accelerator.clock import PRECISIONS, timed
from fedjax_dp.clients import LocalConfig
from fedjax_dp.clients.gradients import clipped
from fedjax_dp.core.backend import backend
from fedjax_dp.core.products import Arithmetic, computed_with
from fedjax_dp.models import Model
from fedjax_dp.models.cost import training_cost

_SHAPE = (28, 28, 1)
# For which each program is timed at least, in three calls or more.
_SECONDS = 0.3


class EmnistCnn(nn.Module):
    """The network of `models.emnist_cnn`, in any type of inputs."""

    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for width in (32, 64):
            x = nn.relu(nn.Conv(width, (3, 3), padding="VALID", dtype=self.dtype)(x))
        x = nn.max_pool(x, (2, 2), strides=(2, 2)).reshape(x.shape[0], -1)
        x = nn.relu(nn.Dense(128, dtype=self.dtype)(x))
        return nn.Dense(62, dtype=self.dtype)(x)


def rows(
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
    products, dtype = PRECISIONS[precision]
    example = jax.ShapeDtypeStruct(_SHAPE, jnp.float32)
    model = Model.from_flax(EmnistCnn(dtype), example, loss="softmax_cross_entropy")
    rule = clipped(model)
    config = LocalConfig(clip_norm=1.0, noise_multiplier=0.0, batch_size=batch_size)
    how = Arithmetic("split" if precision == "split" else "exact")
    if form != "records":
        how = how._replace(convolutions=form)

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
    with computed_with(how), jax.default_matmul_precision(products):
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
        params, elapsed = timed(lambda p=params: compiled(p, x, y))
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
