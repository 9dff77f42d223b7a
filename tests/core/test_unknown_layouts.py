"""Loops, calls and primitives that a later JAX represents in another way than is known."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from fedjax_dp.algorithms import ClientOutput
from fedjax_dp.core import jaxprs
from fedjax_dp.core.marks import mark, marks_reaching
from fedjax_dp.engine import sides
from fedjax_dp.models import cost, lora, lowering
from fedjax_dp.models.base import Model

X = np.linspace(-1, 1, 3, dtype=np.float32)
IMAGES, KERNEL = np.ones((1, 4, 4, 1), np.float32), np.ones((2, 2, 1, 1), np.float32)


def conv(x):
    return lax.conv_general_dilated(
        x, KERNEL, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


STRUCTURES = {
    "scan": lambda fn: lambda x: lax.scan(lambda c, y: (fn(c) * y, y), x, jnp.ones(2))[0],
    "while": lambda fn: lambda x: lax.while_loop(lambda c: jnp.sum(c) < -5, fn, x),
    "cond": lambda fn: lambda x: lax.cond(jnp.sum(x) > 0, fn, lambda c: 2 * c, x),
    "jit": lambda fn: lambda x: jax.jit(fn)(x),
    "remat2": lambda fn: lambda x: jax.checkpoint(fn)(x),
    "custom_jvp_call": lambda fn: lambda x: _with_jvp(fn)(x),
    "custom_vjp_call": lambda fn: lambda x: _with_vjp(fn)(x),
}


def _with_jvp(fn):
    own = jax.custom_jvp(fn)
    own.defjvp(lambda primals, tangents: (fn(*primals), tangents[0]))
    return own


def _with_vjp(fn):
    own = jax.custom_vjp(fn)
    own.defvjp(lambda x: (fn(x), None), lambda _, g: (g,))
    return own


def equation(name, fn=jnp.sin, x=X):
    eqns = jax.make_jaxpr(STRUCTURES[name](fn))(x).jaxpr.eqns
    return next(eqn for eqn in eqns if eqn.primitive.name == name)


def unknown(monkeypatch, name):
    """As in JAX 0.11, which has no `num_consts` any more."""

    def read(params):
        raise KeyError("num_consts")

    monkeypatch.setitem(jaxprs._LAYOUTS, name, read)


@pytest.mark.parametrize("name", STRUCTURES)
def test_a_layout_without_one_of_its_parameters_is_not_known(name):
    eqn = equation(name)
    assert jaxprs.layout(eqn) is not None
    known = [jaxprs.layout(eqn.replace(params=_without(eqn.params, p))) for p in eqn.params]
    assert None in known
    assert jaxprs.layout(eqn.replace(params={})) is None
    shuffled = dict(zip(eqn.params, [*list(eqn.params.values())[1:], None], strict=True))
    assert jaxprs.layout(eqn.replace(params=shuffled)) is None
    # One operand more than the body has.
    assert jaxprs.layout(eqn.replace(invars=[*eqn.invars, eqn.invars[-1]])) is None


def _without(params, name):
    return {key: value for key, value in params.items() if key != name}


@pytest.mark.parametrize("name", STRUCTURES)
def test_what_is_not_known_is_not_lowered(name, monkeypatch):
    fn = STRUCTURES[name](conv)
    assert "conv_general_dilated" not in str(jax.make_jaxpr(lowering.lower(fn))(IMAGES))
    unknown(monkeypatch, name)
    lowered = jax.make_jaxpr(lowering.lower(fn))(IMAGES)
    assert "conv_general_dilated" in str(lowered)
    np.testing.assert_array_equal(jaxprs.jaxpr_as_fun(lowered)(IMAGES)[0], fn(IMAGES))
    assert cost.cost_of(fn, IMAGES).operations > 0


def test_a_primitive_with_another_parameter_is_not_lowered(monkeypatch):
    changed = jaxprs.PARAMETERS["conv_general_dilated"] - {"batch_group_count"}
    monkeypatch.setitem(jaxprs.PARAMETERS, "conv_general_dilated", changed)
    assert "conv_general_dilated" in str(jax.make_jaxpr(lowering.lower(conv))(IMAGES))
    assert cost.cost_of(conv, IMAGES).operations == 0


@pytest.mark.parametrize("name", ["scan", "remat2", "dot_general", "transpose"])
def test_kernels_of_low_rank_are_made_where_the_layout_is_not_known(name, monkeypatch):
    around = STRUCTURES.get(name, lambda fn: fn)

    def apply(params, x):
        return around(lambda h: h @ params["w"].T)(x)

    base = {"w": np.arange(9, dtype=np.float32).reshape(3, 3) / 9}
    model = Model.from_functions(lambda key: base, apply, loss="squared_error")
    adapted = lora(model, base, rank=1, targets="w")
    own = jax.tree.map(lambda x: x + 0.5, adapted.init(jax.random.key(0)))
    expected = apply(adapted.full_params(own), X)
    if name in STRUCTURES:
        unknown(monkeypatch, name)
    else:
        monkeypatch.setitem(jaxprs.PARAMETERS, name, {"other"})
    np.testing.assert_allclose(adapted.apply(own, X)[0], expected, rtol=1e-5)


@pytest.mark.parametrize("name", STRUCTURES)
@pytest.mark.parametrize("where", ["operand", "inside"])
def test_marks_reach_all_that_is_computed_in_an_unknown_way(name, where, monkeypatch):
    inner = (lambda c: c + mark(jnp.ones(3))) if where == "inside" else jnp.sin

    def fn(x):
        return STRUCTURES[name](inner)(mark(x) if where == "operand" else x), x * 2

    unknown(monkeypatch, name)
    found = marks_reaching(jax.make_jaxpr(fn)(X))
    assert found.outputs == [True, False] and found.unknown == [name]


def test_access_to_records_assumes_the_worst_of_an_unknown_loop_and_names_it(monkeypatch):
    def client(x):
        update = STRUCTURES["scan"](lambda c: c + mark(jnp.ones(3)))(x)
        return ClientOutput(update, jnp.float32(1), None)

    unknown(monkeypatch, "scan")
    closed, shapes = jax.make_jaxpr(client, return_shape=True)(X)
    with pytest.raises(ValueError, match=f"JAX {jax.__version__} represents scan in a way that"):
        sides._require_metrics_only(closed, shapes, "dp_sgd")


def test_marks_reach_all_outputs_of_a_loop_without_a_body_that_is_seen(monkeypatch):
    monkeypatch.setattr(jaxprs, "_jaxprs_in", lambda value: ())
    found = marks_reaching(jax.make_jaxpr(STRUCTURES["scan"](jnp.sin))(X))
    assert found.outputs == [True] and found.unknown == ["scan"]


LATER = jaxprs.define(
    "loop_of_a_later_version",
    lambda x, *, program: jaxprs.evaluate(program[0]["body"], [x])[0],
    abstract=lambda x, *, program: x,
    batch=lambda operands, axes, *, program: (LATER.bind(*operands, program=program), axes[0]),
)


class _Program(tuple):
    """What holds a jaxpr in a later version; JAX keys its caches by parameters."""

    __hash__ = object.__hash__


@pytest.mark.parametrize("where", ["operand", "inside", "nowhere"])
def test_marks_reach_all_outputs_of_an_unknown_primitive(where):
    inner = (lambda x: x + mark(jnp.ones(3))) if where == "inside" else jnp.sin
    program = _Program([{"body": jax.make_jaxpr(inner)(X)}])

    def fn(x):
        return LATER.bind(mark(x) if where == "operand" else x, program=program), x

    found = marks_reaching(jax.make_jaxpr(fn)(X))
    is_reached = where != "nowhere"
    assert found.outputs == [is_reached, False]
    assert found.unknown == ["loop_of_a_later_version"] * is_reached
    np.testing.assert_allclose(lowering.lower(fn)(X)[0], inner(X), rtol=1e-6)


@pytest.mark.parametrize("is_marked", [True, False])
def test_marks_reach_what_is_read_from_a_mutable_array(is_marked):
    def fn(x):
        held = jax.new_ref(jnp.zeros(3))
        held[...] = mark(x) if is_marked else x
        return held[...], x

    found = marks_reaching(jax.make_jaxpr(fn)(X))
    assert found.outputs == [is_marked, False]


def test_marks_that_are_not_seen_reach_everything(monkeypatch):
    monkeypatch.setattr("fedjax_dp.core.marks._is_seen", lambda: False)
    found = marks_reaching(jax.make_jaxpr(lambda x: (x, 2 * x))(X))
    assert found.outputs == [True, True] and found.unknown == ["checkpoint_name"]
