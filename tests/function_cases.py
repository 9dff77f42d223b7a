"""One small valid call of every public function and class, from which bad ones are made.

Whoever adds a public name adds its call here, or says that it holds what others made.
"""

import functools
import inspect
import tempfile
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import dp_accounting
import jax
import jax.numpy as jnp
import numpy as np
from small_problem import CLUSTERS, NUM_CLIENTS, PUBLIC, make_data, make_model

import fedjax_dp
from fedjax_dp import (
    algorithms,
    audit,
    clients,
    data,
    engine,
    evaluation,
    experiment,
    io,
    models,
    privacy,
)
from fedjax_dp import server as servers
from fedjax_dp.algorithms.registry import ALGORITHMS, Problem
from fedjax_dp.clients.base import ClientData, LocalConfig
from fedjax_dp.data import clusters, datasets, mixtures, partition, shifts, sizes, statistics
from fedjax_dp.privacy.reports import auditing

# Values that declare a part, or hold what was computed: they take what they are given, and whoever
# is handed them checks what is read of it.
HOLD = {
    # What parts are made of.
    "Aggregator",
    "ClientOutput",
    "ClientState",
    "FederatedAlgorithm",
    "Federation",
    "LocalTrainer",
    "Model",
    "Participation",
    "Sampler",
    "SharedModel",
    "Simulation",
    "SimulationState",
    "Stacked",
    "Summed",
    "HostStep",
    "Iterate",
    "Choice",
    "ClientData",
    "Exact",
    "GradientRule",
    "PublicClient",
    "UpdateContext",
    "UpdateTransform",
    "Cohort",
    "Evaluator",
    "Examples",
    "AdaptiveClipping",
    "BandedNoise",
    "DiscreteMechanism",
    "Mechanism",
    "Plan",
    "Sensitivity",
    "ModelChoice",
    "Similarity",
    "Dataset",
    "Masked",
    "Told",
    "Callback",
    "Config",
    "Experiment",
    "Run",
    "Study",
    "Watcher",
    # What was computed.
    "AuditReport",
    "Outcome",
    "Heterogeneity",
    "Fate",
    "Round",
    "RoundInfo",
    "Close",
    "Roster",
    "Sender",
    "RoundRecord",
    "Communication",
    "AuditResult",
    "AuditRuns",
    "MembershipResult",
    "StepCheck",
    "LocalResult",
    "Draw",
    "DatasetStatus",
    "TrainingInfo",
    "Evaluation",
    "ClusterAggregate",
    "Clusters",
    "Decomposition",
    "Mixture",
    "NoiseEstimate",
    "ConfigError",
    # Errors, and the events of dp-accounting's kind, which the ledger checks when it is charged.
    "FetchError",
    "MissingDataError",
    "UnsupportedEvent",
    "BoundedLaplaceDpEvent",
    "BoundedRangeDpEvent",
    "DistributedDiscreteGaussianDpEvent",
    "PureDpEvent",
    "SkellamDpEvent",
    "StaircaseDpEvent",
}


class Case(NamedTuple):
    """A call that is valid.

    `of` is what is called in the end, whose annotations and docstring say what it may be given;
    `call` takes its arguments by name. `alone` names arguments that are not touched, for which
    nothing is promised.
    """

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
def plain_algorithm():
    return algorithms.fedavg(model(), trainer())


@functools.cache
def private_algorithm():
    return algorithms.dp_sgd(model(), private())


@functools.cache
def bound():
    return engine.federation(private_algorithm(), store(), joining())


@functools.cache
def joined_by_all():
    everyone = data.participation(data.everybody(), NUM_CLIENTS)
    return engine.federation(plain_algorithm(), store(), everyone)


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


@functools.cache
def plan():
    return privacy.make_plan(4, 1.0, 1.0, num_clients=3)


# What algorithms are given by their keywords, where these have no default.
FACTS: Mapping[str, Callable[[], Any]] = {
    "num_clients": lambda: NUM_CLIENTS,
    "num_rounds": lambda: 3,
    "num_models": lambda: 2,
    "clusters": lambda: CLUSTERS,
    "public_x": lambda: PUBLIC,
    "aggregator": mean,
    "head": lambda: "b",
}
# What has a default that is good for some runs alone.
OPTIONS: Mapping[str, Any] = {
    "prunable": "w",
    "radius": 1.0,
    "declared_epsilon": [1.0, 2.0, 3.0] * 2,
}


