"""Nodes with data of their own: a server without records plays the rounds of the simulation."""

import json

import jax
import numpy as np
import pytest
from flwr.app import Message
from marks import telling

from fedjax_dp.experiment import load_config, load_run, run
from fedjax_dp.experiment.assembly.own_data import Registered
from fedjax_dp.flower import OnFlower, client_app_of, run_on
from fedjax_dp.flower.apps import _options
from fedjax_dp.flower.grid import registered
from fedjax_dp.flower.node import DATA
from fedjax_dp.flower.packets import Packet
from fedjax_dp.flower.testing import InProcess

pytest.importorskip("pyarrow")
HOSPITALS, SIZES = ("east", "north", "west"), (40, 25, 60)
TOML = """
[run]
rounds = 3
evaluate_every = 1
checkpoint_every = 1

[data]
name = "table"
partition = "natural"
num_clients = 3
client_test_share = 0

[data.options]
path = "{folder}/hospital-*.csv"
test_path = "{folder}/public.csv"
clients_are_files = true
label = "ill"
scaling = "range"
ranges = {{ age = [0, 110], pressure = [60, 240] }}
categories = {{ ill = ["no", "yes"] }}

[training]
batch_size = 8
num_epochs = 1

[algorithm]
name = "dp_sgd"

[privacy.record]
epsilon = 4
"""


