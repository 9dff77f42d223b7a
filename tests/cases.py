"""One small case for every algorithm: how it is built, what it must give, what is compared.

Whoever adds an algorithm adds a case here; the laws, the oracles and the contract then run on it.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from marks import later, telling
from oracles import clustered, federated, generalization, local, noise_aware, personal
from oracles.feddyn import feddyn
from oracles.replay import Replay
from oracles.splitting import FACTORS, ergodic, splitting
from oracles.trimmed_mean import trimmed_mean

from fedjax_dp import algorithms
from fedjax_dp.algorithms.base import FederatedAlgorithm
from fedjax_dp.clients.base import LocalConfig
from fedjax_dp.clients.sgd import dp_sgd_trainer, local_trainer
from fedjax_dp.data import participants, sampling
from fedjax_dp.data.federated import FederatedData
from fedjax_dp.engine import ExecutionConfig, RoundInfo, RoundRecord, Simulation, simulation
from fedjax_dp.models.base import Model
from fedjax_dp.server.base import Stacked, stateless
from fedjax_dp.server.masking import gradient_mask
from fedjax_dp.server.private import gaussian_mean
from fedjax_dp.server.trimmed_mean import trimmed_mean as trimmed_mean_aggregator

ROUNDS = 3
KEY = 3
NUM_FEATURES = 3
SIZES = (7, 0, 12, 5, 9, 3)
VALIDATION_SIZES = (5, 0, 7, 4, 2, 6)
NUM_CLIENTS = len(SIZES)
COHORT = 3.5
NUM_MODELS = 2


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
_SHAPES = [(), (NUM_FEATURES,)]
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


def config(settings: Settings, *, is_private: bool = False) -> LocalConfig:
    private = {"clip_norm": settings.clip_norm, "noise_multiplier": settings.noise_multiplier}
    return LocalConfig(
        learning_rate=settings.learning_rate,
        batch_size=settings.batch_size,
        num_epochs=settings.num_epochs,
        **(private if is_private else {}),
    )


def plain_trainer(model, settings=SETTINGS):
    return local_trainer(model, config(settings))


def private_trainer(model, settings=SETTINGS):
    return dp_sgd_trainer(model, config(settings, is_private=True))


def theta_of(params) -> np.ndarray:
    """Parameters as rows of the oracles: `[..., parameters]`."""
    b, w = np.asarray(params["b"], np.float64), np.asarray(params["w"], np.float64)
    return np.concatenate([b[..., None], w], axis=-1)


class Run(NamedTuple):
    """What an oracle is given: the start, the data, the draws."""

    initial: Any
    clients: list
    replay: Replay
    validation: list | tuple = ()


class Case(NamedTuple):
    """An algorithm on the small problem.

    `make` takes a model; `observe` reads from a state what `expect` computes by hand.
    """

    name: str
    factory: Callable
    make: Callable[[Model], FederatedAlgorithm]
    expect: Callable[[Run], dict[str, np.ndarray]]
    observe: Callable[[Any], dict[str, np.ndarray]]
    is_private: bool = False
    is_pooled: bool = False
    is_validated: bool = False

    def settings(self) -> Settings:
        return ONE_CLIENT if self.is_pooled else SETTINGS

    def data(self) -> FederatedData:
        return algorithms.pool(make_data()) if self.is_pooled else make_data()

    def validation(self) -> FederatedData | None:
        """A second split of the same clients' data, for those that ask for one."""
        return make_data(VALIDATION_SIZES, seed=1) if self.is_validated else None

    def participation(self) -> participants.Participation:
        if self.is_pooled:
            return participants.participation(sampling.everybody(), 1)
        return participants.participation(sampling.poisson(), NUM_CLIENTS, COHORT)

    def record_sampler(self) -> sampling.Sampler:
        return sampling.poisson() if self.is_private else sampling.shuffled()

    def simulation(self, execution=ExecutionConfig(), model=None) -> Simulation:
        algorithm = self.make(model or make_model())
        return simulation(
            algorithm, self.data(), self.participation(), execution, validation=self.validation()
        )

    def run_of(self, initial, key) -> Run:
        data, settings = self.data(), self.settings()
        clients = _by_client(data)
        replay = Replay(
            key,
            self.participation(),
            self.record_sampler(),
            data.sizes,
            settings.batch_size,
            _SHAPES,
        )
        return Run(initial, clients, replay, _by_client(self.validation()))


def _by_client(data: FederatedData | None) -> list:
    if data is None:
        return []
    return [
        (data.client(i)["x"].astype(np.float64), data.client(i)["y"].astype(np.float64))
        for i in range(data.num_clients)
    ]


def median_aggregator() -> Stacked:
    """A stacked aggregator: the coordinate-wise median of the cohort, zero for nobody."""

    def combine(state, numbers, stack, close):

        def median(a):
            mask = close.contributes.reshape(-1, *[1] * (a.ndim - 1))
            return jnp.nan_to_num(jnp.nanmedian(jnp.where(mask, a, jnp.nan), axis=0))

        return state, jax.tree.map(median, stack), {}

    def contribute(state, numbers, update, sender):
        return update

    return Stacked(stateless, contribute, combine)


def _params(state):
    return {"params": theta_of(state.server.params)}


def _with_server(make_server, *, settings=SETTINGS, mu=0.0, is_private=False):
    """The oracle of FedAvg with a local training and a server step."""

    def expect(run: Run):
        local = federated.local_dp_sgd if is_private else federated.local_sgd
        options = {} if is_private else {"mu": mu}
        train = local(run.clients, run.replay, settings, **options)
        theta = theta_of(run.initial.server.params)
        return {
            "params": federated.fedavg(theta, run.clients, run.replay, ROUNDS, train, make_server())
        }

    return expect


