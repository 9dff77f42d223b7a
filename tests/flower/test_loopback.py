"""A real SuperLink and two SuperNodes: the simulation's model and ε, also after a crash."""

import json

import jax
import numpy as np
import pytest
from loopback import Loopback, until
from marks import slow

from fedjax_dp.experiment import load_config, load_run, run
from fedjax_dp.flower import write_app

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


def app_of(words, folder):
    config = load_config(None, [*COMMON, *words])
    write_app(config, folder / "app", folder / "unused")
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
