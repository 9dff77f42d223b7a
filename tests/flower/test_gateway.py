"""The gateway: a script in any language takes part by HTTP; every other request is refused."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request

import fastapi
import jax
import numpy as np
import pytest
import uvicorn
from federations import key
from marks import telling
from small_problem import make_data
from test_scripts import (
    MODEL,
    ROUNDS,
    federated,
    in_thread,
    make,
    numpy_step,
    of_cohorts,
    script_of,
)

from fedjax_dp.engine import simulation
from fedjax_dp.flower.exchange import FOLDER, Exchange, Task, encoded
from fedjax_dp.flower.gateway import HOST, server_of

TOKEN = "a-token"


@contextlib.contextmanager
def served(exchange):
    """Runs a gateway in a thread; yields its address."""
    server, sock = server_of(exchange, TOKEN)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]}, daemon=True)
    thread.start()
    try:
        yield f"http://{HOST}:{sock.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(10)
        sock.close()


@pytest.fixture(scope="module")
def gateway(tmp_path_factory):
    exchange = Exchange(tmp_path_factory.mktemp("node") / FOLDER)
    with served(exchange) as address:
        yield exchange, address


@pytest.fixture
def opened(gateway):
    exchange, address = gateway
    for number in (0, 2):
        exchange.open(Task("a" * 64, number, 5, [4, 7], time.time() + 60, True), MODEL)
    return exchange, address


def ask(address, path, method="GET", body=None, token=TOKEN, **headers):
    """Returns status and body of a request."""
    headers = {"Authorization": f"Bearer {token}", **headers}
    request = urllib.request.Request(address + path, body, headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=10) as reply:
            return reply.status, reply.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def test_a_script_pulls_pushes_and_reports_by_http(opened):
    exchange, address = opened
    status, body = ask(address, "/project")
    found = json.loads(body)
    deadline = found.pop("deadline")
    assert status == 200 and deadline > time.time()
    assert found == {"current_round": 2, "rounds": 5, "datalinks": [4, 7]}
    assert ask(address, "/model") == ask(address, "/model?round=0") == (200, encoded(MODEL))
    status, body = ask(address, "/update?round=2&datalink=7", "PUT", encoded(MODEL))
    assert (status, json.loads(body)) == (200, {"round": 2, "datalink": 7})
    assert json.loads(ask(address, "/project")[1])["datalinks"] == [4]
    report = {"scores": {"accuracy": 0.5}, "round": 0, "datalink": 7}
    status, body = ask(address, "/scores", "POST", json.dumps(report).encode())
    assert (status, json.loads(body)) == (200, report)
    assert exchange.close(exchange.task()) == {7: encoded(MODEL)}
    assert json.loads(ask(address, "/project")[1])["datalinks"] == []


UPDATE, GOOD = "/update?round=2&datalink=4", encoded(MODEL)
BAD = {
    "an old round": ("/update?round=0&datalink=4", GOOD, 409, "round 0 must be open"),
    "a later round": ("/update?round=3&datalink=4", GOOD, 409, "has received no round 3 yet"),
    "no round": ("/update?datalink=4", GOOD, 400, "round must be given"),
    "a wrong round": ("/update?round=-2&datalink=4", GOOD, 400, "round must be a whole number"),
    "no data link": ("/update?round=2", GOOD, 400, "datalink must be given"),
    "another data link": ("/update?round=2&datalink=5", GOOD, 400, "one of those drawn, [4, 7]"),
    "a truncated file": (UPDATE, GOOD[:-3], 400, "must be a whole safetensors file"),
    "no file": (UPDATE, b"", 400, "must be a whole safetensors file"),
    "NaN": (UPDATE, encoded({**MODEL, "b": np.float32("nan")}), 400, "'b' must be finite"),
    "an unknown name": (UPDATE, encoded({**MODEL, "v": np.zeros(1)}), 400, "got ['v']"),
    "a shape": (UPDATE, encoded({**MODEL, "b": np.zeros(1, np.float32)}), 400, "float32[]"),
    "a type": (UPDATE, encoded({**MODEL, "b": np.float64(0)}), 400, "got 'float64[]'"),
    "a large file": (UPDATE, bytes(2**17), 413, "must have at most"),
}


@pytest.mark.parametrize("wrong", BAD)
def test_a_wrong_update_is_refused_and_nothing_is_lost(opened, wrong):
    exchange, address = opened
    path, content, expected, words = BAD[wrong]
    status, body = ask(address, path, "PUT", content)
    assert status == expected and words in json.loads(body)["error"]
    assert ask(address, UPDATE, "PUT", GOOD)[0] == 200
    assert exchange.close(exchange.task()) == {4: GOOD}


def test_a_second_update_is_refused_and_the_first_stays(opened):
    exchange, address = opened
    other = encoded({**MODEL, "b": np.float32(9)})
    assert ask(address, UPDATE, "PUT", GOOD)[0] == 200
    status, body = ask(address, UPDATE, "PUT", other)
    assert status == 409 and "must get one update" in json.loads(body)["error"]
    assert exchange.close(exchange.task()) == {4: GOOD}


@pytest.mark.parametrize("token", ["", "another", "ä"])
@pytest.mark.parametrize("path", ["/project", "/model", "/openapi.json", "/"])
def test_a_wrong_token_is_refused(opened, token, path):
    status, body = ask(opened[1], path, token=token.encode("utf-8").decode("latin-1"))
    assert status == 401 and json.loads(body) == {"error": "the token must be that of the gateway"}


def test_a_port_in_use_is_named(opened):
    exchange, address = opened
    port = int(address.rpartition(":")[2])
    with pytest.raises(ValueError, match=f"port must be free on 127.0.0.1, got {port}"):
        server_of(exchange, TOKEN, port)


def test_a_page_of_another_host_is_refused(opened):
    assert ask(opened[1], "/project", Host="elsewhere.example")[0] == 400


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"{", "the body must be JSON"),
        (b"[]", "the body must be an object of scores, round, datalink"),
        (b'{"scores": {"a": NaN}}', "score 'a' must be a finite number"),
        (b'{"scores": {"a": 1' + b"0" * 400 + b"}}", "score 'a' must be a finite number"),
        (b'{"scores": {"\\ud800": 1}}', "must have a name of 1 to 100 printable letters"),
        (b'{"scores": [1]}', "scores must be 1 to 100 numbers by name"),
        (b'{"scores": null}', "scores must be 1 to 100 numbers by name"),
        (b'{"scores": "a"}', "scores must be 1 to 100 numbers by name"),
        (b'{"scores": {"a": "1"}}', "score 'a' must be a finite number"),
        (b'{"scores": {"a": 1}, "datalink": "4"}', "datalink must be an integer"),
        (b'{"scores": {"a": 1}, "round": 1}', "be one that this node has received"),
        (b'{"scores": {"a": 1}, "round": "1"}', "round must be an integer"),
    ],
)
def test_wrong_scores_are_refused(opened, body, words):
    exchange, address = opened
    before = exchange.scores()
    status, answer = ask(address, "/scores", "POST", body)
    assert status == 400 and words in json.loads(answer)["error"]
    assert exchange.scores() == before


def test_a_model_that_was_not_received_is_not_found(opened):
    status, body = ask(opened[1], "/model?round=1")
    assert status == 404 and "no model in round 1" in json.loads(body)["error"]


def test_before_the_first_round_there_is_nothing_to_do(tmp_path):
    with served(Exchange(tmp_path / FOLDER)) as address:
        assert json.loads(ask(address, "/project")[1])["current_round"] is None
        assert ask(address, "/model")[0] == 409
        assert ask(address, UPDATE, "PUT", GOOD)[0] == 409


SHELL = """
ask() { curl --silent --show-error --fail --header "Authorization: Bearer $TOKEN" "$@"; }
ask "$ADDRESS/model?round=$1" --output "$2/model.safetensors"
"$PYTHON" "$2/train.py" "$2/model.safetensors" "$2/data-$3.npz" "$2/trained.safetensors"
ask --json '{"scores": {"loss": 0.25}}' "$ADDRESS/scores" > /dev/null
ask --upload-file "$2/trained.safetensors" "$ADDRESS/update?round=$1&datalink=$3" > /dev/null
"""
# Without this package, as another language would.
TRAIN = """
import sys
import numpy as np
from safetensors.numpy import load_file, save_file
model, data = load_file(sys.argv[1]), np.load(sys.argv[2])
x, y = data["x"], data["y"]
if len(y):
    error = (1 / (1 + np.exp(-(x @ model["w"] + model["b"]))) - y).astype(np.float32)
    model["b"] = np.asarray(model["b"] - np.float32(0.3) * error.mean(), np.float32)
    model["w"] = np.asarray(model["w"] - np.float32(0.3) * (error @ x / len(y)), np.float32)
