"""Trained, frozen, buffers: only what is trained is sent, noised, counted and kept by client."""

import functools
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases import CASES
from marks import later, slow, telling
from references import PLAIN, reference
from small_problem import (
    COHORT,
    NUM_CLIENTS,
    NUM_FEATURES,
    ROUNDS,
    config,
    make_data,
    make_model,
    normed,
    plain_trainer,
    private_trainer,
    snapshot,
    theta_of,
)
from small_problem import SETTINGS as NUMBERS

from fedjax_dp.algorithms import dp_fedavg, fedavg, registry
from fedjax_dp.clients.optimizers import check_noised
from fedjax_dp.clients.sgd import dp_sgd_trainer, local_trainer
from fedjax_dp.core import trees
from fedjax_dp.core.keys import Purpose, fold
from fedjax_dp.data import participants, sampling
from fedjax_dp.engine import Layout, as_metrics, examples_of, federation, simulation
from fedjax_dp.engine.cohort import typed
from fedjax_dp.engine.execution.round_loop import Count, one_round
from fedjax_dp.models.base import Model
from fedjax_dp.privacy.mechanisms.clipping import make_adaptive_clipping
from fedjax_dp.privacy.mechanisms.distributed import make_plan
from fedjax_dp.privacy.mechanisms.noise import banded_noise
from fedjax_dp.server import Stacked, gaussian_mean, private
from fedjax_dp.server.private import correlated_gaussian_mean, discrete_mean

# No other array of any state has this shape. Multiplying by it and cutting off what is beyond the
# features gives the features back to the last bit.
BASE = np.eye(NUM_FEATURES, NUM_FEATURES + 4, dtype=np.float32)
FULL = participants.participation(sampling.full_participation(), NUM_CLIENTS)
KEY = jax.random.key(3)
CYCLIC = participants.participation(sampling.cyclic(), NUM_CLIENTS, 2)


def outputs_of(params, x):
    return (x @ params["base"])[:, :NUM_FEATURES] @ params["w"] + params["b"]


def with_base(**options) -> Model:
    """The model of the cases behind a base that changes nothing as long as it does not change."""
    return Model.from_functions(
        lambda key: {**make_model().init(key), "base": jnp.asarray(BASE)},
        outputs_of,
        loss="sigmoid_binary_cross_entropy",
        **options,
    )


def frozen() -> Model:
    model = with_base()
    return model.freeze("base", model.init(jax.random.key(0)))


@functools.cache
def banded_strategy():
    return banded_noise(8, 2, min_separation=2)


def aggregators(model: Model):
    """Every kind of noise on updates of a model, with who joins a round of it."""
    structure = jax.eval_shape(model.init, jax.random.key(0))
    rule = make_adaptive_clipping(2.0, initial_clip_norm=0.5, count_stddev=2.0)
    plan = make_plan(trees.num_parameters(structure), 0.5, 1.2, num_clients=NUM_CLIENTS)
    banded = banded_strategy()
    gaussian = private.gaussian_mean(0.5, 1.2, NUM_CLIENTS)

    def combine(state, numbers, stack, close):
        summed = jax.tree.map(
            lambda a: jnp.tensordot(close.contributes.astype(a.dtype), a, 1), stack
        )
        return gaussian.combine(state, numbers, summed, close)

    stacked = Stacked(
        gaussian.init,
        gaussian.contribute,
        combine,
        numbers=gaussian.numbers,
        ranges=gaussian.ranges,
        claim=gaussian.claim,
    )

    return {
        "gaussian": (gaussian, FULL),
        "laplace": (private.laplace_mean(0.5, 1.2, 2.0), FULL),
        "staircase": (private.staircase_mean(structure, 0.5, 1.2, 2.0), FULL),
        "adaptive": (private.adaptive_gaussian_mean(rule, 1.2), FULL),
        "discrete": (discrete_mean(structure, plan, NUM_CLIENTS), FULL),
        "correlated": (correlated_gaussian_mean(banded, 0.5, 1.2, 2.0), CYCLIC),
        "realised": (private.by_realised_count(gaussian), FULL),
        "stacked": (stacked, FULL),
    }