def _dp_fedavg(clip_norm, noise_multiplier, *, is_private=False):
    def expect(run: Run):
        local = federated.local_dp_sgd if is_private else federated.local_sgd
        train = local(run.clients, run.replay, SETTINGS)
        theta = theta_of(run.initial.server.params)
        return {
            "params": federated.dp_fedavg(
                theta, run.replay, ROUNDS, train, clip_norm, noise_multiplier, COHORT
            )
        }

    return expect


def _blur_lus(run: Run):
    layers = (slice(0, 1), slice(1, 1 + NUM_FEATURES))
    train = federated.blur_lus(run.clients, run.replay, SETTINGS, 0.5, 0.2, 0.4, layers)
    theta = theta_of(run.initial.server.params)
    return {"params": federated.dp_fedavg(theta, run.replay, ROUNDS, train, 0.2, 0.8, COHORT)}


PUBLIC = np.random.default_rng(9).normal(size=(8, NUM_FEATURES)).astype(np.float32)


def _ae_dpfl(run: Run):
    train = federated.local_sgd(run.clients, run.replay, SETTINGS)
    theta = theta_of(run.initial.server.params)
    arguments = (run.replay, ROUNDS, train, PUBLIC.astype(np.float64), 0.4, 2, 3)
    theta, labels = federated.ae_dpfl(theta, run.clients, *arguments)
    return {"params": theta, "labels": labels}


def _median(run: Run):
    train = federated.local_sgd(run.clients, run.replay, SETTINGS)
    theta = theta_of(run.initial.server.params)
    return {"params": federated.median(theta, run.replay, ROUNDS, train)}


def _trimmed_mean(run: Run):
    train = federated.local_sgd(run.clients, run.replay, SETTINGS)
    theta = theta_of(run.initial.server.params)
    for r in range(ROUNDS):
        deltas = [train(theta, r, i) - theta for i in run.replay.cohort(r)]
        theta = theta + trimmed_mean(np.array(deltas), 0.4) if deltas else theta
    return {"params": theta}


def _feddyn(run: Run):
    train = federated.local_sgd(run.clients, run.replay, SETTINGS, mu=0.4)
    theta = theta_of(run.initial.server.params)
    theta, h, g = feddyn(theta, NUM_CLIENTS, run.replay, ROUNDS, train, 0.4)
    return {"params": theta, "correction": h, "corrections": g}


# Of the proximal step in the first round.
STEP_SIZE = 0.8


def _splitting(numbers, *, phi="prox", is_averaged=False, is_weighted=False, schedule="constant"):
    """The oracle of the splitting scheme; Φ is a proximal step, SGD or DP-SGD."""

    def eta(t):
        return STEP_SIZE * FACTORS[schedule](t, None)

    def expect(run: Run):
        sizes, theta = run.replay.sizes, theta_of(run.initial.server.params)

        def prox(r, i, u, mean):
            stiffer = 1 / eta(r) - 1 / STEP_SIZE
            rates = 1 / (1 / SETTINGS.learning_rate + stiffer)
            settings = SETTINGS._replace(learning_rate=rates)
            train = federated.local_sgd(run.clients, run.replay, settings, mu=1 / eta(r))
            return train(mean, r, i, (mean - u) / eta(r))

        def trained(r, i, u, mean):
            how = federated.local_dp_sgd if phi == "dp_sgd" else federated.local_sgd
            return how(run.clients, run.replay, SETTINGS)(u, r, i)

        cohorts = [run.replay.cohort(r) for r in range(ROUNDS)]
        weights = sizes.astype(float) if is_weighted else (sizes > 0).astype(float)
        client_map = prox if phi == "prox" else trained
        found = splitting(client_map, theta, weights, cohorts, numbers, waits=True)
        points = np.where(found.joined[:, None], found.points, theta)
        expected = {"params": found.models[-1], "points": points}
        if is_averaged:
            counts = [sum(weights[i] for i in cohort) > 0 for cohort in cohorts]
            steps = [eta(r) for r in range(ROUNDS)]
            expected["average"] = ergodic(theta, found.models, steps, counts)
        return expected

    return expect


def _observe_splitting(state):
    average, own = state.server.average, state.clients.of_point
    params = theta_of(state.server.params)
    return {
        "params": params,
        # Where a client begins next; the start for one that has not joined.
        "points": theta_of(own.part) + np.asarray(own.share)[:, None] * params,
        **({} if average is None else {"average": theta_of(average.mean)}),
    }


def _scaffold(run: Run):
    train = federated.local_sgd(run.clients, run.replay, SETTINGS)
    theta = theta_of(run.initial.server.params)
    x, c, c_i = federated.scaffold(theta, run.clients, run.replay, ROUNDS, train, SETTINGS, 0.7)
    return {"params": x, "control": c, "controls": c_i}


def _scaffold_by_gradients(run: Run):
    theta = theta_of(run.initial.server.params)
    arguments = theta, run.clients, run.replay, ROUNDS, SETTINGS, 0.7, 0.6
    x, c, c_i = federated.scaffold_by_gradients(*arguments)
    return {"params": x, "control": c, "controls": c_i}


def _observe_scaffold(state):
    return {
        "params": theta_of(state.server.params),
        "control": theta_of(state.server.control),
        "controls": theta_of(state.clients),
    }


def _with_momentum(learning_rate):
    return optax.sgd(learning_rate, momentum=0.6)


