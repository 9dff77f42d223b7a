"""Low-rank adapters: the outputs and gradients of the adapted kernels, which no client holds."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from marks import later, telling

from fedjax_dp.models import Model, char_transformer, fedavg_cnn, gpt2, lora, mlp
from fedjax_dp.models.per_example import _plan, per_example

FLOATS = jax.ShapeDtypeStruct((5,), jnp.float32)
TOKENS = jax.ShapeDtypeStruct((7,), jnp.int32)
IMAGE = jax.ShapeDtypeStruct((8, 8, 1), jnp.float32)


class _Attention(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Dense(12)(x).reshape(*x.shape[:-1], 3, 4)
        x = nn.MultiHeadDotProductAttention(num_heads=2, qkv_features=8)(x)
        return nn.Dense(3)(x[..., 0, :])


class _Tied(nn.Module):
    @nn.compact
    def __call__(self, x):
        table = nn.Embed(11, 4)
        hidden = nn.Dense(4)(table(x)).mean(1)
        return table.attend(hidden)


class _Scanned(nn.Module):
    """Layers of one kernel that is shared by all steps, under a checkpoint."""

    @nn.compact
    def __call__(self, x):
        kernel = self.param("kernel", nn.initializers.normal(0.3), (5, 5))
        step = jax.checkpoint(lambda x: jnp.tanh(x @ kernel.T))
        x, _ = jax.lax.scan(lambda x, _: (step(x), None), x, None, length=3)
        return nn.Dense(3)(x)


def _nnx(rngs):
    return nnx.Sequential(nnx.Linear(5, 6, rngs=rngs), jax.nn.relu, nnx.Linear(6, 3, rngs=rngs))


LOSS = "softmax_cross_entropy"
MODELS = {
    "mlp": (lambda: mlp(FLOATS, 3, hidden_sizes=[6]), FLOATS, "params/*/kernel"),
    "nnx": (lambda: Model.from_nnx(_nnx, loss=LOSS), FLOATS, "params/*/kernel"),
    "scanned": (lambda: Model.from_flax(_Scanned(), FLOATS, loss=LOSS), FLOATS, "params/kernel"),
    "attention": (
        lambda: Model.from_flax(_Attention(), FLOATS, loss=LOSS),
        FLOATS,
        {"params/*/query/kernel": 1, "params/*/out/kernel": 2, "params/*/value/kernel": 1},
    ),
    "tied": (
        lambda: Model.from_flax(_Tied(), TOKENS, loss=LOSS),
        TOKENS,
        ["params/Embed_0/embedding", "params/Dense_0/kernel"],
    ),
    "cnn": (lambda: fedavg_cnn(IMAGE, 3), IMAGE, "params/*/kernel"),
    "transformer": (
        lambda: char_transformer(TOKENS, 11, width=8, num_heads=2, num_layers=1),
        TOKENS,
        ["params/*/query/kernel", "params/*/dense_in/kernel"],
    ),
    "gpt2": (
        lambda: gpt2(TOKENS, 11, hidden_size=8, num_heads=2, num_layers=1),
        TOKENS,
        ["params/*/c_attn/kernel", "params/*/c_fc/kernel"],
    ),
}


def adapted(name, trained=(), **options):
    """A model, its adapted form, parameters that all count, and inputs."""
    build, one, targets = MODELS[name]
    model = build()
    base = jax.jit(model.init)(jax.random.key(0))
    low = lora(model, base, rank=2, targets=targets, trained=trained, **options)
    own = low.init(jax.random.key(1))
    noise = iter(jax.random.split(jax.random.key(2), 100))
    moved = jax.tree.map(lambda v: v + 0.1 * jax.random.normal(next(noise), v.shape), own)
    shape = (4, *one.shape)
    x = jax.random.normal(jax.random.key(3), shape)
    if one.dtype == jnp.int32:
        x = jax.random.randint(jax.random.key(3), shape, 0, 11)
    y = jnp.array([0, 2, 1, 1])
    if name in ("transformer", "gpt2"):
        y = jnp.mod(x, 3)
    return model, base, low, own, moved, {"x": x, "y": y}


def assert_close(found, expected):
    """To a few units of the last place of the largest entry."""
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-6 * np.abs(expected).max() + 1e-6)


@telling
@pytest.mark.parametrize("name", later(MODELS, but=["scanned", "tied"], mark=telling))
def test_outputs_are_those_of_the_model_with_the_adapters_added_in(name):
    model, base, low, own, moved, batch = adapted(name)
    start = model.predict(base, batch["x"])
    assert_close(low.predict(own, batch["x"]), start)
    found = low.predict(moved, batch["x"])
    full = low.full_params(moved)
    assert_close(found, model.predict(full, batch["x"]))
    assert np.abs(found - start).max() > 1e-3
    pairs = zip(jax.tree.leaves(full), jax.tree.leaves(base), strict=True)
    changed = [not np.array_equal(a, b) for a, b in pairs]
    assert sum(changed) == len(own["adapters"])


def test_an_adapter_is_added_with_alpha_over_rank():
    _, base, low, _, moved, _ = adapted("mlp", alpha=3.0)
    for path, pair in moved["adapters"].items():
        _, layer, _ = path.split("/")
        kernel = np.asarray(base["params"][layer]["kernel"], np.float64)
        expected = kernel + 3.0 / 2 * np.asarray(pair["down"], np.float64) @ pair["up"]
        got = low.full_params(moved)["params"][layer]["kernel"]
        np.testing.assert_allclose(got, expected, atol=1e-6)


@pytest.mark.parametrize("name", later(MODELS, but=["mlp", "nnx"], mark=telling))
def test_gradients_are_those_through_the_full_kernels(name):
    model, _, low, _, moved, batch = adapted(name)

    def through(own):
        return jnp.mean(model.losses(low.full_params(own), batch)[0])

    ours = jax.jit(jax.grad(lambda own: jnp.mean(low.losses(own, batch)[0])))(moved)
    expected = jax.jit(jax.grad(through))(moved)
    for x, y in zip(jax.tree.leaves(ours), jax.tree.leaves(expected), strict=True):
        assert_close(x, y)
        assert np.abs(y).max() > 1e-6


@pytest.mark.parametrize("name", later(["mlp", "transformer", "gpt2"], but=["mlp"], mark=telling))
def test_clipped_sums_equal_those_of_single_gradients_and_hold_none_of_the_base(name):
    _, _, low, _, moved, batch = adapted(name)

    def loss(own, example):
        return low.losses(own, jax.tree.map(lambda a: a[None], example))[0][0]

    found = jax.jit(lambda p: _clipped(per_example(loss, p, batch), 0.05))(moved)
    each = jax.vmap(jax.grad(loss), in_axes=(None, 0))(moved, batch)
    squares = sum(jnp.sum(g.reshape(4, -1) ** 2, 1) for g in jax.tree.leaves(each))
    factors = np.minimum(1, 0.05 / np.sqrt(np.asarray(squares, np.float64)))
    assert factors.min() < 1
    for x, g in zip(jax.tree.leaves(found), jax.tree.leaves(each), strict=True):
        np.testing.assert_allclose(x, np.tensordot(factors, g, 1), atol=1e-5)
    one = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), batch)
    leaves, structure = jax.tree.flatten(moved)
    plan = _plan(lambda flat, x: loss(jax.tree.unflatten(structure, flat), x), leaves, one)
    assert len(plan.sites) == len(leaves) and plan.direct == ()


def _clipped(result, bound):
    norm = jnp.sqrt(sum(n**2 for n in jax.tree.leaves(result.norms)))
    factor = jnp.minimum(1, bound / norm)
    return result.weighted_sum(jax.tree.map(lambda _: factor, result.norms))


def test_no_client_has_a_kernel_of_its_own():
    """A chunk of clients in training: one base, and an adapter for each."""
    _, _, low, _, moved, batch = adapted("mlp")
    many = jax.tree.map(lambda v: jnp.stack([v] * 16), moved)

    def steps(own):
        def loss(p):
            return jnp.mean(low.losses(p, batch)[0])

        return jax.tree.map(lambda p, g: p - 0.1 * g, own, jax.grad(loss)(own))

    text = str(jax.make_jaxpr(jax.vmap(steps))(many))
    assert "f32[16,5,2]" in text and "f32[16,2,6]" in text
    assert "f32[16,5,6]" not in text and "f32[16,6,3]" not in text


@telling
def test_some_parameters_are_trained_as_they_are():
    model, base, low, own, moved, batch = adapted("mlp", trained="params/Dense_1/bias")
    assert np.array_equal(own["trained"]["params"]["Dense_1"]["bias"], np.zeros(3))
    found = jax.grad(lambda p: jnp.mean(low.losses(p, batch)[0]))(moved)
    assert np.abs(found["trained"]["params"]["Dense_1"]["bias"]).max() > 0
    full = low.full_params(moved)
    assert_close(low.predict(moved, batch["x"]), model.predict(full, batch["x"]))
    assert np.array_equal(full["params"]["Dense_0"]["bias"], base["params"]["Dense_0"]["bias"])


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        (dict(targets="params/*/kernels"), "did you mean"),
        (dict(targets="params/*/bias"), "have two axes or more"),
        (dict(targets="params/*/kernel", trained="params"), "be a target or trained, not both"),
        (dict(targets={"params/*/kernel": 2}), "be below 2"),
        (dict(targets="params/*/kernel", rank=0), "rank must be an integer of at least 1"),
        (dict(targets="params/*/kernel", alpha=0.0), "alpha must be above 0"),
        (dict(targets="params/*/kernel", params={}), "hold a value of"),
    ],
)
def test_adapters_that_cannot_be_are_refused(options, rule):
    model = mlp(FLOATS, 3, hidden_sizes=[6])
    given = {"params": model.init(jax.random.key(0)), "rank": 2} | options
    with pytest.raises(ValueError, match=rule):
        lora(model, given.pop("params"), **given)


class _Centred(nn.Module):
    """Outputs less their mean over a batch, with or without statistics of batches."""

    normed: bool

    @nn.compact
    def __call__(self, x, is_training=False):
        x = nn.Dense(3)(x)
        if self.normed:
            return nn.BatchNorm(use_running_average=not is_training)(x)
        return x - jnp.mean(x, 0)


@pytest.mark.parametrize("normed", [False, True])
def test_adapters_mix_examples_where_evaluation_of_the_model_does(normed):
    module = _Centred(normed)
    model = Model.from_flax(module, FLOATS, loss=LOSS, mixes_examples=True, lower=False)
    low = lora(model, model.init(jax.random.key(0)), rank=1, targets="params/*/kernel")
    own, x = low.init(jax.random.key(1)), jnp.ones((2, 5))
    one, other = (low.apply(own, x.at[1].set(v), is_training=True)[0][0] for v in (1.0, 9.0))
    assert low.mixes_examples == bool(np.any(one != other)) == (not normed)
