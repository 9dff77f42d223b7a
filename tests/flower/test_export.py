"""The exported app: files that Flower, Docker and its compose files can read."""

import io
import itertools
import pathlib
import sys
import tomllib
import zipfile
from types import SimpleNamespace

import numpy as np
import pytest
from marks import telling

from fedjax_dp.core.disclosure import GuardedError
from fedjax_dp.experiment import load_config
from fedjax_dp.experiment.reading.config_files import to_toml
from fedjax_dp.flower import write_app
from fedjax_dp.flower.apps import client_app_of, terms_of
from fedjax_dp.flower.plan import require_same
from fedjax_dp.flower.terms import clients_of, require_node_config, script_of

yaml = pytest.importorskip("yaml")
WORDS = ["--run.name", "A trial, 2", "--run.secret", "true"]


@pytest.fixture(scope="module")
def app(tmp_path_factory):
    folder = tmp_path_factory.mktemp("exported") / "app"
    return folder, write_app(load_config(None, WORDS), folder, "/runs/1")


def test_every_file_is_named_and_parses(app):
    folder, names = app
    assert sorted(names) == sorted(
        str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()
    )
    project = tomllib.loads((folder / "pyproject.toml").read_text())
    # Flower refuses to override a key that the app does not have.
    options = {"output": "/runs/1", "keys": "device", "timeout": 600.0}
    options |= {"own-data": False, "scores": "none"}
    assert project["tool"]["flwr"]["app"]["config"] == options
    components = project["tool"]["flwr"]["app"]["components"]
    for component in components.values():
        module, _, name = component.partition(":")
        source = (folder / f"{module.replace('.', '/')}.py").read_text()
        compile(source, module, "exec")
        assert f"{name} = " in source
    package = components["serverapp"].partition(".")[0]
    exported = load_config(str(folder / package / "experiment.toml"), [])
    assert exported == load_config(None, WORDS)


def test_flower_accepts_the_project(app):
    from flwr.cli.config_utils import load_and_validate

    load_and_validate(app[0] / "pyproject.toml", check_module=False)


def test_nodes_get_the_modules_and_the_configuration_alone(app):
    from flwr.cli.build import build_fab_from_disk

    with zipfile.ZipFile(io.BytesIO(build_fab_from_disk(app[0]))) as bundle:
        sent = {pathlib.PurePosixPath(name).name for name in bundle.namelist()}
    modules = {"__init__.py", "server.py", "client.py", "experiment.toml", "pyproject.toml"}
    assert sent == modules | {"compose.yaml", "CONTENT"}


def test_flwr_run_finds_the_server_of_a_trial(app, monkeypatch):
    from flwr.cli.flower_config import read_superlink_connection

    monkeypatch.setenv("FLWR_HOME", str(app[0] / ".flwr"))
    found = read_superlink_connection()
    assert (found.name, found.address, found.insecure) == ("trial", "127.0.0.1:8000", True)


def test_the_compose_file_has_a_server_and_three_nodes(app):
    services = yaml.safe_load((app[0] / "compose.yaml").read_text())["services"]
    nodes = [each for name, each in services.items() if name.startswith("node")]
    assert len(nodes) == 3 and "server" in services
    # Nothing authenticates a node of a trial.
    assert services["server"]["ports"] == ["127.0.0.1:8000:8000"]
    held = [clients_of(_node_config(each["command"]), 10) for each in nodes]
    assert sorted(itertools.chain(*held)) == list(range(10))
    assert all(each["build"]["args"]["BASE"] == "supernode" for each in nodes)
    arguments = (app[0] / "Dockerfile").read_text()
    assert "FROM flwr/${BASE}:" in arguments
    # One command takes any number of wheels.
    assert 'pip install --no-cache-dir wheels/*.whl "fedjax-dp[cli,flower' in arguments


def _node_config(command):
    words = command.partition("--node-config ")[2].strip().strip("'").split()
    pairs = (word.partition("=") for word in words)
    return {name: tomllib.loads(f"x = {value}")["x"] for name, _, value in pairs}