def _gma(make_server=federated.sgd_server, *, mu=0.0, threshold=0.6, **how):
    def expect(run: Run):
        train = federated.local_sgd(run.clients, run.replay, SETTINGS, mu=mu)
        theta = theta_of(run.initial.server.params)
        arguments = run.clients, run.replay, ROUNDS, train, make_server(), threshold
        return {"params": generalization.gma(theta, *arguments, **how)}

    return expect


def _gma_scaffold(run: Run):
    train = federated.local_sgd(run.clients, run.replay, SETTINGS)
    theta = theta_of(run.initial.server.params)
    x, c, c_i = federated.scaffold(
        theta,
        run.clients,
        run.replay,
        ROUNDS,
        train,
        SETTINGS,
        0.7,
        lambda deltas: generalization.mask(deltas, 0.6),
    )
    return {"params": x, "control": c, "controls": c_i}


def _gma_private(run: Run):
    train = federated.local_sgd(run.clients, run.replay, SETTINGS)
    theta = theta_of(run.initial.server.params)
    # One noise for the update and, behind it, for the votes.
    run.replay.theta_shapes = 2 * _SHAPES
    theta = generalization.noised_gma(
        theta, run.clients, run.replay, ROUNDS, train, 0.2, 0.8, COHORT, 0.6, 0.5
    )
    return {"params": theta}


def _afl(run: Run):
    train = federated.local_sgd(run.clients, run.replay, SETTINGS)
    theta = theta_of(run.initial.server.params)
    theta, weights = generalization.afl(theta, run.clients, run.replay, ROUNDS, train, 0.3)
    return {"params": theta, "weights": weights}


def _term(run: Run):
    train = federated.local_sgd(run.clients, run.replay, SETTINGS)
    theta = theta_of(run.initial.server.params)
    theta, risk = generalization.term(theta, run.clients, run.replay, ROUNDS, train, 2.0)
    return {"params": theta, "risk": np.array(risk)}


def _q_ffl(run: Run):
    train = federated.local_sgd(run.clients, run.replay, SETTINGS)
    theta = theta_of(run.initial.server.params)
    rates = SETTINGS.learning_rate
    return {
        "params": generalization.q_fedavg(theta, run.clients, run.replay, ROUNDS, train, rates, 0.5)
    }


def _propfair(make_train):
    def expect(run: Run):
        # The margin is so wide that losses lie on either side of it.
        train = make_train(run.clients, run.replay, SETTINGS, 2.0, 1.2)
        theta = theta_of(run.initial.server.params)
        server = federated.sgd_server()
        arguments = theta, run.clients, run.replay, ROUNDS, train, server
        return {"params": federated.fedavg(*arguments)}

    return expect


def _ifca(run: Run):
    train = federated.local_sgd(run.clients, run.replay, SETTINGS)
    models = theta_of(run.initial.server.models)
    models, choices = federated.ifca(models, run.clients, run.replay, ROUNDS, train)
    return {"models": models, "choices": choices}


def _local_only(run: Run):
    train = federated.local_sgd(run.clients, run.replay, SETTINGS)
    theta = theta_of(run.initial.server.start)
    return {"rows": federated.local_only(theta, run.replay, ROUNDS, train)}


# What clients declare; the three largest are public.
EPSILON = (1.0, 2.0, 6.0, 0.5, 5.0, 7.0)
IS_PUBLIC = np.array([False, False, True, False, True, True])


def _noise_aware(make_mean):
    """The oracle of a mean of DP-SGD updates that weighs clients one by one."""

    def expect(run: Run):
        train = federated.local_dp_sgd(run.clients, run.replay, SETTINGS)
        theta = theta_of(run.initial.server.params)
        mean = make_mean(run.replay.sizes)
        return {"params": noise_aware.averaged(theta, run, ROUNDS, train, mean)}

    return expect


def _by_weight(weight_of):
    def make_mean(sizes):
        weights = np.asarray(weight_of(np.asarray(sizes, float)))
        return lambda r, members, deltas: weights[members] / weights[members].sum() @ deltas

    return make_mean


def _pfa_mean(sizes):
    epsilon = np.array(EPSILON)
    return lambda r, members, deltas: noise_aware.pfa_mean(
        deltas, epsilon[members], IS_PUBLIC[members]
    )


# Rounds of soft clusters, and ε of a choice: three rounds hold every kind of round.
SOFT_ROUNDS, CHOICE_EPSILON = 2, 3.0
CLUSTERS = (0, 0, 1, 1, 0, 1)


def _whole_batches(run: Run):
    """DP-SGD of a round in which every batch is all of the client's data."""
    sizes, replay = run.replay.sizes, run.replay
    whole = Replay(
        replay.key, replay.participation, replay.sampler, sizes, np.maximum(sizes, 1), _SHAPES
    )

    def train(start, round_index, i):
        (x, y), steps = run.clients[i], int(SETTINGS.num_epochs[i])
        return local.dp_sgd(
            start,
            x,
            y,
            whole.batches(round_index, i, steps),
            whole.record_noise(round_index, i, steps),
            SETTINGS.learning_rate[i],
            len(y),
            SETTINGS.clip_norm[i],
            SETTINGS.noise_multiplier[i],
        )

    return train


