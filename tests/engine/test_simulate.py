"""What a simulation is: errors, compiling, state from anywhere, sweeps."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from marks import later, telling
from references import PLAIN, reference
from small_problem import NUM_CLIENTS, SIZES, assert_same_state, make_data, make_model, snapshot

from fedjax_dp.algorithms import fedavg
from fedjax_dp.clients import LocalConfig, dp_sgd_trainer, local_trainer
from fedjax_dp.core.keys import Purpose, fold
from fedjax_dp.data import participants, sampling
from fedjax_dp.engine.execution.compile import simulation
from fedjax_dp.engine.layout import ExecutionConfig


def scalar_simulation(**execution):
    """Numbers of training as Python scalars, the common way to write them."""
    model = make_model()
    config = LocalConfig(0.1, 3.0, 1, clip_norm=1.0, noise_multiplier=0.5)
    algorithm = fedavg(model, dp_sgd_trainer(model, config))
    participation = participants.participation(sampling.poisson(), NUM_CLIENTS, 3)
    return simulation(algorithm, make_data(), participation, PLAIN._replace(**execution))


@telling
def test_states_from_host_and_python_numbers_do_not_retrace():
    sim, key = scalar_simulation(), jax.random.key(0)
    straight, _, _ = sim.run(sim.init(key), key, 4)
    straight = snapshot(straight)
    halfway, _, _ = sim.run(sim.init(key), key, 2)
    resumed, _, _ = sim.run(snapshot(halfway), key, 2)
    assert_same_state(snapshot(resumed), straight, atol=0)
    state = sim.init(key)
    for rate in (0.1, np.float64(0.1), np.float32(0.1), jnp.float32(0.1), np.array(0.1)):
        start = jax.tree.map(jnp.copy, state)
        hyper = sim.hyper._replace(local=sim.hyper.local._replace(learning_rate=rate))
        final, _, _ = sim.run(start, key, 4, hyper)
        assert_same_state(snapshot(final), straight, atol=0)
    assert sim.num_traces() == 1


@telling
@pytest.mark.parametrize("placement", later(["device", "host"], but=["host"], mark=telling))
def test_compile_runs_no_round_and_is_the_only_trace(placement):
    sim, key = scalar_simulation(placement=placement), jax.random.key(0)
    start = snapshot(sim.init(key))
    compiled = sim.compile(sim.init(key), key)
    assert_same_state(snapshot(compiled), start, atol=0)
    assert sim.num_traces() == 1
    once, _, _ = sim.run(compiled, key, 3)
    again, record, info = sim.run(start, key, 3)
    assert_same_state(snapshot(once), snapshot(again), atol=0)
    assert sim.num_traces() == 1
    assert all(len(values) == 3 for values in jax.tree.leaves((record, info)))
    assert int(once.round) == 3


@pytest.mark.xdist_group("algorithm fedavg")
def test_information_about_a_round():
    ref = reference("fedavg")
    replay = ref.case.run_of(ref.initial, ref.key).replay
    for r, slots in enumerate(ref.record.clients):
        assert sorted(slots[slots >= 0].tolist()) == replay.cohort(r)
        assert ref.record.num_drawn[r] == np.sum(slots >= 0)
    quantiles = ref.info.training.update_norm_quantiles
    assert np.all(np.diff(quantiles, axis=1) >= 0) and quantiles[:, -1].min() > 0


@telling
def test_cohorts_that_overflow_are_counted():
    model = make_model()
    algorithm = fedavg(model, local_trainer(model, LocalConfig(0.1, 2, 1)))
    chosen = participants.participation(sampling.poisson(capacity=2), NUM_CLIENTS, 4)
    sim, key = simulation(algorithm, make_data(), chosen, PLAIN), jax.random.key(0)
    _, record, _ = sim.run(sim.init(key), key, 6)
    exact = participants.participation(sampling.poisson(), NUM_CLIENTS, 4)
    counts = [int(exact.draw(fold(key, Purpose.PARTICIPATION), r).is_real.sum()) for r in range(6)]
    np.testing.assert_array_equal(record.overflow, np.maximum(0, np.array(counts) - 2))
    np.testing.assert_array_equal(record.num_drawn, np.minimum(2, counts))


@pytest.mark.parametrize(
    "change, message",
    [
        (
            {"participation": participants.participation(sampling.poisson(), 5, 2)},
            "participation must",
        ),
        ({"sizes": (0,) * NUM_CLIENTS}, "data must hold at least one"),
        ({"learning_rate": np.ones(3)}, "learning_rate must be one number or have one for"),
    ],
)
def test_what_does_not_fit_is_refused(change, message):
    model = make_model()
    config = LocalConfig(change.get("learning_rate", 0.1), 2, 1)
    algorithm = fedavg(model, local_trainer(model, config))
    chosen = participants.participation(sampling.poisson(), NUM_CLIENTS, 3)
    with pytest.raises(ValueError, match=message):
        simulation(
            algorithm,
            make_data(change.get("sizes", SIZES)),
            change.get("participation", chosen),
            change.get("execution", ExecutionConfig()),
        )


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (jax.enable_x64, r"jax_enable_x64 must be off .*with jax.enable_x64\(False\)"),
        (lambda on: jax.checking_leaks(), "jax_check_tracer_leaks must be off .*caches of JAX"),
    ],
)
def test_settings_of_jax_that_do_not_work_are_refused(setting, message):
    model = make_model()
    algorithm = fedavg(model, local_trainer(model, LocalConfig(0.1, 2, 1)))
    chosen = participants.participation(sampling.poisson(), NUM_CLIENTS, 3)
    sim = simulation(algorithm, make_data(), chosen, PLAIN)
    state = sim.init(jax.random.key(0))
    with setting(True):
        with pytest.raises(ValueError, match=message):
            simulation(algorithm, make_data(), chosen, PLAIN)
        with pytest.raises(ValueError, match=message):
            sim.run(state, jax.random.key(0))


@pytest.mark.xdist_group("algorithm fedavg")
@pytest.mark.parametrize("num_rounds", [0, -1, 1.5])
def test_numbers_of_rounds_that_are_none_are_refused(num_rounds):
    ref = reference("fedavg")
    with pytest.raises(ValueError, match="num_rounds must be an integer of at least 1"):
        ref.sim.run(ref.initial, ref.key, num_rounds)
