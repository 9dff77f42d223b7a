"""Rounds that are looked into: which client, step and array is named, and what they compute."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_client_state as counting
from marks import later, telling
from small_problem import NUM_CLIENTS, make_data, make_model, plain_trainer, private_trainer

from fedjax_dp import algorithms
from fedjax_dp.clients.base import LocalConfig
from fedjax_dp.clients.sgd import local_trainer
from fedjax_dp.core.inspection import NotFinite
from fedjax_dp.data import participants, sampling
from fedjax_dp.data.federated import FederatedData
from fedjax_dp.engine import ExecutionConfig, simulation
from fedjax_dp.models.base import Model

KEY, DEBUG = jax.random.key(3), ExecutionConfig(debug=True)


def steep(largest):
    """Clients with one number each, by which one parameter moves in every step."""
    model = Model.from_functions(
        init=lambda key: {"slope": jnp.zeros(()), "other": jnp.zeros(())},
        apply=lambda params, x: params["slope"] * x + 0 * params["other"],
        loss=lambda outputs, targets: outputs,
    )
    trainer = local_trainer(model, LocalConfig(1.0, 1, 2))
    x = np.array([1.0, 2.0, largest, 1.0], np.float32)
    data = FederatedData.from_client_ids({"x": x, "y": np.zeros(4, np.int32)}, np.arange(4))
    return algorithms.fedavg(model, trainer), data


@telling
@pytest.mark.parametrize("placement", later(["device", "host"], but=["device"], mark=telling))
def test_the_first_client_step_and_array_is_named(placement):
    largest = 2e38
    algorithm, data = steep(largest)
    every = participants.participation(sampling.full_participation(), 4)
    sim = simulation(algorithm, data, every, DEBUG._replace(placement=placement))
    assert sim.layout.chunk == 1
    local = sim.hyper.local
    once = local._replace(num_epochs=np.ones_like(local.num_epochs))
    state, _, _ = sim.run(sim.init(KEY), KEY, 1, sim.hyper._replace(local=once))
    # A finite update of more than 2^96 is left out of sums.
    assert state.server.params["slope"] == np.float32(-(1 + 2 + 1) / 3)
    found = r"round 1, client 2, local step 2: the model after the step .*got slope"
    with pytest.raises(NotFinite, match=found) as raised:
        sim.run(sim.init(KEY), KEY, 2)
    assert f"{largest:g}" not in str(raised.value)


def test_a_client_of_streamed_examples_is_named():
    execution = DEBUG._replace(placement="host")
    every = participants.participation(sampling.full_participation(), NUM_CLIENTS)
    sim = simulation(counting.algorithm(), make_data(), every, execution)
    found = rf"client {counting.SPOILED}: the update must be finite"
    with pytest.raises(NotFinite, match=found):
        sim.run(sim.init(KEY), KEY)


@telling
@pytest.mark.parametrize("name", ["fedavg", "dp_sgd", "scaffold"])
def test_rounds_that_are_looked_into_compute_the_same(name):
    model, ends = make_model(), []
    trainer = (private_trainer if name == "dp_sgd" else plain_trainer)(model)
    options = {"num_clients": NUM_CLIENTS} if name == "scaffold" else {}
    algorithm = getattr(algorithms, name)(model, trainer, **options)
    joined = participants.participation(sampling.fixed_size(), NUM_CLIENTS, 3)
    for debug in (False, True):
        execution = ExecutionConfig(debug=debug)
        sim = simulation(algorithm, make_data(), joined, execution)
        state, record, info = sim.run(sim.init(KEY), KEY, 3)
        # Clients of one chunk are padded to the longest of them.
        training = info.training._replace(padding_share=None)
        ends.append((sim.portable(state), info._replace(training=training), record))
    (state, info, record), (other_state, other_info, other_record) = ends
    jax.tree.map(np.testing.assert_array_equal, record, other_record)
    for one, other in ((state, other_state), (info, other_info)):
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7), one, other
        )


@pytest.mark.parametrize(
    ("fields", "name"),
    [({"clients_per_chunk": 2}, "clients_per_chunk"), ({"devices": 2}, "devices")],
)
def test_what_hides_a_client_is_refused(fields, name):
    with pytest.raises(ValueError, match=f"{name} must be 'auto' or 1 with debug"):
        ExecutionConfig(debug=True, **fields).validate()