def _r_dpcfl(is_exact):
    def expect(run: Run):
        train = federated.local_dp_sgd(run.clients, run.replay, SETTINGS)

        def choose(models, r, i):
            x, y = run.clients[i]
            if is_exact:
                return clustered.choose_exactly(models, x, y)
            noise = clustered.gumbel(run.replay, r, i, NUM_MODELS)
            return clustered.choose_privately(models, x, y, CHOICE_EPSILON, noise)

        return clustered.r_dpcfl(
            run,
            train,
            _whole_batches(run),
            ROUNDS,
            NUM_MODELS,
            SOFT_ROUNDS,
            choose,
            lambda i: len(run.clients[i][1]) if is_exact else 1,
        )

    return expect


def _observe_r_dpcfl(state):
    return {
        "models": theta_of(state.server.models),
        "choices": state.clients,
        "chances": state.server.responsibilities,
    }


def _f_cdpfl(run: Run):
    train = federated.local_dp_sgd(run.clients, run.replay, SETTINGS)
    return clustered.f_cdpfl(run, train, ROUNDS, 2, CHOICE_EPSILON)


def _o_dpcfl(run: Run):
    train = federated.local_sgd(run.clients, run.replay, SETTINGS)
    theta = theta_of(run.initial.server.models)[0]
    models = clustered.o_dpcfl(theta, run.clients, run.replay, ROUNDS, train, CLUSTERS)
    return {"models": models}


def _km_cdpfl(run: Run):
    train = federated.local_sgd(run.clients, run.replay, SETTINGS)
    theta = theta_of(run.initial.server.models)[0]
    models, clusters = clustered.km_cdpfl(theta, run.clients, run.replay, ROUNDS, train, NUM_MODELS)
    return {"models": models, "clusters": clusters}


def _mr_mtl(run: Run):
    theta = theta_of(run.initial.server.mean)
    own = clustered.mr_mtl(theta, run.clients, run.replay, ROUNDS, SETTINGS, 0.5)
    return {"rows": own, "mean": own.mean(axis=0)}


# The bias stays at home.
IS_HOME = np.array([True, False, False, False])


def _at_home(head_epochs=None):
    def expect(run: Run):
        train = personal.trainer(run.clients, run.replay, SETTINGS)
        theta = theta_of(run.initial.server.params)
        theta, own = personal.at_home(theta, run, ROUNDS, train, IS_HOME, head_epochs=head_epochs)
        return {"params": theta, "own": own[:, 0]}

    return expect


def _observe_at_home(state):
    return {"params": theta_of(state.server.params), "own": np.asarray(state.clients["b"])}


def _ditto(run: Run, purpose=personal.SECOND):
    train = personal.trainer(run.clients, run.replay, SETTINGS)
    theta = theta_of(run.initial.server.params)
    theta, own = personal.ditto(theta, run, ROUNDS, train, 0.6, purpose)
    return {"params": theta, "own": own}


def _observe_ditto(state):
    return {"params": theta_of(state.server.params), "own": theta_of(state.clients)}


def _bits(packed):
    return np.unpackbits(np.asarray(packed["w"]), axis=1)[:, :NUM_FEATURES]


def _lottery_fl(run: Run):
    train = personal.trainer(run.clients, run.replay, SETTINGS)
    theta = theta_of(run.initial.server.params)
    theta, masks = personal.lottery_fl(theta, run, ROUNDS, train, 0.4, 0.5, 0.25)
    return {"params": theta, "masks": masks[:, 1:]}


_LTN = {
    "prune_rate": 0.7,
    "target": 0.7,
    "accuracy_threshold": 0.58,
    "strength": 0.05,
    "mixing": 0.6,
    "momentum": 0.4,
}


def _fed_ltn(run: Run, variant: personal.Variant = personal.Variant()):
    train = personal.trainer(run.clients, run.replay, SETTINGS)
    theta = theta_of(run.initial.server.params)
    found = personal.fed_ltn(theta, run, ROUNDS, train, IS_HOME, _LTN, variant=variant)
    return {"params": found["params"], "own": found["own"][:, 0], "masks": found["masks"]}


def _observe_fed_ltn(state):
    return {
        "params": theta_of(state.server.params),
        "own": np.asarray(state.clients.home["b"]),
        "masks": _bits(state.clients.mask),
    }


def _jump_start(run: Run, variant: personal.Variant = personal.Variant(), **options: Any):
    train = personal.trainer(run.clients, run.replay, SETTINGS)
    theta = theta_of(run.initial.server.inner.params)
    stage: dict[str, Any] = {"jump_rounds": 2, "jump_target": 0.4, **options}
    found = personal.fed_ltn(theta, run, ROUNDS, train, IS_HOME, _LTN, variant=variant, **stage)
    return found | {"own": found["own"][:, 0]}


def _make_fed_ltn(model: Model, **options: Any):
    trainer = plain_trainer(model)
    return algorithms.fed_ltn(model, trainer, home="b", prunable="w", **_LTN, **options)


def _make_jump_start(model: Model, **options: Any):
    return algorithms.jump_start(
        model,
        plain_trainer(model),
        jump_rounds=2,
        jump_target=0.4,
        home="b",
        prunable="w",
        **_LTN,
        **options,
    )


def _observe_jump_start(state):
    inner = state._replace(server=state.server.inner, clients=state.clients.inner)
    found = _observe_fed_ltn(inner) | {"alone": theta_of(state.clients.params)}
    # Whoever has not taken part since the jump will go on with the shared mask.
    waits = np.asarray(state.server.has_jumped) & ~np.asarray(state.clients.has_jumped)
    shared = np.unpackbits(np.asarray(state.server.mask["w"]))[:NUM_FEATURES]
    return found | {"masks": np.where(waits[:, None], shared, found["masks"])}