def write_table(path, seed, rows, columns="age,pressure,ill"):
    rng = np.random.default_rng(seed)
    lines = [columns]
    for _ in range(rows):
        age, pressure = rng.integers(20, 95), rng.integers(80, 200)
        cells = {"age": age, "pressure": pressure, "ill": "yes" if age > 60 else "no", "more": 1}
        lines.append(",".join(str(cells[name]) for name in columns.split(",")))
    path.write_text("\n".join(lines) + "\n")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a table of each hospital, a public one, and the experiment."""
    place = tmp_path_factory.mktemp("hospitals")
    for seed, (name, rows) in enumerate(zip(HOSPITALS, SIZES, strict=True)):
        write_table(place / f"hospital-{name}.csv", seed, rows)
    write_table(place / "public.csv", 9, 50)
    (place / "experiment.toml").write_text(TOML.format(folder=place))
    # Neither a server nor a node can read what `path` names here.
    (place / "deployed.toml").write_text(TOML.format(folder="/nowhere"))
    return place


def grid_of(
    folder, toml="deployed.toml", files=None, change=lambda sent, reply: [reply], state=None, **more
):
    def states(i):
        return {} if state is None else {"state-dir": str(state / str(i))}

    files = files or {i: folder / f"hospital-{name}.csv" for i, name in enumerate(HOSPITALS)}
    nodes = {
        i + 7: {"clients": str(i), "data": str(file), "keys": "parity", **more, **states(i)}
        for i, file in files.items()
    }
    return InProcess(client_app_of(folder / toml), nodes, change)


def deploy(folder, output, state, change=lambda sent, reply: [reply]):
    config = load_config(
        str(folder / "deployed.toml"), [f"--data.options.test_path={folder}/public.csv"]
    )
    grid = grid_of(folder, change=change, state=state)
    return run_on(grid, config, output, keys="parity", own_data=True)


@telling
def test_a_server_without_records_ends_where_the_simulation_with_all_ends(folder, tmp_path):
    asked = []

    def note(sent, reply):
        asked.append(sent.metadata.message_type)
        return [reply]

    outcome = deploy(folder, tmp_path / "deployed", tmp_path / "states", note)
    simulated = run(load_config(str(folder / "experiment.toml"), []), tmp_path / "simulated")
    assert asked[:3] == ["query.data"] * 3
    for name in ("epsilon", "test_accuracy", "num_clients"):
        assert outcome.summary[name] == simulated.summary[name], name
    done = load_run(tmp_path / "deployed")
    assert done.experiment.population.train.sizes.tolist() == list(SIZES)
    assert not done.experiment.population.has_class_labels
    models = (load_run(tmp_path / name).params for name in ("deployed", "simulated"))
    for x, y in zip(*map(jax.tree.leaves, models), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=1e-6)
    # Noise was calibrated for the size of each client, on the server and on each node.
    noise = np.asarray(done.hyper.local.noise_multiplier)
    assert len(set(noise.tolist())) == len(SIZES)
    place = tmp_path / "deployed"
    marks = json.loads((place / "privacy.json").read_text())["files"]
    assert marks.keys() == {path.name for path in place.iterdir()}
    assert marks["nodes.json"] == "secret" and "`nodes.json`" in (place / "privacy.md").read_text()
    labels = (place / "partition.txt").read_text()
    assert "yes" not in labels and "classes" not in labels


def test_the_server_waits_for_all_clients_and_logs_which_are_missing(folder, caplog):
    grid = grid_of(folder)
    everyone, online = list(grid.get_node_ids()), []

    def appearing():
        online.append(everyone[len(online)])
        return list(online)

    grid.get_node_ids = appearing
    with caplog.at_level("INFO", logger="flwr"):
        found = registered(grid, 3, pause=0)
    assert found.sizes == SIZES and not found.validation_sizes
    assert found.kind["arrays"] == {"x": ["float32", [2]], "y": ["int32", []]}
    assert "1 of 3 clients are registered; missing: 1, 2" in caplog.text
    assert "all 3 clients are registered, on 3 nodes" in caplog.text


def kind_with(**parts):
    kind = {"arrays": {"x": ["float32", [2]], "y": ["int32", []]}, "task": "classification"}
    names = {"num_classes": 2, "class_names": ["no", "yes"], "feature_names": ["age", "pressure"]}
    return json.dumps({**kind, **names, **parts})


BAD_ANSWERS = {
    "a negative size": {"sizes": [-5]},
    "a large size": {"sizes": [2**40]},
    "a text for a size": {"sizes": ["x"]},
    "no list": {"sizes": 30},
    "a size too many": {"sizes": [30, 1]},
    "a repeated client": {"clients": [0, 0], "sizes": [4, 4]},
    "a kind of another form": {"kind": "["},
    "no data of its own": {"kind": "{}"},
    "classes of half a number": {"kind": kind_with(num_classes=2.5)},
    "classes below zero": {"kind": kind_with(num_classes=-1)},
    "names that are none": {"kind": kind_with(feature_names=[1])},
    "a shape of half a number": {"kind": kind_with(arrays={"y": ["int32", [0.5]]})},
    "a negative shape": {"kind": kind_with(arrays={"y": ["int32", [-1]]})},
    "a huge shape": {"kind": kind_with(arrays={"y": ["int32", [2**20, 2**20]]})},
    "arrays of objects": {"kind": kind_with(arrays={"y": ["object", []]})},
    "a size of true": {"sizes": [True]},
    "half a client": {"clients": [0.0]},
}


@pytest.mark.parametrize("wrong", BAD_ANSWERS)
def test_a_node_whose_answer_does_not_fit_is_named_and_asked_again(folder, wrong):
    asked = []

    def change(sent, reply):
        if sent.metadata.dst_node_id == 7:
            asked.append(7)
            if len(asked) == 1:
                reply.content.config_records["facts"].update(BAD_ANSWERS[wrong])
        return [reply]

    grid = grid_of(folder, change=change)
    with pytest.warns(UserWarning, match=r"node 7 is asked again: (sizes|clients|kind[\w.]*) must"):
        assert registered(grid, 3, pause=0).sizes == SIZES
    assert len(asked) == 2


def test_a_text_is_no_switch_and_no_number():
    assert _options({"own-data": True}) == {"own_data": True, "timeout": 600}
    with pytest.raises(ValueError, match="own-data must be true or false, got 'false'"):
        _options({"own-data": "false"})
    with pytest.raises(ValueError, match="timeout must be a number of seconds, got 'ten'"):
        _options({"timeout": "ten"})


def test_wrong_options_are_refused_before_nodes_are_waited_for(folder):
    config, grid = load_config(str(folder / "deployed.toml")), InProcess(None, {})
    grid.get_node_ids = None
    for wrong in ({"keys": "devise"}, {"timeout": 0.0}, {"scores": "all"}):
        with pytest.raises(ValueError, match=f"{next(iter(wrong))} must be"):
            run_on(grid, config, folder / "run", own_data=True, **wrong)
    for word, message in (
        ("--asynchronous.concurrency=2", "concurrency must be left out without a clock"),
        (
            "--run.keep=best:test_loss",
            "run.keep must be 'last' in a deployment, .*'best:test_loss'",
        ),
        ("--data.unseen_client_share=0.5", r"share must be 0, since nodes read .* got 0\.5"),
        ("--data.unseen_clients=['a']", r"unseen_clients must be \[\], since .* got \['a'\]"),
        (
            "--model.class_weights=balanced",
            "class_weights must be numbers, since nodes .*'balanced'",
        ),
    ):
        other = load_config(str(folder / "deployed.toml"), ["--run.secret=true", word])
        with pytest.raises(ValueError, match=message):
            run_on(grid, other, folder / "run", own_data=True)


def test_columns_in_another_order_are_refused(folder, tmp_path):
    write_table(tmp_path / "other.csv", 3, 20, "pressure,age,ill")
    files = {0: folder / "hospital-east.csv", 1: tmp_path / "other.csv"}
    message = r"feature_names of the data of node 8, as of node 7, must be \['age', 'pressure'\]"
    with pytest.raises(ValueError, match=message):
        registered(grid_of(folder, files=files), 3, pause=0)


def test_a_node_plays_an_experiment_of_its_own(folder, tmp_path):
    text = (folder / "deployed.toml").read_text()
    own = tmp_path / "own.toml"
    grid = grid_of(folder)
    grid.contexts[8].node_config["experiment"] = str(own)
    own.write_text(text.replace('path = "/nowhere/', 'path = "/elsewhere/'))
    assert registered(grid, 3, pause=0).sizes == SIZES
    grid = grid_of(folder)
    grid.contexts[8].node_config["experiment"] = str(other := tmp_path / "other.toml")
    other.write_text(text.replace('["no", "yes"]', '["yes", "no"]'))
    message = "class_names of the data of node 8, as of node 7, must be"
    with pytest.raises(ValueError, match=message):
        registered(grid, 3, pause=0)
    grid.contexts[8].node_config["experiment"] = "own.toml"
    (reply,) = grid.send_and_receive([Message(Packet().record(), 8, DATA)])
    assert "node-config experiment must be an absolute path" in reply.error.reason


def test_a_client_on_two_nodes_is_refused(folder):
    grid = grid_of(folder)
    grid.contexts[9].node_config["clients"] = "0"
    with pytest.raises(ValueError, match="client 0 must be on one node, but is on 7 already"):
        registered(grid, 3, pause=0)


BAD_FILES = {
    "of other columns": (
        "age,ill",
        {},
        "ranges must name columns of the data, and 'pressure' is none",
    ),
    "of more clients than the node has": ("", {"clients": "0-1"}, "must hold the 2 clients"),
    "at a relative path": ("", {"data": "east.csv"}, "node-config data must be an absolute path"),
    "with a test part": ("", {}, "must hold no test part: give the server a public test_path"),
    "encoded by its own values": ("", {}, "must be encoded by public facts alone"),
}


@pytest.mark.parametrize("wrong", BAD_FILES)
def test_a_file_that_does_not_fit_is_refused_by_its_node(folder, tmp_path, wrong):
    columns, config, message = BAD_FILES[wrong]
    write_table(tmp_path / "east.csv", 0, 40, columns or "age,pressure,ill")
    text = (folder / "deployed.toml").read_text()
    if "test part" in wrong:
        text = text.replace('label = "ill"', 'label = "ill"\ntest_fraction = 0.2')
        text = text.replace("test_path", "# test_path")
    if "own values" in wrong:
        text = text.replace("categories = ", "# ")
    (tmp_path / "experiment.toml").write_text(text)
    grid = grid_of(tmp_path, "experiment.toml", {0: tmp_path / "east.csv"}, **config)
    (reply,) = grid.send_and_receive([Message(Packet().record(), 7, DATA)])
    assert message in reply.error.reason.replace("\\'", "'")


def test_a_resumed_run_waits_for_no_node_and_holds_no_records(folder, tmp_path):
    (tmp_path / "checkpoint").mkdir()
    kind = registered(grid_of(folder), 3, pause=0).kind
    Registered(kind, [4, 10**9, 6]).write(tmp_path / "checkpoint" / "registered.json")
    config = load_config(
        str(folder / "deployed.toml"), [f"--data.options.test_path={folder}/public.csv"]
    )
    nobody = InProcess(client_app_of(folder / "deployed.toml"), {})
    there = OnFlower(nobody, keys="parity", own_data=True).population(config, tmp_path)
    assert there.train.sizes.tolist() == [4, 10**9, 6] and there.test.num_examples == 50
    assert all(not any(x.strides) for x in there.train.examples.values())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--data.partition=iid"], "data.partition must be 'natural', since nodes read data of"),
        (["--data.client_test_share=0.2"], "data.client_test_share must be 0"),
        (["--data.public_examples=5"], "data.public_examples must be 0"),
        (["--evaluation.training=true"], "evaluation.training must be False"),
        (["--evaluation.clusters=true"], "evaluation.clusters must be False"),
        (["--evaluation.personal=after_local"], "evaluation.personal must be 'received', since"),
        (["--algorithm.name=centralized"], "algorithm.name must pool no data"),
    ],
)
def test_an_experiment_that_needs_records_on_the_server_is_refused(folder, words, message):
    config = load_config(str(folder / "deployed.toml"), words)
    with pytest.raises(ValueError, match=message):
        OnFlower(grid_of(folder), own_data=True).population(config, None)