NOISES = (
    *("adaptive", "correlated", "discrete", "gaussian"),
    *("laplace", "realised", "stacked", "staircase"),
)


def test_every_kind_of_noise_is_named():
    assert sorted(aggregators(make_model())) == list(NOISES)


def shapes_in(state):
    return [x.shape for x in jax.tree.leaves(state)]


@pytest.mark.parametrize("noise", later(NOISES, soon=["gaussian", "discrete", "stacked"]))
def test_a_base_declared_a_buffer_is_not_sent_not_noised_and_stays_bit_for_bit(noise):
    model = with_base(buffer_keys=("base",))
    aggregator, participation = aggregators(model)[noise]
    sim = simulation(
        fedavg(model, plain_trainer(model), aggregator=aggregator),
        make_data(),
        participation,
        PLAIN,
    )
    start = snapshot(sim.init(jax.random.key(0)))
    state, *_ = sim.run(start, jax.random.key(1), ROUNDS)
    found = [x for x in jax.tree.leaves(state) if x.shape == BASE.shape]
    for base in found:
        np.testing.assert_array_equal(base, BASE)
    assert not found
    np.testing.assert_array_equal(model.full_params(state.server.params)["base"], BASE)
    assert np.abs(theta_of(state.server.params) - theta_of(start.server.params)).max() > 0.02


@pytest.mark.parametrize("name", later(CASES, soon=["scaffold"]))
def test_training_behind_a_frozen_base_is_training_of_the_rest(name):
    case, plain = CASES[name], reference(name)
    sim = case.simulation(PLAIN, frozen())
    state, record, info = sim.run(sim.init(plain.key), plain.key, ROUNDS)
    expected = case.observe(plain.final)
    for part, value in case.observe(state).items():
        np.testing.assert_allclose(value, expected[part], rtol=0, atol=1e-6, err_msg=part)
    np.testing.assert_array_equal(record.clients, plain.record.clients)
    np.testing.assert_array_equal(record.fate, plain.record.fate)
    expected = as_metrics(plain.record, plain.info)
    for part, value in as_metrics(record, info).items():
        np.testing.assert_allclose(value, expected[part], rtol=1e-4, atol=1e-6, err_msg=part)
    assert BASE.shape not in [shape[-2:] for shape in shapes_in(state)]
    assert sorted(shapes_in(state)) == sorted(shapes_in(plain.final))


@telling
def test_frozen_values_are_an_argument_of_the_round():
    """Other values need no other program, and give what a model that holds them gives."""

    def round_of(scale):
        model = with_base()
        model = model.freeze("base", {"base": scale * BASE})
        algorithm = fedavg(model, plain_trainer(model))
        bound = federation(algorithm, make_data(), FULL)
        (part,) = bound.facts.frozen
        return bound, one_round(bound, Layout(), (part.constants,), Count())

    bound, held = round_of(1.0)
    _, other = round_of(2.0)
    arguments = bound.init(KEY), typed(bound.hyper), examples_of(make_data()), None, KEY
    found, expected = (each.step(*arguments, other.frozen)[0] for each in (held, other))
    for one, two in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        np.testing.assert_array_equal(one, two)
    with_own = held.step(*arguments, held.frozen)[0]
    assert held.step._cache_size() == 1
    assert any(map(np.any, jax.tree.leaves(trees.subtract(with_own.server, found.server))))


@pytest.mark.parametrize("noise", later(NOISES, but=["gaussian", "discrete"], mark=telling))
def test_noise_on_statistics_of_batch_norm_is_refused(noise):
    model = normed()
    aggregator, participation = aggregators(model)[noise]
    algorithm = fedavg(model, plain_trainer(model), aggregator=aggregator)
    with pytest.raises(ValueError, match=r"no buffers.*'batch_stats/.*group norm.*freeze"):
        simulation(algorithm, make_data(), participation, PLAIN)


