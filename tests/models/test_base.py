"""Models from Linen modules, NNX modules and plain functions."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from lowering_checks import assert_trees_close
from marks import later, telling

from fedjax_dp.core import trees
from fedjax_dp.models.base import Model

FEATURES, HIDDEN, CLASSES = 5, 7, 3
EXAMPLE = jax.ShapeDtypeStruct((FEATURES,), jnp.float32)
RNG = np.random.default_rng(3)
X = RNG.normal(size=(6, FEATURES)).astype(np.float32)
BATCH = {"x": X, "y": np.array([0, 1, 2, 0, -1, 2])}


class LinenMlp(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Dense(HIDDEN, name="first")(x))
        return nn.Dense(CLASSES, name="second")(x)


class NnxMlp(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(FEATURES, HIDDEN, rngs=rngs)
        self.second = nnx.Linear(HIDDEN, CLASSES, rngs=rngs)

    def __call__(self, x):
        return self.second(nnx.relu(self.first(x)))


class LinenNorm(nn.Module):
    """Batch norm between layers; hands on no mask of its own."""

    @nn.compact
    def __call__(self, x, train: bool = False):
        x = nn.Dense(HIDDEN)(x)
        x = nn.BatchNorm(use_running_average=not train, momentum=0.9)(x)
        return nn.Dense(CLASSES)(nn.relu(x))


class NnxNorm(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(FEATURES, HIDDEN, rngs=rngs)
        self.norm = nnx.BatchNorm(HIDDEN, momentum=0.9, rngs=rngs)
        self.second = nnx.Linear(HIDDEN, CLASSES, rngs=rngs)

    def __call__(self, x, mask=None):
        x = self.norm(self.first(x), mask=None if mask is None else mask[:, None])
        return self.second(nnx.relu(x))


class LinenDropout(nn.Module):
    @nn.compact
    def __call__(self, x, deterministic: bool = True):
        return nn.Dense(CLASSES)(nn.Dropout(0.5, deterministic=deterministic)(x))


class NnxDropout(nnx.Module):
    def __init__(self, rngs):
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.dense = nnx.Linear(FEATURES, CLASSES, rngs=rngs)

    def __call__(self, x):
        return self.dense(self.drop(x))


def linen(module):
    return Model.from_flax(module, EXAMPLE, loss="softmax_cross_entropy")


def from_nnx(constructor):
    return Model.from_nnx(constructor, loss="softmax_cross_entropy")


def plain_mlp():
    def dense(key, *shape):
        return {"kernel": jax.random.normal(key, shape), "bias": jnp.zeros(shape[1])}

    def init(key):
        first, second = jax.random.split(key)
        return {"first": dense(first, FEATURES, HIDDEN), "second": dense(second, HIDDEN, CLASSES)}

    def apply(params, x):
        x = jax.nn.relu(x @ params["first"]["kernel"] + params["first"]["bias"])
        return x @ params["second"]["kernel"] + params["second"]["bias"]

    return Model.from_functions(init, apply, loss="softmax_cross_entropy")


NORMS = [pytest.param(linen(LinenNorm()), id="linen"), pytest.param(from_nnx(NnxNorm), id="nnx")]
DROPOUTS = [
    pytest.param(linen(LinenDropout()), id="linen"),
    pytest.param(from_nnx(NnxDropout), id="nnx"),
]


def gradients(model, params, batch, mask=None, key=None):
    def total(p):
        losses, refreshed = model.losses(p, batch, is_training=True, mask=mask, key=key)
        return jnp.sum(losses), (losses, refreshed)

    (_, (losses, refreshed)), gradient = jax.value_and_grad(total, has_aux=True)(params)
    return losses, refreshed, gradient


@telling
def test_linen_nnx_and_plain_versions_agree_on_the_same_weights():
    plain = plain_mlp()
    weights = plain.init(jax.random.key(4))
    kernel, bias = np.float64(weights["first"]["kernel"]), np.float64(weights["first"]["bias"])
    hidden = np.maximum(X @ kernel + bias, 0)
    oracle = hidden @ np.float64(weights["second"]["kernel"]) + weights["second"]["bias"]
    reference = gradients(plain, weights, BATCH)
    np.testing.assert_allclose(plain.predict(weights, X), oracle, rtol=1e-5, atol=1e-5)
    for model in (linen(LinenMlp()), from_nnx(NnxMlp)):
        params = {"params": weights}
        initial = model.init(jax.random.key(0))
        assert jax.tree.map(jnp.shape, initial) == jax.tree.map(jnp.shape, params)
        np.testing.assert_allclose(model.predict(params, X), oracle, rtol=1e-5, atol=1e-5)
        losses, _, gradient = gradients(model, params, BATCH)
        np.testing.assert_allclose(losses, reference[0], rtol=1e-6)
        assert_trees_close(gradient["params"], reference[2], rtol=1e-5, atol=1e-6)
        assert not model.mixes_examples and model.buffer_keys == ()
        # Without buffers the parameters come back as the same object.
        for is_training in (False, True):
            assert model.apply(params, X, is_training=is_training)[1] is params
            assert plain.apply(weights, X, is_training=is_training)[1] is weights


@telling
@pytest.mark.parametrize("model", NORMS)
def test_batch_norm_is_flagged_and_its_buffers_are_refreshed_without_gradient(model):
    assert model.mixes_examples
    params = model.init(jax.random.key(1))
    _, refreshed, gradient = gradients(model, params, BATCH)
    assert all(np.all(g == 0) for g in jax.tree.leaves(gradient["batch_stats"]))
    assert any(np.any(g != 0) for g in jax.tree.leaves(gradient["params"]))
    assert_trees_close(refreshed["params"], params["params"], rtol=0)
    first = (p for p in params["params"].values() if "kernel" in p and p["kernel"].shape[0] == 5)
    dense = next(first)
    hidden = np.float64(X) @ np.float64(dense["kernel"]) + np.float64(dense["bias"])
    (stats,) = refreshed["batch_stats"].values()
    np.testing.assert_allclose(stats["mean"], 0.1 * hidden.mean(0), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(stats["var"], 0.9 + 0.1 * hidden.var(0), rtol=1e-5)
    flags = model.is_buffer(params)
    assert all(jax.tree.leaves(flags["batch_stats"]))
    assert not any(jax.tree.leaves(flags["params"]))
    # Nor does evaluation give buffers a gradient.
    gradient = jax.grad(lambda p: jnp.sum(model.losses(p, BATCH)[0]))(params)
    assert all(np.all(g == 0) for g in jax.tree.leaves(gradient["batch_stats"]))


@telling
@pytest.mark.parametrize("model", NORMS)
@pytest.mark.parametrize("filler", later([0.0, 1e6, np.nan, np.inf], but=[1e6]))
def test_batch_norm_with_a_mask_equals_batch_norm_on_the_real_rows(model, filler):
    params = model.init(jax.random.key(1))
    real = np.array([True, False, True, True, False, True, True, True])
    padded = {"x": np.full((8, FEATURES), filler, np.float32), "y": np.full(8, 1)}
    padded["x"][real], padded["y"][real] = X, BATCH["y"]
    expected = gradients(model, params, BATCH)
    losses, refreshed, gradient = jax.jit(lambda p, mask: gradients(model, p, padded, mask))(
        params, real
    )
    np.testing.assert_allclose(losses[real], expected[0], rtol=1e-5, atol=1e-6)
    assert np.all(losses[~real] == 0)
    assert_trees_close(refreshed, expected[1], rtol=1e-6, atol=1e-7)
    assert_trees_close(gradient, expected[2], rtol=1e-4, atol=1e-6)


@telling
@pytest.mark.parametrize("model", NORMS)
def test_a_batch_of_padding_alone_leaves_buffers_unchanged_and_finite(model):
    params = model.init(jax.random.key(1))
    batch = {"x": np.full_like(X, np.nan), "y": BATCH["y"]}
    losses, refreshed, gradient = gradients(model, params, batch, jnp.zeros(6, bool))
    assert np.all(losses == 0)
    assert_trees_close(refreshed, params, rtol=0)
    assert all(np.all(g == 0) for g in jax.tree.leaves(gradient))


def test_a_batch_norm_behind_a_reshape_of_examples_is_an_error():
    class Folded(nn.Module):
        @nn.compact
        def __call__(self, x, train: bool = False):
            x = nn.BatchNorm(use_running_average=not train)(x.reshape(-1, 1))
            return nn.Dense(CLASSES)(x.reshape(-1, FEATURES))

    model = linen(Folded())
    params = model.init(jax.random.key(0))
    with pytest.raises(ValueError, match="keep the 6 examples on its first axis"):
        model.losses(params, BATCH, is_training=True, mask=jnp.ones(6, bool))


def test_an_nnx_module_whose_batch_norm_gets_no_mask_is_an_error():
    class Deaf(NnxNorm):
        def __call__(self, x):
            return super().__call__(x)

    with pytest.raises(ValueError, match="takes a mask"):
        from_nnx(Deaf)


@telling
@pytest.mark.parametrize("model", DROPOUTS)
def test_dropout_follows_its_key_and_is_off_in_evaluation(model):
    params = model.init(jax.random.key(1))
    assert set(params) == {"params"} and not model.mixes_examples

    outputs = jax.jit(lambda key: model.apply(params, X, is_training=True, key=key)[0])
    one, again, other = (outputs(jax.random.key(seed)) for seed in (1, 1, 2))
    assert np.array_equal(one, again) and not np.array_equal(one, other)
    evaluated = model.apply(params, X, key=jax.random.key(3))[0]
    assert np.array_equal(model.predict(params, X), evaluated)
    draws = jax.jit(jax.vmap(outputs))(jax.random.split(jax.random.key(0), 4000))
    np.testing.assert_allclose(draws.mean(0), model.predict(params, X), atol=0.1)
    with pytest.raises(Exception, match=r"key|dropout"):
        outputs(None)


@telling
@pytest.mark.parametrize("model", DROPOUTS)
def test_padding_after_the_real_rows_does_not_change_what_dropout_draws(model):
    params = model.init(jax.random.key(1))
    key = jax.random.key(9)
    expected = gradients(model, params, BATCH, key=key)
    padded = {k: np.concatenate([v, v]) for k, v in BATCH.items()}
    losses, _, gradient = gradients(model, params, padded, jnp.arange(12) < 6, key)
    np.testing.assert_allclose(losses[:6], expected[0], rtol=1e-6)
    assert_trees_close(gradient, expected[2], rtol=1e-5, atol=1e-6)


def test_plain_functions_get_the_arguments_they_name():
    seen = {}

    def apply(params, x, *, mask, train, key=None):
        seen.update(mask=mask, train=train, key=key)
        return x @ params["w"], {**params, "count": params["count"] + 1}

    model = Model.from_functions(
        lambda key: {"w": jnp.ones((FEATURES, CLASSES)), "count": jnp.int32(0)},
        apply,
        loss="softmax_cross_entropy",
        refreshes_buffers=True,
        buffer_keys=("count",),
        mixes_examples=True,
        lower=False,
    )
    params = model.init(jax.random.key(0))
    mask, key = jnp.arange(6) < 4, jax.random.key(1)
    outputs, refreshed = model.apply(params, X, is_training=True, key=key, mask=mask)
    np.testing.assert_allclose(outputs, X @ np.ones((FEATURES, CLASSES)), rtol=1e-5)
    assert refreshed["count"] == 1 and model.mixes_examples
    assert seen == {"mask": mask, "train": True, "key": key}
    assert model.is_buffer(params) == {"w": False, "count": True}


def test_own_loss_and_count_are_kept():
    model = Model.from_functions(
        lambda key: jnp.ones(FEATURES),
        lambda w, x: x @ w,
        loss=lambda outputs, batch: jnp.abs(outputs - batch["target"]),
    )
    batch = {"x": X, "target": jnp.arange(6.0)}
    losses, _ = model.losses(jnp.ones(FEATURES), batch)
    np.testing.assert_allclose(losses, np.abs(X.sum(1) - np.arange(6.0)), rtol=1e-5)
    assert model.correct_fn is None


def test_init_neither_allocates_nor_runs_on_an_example():
    huge = jax.ShapeDtypeStruct((1 << 40,), jnp.float32)

    class First(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(CLASSES)(x[:, :FEATURES])

    model = Model.from_flax(First(), huge, loss="softmax_cross_entropy")
    assert trees.num_parameters(model.init(jax.random.key(0))) == (FEATURES + 1) * CLASSES


@telling
def test_no_convolution_or_window_is_left_unless_asked_for():
    class Conv(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.max_pool(nn.Conv(2, (3, 3))(x), (2, 2), strides=(2, 2))
            return nn.Dense(CLASSES)(x.reshape(x.shape[0], -1))

    images = RNG.normal(size=(2, 8, 8, 1)).astype(np.float32)
    outputs = {}
    for lower in (False, True):
        example = jax.ShapeDtypeStruct((8, 8, 1), jnp.float32)
        model = Model.from_flax(Conv(), example, loss="softmax_cross_entropy", lower=lower)
        params = model.init(jax.random.key(0))
        text = str(jax.make_jaxpr(model.predict)(params, images))
        assert ("conv_general_dilated" in text or "reduce_window" in text) is not lower
        outputs[lower] = model.predict(params, images)
    np.testing.assert_allclose(outputs[True], outputs[False], rtol=1e-5, atol=1e-5)