def _observe_own_masks(state):
    """Where nobody goes on with the shared one."""
    return _observe_jump_start(state) | {"masks": _bits(state.clients.inner.mask)}


_ADAPTIVE = {"server_learning_rate": 0.1, "b1": 0.8, "adaptivity": 0.1}
_CENTRAL = {"clip_norm": 0.2, "noise_multiplier": 0.8, "expected_cohort_size": COHORT}


def _variant(name: str, observe: Callable[[Any], Any] | None = None, **options: Any) -> Case:
    """FedLTN or its first stage with other options, by hand too."""
    own = {key: options[key] for key in personal.Variant._fields if key in options}
    stage = {key: value for key, value in options.items() if key not in own}
    is_jump = name == "jump_start"
    make, expect, look = (
        (_make_jump_start, _jump_start, _observe_jump_start)
        if is_jump
        else (_make_fed_ltn, _fed_ltn, _observe_fed_ltn)
    )
    return Case(
        name,
        getattr(algorithms, name),
        functools.partial(make, **options),
        functools.partial(expect, variant=personal.Variant(**own), **stage),
        observe or look,
        is_validated=True,
    )


# Not cases of their own: in the laws they are those whose names they have.
JUMP_BY_ALL = _variant("jump_start", score="all")
VARIANTS = {
    "rewound": _variant("fed_ltn", rewinds=True, distance="squared"),
    "pruned first": _variant("fed_ltn", prunes="before", rewinds=True),
    "braking, plain mean": _variant("fed_ltn", looks_ahead=False, is_masked_mean=False),
    "a jump, rewound": _variant("jump_start", rewinds=True),
    "a jump with own masks": _variant("jump_start", _observe_own_masks, inherits_mask=False),
    "scaffold by gradients, with momentum": Case(
        "scaffold",
        algorithms.scaffold,
        lambda m: algorithms.scaffold(
            m,
            local_trainer(m, config(SETTINGS), optimizer=_with_momentum),
            num_clients=NUM_CLIENTS,
            server_learning_rate=0.7,
            control="gradient",
        ),
        _scaffold_by_gradients,
        _observe_scaffold,
    ),
    "ditto on the same batches": Case(
        "ditto",
        algorithms.ditto,
        lambda m: algorithms.ditto(m, plain_trainer(m), strength=0.6, order="interleaved"),
        functools.partial(_ditto, purpose=None),
        _observe_ditto,
    ),
}
_CASES = (
    Case(
        "fedavg",
        algorithms.fedavg,
        lambda m: algorithms.fedavg(m, plain_trainer(m)),
        _with_server(federated.sgd_server),
        _params,
    ),
    Case(
        "fedavgm",
        algorithms.fedavgm,
        lambda m: algorithms.fedavgm(m, plain_trainer(m), server_learning_rate=0.5, momentum=0.7),
        _with_server(lambda: federated.sgd_server(0.5, 0.7)),
        _params,
    ),
    Case(
        "fedadam",
        algorithms.fedadam,
        lambda m: algorithms.fedadam(m, plain_trainer(m), b2=0.9, **_ADAPTIVE),
        _with_server(lambda: federated.adaptive_server("adam", 0.1, 0.8, 0.9, 0.1)),
        _params,
    ),
    Case(
        "fedyogi",
        algorithms.fedyogi,
        lambda m: algorithms.fedyogi(m, plain_trainer(m), b2=0.9, **_ADAPTIVE),
        _with_server(lambda: federated.adaptive_server("yogi", 0.1, 0.8, 0.9, 0.1)),
        _params,
    ),
    Case(
        "fedadagrad",
        algorithms.fedadagrad,
        lambda m: algorithms.fedadagrad(m, plain_trainer(m), **_ADAPTIVE),
        _with_server(lambda: federated.adaptive_server("adagrad", 0.1, 0.8, None, 0.1)),
        _params,
    ),
    Case(
        "fedprox",
        algorithms.fedprox,
        lambda m: algorithms.fedprox(m, plain_trainer(m), mu=0.5),
        _with_server(federated.sgd_server, mu=0.5),
        _params,
    ),
    Case(
        "median",
        algorithms.fedavg,
        lambda m: algorithms.fedavg(m, plain_trainer(m), aggregator=median_aggregator()),
        _median,
        _params,
    ),
    Case(
        "trimmed_mean",
        algorithms.fedavg,
        lambda m: algorithms.fedavg(m, plain_trainer(m), aggregator=trimmed_mean_aggregator(0.4)),
        _trimmed_mean,
        _params,
    ),
    Case(
        "feddyn",
        algorithms.feddyn,
        lambda m: algorithms.feddyn(m, plain_trainer(m), num_clients=NUM_CLIENTS, alpha=0.4),
        _feddyn,
        lambda state: {
            "params": theta_of(state.server.params),
            "correction": theta_of(state.server.correction),
            "corrections": theta_of(state.clients),
        },
    ),
    Case(
        "scaffold",
        algorithms.scaffold,
        lambda m: algorithms.scaffold(
            m, plain_trainer(m), num_clients=NUM_CLIENTS, server_learning_rate=0.7
        ),
        _scaffold,
        _observe_scaffold,
    ),
    Case(
        "gma",
        algorithms.fedavg,
        lambda m: algorithms.fedavg(m, plain_trainer(m), aggregator=gradient_mask(threshold=0.6)),
        _gma(),
        _params,
    ),
    Case(
        "gma_hard",
        algorithms.fedavg,
        lambda m: algorithms.fedavg(
            m, plain_trainer(m), aggregator=gradient_mask(threshold=0.6, mask="hard")
        ),
        _gma(kind="hard"),
        _params,
    ),
    Case(
        "gma_printed",
        algorithms.fedavg,
        lambda m: algorithms.fedavg(
            m, plain_trainer(m), aggregator=gradient_mask(threshold=0.6, form="printed")
        ),
        _gma(form="printed"),
        _params,
    ),
    Case(
        "gma_fedprox",
        algorithms.fedprox,
        lambda m: algorithms.fedprox(
            m, plain_trainer(m), mu=0.5, aggregator=gradient_mask(threshold=0.6)
        ),
        _gma(mu=0.5),
        _params,
    ),
    Case(
        "gma_fedadam",
        algorithms.fedadam,
        lambda m: algorithms.fedadam(
            m, plain_trainer(m), b2=0.9, aggregator=gradient_mask(threshold=0.6), **_ADAPTIVE
        ),
        _gma(lambda: federated.adaptive_server("adam", 0.1, 0.8, 0.9, 0.1)),
        _params,
    ),
    Case(
        "gma_fedyogi",
        algorithms.fedyogi,
        lambda m: algorithms.fedyogi(
            m, plain_trainer(m), b2=0.9, aggregator=gradient_mask(threshold=0.6), **_ADAPTIVE
        ),
        _gma(lambda: federated.adaptive_server("yogi", 0.1, 0.8, 0.9, 0.1)),
        _params,
    ),
    Case(
        "gma_scaffold",
        algorithms.scaffold,
        lambda m: algorithms.scaffold(
            m,
            plain_trainer(m),
            num_clients=NUM_CLIENTS,
            server_learning_rate=0.7,
            aggregator=gradient_mask(threshold=0.6, is_weighted=False),
        ),
        _gma_scaffold,
        lambda state: {
            "params": theta_of(state.server.params),
            "control": theta_of(state.server.control),
            "controls": theta_of(state.clients),
        },
    ),
    Case(
        "gma_private",
        algorithms.dp_fedavg,
        lambda m: algorithms.dp_fedavg(
            m,
            plain_trainer(m),
            aggregator=gradient_mask(gaussian_mean(**_CENTRAL), threshold=0.6, vote_share=0.5),
        ),
        _gma_private,
        _params,
    ),
    Case(
        "afl",
        algorithms.afl,
        lambda m: algorithms.afl(m, plain_trainer(m), num_clients=NUM_CLIENTS, step_size=0.3),
        _afl,
        lambda state: _params(state) | {"weights": np.asarray(state.aggregator)},
    ),
    Case(
        "term",
        algorithms.term,
        lambda m: algorithms.term(m, plain_trainer(m), tilt=2.0),
        _term,
        lambda state: _params(state) | {"risk": np.asarray(state.server.risk)},
    ),
    Case(
        "q_ffl",
        algorithms.q_ffl,
        lambda m: algorithms.q_ffl(m, plain_trainer(m), q=0.5),
        _q_ffl,
        _params,
    ),
    Case(
        "propfair",
        algorithms.propfair,
        lambda m: algorithms.propfair(m, plain_trainer(m), baseline=2.0, margin=1.2),
        _propfair(generalization.propfair_sgd),
        _params,
    ),
    Case(
        "propfair_private",
        algorithms.propfair,
        lambda m: algorithms.propfair(m, private_trainer(m), baseline=2.0, margin=1.2),
        _propfair(generalization.propfair_dp_sgd),
        _params,
        is_private=True,
    ),
    Case(
        "splitting",
        algorithms.splitting,
        lambda m: algorithms.splitting(
            m,
            plain_trainer(m),
            alpha=1.6,
            beta=0.7,
            gamma=0.6,
            step_size=STEP_SIZE,
            schedule="inverse",
            is_averaged=True,
        ),
        _splitting((1.6, 0.7, 0.6), is_averaged=True, schedule="inverse"),
        _observe_splitting,
    ),
    Case(
        "fedsplit",
        algorithms.fedsplit,
        lambda m: algorithms.fedsplit(m, plain_trainer(m), step_size=STEP_SIZE, is_weighted=True),
        _splitting((2, 2, 1), is_weighted=True),
        _observe_splitting,
    ),
    Case(
        "fedpi",
        algorithms.fedpi,
        lambda m: algorithms.fedpi(m, plain_trainer(m), step_size=STEP_SIZE),
        _splitting((2, 2, 0.5)),
        _observe_splitting,
    ),
    Case(
        "fedrp",
        algorithms.fedrp,
        lambda m: algorithms.fedrp(m, plain_trainer(m), step_size=STEP_SIZE),
        _splitting((2, 1, 1)),
        _observe_splitting,
    ),
    Case(
        "reflected_fedavg",
        algorithms.reflected_fedavg,
        lambda m: algorithms.reflected_fedavg(m, private_trainer(m)),
        _splitting((1, 2, 1), phi="dp_sgd"),
        _observe_splitting,
        is_private=True,
    ),
    Case(
        "reflected_fedprox",
        algorithms.reflected_fedprox,
        lambda m: algorithms.reflected_fedprox(m, plain_trainer(m), step_size=STEP_SIZE),
        _splitting((1, 2, 1)),
        _observe_splitting,
    ),
    Case(
        "ifca",
        algorithms.ifca,
        lambda m: algorithms.ifca(m, plain_trainer(m), num_models=NUM_MODELS),
        _ifca,
        lambda state: {"models": theta_of(state.server.models), "choices": state.clients},
    ),
    Case(
        "dp_fedavg",
        algorithms.dp_fedavg,
        lambda m: algorithms.dp_fedavg(m, plain_trainer(m), aggregator=gaussian_mean(**_CENTRAL)),
        _dp_fedavg(0.2, 0.8),
        _params,
    ),
    Case(
        "ae_dpfl",
        algorithms.ae_dpfl,
        lambda m: algorithms.ae_dpfl(
            m,
            plain_trainer(m),
            public_x=PUBLIC,
            num_rounds=ROUNDS,
            server_learning_rate=0.4,
            server_batch_size=2,
            server_epochs=3,
        ),
        _ae_dpfl,
        lambda state: _params(state) | {"labels": np.asarray(state.server.labels)},
    ),
    Case(
        "blur_lus",
        algorithms.blur_lus,
        lambda m: algorithms.blur_lus(
            m,
            plain_trainer(m),
            strength=0.5,
            sparsity=0.4,
            aggregator=gaussian_mean(0.2, 0.8, COHORT),
        ),
        _blur_lus,
        _params,
    ),
    Case(
        "dp_sgd",
        algorithms.dp_sgd,
        lambda m: algorithms.dp_sgd(m, private_trainer(m)),
        _with_server(federated.sgd_server, is_private=True),
        _params,
        is_private=True,
    ),
    Case(
        "dp_both",
        algorithms.dp_fedavg,
        lambda m: algorithms.dp_fedavg(m, private_trainer(m), aggregator=gaussian_mean(**_CENTRAL)),
        _dp_fedavg(0.2, 0.8, is_private=True),
        _params,
        is_private=True,
    ),
    Case(
        "record_dp_fedavg",
        algorithms.record_dp_fedavg,
        lambda m: algorithms.record_dp_fedavg(m, private_trainer(m), num_clients=NUM_CLIENTS),
        _noise_aware(_by_weight(lambda sizes: sizes)),
        _params,
        is_private=True,
    ),
    Case(
        "minimum_epsilon",
        algorithms.minimum_epsilon,
        lambda m: algorithms.minimum_epsilon(
            m, private_trainer(m), num_clients=NUM_CLIENTS, is_weighted=False
        ),
        _noise_aware(_by_weight(np.ones_like)),
        _params,
        is_private=True,
    ),
    Case(
        "weiavg",
        algorithms.weiavg,
        lambda m: algorithms.weiavg(
            m, private_trainer(m), num_clients=NUM_CLIENTS, declared_epsilon=EPSILON
        ),
        _noise_aware(_by_weight(lambda sizes: np.array(EPSILON))),
        _params,
        is_private=True,
    ),
    Case(
        "pfa",
        algorithms.pfa,
        lambda m: algorithms.pfa(
            m, private_trainer(m), num_clients=NUM_CLIENTS, declared_epsilon=EPSILON
        ),
        _noise_aware(_pfa_mean),
        _params,
        is_private=True,
    ),
    Case(
        "robust_hdp",
        algorithms.robust_hdp,
        lambda m: algorithms.robust_hdp(m, private_trainer(m), num_clients=NUM_CLIENTS),
        _noise_aware(lambda sizes: noise_aware.FirstEstimates()),
        _params,
        is_private=True,
    ),
    Case(
        "noise_oracle",
        algorithms.noise_oracle,
        lambda m: algorithms.noise_oracle(m, private_trainer(m), num_clients=NUM_CLIENTS),
        _noise_aware(
            _by_weight(
                lambda sizes: 1 / np.maximum(noise_aware.oracle_levels(SETTINGS, sizes), 1e-20)
            )
        ),
        _params,
        is_private=True,
    ),
    Case(
        "local_only",
        algorithms.local_only,
        lambda m: algorithms.local_only(m, plain_trainer(m)),
        _local_only,
        lambda state: {"rows": theta_of(state.clients)},
    ),
    Case(
        "r_dpcfl",
        algorithms.r_dpcfl,
        lambda m: algorithms.r_dpcfl(
            m,
            private_trainer(m),
            num_clients=NUM_CLIENTS,
            num_rounds=ROUNDS,
            num_models=NUM_MODELS,
            selection_epsilon=CHOICE_EPSILON,
            num_selections=1,
            soft_rounds=SOFT_ROUNDS,
        ),
        _r_dpcfl(is_exact=False),
        _observe_r_dpcfl,
        is_private=True,
    ),
    Case(
        "rc_dpfl",
        algorithms.rc_dpfl,
        lambda m: algorithms.rc_dpfl(
            m,
            private_trainer(m),
            num_clients=NUM_CLIENTS,
            num_rounds=ROUNDS,
            num_models=NUM_MODELS,
            soft_share=SOFT_ROUNDS / ROUNDS,
        ),
        _r_dpcfl(is_exact=True),
        _observe_r_dpcfl,
        is_private=True,
    ),
    Case(
        "f_cdpfl",
        algorithms.f_cdpfl,
        lambda m: algorithms.f_cdpfl(
            m,
            private_trainer(m),
            num_rounds=ROUNDS,
            num_models=NUM_MODELS,
            selection_epsilon=CHOICE_EPSILON,
            num_selections=2,
        ),
        _f_cdpfl,
        lambda state: {"models": theta_of(state.server.models), "choices": state.clients},
        is_private=True,
    ),
    Case(
        "km_cdpfl",
        algorithms.km_cdpfl,
        lambda m: algorithms.km_cdpfl(
            m, plain_trainer(m), num_clients=NUM_CLIENTS, num_models=NUM_MODELS
        ),
        _km_cdpfl,
        lambda state: {
            "models": theta_of(state.server.models),
            "clusters": state.server.clusters,
        },
    ),
    Case(
        "o_dpcfl",
        algorithms.o_dpcfl,
        lambda m: algorithms.o_dpcfl(
            m, plain_trainer(m), num_clients=NUM_CLIENTS, clusters=CLUSTERS
        ),
        _o_dpcfl,
        lambda state: {"models": theta_of(state.server.models)},
    ),
    Case(
        "mr_mtl",
        algorithms.mr_mtl,
        lambda m: algorithms.mr_mtl(m, plain_trainer(m), num_clients=NUM_CLIENTS, strength=0.5),
        _mr_mtl,
        lambda state: {"rows": theta_of(state.clients), "mean": theta_of(state.server.mean)},
    ),
    Case(
        "fedbn",
        algorithms.fedbn,
        lambda m: algorithms.fedbn(m, plain_trainer(m), home="b"),
        _at_home(),
        _observe_at_home,
    ),
    Case(
        "fedper",
        algorithms.fedper,
        lambda m: algorithms.fedper(m, plain_trainer(m), head="b"),
        _at_home(),
        _observe_at_home,
    ),
    Case(
        "fedrep",
        algorithms.fedrep,
        lambda m: algorithms.fedrep(m, plain_trainer(m), head="b", head_epochs=2),
        _at_home(head_epochs=2),
        _observe_at_home,
    ),
    Case(
        "ditto",
        algorithms.ditto,
        lambda m: algorithms.ditto(m, plain_trainer(m), strength=0.6),
        _ditto,
        _observe_ditto,
    ),
    Case(
        "lottery_fl",
        algorithms.lottery_fl,
        lambda m: algorithms.lottery_fl(
            m,
            plain_trainer(m),
            prune_rate=0.4,
            target=0.5,
            accuracy_threshold=0.25,
            prunable="w",
        ),
        _lottery_fl,
        lambda state: {
            "params": theta_of(state.server.params),
            "masks": _bits(state.clients),
        },
        is_validated=True,
    ),
    Case(
        "fed_ltn",
        algorithms.fed_ltn,
        _make_fed_ltn,
        _fed_ltn,
        _observe_fed_ltn,
        is_validated=True,
    ),
    Case(
        "jump_start",
        algorithms.jump_start,
        _make_jump_start,
        _jump_start,
        _observe_jump_start,
        is_validated=True,
    ),
    Case(
        "centralized",
        algorithms.centralized,
        lambda m: algorithms.centralized(m, plain_trainer(m, ONE_CLIENT)),
        _with_server(federated.sgd_server, settings=ONE_CLIENT),
        _params,
        is_pooled=True,
    ),
)
CASES = {case.name: case for case in _CASES}

