"""A small problem for audits, and every algorithm that claims privacy on it."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_dp.algorithms import pool, registry
from fedjax_dp.audit.canaries import plant_clients, plant_records
from fedjax_dp.audit.canary_records import plant_votes
from fedjax_dp.clients.base import LocalConfig
from fedjax_dp.clients.sgd import dp_sgd_trainer, local_trainer
from fedjax_dp.core import trees
from fedjax_dp.data import participants, sampling
from fedjax_dp.data.federated import FederatedData
from fedjax_dp.engine import ExecutionConfig, simulation
from fedjax_dp.models.base import Model
from fedjax_dp.privacy import mechanisms
from fedjax_dp.privacy.mechanisms.clipping import make_adaptive_clipping
from fedjax_dp.privacy.mechanisms.distributed import make_plan
from fedjax_dp.privacy.mechanisms.noise import banded_noise
from fedjax_dp.server import private
from fedjax_dp.server.base import Aggregator
from fedjax_dp.server.masking import gradient_mask
from fedjax_dp.server.private import correlated_gaussian_mean, discrete_mean, gaussian_mean

NUM_FEATURES = 60
NUM_CLIENTS = 4
NUM_ROUNDS = 4
SIZE = 8
NOISE_MULTIPLIER = 1.0
DP_DELTA = 1e-5

FULL = sampling.full_participation()
POISSON = sampling.poisson()
# One client at a time compiles fastest.
EXECUTION = ExecutionConfig(clients_per_chunk=1)


@functools.cache
def data() -> FederatedData:
    rng = np.random.default_rng(0)
    return FederatedData.from_clients(
        [
            {
                "x": rng.normal(size=(SIZE, NUM_FEATURES)).astype(np.float32),
                "y": rng.integers(0, 2, SIZE).astype(np.float32),
            }
            for _ in range(NUM_CLIENTS)
        ]
    )


def model() -> Model:
    return Model.from_functions(
        lambda key: {"b": jnp.zeros(()), "w": jnp.zeros(NUM_FEATURES)},
        lambda params, x: x @ params["w"] + params["b"],
        loss="sigmoid_binary_cross_entropy",
        name="logistic",
    )


NUMBERS = LocalConfig(
    learning_rate=0.1, batch_size=6.0, num_steps=1, clip_norm=0.5, noise_multiplier=NOISE_MULTIPLIER
)


def private_trainer(model, sampler=POISSON, **options):
    return dp_sgd_trainer(model, NUMBERS, sampler=sampler, **options)


def plain_trainer(model):
    numbers = NUMBERS._replace(batch_size=4, clip_norm=None, noise_multiplier=None)
    return local_trainer(model, numbers)


def mean(noise_multiplier=NOISE_MULTIPLIER):
    return gaussian_mean(0.5, noise_multiplier, NUM_CLIENTS / 2)


# Noise on whole models: the sensitivity of training is searched in test_minimizer_noise, where a
# canary with a gradient of its own choice does not reach it.
ON_MODELS = ("warm_start_averaging", "retrained_averaging")


def private_pairs() -> list[tuple[str, str]]:
    """All algorithms of the registry with each unit of privacy that they claim."""
    return [
        (name, unit)
        for name, entry in registry.ALGORITHMS.items()
        if name not in ON_MODELS
        for unit in ("client", "record")
        if unit in entry.units or "both" in entry.units
    ]


def build(name, model, unit, trainer=None, aggregator=None, public_x=None):
    """Builds an algorithm of the registry with one unit protected, or both where it must be."""
    offered = registry.ALGORITHMS[name].units
    unit = unit if unit in offered else "both"
    is_private = unit in ("record", "both")
    trainer = trainer or (private_trainer(model) if is_private else plain_trainer(model))
    if unit in ("client", "both"):
        aggregator = aggregator or mean()
    problem = registry.Problem(
        num_clients=NUM_CLIENTS,
        num_rounds=NUM_ROUNDS,
        aggregator=aggregator,
        declared_epsilon=np.array([1.0, 2.0, 6.0, 5.0]),
        public_x=PUBLIC if public_x is None else public_x,
    )
    return registry.build(
        name,
        model,
        trainer,
        problem,
        unit=unit,
        options=_OPTIONS.get((name, unit), _OPTIONS.get(name, {})),
    )


MEANS = (
    *("gaussian", "per_layer", "laplace", "staircase", "bounded_laplace", "adaptive"),
    *("discrete_gaussian", "filled", "central_discrete", "skellam", "correlated", "masked"),
)


@functools.cache
def aggregators() -> dict[str, tuple[Aggregator, participants.Participation]]:
    """Every private mean that there is, with who may join a round of it."""
    structure = jax.eval_shape(model().init, jax.random.key(0))
    size, count = trees.num_parameters(structure), NUM_CLIENTS
    all_clients = full_participation()
    rule = make_adaptive_clipping(2.0, initial_clip_norm=0.5, count_stddev=2.0)
    plan = functools.partial(make_plan, size, 0.5, 1.2, num_clients=count)
    banded = banded_noise(8, 2, min_separation=2)
    return {
        "gaussian": (private.gaussian_mean(0.5, 1.2, 2.0), all_clients),
        "per_layer": (private.gaussian_mean(0.5, 1.2, 2.0, per_layer=True), all_clients),
        "laplace": (private.laplace_mean(0.5, 1.2, 2.0), all_clients),
        "staircase": (private.staircase_mean(structure, 0.5, 1.2, 2.0), all_clients),
        "bounded_laplace": (
            private.bounded_laplace_mean(structure, 0.5, 1.2, 2.0, 1e-4),
            all_clients,
        ),
        "adaptive": (private.adaptive_gaussian_mean(rule, 1.2), all_clients),
        "discrete_gaussian": (discrete_mean(structure, plan(), count), all_clients),
        "filled": (
            discrete_mean(structure, plan(num_shares=8), 2.0, varies=True),
            participants.participation(sampling.poisson(), count, 2.0),
        ),
        "central_discrete": (
            private.central_discrete_mean(structure, 0.5, 1.2, 2.0),
            participants.participation(sampling.poisson(), count, 2.0),
        ),
        "skellam": (discrete_mean(structure, plan(noise="skellam"), count), all_clients),
        "masked": (gradient_mask(private.gaussian_mean(0.5, 1.2, 2.0)), all_clients),
        "correlated": (
            correlated_gaussian_mean(banded, 0.5, 1.2, 2.0),
            participants.participation(sampling.cyclic(), count, 2),
        ),
    }


PUBLIC = np.random.default_rng(1).normal(size=(80, NUM_FEATURES)).astype(np.float32)
# Two clusters for four clients, and a round of every stage.
_OPTIONS: dict[Any, dict] = {
    # Every entry is kept, so that no canary is dropped for being small.
    ("blur_lus", "record"): {"sparsity": 0.0, "radius": 0.5, "score": "magnitude"},
    # What the server learns from answers shows nothing that the answers do not.
    ("ae_dpfl", "record"): {"server_epochs": 0},
    "r_dpcfl": {"num_models": 2, "soft_rounds": 2, "num_selections": 1},
    "rc_dpfl": {"num_models": 2},
    "f_cdpfl": {"num_models": 2, "num_selections": 2},
    "km_cdpfl": {"num_models": 2},
    "o_dpcfl": {"clusters": (0, 1, 0, 1)},
    "ifca": {"num_models": 2, "is_weighted": False},
    "fedper": {"head": "b"},
    "fedrep": {"head": "b", "head_epochs": 1},
}


def full_participation(num_clients=NUM_CLIENTS) -> participants.Participation:
    return participants.participation(FULL, num_clients)


def plant_in(planter, target, *sizes, num_canaries=1, on=None, store=None, **options):
    """Plants canaries by one of the planters, with all clients in every round."""
    store = store or data()
    population = store, full_participation(store.num_clients)
    sources = (target,) if planter is plant_clients else (target, on or model())
    rng = np.random.default_rng(0)
    return planter(*sources, *population, num_canaries, *sizes, rng, **options)


def half_the_noise(clip_norm, noise_multiplier):
    """States the noise that it should add, and adds half of it."""
    quiet = mechanisms.gaussian(clip_norm, noise_multiplier / 2)
    return mechanisms.gaussian(clip_norm, noise_multiplier)._replace(add_noise=quiet.add_noise)


def plant(name, unit, num_canaries, participation=None, **parts):
    """Plants canaries in an algorithm of the registry."""
    store = pool(data()) if name == "centralized" else data()
    sampler = FULL if unit == "record" else POISSON
    cohort = store.num_clients / (1 if unit == "record" else 2)
    participation = participation or participants.participation(sampler, store.num_clients, cohort)
    rng = np.random.default_rng(0)
    if unit == "client":
        algorithm = build(name, model(), unit, **parts)
        return plant_clients(algorithm, store, participation, num_canaries, rng)
    if registry.ALGORITHMS[name].asks_public_inputs:

        def make_voters(model, public_x):
            return build(name, model, unit, public_x=public_x, **parts)

        return plant_votes(
            make_voters, model(), store, participation, num_canaries, NUM_ROUNDS, rng
        )
    make = functools.partial(build, name, unit=unit, **parts)
    return plant_records(make, model(), store, participation, num_canaries, rng)


def state_of(algorithm, store, participation):
    return simulation(algorithm, store, participation, EXECUTION).init(jax.random.key(0))
