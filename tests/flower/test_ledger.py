"""The ledger of a node: what it charges for records, wherever its replies end up."""

import itertools

import numpy as np
import pytest
from cases import CASES
from federations import NODES, deploy, key
from marks import telling
from small_problem import ROUNDS

from fedjax_dp.engine import PrivacyAccounting

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
