"""One small valid call of every public function, from which bad ones are made by `VALUES`."""

import functools
import inspect
import tempfile
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import dp_accounting
import jax
import jax.numpy as jnp
import numpy as np
import optax
from small_problem import CLUSTERS, NUM_CLIENTS, PUBLIC, make_data, make_model
from test_public_api import packages

from fedjax_dp import (
    algorithms,
    audit,
    clients,
    data,
    engine,
    evaluation,
    experiment,
    extending,
    flower,
    io,
    models,
    privacy,
)
from fedjax_dp import server as servers
from fedjax_dp.algorithms.registry import ALGORITHMS, Problem
from fedjax_dp.audit import conformance
from fedjax_dp.clients.base import LocalConfig
from fedjax_dp.clients.client_data import ClientData
from fedjax_dp.core.registry import grouped, groups_of, options_of
from fedjax_dp.data import clusters, datasets, mixtures, partition, shifts, statistics
from fedjax_dp.experiment.running.watcher import Watcher
from fedjax_dp.experiment.studies.cluster import run_on_cluster
from fedjax_dp.privacy.reports import auditing
from fedjax_dp.server import oblivious, secure

# Values that declare a part, or hold what was computed: they take what they are given, and the
# functions that take them check it.
_NAMES = """
Aggregator ClientOutput ClientState FederatedAlgorithm Federation LocalTrainer Model
Finding Participation Sampler SharedModel Simulation SimulationState Stacked Summed HostStep Iterate
Choice ClientData Exact GradientRule PublicClient UpdateContext UpdateTransform Cohort
Evaluator Examples AdaptiveClipping BandedNoise DiscreteMechanism Mechanism Plan Sensitivity
ModelChoice Similarity Dataset Masked UpdateWithLoss Callback Config Experiment Run Study Watcher
AuditReport Outcome Heterogeneity Fate Round RoundInfo Close Roster Sender RoundRecord
Communication AuditResult AuditRuns MembershipResult StepCheck LocalResult Draw
DatasetStatus TrainingInfo Evaluation ClusterAggregate Clusters Decomposition Mixture
NoiseEstimate ConfigError FetchError MissingDataError UnsupportedEvent BoundedLaplaceDpEvent
BoundedRangeDpEvent DistributedDiscreteGaussianDpEvent PureDpEvent SkellamDpEvent
StaircaseDpEvent GammaShares GammaSharesDpEvent FixedPoint Iteration SetUp Terms OmissionResult
CollusionResult MaskGraph MaskKeys HeldShares Compute Latencies RoundTimes Availability
Moment CountedMean FloatOffsets Guarantee LossBounds Node Nodes Journal NotOpenError Script Project
Report Budget Method KeptTrials Trial Averaged Entry Finish FinishForAll Change Cohorts Wrapper
Packed Metric Needs Numbers Objective Stages Training Views Choices Coded Form Known SentIf Sparse
ByClient Unpublished HiddenClusters References ClusterModel Tokenizer Pictures RowsMetric Weighted
"""
HOLD = set(_NAMES.split())


class Case(NamedTuple):
    """A valid call of `of` through `call`; nothing is promised for the arguments in `alone`."""

    of: Callable[..., Any]
    good: Callable[[], dict[str, Any]]
    call: Callable[..., Any] | None = None
    alone: tuple[str, ...] = ()


KEY = jax.random.key(0)
LABELS = np.array([0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 1, 2])
ROWS = [np.arange(0, 5), np.arange(5, 12)]
IMAGES = np.zeros((12, 4, 4, 1), np.float32)
IS_REAL = np.array([True, True, False, True])
UPDATES = {"w": np.arange(12, dtype=np.float32).reshape(4, 3) ** 2 / 30}
TREE = {"b": jnp.ones(()), "w": jnp.ones(3)}
MASK = {"b": None, "w": jnp.ones(3, bool)}
VECTOR = jax.ShapeDtypeStruct((6,), np.float32)
IMAGE = jax.ShapeDtypeStruct((32, 32, 3), np.float32)
TEXT = jax.ShapeDtypeStruct((5,), np.int32)
BATCH = {"x": PUBLIC[:3], "y": np.array([1.0, 0.0, 1.0], np.float32)}


def rng():
    return np.random.default_rng(0)


model = functools.cache(make_model)
store = functools.cache(make_data)
NUMBERS = LocalConfig(batch_size=4, clip_norm=1.0, noise_multiplier=1.0)


@functools.cache
def trainer():
    return clients.local_trainer(model(), NUMBERS)


def private_of(a_model):
    return clients.dp_sgd_trainer(a_model, NUMBERS)


@functools.cache
def private():
    return private_of(model())