def test_a_folder_with_files_and_a_relative_output_are_refused(app, tmp_path):
    config = load_config(None, WORDS)
    with pytest.raises(ValueError, match="the folder of the app must be new or empty"):
        write_app(config, app[0], "/runs/1")
    with pytest.raises(ValueError, match="output must be an absolute path"):
        write_app(config, tmp_path / "other", "runs/1")
    with pytest.raises(ValueError, match="output must be outside the folder of the app"):
        write_app(config, tmp_path / "other", tmp_path / "x" / ".." / "other" / "run")


CLOCK = ("--clock.places=['here']", "--clock.seconds=[[0.1]]", "--clock.server=here")
CLOCK += ("--clock.clients=['here']",)
GROWING = ("--algorithm.name=retrained_averaging", "--data.num_clients=3")
GROWING += ("--algorithm.options.rows_per_round=5",)
IN_SHARES = (*GROWING, "--privacy.unit=record", "--training.sampler=full_batch")
IN_SHARES += ("--training.num_steps=3", "--model.options.gradient_bound=1.0")
FEDAVG = "--algorithm.name=fedavg"
PRIVATE = ("--algorithm.name=dp_fedavg", "--privacy.unit=client", "--privacy.relation=replace_one")
PRIVATE += ("--privacy.client.noise_multiplier=2", "--privacy.client.epsilon=none")
PRIVATE += ("--participation.sampler=fixed_size", "--participation.cohort_size=5")
NO_WRAPPER = "federation must have no wrapper to be deployed"
CLUSTERED = ("--algorithm.name=ifca", "--algorithm.options.num_models=2")
CLUSTERED += ("--data.partition=shifted_clusters", "--data.partition_options.cluster_sizes=[2, 1]")
CLUSTERED += ("--data.partition_options.samples_per_client=12",)
CLUSTERED += ("--data.partition_options.test_samples_per_client=30",)
REFUSED = {
    "a second message": (
        [
            "--algorithm.name=splitting",
            "--algorithm.options.form=centralised",
            "--training.learning_rate=0.5",
        ],
        "algorithm must have no second message",
    ),
    "a host step that reads states": (
        ["--algorithm.name=jump_start", "--data.client_validation_share=0.2"],
        "host_steps.reads_clients must be false in a federation",
    ),
    "acceleration": ([FEDAVG, "--acceleration.memory=2"], NO_WRAPPER),
    "a clock": ([FEDAVG, *CLOCK], NO_WRAPPER),
    "asynchronous rounds": ([FEDAVG, *CLOCK, "--asynchronous.concurrency=10"], NO_WRAPPER),
    "several servers": ([FEDAVG, "--communication.servers=[0, 1]"], NO_WRAPPER),
    "no server": ([FEDAVG, "--communication.serverless=true"], NO_WRAPPER),
    "clients that leave": ([*GROWING, "--leaving.tolerance=1"], NO_WRAPPER),
    "planned participations": (
        ["--privacy.unit=record", "--privacy.record.planned_participations=1"],
        NO_WRAPPER,
    ),
    "noise of a scale that the server sends": (
        [*IN_SHARES, "--algorithm.options.calibration=paper"],
        "keys must be parity, which trusts the server",
    ),
    **{
        f"what the server leaves out of {key}": (
            [*CLUSTERED, f"--{key}={value}"],
            rf"{key} must be left out in a deployment of ifca: the server evaluates a shared model "
            f"alone, and not that of each client, got {value.capitalize()}",
        )
        for key, value in [("evaluation.training", "true"), ("evaluation.clusters", "true")]
    },
    "models after local training": (
        ["--algorithm.name=ditto", "--evaluation.personal=after_local"],
        "evaluation.personal must be left out in a deployment of ditto",
    ),
    "metrics without a model": (
        ["--algorithm.name=local_only", "--run.metrics=['f1']"],
        r"run.metrics must be left out in .* evaluates nothing: it has no shared model, got \['f1'",
    ),
    "the best round": (
        [FEDAVG, "--run.keep=best:test_loss"],
        "run.keep must be 'last' in a deployment, .* got 'best:test_loss'",
    ),
    "masks and secret cohorts": (
        [*PRIVATE, "--secure_aggregation.form=masked"],
        "the aggregator must have no masks in a federation where secret cohorts",
    ),
}
PLAIN = ("--model.name=logistic_regression", "--run.secret=true", "--privacy.unit=none")
TABLE = (FEDAVG, "--data.name=table", "--data.options.path=/nowhere/*", "--data.options.label=y")


