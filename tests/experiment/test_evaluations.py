"""What is evaluated beside held-out data of models as clients receive them."""

import jax
import numpy as np
import pytest
from marks import slow, telling
from run_folders import DRAWN, SMALL, die_and_resume, execute, metrics, read_json, saved_arrays

from fedjax_dp.experiment.assembly.assemble import assemble, checked_config
from fedjax_dp.experiment.reading.config_files import load_config
from fedjax_dp.experiment.running.loading import load_run
from fedjax_dp.experiment.running.results import evaluate

BOTH = ("--evaluation.personal=after_local", "--evaluation.training=true", "--run.metrics=['f1']")


def test_without_test_data_of_clients_nothing_can_be_evaluated_after_local_training():
    words = (*SMALL, "--data.client_test_share=0", "--evaluation.personal=after_local")
    with pytest.raises(
        ValueError, match=r"evaluation\.personal must be 'received' .* got 'after_local'"
    ):
        assemble(load_config(None, words))


@slow
@pytest.mark.usefixtures("shared_programs", "no_pictures")
def test_nothing_of_it_is_kept_and_a_resumed_run_finds_the_same(tmp_path):
    """Under privacy of clients and records, with noise everywhere."""
    short = (*DRAWN, "--run.rounds=4", "--run.checkpoint_every=2")
    plain, both, resumed = (tmp_path / name for name in ("plain", "both", "resumed"))
    execute(plain, *short)
    execute(both, *short, *BOTH)
    die_and_resume(resumed, 3, *short, *BOTH)
    (_, arrays, extra), (_, others, other_extra) = map(saved_arrays, (plain, both))
    assert arrays.keys() == others.keys()
    for name, array in arrays.items():
        assert np.asarray(array).tobytes() == np.asarray(others[name]).tobytes(), name
    assert extra["ledgers"] == other_extra["ledgers"]
    assert read_json(plain, "privacy.json") == read_json(both, "privacy.json")
    rows, more = metrics(plain), metrics(both)
    added = {name for name in more[-1] if name not in rows[-1]}
    assert {
        *("mean_client_accuracy_after_local", "worst_client_accuracy_after_local"),
        *("client_test_f1_after_local", "training_set_accuracy", "training_set_f1"),
    } <= added
    assert [
        {k: row[k] for k in row if k not in added and not k.endswith("_f1")} for row in more
    ] == rows
    assert metrics(resumed) == more
    summary = read_json(both, "summary.json")
    assert added <= set(summary["not_private"])
    assert summary["client_test_accuracy_after_local"] != summary["client_test_accuracy"]
    run = load_run(both)
    train, params = run.experiment.population.train, run.params["params"]["Dense_0"]
    x, y = (np.asarray(train.examples[name]) for name in ("x", "y"))
    logits = x.reshape(len(y), -1) @ np.asarray(params["kernel"]) + np.asarray(params["bias"])
    assert summary["training_set_accuracy"] == pytest.approx(np.mean(logits.argmax(-1) == y))


# Two clusters of one and two clients, whose pools are single batches of a reference's training.
CLUSTERS = (
    *("--data.name=digits", "--data.partition=shifted_clusters", "--run.rounds=2"),
    "--data.partition_options.cluster_sizes=[2, 1]",
    "--data.partition_options.samples_per_client=12",
    "--data.partition_options.test_samples_per_client=30",
    *("--privacy.unit=none", "--evaluation.clusters=true"),
)
CHOSEN = ("--algorithm.name=o_dpcfl", "--algorithm.options.clusters=[1, 0, 0]")


def reference_by_hand(start, train, clients, epochs, rate):
    """Logistic regression on the pool of some clients, by full gradient steps."""
    data = [train.client(i) for i in clients]
    x = np.concatenate([np.float64(each["x"]).reshape(len(each["y"]), -1) for each in data])
    y = np.concatenate([each["y"] for each in data])
    weights, bias = start
    for _ in range(epochs):
        scores = np.exp(x @ weights + bias)
        residual = (scores / scores.sum(axis=1, keepdims=True) - np.eye(10)[y]) / len(y)
        weights, bias = weights - rate * x.T @ residual, bias - rate * residual.sum(axis=0)

    def results(each):
        logits = np.float64(each["x"]).reshape(len(each["y"]), -1) @ weights + bias
        chosen = logits[np.arange(len(logits)), each["y"]]
        losses = np.log(np.exp(logits).sum(axis=1)) - chosen
        return np.mean(logits.argmax(axis=1) == each["y"]), np.mean(losses)

    return results