# One case of every kind of declaration: what a change of the engine breaks shows in one of them.
KINDS = (
    *("fedavg", "fedadam", "fedprox", "median", "feddyn", "scaffold", "gma_private", "dp_both"),
    *("afl", "term", "propfair", "fedpi", "ifca", "ae_dpfl", "blur_lus", "robust_hdp", "weiavg"),
    *("r_dpcfl", "km_cdpfl", "mr_mtl", "fedrep", "ditto", "jump_start", "centralized"),
)


def quick_first(names):
    """Parameters of which all but `fedavg` are left to the slow suite, as telling ones."""
    names = list(names)
    return later(names, but={"fedavg"} & set(names), mark=telling)


def kinds_first(names):
    """The same, telling for one case of every kind: each compiles a round of its own."""
    names = list(names)
    soon = [name for name in names if name in KINDS]
    return quick_first(soon) + later(name for name in names if name not in KINDS)


# Every case in its plainest layout: one client at a time, one device, all data resident.
PLAIN = ExecutionConfig(clients_per_chunk=1, placement="device", rounds_per_call=2)


class Reference(NamedTuple):
    """A finished run of a case in the plainest layout; states are host copies."""

    case: Case
    sim: Simulation
    key: Any
    initial: Any
    final: Any
    record: RoundRecord
    info: RoundInfo


