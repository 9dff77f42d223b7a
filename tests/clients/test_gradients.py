"""Gradient rules against NumPy: masks, bounds, what is not finite."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from marks import floats, later, telling
from oracles import local, logistic
from small_problem import make_model, theta_of

from fedjax_dp.clients import LocalConfig, clipped, plain
from fedjax_dp.models.base import Model
from fedjax_dp.privacy import mechanisms

pytestmark = floats

KEY = jax.random.key(0)
BOUND = 0.9
CONFIG = LocalConfig(batch_size=4.0, clip_norm=BOUND, noise_multiplier=0.0)


class _Layers(nn.Module):
    convolves: bool

    @nn.compact
    def __call__(self, x):
        if self.convolves:
            x = nn.max_pool(nn.relu(nn.Conv(2, (3, 3))(x)), (2, 2), (2, 2))
        x = nn.relu(nn.Dense(4)(x.reshape(x.shape[0], -1)))
        return nn.Dense(3)(x)


def _layered(convolves):
    example = jax.ShapeDtypeStruct((8, 8, 1), jnp.float32)
    return Model.from_flax(_Layers(convolves), example, loss="softmax_cross_entropy")


LAYERED = {"mlp": lambda: _layered(False), "cnn": lambda: _layered(True)}


def problem(n=9, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, 3)).astype(np.float32)
    batch = {"x": x, "y": rng.integers(0, 2, n).astype(np.float32)}
    return make_model().init(jax.random.key(1)), batch


@functools.cache
def compiled(make, **options):
    """The micro-batch of a rule on the small model, compiled once for all tests of a process."""
    return jax.jit(make(make_model(), **options).micro_batch)


def expected(params, batch, rows, clip_norm=np.inf):
    x, y = batch["x"].astype(float)[rows], batch["y"].astype(float)[rows]
    theta = theta_of(params)
    per_example = local.clip(logistic.gradients(theta, x, y), clip_norm)
    return per_example.sum(axis=0), logistic.losses(theta, x, y).sum()


@pytest.mark.parametrize("garbage", [0.0, np.nan, np.inf, 1e30])
@pytest.mark.parametrize("make, bound", [(plain, np.inf), (clipped, BOUND)])
def test_sums_over_the_real_rows_only(make, bound, garbage):
    params, batch = problem()
    real = np.array([1, 1, 0, 1, 1, 0, 1, 0, 0], bool)
    batch["x"][~real] = garbage
    out = compiled(make)(params, batch, jnp.asarray(real), KEY, CONFIG)
    gradient, loss = expected(params, batch, real, bound)
    np.testing.assert_allclose(theta_of(out.gradient), gradient, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(out.loss, loss, rtol=1e-5)


@pytest.mark.parametrize("mechanism", [mechanisms.gaussian, mechanisms.laplace])
def test_padding_has_no_share_in_a_penalty(mechanism):
    # A penalty has a gradient for every slot, whatever the slot holds.
    params, batch = problem()
    real = np.array([1, 1, 0, 1, 1, 0, 1, 0, 0], bool)
    rule = clipped(make_model(), make_mechanism=mechanism)
    micro_batch = jax.jit(rule.micro_batch, static_argnames="value")

    def value(loss, p):
        return loss + 3.0 * jnp.sum(p["w"]) + p["b"]

    def summed(batch, real):
        arguments = (params, batch, jnp.asarray(real), KEY, CONFIG)
        return theta_of(micro_batch(*arguments, value=value).gradient)

    alone = {name: array[real] for name, array in batch.items()}
    expected = summed(alone, np.ones(real.sum(), bool))
    np.testing.assert_allclose(summed(batch, real), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("make", [plain, clipped])
def test_an_empty_batch_is_a_gradient_of_zero(make):
    params, batch = problem()
    rule = make(make_model())
    out = compiled(make)(params, batch, jnp.zeros(9, bool), KEY, CONFIG)
    released = rule.release(out.gradient, jnp.int32(0), CONFIG, KEY)
    np.testing.assert_array_equal(theta_of(released), 0.0)
    assert out.loss == 0 and out.clipped == 0


@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e38])
def test_an_example_that_is_not_finite_contributes_zero_and_counts_as_clipped(bad):
    params, batch = problem()
    batch["x"][4] = bad
    config = CONFIG._replace(clip_norm=50.0)
    out = compiled(clipped)(params, batch, jnp.ones(9, bool), KEY, config)
    others = np.arange(9) != 4
    gradient, loss = expected(params, batch, others, 50.0)
    np.testing.assert_allclose(theta_of(out.gradient), gradient, rtol=1e-5, atol=1e-6)
    assert out.clipped == 1
    # A loss that is not finite is shown, and none is that of the other examples alone.
    assert not np.isfinite(out.loss) or (np.isfinite(bad) and out.loss > loss)


@pytest.mark.parametrize("bad", later([np.nan, np.inf, -np.inf, 3e38], but=[np.inf, 3e38]))
@pytest.mark.parametrize("per_layer", later([False, True], but=[True], mark=telling))
@pytest.mark.parametrize("name", later(["mlp", "cnn"], but=["mlp"], mark=telling))
def test_a_bad_example_contributes_zero_in_models_with_layers(name, per_layer, bad):
    """However the sum of clipped gradients is formed, zero times infinity must not appear in it."""
    model = LAYERED[name]()
    params = model.init(jax.random.key(0))
    rng = np.random.default_rng(0)
    batch = {
        "x": rng.normal(size=(5, 8, 8, 1)).astype(np.float32),
        "y": rng.integers(0, 3, 5).astype(np.int32),
    }
    rule = clipped(model, per_layer=per_layer)
    micro_batch = jax.jit(lambda b, real: rule.micro_batch(params, b, real, KEY, CONFIG))
    clean = micro_batch(batch, jnp.arange(5) != 2)
    batch["x"][2, 3:5, 4] = bad
    out = micro_batch(batch, jnp.ones(5, bool))
    for got, expected_leaf in zip(
        jax.tree.leaves(out.gradient), jax.tree.leaves(clean.gradient), strict=True
    ):
        np.testing.assert_allclose(got, expected_leaf, rtol=1e-5, atol=1e-6)
    assert out.clipped == clean.clipped + 1


def test_each_example_is_bounded_by_itself():
    params, batch = problem()
    norms = []
    for i in range(9):
        only = jnp.arange(9) == i
        out = compiled(clipped)(params, batch, only, KEY, CONFIG)
        norms.append(np.linalg.norm(theta_of(out.gradient)))
    assert max(norms) <= BOUND * (1 + 1e-6)
    whole = compiled(clipped)(params, batch, jnp.ones(9, bool), KEY, CONFIG)
    raw = logistic.gradients(theta_of(params), batch["x"].astype(float), batch["y"])
    assert 0 < whole.clipped == np.sum(np.linalg.norm(raw, axis=1) > BOUND) < 9


def test_per_layer_clipping_shares_the_bound():
    params, batch = problem()
    out = compiled(clipped, per_layer=True)(params, batch, jnp.ones(9, bool), KEY, CONFIG)
    raw = logistic.gradients(theta_of(params), batch["x"].astype(float), batch["y"])
    share = BOUND / np.sqrt(2)
    bias = local.clip(raw[:, :1], share).sum(axis=0)
    weights = local.clip(raw[:, 1:], share).sum(axis=0)
    np.testing.assert_allclose(
        theta_of(out.gradient), np.concatenate([bias, weights]), rtol=1e-5, atol=1e-6
    )


def test_the_plain_rule_claims_nothing():
    rule = plain(make_model())
    assert rule.event is None and rule.bound is None


@pytest.mark.parametrize("name", ["mlp", "cnn"])
def test_products_of_clipped_sums_are_float32_on_every_backend(name):
    """Where a product states no precision, a GPU or TPU would round its factors."""
    model = LAYERED[name]()
    params = jax.eval_shape(model.init, KEY)
    batch = {
        "x": jax.ShapeDtypeStruct((4, 8, 8, 1), jnp.float32),
        "y": jax.ShapeDtypeStruct((4,), jnp.int32),
    }

    def run(params, batch):
        return clipped(model).micro_batch(params, batch, jnp.ones(4, bool), KEY, CONFIG).gradient

    found = str(jax.make_jaxpr(run)(params, batch))
    products = found.count("dot_general[")
    assert products > 3 and found.count("precision=(Precision.HIGHEST") >= products
    assert "precision=None" not in found
