"""Control flow, custom derivatives and arguments of lowered functions."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from jax import lax
from lowering_checks import REPLACED, assert_close, normal, primitives, run
from marks import later, telling

from fedjax_dp.models.lowering import lower


def conv(x, w):
    return lax.conv_general_dilated(
        x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def pool(x):
    return nn.max_pool(x, (2, 2), (2, 2))


X, W = normal(0, (2, 6, 6, 3)), normal(1, (3, 3, 3, 3)) / 3


def in_jit(x, w):
    return jax.jit(jax.jit(conv))(x, w)


def in_remat(x, w):
    return jax.checkpoint(conv, policy=jax.checkpoint_policies.dots_saveable)(jnp.sin(x), w)


def in_scan(x, w):
    def step(carry, shift):
        carry = jnp.tanh(conv(carry, w) + shift)
        return carry, jnp.mean(carry)

    carry, means = lax.scan(step, x, jnp.arange(3.0), reverse=True)
    return carry * means[0] + means[-1]


def in_map(x, w):
    return lax.map(lambda scale: conv(x, scale * w), jnp.arange(1.0, 4.0))


def in_cond(x, w):
    return lax.cond(x[0, 0, 0, 0] > 0, lambda x, w: conv(x, w), lambda x, w: 2 * x, x, w)


def in_switch(x, w):
    branches = [lambda x: x, lambda x: conv(x, w), lambda x: conv(conv(x, w), w)]
    return lax.switch(jnp.int32(2), branches, x)


def in_counted_loop(x, w):
    return lax.fori_loop(0, 3, lambda i, x: jnp.tanh(conv(x, w)), x)


@jax.custom_jvp
def doubled_slope(x, w):
    return conv(x, w)


@doubled_slope.defjvp
def _(primals, tangents):
    (x, w), (dx, dw) = primals, tangents
    return doubled_slope(x, w), 2 * (conv(dx, w) + conv(x, dw))


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def flipped_gradient(x, w, factor):
    return factor * conv(x, w)


def _flipped_forward(x, w, factor):
    return flipped_gradient(x, w, factor), (x, w)


def _flipped_backward(factor, residuals, cotangent):
    x, w = residuals
    return -conv(cotangent, w), factor * jnp.ones_like(w) * jnp.sum(conv(x, w))


flipped_gradient.defvjp(_flipped_forward, _flipped_backward)


@jax.custom_vjp
def only_backward(x, w):
    """Convolves in its derivative alone."""
    return x * jnp.sum(w)


only_backward.defvjp(lambda x, w: (only_backward(x, w), (x, w)), lambda r, c: (conv(c, r[1]), r[1]))


@jax.custom_jvp
def only_tangent(x, w):
    """Convolves in its derivative alone."""
    return x * jnp.sum(w)


@only_tangent.defjvp
def _(primals, tangents):
    return only_tangent(*primals), conv(tangents[0], primals[1])


def activations(x, w):
    x = jax.nn.relu(conv(x, w)) + jax.nn.silu(x) + jax.nn.gelu(conv(x, w))
    return jax.nn.log_softmax(x) + jax.nn.softmax(x, axis=(1, 2)) + jnp.sum(pool(x))


FUNCTIONS = {
    "jit": in_jit,
    "remat": in_remat,
    "scan": in_scan,
    "map": in_map,
    "cond": in_cond,
    "switch": in_switch,
    "counted loop": in_counted_loop,
    "custom jvp": doubled_slope,
    "custom vjp": lambda x, w: flipped_gradient(x, w, 3.0),
    "custom vjp, backward only": only_backward,
    "custom jvp, derivative only": only_tangent,
    "custom jvp in scan": lambda x, w: lax.scan(
        lambda c, _: (jnp.tanh(doubled_slope(c, w)), None), x, length=2
    )[0],
    "activations": activations,
}


def objective(fn):
    return lambda x, w: jnp.sum(jnp.sin(fn(x, w)))


@pytest.mark.parametrize(
    "name", later(FUNCTIONS, but=["remat", "scan", "cond", "custom vjp"], mark=telling)
)
def test_structured_primitives_preserve_value_and_gradients(name):
    plain = FUNCTIONS[name]

    def evaluate(fn, x, w):
        return fn(x, w), jax.grad(objective(fn), (0, 1))(x, w)

    assert_close(*(run(functools.partial(evaluate, f), X, W) for f in (lower(plain), plain)))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_nothing_is_left_to_replace_in_structure(name):
    fn = objective(lower(FUNCTIONS[name]))
    gradient = jax.vmap(jax.grad(fn, (0, 1)))
    assert not REPLACED & primitives(fn, X, W)
    assert not REPLACED & primitives(gradient, X[None], W[None])


def test_a_loop_of_unknown_length_is_rewritten():
    def iterate(x, w, count):
        return lax.while_loop(
            lambda state: state[1] < count,
            lambda state: (jnp.tanh(conv(state[0], w)), state[1] + 1),
            (x, 0),
        )[0]

    assert_close(jax.jit(lower(iterate))(X, W, jnp.int32(4)), jax.jit(iterate)(X, W, jnp.int32(4)))
    assert not REPLACED & primitives(lower(iterate), X, W, jnp.int32(4))


def test_each_member_of_a_batched_loop_stops_by_itself():
    def iterate(x, limit):
        return lax.while_loop(
            lambda state: state[1] < limit,
            lambda state: (jnp.tanh(conv(state[0][None], W)[0]), state[1] + 1),
            (x, 0),
        )

    both, limits = jax.jit(jax.vmap(iterate)), jnp.array([3, 0])
    lowered = jax.jit(lower(jax.vmap(iterate)))
    actual, expected = lowered(X, limits), both(X, limits)
    assert_close(actual[0], expected[0])
    np.testing.assert_array_equal(actual[1], limits)


def test_functions_without_replaceable_primitives_are_unchanged():
    def plain(x):
        inner = jax.jit(lambda x: jax.nn.relu(jnp.tanh(x)))
        return lax.scan(lambda c, _: (inner(c), None), x, length=2)[0]

    assert str(jax.make_jaxpr(lower(plain))(X)) == str(jax.make_jaxpr(plain)(X))


@telling
def test_custom_rules_survive_where_autodiff_would_fail():
    # The derivative of relu at 0 is 0 by its rule; that of a norm at 0 is finite by ours.
    @jax.custom_jvp
    def norm(x):
        return jnp.sqrt(jnp.sum(x**2))

    @norm.defjvp
    def _(primals, tangents):
        (x,), (dx,) = primals, tangents
        value = norm(x)
        return value, jnp.vdot(x, dx) / jnp.maximum(value, 1e-6)

    def loss(x, w):
        return norm(conv(x, w)) + jnp.sum(jax.nn.relu(conv(x, w)))

    zeros = jnp.zeros_like(X)
    for gradient in jax.grad(lower(loss), (0, 1))(zeros, W):
        np.testing.assert_array_equal(gradient, 0)


@telling
def test_composition_of_grad_vmap_scan_jit_and_remat():
    xs = normal(2, (3, *X.shape))

    def train(fn, xs, w):
        def loss(w, x):
            return jnp.mean(jnp.square(pool(jax.nn.relu(fn(x, w)))))

        def step(w, x):
            return w - 0.1 * jax.grad(jax.checkpoint(loss))(w, x), None

        def client(xs):
            return lax.scan(step, w, xs)[0]

        return jax.vmap(client)(jnp.stack([xs, 2 * xs]))

    lowered = jax.jit(lambda xs, w: lower(functools.partial(train, conv))(xs, w))
    inner = jax.jit(functools.partial(train, lower(conv)))
    plain = jax.jit(functools.partial(train, conv))
    expected = plain(xs, W)
    assert_close(lowered(xs, W), expected)
    assert_close(inner(xs, W), expected)
    assert not REPLACED & primitives(lower(functools.partial(train, conv)), xs, W)


@telling
def test_an_outer_gradient_and_an_outer_batch_reach_closed_over_arrays():
    def loss(w, x):
        return jnp.sum(jnp.sin(lower(lambda x: conv(x, w))(x)))

    def plain(w, x):
        return jnp.sum(jnp.sin(conv(x, w)))

    xs = jnp.stack([X, 2 * X])
    actual, expected = (jax.vmap(jax.grad(f), (None, 0))(W, xs) for f in (loss, plain))
    assert_close(actual, expected)


def test_pytrees_keywords_and_static_leaves_pass_through():
    def fn(params, *, x, activation, scale, flag):
        assert isinstance(flag, bool)
        out = activation(conv(x, params["w"])) * scale
        return {"out": out, "nothing": None, "pair": (params["w"], jnp.sum(out))}

    kwargs = {"x": X, "activation": jnp.tanh, "scale": 2.0, "flag": True}
    actual, expected = lower(fn)({"w": W}, **kwargs), fn({"w": W}, **kwargs)
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    assert_close(actual, expected)


def test_random_keys_pass_through():
    def fn(x, w, key):
        return conv(x, w) * jax.random.bernoulli(key, 0.5, x.shape)

    for key in (jax.random.key(3), jax.random.PRNGKey(3)):
        assert_close(lower(fn)(X, W, key), fn(X, W, key))


def test_named_axes_reach_collectives():
    def fn(x, w):
        return lax.pmean(conv(x, w), "clients")

    xs = jnp.stack([X, 2 * X])
    batched = functools.partial(jax.vmap, in_axes=(0, None), axis_name="clients")
    assert_close(batched(lower(fn))(xs, W), batched(fn)(xs, W))


class Unprepared(nn.Module):
    """Strides, dilation, groups, transposition, normalisation and pools in one model."""

    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Conv(8, (3, 3), strides=2)(x))
        x = nn.gelu(nn.remat(nn.Conv)(8, (3, 3), feature_group_count=8, kernel_dilation=2)(x))
        x = nn.GroupNorm(4)(x)
        x = nn.silu(nn.ConvTranspose(4, (3, 3), strides=(2, 2))(x))
        x = nn.max_pool(x, (3, 3), (2, 2), "SAME")
        x = nn.avg_pool(x, (2, 2), (2, 2), count_include_pad=False)
        return nn.Dense(3)(x.reshape(x.shape[0], -1))


@telling
def test_a_linen_model_trains_per_example_without_windows():
    model, x = Unprepared(), normal(0, (3, 12, 12, 2))
    params = run(model.init, jax.random.key(0), x)

    def loss(apply):
        return lambda params, x: jnp.sum(jax.nn.log_softmax(apply(params, x[None]))[0, 1])

    per_example = [
        jax.vmap(jax.grad(loss(apply)), (None, 0)) for apply in (lower(model.apply), model.apply)
    ]
    assert_close(*(run(f, params, x) for f in per_example))
    assert not REPLACED & primitives(per_example[0], params, x)


@telling
def test_an_nnx_model_matches():
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.conv = nnx.Conv(2, 4, (3, 3), rngs=rngs)
            self.norm = nnx.GroupNorm(4, num_groups=2, rngs=rngs)
            self.head = nnx.Linear(4, 3, rngs=rngs)

        def __call__(self, x):
            x = nnx.max_pool(nnx.relu(self.norm(self.conv(x))), (2, 2), (2, 2))
            return self.head(x.mean((1, 2)))

    graph, state = nnx.split(Net(nnx.Rngs(0)))
    x = normal(0, (3, 8, 8, 2))

    def apply(state, x):
        return nnx.merge(graph, state)(x)

    def gradients(apply):
        return jax.grad(lambda state, x: jnp.sum(jnp.square(apply(state, x))))

    assert_close(*(run(gradients(f), state, x) for f in (lower(apply), apply)))
    assert not REPLACED & primitives(gradients(lower(apply)), state, x)