def of_algorithm(name: str) -> Case:
    entry = ALGORITHMS[name]
    own = private if "none" not in entry.units and "client" not in entry.units else trainer

    def good():
        parameters = inspect.signature(entry.factory).parameters
        needed = [p.name for p in parameters.values() if p.default is p.empty and p.name in FACTS]
        return {
            "model": model(),
            "trainer": private() if "record" in entry.units[:1] else own(),
            **{fact: FACTS[fact]() for fact in needed},
            **{name: value for name, value in OPTIONS.items() if name in parameters},
        }

    return Case(entry.factory, good)


def given(**values: Any) -> Callable[[], dict[str, Any]]:
    """Arguments that cost nothing to make; what is a function without a name is called for them."""

    def good():
        made = {
            n: v() if getattr(v, "__name__", "") == "<lambda>" else v for n, v in values.items()
        }
        return made

    return good


def method(cls: Any, name: str, own: Callable[[], Any], **values: Any) -> Case:
    return Case(getattr(cls, name), given(**values), lambda **kw: getattr(own(), name)(**kw))


_MADE = {"model": lambda: model(), "trainer": lambda: trainer()}
_AUDITED = {"data": lambda: store(), "participation": lambda: joining()}
_PRIVATE_MEAN = {"clip_norm": 1.0, "noise_multiplier": 1.0, "expected_cohort_size": 3.0}
_STEPS = {"sampling_rate": 0.1, "num_steps": 10, "dp_delta": 1e-5}
_SCORES = {"scores_in": np.arange(20) + 3.0, "scores_out": np.arange(20) * 1.0, "dp_delta": 1e-5}
_PLAN = {"dimension": 4, "clip_norm": 1.0, "noise_multiplier": 1.0}
_ENTRIES = {"clip_norm": 1.0, "noise_multiplier": 1.0, "num_entries": 3}
_POOL = {"num_clients": 2, "rng": 0}
_LOGITS = np.array([[0.1, 0.2, 0.3]], np.float32)
FD, LEDGER = data.FederatedData, privacy.Ledger