@telling
def test_a_run_is_compared_with_the_clusters_of_its_partition():
    """An oracle that is wrong about client 0 and 1, beside central models trained by NumPy."""
    words = (*CLUSTERS, *CHOSEN, "--evaluation.references.epochs=4")
    config = load_config(None, (*words, "--evaluation.references.learning_rate=0.5"))
    experiment = assemble(config)
    train, held_out = experiment.population.train, experiment.population.client_test
    np.testing.assert_array_equal(experiment.population.clusters, [0, 0, 1])
    state = experiment.simulation.init(jax.random.key(0))
    row = evaluate(experiment.evaluator, state, experiment.simulation.hyper, 0).figures
    assert (row["clusters_found"], row["minority_found"]) == (0.0, 0.0)
    assert row["clients_matched"] == pytest.approx(2 / 3)
    accuracy = experiment.evaluator.clients(state).client_accuracy
    assert row["minority_accuracy"] == pytest.approx(accuracy[2])
    assert row["majority_accuracy"] == pytest.approx(np.mean(accuracy[:2]))
    # All models start from the same one.
    leaves = sorted(jax.tree.leaves(state.server.models), key=np.ndim, reverse=True)
    start = [np.float64(leaf[0]) for leaf in leaves]
    pools = ([0, 1], [2])
    by_hand = [reference_by_hand(start, train, members, 4, 0.5) for members in pools]
    loss = experiment.evaluator.training(state).client_loss
    gains, losses = [], []
    for client, cluster in enumerate([0, 0, 1]):
        gains.append(by_hand[cluster](held_out.client(client))[0] - accuracy[client])
        losses.append(loss[client] - by_hand[cluster](train.client(client))[1])
    assert row["accuracy_cost_disparity"] == pytest.approx(np.ptp(gains), abs=1e-6)
    assert row["loss_cost_disparity"] == pytest.approx(np.ptp(losses), rel=1e-4)
    assert np.ptp(losses) > 1e-3


@telling
@pytest.mark.parametrize(
    ("algorithm", "expected"),
    [
        (("f_cdpfl", "num_models=2", "selection='exact'"), [0, 0, 0]),
        (("km_cdpfl", "num_models=2"), [0, 0, 0]),
        (("ifca", "num_models=1"), [0, 0, 0]),
        (("fedavg",), None),
        (("ditto",), None),
    ],
)
def test_each_algorithm_says_which_cluster_a_client_is_in(algorithm, expected):
    name, *options = algorithm
    words = [f"--algorithm.name={name}", *(f"--algorithm.options.{each}" for each in options)]
    if name in ("f_cdpfl", "km_cdpfl"):
        words += ["--privacy.unit=record", "--privacy.record.dp_delta=1e-3"]
    experiment = assemble(load_config(None, (*CLUSTERS, *words)))
    clusters_of = experiment.evaluator.clusters.assigned
    state = experiment.simulation.init(jax.random.key(0))
    if expected is None:
        assert clusters_of(state) is None
        return
    np.testing.assert_array_equal(clusters_of(state), expected)
    if name == "f_cdpfl":
        moved = state._replace(clients=np.array([1, 0, 1], np.int32))
        np.testing.assert_array_equal(clusters_of(moved), [1, 0, 1])
    elif name == "km_cdpfl":
        server = state.server._replace(clusters=np.array([1, 1, 0], np.int32))
        np.testing.assert_array_equal(clusters_of(state._replace(server=server)), [1, 1, 0])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--evaluation.clusters=true",), "evaluation.clusters must be false for a partition that"),
        (
            ("--evaluation.references.epochs=3",),
            "evaluation.references.epochs must be left out without evaluation.clusters",
        ),
        (
            ("--evaluation.references.learning_rate=0.2",),
            "evaluation.references.learning_rate must be left out without an? "
            "evaluation.references.epochs",
        ),
    ],
)
def test_comparisons_without_clusters_are_refused(words, message):
    with pytest.raises(ValueError, match=message):
        assemble(checked_config(load_config(None, (*SMALL, *words))))


def test_one_client_that_holds_all_data_is_in_no_cluster():
    words = (*CLUSTERS, "--algorithm.name=centralized", "--evaluation.references.epochs=1")
    assert assemble(load_config(None, words)).evaluator.clusters is None


def test_models_of_clients_need_examples_that_clients_hold_out():
    words = ("--data.name=digits", "--data.partition=common_pool", "--algorithm.name=local_only")
    words += ("--data.partition_options.samples_per_client=20", "--privacy.unit=none")
    with pytest.raises(ValueError, match=r"data\.partition must hold out examples of each client"):
        assemble(load_config(None, words))