save_file(model, sys.argv[3])
"""


@telling
@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl")
def test_a_shell_script_with_curl_and_one_with_numpy_take_part_beside_one_of_ours(tmp_path):
    by_shell, by_script = 13, 11
    data, is_done = make_data(), threading.Event()
    (tmp_path / "train.py").write_text(TRAIN)
    there = federated(tmp_path, scripted=(by_shell, by_script))
    exchange = Exchange(tmp_path / str(by_shell) / FOLDER)

    def loop():
        names = {"ADDRESS": address, "TOKEN": TOKEN, "PYTHON": sys.executable}
        while not is_done.is_set():
            found = json.loads(ask(address, "/project")[1])
            for link in found["datalinks"]:
                np.savez(tmp_path / f"data-{link}.npz", **data.client(link))
                words = [str(found["current_round"]), str(tmp_path), str(link)]
                subprocess.run(
                    ["bash", "-ec", SHELL, "script", *words],
                    check=True,
                    env=os.environ | names,
                )
            time.sleep(0.1)

    simulated = simulation(make(), data, of_cohorts())
    state, record, _ = simulated.run(simulated.init(key()), key(), ROUNDS)
    with served(exchange) as address, script_of(tmp_path / str(by_script), numpy_step):
        join = in_thread(loop)
        found, charged, _ = there.run(there.init(key()), key(), ROUNDS)
        is_done.set()
        join()
    assert np.any(record.clients == 5) and len(exchange.scores()) == np.sum(record.clients == 5)
    np.testing.assert_array_equal(charged.fate, record.fate)
    for x, y in zip(jax.tree.leaves(found.server), jax.tree.leaves(state.server), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=1e-6)


def test_the_command_prints_address_and_token_and_serves_until_it_ends(
    fedjax_dp, monkeypatch, tmp_path
):
    answers = []

    def run(self, sockets):
        (own,) = sockets
        answers.append((own.getsockname(), isinstance(self.config.app, fastapi.FastAPI)))
        own.close()

    monkeypatch.setattr(uvicorn.Server, "run", run)
    words = ("gateway", "--state-dir", tmp_path, "--port", 0, "--json")
    missing = tmp_path / "missing"
    status, _, said = fedjax_dp("gateway", "--state-dir", missing, "--port", 0)
    assert status == 2 and "state-dir must be a folder" in said
    assert not missing.exists()
    status, printed, said = fedjax_dp(*words)
    assert status == 0
    [((host, port), is_app)] = answers
    assert host == "127.0.0.1" and is_app
    assert json.loads(printed)["address"] == f"http://127.0.0.1:{port}"
    token = (tmp_path / "project" / "token").read_text()
    assert f"token {token}\n" in said and len(token) >= 43
    assert (tmp_path / "project" / "token").stat().st_mode & 0o077 == 0
    assert fedjax_dp("gateway", "--state-dir", tmp_path, "--port", 70000)[0] == 2
