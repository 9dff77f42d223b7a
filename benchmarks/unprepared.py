"""A model without special support, under record-level privacy, against its own plain step loop.

Strided, dilated, depthwise and transposed convolutions, group norm, attention and an embedding, as
a Flax module in its usual words. Two times are compared: one jitted call for each step without
privacy, on the module as it is, and rounds of DP-SGD clients in one compiled program. Without noise
and clipping both must reach the same parameters.

    python benchmarks/unprepared.py [--rounds 3] [--json]
"""

import argparse
import json
import statistics
import time

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedjax_dp.algorithms import dp_sgd
from fedjax_dp.clients import LocalConfig, dp_sgd_trainer
from fedjax_dp.data import FederatedData, participants, sampling
from fedjax_dp.data.federated import example_structure
from fedjax_dp.engine import ExecutionConfig, simulation
from fedjax_dp.models import Model
from fedjax_dp.server import uniform_mean

NUM_CLIENTS, NUM_STEPS, BATCH_SIZE, NUM_CLASSES = 4, 4, 16, 10


class ConvNet(nn.Module):
    """Layers of many kinds; the position embedding is looked up by index."""

    @nn.compact
    def __call__(self, x):
        x = nn.Conv(24, (3, 3), strides=(2, 2))(x)
        x = nn.relu(nn.GroupNorm(4)(x))
        x = nn.relu(nn.Conv(24, (3, 3), kernel_dilation=(2, 2))(x))
        x = nn.relu(nn.Conv(24, (3, 3), feature_group_count=24)(x))
        x = nn.relu(nn.ConvTranspose(16, (3, 3), strides=(2, 2))(x))
        x = nn.Conv(32, (4, 4), strides=(4, 4))(x)
        tokens = x.reshape(x.shape[0], -1, x.shape[-1])
        positions = nn.Embed(tokens.shape[1], tokens.shape[2])(jnp.arange(tokens.shape[1]))
        tokens = tokens + nn.MultiHeadDotProductAttention(4)(tokens + positions)
        return nn.Dense(NUM_CLASSES)(jnp.mean(nn.LayerNorm()(tokens), axis=1))


def population() -> FederatedData:
    rng = np.random.default_rng(0)
    size = NUM_STEPS * BATCH_SIZE
    clients = [
        {
            "x": rng.random((size, 32, 32, 3), dtype=np.float32),
            "y": rng.integers(0, NUM_CLASSES, size, dtype=np.int32),
        }
        for _ in range(NUM_CLIENTS)
    ]
    return FederatedData.from_clients(clients)


def plain_round(data: FederatedData):
    """One round of FedAvg as a Python loop over jitted steps of the module."""
    module = ConvNet()

    def loss(params, batch):
        logits = module.apply(params, batch["x"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()

    @jax.jit
    def step(params, batch):
        gradient = jax.grad(loss)(params, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradient)

    batches = [
        [
            {k: jnp.asarray(v[i * BATCH_SIZE : (i + 1) * BATCH_SIZE]) for k, v in own.items()}
            for i in range(NUM_STEPS)
        ]
        for own in map(data.client, range(data.num_clients))
    ]

    def run(params):
        ends = []
        for steps in batches:
            own = params
            for batch in steps:
                own = step(own, batch)
            ends.append(own)
        return jax.tree.map(lambda *leaves: sum(leaves) / len(leaves), *ends)

    return run


def compiled_rounds(data: FederatedData, clip_norm: float, noise_multiplier: float):
    model = Model.from_flax(ConvNet(), example_structure(data)["x"], loss="softmax_cross_entropy")
    config = LocalConfig(
        learning_rate=0.1,
        batch_size=BATCH_SIZE,
        num_steps=NUM_STEPS,
        clip_norm=clip_norm,
        noise_multiplier=noise_multiplier,
    )
    trainer = dp_sgd_trainer(model, config, sampler=sampling.cyclic())
    algorithm = dp_sgd(model, trainer, aggregator=uniform_mean())
    all_clients = participants.participation(sampling.full_participation(), data.num_clients)
    return simulation(algorithm, data, all_clients, ExecutionConfig(rounds_per_call=2))


def seconds(run, num_rounds: int) -> float:
    times = []
    for _ in range(num_rounds + 1):
        started = time.perf_counter()
        jax.block_until_ready(run())
        times.append(time.perf_counter() - started)
    return statistics.median(times[1:])


def _length(tree) -> float:
    return float(
        np.sqrt(sum(np.sum(np.square(x, dtype=np.float64)) for x in jax.tree.leaves(tree)))
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    data, key = population(), jax.random.key(0)

    free = compiled_rounds(data, 1e6, 0.0)
    start = free.init(key)
    params = jax.tree.map(np.array, start.server.params)
    after, *_ = free.run(start, key, 1)
    plain = plain_round(data)
    expected = plain(params)
    ends = after.server.params
    gap = _length(jax.tree.map(np.subtract, ends, expected))
    moved = _length(jax.tree.map(np.subtract, expected, params))

    private = compiled_rounds(data, 1.0, 1.0)
    state = private.compile(private.init(key), key)

    def private_round():
        nonlocal state
        state, *_ = private.run(state, key, 1)
        return state

    result = {
        "plain_seconds_per_round": seconds(lambda: plain(params), options.rounds),
        "private_seconds_per_round": seconds(private_round, options.rounds),
        "relative_gap": gap / moved,
    }
    result["ratio"] = result["private_seconds_per_round"] / result["plain_seconds_per_round"]
    if options.json:
        print(json.dumps(result))
        return
    for name, value in result.items():
        print(f"{name:28s} {value:.4g}")


if __name__ == "__main__":
    main()
