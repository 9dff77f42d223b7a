"""Benchmark workloads: synthetic data of real shapes, fixed seeds."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np

from fedjax_dp.algorithms import FederatedAlgorithm, dp_fedavg, dp_sgd, fedavg
from fedjax_dp.algorithms import registry as algorithms
from fedjax_dp.clients import LocalConfig, dp_sgd_trainer, local_trainer
from fedjax_dp.core import checks
from fedjax_dp.core.ranges import Seed
from fedjax_dp.data import host_arrays, participants, sampling
from fedjax_dp.data.federated import FederatedData, example_structure
from fedjax_dp.data.participants import Participation
from fedjax_dp.engine.federation import Federation
from fedjax_dp.engine.wrappers.anderson import anderson
from fedjax_dp.engine.wrappers.availability import absences
from fedjax_dp.engine.wrappers.clock import clocked
from fedjax_dp.engine.wrappers.latencies import compute_seconds, latencies
from fedjax_dp.models import registry
from fedjax_dp.models.base import Model
from fedjax_dp.server.masking import gradient_mask
from fedjax_dp.server.mean import uniform_mean
from fedjax_dp.server.private import gaussian_mean
from fedjax_dp.server.secure import fixed_point, masked, random_neighbors

# Validation examples of a client that has a validation split.
_VALIDATION = 25
# Clients of a masked round that may collude, and that may drop out.
_COLLUDERS = _DROPOUTS = 2


class Workload(NamedTuple):
    """One benchmark."""

    about: str  # A description in one line.
    shape: tuple[int, ...]  # The shape of one example, or of one sequence of tokens.
    num_classes: int
    model: str
    num_clients: int
    examples_per_client: int
    batch_size: int
    model_options: Mapping[str, Any] = {}
    cohort: int | None = None  # Clients a round; None for all.
    num_steps: int | None = None  # Local steps a round; None for one epoch.
    clip_norm: float | None = None  # Bound on a delta or on a gradient; None without privacy.
    unit: str = "none"  # "none", "client" or "record".
    # The workload without privacy, or with FedAvg, to measure the overhead against.
    base: str | None = None
    algorithm: str = "fedavg"  # Used without privacy only.
    options: Mapping[str, Any] = {}
    is_text: bool = False  # Whether inputs are integer tokens, and labels the tokens that follow.
    is_validated: bool = False  # Whether clients have a validation split of 25 examples.
    is_masked: bool = False  # Whether FedAvg's steps are masked by agreement.
    memory: int | None = None  # τ of Anderson acceleration; None without.
    # Form of `server.secure.masked`, each client sharing masks with 10 random others; None without
    # secure aggregation.
    secure: Literal["masked", "cancelled"] | None = None
    word_bits: Literal[32, 64] = 32  # Of the words that floats then are, 32 or 64.
    # Whether a clock with jitter, a deadline and drop-outs is around the rounds.
    is_timed: bool = False


def _with_privacy(base: Workload, name: str, unit: str, clip_norm: float) -> Workload:
    about = f"{base.about}; {unit}-level privacy, clip {clip_norm:g}, noise multiplier 1"
    return base._replace(about=about, unit=unit, clip_norm=clip_norm, base=name)


_W1 = Workload(
    "EMNIST CNN, 50 clients of 100, batch 20, one epoch",
    (28, 28, 1), 62, "emnist_cnn", 50, 100, 20,
)  # fmt: skip
_W2 = Workload(
    "the same CNN on 32x32x3, 50 clients of 50, batch 10, one epoch",
    (32, 32, 3), 10, "emnist_cnn", 50, 50, 10,
)  # fmt: skip
_W3 = Workload(
    "thesis CNN, 21 clients of 2,000, batches of 64, 32 steps",
    (28, 28, 1), 10, "thesis_cnn", 21, 2000, 64, num_steps=32,
)  # fmt: skip
_W4 = Workload(
    "logistic regression 784 to 10, 10,000 clients of 20, one step",
    (784,), 10, "logistic_regression", 10_000, 20, 20, num_steps=1,
)  # fmt: skip
_W5 = Workload(
    "ResNet-18 with group norm on 32x32x3, 2 clients of 16, one step",
    (32, 32, 3), 10, "resnet18", 2, 16, 16, {"stem": "cifar"}, num_steps=1,
)  # fmt: skip
_CIFAR = Workload(
    "CIFAR-10 recipe: CNN on 32x32x3, 1,000 users of 50, cohorts of 50, batch 10; for a GPU",
    (32, 32, 3), 10, "emnist_cnn", 1000, 50, 10, cohort=50,
)  # fmt: skip
_FEMNIST = Workload(
    "EMNIST CNN, 3,400 clients of 200, cohorts of 100, batch 20; for a GPU",
    (28, 28, 1), 62, "emnist_cnn", 3400, 200, 20, cohort=100,
)  # fmt: skip
_RESNET = Workload(
    "ResNet-18 with group norm, 20 clients of 2,500, batches of 64; for a GPU",
    (32, 32, 3), 10, "resnet18", 20, 2500, 64, {"stem": "cifar"},
)  # fmt: skip

# Settings of published comparisons: sizes, batches and networks. All clients step by 0.1.
_DROPOUT = {"dropout": (0.25, 0.5)}
_P1 = _CIFAR._replace(about=f"pfl-research's {_CIFAR.about}; dropout", model_options=_DROPOUT)
_F1 = _FEMNIST._replace(
    about="FLUTE's FEMNIST: EMNIST CNN with dropout, 3,400 clients of 200, cohorts of 10, batch 20",
    cohort=10,
    model_options=_DROPOUT,
)
_F4 = Workload(
    "FLUTE's MNIST: logistic regression, 1,000 clients of 60, cohorts of 10, batch 10",
    (784,), 10, "logistic_regression", 1000, 60, 10, cohort=10,
)  # fmt: skip
_P2 = Workload(
    "pfl-research's Stack Overflow: transformer on 20 tokens, 2,000 users of 64, cohorts of 400, "
    "batch 16, server Adam without warm-up; for a GPU",
    (20,), 10_000, "char_transformer", 2000, 64, 16,
    {"width": 96, "num_heads": 8, "num_layers": 3, "intermediate_size": 1536, "is_tied": True},
    cohort=400, algorithm="fedadam", is_text=True,
    options={"server_learning_rate": 0.1, "adaptivity": 0.01},
)  # fmt: skip
_USERS = Workload(
    "thesis CNN, 2,000 users of 20, Poisson cohorts of 200, one step; client-level privacy",
    (28, 28, 1), 10, "thesis_cnn", 2000, 20, 20, cohort=200,
)  # fmt: skip

WORKLOADS: Mapping[str, Workload] = {
    "W1": _W1,
    "W1dp": _with_privacy(_W1, "W1", "client", 0.1),
    "W2": _W2,
    "W2dp": _with_privacy(_W2, "W2", "client", 0.4),
    "W3": _with_privacy(_W3, "W3nodp", "record", 3.0),
    "W3nodp": _W3,
    "W4": _W4,
    "W4dp": _with_privacy(_W4, "W4", "client", 0.1),
    "W5": _with_privacy(_W5, "W5nodp", "record", 1.0),
    "W5nodp": _W5,
    "W1gma": _W1._replace(about=f"{_W1.about}; steps masked", is_masked=True, base="W1"),
    "W4gma": _W4._replace(about=f"{_W4.about}; steps masked", is_masked=True, base="W4"),
    "W1propfair": _W1._replace(about=f"{_W1.about}; PropFair", algorithm="propfair", base="W1"),
    "W1term": _W1._replace(about=f"{_W1.about}; TERM", algorithm="term", base="W1"),
    "W1q_ffl": _W1._replace(about=f"{_W1.about}; q-FFL", algorithm="q_ffl", base="W1"),
    "W1afl": _W1._replace(about=f"{_W1.about}; AFL", algorithm="afl", base="W1"),
    "W4fedpi": _W4._replace(about=f"{_W4.about}; FedPi", algorithm="fedpi", base="W4"),
    "W4fedsplit": _W4._replace(about=f"{_W4.about}; FedSplit", algorithm="fedsplit", base="W4"),
    "W1anderson": _W1._replace(about=f"{_W1.about}; accelerated, τ = 10", memory=10, base="W1"),
    "W1masked": _W1._replace(
        about=f"{_W1.about}; masks with 10 neighbours each", secure="masked", base="W1"
    ),
    "W1masked64": _W1._replace(
        about=f"{_W1.about}; masks with 10 neighbours each, words of 64 bits",
        secure="masked",
        word_bits=64,
        base="W1",
    ),
    "W1cancelled": _W1._replace(
        about=f"{_W1.about}; masks left out", secure="cancelled", base="W1"
    ),
    "W1clock": _W1._replace(
        about=f"{_W1.about}; a clock with jitter, a deadline that all meet, chances to leave",
        is_timed=True,
        base="W1",
    ),
    "W1fedbn": _W1._replace(
        about=f"{_W1.about}; FedBN with a local head",
        algorithm="fedbn",
        options={"home": "params/Dense_1"},
        base="W1",
    ),
    "W1ditto": _W1._replace(about=f"{_W1.about}; Ditto", algorithm="ditto", base="W1"),
    "W1fed_ltn": _W1._replace(
        about=f"{_W1.about}; FedLTN, where no client learns enough to prune",
        algorithm="fed_ltn",
        is_validated=True,
        base="W1",
    ),
    "W1fed_ltn_prunes": _W1._replace(
        about=f"{_W1.about}; FedLTN where every client prunes in every round, and trains again",
        algorithm="fed_ltn",
        options={"accuracy_threshold": 1e-6, "prune_rate": 0.01},
        is_validated=True,
        base="W1",
    ),
    "users": _USERS._replace(unit="client", clip_norm=0.3),
    "cifar10": _CIFAR,
    "cifar10dp": _with_privacy(_CIFAR, "cifar10", "client", 0.4),
    "femnist": _FEMNIST,
    "femnistdp": _with_privacy(_FEMNIST, "femnist", "client", 0.1),
    "resnet18dp": _with_privacy(_RESNET, "resnet18", "record", 1.0),
    "resnet18": _RESNET,
    "P1": _P1,
    "P1dp": _with_privacy(_P1, "P1", "client", 0.4),
    "P2": _P2,
    "F1": _F1,
    "F4": _F4,
}


class Prepared(NamedTuple):
    """The parts of a workload; `wrapper` and `validation` may be None."""

    data: FederatedData
    model: Model
    algorithm: FederatedAlgorithm
    participation: Participation
    wrapper: Callable[[Federation], Federation] | None = None
    validation: FederatedData | None = None


def synthetic_data(workload: Workload, seed: Seed = 0) -> FederatedData:
    """Draws uniform inputs and uniform labels, or uniform tokens."""
    rng = np.random.default_rng(seed)
    count = workload.num_clients * workload.examples_per_client
    offsets = np.arange(workload.num_clients + 1) * workload.examples_per_client
    if workload.is_text:
        (length,) = workload.shape
        tokens = rng.integers(0, workload.num_classes, (count, length + 1), dtype=np.int32)
        return FederatedData({"x": tokens[:, :-1], "y": tokens[:, 1:]}, offsets)
    x = host_arrays.empty((count, *workload.shape), np.float32)
    rng.random(dtype=np.float32, out=x)
    y = rng.integers(0, workload.num_classes, count, dtype=np.int32)
    return FederatedData({"x": x, "y": y}, offsets)


def prepare(workload: Workload, *, learning_rate: float = 0.1) -> Prepared:
    """Builds the parts of a workload; every batch has exactly `batch_size` examples."""
    checks.positive("learning_rate", learning_rate)
    data = synthetic_data(workload)
    model = registry.build(
        workload.model, example_structure(data), workload.num_classes, **workload.model_options
    )
    config = LocalConfig(
        learning_rate=learning_rate, batch_size=workload.batch_size, num_steps=workload.num_steps
    )
    cohort = workload.cohort or workload.num_clients
    is_full = workload.batch_size >= workload.examples_per_client
    batches = sampling.full_participation() if is_full else sampling.fixed_size()
    build: FederatedAlgorithm
    if workload.unit == "record":
        config = config._replace(clip_norm=workload.clip_norm, noise_multiplier=1.0)
        build = dp_sgd(
            model, dp_sgd_trainer(model, config, sampler=batches), aggregator=uniform_mean()
        )
    else:
        is_epoch = workload.num_steps is None
        sampler = sampling.shuffled() if is_epoch and not is_full else batches
        trainer = local_trainer(model, config, sampler=sampler)
        if workload.unit == "client":
            assert workload.clip_norm is not None
            build = dp_fedavg(
                model,
                trainer,
                aggregator=gaussian_mean(
                    clip_norm=workload.clip_norm, noise_multiplier=1.0, expected_cohort_size=cohort
                ),
            )
        elif workload.algorithm == "fedavg":
            mean = uniform_mean()
            if workload.is_masked:
                mean = gradient_mask(mean)
            if workload.secure is not None:
                graph = random_neighbors(cohort, colluders=_COLLUDERS, dropouts=_DROPOUTS)
                words = fixed_point(cohort, word_bits=workload.word_bits)
                mean = masked(mean, words, graph, form=workload.secure)
            build = fedavg(model, trainer, aggregator=mean)
        else:
            facts = algorithms.Problem(num_clients=workload.num_clients)
            build = algorithms.build(
                workload.algorithm, model, trainer, facts, options=workload.options
            )
    is_full = workload.cohort is None
    sampler = sampling.full_participation() if is_full else sampling.fixed_size()
    if workload.unit == "client" and not is_full:
        sampler = sampling.poisson()
    participation = participants.participation(sampler, workload.num_clients, cohort)
    memory = workload.memory
    wrapper: Callable[[Federation], Federation] | None = None
    if memory is not None:
        wrapper = partial(anderson, memory=memory)
    if workload.is_timed:
        wrapper = _clock(workload.num_clients)
    second = None
    if workload.is_validated:
        second = synthetic_data(workload._replace(examples_per_client=_VALIDATION), seed=1)
    return Prepared(data, model, build, participation, wrapper, second)


def _clock(num_clients: int) -> Callable[[Federation], Federation]:
    """Makes a clock that draws all that a clock may draw, and leaves out no client."""
    places = latencies(["a", "b"], [[0.01, 0.1], [0.1, 0.01]], ["a"] * num_clients, "b", jitter=0.1)
    compute = compute_seconds(num_clients, per_step=0.1, spread=0.5)
    rare = absences(1e-9, rounds=1)
    return partial(
        clocked,
        latencies=places,
        compute=compute,
        server_seconds=0.1,
        deadline=1e6,
        dropout=0.0,
        availability=rare,
    )
