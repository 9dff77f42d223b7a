"""Arrays of the caller's outlive a run; what a record keeps is who was drawn."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from marks import telling
from small_problem import make_data, make_model

from fedjax_dp.algorithms import fedavg
from fedjax_dp.clients import LocalConfig, local_trainer
from fedjax_dp.core.keys import Purpose, fold
from fedjax_dp.data import participation, poisson
from fedjax_dp.engine import Fate, simulation
from fedjax_dp.engine.record import RoundRecord, compact, joined


@pytest.fixture(scope="module")
def sim():
    model, data = make_model(), make_data()
    trainer = local_trainer(model, LocalConfig(learning_rate=0.1, batch_size=4))
    return simulation(fedavg(model, trainer), data, participation(poisson(), data.num_clients, 2))


@telling
@pytest.mark.parametrize("call", ["run", "compile"])
def test_arrays_of_the_callers_own_are_copied(sim, call):
    key = jax.random.key(0)
    mine = {"b": jnp.ones(()), "w": jnp.arange(3.0)}
    state = sim.federation.views.shared.write(sim.init(key), mine)
    getattr(sim, call)(state, key)
    assert float(mine["b"]) == 1 and mine["w"].tolist() == [0, 1, 2]
    again = sim.federation.views.shared.write(sim.init(key), mine)
    other, *_ = sim.run(again, key, 2)
    assert mine["w"].tolist() == [0, 1, 2] and other.server.params["w"].tolist() != [0, 1, 2]


def test_what_a_run_hands_out_is_taken_over_without_a_copy(sim):
    key = jax.random.key(0)
    state = sim.init(key)
    sim.run(state, key)
    assert all(x.is_deleted() for x in jax.tree.leaves(state.server.params))


def test_a_record_is_as_wide_as_its_largest_cohort(sim):
    key = jax.random.key(3)
    _, record, _ = sim.run(sim.init(key), key, 25)
    assert record.clients.shape == record.fate.shape == (25, int(record.num_drawn.max()))
    assert record.clients.shape[1] < sim.participation.num_clients
    # Every client that the sampler draws is there, once.
    for i in range(25):
        drawn = sim.participation.draw(fold(key, Purpose.PARTICIPATION), i)
        row = record.clients[i][record.fate[i] != Fate.EMPTY]
        assert sorted(row) == sorted(np.asarray(drawn.indices)[np.asarray(drawn.is_real)])
        assert np.all(record.clients[i][record.fate[i] == Fate.EMPTY] == -1)


def record_of(clients, fate):
    count = len(clients)
    zeros = np.zeros(count, np.int32)
    return RoundRecord(np.array(clients), np.array(fate, np.int8), zeros, zeros, zeros == 0)


def test_records_are_compacted_and_joined():
    one = compact(record_of([[-1, 4, -1, 2], [-1, -1, -1, 7]], [[0, 1, 0, 5], [0, 0, 0, 2]]))
    assert one.clients.tolist() == [[4, 2], [7, -1]] and one.fate.tolist() == [[1, 5], [2, 0]]
    none = compact(record_of([[-1, -1]], [[0, 0]]))
    assert none.clients.tolist() == [[-1]]
    both = joined([none, one])
    assert both.clients.tolist() == [[-1, -1], [4, 2], [7, -1]]
    assert both.fate.tolist() == [[0, 0], [1, 5], [2, 0]] and both.fate.dtype == np.int8
    assert both.num_drawn.tolist() == [0, 2, 1] and both.stage.shape == (3,)
