"""Nodes whose clients a script of the participant's own trains: the same federation, or refused."""

import contextlib
import json
import threading
import time

import jax
import numpy as np
import pytest
from cases import CASES
from federations import NODES, key
from flwr.app import Message
from marks import slow, telling
from small_problem import COHORT, NUM_CLIENTS, NUM_FEATURES, SIZES, make_data, make_model

from fedjax_dp.algorithms.fedavg import dp_fedavg
from fedjax_dp.clients.base import LocalConfig
from fedjax_dp.clients.sgd import local_trainer
from fedjax_dp.core import trees
from fedjax_dp.data.participants import participation
from fedjax_dp.data.sampling import poisson
from fedjax_dp.engine import Fate, federation, population_of, simulation
from fedjax_dp.flower import GridNodes, Node, NotOpenError, Script, client_app, deployed, project
from fedjax_dp.flower.exchange import FOLDER, Exchange, ScoresFile, Task, decoded, encoded
from fedjax_dp.flower.node import DATA, reports, require_difference
from fedjax_dp.flower.packets import Packet
from fedjax_dp.flower.testing import InProcess
from fedjax_dp.privacy.mechanisms.distributed import make_plan
from fedjax_dp.server.private import discrete_mean, gaussian_mean

ROUNDS, RATE = 3, 0.3
# The clients of this node are a script's, as its data links.
SCRIPTED = 11
MODEL = {"b": np.zeros((), np.float32), "w": np.array([0.5, -1.0, 2.0], np.float32)}


def one_step(params, x, y):
    """A step of gradient descent on all records of a client, in NumPy."""
    if not len(y):
        return params
    error = (1 / (1 + np.exp(-(x @ params["w"] + params["b"]))) - y).astype(np.float32)
    slopes = {"b": error.mean(), "w": error @ x / len(y)}
    return {n: np.asarray(p - np.float32(RATE) * slopes[n], np.float32) for n, p in params.items()}


def make():
    """DP-FedAvg with that step at the clients."""
    model = make_model()
    trainer = local_trainer(model, LocalConfig(learning_rate=RATE, batch_size=max(SIZES)))
    return dp_fedavg(model, trainer, aggregator=gaussian_mean(0.2, 0.8, COHORT))


def of_cohorts():
    return participation(poisson(), NUM_CLIENTS, COHORT)


def federated(folder, *, timeout=20.0, scores=None, make=make, scripted=(SCRIPTED,)):
    train = make_data()

    def data(context):
        ids = [int(part) for part in context.node_config["clients"].split(",")]
        own = folder / str(context.node_id)
        script = Script(own / FOLDER, ROUNDS, True) if context.node_id in scripted else None
        return Node(ids, train.select(ids), keys="parity", state_dir=own, script=script)

    nodes = {node: {"clients": ",".join(map(str, ids))} for node, ids in NODES.items()}
    bound = federation(make(), population_of(train), of_cohorts())
    grid = InProcess(client_app(lambda node, population: make(), data), nodes)
    reached = GridNodes(grid, sizes=bound.population.sizes, timeout=timeout, scores=scores)
    return deployed(bound, reached, keys="parity")


def in_thread(work):
    """Runs a script beside a federation; its error is raised by `join`."""
    errors = []

    def run():
        try:
            work()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()

    def join():
        thread.join(20)
        assert not thread.is_alive()
        if errors:
            raise errors[0]

    return join


@contextlib.contextmanager
def script_of(folder, train_one, data=None):
    """Runs a script's loop beside a federation; yields the rounds that it saw."""
    folder.mkdir(exist_ok=True)
    seen, is_done, data = [], threading.Event(), data or make_data()

    def loop():
        here = project(folder)
        while not is_done.is_set():
            number = here.wait(0.1)
            if number is None:
                continue
            seen.append(number)
            model = here.pull()
            for link in here.datalinks:
                records = data.client(link)
                train_one(here, model, link, records)

    join = in_thread(loop)
    try:
        yield seen
    finally:
        is_done.set()
        join()