@functools.cache
def joining():
    return data.participation(data.poisson(), NUM_CLIENTS, 3)


def mean():
    return servers.gaussian_mean(1.0, 1.0, 3)


@functools.cache
def shared_noise():
    return privacy.gamma_shares(3, privacy.sensitivity_of_sum(1.0), 1.0)


@functools.cache
def agreed():
    return oblivious.set_up_protocol(shared_noise(), 0)


@functools.cache
def plain_algorithm():
    return algorithms.fedavg(model(), trainer())


@functools.cache
def private_algorithm():
    return algorithms.dp_sgd(model(), private())


@functools.cache
def bound():
    return engine.federation(private_algorithm(), store(), joining())


def _joined_by_all(algorithm):
    everyone = data.participation(data.full_participation(), NUM_CLIENTS)
    return engine.federation(algorithm, store(), everyone)


@functools.cache
def joined_by_all():
    return _joined_by_all(plain_algorithm())


@functools.cache
def averaged_models():
    return _joined_by_all(
        algorithms.warm_start_averaging(model(), trainer(), num_clients=NUM_CLIENTS)
    )


@functools.cache
def compiled():
    return engine.simulation(plain_algorithm(), store(), joining())


@functools.cache
def ran():
    sim = compiled()
    return sim.run(sim.init(KEY), KEY, 1)


@functools.cache
def planted():
    return audit.plant_records(
        lambda m: algorithms.dp_sgd(m, private_of(m)), model(), store(), joining(), 2, rng()
    )


@functools.cache
def audited():
    return audit.run_audit(planted(), KEY, num_runs=2, num_rounds=1)


def one_client():
    arrays = {name: jnp.asarray(array) for name, array in store().examples.items()}
    return ClientData(arrays, jnp.int32(0), jnp.int32(7), jnp.int32(0), 12)


@functools.cache
def evaluated():
    evaluate = evaluation.shared_evaluator(model(), store())
    return evaluate(model().init(KEY))


def ledger():
    found = privacy.Ledger("record", num_units=2)
    found.charge(dp_accounting.GaussianDpEvent(1.0))
    return found


RELEASE = conformance.Release(1.0, 2.0, 10.0)
TRAINED = conformance.Training(RELEASE, conformance.FixedSize(8, 8), 2)
SUBJECT = conformance.Accounting("an accountant", lambda rounds, dp_delta: 9.0, TRAINED)


@functools.cache
def plan():
    return privacy.make_plan(4, 1.0, 1.0, num_clients=3)


