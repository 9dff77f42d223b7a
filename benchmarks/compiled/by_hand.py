"""Each workload's round as one writes it in plain JAX: `vmap` over clients, `scan` over steps.

The yardstick for compiled rounds: the same network, data, batches, clipping and noise, with none of
the package's lowering, masks of absent clients, records, checks of finite updates or compensated
sums. Native convolutions, default precision, and for records `vmap(grad)`.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_dp.core.products import Arithmetic, computed_with
from fedjax_dp.experiment.studies.workloads import Prepared, Workload

_RATE = 0.1


def rounds_by_hand(
    workload: Workload, parts: Prepared, cohort: int
) -> tuple[Callable[..., Any], tuple[Any, ...], float]:
    """Writes `(params, examples, key, num_rounds) -> params`; also the shapes of its arguments.

    The third result is the number of local steps.

    Args:
      workload: one that averages, with or without privacy, of clients of one size.
      parts: its parts.
      cohort: the clients of a round.
    """
    size, batch = (
        workload.examples_per_client,
        min(workload.batch_size, workload.examples_per_client),
    )
    steps = workload.num_steps or math.ceil(size / batch)
    model, population = parts.model, workload.num_clients

    def loss(params, examples, key):
        with computed_with(Arithmetic(convolutions="native")):
            return jnp.mean(model.losses(params, examples, is_training=True, key=key)[0])

    def clipped(tree, bound):
        norm = jnp.sqrt(sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(tree)))
        return jax.tree.map(lambda x: x * jnp.minimum(1, bound / norm), tree)

    def noisy(key, tree, scale):
        leaves, structure = jax.tree.flatten(tree)
        keys = jax.random.split(key, len(leaves))
        made = [
            x + scale * jax.random.normal(k, x.shape) for k, x in zip(keys, leaves, strict=True)
        ]
        return jax.tree.unflatten(structure, made)

    def gradient(params, examples, key):
        if workload.unit != "record":
            return jax.grad(loss)(params, examples, key)

        def one(example):
            alone = jax.tree.map(lambda x: x[None], example)
            return clipped(jax.grad(loss)(params, alone, key), workload.clip_norm)

        total = jax.tree.map(lambda x: jnp.sum(x, 0), jax.vmap(one)(examples))
        noised = noisy(key, total, workload.clip_norm)
        return jax.tree.map(lambda x: x / batch, noised)

    def client(params, examples, index, key):
        order_key, noise_key = jax.random.split(key)
        order = jax.random.permutation(order_key, size)

        @partial(jax.named_call, name="local_step")
        def step(now, i):
            rows = index * size + jax.lax.dynamic_slice_in_dim(order, i * batch % size, batch)
            read = jax.tree.map(lambda x: x[rows], examples)
            moved = gradient(now, read, jax.random.fold_in(noise_key, i))
            return jax.tree.map(lambda p, g: p - _RATE * g, now, moved), None

        trained, _ = jax.lax.scan(step, params, jnp.arange(steps))
        delta = jax.tree.map(jnp.subtract, trained, params)
        return clipped(delta, workload.clip_norm) if workload.unit == "client" else delta

    def one_round(params, examples, key):
        draw, train, noise = jax.random.split(key, 3)
        drawn = jnp.arange(population)
        if cohort < population:
            drawn = jax.random.choice(draw, population, (cohort,), replace=False)
        keys = jax.random.split(train, cohort)
        deltas = jax.vmap(client, (None, None, 0, 0))(params, examples, drawn, keys)
        total = jax.tree.map(lambda x: jnp.sum(x, 0), deltas)
        if workload.unit == "client":
            total = noisy(noise, total, workload.clip_norm)
        return jax.tree.map(lambda p, d: p + d / cohort, params, total)

    def rounds(params, examples, key, num_rounds):
        def body(i, params):
            with jax.named_scope("round"):
                return one_round(params, examples, jax.random.fold_in(key, i))

        return jax.lax.fori_loop(0, num_rounds, body, params)

    examples = {
        name: jax.ShapeDtypeStruct(array.shape, jax.dtypes.canonicalize_dtype(array.dtype))
        for name, array in parts.data.examples.items()
    }
    key = jax.eval_shape(jax.random.key, 0)
    params = jax.eval_shape(model.init, key)
    arguments = params, examples, key, jax.ShapeDtypeStruct((), jnp.int32)
    return rounds, arguments, float(steps)
