"""Gradient masking against the numbered oracles of its description, and against its laws."""

import itertools
import math
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from aggregating import closed, sent_by
from marks import telling
from oracles import generalization
from small_problem import (
    COHORT,
    NUM_CLIENTS,
    make_data,
    make_model,
    plain_trainer,
    snapshot,
    theta_of,
)

from fedjax_dp.algorithms import dp_fedavg, fedadam, fedavg, fedprox, fedyogi, scaffold
from fedjax_dp.algorithms.fedopt import adaptive
from fedjax_dp.data import participants, sampling
from fedjax_dp.engine import simulation
from fedjax_dp.privacy.mechanisms.clipping import make_adaptive_clipping
from fedjax_dp.server import (
    Masked,
    adaptive_gaussian_mean,
    apply_aggregate,
    gaussian_mean,
    gradient_mask,
    laplace_mean,
    trimmed_mean,
    uniform_mean,
)
from fedjax_dp.server.private import by_realised_count

FULL = participants.participation(sampling.full_participation(), 6)


def aggregated(updates, weights=None, threshold=0.4, **options):
    """The aggregate of updates `[clients, parameters]`, as the engine would add them up."""
    updates = np.asarray(updates, np.float32)
    return combined(gradient_mask(threshold=threshold, **options), updates, weights)


def combined(aggregator, updates, weights=None):
    state = aggregator.init(updates[0])
    numbers = jax.tree.map(jnp.float32, dict(aggregator.numbers))
    total = summed(aggregator, state, numbers, updates, weights)
    return aggregator.combine(state, numbers, total, closed())[1:]


def summed(aggregator, state, numbers, updates, weights=None):
    """What clients contribute, added up."""

    def contribute(update, weight):
        return aggregator.contribute(state, numbers, update, sent_by(weight=weight))

    weights = jnp.asarray(np.ones(len(updates)) if weights is None else weights, jnp.float32)
    each = jax.vmap(contribute)(updates, weights)
    return jax.tree.map(lambda x: jnp.sum(x, axis=0), each)


def step_of(updates, optimizer=None, **options):
    """What a server's step adds to parameters of zero."""
    aggregate, _ = aggregated(updates, **options)
    params = jnp.zeros_like(aggregate.mean)
    optimizer = optimizer or optax.sgd(1.0)
    _, after = apply_aggregate(optimizer, optimizer.init(params), params, aggregate)
    return np.asarray(after)


OPTIMIZERS = {
    "avg": lambda: optax.sgd(1.0),
    "momentum": lambda: optax.sgd(0.5, momentum=0.9),
    "adam": lambda: adaptive(lambda v, s: 0.99 * v + 0.01 * s, 0.1, 0.9, 1e-3),
    "yogi": lambda: adaptive(lambda v, s: v - 0.01 * s * jnp.sign(v - s), 0.1, 0.9, 1e-3),
}


def test_oracle_1_three_clients_of_which_one_disagrees():
    updates = np.array([[1, 1, -1], [1, 2, -0.3]]).T * [[1, 1]] * [[1], [1], [1]]
    # Columns are coordinates: (+1, +1, -1) times (1, 2, 3), and (+1, +2, -0.3).
    updates[:, 0] *= [1, 2, 3]
    aggregate, info = aggregated(updates)
    np.testing.assert_allclose(aggregate.mean, [0.0, 0.9], atol=1e-7)
    np.testing.assert_allclose(aggregate.mask, [1 / 3, 1 / 3], rtol=1e-6)
    assert info["agreement"] == pytest.approx(1 / 3) and info["unmasked_share"] == 0
    np.testing.assert_allclose(step_of(updates, threshold=0.4), [0.0, 0.3], atol=1e-7)
    np.testing.assert_allclose(step_of(updates, threshold=0.3), [0.0, 0.9], atol=1e-7)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("threshold", [0.0, 0.4, 1.0])