@pytest.mark.parametrize(
    "wrong", [pytest.param(n, marks=telling) if n.startswith("masks") else n for n in REFUSED]
)
def test_what_a_server_refuses_at_its_start_is_not_exported(wrong, tmp_path):
    words, message = REFUSED[wrong]
    with pytest.raises(ValueError, match=message):
        write_app(load_config(None, [*PLAIN, *words]), tmp_path / "app", "/runs/1")
    assert not (tmp_path / "app").exists()


def test_an_app_is_exported_where_its_data_are_not_with_a_warning(tmp_path):
    elsewhere = ([FEDAVG, "--data.name=cifar10", f"--data.data_dir={tmp_path}"], TABLE)
    for place, words in enumerate(elsewhere):
        with pytest.warns(UserWarning, match="the data cannot be read here"):
            write_app(load_config(None, [*PLAIN, *words]), tmp_path / str(place), "/runs/1")
    config = load_config(None, [*PLAIN, FEDAVG, "--data.num_clients=9999"])
    with pytest.raises(ValueError, match="num_clients must leave at least 1 of 1437 examples"):
        write_app(config, tmp_path / "other", "/runs/1")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "must hold clients, or partition-id and num-partitions"),
        ({"clients": "0-x"}, "must be numbers and ranges"),
        ({"clients": "-3"}, "must be numbers and ranges"),
        ({"clients": "x"}, "must be numbers and ranges"),
        ({"clients": "9,10"}, r"must be from 0 to 9, as the population has 10 clients, got '10'"),
        ({"clients": "0-99999999999"}, "must be from 0 to 9, .*, got '0-99999999999'"),
        ({"clients": "0-1" + "0" * 5000}, "must be numbers and ranges"),
        ({"partition-id": "1" * 5000, "num-partitions": 3}, "partition-id must be a whole number"),
        ({"clients": "4-3"}, "must be numbers and ranges"),
        ({"clients": "1", "partition-id": 0}, "partition-id and num-partitions, not both"),
        ({"partition-id": 0}, "must hold clients, or partition-id and num-partitions"),
        ({"partition-id": 3, "num-partitions": 3}, "partition-id must be from 0 to 2"),
        ({"partition-id": "a", "num-partitions": 3}, "partition-id must be a whole number"),
        ({"partition-id": 0, "num-partitions": 0}, "num-partitions must be at least 1"),
        ({"partition-id": 10, "num-partitions": 11}, "partition-id must be from 0 to 9"),
    ],
)
def test_a_node_without_clients_is_refused(config, message):
    with pytest.raises(ValueError, match=message):
        clients_of(config, 10)


def test_a_node_holds_the_clients_that_it_is_configured_with():
    assert clients_of({"clients": "0-2, 9"}, 10) == [0, 1, 2, 9]
    assert clients_of({"partition-id": 1, "num-partitions": 4}, 10) == [1, 5, 9]


def test_a_node_config_says_that_a_script_trains():
    assert script_of({"state-dir": "/s"}, 5) is None
    script = script_of({"training": "script", "state-dir": "/s"}, 5)
    assert (str(script.folder), script.rounds) == ("/s/project", 5)
    assert not script.sends_scores
    wanted = {"training": "script", "state-dir": "/s", "scores": "exact"}
    assert script_of(wanted, 5).sends_scores
    with pytest.raises(ValueError, match="node-config must hold state-dir"):
        script_of({"training": "script"}, 5)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"state_dir": "/s"}, "a name in node-config must be one of .*; did you mean 'state-dir'"),
        ({"state-dir": "states"}, "node-config state-dir must be an absolute path, got 'states'"),
        ({"state-dir": ""}, "node-config state-dir must be an absolute path, got ''"),
        ({"experiment": "a.toml"}, "node-config experiment must be an absolute path"),
        ({"keys": "devise"}, "node-config keys must be one of device, parity, got 'devise'"),
        ({"training": "scripts"}, "node-config training must be one of package, script"),
        ({"scores": "all"}, "node-config scores must be one of exact, none"),
    ],
)
def test_a_node_config_that_is_misspelt_or_relative_is_refused(config, message):
    require_node_config({"clients": "0", "data": "/a.csv", "scores": "exact"})
    with pytest.raises(ValueError, match=message):
        require_node_config({"clients": "0", **config})