@telling
def test_statistics_of_batch_norm_are_averaged_where_nothing_is_noised():
    model = normed()
    sim = simulation(fedavg(model, plain_trainer(model)), make_data(), FULL, PLAIN)
    start = snapshot(sim.init(jax.random.key(0)))
    state, *_ = sim.run(start, jax.random.key(1), 1)
    before, after = (s.server.params["batch_stats"]["BatchNorm_0"] for s in (start, state))
    assert np.all(np.asarray(after["var"]) > 0)
    assert np.abs(np.asarray(after["mean"]) - before["mean"]).max() > 0.01


@pytest.mark.parametrize("noise", later(["gaussian", "realised"], mark=telling))
def test_buffers_that_depend_on_the_key_are_no_constants_and_refused_behind_noise(noise):
    model = Model.from_functions(
        lambda key: {**make_model().init(key), "base": jax.random.normal(key, BASE.shape)},
        outputs_of,
        loss="sigmoid_binary_cross_entropy",
        buffer_keys="base",
    )
    aggregator, participation = aggregators(model)[noise]
    plain = simulation(fedavg(model, plain_trainer(model)), make_data(), FULL, PLAIN)
    state = plain.init(jax.random.key(0))
    base = np.asarray(state.server.params["base"])
    state, *_ = plain.run(state, jax.random.key(1), 2)
    np.testing.assert_array_equal(state.server.params["base"], base)
    algorithm = fedavg(model, plain_trainer(model), aggregator=aggregator)
    with pytest.raises(ValueError, match=r"no buffers.*'base'.*Model.freeze"):
        simulation(algorithm, make_data(), participation, PLAIN)


def with_zeros(learning_rate):
    label = {"w": "moves", "b": "moves", "base": "stays"}
    parts = {"moves": optax.sgd(learning_rate), "stays": optax.set_to_zero()}
    return optax.multi_transform(parts, label)


def masked(learning_rate):
    zero = optax.masked(optax.set_to_zero(), {"w": False, "b": False, "base": True})
    return optax.chain(optax.adam(learning_rate), zero)


@pytest.mark.parametrize(
    "optimizer",
    [with_zeros, pytest.param(masked, marks=slow), pytest.param(with_zeros(0.1), marks=slow)],
)
def test_an_optimizer_that_leaves_weights_alone_is_refused_behind_noise_alone(optimizer):
    model = with_base()
    trainer = local_trainer(model, config(NUMBERS), optimizer=optimizer)
    aggregator, _ = aggregators(model)["gaussian"]
    with pytest.raises(ValueError, match=r"leaves 'base' as it is.*Model.freeze"):
        simulation(fedavg(model, trainer, aggregator=aggregator), make_data(), FULL, PLAIN)
    simulation(fedavg(model, trainer), make_data(), FULL, PLAIN)


def test_a_model_larger_than_any_memory_is_checked_in_part():
    names = {"w": 2**40, "b": 2**20, "base": 2**30}
    shapes = {name: (rows, 1024) for name, rows in names.items()}
    model = with_base()._replace(init=lambda key: {n: jnp.zeros(s) for n, s in shapes.items()})
    check_noised(model, lambda: optax.sgd(0.1))
    with pytest.raises(ValueError, match="leaves 'base' as it is"):
        check_noised(model, lambda: with_zeros(0.1))


SGD_AFTER_FOUR = optax.MultiSteps(optax.sgd(0.1), 4).gradient_transformation()
WARMED_UP = optax.sgd(optax.schedules.linear_schedule(0.0, 0.1, 5))


@pytest.mark.parametrize(
    "optimizer",
    [
        pytest.param(optax.sgd, marks=slow),
        pytest.param(optax.adamw, marks=slow),
        lambda rate: optax.chain(optax.centralize(), optax.sgd(rate)),
        pytest.param(optax.set_to_zero(), marks=slow),
        SGD_AFTER_FOUR,
        pytest.param(WARMED_UP, marks=slow),
    ],
    ids=["sgd", "adamw", "centralized", "none", "gathering", "warm_up"],
)
def test_optimizers_that_move_everything_or_nothing_may_be_noised(optimizer):
    model = with_base()
    model = model._replace(init=lambda key: {**with_base().init(key), "empty": jnp.zeros((0, 2))})
    trainer = local_trainer(model, config(NUMBERS), optimizer=optimizer)
    aggregator, _ = aggregators(model)["gaussian"]
    simulation(fedavg(model, trainer, aggregator=aggregator), make_data(), FULL, PLAIN)


