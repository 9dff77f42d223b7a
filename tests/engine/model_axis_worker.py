"""Runs rounds with and without a model axis on four CPU devices; a process of its own."""

import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from small_problem import KEY, NUM_CLIENTS, ROUNDS, SIZES
from test_asynchronous import RULES as ARRIVALS

from fedjax_dp.algorithms import dp_fedavg, dp_sgd, fedavg, scaffold
from fedjax_dp.clients import LocalConfig, dp_sgd_trainer, local_trainer
from fedjax_dp.data import participants, sampling
from fedjax_dp.data.federated import FederatedData
from fedjax_dp.engine import ExecutionConfig, ModelAxis, anderson, asynchronous, simulation
from fedjax_dp.models import char_transformer, llama, lora, mlp
from fedjax_dp.server.private import gaussian_mean

NUMBERS = LocalConfig(learning_rate=0.1, batch_size=3, num_epochs=2)
PRIVATE = NUMBERS._replace(clip_norm=0.5, noise_multiplier=0.7)
FEATURES, TOKENS, CLASSES = 20, 6, 11
# Of the kernels that are divided, no axis is as long as an adapter or another array.
WIDTHS = (24,)
RULES = {
    "mlp": {"params/Dense_0/kernel": 1, "params/Dense_1/kernel": -2},
    "transformer": {
        "params/*/attention_out/kernel": 0,
        "params/*/dense_in/kernel": -1,
        "params/*/dense_out/kernel": 0,
        **{f"params/*/{name}/kernel": 1 for name in ("query", "key", "value")},
    },
    # Halves of the one head of keys, which its rotation exchanges.
    "llama": {"params/*/k_proj/kernel": 1, "params/*/q_proj/kernel": 1},
}


def made(kind):
    """A model with adapters, and clients' data."""
    rng = np.random.default_rng(1)
    if kind == "mlp":
        shape = jax.ShapeDtypeStruct((FEATURES,), jnp.float32)
        model = mlp(shape, CLASSES, hidden_sizes=WIDTHS)
        targets = "params/*/kernel"
    elif kind == "transformer":
        shape = jax.ShapeDtypeStruct((TOKENS,), jnp.int32)
        model = char_transformer(shape, CLASSES, width=16, num_heads=2, num_layers=1)
        targets = ["params/*/query/kernel", "params/*/dense_in/kernel"]
    else:
        shape = jax.ShapeDtypeStruct((TOKENS,), jnp.int32)
        sizes = {"hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "num_kv_heads": 1}
        model = llama(shape, CLASSES, num_layers=1, **sizes)
        targets = "params/*/q_proj/kernel"
    clients = []
    for size in SIZES:
        if kind == "mlp":
            x = rng.normal(size=(size, FEATURES)).astype(np.float32)
            y = rng.integers(0, CLASSES, size).astype(np.int32)
        else:
            x, y = rng.integers(0, CLASSES, (2, size, TOKENS)).astype(np.int32)
        clients.append({"x": x, "y": y})
    base = jax.tree.map(np.array, model.init(jax.random.key(0)))
    return lora(model, base, rank=2, targets=targets), FederatedData.from_clients(clients)


def divided(kind, model):
    """The shapes of the kernels that the rules name."""
    specs = ModelAxis(2, RULES[kind]).specs(model.frozen)[0]
    return [x.shape for x, spec in zip(model.constants[0], specs, strict=True) if any(spec)]


def algorithm_of(name, model):
    """What has norms of examples, of clients, of both, or states by client."""
    clips = gaussian_mean(0.2, 0.8, 4.0)
    if name == "dp_sgd":
        return dp_sgd(model, dp_sgd_trainer(model, PRIVATE))
    if name == "dp_both":
        return dp_fedavg(model, dp_sgd_trainer(model, PRIVATE), aggregator=clips)
    # Without clips a larger rate diverges, and rounding with it.
    slow = local_trainer(model, NUMBERS._replace(learning_rate=0.01))
    if name == "anderson":
        return fedavg(model, slow)
    if name == "scaffold":
        return scaffold(model, slow, num_clients=NUM_CLIENTS)
    if name == "asynchronous":
        return dp_fedavg(model, slow, aggregator=clips)
    return dp_fedavg(model, local_trainer(model, NUMBERS), aggregator=clips)


def rounds_of(name):
    """The participation of clients, and what wraps the rounds."""
    if name == "anderson":
        everyone = participants.participation(sampling.full_participation(), NUM_CLIENTS)
        return everyone, partial(anderson, memory=2)
    if name == "asynchronous":
        pairs = participants.participation(sampling.fixed_size(), NUM_CLIENTS, 2)
        return pairs, partial(asynchronous, **ARRIVALS)
    return participants.participation(sampling.poisson(), NUM_CLIENTS, 4.0), None


def refusal(sim, key):
    """The message of an error before the first round."""
    try:
        sim.compile(sim.init(key), key)
    except ValueError as error:
        return str(error)
    return "none"


def main(output: str, *jobs: str) -> None:
    """Runs jobs such as "dp_sgd:mlp:device" and saves both final states."""
    arrays = {}
    for job in jobs:
        name, kind, placement = job.split(":")
        model, data = made(kind)
        joins, wrapper = rounds_of(name)
        key = jax.random.key(KEY)
        for is_divided in (True, False):
            axis = ModelAxis(2, RULES[kind]) if is_divided else None
            execution = ExecutionConfig(2, 4 if is_divided else 1, placement, 2, model_axis=axis)
            others = jax.live_arrays()
            sim = simulation(algorithm_of(name, model), data, joins, execution, wrapper=wrapper)
            if kind == "llama":
                arrays[f"{job}/refused"] = refusal(sim, key)
                break
            state, *_ = sim.run(sim.init(key), key, ROUNDS)
            # From host arrays, as after a checkpoint, the same program must take the state back.
            state, record, info = sim.run(sim.portable(state), key, 1)
            which = f"{job}/{'divided' if is_divided else 'one'}"
            kept = sim.portable(state)
            # Slots are in another order on several devices.
            numbers = {"traces": sim.num_traces(), "clients": np.sort(record.clients)}
            for part in ("server", "clients"):
                leaves = jax.tree.leaves(getattr(kept, part))
                numbers |= {f"state/{part}/{i}": leaf for i, leaf in enumerate(leaves)}
            # Slots are padded by device.
            shown = jax.tree.leaves(info.training._replace(padding_share=()))
            numbers |= {f"info/{i}": x for i, x in enumerate(shown)}
            arrays |= {f"{which}/{part}": value for part, value in numbers.items()}
            if not is_divided:
                continue
            used = {device for leaf in jax.tree.leaves(state.server) for device in leaf.devices()}
            arrays[f"{job}/devices"] = np.int32(len(used))
            own = {id(x): x for x in jax.live_arrays()}
            for other in others:
                own.pop(id(other), None)
            held = [x for x in own.values() if x.shape in divided(kind, model)]
            sizes = [(x.size, s.data.size) for x in held for s in x.addressable_shards]
            arrays[f"{job}/held"] = np.array(sizes)
    np.savez(output, **arrays)


if __name__ == "__main__":
    main(*sys.argv[1:])
