"""A real SuperLink and two SuperNodes: the simulation's model and ε, over TLS and after crashes."""

import json

import jax
import numpy as np
import pytest
from loopback import Loopback, until
from marks import slow

from fedjax_dp.experiment import load_config, load_run, run
from fedjax_dp.experiment.reading.config_files import to_toml
from fedjax_dp.flower import client_app_of, run_on, write_app
from fedjax_dp.flower.testing import InProcess

pytestmark = slow
NUM_NODES, NUM_CLIENTS = 2, 6
COMMON = (
    *("--run.rounds", "2", "--run.evaluate_every", "1", "--run.checkpoint_every", "1"),
    *("--model.name", "logistic_regression", "--data.num_clients", str(NUM_CLIENTS)),
)
PRIVATE = (
    *("--algorithm.name", "dp_fedavg", "--privacy.unit", "client"),
    *("--privacy.client.noise_multiplier", "2", "--privacy.client.epsilon", "none"),
    *("--privacy.client.clip_norm", "0.5"),
    *("--participation.sampler", "poisson", "--participation.cohort_size", "4"),
)


WITH_STATES = (
    *("--algorithm.name", "scaffold", "--privacy.unit", "none", "--run.rounds", "3"),
    *("--participation.sampler", "full_participation"),
)


def app_of(words, folder):
    config = load_config(None, [*COMMON, *words])
    write_app(config, folder / "app", folder / "unused", keys="parity")
    return config, folder / "app"


def params_of(folder):
    return jax.tree.leaves(load_run(folder).params)


def lines_of(path):
    return [json.loads(line) for line in path.read_text().split("\n") if line]


def sent_of(output):
    path = output / "checkpoint" / "sent.jsonl"
    return lines_of(path) if path.exists() else []


@pytest.fixture(scope="module")
def private(tmp_path_factory):
    return app_of(PRIVATE, tmp_path_factory.mktemp("private"))


@pytest.fixture(scope="module")
def simulated(private, tmp_path_factory):
    return run(private[0], tmp_path_factory.mktemp("simulated") / "run")


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """One federation for all tests without TLS."""
    with Loopback(tmp_path_factory.mktemp("plain"), num_nodes=NUM_NODES) as federation:
        yield federation


@pytest.fixture
def federation(plain, request):
    """That federation, whose logs are shown if the test fails."""
    yield plain
    plain.show_logs()


@pytest.fixture(scope="module")
def whole(plain, private, tmp_path_factory):
    """A run that was never interrupted: its folder, its state and its log."""
    output = tmp_path_factory.mktemp("whole") / "run"
    identity = plain.submit(private[1], output)
    return output, plain.until_ended(identity), plain.log_of_run(identity)


def test_a_federation_on_a_network_ends_where_its_simulation_ends(federation, whole, simulated):
    output, ended, log = whole
    assert ended["status"] == "finished:completed", log
    summary = json.loads((output / "summary.json").read_text())
    assert summary["rounds"] == 2
    assert summary["epsilon"] == simulated.summary["epsilon"]
    for x, y in zip(params_of(output), params_of(simulated.folder), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=1e-6)
    assert "round 2 of 2, accuracy" in log and f"{output}: 2 rounds in" in log


def test_a_node_gets_one_message_and_sends_one_sum_whose_bytes_the_meter_counts(federation, whole):
    output, _, _ = whole
    for row, sent in zip(lines_of(output / "metrics.jsonl"), sent_of(output), strict=True):
        drawn = [client for client in sent["clients"][0] if client >= 0]
        nodes = {client % NUM_NODES for client in drawn}
        for way in ("up", "down"):
            # The update or the message, and few bytes of keys, counts and the aggregator.
            extra = row[f"wire_bytes_{way}"] / len(nodes) - row[f"bytes_{way}"] / len(drawn)
            assert 0 < extra < 200


def test_a_server_app_that_was_killed_resumes_to_the_same_bits(
    federation, private, whole, tmp_path
):
    app, output = private[1], tmp_path / "run"
    federation.submit(app, output)
    # The second round is on its way.
    until(lambda: len(sent_of(output)) == 2, "second round")
    federation.kill_server_app()
    assert federation.run(app, output)["status"] == "finished:completed"
    assert [line["round"] for line in sent_of(output)] == [0, 1, 1]
    for x, y in zip(params_of(output), params_of(whole[0]), strict=True):
        np.testing.assert_array_equal(x, y)
    # Three rounds were sent, and all are charged.
    three = load_config(None, [*COMMON, *PRIVATE, "--run.rounds", "3"])
    longer = run(three, tmp_path / "three").summary["epsilon"]
    summary = json.loads((output / "summary.json").read_text())
    assert summary["rounds"] == 2 and summary["epsilon"] == longer


def test_flwr_shows_a_refused_configuration_and_a_spent_budget(
    federation, private, simulated, tmp_path
):
    ended = federation.run(private[1], "a relative path")
    assert ended["status"] == "finished:failed"
    assert "output must be in the run configuration" in ended["status-details"]
    budget = repr(0.99 * simulated.summary["epsilon"])
    _, app = app_of([budget if word == "none" else word for word in PRIVATE], tmp_path)
    identity = federation.submit(app, tmp_path / "run")
    assert federation.until_ended(identity)["status"] == "finished:completed"
    reason = "stopped after round 1: one more would exceed the budget"
    assert reason in " ".join(federation.log_of_run(identity).split())
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["rounds"] == 1


def test_a_node_that_was_killed_resumes_from_its_state_folder(federation, tmp_path):
    config, app = app_of(WITH_STATES, tmp_path)
    output, expected = tmp_path / "run", tmp_path / "expected"
    identity = federation.submit(app, output)
    until(lambda: len(sent_of(output)) == 2, "second round")
    federation.kill_node(0)
    federation.start_node(0)
    ended = federation.until_ended(identity)
    assert ended["status"] == "finished:completed", federation.log_of_run(identity)
    # The same federation without a network, whose first node loses its reply in the second round.
    (toml := tmp_path / "experiment.toml").write_text(to_toml(config))

    def lost(sent, reply):
        data = sent.metadata
        is_lost = (data.message_type, data.group_id, data.dst_node_id) == ("train", "1", 1)
        return [] if is_lost else [reply]

    nodes = {i + 1: {"partition-id": i, "num-partitions": NUM_NODES} for i in range(NUM_NODES)}
    nodes = {node: {**facts, "keys": "parity"} for node, facts in nodes.items()}
    run_on(InProcess(client_app_of(toml), nodes, lost), config, expected, keys="parity")
    for x, y in zip(params_of(output), params_of(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=1e-6)
    states = federation.states(0).glob("run-*-client-0-round-*.safetensors")
    assert sorted(path.stem.rpartition("-")[2] for path in states) == ["0", "2"]


def test_tls_and_registered_nodes_change_nothing_and_others_are_refused(
    private, simulated, tmp_path
):
    output = tmp_path / "run"
    with Loopback(tmp_path / "secure", num_nodes=NUM_NODES, is_secure=True) as federation:
        federation.start_node(NUM_NODES)
        assert federation.status_of(NUM_NODES) != 0
        assert "Exit Code: 305" in federation.log(f"node{NUM_NODES}")
        ended = federation.run(private[1], output)
        assert ended["status"] == "finished:completed", ended
        assert federation.log("link").count("Activated node_id") == NUM_NODES
    for x, y in zip(params_of(output), params_of(simulated.folder), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=1e-6)
