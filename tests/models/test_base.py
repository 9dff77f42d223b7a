"""Models from Linen modules, NNX modules and plain functions."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from lowering_checks import assert_trees_close
from marks import later, telling

from fedjax_dp.clients.gradients import plain
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


def test_init_that_reads_an_example_is_refused():
    class Scaled(nn.Module):
        @nn.compact
        def __call__(self, x):
            return x * self.param("scale", lambda key: 1 / jnp.std(x))

    with pytest.raises(ValueError, match="initial parameters of Scaled must depend on the shapes"):
        Model.from_flax(Scaled(), jax.ShapeDtypeStruct((3,), jnp.float32), loss="squared_error")


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


class LinenState(nn.Module):
    """A layer with state of any type, which every call in training may change."""

    make: object
    change: object = None

    @nn.compact
    def __call__(self, x):
        held = self.variable("counts", "held", self.make)
        if self.change and self.is_mutable_collection("counts") and not self.is_initializing():
            held.value = self.change(held.value, x)
        return nn.Dense(CLASSES)(x)


class NnxState(nnx.Module):
    def __init__(self, rngs, make, change=None, kind=nnx.Variable):
        self.dense, self.change = nnx.Linear(FEATURES, CLASSES, rngs=rngs), change
        self.held = kind(make())

    def __call__(self, x):
        if self.change:
            self.held = type(self.held)(self.change(self.held[...], x))
        return self.dense(x)


class NnxMaskedState(NnxState):
    def __call__(self, x, mask=None):
        self.held = type(self.held)(self.change(self.held[...], x))
        return self.dense(x)


def plain_state(make, change=None):
    def apply(params, x, is_training=False):
        held = params["held"]
        if change and is_training:
            params = {**params, "held": change(held, x)}
        return (x @ params["w"], params) if change else x @ params["w"]

    return Model.from_functions(
        lambda key: {"w": jax.random.normal(key, (FEATURES, CLASSES)), "held": make()},
        apply,
        loss="softmax_cross_entropy",
        buffer_keys="held",
        refreshes_buffers=change is not None,
    )


WITH_STATE = {
    "linen": lambda make, change=None: linen(LinenState(make, change)),
    "nnx": lambda make, change=None: from_nnx(lambda rngs: NnxState(rngs, make, change)),
    "plain": plain_state,
}


def train_shapes(model):
    """The gradient of a batch and refreshed parameters, from shapes alone."""
    params = jax.eval_shape(model.init, jax.random.key(0))

    def gradient(params):
        return plain(model).micro_batch(params, BATCH, jnp.ones(6, bool), jax.random.key(1), None)

    return jax.eval_shape(gradient, params)


STATES = {
    "counter": (lambda: jnp.int32(0), lambda held, x: held + 1),
    "flags": (lambda: jnp.zeros(3, bool), lambda held, x: ~held),
    "key": (lambda: jax.random.key(0), lambda held, x: jax.random.fold_in(held, 1)),
    "complex": (lambda: jnp.ones(2, jnp.complex64), lambda held, x: held * 2),
}


@pytest.mark.parametrize("kind", WITH_STATE)
@pytest.mark.parametrize("name", STATES)
def test_state_that_cannot_be_averaged_is_refused_by_its_path_if_training_changes_it(kind, name):
    path, (make, change) = "held", STATES[name]
    path = {"linen": "counts/held", "nnx": "batch_stats/held", "plain": "held"}[kind]
    with pytest.raises(ValueError, match=rf"{path} .*must be .*(floating-point|floats)"):
        train_shapes(WITH_STATE[kind](make, change))


@pytest.mark.parametrize("kind", WITH_STATE)
@pytest.mark.parametrize("name", ["counter", "flags", "complex"])
def test_state_that_is_constant_is_frozen(kind, name):
    model = WITH_STATE[kind](STATES[name][0])
    assert not model.buffer_keys and not model.mixes_examples
    (held,) = model.constants
    assert np.array_equal(held[0], STATES[name][0]())
    found = train_shapes(model)
    assert jax.tree.structure(found.params) == jax.tree.structure(found.gradient)
    assert len(jax.tree.leaves(found.gradient)) == (1 if kind == "plain" else 2)


@pytest.mark.parametrize("kind", WITH_STATE)
def test_state_of_floats_is_refreshed(kind):
    model = WITH_STATE[kind](lambda: jnp.float32(0), lambda held, x: held + 1)
    params = {**model.init(jax.random.key(0))}
    _, refreshed = model.apply(params, X, is_training=True)
    assert [float(x) for x in jax.tree.leaves(refreshed) if jnp.ndim(x) == 0] == [1.0]
    train_shapes(model)


@pytest.mark.parametrize("kind", [nnx.Variable, nnx.Cache])
def test_state_of_an_nnx_module_needs_a_mask_only_if_examples_enter_it(kind):
    def mean(held, x):
        return 0.9 * held + 0.1 * x.mean()

    make = lambda: jnp.float32(0)  # noqa: E731
    with pytest.raises(ValueError, match="held of NnxState must not be computed from examples"):
        train_shapes(from_nnx(lambda rngs: NnxState(rngs, make, mean, kind)))
    train_shapes(from_nnx(lambda rngs: NnxMaskedState(rngs, make, mean, kind)))
    train_shapes(from_nnx(lambda rngs: NnxState(rngs, make, lambda held, x: held + 1, kind)))


@pytest.mark.parametrize("name", STATES)
def test_parameters_that_cannot_be_trained_are_refused_by_their_path(name):
    class Held(nn.Module):
        @nn.compact
        def __call__(self, x):
            self.param("held", lambda key: STATES[name][0]())
            return nn.Dense(CLASSES)(x)

    def held(rngs):
        return NnxState(rngs, STATES[name][0], kind=nnx.Param)

    def functions():
        init = lambda key: {"w": jnp.ones((FEATURES, CLASSES)), "held": STATES[name][0]()}  # noqa: E731
        apply = lambda params, x: x @ params["w"]  # noqa: E731
        return Model.from_functions(init, apply, loss="softmax_cross_entropy")

    for build in (lambda: linen(Held()), lambda: from_nnx(held), functions):
        with pytest.raises(ValueError, match=r"parameter (params/)?held of .* real floating-point"):
            build()


def test_initial_values_that_are_no_real_numbers_are_refused():
    model = linen(LinenMlp())
    for value in (np.ones((FEATURES, HIDDEN), complex), np.full((FEATURES, HIDDEN), "0")):
        with pytest.raises(ValueError, match="params params/first/kernel must hold real numbers"):
            model.with_params({"params/first/kernel": value})
        with pytest.raises(ValueError, match=r"params\['params/first/kernel'\] must hold real num"):
            model.freeze("params/first/kernel", {"params/first/kernel": value})