def numpy_step(here, model, link, records):
    here.report({"weight": float(model["w"].sum())}, datalink=link)
    here.push(one_step(model, records["x"], records["y"]), datalink=link)


@telling
def test_a_federation_with_a_script_agrees_with_its_simulation(tmp_path):
    reports = []
    there = federated(tmp_path, scores=lambda clients, text: reports.append(text))
    simulated = simulation(make(), make_data(), of_cohorts())
    state, record, _ = simulated.run(simulated.init(key()), key(), ROUNDS)
    folder = tmp_path / str(SCRIPTED)
    with script_of(folder, numpy_step) as seen:
        found, charged, _ = there.run(there.init(key()), key(), ROUNDS)
    np.testing.assert_array_equal(charged.clients, record.clients)
    np.testing.assert_array_equal(charged.fate, record.fate)
    for x, y in zip(jax.tree.leaves(found.server), jax.tree.leaves(state.server), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=1e-6)
    drawn = np.isin(record.clients, NODES[SCRIPTED])
    assert seen == np.flatnonzero(drawn.any(axis=1)).tolist() and len(seen) > 1
    # Models of earlier rounds stay, and scores are on both sides.
    here = project(folder)
    first, last = here.pull(seen[0]), here.pull()
    assert (here.current_round, here.rounds, here.datalinks) == (seen[-1], ROUNDS, [])
    assert any(np.any(first[name] != last[name]) for name in first)
    of_server = [line for text in reports for line in json.loads(text)]
    of_node = [{n: v for n, v in line.items() if n != "experiment"} for line in here.scores()]
    assert of_server == of_node and len(of_node) == np.sum(drawn)
    assert of_node[0]["scores"] == {"weight": float(first["w"].sum())}


@telling
def test_the_package_clips_what_a_script_pushes(tmp_path):
    def far(here, model, link, records):
        here.push({name: x + 1e6 for name, x in model.items()}, datalink=link)

    there = federated(tmp_path)
    before = there.init(key())
    with script_of(tmp_path / str(SCRIPTED), far):
        after, _, _ = there.run(before, key(), 1)
    noise = 0.8 * 0.2 / COHORT
    moved = np.concatenate(
        [
            np.ravel(x - y)
            for x, y in zip(
                *map(jax.tree.leaves, (after.server.params, before.server.params)), strict=True
            )
        ]
    )
    assert np.linalg.norm(moved) < 0.2 * NUM_CLIENTS / COHORT + 6 * noise * np.sqrt(moved.size)


@telling
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_data_link_without_an_update_drops_out_alone(tmp_path):
    def one_alone(here, model, link, records):
        if link == 0:
            here.push(model, datalink=link)
            return
        # Not by `push`, which would refuse it.
        task = Exchange(tmp_path / str(SCRIPTED) / FOLDER).task()
        place = tmp_path / str(SCRIPTED) / FOLDER / task.experiment[:16] / f"round-{task.round:08d}"
        (place / f"update-{link}.safetensors").write_bytes(b"not safetensors")

    there = federated(tmp_path, timeout=1.0)
    with script_of(tmp_path / str(SCRIPTED), one_alone):
        _, record, _ = there.run(there.init(key()), key(), ROUNDS)
    fates = {client: record.fate[record.clients == client] for client in NODES[SCRIPTED]}
    assert set(fates[0]) == {Fate.CONTRIBUTED}
    assert set(np.concatenate([fates[2], fates[4]])) == {Fate.DROPPED}