def snapshot(state):
    """Copies a state to the host, before a run donates it."""
    return jax.tree.map(np.array, state)


@functools.cache
def reference(name: str) -> Reference:
    """Runs a case once for all tests of a process."""
    case = CASES[name]
    key = jax.random.key(KEY)
    sim = case.simulation(PLAIN)
    initial = snapshot(sim.init(key))
    final, record, info = sim.run(initial, key, ROUNDS)
    return Reference(case, sim, key, initial, snapshot(final), record, info)


def num_slab_sizes(sim: Simulation, participants) -> int:
    """How many sizes of slab a streamed run needs: twice the expected rows, or powers of two."""
    sizes = np.asarray(sim.sizes)
    rows = [int(np.sum(sizes[ids[ids >= 0]])) for ids in participants]
    rows_at_least = int(np.ceil(2 * sim.participation.cohort_size * sizes.mean()))
    return len({1 << (max(n, rows_at_least) - 1).bit_length() for n in rows})


def assert_same_state(actual, expected, atol):
    """Compares what algorithm, aggregator and clients keep; bit for bit where `atol` is 0."""
    for part in ("server", "aggregator", "clients", "round"):
        a, e = getattr(actual, part), getattr(expected, part)
        assert jax.tree.structure(a) == jax.tree.structure(e), part
        for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(e), strict=True):
            assert x.dtype == y.dtype and x.shape == y.shape, part
            if atol == 0:
                np.testing.assert_array_equal(x, y, err_msg=part)
            else:
                np.testing.assert_allclose(x, y, rtol=0, atol=atol, err_msg=part)
