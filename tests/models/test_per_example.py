"""Per-example norms and weighted sums against gradients that are held one by one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from lowering_checks import assert_trees_close
from marks import floats, later, telling

from fedjax_dp.clients import LocalConfig
from fedjax_dp.clients.gradients import clipped
from fedjax_dp.data.datasets import load
from fedjax_dp.models import lower, registry
from fedjax_dp.models.per_example import _plan, per_example

pytestmark = floats


def _reference(loss_fn, params, examples, weights):
    """Takes every example's gradient on its own and sums in float64 on the host."""
    losses, gradients = jax.vmap(jax.value_and_grad(loss_fn), in_axes=(None, 0))(params, examples)
    host = jax.tree.map(lambda g: np.asarray(g, np.float64), gradients)
    norms = jax.tree.map(lambda g: np.sqrt((g.reshape(len(g), -1) ** 2).sum(1)), host)
    sums = jax.tree.map(lambda g: np.tensordot(weights, g, 1), host)
    return np.asarray(losses), norms, sums


def _assert_same(loss_fn, params, examples, num_examples, rtol=1e-5):
    weights = np.random.default_rng(0).uniform(0, 1, num_examples).astype(np.float32)

    @jax.jit
    def ours(params, examples):
        result = per_example(loss_fn, params, examples)
        spread = jax.tree.map(lambda _: jnp.asarray(weights), result.norms)
        return result.losses, result.norms, result.weighted_sum(spread)

    losses, norms, sums = ours(params, examples)
    expected, exact, totals = _reference(loss_fn, params, examples, weights)
    pairs = zip(jax.tree.leaves((losses, sums)), jax.tree.leaves((expected, totals)), strict=True)
    for mine, other in pairs:
        scale = np.abs(other).max()
        np.testing.assert_allclose(mine, other, rtol=rtol, atol=rtol * scale + 1e-7)
    for mine, other in zip(jax.tree.leaves(norms), jax.tree.leaves(exact), strict=True):
        # Bounds: what Gram matrices may err by is added to the norms that are read off them.
        room = rtol * other + rtol * other.max() + 1e-7
        assert np.all(mine >= other - room) and np.all(mine <= other * (1 + 1e-3) + room)


def _model_case(name, shape, num_classes, num_examples, tokens=False):
    dtype = jnp.int32 if tokens else jnp.float32
    model = registry.build(name, {"x": jax.ShapeDtypeStruct(shape, dtype)}, num_classes)
    params = jax.jit(model.init)(jax.random.key(0))
    keys = jax.random.split(jax.random.key(1))
    if tokens:
        x = jax.random.randint(keys[0], (num_examples, *shape), 0, num_classes)
        y = jax.random.randint(keys[1], (num_examples, *shape), 0, num_classes)
    else:
        x = jax.random.normal(keys[0], (num_examples, *shape))
        y = jax.random.randint(keys[1], (num_examples,), 0, num_classes)

    def loss_fn(params, example):
        single = jax.tree.map(lambda a: a[None], example)
        return model.losses(params, single, is_training=True)[0][0]

    return loss_fn, params, {"x": x, "y": y}


@pytest.mark.parametrize(
    ("name", "shape", "num_classes", "tokens"),
    [
        ("logistic_regression", (12,), 5, False),
        pytest.param("mlp", (12,), 5, False, marks=pytest.mark.telling),
        pytest.param("thesis_cnn", (28, 28, 1), 10, False, marks=pytest.mark.telling),
        pytest.param("emnist_cnn", (28, 28, 1), 62, False, marks=pytest.mark.slow),
        pytest.param("char_transformer", (9,), 20, True, marks=pytest.mark.slow),
        pytest.param("char_lstm", (6,), 20, True, marks=pytest.mark.slow),
        pytest.param("resnet18", (32, 32, 3), 10, False, marks=pytest.mark.slow),
    ],
)
def test_models_of_the_zoo(name, shape, num_classes, tokens):
    loss_fn, params, examples = _model_case(name, shape, num_classes, 5, tokens)
    _assert_same(loss_fn, params, examples, 5, rtol=2e-5)


@telling
def test_convolutions_and_dense_layers_are_sites():
    loss_fn, params, examples = _model_case("thesis_cnn", (28, 28, 1), 10, 2)
    one = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), examples)
    leaves, structure = jax.tree.flatten(params)
    plan = _plan(lambda flat, x: loss_fn(jax.tree.unflatten(structure, flat), x), leaves, one)
    assert len(plan.sites) == len(leaves)
    assert plan.direct == ()


