"""What is deployed is what was simulated: the same model, record and ε."""

import jax
import numpy as np
import pytest
from cases import CASES, KINDS
from federations import deploy, key
from marks import later
from references import PLAIN
from small_problem import ROUNDS, make_model

from fedjax_dp.engine import PrivacyAccounting


def deployable(case):
    algorithm = case.make(make_model())
    states = algorithm.client_state
    reads = any(step.reads_clients for step in algorithm.stages.host_steps)
    return not case.is_pooled and not reads and (states is None or states.finish is None)


# One of every kind, and those whose clients have a state.
NAMES = [
    name
    for name in dict.fromkeys((*KINDS, "dp_fedavg", "dp_sgd", "fedbn", "fed_ltn", "lottery_fl"))
    if deployable(CASES[name])
]


@pytest.mark.parametrize("name", later(NAMES, but={"fedavg"}, soon={"scaffold"}))
def test_a_federation_agrees_with_its_simulation(name, tmp_path):
    simulated = CASES[name].simulation(PLAIN)
    there = deploy(name, state_dir=tmp_path).simulation
    state, record, _ = simulated.run(simulated.init(key()), key(), ROUNDS)
    found, charged, _ = there.run(there.init(key()), key(), ROUNDS)
    for part in ("server", "aggregator"):
        for x, y in zip(
            jax.tree.leaves(getattr(found, part)),
            jax.tree.leaves(getattr(state, part)),
            strict=True,
        ):
            np.testing.assert_allclose(x, y, rtol=0, atol=1e-6, err_msg=part)
    for part in ("clients", "digest", "stage"):
        np.testing.assert_array_equal(getattr(charged, part), getattr(record, part))
    accounts = [PrivacyAccounting(each) for each in (simulated, there)]
    accounts[0].charge(record)
    accounts[1].charge(charged)
    deltas = dict.fromkeys(accounts[0].ledgers, 1e-3)
    found, expected = (each.epsilon(deltas) for each in (accounts[1], accounts[0]))
    assert found.keys() == expected.keys() == deltas.keys()
    for unit, epsilon in expected.items():
        np.testing.assert_array_equal(found[unit], epsilon)