def test_a_node_requires_the_budget_and_the_sections_of_its_configuration():
    def of(*words):
        return terms_of(load_config(None, ["--privacy.record.epsilon", "3", *words]))

    own = of()
    assert (own.budget.epsilon, own.budget.relation) == (3, "zero_out")
    assert terms_of(load_config(None, ["--privacy.unit", "none"])).budget is None
    # What does not change a client's round, and where files are.
    files = ("--data.data_dir", "/data", "--run.rounds", "7", "--execution.clients_per_chunk", "1")
    require_same(own.described, of(*files).described)
    for words in (
        ("--privacy.record.per_layer", "true"),
        ("--training.sampler", "full_batch"),
        ("--data.options.test_fraction", "0.3"),
    ):
        name = words[0].removeprefix("--").partition(".")[0]
        with pytest.raises(ValueError, match=f"section {name} of the server must be"):
            require_same(own.described, of(*words).described)
    # A server reads neither the names of a node's clients nor its folders.
    named = of("--data.unseen_clients", "['ann']").described
    held = {**own.described, "source of /home/ann/net.py:net": "ab"}
    damaged = {**named, "section data": "[1"}
    for mine, theirs in ((named, own.described), (named, damaged), (held, own.described)):
        with pytest.raises(GuardedError, match="ann") as refused:
            require_same(mine, theirs)
        assert "ann" not in refused.value.public and "server" in refused.value.public
    with pytest.raises(GuardedError) as refused:
        require_same(named, own.described)
    assert refused.value.public == "section data of the server must be as here, in unseen_clients"


def test_a_node_requires_the_files_of_parts_that_are_not_of_the_package(tmp_path, monkeypatch):
    """Two machines have a module of one name."""
    source = "def optimizer(learning_rate):\n    return optax.sgd({} * learning_rate)\n"
    described = []
    for factor in (1, 1, 2):
        machine = tmp_path / f"machine-{len(described)}"
        machine.mkdir()
        (machine / "own_optimizers.py").write_text("import optax\n" + source.format(factor))
        with monkeypatch.context() as patched:
            patched.syspath_prepend(machine)
            config = load_config(None, ["--training.optimizer=own_optimizers:optimizer"])
            described.append(terms_of(config).described)
        sys.modules.pop("own_optimizers")
    server, same, other = described
    require_same(server, same)
    with pytest.raises(ValueError, match="source of own_optimizers:optimizer of the server"):
        require_same(server, other)


def test_a_node_requires_the_frozen_parameters_of_the_server(tmp_path, monkeypatch):
    """Nodes have files of one name."""
    monkeypatch.setattr("fedjax_dp.flower.apps.client_app", lambda build, data, terms: terms)
    described = []
    for value in (0, 0, 1):
        arrays = {
            "params/Dense_0/kernel": np.full((64, 10), value),
            "params/Dense_0/bias": np.zeros(10),
        }
        np.savez(tmp_path / "base.npz", **arrays)
        words = [
            "--model.frozen=['params/Dense_0/kernel']",
            f"--model.pretrained={tmp_path / 'base.npz'}",
        ]
        path = tmp_path / "experiment.toml"
        path.write_text(
            to_toml(load_config(None, [*words, "--privacy.unit=none", "--algorithm.name=fedavg"]))
        )
        terms = client_app_of(path)
        described.append(terms(SimpleNamespace(experiment=str(path), kind=""), None).described)
    server, same, other = described
    require_same(server, same)
    with pytest.raises(ValueError, match="SHA-256 of frozen parameters of the server must be"):
        require_same(server, other)