def _convolution(kernel, shape, features, **options):
    """A convolution between two elementwise layers, with a parameter on its way in."""
    inputs = shape[-1]
    params = {
        "kernel": 0.1 * jax.random.normal(jax.random.key(0), (*kernel, inputs, features)),
        "scale": jnp.linspace(0.5, 1.5, inputs),
    }

    def convolve(x, w):
        names = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(x[None], w, dimension_numbers=names, **options)

    def loss_fn(p, x):
        return jnp.sum(jnp.tanh(lower(convolve)(jnp.tanh(x * p["scale"]), p["kernel"])) ** 2)

    return loss_fn, params, jax.random.normal(jax.random.key(1), (4, *shape))


_SAME = {"window_strides": (1, 1), "padding": "SAME"}
_ODD = {"window_strides": (1, 1), "padding": ((3, -1), (0, 2))}


# Winograd's tiles, kernels kept and transposed; forms by few rows, by small matrices and by large
# ones.
_FORMS = [
    ((3, 3), (12, 12, 32), 32, _SAME),
    ((3, 3), (12, 13, 32), 32, _ODD),
    ((3, 3), (4, 4, 64), 96, _SAME),
    ((5, 5), (8, 8, 3), 16, _SAME),
    ((5, 5), (8, 8, 40), 36, _SAME),
    ((3, 3), (9, 9, 40), 36, {"window_strides": (2, 2), "padding": "VALID"}),
    ((1, 1), (6, 6, 8), 16, _SAME),
]
_FURTHER_FORMS = [
    ((3, 3), (12, 12, 48), 32, _SAME),
    ((3, 3), (12, 12, 32), 48, _SAME),
    ((5, 5), (8, 9, 3), 16, _ODD),
]


@pytest.mark.parametrize(
    ("kernel", "shape", "features", "options"),
    [*later(_FORMS, mark=telling), *later(_FURTHER_FORMS)],
)
def test_convolutions_by_every_form(kernel, shape, features, options):
    loss_fn, params, x = _convolution(kernel, shape, features, **options)
    one = jax.ShapeDtypeStruct(shape, jnp.float32)
    leaves, structure = jax.tree.flatten(params)
    plan = _plan(lambda flat, x: loss_fn(jax.tree.unflatten(structure, flat), x), leaves, one)
    assert [site.leaf for site in plan.sites] == [1, 0] and plan.direct == ()
    _assert_same(loss_fn, params, x, 4)


@telling
def test_the_transpose_of_a_tiled_convolution():
    kernel = jax.random.normal(jax.random.key(0), (3, 3, 32, 32)) / 17
    x = jax.random.normal(jax.random.key(1), (4, 12, 12, 32))

    def loss_fn(p, x):
        def forwards(a):
            return lower(_convolve_same)(a[None], p["kernel"])[0]

        return jnp.sum(jnp.tanh(jax.linear_transpose(forwards, x)(x)[0]) ** 2)

    _assert_same(loss_fn, {"kernel": kernel}, x, 4)


def _convolve_same(x, w):
    dimensions = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=dimensions)


_PARAMS = {
    "w": np.random.default_rng(2).normal(size=(6, 4)).astype(np.float32),
    "b": np.random.default_rng(3).normal(size=4).astype(np.float32),
    "unused": np.ones(3, np.float32),
}
_X = np.random.default_rng(4).normal(size=(7, 5, 6)).astype(np.float32)


def _tied(p, x):
    return jnp.sum(jnp.tanh(x @ p["w"]) @ p["w"].T) + jnp.sum(p["b"] ** 2)


def _standardised(p, x):
    w = (p["w"] - p["w"].mean(0)) / jnp.std(p["w"], axis=0)
    return jnp.sum(jnp.tanh(x @ w + p["b"]) ** 2)


def _gathered(p, x):
    rows = jnp.array([0, 3, 3, 5])
    return jnp.sum(jnp.sin(p["w"][rows] * x[0, :4]) + p["b"])


def _looped(p, x):
    def step(carry, row):
        return jnp.tanh(carry + row @ p["w"]), None

    return jnp.sum(jax.lax.scan(step, p["b"], x)[0])


def _scaled(p, x):
    return jnp.sum(jax.nn.relu(x[:, :4] * p["b"]) @ p["w"].T)


def _checkpointed(p, x):
    layer = jax.checkpoint(lambda w, x: jnp.tanh(x @ w))
    return jnp.sum(layer(p["w"], x) * p["b"])


def _of_parameters_alone(p, x):
    return jnp.sum(p["w"] ** 3) * jnp.sum(x) + jnp.sum(p["b"])


def _compared_with_data(p, x):
    return jnp.sum(jnp.where(x[:, :4] > p["b"], x[:, :4] * p["b"], 0.0)) + jnp.sum(p["w"])


