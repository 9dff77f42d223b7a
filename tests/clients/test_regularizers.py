"""Local objectives as gradients, against differences of the objectives themselves."""

import chex
import jax
import jax.numpy as jnp
import optax

from fedjax_dp.clients import proximal, shift, towards

W = {"a": jnp.array([0.5, -1.0]), "b": jnp.array(2.0)}
START = {"a": jnp.array([0.1, 0.3]), "b": jnp.array(-1.0)}
GRADIENT = {"a": jnp.array([1.0, 2.0]), "b": jnp.array(-3.0)}


def test_proximal_is_the_gradient_of_its_term():
    transform = proximal(0.7)
    pulled, _ = transform.update(GRADIENT, transform.init(START), W)

    def term(w):
        squares = jax.tree.map(lambda x, y: jnp.sum((x - y) ** 2), w, START)
        return 0.7 / 2 * sum(jax.tree.leaves(squares))

    expected = jax.tree.map(jnp.add, GRADIENT, jax.grad(term)(W))
    chex.assert_trees_all_close(pulled, expected, rtol=1e-6)


def test_the_anchor_stays_while_parameters_move():
    optimizer = optax.chain(proximal(1.0), optax.sgd(0.5))
    zero = jax.tree.map(jnp.zeros_like, START)
    params, state = W, optimizer.init(START)
    for _ in range(40):
        updates, state = optimizer.update(zero, state, params)
        params = optax.apply_updates(params, updates)
    chex.assert_trees_all_close(params, START, rtol=1e-7, atol=1e-6)


def test_shift_adds_its_direction():
    transform = shift(START)
    moved, _ = transform.update(GRADIENT, transform.init(W), W)
    expected = jax.tree.map(jnp.add, GRADIENT, START)
    chex.assert_trees_all_equal(moved, expected)


def test_towards_is_the_gradient_of_a_term_with_an_anchor_from_elsewhere():
    transform = towards(START, 0.7)
    pulled, _ = transform.update(GRADIENT, transform.init(W), W)

    def term(w):
        squares = jax.tree.map(lambda x, y: jnp.sum((x - y) ** 2), w, START)
        return 0.7 / 2 * sum(jax.tree.leaves(squares))

    expected = jax.tree.map(jnp.add, GRADIENT, jax.grad(term)(W))
    chex.assert_trees_all_close(pulled, expected, rtol=1e-6)