CASES: dict[str, Case] = {
    # The front door.
    "ExecutionConfig": Case(
        engine.ExecutionConfig,
        given(),
        lambda **kw: engine.simulation(
            plain_algorithm(), store(), joining(), engine.ExecutionConfig(**kw)
        ),
    ),
    "Layout": Case(
        engine.Layout,
        given(),
        lambda **kw: engine.federation(
            plain_algorithm(), store(), joining(), layout=engine.Layout(**kw)
        ),
    ),
    "LocalConfig": Case(
        LocalConfig, given(), lambda **kw: clients.local_trainer(model(), LocalConfig(**kw))
    ),
    "LocalConfig of privacy": Case(
        LocalConfig,
        given(batch_size=4, clip_norm=1.0, noise_multiplier=1.0),
        lambda **kw: clients.dp_sgd_trainer(model(), LocalConfig(**kw)),
    ),
    "Hyper": Case(
        algorithms.Hyper,
        lambda: plain_algorithm().hyper._asdict(),
        lambda **kw: compiled().run(compiled().init(KEY), KEY, 1, algorithms.Hyper(**kw)),
    ),
    "FederatedData": Case(
        FD, given(examples={"x": np.zeros((3, 2)), "y": np.zeros(3)}, offsets=np.array([0, 1, 3]))
    ),
    "FederatedData.from_clients": Case(FD.from_clients, given(clients=[BATCH, BATCH])),
    "FederatedData.from_client_ids": Case(
        FD.from_client_ids, given(examples=BATCH, client_ids=np.array([1, 0, 1]))
    ),
    "FederatedData.from_indices": Case(
        FD.from_indices, given(examples=BATCH, clients=[[0, 1], [2]])
    ),
    "FederatedData.open": Case(FD.open, lambda: {"directory": saved()}),
    "FederatedData.save": method(FD, "save", store, directory=lambda: tempfile.mkdtemp()),
    "FederatedData.client": method(FD, "client", store, index=0),
    "FederatedData.select": method(FD, "select", store, clients=[0, 2]),
    "Ledger": Case(LEDGER, given()),
    "Ledger.charge": method(LEDGER, "charge", ledger, event=dp_accounting.GaussianDpEvent(1.0)),
    "Ledger.epsilon": method(LEDGER, "epsilon", ledger, dp_delta=1e-5),
    "Ledger.bound": method(LEDGER, "bound", ledger, dp_delta=1e-5),
    "Ledger.delta": method(LEDGER, "delta", ledger, epsilon=1.0),
    "Ledger.events": method(LEDGER, "events", ledger, unit=0),
    "Ledger.would_exceed": method(
        LEDGER,
        "would_exceed",
        ledger,
        event=dp_accounting.GaussianDpEvent(1.0),
        epsilon=1.0,
        dp_delta=1e-5,
    ),
    "Ledger.max_rounds": method(
        LEDGER,
        "max_rounds",
        ledger,
        event=dp_accounting.GaussianDpEvent(1.0),
        epsilon=9.0,
        dp_delta=1e-5,
    ),
    "Ledger.from_json": Case(LEDGER.from_json, lambda: {"text": ledger().to_json()}),
    "PrivacyAccounting": Case(engine.PrivacyAccounting, lambda: {"federation": bound()}),
    "PrivacyAccounting.epsilon": method(
        engine.PrivacyAccounting,
        "epsilon",
        lambda: engine.PrivacyAccounting(bound()),
        dp_delta={"record": 1e-5},
    ),
    "calibrate": Case(
        engine.calibrate,
        lambda: {
            "algorithm": private_algorithm(),
            "sizes": store().sizes,
            "epsilon": 3.0,
            "dp_delta": 1e-4,
            "num_rounds": 2,
        },
    ),
    "compile_federation": Case(
        engine.compile_federation, lambda: {"federation": bound(), "data": store()}
    ),
    "evaluator": Case(
        engine.evaluator,
        lambda: {"simulation": compiled(), "model": model(), "train": store(), "clients": store()},
    ),
    "federation": Case(engine.federation, given(algorithm=lambda: plain_algorithm(), **_AUDITED)),
    "simulation": Case(engine.simulation, given(algorithm=lambda: plain_algorithm(), **_AUDITED)),
    "as_metrics": Case(engine.as_metrics, lambda: {"record": ran()[1], "info": ran()[2]}),
    "communication": Case(
        engine.communication,
        lambda: {"simulated": compiled(), "record": ran()[1], "info": ran()[2]},
    ),
    # They read files and run experiments, which the tests of runs do.
    **{
        each.__name__: Case(each, None)
        for each in (
            experiment.assemble,
            experiment.audit_experiment,
            experiment.average_over_seeds,
            experiment.evaluate_run,
            experiment.grid_points,
            experiment.load_config,
            experiment.load_run,
            experiment.read_summaries,
            experiment.resume,
            experiment.run,
            experiment.sweep,
        )
    },
    "secret_key": Case(fedjax_dp.secret_key, given()),
    "participation": Case(
        data.participation, given(sampler=lambda: data.poisson(), num_clients=6, cohort_size=3)
    ),
    **{
        name: Case(getattr(data, name), given())
        for name in ("poisson", "fixed_size", "everybody", "cyclic", "shuffled")
    },
    "everybody_first": Case(data.everybody_first, given(steps=2, then=lambda: data.fixed_size())),
    "min_separated": Case(data.min_separated, given(separation=2)),
    "local_trainer": Case(clients.local_trainer, given(model=lambda: model(), config=NUMBERS)),
    "dp_sgd_trainer": Case(clients.dp_sgd_trainer, given(model=lambda: model(), config=NUMBERS)),
    "update_transform": Case(
        clients.update_transform, given(apply=lambda: clients.cast("bfloat16"), reads_records=False)
    ),
    "pool": Case(algorithms.pool, given(data=lambda: store())),
    "Model.from_functions": Case(
        models.Model.from_functions,
        lambda: {
            "init": lambda key: {"w": jnp.zeros(3)},
            "apply": lambda params, x: x @ params["w"],
            "loss": "squared_error",
        },
    ),
    # Algorithms.
    **{name: of_algorithm(name) for name in ALGORITHMS},
    "build of algorithms": Case(
        algorithms.build, given(name="fedavg", **_MADE, problem=Problem(NUM_CLIENTS))
    ),
    "public_clients": Case(algorithms.public_clients, given(epsilon=[1.0, 2.0, 8.0, 9.0])),
    "smallest_budget": Case(algorithms.smallest_budget, given(epsilon=[1.0, 2.0])),
    # Local training.
    "add_client_noise": Case(clients.add_client_noise, given(stddev=1.0)),
    "blur": Case(clients.blur, given(strength=0.1, radius=1.0)),
    "cast": Case(clients.cast, given(dtype="bfloat16")),
    "clip_update": Case(clients.clip_update, given(clip_norm=1.0)),
    "clipped": Case(clients.clipped, given(model=lambda: model())),
    "plain": Case(clients.plain, given(model=lambda: model())),
    "distance_to": Case(clients.distance_to, given(anchor=TREE, strength=0.1)),
    "towards": Case(clients.towards, given(anchor=TREE, strength=0.1)),
    "shift": Case(clients.shift, given(direction=TREE)),
    "drawn_back": Case(clients.drawn_back, given(strength=0.1)),
    "prune": Case(clients.prune, given(mask=MASK, params=TREE, rate=0.5, target=0.9)),
    "pruned_share": Case(clients.pruned_share, given(mask=MASK)),
    "proximal": Case(clients.proximal, given(strength=0.1)),
    "exact_choice": Case(clients.exact_choice, given(model=lambda: model())),
    "private_choice": Case(clients.private_choice, given(model=lambda: model())),
    "keep_largest": Case(clients.keep_largest, given(share=0.5)),
    "scale_update": Case(clients.scale_update, given(factor=0.5)),
    "sparsify": Case(clients.sparsify, given(model=lambda: model(), sparsity=0.5)),
    **{
        name: Case(
            getattr(clients, name),
            given(
                model=lambda: model(),
                params=lambda: model().init(KEY),
                client=lambda: one_client(),
            ),
        )
        for name in ("mean_loss", "accuracy_of", "whole_score")
    },
    # Data.
    "example_structure": Case(data.example_structure, given(data=lambda: store())),
    "iid": Case(partition.iid, given(num_examples=12, **_POOL)),
    "quantity_skew": Case(partition.quantity_skew, given(num_examples=12, **_POOL)),
    "dirichlet": Case(partition.dirichlet, given(labels=LABELS, alpha=1.0, min_size=0, **_POOL)),
    "shards": Case(partition.shards, given(labels=LABELS, **_POOL)),
    "class_mixtures": Case(
        partition.class_mixtures,
        given(
            labels=LABELS,
            test_labels=LABELS,
            alpha=1.0,
            train_per_client=1,
            validation_per_client=1,
            test_per_client=1,
            **_POOL,
        ),
    ),
    "few_classes": Case(
        partition.few_classes,
        given(
            labels=LABELS,
            test_labels=LABELS,
            train_per_class=1,
            validation_per_client=1,
            test_per_client=2,
            **_POOL,
        ),
    ),
    "natural": Case(partition.natural, given(client_ids=LABELS)),
    "split_clients": Case(partition.split_clients, given(clients=ROWS, rng=0)),
    "by_preference": Case(
        mixtures.by_preference,
        given(labels=LABELS, preferences=np.ones((2, 3)), sizes=np.array([6, 6]), rng=0),
    ),
    "label_and_size_skew": Case(
        mixtures.label_and_size_skew, given(labels=LABELS, alpha=1.0, **_POOL)
    ),
    "majority_classes": Case(mixtures.majority_classes, given(labels=LABELS, **_POOL)),
    "overlapping_draw": Case(
        clusters.overlapping_draw, given(num_examples=120, rng=0, cluster_sizes=(1, 2))
    ),
    "shift_clusters": Case(
        clusters.shift_clusters,
        given(
            examples={"x": IMAGES, "y": LABELS},
            clients=ROWS,
            clusters=np.array([0, 1]),
            shift="label",
            num_classes=3,
        ),
    ),
    "rotate_quarter_turns": Case(shifts.rotate_quarter_turns, given(images=IMAGES, turns=1)),
    "shift_labels": Case(shifts.shift_labels, given(labels=LABELS, shift=1, num_classes=3)),
    "color_by_label": Case(shifts.color_by_label, given(images=IMAGES, labels=LABELS, rng=0)),
    "rotate_by_label": Case(
        shifts.rotate_by_label, given(images=IMAGES, labels=LABELS, angles=(0.0, 45.0, 90.0))
    ),
    "power_law_sizes": Case(sizes.power_law_sizes, given(num_examples=12, **_POOL)),
    "describe": Case(statistics.describe, given(clients=ROWS, labels=LABELS)),
    "describe_data": Case(statistics.describe_data, given(data=lambda: store())),
    "available": Case(datasets.available, given()),
    # None of these is called with what is valid: it would look for files, or fetch them.
    **{
        name: Case(getattr(datasets, name), None)
        for name in ("fetch", "info", "load", "loader", "status", "resolve_data_dir")
    },
    "options of data": Case(datasets.options, given(name="digits")),
    # The engine.
    "examples_of": Case(engine.examples_of, given(data=lambda: store())),
    "population_of": Case(engine.population_of, given(data=lambda: store())),
    "anderson": Case(engine.anderson, given(federation=lambda: joined_by_all(), memory=2)),
    # Evaluation.
    "heterogeneity": Case(
        evaluation.heterogeneity,
        given(model=lambda: model(), data=lambda: store(), params=lambda: model().init(KEY)),
    ),
    "by_group": Case(evaluation.by_group, given(values=np.arange(4.0), is_minority=IS_REAL)),
    "cluster_fairness": Case(
        evaluation.cluster_fairness,
        given(
            accuracy=np.full(4, 0.5),
            loss=np.ones(4),
            reference_accuracy=np.full(4, 0.6),
            reference_loss=np.ones(4),
            is_minority=IS_REAL,
        ),
    ),
    "disparity_of_gains": Case(
        evaluation.disparity_of_gains, given(values=np.arange(4.0), references=np.ones(4))
    ),
    **{
        name: Case(getattr(evaluation, name), given(assigned=[0, 0, 1], true=[0, 0, 1]))
        for name in ("is_minority_found", "is_partition_found", "matched_share")
    },
    "over_seeds": Case(evaluation.over_seeds, given(results=[{"accuracy": 0.5}])),
    "shared_evaluator": Case(
        evaluation.shared_evaluator, given(model=lambda: model(), data=lambda: store())
    ),
    "personal_evaluator": Case(
        evaluation.personal_evaluator,
        given(
            model=lambda: model(),
            data=lambda: store(),
            params_of=lambda: lambda client, params: params,
        ),
    ),
    "wilson_interval": Case(
        evaluation.wilson_interval, given(shares=np.array([0.5, 1.0]), counts=np.array([4, 1]))
    ),
    "summarize": Case(evaluation.summarize, lambda: {"evaluation": evaluated()}),
    # Files.
    "Checkpoints": Case(io.Checkpoints, lambda: {"directory": tempfile.mkdtemp()}),
    "Logbook": Case(io.Logbook, lambda: {"directory": tempfile.mkdtemp()}),
    "accuracy_and_epsilon": Case(
        io.accuracy_and_epsilon, given(rows=[{"round": 1, "accuracy": 0.5}], title="a run")
    ),
    "accuracy_by_megabytes": Case(
        io.accuracy_by_megabytes,
        given(rows=[{"round": 1, "test_accuracy": 0.5, "bytes_up": 8}], title="a run"),
    ),
    "client_accuracies": Case(
        io.client_accuracies,
        given(
            accuracies=np.array([0.5, 0.6]),
            sizes=np.array([3, 4]),
            test_sizes=np.array([2, 5]),
            title="a run",
        ),
    ),
    "labels_by_client": Case(
        io.labels_by_client,
        lambda: {"statistics": statistics.describe(ROWS, LABELS)},
    ),
    "read_metrics": Case(io.read_metrics, lambda: {"directory": tempfile.mkdtemp()}),
    "write_json": Case(
        io.write_json, lambda: {"path": tempfile.mkdtemp() + "/a.json", "content": {}}
    ),
    # Models.
    "build of models": Case(models.build, given(name="mlp", example={"x": VECTOR}, num_classes=3)),
    "options of models": Case(models.options, given(name="mlp")),
    "char_lstm": Case(models.char_lstm, given(example_x=TEXT, num_classes=5)),
    "char_transformer": Case(models.char_transformer, given(example_x=TEXT, num_classes=5)),
    **{
        name: Case(getattr(models, name), given(example_x=IMAGE, num_classes=3))
        for name in ("emnist_cnn", "fedavg_cnn", "lenet5", "thesis_cnn", "resnet18", "resnet34")
    },
    "linear_regression": Case(models.linear_regression, given(example_x=VECTOR)),
    "logistic_regression": Case(models.logistic_regression, given(example_x=VECTOR, num_classes=3)),
    "mlp": Case(models.mlp, given(example_x=VECTOR, num_classes=3)),
    "lower": Case(models.lower, given(fn=lambda: jnp.sin)),
    **{
        name: Case(getattr(models, name), given(logits=_LOGITS, labels=np.array([1])))
        for name in ("softmax_correct", "softmax_cross_entropy")
    },
    **{
        name: Case(getattr(models, name), given(logits=_LOGITS[0], labels=np.ones(3)))
        for name in ("sigmoid_correct", "sigmoid_binary_cross_entropy")
    },
    **{
        name: Case(getattr(models, name), given(outputs=np.ones(3), targets=np.ones(3)))
        for name in ("squared_error", "half_squared_error")
    },
    "least_squares": Case(models.least_squares, given(example_x=VECTOR)),
    # Privacy.
    "add_gaussian": Case(privacy.add_gaussian, given(key=KEY, tree=TREE, stddev=1.0)),
    "add_laplace": Case(privacy.add_laplace, given(key=KEY, tree=TREE, scale=1.0)),
    "add_staircase": Case(
        privacy.add_staircase, given(key=KEY, tree=TREE, epsilon=1.0, sensitivity=1.0)
    ),
    "add_bounded_laplace": Case(
        privacy.add_bounded_laplace,
        given(key=KEY, tree=TREE, epsilon=1.0, dp_delta=1e-3, sensitivity=1.0),
    ),
    "banded_noise": Case(privacy.banded_noise, given(num_rounds=4, bands=2, min_separation=2)),
    "bounded_laplace": Case(privacy.bounded_laplace, given(**_ENTRIES, entry_delta=1e-4)),
    "staircase": Case(privacy.staircase, given(**_ENTRIES)),
    "gaussian": Case(privacy.gaussian, given(clip_norm=1.0, noise_multiplier=1.0)),
    "laplace": Case(privacy.laplace, given(clip_norm=1.0, noise_multiplier=1.0)),
    "calibrate_noise_multiplier": Case(
        privacy.calibrate_noise_multiplier,
        lambda: {
            "make_event": dp_accounting.GaussianDpEvent,
            "epsilon": 3.0,
            "dp_delta": 1e-5,
        },
    ),
    "calibrate_poisson": Case(privacy.calibrate_poisson, given(epsilon=3.0, **_STEPS)),
    "epsilon_of_poisson": Case(privacy.epsilon_of_poisson, given(noise_multiplier=1.0, **_STEPS)),
    "max_poisson_steps": Case(
        privacy.max_poisson_steps,
        given(epsilon=3.0, dp_delta=1e-5, sampling_rate=0.1, noise_multiplier=1.0),
    ),
    "choose_bits": Case(privacy.choose_bits, given(**_PLAN, num_clients=3)),
    "make_plan": Case(privacy.make_plan, given(**_PLAN, num_clients=3)),
    "make_central_plan": Case(privacy.make_central_plan, given(**_PLAN)),
    "discrete_mechanism": Case(
        privacy.discrete_mechanism, lambda: {"structure": TREE, "plan": plan()}
    ),
    **{
        name: Case(getattr(privacy, name), given(tree=TREE, clip_norm=1.0))
        for name in ("clip_by_global_norm", "clip_by_l1_norm", "clip_per_layer")
    },
    "published_batch_sizes": Case(privacy.published_batch_sizes, given(num_clients=20)),
    "published_budgets": Case(privacy.published_budgets, given(name="Dist1", num_clients=20)),
    "score_units": Case(privacy.score_units, given(limit=100)),
    "summed_scores": Case(
        privacy.summed_scores, given(scores=jnp.ones(4), is_real=IS_REAL, largest=1.0, units=8)
    ),
    "make_adaptive_clipping": Case(privacy.make_adaptive_clipping, given(expected_cohort_size=3.0)),
    "sensitivity_of_sum": Case(privacy.sensitivity_of_sum, given(bound=1.0)),
    "noise_stddev": Case(
        privacy.noise_stddev,
        lambda: {"sensitivity": privacy.sensitivity_of_sum(1.0), "noise_multiplier": 1.0},
    ),
    "overlap": Case(privacy.overlap, given(separation=1.0)),
    "separation_scores": Case(privacy.separation_scores, given(centres=np.eye(2), stddevs=1.0)),
    "select": Case(
        privacy.select, given(key=KEY, scores=jnp.arange(3.0), epsilon=1.0, sensitivity=1.0)
    ),
    "selection_event": Case(privacy.selection_event, given(epsilon=1.0)),
    "rate_upper_bound": Case(
        auditing.rate_upper_bound, given(errors=3, trials=10, significance=0.05)
    ),
    "threshold_bound": Case(auditing.threshold_bound, given(**_SCORES)),
    "gaussian_bound": Case(auditing.gaussian_bound, given(**_SCORES)),
    "one_run_epsilon": Case(
        auditing.one_run_epsilon,
        given(num_canaries=20, num_guesses=10, num_correct=8, dp_delta=1e-5),
    ),
    # Audits.
    "attack_model": Case(
        audit.attack_model,
        lambda: {
            "model": model(),
            "params": model().init(KEY),
            "members": {"x": PUBLIC, "y": np.ones(8, np.float32)},
            "others": {"x": PUBLIC + 1, "y": np.ones(8, np.float32)},
            "rng": rng(),
        },
    ),
    "membership_attack": Case(
        audit.membership_attack,
        lambda: {"members": PUBLIC, "others": PUBLIC + 1, "rng": rng()},
    ),
    "audit": Case(audit.audit, lambda: {"runs": audited(), "dp_delta": 1e-5}),
    "run_audit": Case(
        audit.run_audit, lambda: {"planted": planted(), "key": KEY, "num_runs": 1, "num_rounds": 1}
    ),
    "check_choice": Case(
        audit.check_choice,
        lambda: {
            "choice": clients.private_choice(model()),
            "numbers": {"selection_epsilon": 1.0, "loss_bound": 1.0},
            "models": jax.tree.map(lambda x: jnp.stack([x, x + 1]), model().init(KEY)),
            "batch": BATCH,
            "key": KEY,
            "num_draws": 1000,
        },
    ),
    "check_client": Case(
        audit.check_client,
        lambda: {
            "planted": planted(),
            "state": planted_state(),
            "key": KEY,
            "num_draws": 4,
        },
    ),
    "check_cohort": Case(
        audit.check_cohort,
        lambda: {
            "algorithm": algorithms.fedavg(model(), trainer(), aggregator=mean()),
            "data": store(),
            "state": bound().init(KEY),
            "key": KEY,
            "num_draws": 4,
        },
    ),
    "check_gradient_rule": Case(
        audit.check_gradient_rule,
        lambda: {
            "rule": clients.clipped(model()),
            "params": model().init(KEY),
            "batch": BATCH,
            "config": NUMBERS,
            "key": KEY,
            "num_draws": 4,
        },
    ),
    "plant_clients": Case(
        audit.plant_clients,
        lambda: {
            "algorithm": algorithms.fedavg(model(), trainer(), aggregator=mean()),
            "data": store(),
            "participation": joining(),
            "num_canaries": 1,
            "rng": rng(),
        },
    ),
    "plant_records": Case(
        audit.plant_records,
        lambda: {
            "make_algorithm": lambda m: algorithms.dp_sgd(m, private_of(m)),
            "model": model(),
            "data": store(),
            "participation": joining(),
            "num_canaries": 1,
            "rng": rng(),
        },
    ),
    "plant_losses": Case(
        audit.plant_losses,
        lambda: {
            "make_algorithm": lambda m: algorithms.dp_sgd(m, private_of(m)),
            "model": model(),
            "data": store(),
            "participation": joining(),
            "num_canaries": 1,
            "rng": rng(),
        },
    ),
    "plant_votes": Case(
        audit.plant_votes,
        lambda: {
            "make_algorithm": lambda m, public_x: algorithms.ae_dpfl(
                m, private_of(m), public_x=public_x
            ),
            "model": model(),
            "data": store(),
            "participation": joining(),
            "num_canaries": 1,
            "num_rounds": 1,
            "rng": rng(),
        },
    ),
    # Servers.
    "adaptive_gaussian_mean": Case(
        servers.adaptive_gaussian_mean,
        given(rule=lambda: privacy.make_adaptive_clipping(30.0), noise_multiplier=1.0),
    ),
    "apply_aggregate": Case(
        servers.apply_aggregate,
        lambda: {
            "optimizer": optax_sgd(),
            "opt_state": optax_sgd().init(TREE),
            "params": TREE,
            "aggregate": TREE,
        },
    ),
    "gaussian_mean": Case(servers.gaussian_mean, given(**_PRIVATE_MEAN)),
    "laplace_mean": Case(servers.laplace_mean, given(**_PRIVATE_MEAN)),
    "staircase_mean": Case(servers.staircase_mean, given(structure=TREE, **_PRIVATE_MEAN)),
    "bounded_laplace_mean": Case(
        servers.bounded_laplace_mean, given(structure=TREE, **_PRIVATE_MEAN, entry_delta=1e-4)
    ),
    "central_discrete_mean": Case(
        servers.central_discrete_mean, given(structure=TREE, **_PRIVATE_MEAN)
    ),
    "private_mean": Case(
        servers.private_mean, given(make_mechanism=privacy.gaussian, **_PRIVATE_MEAN)
    ),
    "correlated_gaussian_mean": Case(
        servers.correlated_gaussian_mean,
        given(banded=lambda: privacy.banded_noise(4, 2, min_separation=2), **_PRIVATE_MEAN),
    ),
    "discrete_mean": Case(
        servers.discrete_mean,
        given(structure=TREE, plan=lambda: plan(), expected_cohort_size=3),
    ),
    "by_realised_count": Case(servers.by_realised_count, given(mean=lambda: mean())),
    "estimate_noise": Case(servers.estimate_noise, given(updates=UPDATES, is_real=IS_REAL)),
    "principal_component_pursuit": Case(
        servers.principal_component_pursuit, given(matrix=UPDATES["w"], is_real=IS_REAL)
    ),
    "inverse_noise_weights": Case(
        servers.inverse_noise_weights, given(levels=jnp.ones(4), counts=IS_REAL)
    ),
    "kmeans": Case(
        servers.kmeans, given(key=KEY, gram=jnp.eye(4), is_real=IS_REAL, num_clusters=2)
    ),
    "fit_mixture": Case(servers.fit_mixture, given(features=PUBLIC, num_clusters=2, seed=0)),
    "fit_best_mixture": Case(
        servers.fit_best_mixture, given(features=PUBLIC, candidates=[2, 3], seed=0)
    ),
    "num_soft_rounds": Case(servers.num_soft_rounds, given(largest_overlap=0.1, num_rounds=9)),
    "similarity_of": Case(servers.similarity_of, given(deltas=UPDATES, is_real=IS_REAL)),
    "principal_features": Case(
        servers.principal_features,
        lambda: {"similarity": servers.similarity_of(UPDATES, jnp.asarray(IS_REAL))},
    ),
    "mean_per_cluster": Case(servers.mean_per_cluster, given(num_models=2, num_clients=6)),
    "mean_per_model": Case(servers.mean_per_model, given(num_models=2)),
    "noise_aware_mean": Case(servers.noise_aware_mean, given(num_clients=6)),
    "weighted_by_client": Case(servers.weighted_by_client, given(num_clients=6)),
    "per_part": Case(servers.per_part, given(parts=lambda: {"a": servers.uniform_mean()})),
    "agnostic_mean": Case(servers.agnostic_mean, given(num_clients=6)),
    "onto_simplex": Case(servers.onto_simplex, given(y=jnp.arange(3.0))),
    "gradient_mask": Case(servers.gradient_mask, given()),
    "projected_mean": Case(servers.projected_mean, given(is_public=[True, True, False])),
    "sparse_mean": Case(servers.sparse_mean, given()),
    "scaled_sum": Case(servers.scaled_sum, given(divisor=3.0)),
    "trimmed_mean": Case(servers.trimmed_mean, given()),
    **{name: Case(getattr(servers, name), given()) for name in ("uniform_mean", "weighted_mean")},
    "stateless": Case(servers.stateless, given(structure=TREE)),
}


def optax_sgd():
    import optax

    return optax.sgd(1.0)


@functools.cache
def saved() -> str:
    folder = tempfile.mkdtemp()
    store().save(folder)
    return folder


def planted_state():
    found = planted()
    return engine.federation(found.algorithm, found.data, found.participation).init(KEY)
