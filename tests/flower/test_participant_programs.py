"""The example of participants who train by PyTorch and by curl, beside two that do not."""

import contextlib
import importlib.util
import json
import os
import pathlib
import shutil
import subprocess
import sys

import pytest
from loopback import until
from marks import slow

from fedjax_dp.experiment import load_config, run
from fedjax_dp.flower import client_app_of, project, run_on
from fedjax_dp.flower.testing import InProcess

pytest.importorskip("pyarrow")
pytestmark = [
    slow,
    pytest.mark.skipif(not all(map(shutil.which, ("bash", "curl", "jq"))), reason="no curl or jq"),
]
EXAMPLE = pathlib.Path(__file__).parents[2] / "experiments" / "deployment"
BY_PACKAGE, BY_TORCH, BY_CURL = (0, 1), 2, 3
CLIENTS = 25
REFUSED = {
    "another token": (401, "the token must be that of the gateway"),
    "a truncated file": (400, "an update must be a whole safetensors file"),
    "NaN": (400, "array 'params/Dense_0/bias' must be finite"),
    "another shape": (400, "must be float32[10] as in the model, got 'float32[9]'"),
    "an old round": (409, "round 0 must be open to take an update"),
    "a second update": (409, "must get one update of data link"),
}


@contextlib.contextmanager
def programs(folder):
    """Starts programs beside a federation, each with a log of its own, and ends them."""
    path = f"{pathlib.Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    started = []

    def start(name, *words):
        log = (folder / f"{name}.log").open("w")
        process = subprocess.Popen(
            [str(word) for word in words],
            env={**os.environ, "PATH": path},
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        started.append((process, log))
        return process

    try:
        yield start
    finally:
        for process, log in started:
            process.terminate()
            process.wait(30)
            log.close()
        for path in sorted(folder.glob("*.log")):
            print(f"--- {path.name}", path.read_text(), sep="\n")


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    """A federation that has ended, and its folder, which holds the logs of all scripts."""
    folder = tmp_path_factory.mktemp("participants")
    data = folder / "data"

    def states(node):
        return folder / f"states-{node}"

    def address():
        words = (folder / "gateway.log").read_text().split()
        return words[1] if "token" in words else None

    subprocess.run([sys.executable, EXAMPLE / "prepare.py", data], check=True)
    config = load_config(
        str(EXAMPLE / "federation.toml"),
        [f"--data.options.test_path={data}/public.csv", f"--data.options.path={data}/node-*.csv"],
    )
    nodes = {
        i: {
            "clients": f"{i * CLIENTS}-{(i + 1) * CLIENTS - 1}",
            "data": str(data / f"node-{i}.csv"),
            "state-dir": str(states(i)),
        }
        for i in (*BY_PACKAGE, BY_TORCH, BY_CURL)
    }
    has_torch = importlib.util.find_spec("torch") is not None
    for i in (BY_CURL, BY_TORCH) if has_torch else (BY_CURL,):
        nodes[i] |= {"training": "script", "scores": "exact"}
        states(i).mkdir()
    grid = InProcess(client_app_of(EXAMPLE / "federation.toml"), nodes)
    with programs(folder) as start:
        own, table = states(BY_CURL), data / f"node-{BY_CURL}.csv"
        module = (sys.executable, "-m", "fedjax_dp", "gateway", "--json", "--port", "0")
        start("gateway", *module, "--state-dir", own)
        here = until(address, "gateway")
        start("curl", "bash", EXAMPLE / "train.sh", own, table, here)
        refused = start("refused", "bash", EXAMPLE / "refusals.sh", own, here)
        if has_torch:
            words = (states(BY_TORCH), data / f"node-{BY_TORCH}.csv")
            start("torch", sys.executable, EXAMPLE / "train_torch.py", *words)
        outcome = run_on(grid, config, folder / "run", own_data=True, scores="exact")
        assert refused.wait(30) == 0
    return outcome, folder, run(config, folder / "simulated")


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines() if line]


def drawn(folder, node):
    """The rounds and clients of a node that were drawn."""
    sent = lines_of(folder / "run" / "checkpoint" / "sent.jsonl")
    own = range(node * CLIENTS, (node + 1) * CLIENTS)
    return [(line["round"], i) for line in sent for i in sorted(line["clients"][0]) if i in own]


def test_no_update_is_lost_and_epsilon_is_that_of_the_simulation(federation):
    outcome, folder, simulated = federation
    assert outcome.summary["ended"] == "finished" and not outcome.summary["warnings"]
    rows, expected = (lines_of(each.folder / "metrics.jsonl") for each in (outcome, simulated))
    for mine, other in zip(rows, expected, strict=True):
        assert mine["epsilon_client"] == other["epsilon_client"]
        assert mine["num_dropped"] == mine["num_non_finite"] == 0
    num_drawn = sum(len(drawn(folder, node)) for node in range(4))
    assert sum(row["num_participants"] for row in rows) == num_drawn
    assert outcome.summary["test_accuracy"] > 0.7


@pytest.mark.parametrize("wrong", REFUSED)
def test_a_wrong_request_while_the_round_is_under_way_is_refused(federation, wrong):
    log = (federation[1] / "refused.log").read_text()
    (line,) = [line for line in log.splitlines() if line.endswith(f" {wrong}")]
    answer, _ = json.JSONDecoder().raw_decode(line)
    status, message = REFUSED[wrong]
    assert f"}} {status} " in line and message in answer["error"]


def check_scores(folder, node):
    """Scores of all clients of a node that were drawn are on both sides."""
    mine = project(folder / f"states-{node}").scores()
    found = [(line["round"], line["datalink"]) for line in mine]
    assert sorted(found) == drawn(folder, node) and len({number for number, _ in found}) == 3
    all_there = lines_of(folder / "run" / "scores.jsonl")
    there = [line for line in all_there if line["clients"][0] // CLIENTS == node]
    assert [line["scores"] for line in there] == [line["scores"] for line in mine]
    last = [line["scores"]["accuracy"] for line in mine if line["round"] == 2]
    assert sum(last) / len(last) > 0.6


def test_a_shell_script_trains_by_curl(federation):
    check_scores(federation[1], BY_CURL)


def test_a_script_trains_by_pytorch(federation):
    pytest.importorskip("torch")
    check_scores(federation[1], BY_TORCH)
