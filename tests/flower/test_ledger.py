"""The ledger of a node: what it charges for records, wherever its replies end up."""

import itertools
import json
import re

import jax
import numpy as np
import pytest
from cases import CASES
from federations import NODES, deploy, key
from flwr.app import Message
from flwr.clientapp import ClientApp
from marks import slow, telling
from small_problem import NUM_CLIENTS, NUM_FEATURES, ROUNDS, SIZES, make_data, make_model

from fedjax_dp.algorithms import OutputPerturbation, warm_start_averaging
from fedjax_dp.clients import LocalConfig, dp_sgd_trainer
from fedjax_dp.core import files
from fedjax_dp.data import FederatedData, full_participation
from fedjax_dp.engine import PrivacyAccounting, population_of
from fedjax_dp.flower import Budget, GridNodes, server
from fedjax_dp.flower.ledger import NodeLedger
from fedjax_dp.flower.packets import Packet
from fedjax_dp.flower.plan import Plan
from fedjax_dp.flower.testing import InProcess
from fedjax_dp.models import logistic_regression
from fedjax_dp.privacy.claims import OnceClaim

DELTA = 1e-3


@pytest.fixture(scope="module")
def expected():
    """ε of each client that a simulation's ledger charges for the same rounds."""
    simulated = CASES["dp_sgd"].simulation()
    _, record, _ = simulated.run(simulated.init(key()), key(), ROUNDS)
    accounting = PrivacyAccounting(simulated)
    accounting.charge(record)
    return accounting.epsilon({"record": DELTA})["record"]


def claims_of(there, rounds=ROUNDS):
    there.simulation.run(there.simulation.init(key()), key(), rounds)
    return there.nodes.claims(DELTA)


@telling
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_nodes_charge_what_a_simulation_charges_also_for_lost_replies(
    expected, tmp_path, monkeypatch
):
    monkeypatch.setattr(server, "_MOST_SILENT", 9)

    def lost(sent, reply):
        return [] if sent.metadata.message_type == "train" else [reply]

    for change in (None, lost):
        state_dir = tmp_path / str(change is None)
        claims = claims_of(deploy("dp_sgd", change=change, state_dir=state_dir))
        assert sorted(claims) == sorted(itertools.chain(*NODES.values()))
        for client, claim in claims.items():
            np.testing.assert_allclose(claim["epsilon"], expected[client], rtol=1e-12)


@telling
def test_a_ledger_on_the_disk_outlasts_its_node(tmp_path):
    first = claims_of(deploy("dp_sgd", state_dir=tmp_path))
    assert (tmp_path / "11" / "ledger.json").stat().st_size > 0
    second = claims_of(deploy("dp_sgd", state_dir=tmp_path))
    releases = [each["releases"] for each in first.values()]
    assert [each["releases"] for each in second.values()] == [2 * each for each in releases]
    assert sum(releases) > 0
    assert max(c["epsilon"] for c in second.values()) > max(c["epsilon"] for c in first.values())


@pytest.mark.filterwarnings("error:node 11 failed")
def test_privacy_of_records_without_a_folder_is_refused():
    with pytest.raises(UserWarning, match="state_dir must be a folder: the ledger"):
        claims_of(deploy("dp_sgd"), rounds=1)


def reached_by(facts):
    """Returns nodes of which 13 claims this, and the others ε of 1 for each of their clients."""
    app = ClientApp()

    @app.query("clients")
    def clients(message, context):
        own = list(NODES[context.node_id])
        return Message(Packet({"clients": own, "sizes": [1] * len(own)}).record(), reply_to=message)

    @app.query("privacy")
    def privacy(message, context):
        own = list(NODES[context.node_id])
        claims = {"clients": own, "epsilon": [1.0] * len(own), "releases": [2] * len(own)}
        of_node = facts if context.node_id == 13 else {}
        return Message(Packet({**claims, **of_node}).record(), reply_to=message)

    reached = GridNodes(InProcess(app, {node: {} for node in NODES}), sizes=[1] * 6)
    reached.clients(Packet())
    return reached


CLAIM = {"epsilon": 1.0, "releases": 2}


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"epsilon": [-1.0]}, "epsilon must be numbers of at least 0"),
        ({"epsilon": [float("nan")]}, "epsilon must be numbers of at least 0"),
        ({"epsilon": ["0"]}, "epsilon must be numbers of at least 0"),
        ({"epsilon": []}, "claims of node 13 are left out"),
        ({"epsilon": 1}, "claims of node 13 are left out"),
        ({"releases": [-1]}, "releases must be integers"),
    ],
)
def test_a_damaged_claim_is_left_out(facts, message):
    reached = reached_by(facts)
    with pytest.warns(UserWarning, match=message):
        claims = reached.claims(DELTA)
    assert claims == {client: CLAIM for client in range(5)}