@pytest.mark.parametrize("name", [n for n, e in registry.ALGORITHMS.items() if e.sends_model])
def test_every_algorithm_that_sends_updates_of_a_model_is_checked_before_noise(name):
    def refuse():
        raise ValueError("asked")

    algorithm = CASES[name].make(make_model())
    assert isinstance(algorithm.training.check_noised, partial), "which asks the trainer"
    noised = algorithm._replace(
        aggregator=private.gaussian_mean(0.5, 1.2, 2.0),
        training=algorithm.training._replace(check_noised=refuse),
    )
    with pytest.raises(ValueError, match="asked"):
        simulation(noised, CASES[name].data(), CASES[name].participation(), PLAIN)


def test_votes_are_no_update_of_a_model():
    CASES["ae_dpfl"].make(normed()).training.check_noised()


@telling
def test_record_level_training_leaves_buffers_as_they_were():
    """What a model would make of raw records in its buffers never leaves the gradient rule."""

    def apply(params, x, *, is_training):
        refreshed = {**params, "seen": params["seen"] + jnp.sum(x)} if is_training else params
        return x @ params["w"] + params["b"], refreshed

    model = Model.from_functions(
        lambda key: {**make_model().init(key), "seen": jnp.float32(0)},
        apply,
        loss="sigmoid_binary_cross_entropy",
        refreshes_buffers=True,
        buffer_keys="seen",
    )
    sim = simulation(fedavg(model, private_trainer(model)), make_data(), FULL, PLAIN)
    state, *_ = sim.run(sim.init(jax.random.key(0)), jax.random.key(1), 2)
    assert float(state.server.params["seen"]) == 0
    plain = simulation(fedavg(model, plain_trainer(model)), make_data(), FULL, PLAIN)
    state, *_ = plain.run(plain.init(jax.random.key(0)), jax.random.key(1), 2)
    assert abs(float(state.server.params["seen"])) > 0.1
    both = dp_fedavg(
        model,
        private_trainer(model),
        aggregator=gaussian_mean(clip_norm=1.0, noise_multiplier=1.0, expected_cohort_size=3.0),
    )
    with pytest.raises(ValueError, match=r"no buffers.*'seen'"):
        simulation(both, make_data(), FULL, PLAIN)


@telling
def test_both_units_behind_a_frozen_base_resume_to_the_same_bits():
    model = frozen()
    algorithm = dp_fedavg(
        model,
        dp_sgd_trainer(model, config(NUMBERS, is_private=True)),
        aggregator=gaussian_mean(clip_norm=0.2, noise_multiplier=0.8, expected_cohort_size=COHORT),
    )
    sim = simulation(algorithm, make_data(), FULL, PLAIN)
    key = jax.random.key(4)
    whole, *_ = sim.run(sim.init(key), key, 4)
    half, *_ = sim.run(sim.init(key), key, 2)
    resumed, *_ = sim.run(snapshot(half), key, 2)
    chex.assert_trees_all_equal(whole, resumed)
    # The start is that of the model before it was frozen.
    start = make_model().init(fold(key, Purpose.INIT))
    found = theta_of(sim.init(key).server.params)
    np.testing.assert_allclose(found, theta_of(start), rtol=1e-6)


def test_calibrated_mechanisms_count_what_is_trained_alone():
    one = aggregators(make_model())["staircase"][0]
    other = aggregators(frozen())["staircase"][0]
    events = [a.claim.event(a.numbers) for a in (one, other)]
    assert events[0] == events[1]
    whole = aggregators(with_base())["staircase"][0]
    assert whole.claim.event(whole.numbers) != events[0]