_FUNCTIONS = [
    *(_tied, _standardised, _gathered, _looped, _scaled, _checkpointed),
    *(_of_parameters_alone, _compared_with_data),
]


@pytest.mark.parametrize("loss_fn", later(_FUNCTIONS, but=[_compared_with_data], mark=telling))
def test_any_function(loss_fn):
    _assert_same(loss_fn, _PARAMS, _X, 7)


def test_inside_vmap_over_parameters_and_a_loop():
    def loss_fn(p, x):
        return jnp.sum(jnp.tanh(x @ p["w"] + p["b"]) ** 2)

    def step(p):
        result = per_example(loss_fn, p, _X)
        total = result.weighted_sum(jax.tree.map(jnp.ones_like, result.norms))
        return jax.tree.map(lambda a, g: a - 0.01 * g, p, total)

    many = jax.tree.map(lambda a: jnp.stack([a, 2 * a, -a]), _PARAMS)
    looped = jax.jit(jax.vmap(lambda p: jax.lax.fori_loop(0, 3, lambda _, q: step(q), p)))(many)
    plain = jax.jit(jax.vmap(jax.grad(lambda p: jax.vmap(loss_fn, (None, 0))(p, _X).sum())))
    expected = many
    for _ in range(3):
        expected = jax.tree.map(lambda a, g: a - 0.01 * g, expected, plain(expected))
    assert_trees_close(looped, expected, rtol=1e-5, atol=1e-5)


@telling
@pytest.mark.parametrize("bad", [np.nan, pytest.param(np.inf, marks=pytest.mark.slow)])
def test_an_example_of_weight_zero_adds_nothing_whatever_it_holds(bad):
    loss_fn, params, examples = _model_case("mlp", (12,), 5, 4)
    spoiled = examples | {"x": examples["x"].at[2].set(bad)}
    weights = jnp.array([1.0, 0.5, 0.0, 2.0])

    def total(examples):
        result = per_example(loss_fn, params, examples)
        return result.norms, result.weighted_sum(jax.tree.map(lambda _: weights, result.norms))

    (_, clean), (norms, after) = total(examples), total(spoiled)
    assert not all(np.isfinite(n[2]) for n in jax.tree.leaves(norms))
    assert_trees_close(clean, after)


@telling
def test_norms_and_sums_of_a_bfloat16_model_are_float32():
    def loss_fn(p, x):
        hidden = x.astype(jnp.bfloat16) @ p["w"].astype(jnp.bfloat16)
        return jnp.sum((hidden + p["b"].astype(jnp.bfloat16)).astype(jnp.float32) ** 2)

    narrow = jax.tree.map(lambda a: a.astype(jnp.bfloat16), _PARAMS)
    result = per_example(loss_fn, narrow, _X)
    total = result.weighted_sum(jax.tree.map(jnp.ones_like, result.norms))
    assert {leaf.dtype for leaf in jax.tree.leaves((result.norms, total))} == {jnp.dtype("float32")}


def test_a_norm_is_never_too_small_when_terms_cancel():
    """Rows that nearly cancel: what is clipped by the norm must not exceed the bound."""
    rng = np.random.default_rng(5)
    base = rng.normal(size=(1, 64)) * 200
    x = np.concatenate([np.repeat(base, 15, 0), -15 * base + 0.01 * rng.normal(size=(1, 64))])
    x = jnp.asarray(x + 1e-3 * rng.normal(size=x.shape), jnp.float32)
    w = jnp.asarray(rng.normal(size=(64, 64)), jnp.float32)

    def loss_fn(p, example):
        return jnp.sum((example @ p["w"]) @ jnp.ones((64, 1)))

    result = jax.jit(lambda p, x: per_example(loss_fn, p, x).norms)({"w": w}, x[None])
    exact = np.linalg.norm(np.asarray(x, np.float64).T @ np.ones((16, 64)))
    assert float(result["w"][0]) >= exact * (1 - 1e-5)


def test_the_sum_of_narrow_parameters_is_taken_in_float32():
    """Adding one example of weight 1 moves the sum by that example's gradient, not by rounding."""
    rng = np.random.default_rng(6)
    narrow = {"w": jnp.asarray(rng.normal(size=(8, 4)), jnp.bfloat16)}
    x = jnp.asarray(rng.normal(size=(200, 8)), jnp.bfloat16)

    def loss_fn(p, example):
        return jnp.sum((example[None] @ p["w"]).astype(jnp.float32))

    @jax.jit
    def total(weights):
        return per_example(loss_fn, narrow, x).weighted_sum({"w": weights})["w"]

    all_of_them, without = total(jnp.ones(200)), total(jnp.ones(200).at[0].set(0.0))
    own = np.outer(np.asarray(x[0], np.float64), np.ones(4))
    np.testing.assert_allclose(all_of_them - without, own, atol=1e-4)