def test_a_node_claims_for_its_own_clients_alone():
    others = {"clients": list(range(6)), "epsilon": [0.5] * 6, "releases": [0] * 6}
    reached = reached_by(others)
    expected = {client: CLAIM for client in range(5)}
    assert reached.claims(DELTA) == expected | {5: {"epsilon": 0.5, "releases": 0}}


@pytest.fixture(scope="module")
def plan():
    return Plan(CASES["dp_sgd"].make(make_model()), population_of(make_data()))


def ledger_of(plan, folder, budget=None, clients=(0, 2)):
    return NodeLedger(plan, clients, [SIZES[client] for client in clients], folder, budget)


def test_two_processes_charge_both_of_their_rounds_to_a_file_of_its_owner(plan, tmp_path):
    one, other = (ledger_of(plan, tmp_path) for _ in range(2))
    one.charge([0, 2], 0, 0)
    single = one.num_releases()
    other.charge([0, 2], 1, 0)
    assert ledger_of(plan, tmp_path).num_releases() == [2 * each for each in single]
    (path,) = tmp_path.glob("*.json")
    assert path.stat().st_mode & 0o077 == 0
    assert {each.name for each in tmp_path.iterdir()} <= {"ledger.json", "ledger.lock"}


def test_a_round_that_exceeds_the_budget_is_refused_and_not_charged(plan, tmp_path):
    free = ledger_of(plan, tmp_path / "free")
    for round in range(2):
        free.charge([0, 2], round, 0)
    spent = free.epsilon(DELTA)
    # The first client can afford two rounds, the other one.
    each = np.full(plan.num_clients, spent[0])
    each[2] = 0.9 * spent[1]
    bounded = ledger_of(plan, tmp_path / "bounded", Budget(each, DELTA))
    bounded.charge([0, 2], 0, 0)
    before = ledger_of(plan, tmp_path / "bounded").num_releases()
    with pytest.raises(ValueError, match=r"ε of the records of client 2 must be at most .*ledger"):
        bounded.charge([0, 2], 1, 0)
    assert ledger_of(plan, tmp_path / "bounded").num_releases() == before
    bounded.charge([0], 1, 0)
    with pytest.raises(ValueError, match="ε of the records of client 0"):
        bounded.charge([0], 2, 0)


@pytest.mark.parametrize(
    "wrong",
    [
        {"epsilon": "much"},
        {"epsilon": np.nan},
        {"epsilon": [1.0, 2.0]},
        {"dp_delta": 1.0},
        {"dp_delta": None},
        {"relation": 3},
        {"accountant": "counting"},
    ],
    ids=str,
)
def test_a_budget_that_means_nothing_is_refused_by_name(plan, tmp_path, wrong):
    ((name, _),) = wrong.items()
    good = {"epsilon": 1.0, "dp_delta": DELTA}
    with pytest.raises(ValueError, match=rf"{name} must .*got"):
        ledger_of(plan, tmp_path, Budget(**{**good, **wrong}))


def test_a_round_that_is_asked_for_again_is_charged_where_each_record_is_read_once(tmp_path):
    config = LocalConfig(
        learning_rate=1.0, batch_size=1, num_steps=2, clip_norm=1.0, noise_multiplier=1.0
    )
    whole = full_participation()._replace(name="full_batch")
    shape = jax.ShapeDtypeStruct((NUM_FEATURES,), np.float32)
    model = logistic_regression(shape, 2, gradient_bound=1.0)
    trainer = dp_sgd_trainer(model, config, sampler=whole)
    rows = {"rows_per_round": 2, "perturbation": OutputPerturbation(regularizer=0.3)}
    algorithm = warm_start_averaging(model, trainer, num_clients=NUM_CLIENTS, **rows)
    data = make_data()
    arrays = {"x": data.examples["x"], "y": np.asarray(data.examples["y"], np.int32)}
    plan = Plan(algorithm, population_of(FederatedData(arrays, data.offsets)))
    assert isinstance(algorithm.claims.record, OnceClaim)
    counts = []
    for round in (0, 1, 2, 1, 3, 1):
        ledger_of(plan, tmp_path, clients=(2,)).charge([2], round, 0)
        counts += ledger_of(plan, tmp_path, clients=(2,)).num_releases()
    once = counts[0]
    assert once > 0
    assert counts == [once, once, once, 2 * once, 2 * once, 3 * once]
    # Another run reads the same records, though in rounds after those of the first.
    counts = []
    for run, round in (("b", 4), ("b", 5), ("c", 6), ("c", 7)):
        ledger_of(plan, tmp_path, clients=(2,)).charge([2], round, 0, run)
        counts += ledger_of(plan, tmp_path, clients=(2,)).num_releases()
    assert counts == [4 * once, 4 * once, 5 * once, 5 * once]