# Valid values of arguments by name; a lambda is called for its value.
VALUES: Mapping[str, Any] = {
    # What parts are made of.
    "model": lambda: model(),
    "trainer": lambda: trainer(),
    "algorithm": lambda: plain_algorithm(),
    "participation": lambda: joining(),
    "federation": lambda: bound(),
    "record": lambda: ran()[1],
    "info": lambda: ran()[2],
    "params": lambda: model().init(KEY),
    "client": lambda: one_client(),
    "plan": lambda: plan(),
    "planted": lambda: planted(),
    "iteration": lambda: oblivious.run_iteration(agreed(), np.arange(6.0).reshape(3, 2), rng())[1],
    "runs": lambda: audited(),
    "evaluation": lambda: evaluated(),
    "make_algorithm": lambda: lambda m: algorithms.dp_sgd(m, private_of(m)),
    "sampler": lambda: data.poisson(),
    "then": lambda: data.fixed_size(),
    "rule": lambda: privacy.make_adaptive_clipping(30.0),
    "banded": lambda: privacy.banded_noise(4, 2, min_separation=2),
    "similarity": lambda: servers.similarity_of(UPDATES, jnp.asarray(IS_REAL)),
    "statistics": lambda: statistics.describe(ROWS, LABELS),
    "make_mechanism": lambda: privacy.gaussian,
    "make_event": lambda: dp_accounting.GaussianDpEvent,
    "event": dp_accounting.GaussianDpEvent(1.0),
    "problem": Problem(NUM_CLIENTS),
    "optimizer": lambda: optax.sgd(1.0),
    "opt_state": lambda: optax.sgd(1.0).init(TREE),
    "fn": lambda: jnp.sin,
    "params_of": lambda: lambda client, params: params,
    "parts": lambda: {"a": servers.uniform_mean()},
    "config": NUMBERS,
    "key": KEY,
    "rng": 0,
    # What several names stand for.
    **{
        name: value
        for value, names in (
            (TREE, "structure tree anchor direction aggregate"),
            (BATCH, "batch examples"),
            (LABELS, "labels test_labels"),
            (PUBLIC, "features public_x members"),
            (UPDATES, "deltas updates"),
            (IS_REAL, "is_real is_minority counts"),
            (np.ones(3), "outputs targets"),
            (np.ones(4), "references loss reference_loss"),
            ([0, 0, 1], "assigned true"),
            (2, "num_models num_clusters steps separation bands min_separation memory"),
            (3, "num_classes num_rounds num_entries"),
            (1.0, "clip_norm noise_multiplier epsilon sensitivity bound"),
            (1.0, "radius stddev stddevs scale alpha"),
            (3.0, "expected_cohort_size divisor"),
            (0.1, "largest_overlap sampling_rate strength"),
            (0.5, "share sparsity factor rate"),
            (lambda: store(), "data train"),
            (lambda: mean(), "aggregator mean"),
            (lambda: compiled(), "simulation simulated"),
        )
        for name in names.split()
    },
    # Arrays.
    "mask": MASK,
    "images": IMAGES,
    "example_x": VECTOR,
    "others": PUBLIC + 1,
    "matrix": UPDATES["w"],
    "is_public": [True, True, False],
    "logits": np.array([[0.1, 0.2, 0.3]], np.float32),
    "scores": jnp.arange(3.0),
    "levels": jnp.ones(4),
    "values": np.arange(4.0),
    "accuracy": np.full(4, 0.5),
    "reference_accuracy": np.full(4, 0.6),
    "clusters": CLUSTERS,
    "gram": jnp.eye(4),
    "y": jnp.arange(3.0),
    "centres": np.eye(2),
    "candidates": [2, 3],
    "shares": np.array([0.5, 1.0]),
    "scores_in": np.arange(20) + 3.0,
    "scores_out": np.arange(20) * 1.0,
    "results": [{"accuracy": 0.5}],
    "rows": [{"round": 1, "accuracy": 0.5, "test_accuracy": 0.5, "bytes_up": 8}],
    "accuracies": np.array([0.5, 0.6]),
    "sizes": np.array([3, 4]),
    "test_sizes": np.array([2, 5]),
    # Numbers and words.
    "num_clients": NUM_CLIENTS,
    "num_examples": 12,
    "num_steps": 10,
    "num_canaries": 1,
    "dimension": 4,
    "seed": 0,
    "limit": 100,
    "dp_delta": 1e-5,
    "entry_delta": 1e-4,
    "reads_records": False,
    "dtype": "bfloat16",
    "head": "b",
    "title": "a run",
    "content": {},
    "directory": lambda: tempfile.mkdtemp(),
    "path": lambda: tempfile.mkdtemp() + "/a.json",
    "executor": lambda: ThreadPoolExecutor(1),
    "apply": lambda: clients.cast("bfloat16"),
    # Options of algorithms that are good for some runs alone.
    "prunable": "w",
    "declared_epsilon": [1.0, 2.0, 3.0] * 2,
}


def case(of: Callable[..., Any], call: Callable[..., Any] | None = None, **own: Any) -> Case:
    """A call with values of its own, and with those of `VALUES` for all else that it needs."""

    parameters = inspect.signature(of).parameters.values()
    several = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    needed = [p.name for p in parameters if p.default is p.empty and p.kind not in several]
    # A public name that nothing here can call fails where this file is read.
    values = {name: VALUES[name] for name in needed if name not in own and name != "self"} | own

    def good():
        return {
            name: value() if getattr(value, "__name__", "") == "<lambda>" else value
            for name, value in values.items()
        }

    return Case(of, good, call)


def method(cls: Any, name: str, holder: Callable[[], Any], **own: Any) -> Case:
    return case(getattr(cls, name), lambda **given: getattr(holder(), name)(**given), **own)


def of_algorithm(name: str) -> Case:
    entry = ALGORITHMS[name]
    options = options_of(entry.factory)
    is_private = "record" in entry.units[:1] or not {"none", "client"} & {*entry.units}
    some = [n for n in ("prunable", "radius", "declared_epsilon") if n in options]
    own = grouped(entry.factory, {option: VALUES[option] for option in some})
    return case(
        entry.factory, trainer=(lambda: private()) if is_private else VALUES["trainer"], **own
    )


def of_options(cls: Any, name: str, **own: Any) -> Case:
    """Options of an algorithm, which it refuses."""
    usual = of_algorithm(name)
    (group,) = (g for g, default in groups_of(usual.of).items() if isinstance(default, cls))
    return case(cls, lambda **given: usual.of(**{**usual.good(), group: cls(**given)}), **own)