def test_oracle_2_clients_that_agree_are_averaged(optimizer, threshold):
    update = np.random.default_rng(0).normal(size=7)
    same = np.tile(update, (5, 1))
    make = OPTIMIZERS[optimizer]
    plain = step_of(same, make(), threshold=0.0)
    np.testing.assert_array_equal(step_of(same, make(), threshold=threshold), plain)
    assert np.abs(plain).max() > 1e-2


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_oracle_3_no_coordinate_grows_and_none_turns_round(optimizer):
    updates = np.random.default_rng(1).normal(size=(10, 200))
    make = OPTIMIZERS[optimizer]
    plain, masked = step_of(updates, make(), threshold=0.0), step_of(updates, make())
    assert np.all(np.abs(masked) <= np.abs(plain))
    assert np.all((masked == 0) | (np.sign(masked) == np.sign(plain)))
    assert np.any(np.abs(masked) < 0.5 * np.abs(plain)) and np.any(masked == plain)
    np.testing.assert_array_equal(step_of(-updates, make()), -masked)


@pytest.mark.parametrize("make", [fedadam, fedyogi])
def test_adaptivity_inside_the_root_as_printed(make):
    """Two steps on D = 1, 0.5 in float64: z/√(v + 1e-3) for either rule, from v = 1e-6."""
    model = make_model()
    algorithm = make(model, plain_trainer(model), server_learning_rate=1.0, is_inside_root=True)
    server, z, v = algorithm.init(jax.random.key(0)), 0.0, 1e-6
    for d in (1.0, 0.5):
        aggregate = jax.tree.map(partial(jnp.full_like, fill_value=d), server.params)
        after, _ = algorithm.server_step(server, aggregate, algorithm.hyper, None, None)
        z = 0.9 * z + 0.1 * d
        v = 0.99 * v + 0.01 * d**2 if make is fedadam else v - 0.01 * d**2 * np.sign(v - d**2)
        step = theta_of(after.params) - theta_of(server.params)
        np.testing.assert_allclose(step, z / np.sqrt(v + 1e-3), rtol=1e-5)
        server = after


