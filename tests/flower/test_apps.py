"""An experiment on nodes: the run folder, ε and statement of a simulation, also after a crash."""

import json
import shutil
import time
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from federations import idle_grid
from marks import slow, telling
from test_scripts import script_of

from fedjax_dp.experiment import Watcher, evaluate_run, load_config, load_run, report, resume, run
from fedjax_dp.experiment.assembly.assemble import assemble
from fedjax_dp.experiment.reading.config_files import to_toml
from fedjax_dp.flower import OnFlower, client_app_of, project, run_on, write_app
from fedjax_dp.flower.exchange import FOLDER, Exchange
from fedjax_dp.flower.testing import InProcess

WORDS = (
    *("--run.rounds", "3", "--run.evaluate_every", "1", "--run.checkpoint_every", "1"),
    *("--algorithm.name", "dp_fedavg", "--privacy.unit", "client"),
    # Not calibrated: one round more would exceed a budget.
    *("--privacy.client.noise_multiplier", "2", "--privacy.client.epsilon", "none"),
    *("--privacy.client.clip_norm", "0.5", "--data.num_clients", "20"),
    *("--participation.sampler", "poisson", "--participation.cohort_size", "10"),
)
SECRET = ("--run.secret", "true")
NUM_NODES = 3


class Crash(RuntimeError):
    """The server's process ends."""


@pytest.fixture(scope="module")
def config():
    return load_config(None, list(WORDS))


@pytest.fixture(scope="module")
def app(config, tmp_path_factory):
    path = tmp_path_factory.mktemp("app") / "experiment.toml"
    path.write_text(to_toml(config))
    return client_app_of(path)


def grid_of(app, change=lambda sent, reply: [reply], keys="parity"):
    nodes = {
        i + 1: {"partition-id": i, "num-partitions": NUM_NODES, "keys": keys}
        for i in range(NUM_NODES)
    }
    return InProcess(app, nodes, change)


def lines_of(path):
    return [json.loads(line) for line in path.read_text().split("\n") if line]


def params_of(folder):
    return jax.tree.leaves(load_run(folder).params)


@pytest.fixture(scope="module")
def whole(app, config, tmp_path_factory):
    """A run that was never interrupted, and its folder."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    return run_on(grid_of(app), config, folder, keys="parity"), folder


@telling
def test_a_deployed_experiment_ends_where_its_simulation_ends(whole, config, tmp_path):
    outcome, folder = whole
    simulated = run(config, tmp_path / "run")
    assert outcome.summary["epsilon"] == simulated.summary["epsilon"]
    assert outcome.summary["rounds"] == 3
    assert outcome.summary["communication"] == simulated.summary["communication"]
    for x, y in zip(params_of(folder), params_of(tmp_path / "run"), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=1e-6)


@slow
def test_a_run_whose_client_states_are_on_nodes_is_loaded_without_them(tmp_path):
    words = ["--algorithm.name", "ditto", "--run.rounds", "1", "--data.num_clients", "4"]
    words += ["--model.name", "logistic_regression", "--privacy.unit", "none"]
    config = load_config(None, words)
    (path := tmp_path / "experiment.toml").write_text(to_toml(config))
    run_on(grid_of(client_app_of(path)), config, tmp_path / "run", keys="parity")
    loaded = load_run(tmp_path / "run")
    assert int(loaded.state.round) == 1
    with pytest.raises(ValueError, match="client must be none for a run on nodes"):
        loaded.params_of(0)
    found = evaluate_run(loaded)
    assert "test_accuracy" in found and "mean_client_accuracy" not in found


def test_a_server_refuses_or_reports_what_it_does_not_evaluate_before_nodes_are_asked():
    words = ["--algorithm.name=ditto", "--data.num_clients=4", "--privacy.unit=none"]
    words += ["--model.name=logistic_regression"]
    server = OnFlower(InProcess(None, {}))
    experiment = assemble(load_config(None, words))
    (note,) = set(server.deploy(experiment).population.notes) - set(experiment.population.notes)
    assert note.startswith("test data of clients are not used")
    section = experiment.config.evaluation.model_copy(update={"training": True})
    config = experiment.config.model_copy(update={"evaluation": section})
    with pytest.raises(ValueError, match=r"evaluation\.training must be left out in a deployment"):
        server.deploy(experiment._replace(config=config))
    section = config.run.model_copy(update={"metrics": ["f1"]})
    scored = experiment.config.model_copy(update={"run": section})
    untested = experiment._replace(
        config=scored, population=experiment.population._replace(test=None)
    )
    with pytest.raises(ValueError, match="evaluates nothing: it has no test data, got"):
        server.deploy(untested)
    # The server evaluates the shared model.
    server.deploy(experiment._replace(config=scored))


@telling
def test_a_run_of_shared_models_is_loaded_wherever_a_simulation_would_store_states(tmp_path):
    words = ["--algorithm.name=scaffold", "--run.rounds=1", "--data.num_clients=3"]
    words += ["--privacy.unit=none", "--execution.placement=disk"]
    config = load_config(None, words)
    # Without clients on a node nothing is compiled for one.
    outcome = run_on(idle_grid(), config, tmp_path / "run")
    loaded = load_run(outcome.folder)
    assert evaluate_run(loaded)["test_accuracy"] == outcome.summary["test_accuracy"]
    x, y = (jax.tree.leaves(params) for params in (loaded.params, loaded.params_of(1)))
    assert all(map(np.array_equal, x, y))


@telling
def test_the_statement_names_what_a_deployment_trusts(whole, app, config, tmp_path):
    _, folder = whole
    text = (folder / "privacy.md").read_text()
    assert "The server made the keys of all clients" in text and "SuperLink" in text
    run_on(grid_of(app, keys="device"), load_config(None, [*WORDS, *SECRET]), tmp_path / "run")
    text = (tmp_path / "run" / "privacy.md").read_text()
    assert "Each node draws the keys of its clients from its operating system." in text


@telling
def test_a_server_that_crashed_resumes_to_the_same_bits_and_charges_the_lost_round(
    whole, app, config, tmp_path
):
    rounds = set()

    def crash(sent, reply):
        if sent.metadata.message_type == "train":
            rounds.add(sent.metadata.group_id)
            if len(rounds) == 3:
                raise Crash
        return [reply]

    folder = tmp_path / "run"
    with pytest.raises(Crash):
        run_on(grid_of(app, crash), config, folder, keys="parity")
    outcome = run_on(grid_of(app), config, folder, keys="parity")
    assert outcome.summary["rounds"] == 3
    for x, y in zip(params_of(folder), params_of(whole[1]), strict=True):
        np.testing.assert_array_equal(x, y)
    # Four rounds were sent, one of them twice.
    assert outcome.summary["epsilon"] > whole[0].summary["epsilon"]


class CrashAfter(Watcher):
    """Ends the server's process after a round, before it is saved."""

    def __init__(self, rounds):
        self._rounds = rounds

    def done(self, rounds, row):
        if rounds == self._rounds:
            raise Crash