@slow
def test_exact_figures_of_clients_that_a_script_trains_stay_on_the_node(tmp_path):
    """The number of clipped clients is for those who simulate."""

    def of_shares():
        model = make_model()
        trainer = local_trainer(model, LocalConfig(learning_rate=RATE, batch_size=max(SIZES)))
        shapes = jax.eval_shape(model.init, key())
        plan = make_plan(NUM_FEATURES + 1, 0.2, 0.8, num_clients=NUM_CLIENTS, num_shares=3)
        mean = discrete_mean(shapes, plan, COHORT, varies=True)
        return dp_fedavg(model, trainer, aggregator=mean)

    def far(here, model, link, records):
        here.push({name: x + 1e3 for name, x in model.items()}, datalink=link)

    there = federated(tmp_path, make=of_shares)
    with script_of(tmp_path / str(SCRIPTED), far):
        _, record, info = there.run(there.init(key()), key(), 1)
    assert Fate.CONTRIBUTED in record.fate[np.isin(record.clients, NODES[SCRIPTED])]
    assert info.aggregator["num_clipped"][0] == 0


@pytest.fixture
def open_round(tmp_path):
    """The exchange of a node in round 2, whose round 0 it has received too."""
    exchange = Exchange(tmp_path / FOLDER)
    for number in (0, 2):
        exchange.open(Task("a" * 64, number, 5, [4, 7], time.time() + 60, True), MODEL)
    return exchange


BF16 = np.zeros(3, jax.numpy.bfloat16)


def test_a_state_folder_that_does_not_exist_is_refused_and_not_made(tmp_path):
    place = tmp_path / "missing"
    with pytest.raises(ValueError, match=r"state-dir must be a folder, .*missing"):
        project(place)
    assert not place.exists()
    place.touch()
    with pytest.raises(ValueError, match=r"state-dir must be a folder, .*missing"):
        project(place)


def test_a_node_makes_the_folder_of_its_script_when_it_is_asked_for_its_data(tmp_path):
    place = tmp_path / "states"

    def data(context):
        return Node([0], make_data().select([0]), script=Script(place / FOLDER))

    grid = InProcess(client_app(None, data), {SCRIPTED: {}})
    (reply,) = grid.send_and_receive([Message(Packet().record(), SCRIPTED, DATA)])
    assert not reply.has_error()
    assert project(place).current_round is None


