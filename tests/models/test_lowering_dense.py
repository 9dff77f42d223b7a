"""Dense layers with few outputs: values, derivatives and what the compiler is left with."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from lowering_checks import assert_close, normal, primitives, run

from fedjax_dp.core.backend import traced_for
from fedjax_dp.models.lowering import dense, lower
from fedjax_dp.models.per_example import _plan, _product_form

WIDE = 33


def layer(x, w):
    return x @ w


def loss(f):
    return lambda w, x: jnp.sum(jnp.sin(f(x, w)))


@pytest.mark.parametrize("lead", [(4,), (2, 3)])
def test_values_and_derivatives_are_those_of_the_product(lead):
    x, w = normal(0, (*lead, 9)), normal(1, (9, 3))
    dx, dw = normal(2, x.shape), normal(3, w.shape)

    def derivatives(f):
        gradient = jax.grad(loss(f), (0, 1))
        return {
            "value": f(x, w),
            "tangent": jax.jvp(f, (x, w), (dx, dw)),
            "gradient": gradient(w, x),
            "hessian product": jax.jvp(gradient, (w, x), (dw, dx)),
            "reverse over reverse": jax.grad(lambda w: jnp.vdot(gradient(w, x)[0], dw))(w),
        }

    assert dense.NAME in primitives(lower(layer), x, w)
    assert_close(*run(lambda: [derivatives(f) for f in (lower(layer), layer)]))


@pytest.mark.parametrize("axes", [(None, 0), (0, None), (2, 1)])
def test_a_batch_of_gradients_and_the_gradient_of_a_batch_match_the_product(axes):
    """Wherever the axis of clients is, the last two are transposed."""
    w, x = normal(0, (9, 3)), normal(1, (4, 9))
    ws = w if axes[0] is None else np.stack([w, 2 * w], axes[0])
    xs = x if axes[1] is None else np.stack([x, 3 * x], axes[1])

    def both(f):
        total = jax.grad(lambda w, x: jnp.sum(jax.vmap(loss(f), axes)(w, x)), (0, 1))
        return jax.vmap(jax.grad(loss(f), (0, 1)), axes)(ws, xs), total(ws, xs)

    assert_close(*run(lambda: [both(f) for f in (lower(layer), layer)]))


def test_gradients_of_clients_are_computed_transposed():
    """Without the barrier the compiler folds the transpose into the product."""

    def compiled(f):
        step = jax.vmap(jax.grad(loss(f)))
        return jax.jit(step).lower(normal(0, (5, 9, 3)), normal(1, (5, 4, 9))).compile().as_text()

    assert "f32[5,3,9]" in compiled(lower(layer))
    assert "f32[5,3,9]" not in compiled(layer)


@pytest.mark.parametrize(
    ("x", "w"),
    [((4, 2), (2, 3)), ((4, WIDE), (WIDE, WIDE)), ((1, 9), (9, 3)), ((9,), (9, 3))],
    ids=["more outputs than inputs", "many outputs", "one row", "a vector"],
)
def test_other_products_are_left_as_they_were_traced(x, w):
    assert dense.NAME not in primitives(lower(layer), normal(0, x), normal(1, w))


def test_products_of_other_axes_are_left_as_they_were_traced():
    def turned(x, w):
        return jax.lax.dot_general(x, w, (((1,), (1,)), ((), ())))

    assert dense.NAME not in primitives(lower(turned), normal(0, (4, 9)), normal(1, (3, 9)))
    xs, ws = normal(0, (5, 4, 9)), normal(1, (5, 9, 3))
    assert dense.NAME not in primitives(lower(layer), xs, ws)


def test_accelerators_order_products_themselves():
    with traced_for("gpu"):
        assert dense.NAME not in primitives(lower(layer), normal(0, (4, 9)), normal(1, (9, 3)))


def test_layers_in_loops_are_found_too():
    def scanned(w, xs):
        return jax.lax.scan(lambda total, x: (total + jnp.sum(x @ w), None), 0.0, xs)[0]

    assert dense.NAME in primitives(lower(scanned), normal(0, (9, 3)), normal(1, (2, 4, 9)))


def test_a_narrow_layer_of_a_sequence_is_a_site_of_examples():
    """Its gradients need not be formed one by one."""
    shape = jax.ShapeDtypeStruct((4, 9), jnp.float32)
    plan = _plan(lambda w, x: loss(lower(layer))(w[0], x), [normal(0, (9, 3))], shape)
    eqns = plan.closed.jaxpr.eqns
    assert dense.NAME in {eqn.primitive.name for eqn in eqns}
    (site,) = plan.sites
    assert not plan.direct
    assert _product_form(plan, site, eqns[site.equation]) is not None


def test_the_number_of_rows_may_be_unknown():
    """As where a model is exported for batches of any size."""
    size = jax.export.symbolic_shape("rows")[0]
    x = jax.ShapeDtypeStruct((size, 9), jnp.float32)
    exported = jax.export.export(jax.jit(lower(layer)))(x, normal(0, (9, 3)))
    assert str(exported.out_avals[0].shape) == "(rows, 3)"