@pytest.fixture(scope="module")
def small():
    """An experiment for nodes without clients, which is compiled for none."""
    words = ["--model.name", "logistic_regression", "--run.plots", "false", "--run.rounds", "2"]
    rare = ["--run.checkpoint_every", "10", "--run.evaluate_every", "10"]
    return load_config(None, [*WORDS, *SECRET, *words, *rare])


@pytest.fixture(scope="module")
def crashed(small, tmp_path_factory):
    """The folder of a run whose server crashed after the last round, before it was saved."""
    folder = tmp_path_factory.mktemp("crashed") / "run"
    with pytest.raises(Crash):
        run_on(idle_grid(), small, folder, CrashAfter(2), keys="parity", scores="exact")
    return folder


@telling
def test_each_round_is_saved_before_the_next_and_one_that_is_played_again_draws_anew(
    crashed, small, tmp_path
):
    shutil.copytree(crashed, folder := tmp_path / "run")
    outcome = run_on(idle_grid(), small, folder)
    sent = lines_of(folder / "checkpoint" / "sent.jsonl")
    assert [line["round"] for line in sent] == [0, 1, 1]
    # Cohorts are equal by chance once in a million runs.
    assert sent[1]["clients"] != sent[2]["clients"]
    assert outcome.summary["rounds"] == 2
    # What held before the crash is stated too.
    assert outcome.summary["deployment"] == {"keys": "parity", "scores": "exact"}
    assert [line["keys"] for line in sent] == ["parity", "parity", "device"]


@telling
@pytest.mark.filterwarnings("ignore:node 1 failed")
def test_a_run_that_all_nodes_refuse_sends_nothing_and_starts_once_one_accepts(small, tmp_path):
    folder = tmp_path / "run"
    message = "a node must accept the plan, got from node 1: .*limit of the server must be '3'"
    with pytest.raises(ValueError, match=message):
        run_on(idle_grid("limit of the server must be '3' as here"), small, folder)
    assert not lines_of(folder / "checkpoint" / "sent.jsonl")
    assert run_on(idle_grid(), small, folder).summary["rounds"] == 2


