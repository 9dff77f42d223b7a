"""The ledger of a node: what it charges for records, wherever its replies end up."""

import itertools

import numpy as np
import pytest
from cases import CASES
from federations import NODES, deploy, key
from flwr.app import Message
from flwr.clientapp import ClientApp
from marks import telling
from small_problem import ROUNDS

from fedjax_dp.engine import PrivacyAccounting
from fedjax_dp.flower import GridNodes
from fedjax_dp.flower.packets import Packet
from fedjax_dp.flower.testing import InProcess

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
def test_nodes_charge_what_a_simulation_charges_also_for_lost_replies(expected, tmp_path):
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
        ({"releases": [-1]}, "releases must be an integer"),
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
