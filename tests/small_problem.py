"""A small problem for every algorithm: six clients, a logistic model, numbers by client."""

import functools
from typing import NamedTuple

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from fedjax_dp.clients.base import LocalConfig
from fedjax_dp.clients.sgd import dp_sgd_trainer, local_trainer
from fedjax_dp.data.federated import FederatedData
from fedjax_dp.engine.layout import ExecutionConfig
from fedjax_dp.models.base import Model

ROUNDS = 3
KEY = 3
# One client at a time compiles fastest.
ALONE = ExecutionConfig(clients_per_chunk=1)
NUM_FEATURES = 3
SHAPES = [(), (NUM_FEATURES,)]
SIZES = (7, 0, 12, 5, 9, 3)
VALIDATION_SIZES = (5, 0, 7, 4, 2, 6)
NUM_CLIENTS = len(SIZES)
COHORT = 3.5
NUM_MODELS = 2
CLUSTERS = (0, 0, 1, 1, 0, 1)
PUBLIC = np.random.default_rng(9).normal(size=(8, NUM_FEATURES)).astype(np.float32)


class Settings(NamedTuple):
    """The numbers of local training, one entry for each client."""

    learning_rate: np.ndarray
    batch_size: np.ndarray
    num_epochs: np.ndarray
    clip_norm: np.ndarray
    noise_multiplier: np.ndarray


SETTINGS = Settings(
    learning_rate=np.array([0.3, 0.2, 0.1, 0.25, 0.15, 0.2]),
    batch_size=np.array([2, 1, 5, 5, 4, 8]),
    num_epochs=np.array([1, 2, 1, 3, 2, 1]),
    clip_norm=np.array([0.5, 1.0, 0.8, 0.3, 1.2, 0.6]),
    noise_multiplier=np.array([0.7, 1.0, 0.5, 1.1, 0.3, 0.9]),
)
ONE_CLIENT = Settings(*(np.asarray(column)[[2]] for column in SETTINGS))


def make_data(sizes=SIZES, seed=0, dtype=np.float32) -> FederatedData:
    """Clients with a linear signal, turned round at every other client."""
    rng = np.random.default_rng(seed)
    direction = np.array([1.5, -1.0, 0.5])
    clients = []
    for i, size in enumerate(sizes):
        x = rng.normal(size=(size, NUM_FEATURES))
        signal = (x @ direction) * (-1) ** (i // 2)
        y = (rng.uniform(size=size) < 1 / (1 + np.exp(-3 * signal))).astype(np.float32)
        clients.append({"x": x.astype(dtype), "y": y})
    return FederatedData.from_clients(clients)


def make_model(dtype=jnp.float32) -> Model:
    def init(key):
        weights = 0.3 * jax.random.normal(key, (NUM_FEATURES,))
        return {"b": jnp.zeros((), dtype), "w": weights.astype(dtype)}

    return Model.from_functions(
        init,
        lambda params, x: x @ params["w"] + params["b"],
        loss="sigmoid_binary_cross_entropy",
        name="logistic",
    )


class _Normed(nn.Module):
    @nn.compact
    def __call__(self, x, *, is_training: bool = False):
        x = nn.Dense(6)(x)
        x = nn.relu(nn.BatchNorm(use_running_average=not is_training, momentum=0.5)(x))
        return nn.Dense(1)(x)[:, 0]


@functools.cache
def normed() -> Model:
    """A model with batch norm between two layers."""
    shape = jax.ShapeDtypeStruct((NUM_FEATURES,), jnp.float32)
    return Model.from_flax(_Normed(), shape, loss="sigmoid_binary_cross_entropy")


def config(settings: Settings, *, is_private: bool = False) -> LocalConfig:
    numbers = settings._asdict()
    if not is_private:
        del numbers["clip_norm"], numbers["noise_multiplier"]
    return LocalConfig(**numbers)


def plain_trainer(model, settings=SETTINGS, **options):
    return local_trainer(model, config(settings), **options)


def private_trainer(model, settings=SETTINGS):
    return dp_sgd_trainer(model, config(settings, is_private=True))


def theta_of(params) -> np.ndarray:
    """Parameters as rows of the oracles: `[..., parameters]`."""
    b, w = np.asarray(params["b"], np.float64), np.asarray(params["w"], np.float64)
    return np.concatenate([b[..., None], w], axis=-1)


def snapshot(state):
    """Copies a state to the host, before a run donates it."""
    return jax.tree.map(np.array, state)


def assert_same_state(actual, expected, atol):
    """Compares a state in all its parts; bit for bit where `atol` is 0."""
    for part in ("server", "aggregator", "clients", "round"):
        trees = getattr(actual, part), getattr(expected, part)
        chex.assert_trees_all_equal_shapes_and_dtypes(*trees)
        chex.assert_trees_all_close(*trees, rtol=0, atol=atol)
