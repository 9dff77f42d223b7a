"""BLUR and LUS against what their paper says, one by one and together."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from marks import later, telling
from small_problem import make_model, plain_trainer, private_trainer

from fedjax_dp.algorithms import Round, blur_lus, fedadam
from fedjax_dp.clients import ClientData, LocalConfig, UpdateContext, blur, local_trainer, proximal
from fedjax_dp.clients import sparsify as lus
from fedjax_dp.clients.transforms import SCORES, mean_gradient
from fedjax_dp.core import trees
from fedjax_dp.data import sampling
from fedjax_dp.models.base import Model
from fedjax_dp.server import gaussian_mean

START = {"a": jnp.array([0.5, -1.0, 2.0]), "b": jnp.array(0.25)}
KEY = jax.random.key(3)


def descend(transform, gradients, learning_rate):
    """SGD on given gradients; every iterate, `[steps + 1, parameters]` in float64."""
    optimizer = optax.chain(transform, optax.sgd(learning_rate))
    params, state, iterates = START, optimizer.init(START), [flat(START)]
    for row in gradients:
        gradient = {"a": jnp.asarray(row[:3], jnp.float32), "b": jnp.float32(row[3])}
        updates, state = optimizer.update(gradient, state, params)
        params = optax.apply_updates(params, updates)
        iterates.append(flat(params))
    return np.array(iterates)


def flat(tree):
    return np.concatenate([np.ravel(np.asarray(x, np.float64)) for x in jax.tree.leaves(tree)])


def test_blur_is_the_unrolled_formula():
    """Δ = −η Σ_q g_q Π_{j>q} (1 − λη·1[‖w_j − w_0‖ > S]): later steps discount a gradient."""
    rng = np.random.default_rng(0)
    rate, strength, radius, steps = 0.1, 2.0, 0.4, 25
    gradients = rng.normal(size=(steps, 4)) + 0.5
    iterates = descend(blur(strength, radius), gradients, rate)
    active = np.linalg.norm(iterates - iterates[0], axis=1) > radius
    assert 3 < active.sum() < steps - 3, "steps inside and outside the ball"
    expected = np.zeros(4)
    for q in range(steps):
        factors = 1 - strength * rate * active[q + 1 : steps]
        expected -= rate * gradients[q] * np.prod(factors)
    np.testing.assert_allclose(iterates[-1] - iterates[0], expected, rtol=0, atol=1e-6)


def test_blur_with_a_constant_gradient_has_its_geometric_sum():
    g, rate, strength, steps = np.array([1.0, -2.0, 0.5, 1.5]), 0.05, 3.0, 30
    iterates = descend(blur(strength, 0.0), np.tile(g, (steps, 1)), rate)
    length = np.linalg.norm(iterates[-1] - iterates[0])
    closed = np.linalg.norm(g) * (1 - (1 - strength * rate) ** steps) / strength
    assert length == pytest.approx(closed, abs=1e-6)


@pytest.mark.parametrize("strength, radius", [(0.0, 0.3), (0.7, np.inf)])
def test_blur_that_is_off_leaves_sgd_as_it_is_bit_for_bit(strength, radius):
    gradients = np.random.default_rng(1).normal(size=(20, 4))
    with_blur = descend(blur(strength, radius), gradients, 0.1)
    np.testing.assert_array_equal(with_blur, descend(optax.identity(), gradients, 0.1))


def test_blur_without_a_ball_is_the_proximal_term():
    gradients = np.random.default_rng(2).normal(size=(20, 4))
    with_blur = descend(blur(0.7, 0.0), gradients, 0.1)
    np.testing.assert_allclose(with_blur, descend(proximal(0.7), gradients, 0.1), atol=1e-6)


def test_blur_does_nothing_on_the_sphere_itself():
    transform = blur(1.0, 5.0)
    params = START | {"a": START["a"] + jnp.array([3.0, 4.0, 0.0])}
    zeros = jax.tree.map(jnp.zeros_like, START)
    for factor, expected in ((1.0, 0.0), (1.001, 5.005)):
        at = jax.tree.map(lambda p, s, f=factor: s + f * (p - s), params, START)
        pulled, _ = transform.update(zeros, transform.init(START), at)
        assert float(trees.l2_norm(pulled)) == pytest.approx(expected, rel=1e-4)


def test_blur_is_the_gradient_of_its_penalty():
    params = jax.tree.map(lambda s: s + 0.9, START)

    def penalty(w):
        moved = trees.subtract(w, START)
        squares = sum(jnp.sum(jnp.square(m)) for m in jax.tree.leaves(moved))
        return 0.6 / 2 * jnp.maximum(0.0, squares - 0.5**2)

    transform = blur(0.6, 0.5)
    zeros = jax.tree.map(jnp.zeros_like, START)
    pulled, _ = transform.update(zeros, transform.init(START), params)
    np.testing.assert_allclose(flat(pulled), flat(jax.grad(penalty)(params)), rtol=1e-6)


# LUS on f(w) = ½ Σ a_k (w_k − w*_k)², whose costs are known.

CURVATURE = np.array([[1.0, 4.0, 0.5, 2.0], [3.0, 1.0, 1.0, 0.1], [0.2, 2.0, 6.0, 1.0]])
TARGET = np.linspace(-1, 1, 12).reshape(3, 4)
PARAMS = {"w": jnp.asarray(np.cos(np.arange(12)).reshape(3, 4), jnp.float32), "v": jnp.ones(3)}


def quadratic():
    """A model whose loss, on whatever example, is the quadratic above plus ½‖v‖²."""

    def values(outputs, batch):
        return outputs

    def apply(params, x):
        value = 0.5 * jnp.sum(CURVATURE * (params["w"] - TARGET) ** 2)
        value += 0.5 * jnp.sum(params["v"] ** 2)
        return jnp.broadcast_to(value, x.shape[:1])

    return Model.from_functions(lambda key: PARAMS, apply, loss=values)


def context(size=5):
    examples = {"x": jnp.zeros((8, 1))}
    client = ClientData(examples, jnp.int32(1), jnp.int32(size), jnp.int32(0), limit=7)
    gradient = {"w": jnp.asarray(np.arange(12.0).reshape(3, 4)), "v": jnp.array([3.0, 1.0, 2.0])}
    return UpdateContext(PARAMS, gradient, client, LocalConfig(), KEY)


DELTA = {
    "w": jnp.asarray(np.random.default_rng(4).normal(size=(3, 4)), jnp.float32),
    "v": jnp.array([0.1, -3.0, 0.2]),
}


@telling
@pytest.mark.parametrize("sparsity", later([0.1, 0.3, 0.5, 0.7, 0.9], but=[0.3]))
def test_lus_retains_exactly_the_costliest_entries_of_every_layer(sparsity):
    sparse = lus(quadratic(), sparsity)(DELTA, context())
    costs = {
        "w": np.abs(CURVATURE * (np.asarray(PARAMS["w"], np.float64) - TARGET) * DELTA["w"]),
        "v": np.abs(np.asarray(DELTA["v"], np.float64)),
    }
    for name, cost in costs.items():
        kept = max(1, round((1 - sparsity) * cost.size))
        mask = np.zeros(cost.size, bool)
        mask[np.argsort(-cost.ravel())[:kept]] = True
        expected = np.where(mask.reshape(cost.shape), DELTA[name], 0)
        np.testing.assert_array_equal(sparse[name], expected)
        assert np.count_nonzero(sparse[name]) == kept
    assert float(trees.l2_norm(sparse)) <= float(trees.l2_norm(DELTA))


@telling
def test_lus_by_the_last_step_and_by_magnitude_are_other_choices():
    kept = {s: np.asarray(lus(quadratic(), 0.7, score=s)(DELTA, context())["v"]) for s in SCORES}
    # |g · Δ| is (0.3, 3, 0.4) by the last step's gradient (3, 1, 2), and (0.1, 3, 0.2) otherwise.
    for score in SCORES:
        np.testing.assert_array_equal(kept[score], [0, -3.0, 0])
    flipped = context()._replace(gradient={"w": context().gradient["w"], "v": jnp.eye(3)[2]})
    moved = lus(quadratic(), 0.7, score="cost_of_last_step")(DELTA, flipped)["v"]
    np.testing.assert_array_equal(moved, np.float32([0, 0, 0.2]))
    by_magnitude = lus(quadratic(), 0.7, score="magnitude")(DELTA, flipped)["w"]
    order = np.argsort(-np.abs(np.asarray(DELTA["w"])).ravel())[:4]
    assert set(np.flatnonzero(by_magnitude)) == set(order)


@pytest.mark.parametrize("score", SCORES)
def test_lus_breaks_ties_so_that_the_number_is_exact(score):
    model = Model.from_functions(
        lambda key: jnp.ones(10), lambda p, x: jnp.broadcast_to(jnp.sum(p), x.shape[:1]),
        loss=lambda outputs, batch: outputs,
    )  # fmt: skip
    tied = context()._replace(params=jnp.ones(10), gradient=jnp.ones(10))
    sparse = lus(model, 0.7, score=score)(jnp.full(10, -2.0), tied)
    np.testing.assert_array_equal(sparse, [-2.0] * 3 + [0.0] * 7)


def test_lus_without_sparsity_is_the_identity_bit_for_bit():
    sparse = lus(quadratic(), 0.0)(DELTA, context())
    chex.assert_trees_all_equal(sparse, DELTA)


def test_lus_retains_the_same_number_if_costs_are_not_numbers():
    bad = context()._replace(gradient={"w": jnp.full((3, 4), jnp.nan), "v": jnp.zeros(3)})
    sparse = lus(quadratic(), 0.5, score="cost_of_last_step")(DELTA, bad)
    assert np.all(np.isfinite(flat(sparse)))
    assert np.count_nonzero(sparse["w"]) == 6


def test_lus_leaves_buffers_alone():
    model = quadratic()
    model = Model.from_functions(
        lambda key: PARAMS, model.apply, loss=model.loss_fn, refreshes_buffers=True,
        buffer_keys=("v",),
    )  # fmt: skip
    sparse = lus(model, 0.7)(DELTA, context())
    np.testing.assert_array_equal(sparse["v"], DELTA["v"])
    assert np.count_nonzero(sparse["w"]) == 4


@telling
@pytest.mark.parametrize("size", later([1, 5, 7], but=[5]))
def test_mean_gradient_reads_all_of_the_client_and_nothing_else(size):
    model = make_model()
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(12, 3)).astype(np.float32), rng.integers(0, 2, 12).astype(np.float32)
    poisoned = x.copy()
    poisoned[:2], poisoned[2 + size :] = np.nan, np.nan
    client = ClientData(
        {"x": jnp.asarray(poisoned), "y": jnp.asarray(y)},
        jnp.int32(2), jnp.int32(size), jnp.int32(0), limit=8,
    )  # fmt: skip
    params = model.init(KEY)
    rows = slice(2, 2 + size)
    expected = jax.grad(
        lambda p: jnp.mean(model.losses(p, {"x": x[rows], "y": y[rows]})[0])
    )(params)  # fmt: skip
    for block in (2, 128):
        got = mean_gradient(model, params, client, block_size=block)
        np.testing.assert_allclose(flat(got), flat(expected), rtol=1e-5, atol=1e-7)


@functools.cache
def training(optimizer, is_private=False):
    model = make_model()
    trainer = private_trainer(model) if is_private else None
    if trainer is None:
        config = LocalConfig(learning_rate=0.2, batch_size=4, num_steps=6)
        trainer = local_trainer(
            model, config, optimizer=optimizer, sampler=sampling.full_participation()
        )
    return model, trainer


@telling
@pytest.mark.parametrize("optimizer", [optax.sgd, optax.adam], ids=["sgd", "adam"])
@pytest.mark.parametrize("is_private", later([False, True], but=[False], mark=telling))
def test_both_go_with_any_optimiser_and_either_level_of_privacy(optimizer, is_private):
    model, trainer = training(optimizer, is_private)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(9, 3)).astype(np.float32)
    examples = {"x": jnp.asarray(x), "y": jnp.asarray((x[:, 0] > 0).astype(np.float32))}
    client = ClientData(examples, jnp.int32(0), jnp.int32(9), jnp.int32(2), limit=9)
    start = model.init(KEY)
    config = trainer.config.row(2)
    far = trainer.train(start, client, config, KEY)
    near = trainer.train(
        start, client, config, KEY, gradient_transform=blur(3.0, 0.01),
        update_transform=lus(model, 0.6, score="cost_of_last_step"),
    )  # fmt: skip
    assert np.count_nonzero(near.delta["w"]) == 1
    assert 0 < float(near.metrics.update_norm) < float(far.metrics.update_norm)
    assert float(near.metrics.update_norm) == pytest.approx(float(trees.l2_norm(near.delta)))


@telling
def test_the_last_step_of_a_trainer_is_what_transforms_are_shown():
    model, trainer = training(optax.sgd)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(4, 3)), jnp.float32)
    examples = {"x": x, "y": jnp.array([0.0, 1.0, 1.0, 0.0])}
    client = ClientData(examples, jnp.int32(0), jnp.int32(4), jnp.int32(0), limit=4)
    seen, start = [], model.init(KEY)

    def show(delta, context):
        seen.append(context)
        return delta

    for steps in (0, 1, 6):
        config = trainer.config._replace(num_steps=steps)
        trainer.train(start, client, config, KEY, update_transform=show)
    before = trainer.train(start, client, trainer.config._replace(num_steps=5), KEY).params
    gradient = jax.grad(lambda p: jnp.mean(model.losses(p, examples)[0]))
    np.testing.assert_array_equal(flat(seen[0].gradient), 0)
    np.testing.assert_allclose(flat(seen[1].gradient), flat(gradient(start)), atol=1e-6)
    np.testing.assert_allclose(flat(seen[2].gradient), flat(gradient(before)), atol=1e-6)


# The algorithm is a composition.


def test_the_radius_is_the_bound_of_the_aggregator_unless_given():
    model = make_model()
    with pytest.raises(ValueError, match="radius must be given if no aggregator bounds"):
        blur_lus(model, plain_trainer(model))
    blur_lus(model, plain_trainer(model), radius=0.1)
    blur_lus(model, plain_trainer(model), strength=0.0)
    blur_lus(model, plain_trainer(model), aggregator=gaussian_mean(0.1, 1.0, 5.0))


def test_what_would_leak_or_diverge_is_refused():
    model = make_model()
    message = "update_transform must read no records, .* 'cost_of_last_step' and 'magnitude' read"
    with pytest.raises(ValueError, match=message):
        blur_lus(model, private_trainer(model), radius=1.0)
    blur_lus(model, private_trainer(model), radius=1.0, score="cost_of_last_step")
    blur_lus(model, private_trainer(model), radius=1.0, sparsity=0.0)
    with pytest.raises(ValueError, match=r"strength must be below 1 / learning_rate, .* 0.3"):
        blur_lus(model, plain_trainer(model), strength=4.0, radius=1.0)
    with pytest.raises(ValueError, match="server must be one of"):
        blur_lus(model, plain_trainer(model), radius=1.0, server="fedmax")
    with pytest.raises(ValueError, match=r"sparsity must be in \[0, 1\)"):
        blur_lus(model, plain_trainer(model), radius=1.0, sparsity=1.0)
    with pytest.raises(ValueError, match="radius must be at least 0"):
        blur_lus(model, plain_trainer(model), radius=-1.0)


def test_the_server_step_is_that_of_the_algorithm_named():
    model, options = make_model(), {"server_learning_rate": 0.3, "b1": 0.5}
    composed = blur_lus(
        model, plain_trainer(model), radius=1.0, server="fedadam", server_options=options
    )
    own = fedadam(model, plain_trainer(model), **options)
    server = own.init(KEY)
    aggregate = jax.tree.map(jnp.ones_like, server.params)
    assert composed.name == "blur_lus"
    jax.tree.map(
        np.testing.assert_array_equal,
        composed.server_step(server, aggregate, composed.hyper, Round(0, 0), KEY),
        own.server_step(server, aggregate, own.hyper, Round(0, 0), KEY),
    )