def report_of(fedjax_dp, *words):
    status, output, errors = fedjax_dp("privacy", "report", *words, "--json")
    return status, json.loads(output), errors


@slow
def test_the_statement_of_a_node_is_that_of_its_ledger(plan, tmp_path, fedjax_dp):
    ledger = ledger_of(plan, tmp_path)
    ledger.charge([0, 2], 0, 0)
    once = ledger.num_releases()
    ledger.charge([2], 1, 0)
    file, delta = tmp_path / "ledger.json", ("--delta", str(DELTA))
    status, document, errors = report_of(fedjax_dp, file, *delta)
    assert status == 0 and not errors
    (claim,) = document["statement"]["claims"]
    assert claim["epsilon_per_unit"] == ledger.epsilon(DELTA)
    assert claim["unit"] == "record"
    assert claim["client_names"] == ["0", "2"] and claim["noise_root"] == "nodes"
    assert min(once) > 0 and claim["num_compositions"] == [once[0], 2 * once[1]]
    _, output, _ = fedjax_dp("privacy", "report", file, *delta)
    rows = re.findall(r"^\| (\d) \| ([\d.]+) \| (\d+) \|", output, re.M)
    assert [(row[0], int(row[2])) for row in rows] == [("0", once[0]), ("2", 2 * once[1])]
    assert [float(row[1]) for row in rows] == pytest.approx(ledger.epsilon(DELTA), rel=1e-4)
    assert "Each node draws the keys of its clients" in output and "Events, as charged" in output
    _, output, _ = fedjax_dp("privacy", "report", file, *delta, "--latex")
    assert "@" in output and r"\varepsilon" in output
    # Another account needs no smaller ε.
    _, document, _ = report_of(fedjax_dp, file, *delta, "--accountant", "pld")
    (tighter,) = document["statement"]["claims"]
    assert max(tighter["epsilon_per_unit"]) <= max(claim["epsilon_per_unit"])
    # Keys of the server, once, are those of the statement from then on.
    NodeLedger(plan, [0], [SIZES[0]], tmp_path, None, "parity").charge([0], 2, 0)
    ledger_of(plan, tmp_path).charge([0], 3, 0)
    _, document, _ = report_of(fedjax_dp, file, *delta)
    (claim,) = document["statement"]["claims"]
    assert claim["trusted"] == "server" and claim["client_names"] == ["0", "2"]


@slow
def test_a_damaged_ledger_has_no_statement(plan, tmp_path, fedjax_dp):
    ledger_of(plan, tmp_path).charge([0, 2], 0, 0)
    file, delta = tmp_path / "ledger.json", ("--delta", str(DELTA))
    whole = file.read_text("utf-8")
    content = json.loads(whole)
    fewer = json.loads(whole)
    entry = fewer["accounts"]["record"]["entries"][0]
    entry["count"] = [each - 1 or 9 for each in entry["count"]]
    without = {name: value for name, value in content.items() if name != "sha256"}
    other = files.with_digest({**without, "accounts": {"record": {"format": 99}}})
    for text, message in (
        (json.dumps(fewer), "must be as it was written, but was damaged"),
        (whole[: len(whole) // 2], "must be JSON"),
        (whole[:-1], "must be JSON"),
        ("", "must be JSON"),
        ("[]", "must hold an object"),
        (json.dumps(without), "must have the digest with which nodes write it"),
        (json.dumps(other), "must be the ledger of a node, as it writes it"),
        (json.dumps(files.with_digest({})), "must be the ledger of a node, as it writes it"),
    ):
        file.write_text(text, "utf-8")
        status, document, errors = report_of(fedjax_dp, file, *delta)
        assert status == 2 and f"{file} {message}" in errors and set(document) >= {"error"}, errors
    file.write_text(json.dumps(fewer), "utf-8")
    with pytest.raises(ValueError, match=r"ledger.json must be as it was written"):
        ledger_of(plan, tmp_path)
    for words, message in (
        ((file,), "--delta must be given for the ledger of a node"),
        ((file, "--delta", "1"), "--delta must be in (0, 1)"),
        ((tmp_path / "none.json", *delta), "RUN must be a file that can be read"),
        ((tmp_path, *delta), "--delta must be left out: the statement of a run has its own"),
        ((tmp_path, "--accountant", "pld"), "--accountant must be left out"),
    ):
        status, _, errors = report_of(fedjax_dp, *words)
        assert status == 2 and message in errors, errors
