"""The page of a federation in a real browser: what its nodes did, also while it is under way."""

import json
import threading

import pytest
from browser import needs_browser, shown
from marks import slow

from fedjax_dp.core.decimals import rounded_up
from fedjax_dp.experiment import Watcher, load_config, report
from fedjax_dp.experiment.reading.config_files import to_toml
from fedjax_dp.flower import client_app_of, run_on
from fedjax_dp.flower.testing import InProcess

pytestmark = [slow, needs_browser]
NUM_NODES, ROUNDS, LATE = 3, 3, (2, 1)
WORDS = (
    *("--run.rounds", str(ROUNDS), "--run.evaluate_every", "1", "--run.secret", "true"),
    *("--model.name", "logistic_regression", "--data.num_clients", "12"),
    *("--algorithm.name", "dp_fedavg", "--privacy.unit", "client"),
    *("--privacy.client.noise_multiplier", "2", "--privacy.client.epsilon", "none"),
    *("--participation.sampler", "full_participation", "--run.plots", "false"),
)


class Watched(Watcher):
    """Opens the page of a run under way, and renews it until the run ends."""

    def __init__(self, folder):
        self._folder, self.reports = folder, []
        self.first = None

    def done(self, rounds, row):
        if rounds == 1:
            page = report(self._folder).file
            self.first = shown(self._folder.parent, page, 1280).text
            self.thread = threading.Thread(target=self._renew)
            self.thread.start()

    def _renew(self):
        report(self._folder, every=0.1, progress=self.reports.append)


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    """A run whose node 2 is late in its second round; its folder and who watched it."""
    place = tmp_path_factory.mktemp("federation")
    config = load_config(None, list(WORDS))
    (path := place / "experiment.toml").write_text(to_toml(config))

    def late(sent, reply):
        about = sent.metadata
        is_late = about.message_type == "train"
        is_late = is_late and (about.dst_node_id, int(about.group_id)) == LATE
        return [] if is_late else [reply]

    nodes = {
        i + 1: {"partition-id": i, "num-partitions": NUM_NODES, "state-dir": f"{place}/states-{i}"}
        for i in range(NUM_NODES)
    }
    watched = Watched(place / "run")
    run_on(InProcess(client_app_of(path), nodes, late), config, place / "run", watched)
    watched.thread.join(60)
    return place / "run", watched


def test_a_page_is_renewed_while_the_federation_is_under_way(federation):
    _, watched = federation
    assert f"Under way: round 1 of {ROUNDS}." in watched.first
    assert "The statement is written when the run ends." in watched.first
    states = [(each.state, each.rounds) for each in watched.reports]
    assert states == sorted(states, key=lambda state: state[1])
    assert states[0][0] == "running" and states[-1] == ("finished", ROUNDS)


@pytest.mark.parametrize("width", [1280, 400])
def test_a_page_shows_what_the_nodes_did(federation, tmp_path, width):
    folder, _ = federation
    seen = shown(tmp_path, folder / "report.html", width)
    assert not seen.said and seen.screen == width and seen.content <= seen.screen
    assert f"Finished: round {ROUNDS} of {ROUNDS}." in seen.text
    summary = json.loads((folder / "summary.json").read_text())
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    accuracy = f"test accuracy of the shared model {summary['test_accuracy']:.6g}"
    assert accuracy in seen.text
    assert f"ε of one client {rounded_up(summary['epsilon_client'])}" in seen.text
    # Twelve clients in each round, of which four on a node that was late once.
    for line in ("drawn 36 12", "contributed 32 10.67", "dropped out or late 4 1.333"):
        assert line in seen.text
    for label, way in (("up from nodes", "up"), ("down to nodes", "down")):
        num_bytes = [row[f"wire_bytes_{way}"] for row in rows]
        assert min(num_bytes) > 0
        each = f"{sum(num_bytes) / 1e3:.4g} kB {sum(num_bytes) / 1e3 / ROUNDS:.4g} kB"
        assert f"{label} {each}" in seen.text
    assert "Each node draws the keys of its clients from its operating system." in seen.text
