"""Arrays that are computed once for all of their readers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from fedjax_dp.core.materialize import materialize, materialize_equal

_X = jnp.asarray(np.random.default_rng(0).normal(size=(64, 128)), jnp.float32)
_W = jnp.asarray(np.random.default_rng(1).normal(size=(64, 64)), jnp.float32)


def _two_readers(keep):
    """Two products inside a loop that read different sums of one difference."""

    def fn(x):
        def body(_, x):
            kept = keep(x - jnp.roll(x, 1, axis=0) * x)
            sums = kept[:, ::2] + kept[:, 1::2], kept[:, ::2] * kept[:, 1::2]
            return jnp.concatenate([part @ _W for part in sums], axis=1) / 100

        return lax.fori_loop(0, x.shape[0] // 32, body, x)

    return fn


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="fusion of the CPU backend")
def test_what_two_read_is_computed_once():
    def num_subtractions(keep):
        return jax.jit(_two_readers(keep)).lower(_X).compile().as_text().count(" subtract(")

    assert num_subtractions(materialize) < num_subtractions(lambda x: x)


def test_nothing_is_changed():
    fn, plain = _two_readers(materialize), _two_readers(lambda x: x)
    np.testing.assert_allclose(jax.jit(fn)(_X), jax.jit(plain)(_X), rtol=1e-5, atol=1e-6)
    for x in (_X, jnp.arange(3), jnp.zeros((0, 2)), jnp.bfloat16(2)):
        np.testing.assert_array_equal(materialize(x), x)
        np.testing.assert_array_equal(jax.jit(materialize)(x), x)


def test_derivatives_and_batches_are_those_of_the_identity():
    def fn(x):
        return jnp.sum(jnp.sin(materialize(x)) * materialize(x))

    def plain(x):
        return jnp.sum(jnp.sin(x) * x)

    for transform in (jax.grad, jax.jacfwd, jax.hessian, lambda f: jax.vmap(f, in_axes=1)):
        got, expected = (jax.jit(transform(f))(_X[:3, :4]) for f in (fn, plain))
        np.testing.assert_allclose(got, expected, rtol=1e-6)


def test_the_cotangent_is_computed_once_too():
    _, pullback = jax.vjp(materialize, _X)
    assert "materialize" in str(jax.make_jaxpr(pullback)(_X))


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="loops of the CPU backend")
def test_equal_arrays_of_one_source_are_computed_once():
    def twice(keep):
        def body(_, x):
            return (keep(jnp.sin(x)) @ _W.T + _W @ keep(jnp.sin(x))) / 100

        return lambda x: lax.fori_loop(0, 3, body, x)

    def compiled(keep):
        return jax.jit(twice(keep)).lower(_W).compile()

    of_itself = compiled(lambda x: materialize_equal(x, x))
    assert of_itself.as_text().count(" while(") == 2
    np.testing.assert_allclose(of_itself(_W), twice(lambda x: x)(_W), rtol=1e-5)


@pytest.mark.parametrize("number", [0.0, -1.0, np.inf, np.nan])
def test_the_source_does_not_matter(number):
    source = jnp.full((2, 2), number)
    np.testing.assert_array_equal(jax.jit(materialize_equal)(_X, source), _X)


def test_derivatives_do_not_reach_the_source():
    def fn(x):
        return jnp.sum(jnp.sin(materialize_equal(x, x)) * materialize_equal(x, jnp.exp(x)))

    def plain(x):
        return jnp.sum(jnp.sin(x) * x)

    for transform in (jax.grad, jax.jacfwd, jax.hessian, lambda f: jax.vmap(f, in_axes=1)):
        got, expected = (jax.jit(transform(f))(_X[:3, :4]) for f in (fn, plain))
        np.testing.assert_allclose(got, expected, rtol=1e-6)
