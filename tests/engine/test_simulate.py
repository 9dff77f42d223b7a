"""What a simulation is: errors, compiling, state from anywhere, sweeps."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import NUM_CLIENTS, PLAIN, assert_same_state, make_data, make_model, reference, snapshot
from rounds import flat

from fedjax_dp.algorithms import dp_fedavg, fedavg
from fedjax_dp.clients import LocalConfig, dp_sgd_trainer, local_trainer
from fedjax_dp.data import sampling
from fedjax_dp.data.federated import FederatedData
from fedjax_dp.engine.execution import ExecutionConfig
from fedjax_dp.engine.round import RoundShape, run_round
from fedjax_dp.engine.simulate import simulation


def scalar_simulation(**execution):
    """Numbers of training as Python scalars, the common way to write them."""
    model = make_model()
    config = LocalConfig(0.1, 3.0, 1, clip_norm=1.0, noise_multiplier=0.5)
    algorithm = fedavg(model, dp_sgd_trainer(model, config))
    participation = sampling.participation(sampling.poisson(), NUM_CLIENTS, 3)
    return simulation(algorithm, make_data(), participation, PLAIN._replace(**execution))


def test_states_from_host_and_python_numbers_do_not_retrace():
    sim, key = scalar_simulation(), jax.random.key(0)
    straight, _ = sim.run(sim.init(key), key, 4)
    straight = snapshot(straight)
    halfway, _ = sim.run(sim.init(key), key, 2)
    resumed, _ = sim.run(snapshot(halfway), key, 2)
    assert_same_state(snapshot(resumed), straight, atol=0)
    state = sim.init(key)
    for rate in (0.1, np.float64(0.1), np.float32(0.1), jnp.float32(0.1), np.array(0.1)):
        start = jax.tree.map(jnp.copy, state)
        start = start._replace(config=start.config._replace(learning_rate=rate))
        final, _ = sim.run(start, key, 4)
        assert_same_state(snapshot(final), straight, atol=0)
    assert sim.num_traces() == 1


@pytest.mark.parametrize("placement", ["device", "host"])
def test_compile_runs_no_round_and_is_the_only_trace(placement):
    sim, key = scalar_simulation(placement=placement), jax.random.key(0)
    start = snapshot(sim.init(key))
    compiled = sim.compile(sim.init(key), key)
    assert_same_state(snapshot(compiled), start, atol=0)
    assert sim.num_traces() == 1
    once, _ = sim.run(compiled, key, 3)
    again, info = sim.run(start, key, 3)
    assert_same_state(snapshot(once), snapshot(again), atol=0)
    assert sim.num_traces() == 1
    assert all(len(values) == 3 for values in info.values())
    assert int(once.round) == 3