_IMAGE_OF = dict.fromkeys(
    ("emnist_cnn", "fedavg_cnn", "lenet5", "thesis_cnn", "resnet18", "resnet34"), IMAGE
)
_TIMED = {
    "latencies": lambda: engine.latencies(["a"], [[0.1]], ["a"] * NUM_CLIENTS, "a"),
    "compute": lambda: engine.compute_seconds(NUM_CLIENTS, per_step=0.1),
}
_AVERAGED = {"algorithm": lambda: algorithms.fedavg(model(), trainer(), aggregator=mean())}
FD, LEDGER = data.FederatedData, privacy.Ledger
# Calls with more, or with others, than `VALUES` has for them.
SPECIAL: dict[str, Case] = {
    # Workers of no points at all.
    "Cluster": case(
        experiment.Cluster,
        lambda **given: run_on_cluster(
            experiment.Cluster(**given), {}, [], Watcher(), print, print, {}, lambda: True
        ),
    ),
    "by_parts": case(servers.by_parts, scales=lambda: {"params": 2.0}),
    # The front door.
    "ExecutionConfig": case(
        engine.ExecutionConfig,
        lambda **kw: engine.simulation(
            plain_algorithm(), store(), joining(), engine.ExecutionConfig(**kw)
        ),
    ),
    # Rules are checked against a model, not by themselves.
    "ModelAxis": case(
        engine.ModelAxis,
        lambda **kw: engine.ModelAxis(**kw).validate(num_devices=2),
        size=2,
        rules={"w": 0},
    ),
    # A model names its values by the argument that it has for them.
    "Loss": case(
        models.Loss, values="softmax_cross_entropy", targets="classes", ignore_label=-1
    )._replace(alone=("values",)),
    "methods_table": case(experiment.methods_table, listed=lambda: experiment.methods(["fedavg"])),
    "Layout": case(
        engine.Layout,
        lambda **kw: engine.federation(plain_algorithm(), store(), joining()).init(
            KEY, engine.Layout(**kw)
        ),
    ),
    "LocalConfig": case(
        LocalConfig, lambda **kw: clients.local_trainer(model(), LocalConfig(**kw))
    ),
    "LocalConfig of privacy": case(
        LocalConfig,
        lambda **kw: clients.dp_sgd_trainer(model(), LocalConfig(**kw)),
        batch_size=4,
        clip_norm=1.0,
        noise_multiplier=1.0,
    ),
    "Hyper": Case(
        algorithms.Hyper,
        lambda: plain_algorithm().hyper._asdict(),
        lambda **kw: compiled().run(compiled().init(KEY), KEY, 1, algorithms.Hyper(**kw)),
    ),
    "FederatedData": case(
        FD, examples={"x": np.zeros((3, 2)), "y": np.zeros(3)}, offsets=np.array([0, 1, 3])
    ),
    "FederatedData.from_clients": case(FD.from_clients, clients=[BATCH, BATCH]),
    "FederatedData.from_client_ids": case(FD.from_client_ids, client_ids=np.array([1, 0, 1])),
    "FederatedData.from_indices": case(FD.from_indices, clients=[[0, 1], [2]]),
    "FederatedData.open": case(FD.open, directory=lambda: saved()),
    "FederatedData.save": method(FD, "save", store),
    "FederatedData.client": method(FD, "client", store, index=0),
    "FederatedData.select": method(FD, "select", store, clients=[0, 2]),
    **{
        f"Ledger.{name}": method(LEDGER, name, ledger, **own)
        for name, own in {
            "charge": {},
            "epsilon": {},
            "bound": {},
            "delta": {},
            "events": {"unit": 0},
            "max_rounds": {"epsilon": 9.0},
            "max_repeats": {"epsilon": 9.0},
        }.items()
    },
    "Ledger.from_json": case(LEDGER.from_json, text=lambda: ledger().to_json()),
    "PrivacyAccounting.epsilon": method(
        engine.PrivacyAccounting,
        "epsilon",
        lambda: engine.PrivacyAccounting(bound()),
        dp_delta={"record": 1e-5},
    ),
    "Model.from_functions": case(
        models.Model.from_functions,
        init=lambda: lambda key: {"w": jnp.zeros(3)},
        apply=lambda: lambda params, x: x @ params["w"],
        loss="squared_error",
    ),
    "calibrate": case(
        engine.calibrate,
        algorithm=lambda: private_algorithm(),
        sizes=lambda: store().sizes,
        epsilon=3.0,
        dp_delta=1e-4,
        num_rounds=2,
    ),
    "compile_federation": case(engine.compile_federation, data=VALUES["data"]),
    "evaluator": case(engine.evaluator, clients=VALUES["data"]),
    "anderson": case(engine.anderson, federation=lambda: joined_by_all()),
    "scheduled": case(
        engine.scheduled,
        federation=lambda: joined_by_all(),
        schedules={"local.learning_rate": [1.0, 0.5]},
        num_rounds=2,
    ),
    "leaving": case(engine.leaving, federation=lambda: averaged_models()),
    "within_budgets": case(
        engine.within_budgets, federation=lambda: bound(), epsilon=100.0, dp_delta=1e-5
    ),
    "latencies": case(
        engine.latencies,
        places=["a", "b"],
        seconds=[[0.0, 0.1], [0.2, 0.0]],
        clients=["a"] * NUM_CLIENTS,
        server="b",
    ),
    "compute_seconds": case(engine.compute_seconds, num_clients=NUM_CLIENTS),
    **{
        of.__name__: case(of, **{**_TIMED, **own})
        for of, own in (
            (engine.clocked, {"server_seconds": 0.1}),
            (
                engine.asynchronous,
                {
                    "federation": lambda: joined_by_all(),
                    "server_seconds": 0.1,
                    "concurrency": NUM_CLIENTS,
                    "max_staleness": 1,
                },
            ),
            (engine.round_times, {}),
            (engine.serverless_times, {}),
            (engine.key_exchange_seconds, {}),
        )
    },
    "in_rounds": case(engine.in_rounds, first=[0, 1]),
    "daily": case(engine.daily, hours=[8.0, 22.0]),
    "all_of": case(engine.all_of, parts=lambda: [engine.in_rounds()]),
    "absences": case(engine.absences, chance=0.5),
    "serverless": case(engine.serverless, federation=lambda: joined_by_all()),
    "several_servers": case(
        engine.several_servers,
        federation=lambda: joined_by_all(),
        servers=np.arange(NUM_CLIENTS) % 2,
        exchange_every=2,
    ),
    "round_chart": case(
        io.round_chart,
        times=lambda: engine.round_times(*(make() for make in _TIMED.values())),
        names=["a"] * NUM_CLIENTS,
    ),
    "participation": case(data.participation, cohort_size=3),
    **{name: of_algorithm(name) for name in ALGORITHMS},
    "Tickets": of_options(algorithms.Tickets, "fed_ltn", prunable="w"),
    "OutputPerturbation": of_options(algorithms.OutputPerturbation, "warm_start_averaging"),
    "SelectionRule": of_options(algorithms.SelectionRule, "f_cdpfl"),
    "ClusterCount": of_options(algorithms.ClusterCount, "r_dpcfl"),
    "SoftClusters": of_options(algorithms.SoftClusters, "r_dpcfl"),
    "FirstRound": of_options(algorithms.FirstRound, "r_dpcfl"),
    "SoftPhase": of_options(algorithms.SoftPhase, "rc_dpfl"),
    "ProximalStep": of_options(algorithms.ProximalStep, "splitting"),
    "build of algorithms": case(algorithms.build, name="fedavg"),
    "public_clients": case(algorithms.public_clients, epsilon=[1.0, 2.0, 8.0, 9.0]),
    "smallest_budget": case(algorithms.smallest_budget, epsilon=[1.0, 2.0]),
    # Local training and models.
    "update_transform": case(clients.update_transform, apply=VALUES["apply"]),
    "prune": case(clients.prune, params=TREE, target=0.9),
    "options of models": case(models.options, name="mlp"),
    "lora": case(
        models.lora,
        model=lambda: models.mlp(VECTOR, 3, hidden_sizes=(4,)),
        params=lambda: models.mlp(VECTOR, 3, hidden_sizes=(4,)).init(KEY),
        rank=2,
        targets="params/*/kernel",
        trained=(),
    ),
    "generator": case(
        models.generator,
        model=lambda: models.char_lstm(TEXT, 5, num_units=2, num_layers=1),
        num_tokens=2,
        end=0,
    ),
    "build of models": case(models.build, name="mlp", example={"x": VECTOR}),
    **{name: case(getattr(models, name), example_x=image) for name, image in _IMAGE_OF.items()},
    **{
        name: case(getattr(models, name), example_x=TEXT)
        for name in ("char_lstm", "char_transformer", "llama", "gpt2", "bag_of_tokens")
    },
    **{
        name: case(getattr(models, name), labels=np.array([1]))
        for name in ("softmax_correct", "softmax_cross_entropy")
    },
    **{
        name: case(getattr(models, name), logits=VALUES["logits"][0], labels=np.ones(3))
        for name in (
            "sigmoid_correct",
            "sigmoid_binary_cross_entropy",
            "sigmoid_half_squared_error",
        )
    },
    "ordinal_regression": case(models.ordinal_regression, num_classes=3),
    **{
        name: case(getattr(models, name), log_odds=VALUES["logits"], labels=np.array([1]))
        for name in ("ordinal_cross_entropy", "ordinal_correct")
    },
    "poisson_nll": case(models.poisson_nll, log_means=np.zeros(3), counts=np.ones(3)),
    "weighted": case(models.weighted, class_weights=(1.0, 2.0, 3.0)),
    # Data.
    **{
        of.__name__: case(of, num_clients=2, **own)
        for of, own in (
            (partition.iid, {}),
            (partition.quantity_skew, {}),
            (partition.dirichlet, {"min_size": 0}),
            (partition.shards, {}),
            (mixtures.label_and_size_skew, {}),
            (mixtures.majority_classes, {}),
            (partition.power_law_sizes, {}),
            (partition.common_pool, {"samples_per_client": 3}),
            (
                partition.class_mixtures,
                {"train_per_client": 1, "validation_per_client": 1, "test_per_client": 1},
            ),
            (
                partition.few_classes,
                {"train_per_class": 1, "validation_per_client": 1, "test_per_client": 2},
            ),
        )
    },
    "natural": case(partition.natural, client_ids=LABELS),
    "split_clients": case(partition.split_clients, clients=ROWS),
    "by_preference": case(
        mixtures.by_preference, preferences=np.ones((2, 3)), sizes=np.array([6, 6])
    ),
    "overlapping_draw": case(clusters.overlapping_draw, num_examples=120, cluster_sizes=(1, 2)),
    "shift_clusters": case(
        clusters.shift_clusters,
        examples={"x": IMAGES, "y": LABELS},
        clients=ROWS,
        clusters=np.array([0, 1]),
        shift="label",
    ),
    "rotate_quarter_turns": case(shifts.rotate_quarter_turns, turns=1),
    "shift_labels": case(shifts.shift_labels, shift=1),
    "color_by_label": case(shifts.color_by_label),
    "rotate_by_label": case(shifts.rotate_by_label, angles=(0.0, 45.0, 90.0)),
    "describe": case(statistics.describe, clients=ROWS, labels=LABELS),
    "describe_data": case(statistics.describe_data),
    "options of data": case(datasets.options, name="digits"),
    "tokenizer": case(data.tokenizer, name="bytes"),
    "class_names": case(data.class_names, names=["a", "b"]),
    "images": case(data.images, rule=data.Pictures(image_size=[2, 2])),
    "texts": case(data.texts, tokenizer=lambda: data.tokenizer("bytes"), sequence_length=4),
    "within_norm": case(
        datasets.within_norm,
        data=lambda: datasets.Dataset(
            "own",
            {"x": PUBLIC, "y": np.arange(8) % 2},
            {"x": PUBLIC, "y": np.arange(8) % 2},
            2,
            "classification",
        ),
        norm=0.5,
    ),
    "save": case(
        datasets.save,
        data=lambda: datasets.Dataset(
            name="small",
            train={"x": np.ones((4, 2), np.float32), "y": np.zeros(4, np.int32)},
            test={"x": np.ones((2, 2), np.float32), "y": np.zeros(2, np.int32)},
            num_classes=2,
            task="classification",
            train_clients=np.arange(4) // 2,
        ),
        directory=lambda: tempfile.mkdtemp(),
    ),
    # Privacy.
    "add_bounded_laplace": case(privacy.add_bounded_laplace, dp_delta=1e-3),
    "banded_noise": case(privacy.banded_noise, num_rounds=4),
    "calibrate_noise_multiplier": case(privacy.calibrate_noise_multiplier, epsilon=3.0),
    "advanced_composition": case(
        privacy.advanced_composition, epsilon=0.1, dp_delta=1e-6, count=9, slack=1e-5
    ),
    "amplified_by_sampling": case(
        privacy.amplified_by_sampling, epsilon=1.0, dp_delta=1e-6, num_drawn=2, num_records=9
    ),
    "calibrate_poisson": case(privacy.calibrate_poisson, epsilon=3.0),
    "max_poisson_steps": case(privacy.max_poisson_steps, epsilon=3.0),
    "gamma_shares": case(
        privacy.gamma_shares,
        num_parties=3,
        sensitivity=lambda: privacy.sensitivity_of_sum(1.0),
    ),
    "minimizer_sensitivity": case(privacy.minimizer_sensitivity, smallest=10, regularizer=0.1),
    "draw_shares": case(privacy.draw_shares, shape=(3,), share_shape=0.5),
    "choose_bits": case(privacy.choose_bits, num_clients=3),
    "make_plan": case(privacy.make_plan, num_clients=3),
    **{
        name: case(getattr(privacy, name), num_clients=20, **own)
        for name, own in {
            "published_batch_sizes": {},
            "published_budgets": {"name": "Dist1"},
        }.items()
    },
    "summed_scores": case(privacy.summed_scores, scores=jnp.ones(4), largest=1.0, units=8),
    "noise_stddev": case(privacy.noise_stddev, sensitivity=lambda: privacy.sensitivity_of_sum(1.0)),
    "rate_upper_bound": case(auditing.rate_upper_bound, errors=3, trials=10, significance=0.05),
    "threshold_bound": case(auditing.threshold_bound),
    "gaussian_bound": case(auditing.gaussian_bound),
    "one_run_epsilon": case(
        auditing.one_run_epsilon, num_canaries=20, num_guesses=10, num_correct=8
    ),
    # Audits.
    "attack_model": case(
        audit.attack_model,
        members={"x": PUBLIC, "y": np.ones(8, np.float32)},
        others={"x": PUBLIC + 1, "y": np.ones(8, np.float32)},
        rng=lambda: rng(),
    ),
    "membership_attack": case(audit.membership_attack, rng=lambda: rng()),
    "run_audit": case(audit.run_audit, num_runs=1, num_rounds=1),
    "check_choice": case(
        audit.check_choice,
        choice=lambda: clients.private_choice(model()),
        numbers={"selection_epsilon": 1.0, "loss_bound": 1.0},
        models=lambda: jax.tree.map(lambda x: jnp.stack([x, x + 1]), model().init(KEY)),
        num_draws=1000,
    ),
    **{
        of.__name__: case(of, **own)
        for of, own in (
            (audit.collude, {"attack": "mean", "rng": lambda: rng()}),
            (audit.collusion, {"attack": "mean", "rng": lambda: rng()}),
            (audit.snoop, {}),
            (audit.expected_residual, {"attack": "mean", "noise": lambda: shared_noise()}),
            (
                audit.expected_r2,
                {"attack": "mean", "noise": lambda: shared_noise(), "value_variance": 1.0},
            ),
            (
                audit.omit_noise,
                {
                    "set_up": lambda: agreed(),
                    "values": np.arange(6.0).reshape(3, 2),
                    "rng": lambda: rng(),
                    "coalition": np.array([True, True, False]),
                },
            ),
        )
    },
    "check_client": case(audit.check_client, state=lambda: planted_state(), num_draws=4),
    "check_cohort": case(
        audit.check_cohort, state=lambda: bound().init(KEY), num_draws=4, **_AVERAGED
    ),
    "check_gradient_rule": case(
        audit.check_gradient_rule, rule=lambda: clients.clipped(model()), num_draws=4
    ),
    "plant_clients": case(audit.plant_clients, rng=lambda: rng(), **_AVERAGED),
    "plant_records": case(audit.plant_records, rng=lambda: rng()),
    "plant_losses": case(audit.plant_losses, rng=lambda: rng()),
    "plant_votes": case(
        audit.plant_votes,
        make_algorithm=lambda: (
            lambda m, public_x: algorithms.ae_dpfl(m, private_of(m), public_x=public_x)
        ),
        num_rounds=1,
        rng=lambda: rng(),
    ),
    # Servers, and figures.
    "estimate_noise": case(servers.estimate_noise, is_real=IS_REAL),
    "principal_component_pursuit": case(servers.principal_component_pursuit, is_real=IS_REAL),
    "wilson_interval": case(evaluation.wilson_interval, counts=np.array([4, 1])),
    "oblivious_mean": case(servers.oblivious_mean, num_parties=3),
    "set_up_protocol": case(oblivious.set_up_protocol, noise=lambda: shared_noise()),
    "play": case(
        oblivious.run_iteration,
        set_up=lambda: agreed(),
        values=np.arange(6.0).reshape(3, 2),
        rng=lambda: rng(),
    ),
    "discrete_mean": case(servers.discrete_mean, expected_cohort_size=3),
    # Secure aggregation.
    "masked": case(
        secure.masked,
        aggregator=lambda: mean(),
        encoding=lambda: secure.fixed_point(3),
        graph=lambda: secure.all_pairs(3),
    ),
    "TrialFiles": case(io.TrialFiles, folder=lambda: "trials"),
    "masking_facts": case(secure.masking_facts, graph=lambda: secure.all_pairs(3)),
    "mask_messages": case(secure.mask_messages, graph=lambda: secure.all_pairs(3)),
    "noise_messages": case(oblivious.noise_messages, num_parties=3, num_weights=2),
    "agreed_keys": case(secure.agreed_keys, num_clients=2),
    "fixed_point": case(secure.fixed_point, max_clients=3),
    "all_pairs": case(secure.all_pairs, num_clients=3),
    "random_neighbors": case(secure.random_neighbors, num_clients=9),
    "share_secret": case(secure.share_secret, secret=5, holders=[0, 1, 2], threshold=2),
    "recover_secret": case(secure.recover_secret, shares={0: 3, 2: 4}, threshold=2),
    "field": case(algorithms.field, name="params"),
    "update_alone": case(
        servers.update_alone,
        lambda update, weight: servers.update_alone(update, weight),
        update=lambda: TREE,
        weight=1.0,
    )._replace(alone=("update", "weight")),
    "update_and_weight": case(
        servers.update_and_weight,
        lambda update, weight: servers.update_and_weight(update, weight),
        update=lambda: TREE,
        weight=1.0,
    )._replace(alone=("update", "weight")),
    # Claims and functions of others.
    "Release": case(conformance.Release, noise_stddev=2.0, divisor=10.0),
    "AdaptiveRelease": case(conformance.AdaptiveRelease, first=RELEASE, count_stddev=1.0),
    "Training of conformance": case(
        conformance.Training, release=RELEASE, sampling=TRAINED.sampling, rounds=2
    ),
    "Poisson": case(conformance.Poisson, num_units=8),
    **{
        of.__name__: case(of, num_units=8, size=4)
        for of in (conformance.FixedSize, conformance.WithReplacement, conformance.Shuffled)
    },
    "MaskLaw": case(conformance.MaskLaw, modulus=64),
    "Masked of conformance": case(conformance.Masked, modulus=64, clients=3),
    **{
        of.__name__: case(of, name="a subject", **{what: len}, claim=claim)
        for of, what, claim in (
            (conformance.Aggregation, "aggregate", RELEASE),
            (conformance.WeightedAggregation, "aggregate", RELEASE),
            (
                conformance.AdaptiveAggregation,
                "aggregate",
                conformance.AdaptiveRelease(RELEASE, 1.0),
            ),
            (conformance.Step, "step", RELEASE),
            (conformance.Sampling, "draw", TRAINED.sampling),
            (conformance.Accounting, "epsilon", TRAINED),
            (conformance.Masking, "mask", conformance.Masked(64, 3)),
            (conformance.MaskSource, "draw", conformance.MaskLaw(64)),
        )
    },
    "Run of conformance": case(conformance.Run, name="a subject", run=len, claim=TRAINED),
    "check": case(conformance.check, lambda **kw: conformance.check(SUBJECT, **kw)),
    "assert_conforms": case(
        conformance.assert_conforms, lambda **kw: conformance.assert_conforms(SUBJECT, **kw)
    ),
    "Served": case(conformance.Served, file=__file__),
    "aggregation_of": case(conformance.aggregation_of, name="a", shapes=[(3,)]),
    "step_of": case(
        conformance.step_of,
        name="a",
        rule=lambda: clients.clipped,
        config=NUMBERS,
        shapes=[(3,)],
    ),
    "sampling_of": case(conformance.sampling_of, name="a", num_units=8, size=4.0),
    "masking_of": case(conformance.masking_of, name="a", graph=lambda: secure.all_pairs(3)),
    "mask_source_of": case(
        conformance.mask_source_of, name="a", keys=lambda: secure.agreed_keys, count=64
    ),
    "num_shares": case(servers.num_shares, num_clients=9, cohort_size=3.0),
    "num_soft_rounds": case(servers.num_soft_rounds, num_rounds=9),
    # A decorator, whose functions are the cases.
    "checked": Case(extending.checked, None),
    # They look for files, fetch them, run experiments or federations, as tests of their own do.
    **{
        name: Case(getattr(package, name), None)
        for package, names in (
            (datasets, "fetch info load loader status resolve_data_dir"),
            (conformance, "subjects_of"),
            (
                experiment,
                "assemble audit_experiment average_over_seeds evaluate_run grid_points load_config "
                "load_run pack read_summaries report resume run sweep",
            ),
            (
                flower,
                "GridNodes OnFlower client_app client_app_of deployed project run_on "
                "server_app_of write_app",
            ),
        )
        for name in names.split()
    },
}


def public() -> dict[str, Callable[..., Any]]:
    """Every public function and class, by name, that holds nothing of others; no errors."""
    found = {n: getattr(package, n) for package in packages() for n in package.__all__}
    return {
        name: of
        for name, of in found.items()
        if callable(of) and name not in HOLD and not isinstance(of, type(Any))
        if not (isinstance(of, type) and issubclass(of, Exception))
    }


CASES = SPECIAL | {
    name: case(of)
    for name, of in public().items()
    if of not in [special.of for special in SPECIAL.values()]
}


@functools.cache
def saved() -> str:
    folder = tempfile.mkdtemp()
    store().save(folder)
    return folder


def planted_state():
    found = planted()
    return engine.federation(found.algorithm, found.data, found.participation).init(KEY)