def test_a_run_that_is_resumed_without_any_node_sends_nothing(crashed, small, tmp_path):
    shutil.copytree(crashed, folder := tmp_path / "run")
    before = (folder / "checkpoint" / "sent.jsonl").read_text()
    with pytest.raises(
        ValueError, match=r"a node must be connected within 0\.01 seconds of the st"
    ):
        run_on(InProcess(None, {}), small, folder, timeout=0.01)
    assert (folder / "checkpoint" / "sent.jsonl").read_text() == before


def test_a_run_that_collected_scores_before_is_not_released(crashed, small, tmp_path):
    shutil.copytree(crashed, folder := tmp_path / "run")
    section = small.run.model_copy(update={"release": "private"})
    with pytest.raises(ValueError, match="scores must be none in a run whose results are rel"):
        run_on(InProcess(None, {}), small.model_copy(update={"run": section}), folder)


def test_a_changed_configuration_is_not_taken_for_that_of_the_run(crashed, tmp_path, small):
    shutil.copytree(crashed, folder := tmp_path / "run")
    section = small.training.model_copy(update={"learning_rate": 7.0})
    other = small.model_copy(update={"training": section})
    with pytest.raises(ValueError, match=r"config\.toml must be as it was when the run started"):
        run_on(InProcess(None, {}), other, folder)


def test_a_run_whose_journal_is_gone_is_not_resumed(crashed, small, tmp_path):
    shutil.copytree(crashed, folder := tmp_path / "run")
    (folder / "checkpoint" / "sent.jsonl").unlink()
    with pytest.raises(ValueError, match=r"sent\.jsonl must hold all 1 rounds"):
        run_on(InProcess(None, {}), small, folder)


def test_other_commands_know_a_deployed_run(crashed):
    with pytest.raises(ValueError, match="the deployed run must be resumed where its rounds run"):
        resume(crashed)
    page = report(crashed, crashed.parent / "page.html").file.read_text()
    assert f"flwr run with the output {crashed} resumes it" in page
    # Both rounds were sent, and one was saved.
    loaded = load_run(crashed)
    assert int(loaded.state.round) == 1
    assert loaded.accounting.ledgers["client"].num_compositions == [2]


@telling
def test_a_script_takes_part_in_an_experiment_and_its_scores_are_in_the_run_folder(
    whole, app, config, tmp_path
):
    def push_and_report(here, model, link, records):
        here.push(model, datalink=link)
        while not here.datalinks and exchange.task().is_open:
            time.sleep(0.01)  # The reply of the round has left without this score.
        here.report({"loss": 0.25}, datalink=link)

    grid, links = grid_of(app), SimpleNamespace(client=lambda link: None)
    own = tmp_path / "states"
    exchange = Exchange(own / FOLDER)
    grid.contexts[2].node_config |= {
        "training": "script",
        "scores": "exact",
        "state-dir": str(own),
    }
    folder = tmp_path / "run"
    with script_of(own, push_and_report, links) as seen:
        outcome = run_on(grid, config, folder, keys="parity", scores="exact")
    assert outcome.summary["epsilon"] == whole[0].summary["epsilon"]
    here = project(own)
    assert (here.rounds, here.current_round) == (3, seen[-1])
    path = folder / "scores.jsonl"
    found = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(line["round"], *line["clients"]) for line in found] == [
        (line["round"], line["datalink"]) for line in here.scores()
    ]
    assert {line["clients"][0] % NUM_NODES for line in found} == {1}
    assert found[0]["scores"] == {"loss": 0.25} and path.stat().st_mode & 0o077 == 0
    statement = (folder / "privacy.md").read_text()
    assert "Training scripts of participants report exact scores" in statement
    assert "exact scores" not in (whole[1] / "privacy.md").read_text()


def test_scores_are_refused_in_a_run_that_is_released(app, config, tmp_path):
    words = (*WORDS, *SECRET, "--run.release", "private")
    with pytest.raises(ValueError, match="scores must be none in a run whose results are released"):
        run_on(grid_of(app), load_config(None, list(words)), tmp_path / "run", scores="exact")
    with pytest.raises(ValueError, match="scores must be one of exact, none"):
        run_on(grid_of(app), config, tmp_path / "run", scores="all")


def test_a_root_that_nodes_would_know_is_refused(app, config, tmp_path):
    message = "run.secret must be true to deploy privacy of clients: the nodes have the configur"
    with pytest.raises(ValueError, match=message):
        run_on(grid_of(app), config, tmp_path / "run")
    with pytest.raises(ValueError, match=message):
        write_app(config, tmp_path / "app", "/runs/1")
    write_app(config, tmp_path / "app", "/runs/1", keys="parity")
    assert 'keys = "parity"' in (tmp_path / "app" / "pyproject.toml").read_text()
    with pytest.raises(ValueError, match="keys must be one of device, parity"):
        write_app(config, tmp_path / "other", "/runs/1", keys="mine")