@telling
@pytest.mark.parametrize(
    ("num_rows", "inputs"), later([(1, 8), (3, 8), (30, 600), (3, 600)], but=[(3, 8)])
)
def test_float64_stays_float64(num_rows, inputs):
    """Sums of a user's float64 model are exact to float64, whichever way a site is taken."""
    with jax.enable_x64(True):
        rng = np.random.default_rng(7)
        params = {"w": jnp.asarray(rng.normal(size=(inputs, 200)))}
        x = jnp.asarray(rng.normal(size=(3, num_rows, inputs)))
        weights = np.array([0.3, 0.0, 2.0], np.float32)

        def loss_fn(p, example):
            return jnp.sum(jnp.tanh(example @ p["w"]))

        got = per_example(loss_fn, params, x).weighted_sum({"w": jnp.asarray(weights)})["w"]
        _, _, sums = _reference(loss_fn, params, x, weights.astype(np.float64))
        assert got.dtype == jnp.float64
        np.testing.assert_allclose(got, sums["w"], rtol=1e-12, atol=1e-12 * np.abs(sums["w"]).max())


@telling
@pytest.mark.needs_data("mnist")
def test_clipped_sums_of_images_agree_with_float64(data_dir):
    images = load("mnist", data_dir).train
    batch = {name: np.asarray(array[:48]) for name, array in images.items()}
    shapes = {"x": jax.ShapeDtypeStruct(batch["x"].shape[1:], jnp.float32)}
    model = registry.build("thesis_cnn", shapes, 10)
    params = jax.jit(model.init)(jax.random.key(0))
    rule = clipped(model)
    is_real = jnp.arange(48) != 5

    @jax.jit
    def ours(params, clip_norm):
        config = LocalConfig(clip_norm=clip_norm, noise_multiplier=0.0, batch_size=48)
        return rule.micro_batch(params, batch, is_real, None, config).gradient

    def loss(p, example):
        return model.losses(p, jax.tree.map(lambda a: a[None], example), is_training=True)[0][0]

    with jax.enable_x64(True):
        wide = jax.tree.map(lambda a: jnp.asarray(np.asarray(a), jnp.float64), params)
        data = batch | {"x": jnp.asarray(batch["x"], jnp.float64)}
        each = jax.jit(jax.vmap(jax.grad(loss), (None, 0)))(wide, data)
        each = jax.tree.map(np.asarray, each)
    norms = np.sqrt(sum((g.reshape(48, -1) ** 2).sum(1) for g in jax.tree.leaves(each)))
    assert np.any(norms > 3.0)
    for clip_norm in (3.0, 1e6):
        factors = np.minimum(1, clip_norm / norms) * np.asarray(is_real)
        exact = jax.tree.map(lambda g, f=factors: np.tensordot(f, g, 1), each)
        pairs = list(zip(*map(jax.tree.leaves, (ours(params, clip_norm), exact)), strict=True))
        gap = np.sqrt(sum(np.sum((np.asarray(a, np.float64) - b) ** 2) for a, b in pairs))
        size = np.sqrt(sum(np.sum(b**2) for _, b in pairs))
        print(clip_norm, gap / size)
        assert gap <= 1e-6 * size


def called_back(method):
    def call(x):
        like = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return jax.pure_callback(np.sin, like, x, vmap_method=method)

    return call


def own_rule():
    own = jax.custom_batching.custom_vmap(jnp.sin)
    own.def_vmap(lambda size, batched, x: (jnp.sin(x - jnp.mean(x, 0)), True))
    return own


def foreign(x):
    like = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return jax.ffi.ffi_call("mixes", like, vmap_method="broadcast_all")(x)


@pytest.mark.parametrize(
    ("fn", "name"),
    [
        (called_back("expand_dims"), "pure_callback"),
        (lambda x: jax.lax.map(called_back("broadcast_all"), x), "pure_callback"),
        (called_back("sequential"), None),
        (own_rule(), "custom_vmap_call"),
        (foreign, "ffi_call"),
    ],
)
def test_what_receives_all_examples_together_is_refused(fn, name):
    def loss_fn(w, x):
        return jnp.sum(w * x) + jnp.sum(fn(jax.lax.stop_gradient(x)))

    def norms(w, x):
        return per_example(loss_fn, w, x).norms

    w, x = jnp.ones(3), jnp.ones((4, 3))
    if name is None:
        assert jax.eval_shape(norms, w, x).shape == (4,)
        return
    with pytest.raises(ValueError, match=rf"^{name} must not be called with all of a batch"):
        jax.eval_shape(norms, w, x)