@pytest.mark.parametrize("count, expected", [(2, 0.5), (4, 0.375), (10, 0.24609375)])
def test_oracle_4_agreement_of_pure_noise(count, expected):
    assert math.comb(count, count // 2) / 2**count == expected
    size = 40_000
    updates = np.random.default_rng(count).normal(size=(count, size))
    _, info = aggregated(updates)
    # Mean squares of the agreement are 1/N, since votes are independent.
    error = np.sqrt((1 / count - expected**2) / size)
    assert float(info["agreement"]) == pytest.approx(expected, abs=5 * error)


@pytest.mark.parametrize(
    "make, second, expected",
    [(fedadam, 0.0, 0.990099), (fedadam, 1e-6, 0.9900505), (fedyogi, 1e-6, 0.9900500)],
)
@pytest.mark.parametrize("mask", [1.0, 0.25])
def test_oracles_5_and_6_first_steps_of_adaptive_servers(make, second, expected, mask):
    """A mean of ones, and a mask of its step; without the printed v₀ of 0 the start is ours."""
    model = make_model()
    algorithm = make(model, plain_trainer(model), server_learning_rate=1.0)
    server = algorithm.init(jax.random.key(0))
    start = jax.tree.map(lambda v: jnp.full_like(v, second), server.opt_state.second)
    if second:
        np.testing.assert_allclose(theta_of(server.opt_state.second), second, rtol=1e-6)
    server = server._replace(opt_state=server.opt_state._replace(second=start))
    ones = jax.tree.map(jnp.ones_like, server.params)
    aggregate = Masked(ones, jax.tree.map(lambda x: mask * x, ones))
    after, _ = algorithm.server_step(server, aggregate, algorithm.hyper, None, None)
    step = theta_of(after.params) - theta_of(server.params)
    np.testing.assert_allclose(step, mask * expected, atol=1e-6)


def run(algorithm, num_rounds=3, data=None):
    data = data or make_data()
    sim = simulation(algorithm, data, participants.participation(sampling.full_participation(), 6))
    key = jax.random.key(0)
    state, _, info = sim.run(sim.init(key), key, num_rounds)
    return snapshot(state), info


MAKERS = {
    "fedavg": fedavg,
    "fedprox": fedprox,
    "fedadam": fedadam,
    "fedyogi": fedyogi,
    "scaffold": lambda m, t, **options: scaffold(m, t, num_clients=6, **options),
}


@pytest.mark.parametrize("name", [pytest.param(n, marks=telling) for n in MAKERS])
def test_oracle_2_a_threshold_of_zero_is_averaging_to_the_bit(name):
    model = make_model()
    mean = uniform_mean()
    plain, _ = run(MAKERS[name](model, plain_trainer(model), aggregator=mean))
    zero = gradient_mask(mean, threshold=0.0)
    masked, _ = run(MAKERS[name](model, plain_trainer(model), aggregator=zero))
    chex.assert_trees_all_equal(plain, masked)


@telling
def test_oracle_7_scaffold_begins_as_fedavg_and_preserves_the_mean_of_its_controls():
    data, model = make_data((7, 4, 12, 5, 9, 3)), make_model()
    mask = gradient_mask(is_weighted=False)
    first, _ = run(MAKERS["scaffold"](model, plain_trainer(model), aggregator=mask), 1, data)
    plain, _ = run(fedavg(model, plain_trainer(model), aggregator=mask), 1, data)
    np.testing.assert_allclose(
        theta_of(first.server.params), theta_of(plain.server.params), atol=1e-7
    )
    later, _ = run(MAKERS["scaffold"](model, plain_trainer(model), aggregator=mask), 4, data)
    np.testing.assert_allclose(
        theta_of(later.clients).mean(axis=0), theta_of(later.server.control), atol=1e-6
    )
    assert np.abs(theta_of(later.server.control)).max() > 1e-2


@telling
def test_oracle_8_fedprox_without_its_pull_is_fedavg():
    model, mask = make_model(), gradient_mask()
    pulled, _ = run(fedprox(model, plain_trainer(model), mu=0.0, aggregator=mask))
    plain, _ = run(fedavg(model, plain_trainer(model), aggregator=mask))
    np.testing.assert_allclose(
        theta_of(pulled.server.params), theta_of(plain.server.params), atol=1e-7
    )


@pytest.mark.parametrize(
    "kind, form", list(itertools.product(["soft", "hard"], ["corrected", "printed"]))
)
@pytest.mark.parametrize("threshold", [0.0, 0.1, 0.4, 0.7, 1.0])
@pytest.mark.parametrize("count", [1, 2, 3, 10, 25])
def test_masks_are_those_of_whole_numbers(count, threshold, kind, form):
    updates = np.random.default_rng(count).integers(-1, 2, size=(count, 300)) * 0.5
    aggregate, _ = aggregated(updates, threshold=threshold, mask=kind, form=form)
    expected = generalization.mask(updates, threshold, kind, form)
    np.testing.assert_allclose(aggregate.mask, expected, rtol=1e-6)


def test_seven_of_ten_reach_a_threshold_of_four_tenths_and_six_do_not():
    """An excess of 0.4 means that 70 % agree, not the 60 % that the source says."""
    votes = np.stack([np.where(np.arange(10) < agree, 1.0, -1.0) for agree in (6, 7)], axis=1)
    aggregate, _ = aggregated(votes, threshold=0.4)
    np.testing.assert_allclose(aggregate.mask, [0.2, 1.0], rtol=1e-6)


def test_weights_move_the_mean_and_no_vote():
    updates = np.array([[1.0, 1.0], [-1.0, 1.0], [-1.0, 1.0]])
    light, _ = aggregated(updates, [1, 1, 1])
    heavy, _ = aggregated(updates, [98, 1, 1])
    np.testing.assert_array_equal(light.mask, heavy.mask)
    assert light.mean[0] < 0 < heavy.mean[0]


@pytest.mark.parametrize("is_weighted", [True, False])
def test_who_has_no_examples_does_not_vote_but_counts_as_in_the_uniform_mean(is_weighted):
    """Of four clients two agree: A = 1/2, whatever a client of weight 0 sends."""
    updates = np.array([[1.0], [1.0], [0.0], [0.0]])
    aggregate, info = aggregated(updates, [3, 4, 0, 0], threshold=0.6, is_weighted=is_weighted)
    assert float(aggregate.mask[0]) == float(info["agreement"]) == 0.5
    assert float(aggregate.mean[0]) == (1.0 if is_weighted else 0.5)
    updates[2] = -9.0
    again, _ = aggregated(updates, [3, 4, 0, 0], threshold=0.6)
    assert float(again.mask[0]) == 0.5


def test_ties_and_unmoved_coordinates_are_frozen():
    aggregate, _ = aggregated([[1.0, 0.0], [-3.0, 0.0]])
    np.testing.assert_array_equal(aggregate.mask, 0.0)


def test_the_printed_form_climbs():
    updates = np.random.default_rng(0).normal(size=(5, 20))
    np.testing.assert_array_equal(step_of(updates, form="printed"), -step_of(updates))


def test_buffers_are_averaged_without_a_mask():
    aggregate = Masked(
        {"w": jnp.ones(2), "seen": jnp.ones(2)}, {"w": jnp.zeros(2)} | {"seen": jnp.zeros(2)}
    )
    params, optimizer = {"w": jnp.zeros(2), "seen": jnp.zeros(2)}, optax.sgd(1.0)
    flags = {"w": False, "seen": True}
    _, after = apply_aggregate(optimizer, optimizer.init(params), params, aggregate, flags)
    np.testing.assert_array_equal(after["w"], 0.0)
    np.testing.assert_array_equal(after["seen"], 1.0)


@pytest.mark.parametrize("name", ["fedavg", "scaffold"])
def test_servers_add_the_mean_of_buffers_at_any_learning_rate(name):
    model = make_model()._replace(buffer_keys=("b",))
    algorithm = MAKERS[name](model, plain_trainer(model), server_learning_rate=0.5)
    server = algorithm.init(jax.random.key(0))
    ones = jax.tree.map(jnp.ones_like, server.params)
    mean = Masked(ones, jax.tree.map(lambda x: 0.25 * x, ones))
    aggregate = {"params": mean, "control": ones} if name == "scaffold" else mean
    after, _ = algorithm.server_step(server, aggregate, algorithm.hyper, None, None)
    moved = jax.tree.map(jnp.subtract, after.params, server.params)
    np.testing.assert_allclose(moved["b"], 1.0, rtol=1e-6)
    np.testing.assert_allclose(moved["w"], 0.5 * 0.25, rtol=1e-6)


# Behind privacy.


def private_mask(multiplier=0.0, share=0.5, clip_norm=1.0, expected=4.0):
    mean = gaussian_mean(clip_norm, multiplier, expected)
    return gradient_mask(mean, vote_share=share)


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_update_and_votes_stay_within_the_bound_together(scale, share):
    aggregator = private_mask(share=share)
    update = scale * jax.random.normal(jax.random.key(0), (500,))
    state = aggregator.init(update)
    sent, _ = aggregator.contribute(state, aggregator.numbers, update, sent_by(weight=9))
    votes = np.linalg.norm(np.asarray(sent["votes"], np.float64))
    assert votes == pytest.approx(share, rel=1e-5)
    whole = np.hypot(votes, np.linalg.norm(np.asarray(sent["update"], np.float64)))
    assert whole <= 1 + 1e-6
    sensitivity = aggregator.claim.sensitivity(state, aggregator.numbers)
    assert float(sensitivity.contribution) == 1.0
    plain = gaussian_mean(1.0, 0.0, 4.0)
    assert aggregator.claim.event(aggregator.numbers) == plain.claim.event(plain.numbers)


def test_votes_of_zero_leave_their_room_to_the_update():
    """Of four entries one is voted on, with a quarter of the square of the votes' share."""
    update = jnp.array([7.0, 0.0, 0.0, 0.0])
    aggregator = private_mask(share=0.8)
    sent, num_clipped = aggregator.contribute((), aggregator.numbers, update, sent_by())
    np.testing.assert_allclose(sent["votes"], [0.4, 0, 0, 0], rtol=1e-6)
    np.testing.assert_allclose(sent["update"], [np.sqrt(1 - 0.4**2), 0, 0, 0], rtol=1e-6)
    assert num_clipped == 1


@telling
@pytest.mark.parametrize("make", [private_mask, lambda: following()])
def test_updates_that_were_shortened_are_counted(make):
    """A bound of 1, of which votes leave √0.75 = 0.866."""
    aggregator = make()
    norms = np.array([0.1, 0.85, 0.88, 0.99, 1.5, 40.0])
    updates = np.tile(norms[:, None] / 10, (1, 100)).astype(np.float32)
    aggregate, info = combined(aggregator, updates)
    assert float(info["num_clipped"]) == 4
    np.testing.assert_allclose(
        np.linalg.norm(aggregate.mean) * aggregator.claim.divisor(aggregator.numbers),
        norms[:2].sum() + 4 * np.sqrt(0.75),
        rtol=1e-4,
    )


def following():
    """A clip norm that follows the median of twenty updates, from 1."""
    rule = make_adaptive_clipping(20, initial_clip_norm=1.0, count_stddev=1e-3)
    return gradient_mask(adaptive_gaussian_mean(rule, 1e-3))


def test_a_clip_norm_that_adapts_follows_updates_and_not_what_is_left_of_them():
    """Half of the updates are longer than 10, which the part that votes leave comes to."""
    rng = np.random.default_rng(0)
    updates = rng.normal(size=(20, 50))
    updates *= np.linspace(5, 15, 20)[:, None] / np.linalg.norm(updates, axis=1, keepdims=True)
    aggregator, updates = following(), jnp.asarray(updates, jnp.float32)
    numbers = aggregator.numbers

    def one(state, _):
        total = summed(aggregator, state, numbers, updates)
        state, _, info = aggregator.combine(state, numbers, total, closed())
        return state, info["num_clipped"]

    clip_norm, clipped = jax.lax.scan(one, aggregator.init(updates[0]), length=100)
    assert float(clip_norm) == pytest.approx(10 / np.sqrt(0.75), rel=0.05)
    assert 8 <= float(clipped[-10:].mean()) <= 12


@telling
def test_without_noise_the_mask_is_that_of_the_votes():
    updates = jax.random.normal(jax.random.key(0), (4, 300))
    aggregate, _ = combined(private_mask(), updates)
    expected = generalization.mask(np.asarray(updates), 0.4)
    np.testing.assert_allclose(aggregate.mask, expected, atol=1e-5)


@telling
def test_noise_on_an_agreement_is_as_documented():
    """z √p / (share · N), read off the votes of no clients."""
    multiplier, share, expected, size = 0.01, 0.5, 4.0, 40_000
    aggregator = private_mask(multiplier, share, expected=expected)
    aggregate, _ = combined(aggregator, jnp.zeros((1, size)))
    stddev = multiplier * math.sqrt(size) / (share * expected)
    # A half-normal variable below the threshold is left as it is; its quarter lies at 0.3186 σ.
    found = np.quantile(np.asarray(aggregate.mask), 0.25)
    assert found == pytest.approx(0.31864 * stddev, rel=0.03)


@pytest.mark.parametrize("bad", [-0.1, 1.1, np.nan])
def test_a_threshold_out_of_its_range_is_refused(bad):
    model = make_model()
    sim = simulation(
        fedavg(model, plain_trainer(model), aggregator=gradient_mask()), make_data(), FULL
    )
    hyper = sim.hyper._replace(aggregator={"threshold": bad})
    with pytest.raises(ValueError, match=r"hyper\.aggregator\.threshold must be"):
        sim.run(sim.init(jax.random.key(0)), jax.random.key(0), 1, hyper)


def test_scaffold_takes_no_stacked_aggregator_and_weighs_as_a_given_one():
    own = make_model()
    with pytest.raises(ValueError, match="is_weighted must be False with an aggregator"):
        scaffold(
            own,
            plain_trainer(own),
            num_clients=NUM_CLIENTS,
            is_weighted=True,
            aggregator=gradient_mask(),
        )
    with pytest.raises(ValueError, match="aggregator must be summed, as control variates are"):
        scaffold(own, plain_trainer(own), num_clients=NUM_CLIENTS, aggregator=trimmed_mean())


def test_other_bad_input_is_refused():
    rule = make_adaptive_clipping(4, count_stddev=4.0)
    by_layer = adaptive_gaussian_mean(rule, 1.0, per_layer=True)
    for options, rule in (
        ({"mean": trimmed_mean()}, "mean must be summed, not stacked"),
        ({"mean": laplace_mean(1.0, 1.0, 4.0)}, "Gaussian noise"),
        ({"mean": by_realised_count(gaussian_mean(1.0, 1.0, 4.0))}, "Gaussian noise"),
        ({"mean": gaussian_mean(1.0, 1.0, 4.0, per_layer=True)}, "mean must leave updates whole"),
        ({"mean": by_layer}, "mean must leave updates whole"),
        ({"mean": gradient_mask()}, "mean must be unmasked, without a number called threshold"),
        ({"mean": private_mask()}, "mean must be unmasked"),
    ):
        with pytest.raises(ValueError, match=rule):
            gradient_mask(**options)


@telling
def test_a_run_behind_noise_is_charged_as_its_mean_is():
    model = make_model()
    mean = gaussian_mean(clip_norm=0.2, noise_multiplier=0.8, expected_cohort_size=COHORT)
    events = [
        dp_fedavg(model, plain_trainer(model), aggregator=one).claims.client.event(one.numbers)
        for one in (mean, gradient_mask(mean))
    ]
    assert events[0] == events[1]