WRONG = {
    "an unknown name": ({**MODEL, "v": MODEL["b"]}, r"an update must hold .* got \['v'\]"),
    "a missing name": ({"b": MODEL["b"]}, r"got \"no \['w'\]\""),
    "another shape": ({**MODEL, "w": np.zeros((3, 1), np.float32)}, r"'w' must be float32\[3\]"),
    "another type": ({**MODEL, "w": np.zeros(3)}, "got 'float64"),
    "words of 16 bits": ({**MODEL, "w": BF16}, "got 'bfloat16"),
    "NaN": ({**MODEL, "b": np.full((), np.nan, np.float32)}, "array 'b' must be finite"),
    "infinity": ({**MODEL, "b": np.full((), np.inf, np.float32)}, "array 'b' must be finite"),
    "no numbers": ({**MODEL, "b": np.array("x")}, "array 'b' must be an array of one of"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_update_is_refused_and_the_round_stays_open(open_round, tmp_path, wrong):
    here = project(tmp_path)
    here.pull()
    update, message = WRONG[wrong]
    with pytest.raises(ValueError, match=message):
        here.push(update, datalink=4)
    assert here.datalinks == [4, 7]
    here.push(MODEL, datalink=4)
    assert here.datalinks == [7]
    assert decoded(open_round.close(open_round.task())[4])["w"].tolist() == MODEL["w"].tolist()


def test_a_truncated_file_an_old_round_and_a_second_update_are_refused(open_round, tmp_path):
    here, file = project(tmp_path), tmp_path / "model.safetensors"
    with pytest.raises(ValueError, match="round must be given, or follow a pull"):
        here.push(MODEL, datalink=4)
    here.pull(file=file)
    assert file.read_bytes() == encoded(MODEL)
    cut = tmp_path / "cut.safetensors"
    cut.write_bytes(file.read_bytes()[:-3])
    with pytest.raises(ValueError, match="an update must be a whole safetensors file"):
        here.push(cut, datalink=4)
    with pytest.raises(ValueError, match="update must be a file that can be read"):
        here.push(tmp_path / "missing", datalink=4)
    with pytest.raises(NotOpenError, match="round 0 must be open"):
        here.push(file, datalink=4, round=0)
    with pytest.raises(NotOpenError, match="received no round 3 yet"):
        here.push(file, datalink=4, round=3)
    with pytest.raises(ValueError, match=r"datalink must be one of those drawn, \[4, 7\], got 5"):
        here.push(file, datalink=5)
    with pytest.raises(ValueError, match="datalink must be given"):
        here.push(file)
    here.push(file, datalink=4)
    with pytest.raises(NotOpenError, match="round 2 must get one update of data link 4"):
        here.push({**MODEL, "b": np.float32(9)}, datalink=4)
    task = open_round.task()
    found = open_round.close(task)
    assert found == {4: encoded(MODEL)}
    with pytest.raises(NotOpenError, match="round 2 must be open"):
        here.push(file, datalink=7)
    with pytest.raises(FileNotFoundError, match="received no model in round 1"):
        here.pull(1)


def test_a_round_past_its_deadline_takes_nothing(tmp_path):
    exchange = Exchange(tmp_path / FOLDER)
    exchange.open(Task("a" * 64, 0, 5, [4], time.time() - 1, True), MODEL)
    here = project(tmp_path)
    here.pull()
    assert here.datalinks == [] and here.wait(0) is None
    with pytest.raises(NotOpenError, match="for a round that is over"):
        here.push(MODEL)


def test_a_round_that_is_sent_again_starts_anew(open_round, tmp_path):
    here = project(tmp_path)
    here.pull()
    here.push(MODEL, datalink=4)
    changed = {**MODEL, "b": np.float32(1)}
    open_round.open(open_round.task()._replace(round=0), changed)
    assert (here.current_round, here.datalinks) == (0, [4, 7])
    assert here.pull()["b"] == 1
    with pytest.raises(NotOpenError, match="received no round 2 yet"):
        here.push(MODEL, datalink=4, round=2)
    # The model of the later round is no server's to delete.
    (aside,) = (tmp_path / FOLDER).rglob("replaced-*")
    assert decoded((aside / "model.safetensors").read_bytes())["b"] == 0


@pytest.mark.parametrize(
    ("scores", "round", "message"),
    [
        ({}, None, "scores must be 1 to 100 numbers by name"),
        ({"a": float("nan")}, None, "score 'a' must be a finite number"),
        ({"a": True}, None, "score 'a' must be a finite number"),
        ({"": 1.0}, None, "a score must have a name"),
        ({"a": 1.0}, 1, "round must be one that this node has received, got 1"),
        ({"a": 1.0}, 3, "received no round 3 yet"),
        ({"a": 1.0}, "2", "round must be an integer"),
    ],
)
def test_wrong_scores_are_refused(open_round, tmp_path, scores, round, message):
    here = project(tmp_path)
    with pytest.raises(ValueError, match=message):
        here.report(scores, round)
    here.report({"a": 1}, 0)
    assert [line["round"] for line in here.scores()] == [0]


def test_a_server_stores_scores_of_the_nodes_own_clients_alone(tmp_path):
    file = ScoresFile(tmp_path / "scores.jsonl")
    good = {"round": 0, "datalink": None, "scores": {"a": 0.5}}
    file.append([1, 3], json.dumps([good, {**good, "datalink": 3}]))
    # A report that does not fit loses none beside it.
    huge = '[{"round": 0, "datalink": null, "scores": {"a": 1' + "0" * 400 + "}}]"
    of_another = json.dumps([good, {**good, "datalink": 2}])
    for wrong in ("[", "[" * 10**5, "3", json.dumps([{}]), json.dumps([3]), huge, of_another):
        with pytest.warns(UserWarning, match=r"scores of clients \[1, 3\] are lost"):
            file.append([1, 3], wrong)
    lines = [json.loads(line) for line in (tmp_path / "scores.jsonl").read_text().splitlines()]
    assert [line["clients"] for line in lines] == [[1, 3], [3], [1, 3]]
    assert (tmp_path / "scores.jsonl").stat().st_mode & 0o077 == 0


def test_scores_outlast_a_crash_and_a_lost_reply(open_round, tmp_path):
    here, digest = project(tmp_path), "a" * 64
    path = tmp_path / FOLDER / "scores.jsonl"
    here.report({"a": np.float32(1)}, 0)
    with path.open("a") as file:
        file.write('{"experiment": "aaa')
    here.report({"a": 2}, 2)
    assert [line["scores"]["a"] for line in here.scores()] == [1, 2]
    assert path.stat().st_mode & 0o077 == 0

    def sent(start=-1, script=Script(tmp_path / FOLDER, sends_scores=True), asked=True):
        facts = reports(script, digest, start if asked else None)
        found = json.loads(facts["scores"] or "[]")
        return [line["scores"]["a"] for line in found], facts.get("scores end")

    # Neither side sends scores by itself.
    assert sent(asked=False) == sent(script=Script(tmp_path / FOLDER)) == ([], None)
    assert sent() == ([1, 2], 2) and sent() == ([], 2)
    here.report({"a": 3}, 2)
    # The server has the first report alone: a reply was lost.
    assert sent(1) == ([2, 3], 3) and sent(3) == sent(99) == ([], 3)


def test_reports_are_as_many_as_a_reply_may_have(open_round, tmp_path):
    here, names = project(tmp_path), [f"{i:0>100}" for i in range(100)]
    for _ in range(60):
        here.report(dict.fromkeys(names, 0.1), 0)
    first, end = open_round.unsent_scores("a" * 64)
    assert 0 < end < 60 and len(json.dumps(first)) < 2**20
    rest, end = open_round.unsent_scores("a" * 64, end)
    assert (len(first) + len(rest), end) == (60, 60)


def refusal(algorithm, case=None):
    data = make_data() if case is None else case.data()
    require_difference(algorithm, population_of(data, None if case is None else case.validation()))


@telling
def test_averaging_is_offered_to_scripts():
    refusal(make())


REFUSED = {
    "dp_sgd": "dp_sgd, which must claim no privacy for records",
    "dp_both": "dp_fedavg, which must claim no privacy for records",
    "scaffold": "scaffold, which must have no client state",
    "ifca": "ifca, which must",
    "fedprox": "fedprox, which must use its own numbers on the server alone",
    "propfair": "propfair, which must use its own numbers on the server alone",
    "q_ffl": "q_ffl, which must send the difference of two models",
    "blur_lus": "blur_lus, which must",
}


@pytest.mark.parametrize("name", REFUSED)
def test_algorithms_of_another_kind_are_refused_by_name(name):
    with pytest.raises(ValueError, match=REFUSED[name]):
        refusal(CASES[name].make(make_model()), CASES[name])


def test_an_algorithm_that_sends_models_is_refused():
    algorithm = make()

    def client(message, own, client, hyper, key):
        output = algorithm.client(message, own, client, hyper, key)
        return output._replace(update=trees.add(output.update, message))

    with pytest.raises(ValueError, match="must send zeros where nothing is trained"):
        refusal(algorithm._replace(client=client))


@telling
def test_a_run_in_which_no_node_can_take_part_does_not_start(tmp_path):
    there = federated(
        tmp_path, make=lambda: CASES["dp_sgd"].make(make_model()), scripted=tuple(NODES)
    )
    message = "a training script cannot take part in dp_sgd"
    with pytest.warns(UserWarning, match=message), pytest.raises(ValueError, match=message):
        there.run(there.init(key()), key(), 1)
