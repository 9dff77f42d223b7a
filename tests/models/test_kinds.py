"""Models of which a part is frozen, beside the whole models whose gradients are cut off by hand."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from lowering_checks import assert_trees_close as assert_same
from marks import later, slow, telling

from fedjax_dp.core import trees
from fedjax_dp.data.federated import FederatedData
from fedjax_dp.evaluation.evaluate import shared_evaluator
from fedjax_dp.models import kinds, registry
from fedjax_dp.models.base import Model
from fedjax_dp.models.per_example import _plan, per_example

CLASSES, EXAMPLES = 3, 6
RNG = np.random.default_rng(4)
IMAGES = RNG.normal(size=(EXAMPLES, 8, 8, 2)).astype(np.float32)
LABELS = RNG.integers(0, CLASSES, EXAMPLES)
MASK = np.arange(EXAMPLES) < 4


class Linen(nn.Module):
    normed: bool = False

    @nn.compact
    def __call__(self, x, *, train: bool = False):
        x = nn.Conv(5, (3, 3), name="body")(x)
        if self.normed:
            x = nn.BatchNorm(use_running_average=not train, momentum=0.5, name="norm")(x)
        x = nn.max_pool(nn.relu(x), (2, 2), (2, 2))
        x = nn.relu(nn.Conv(4, (3, 3), name="middle")(x))
        return nn.Dense(CLASSES, name="head")(jnp.mean(x, axis=(1, 2)))


class Nnx(nnx.Module):
    def __init__(self, rngs):
        self.body = nnx.Conv(2, 5, (3, 3), rngs=rngs)
        self.middle = nnx.Conv(5, 4, (3, 3), rngs=rngs)
        self.head = nnx.Linear(4, CLASSES, rngs=rngs)

    def __call__(self, x):
        x = nnx.max_pool(nnx.relu(self.body(x)), (2, 2), (2, 2))
        return self.head(jnp.mean(nnx.relu(self.middle(x)), axis=(1, 2)))


def linen(**options):
    shape = jax.ShapeDtypeStruct(IMAGES.shape[1:], jnp.float32)
    return Model.from_flax(Linen(**options), shape, loss="softmax_cross_entropy")


WHOLE = ("linen", "nnx")


@functools.cache
def whole_model(name):
    return linen() if name == "linen" else Model.from_nnx(Nnx, loss="softmax_cross_entropy")


BODY = ["params/body", "params/middle/*"]
HEAD = "params/head"


def frozen(where=BODY, name="linen", normed=False, **options):
    """A whole model, all of its parameters, the model with a part frozen, and its parameters."""
    whole = linen(normed=True) if normed else whole_model(name)
    full = whole.init(jax.random.key(0))
    if normed:
        full["batch_stats"]["norm"]["mean"] = jnp.linspace(-1.0, 1.0, 5)
    model = whole.freeze(where, full, **options)
    return whole, full, model, model.init(jax.random.key(0))


def batch():
    return {"x": jnp.asarray(IMAGES), "y": jnp.asarray(LABELS)}


def by_hand(model: Model, params, where):
    """Losses and the gradients of what is trained, all parameters given, the others kept."""
    is_frozen = kinds.marked(params, where)

    def total(p):
        stopped = jax.tree.map(lambda x, f: jax.lax.stop_gradient(x) if f else x, p, is_frozen)
        losses, _ = model.losses(stopped, batch(), is_training=True, mask=jnp.asarray(MASK))
        return jnp.sum(losses), losses

    (_, losses), gradient = jax.value_and_grad(total, has_aux=True)(params)
    return losses, jax.tree.map(lambda g, f: None if f else g, gradient, is_frozen)


def by_rank(path, leaf):
    return leaf.ndim == 1


@telling
@pytest.mark.parametrize("where", [BODY, pytest.param(HEAD, marks=slow), by_rank])
@pytest.mark.parametrize("name", later(WHOLE, but=["linen"], mark=telling))
def test_losses_and_gradients_are_those_of_the_whole_model(name, where):
    whole, full, model, params = frozen(where, name)

    def total(p):
        losses, refreshed = model.losses(p, batch(), is_training=True, mask=jnp.asarray(MASK))
        assert refreshed is p
        return jnp.sum(losses), losses

    (_, losses), gradient = jax.jit(jax.value_and_grad(total, has_aux=True))(params)
    expected_losses, expected = jax.jit(lambda p: by_hand(whole, p, where))(full)
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-5)
    assert_same(gradient, expected, rtol=1e-4, atol=1e-6)
    assert_same(model.full_params(params), full)
    np.testing.assert_allclose(
        model.predict(params, IMAGES), whole.predict(full, IMAGES), rtol=1e-5, atol=1e-6
    )


@telling
def test_another_key_starts_what_is_trained_anew_and_leaves_what_is_frozen():
    whole, full, model, _ = frozen()
    other = model.full_params(model.init(jax.random.key(1)))["params"]
    assert_same(other["head"], whole.init(jax.random.key(1))["params"]["head"])
    for part in ("body", "middle"):
        assert_same(other[part], full["params"][part])


@telling
def test_what_is_frozen_in_steps_is_frozen_together():
    whole, full, once, _ = frozen()
    twice = whole.freeze(BODY[0], full).freeze(BODY[1], full)
    params = once.init(jax.random.key(2))
    assert trees.paths(params) == ["params/head/bias", "params/head/kernel"]
    np.testing.assert_array_equal(once.predict(params, IMAGES), twice.predict(params, IMAGES))
    assert_same(once.full_params(params), twice.full_params(params))


def test_a_part_alone_is_enough_and_takes_the_types_of_the_model():
    whole, full, _, _ = frozen()
    body = jax.tree.map(lambda x: np.ones(x.shape), full["params"]["body"])
    model = whole.freeze("params/body", {"params": {"body": body}})
    full = model.full_params(model.init(jax.random.key(0)))
    kernel = full["params"]["body"]["kernel"]
    assert kernel.dtype == jnp.float32 and np.all(np.asarray(kernel) == 1)


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("params/haed", "must name parameters of the model, got 'params/haed'.*'params/head'"),
        (["params/head", "batch_stats"], "got 'batch_stats'; there are .*params/head"),
        ("params/Head/kernel", "did you mean 'params/head/kernel'"),
        ("params", "leave one of .*'params/body/bias'.* to be trained, got 'params'"),
        ("*", "leave one of"),
        ([], "name at least one parameter"),
        (lambda path, leaf: False, "name at least one parameter"),
    ],
)
def test_patterns_that_freeze_nothing_or_everything_are_refused(where, message):
    whole, full, _, _ = frozen()
    with pytest.raises(ValueError, match=message):
        whole.freeze(where, full)


def test_values_that_are_missing_or_of_another_shape_are_refused():
    model, full, _, _ = frozen()
    with pytest.raises(ValueError, match="hold a value of 'params/body/bias'"):
        model.freeze(BODY, {"params": {"head": full["params"]["head"]}})
    wide = jax.tree.map(lambda x: np.zeros((*x.shape, 2)), full)
    with pytest.raises(
        ValueError, match=r"params\['params/body/bias'\] must have the shape \(5,\)"
    ):
        model.freeze(BODY, wide)
    with pytest.raises(ValueError, match="hold the 2 arrays that are not frozen, got 6"):
        model.freeze(BODY, full).predict(full, IMAGES)


@telling
@pytest.mark.parametrize(
    "where", [*(pytest.param(w, marks=telling) for w in (BODY, HEAD)), "params/middle"]
)
def test_norms_and_sums_of_examples_are_those_of_the_whole_model(where):
    """Behind a frozen part, before it and around it."""
    whole, full, model, params = frozen(where)
    weights = RNG.uniform(size=EXAMPLES).astype(np.float32)

    def loss_with(model):
        def loss(p, example):
            single = jax.tree.map(lambda a: a[None], example)
            return model.losses(p, single, is_training=True)[0][0]

        return loss

    @jax.jit
    def ours(params, examples):
        result = per_example(loss_with(model), params, examples)
        spread = jax.tree.map(lambda _: jnp.asarray(weights), result.norms)
        return result.norms, result.weighted_sum(spread)

    norms, summed = ours(params, batch())
    each = jax.jit(jax.vmap(jax.grad(loss_with(whole)), in_axes=(None, 0)))(full, batch())
    is_frozen = kinds.marked(full, where)
    each = jax.tree.map(lambda g, f: None if f else np.asarray(g, np.float64), each, is_frozen)
    assert jax.tree.structure(norms) == jax.tree.structure(each)
    for norm, total, g in zip(*map(jax.tree.leaves, (norms, summed, each)), strict=True):
        expected = np.sqrt((g.reshape(EXAMPLES, -1) ** 2).sum(1))
        np.testing.assert_allclose(norm, expected, rtol=1e-4, atol=1e-6)
        expected = np.tensordot(weights, g, 1)
        np.testing.assert_allclose(total, expected, rtol=1e-4, atol=1e-5)


@telling
def test_what_is_frozen_makes_no_site_and_leaves_those_of_the_rest():
    model = registry.build("thesis_cnn", {"x": jax.ShapeDtypeStruct((28, 28, 1), jnp.float32)}, 10)
    full = jax.jit(model.init)(jax.random.key(0))
    names = sorted(full["params"])
    model = model.freeze([f"params/{name}" for name in names[:-1]], full)
    leaves, structure = jax.tree.flatten(model.init(jax.random.key(0)))
    one = {"x": jnp.zeros((1, 28, 28, 1)), "y": jnp.zeros(1, jnp.int32)}
    plan = _plan(
        lambda flat, x: model.losses(jax.tree.unflatten(structure, flat), x)[0][0], leaves, one
    )
    assert len(leaves) == 2 and len(plan.sites) == 2 and plan.direct == ()


@telling
def test_a_base_with_frozen_statistics_is_read_as_in_evaluation():
    where = [*BODY, "params/norm", "batch_stats"]
    whole, full, model, params = frozen(where, normed=True, mixes_examples=False)
    assert not model.mixes_examples and not model.buffer_keys
    assert whole.freeze(where, full).mixes_examples
    mask = jnp.asarray(MASK)
    losses, refreshed = model.losses(params, batch(), is_training=True, mask=mask)
    assert refreshed is params
    expected, _ = whole.losses(full, batch(), mask=mask)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)


@telling
def test_statistics_that_stay_buffers_are_refreshed_beside_what_is_frozen():
    whole, full, model, params = frozen(normed=True)
    params["batch_stats"] = full["batch_stats"]
    flags = model.is_buffer(params)
    assert jax.tree.leaves(flags["batch_stats"]) == [True, True]
    assert not any(jax.tree.leaves(flags["params"])) and model.mixes_examples
    _, refreshed = model.losses(params, batch(), is_training=True)
    _, expected = whole.losses(full, batch(), is_training=True)
    assert jax.tree.structure(refreshed) == jax.tree.structure(params)
    assert_same(refreshed["batch_stats"], expected["batch_stats"], rtol=1e-5, atol=1e-6)


def test_buffers_may_be_named_by_pattern_or_predicate():
    def apply(params, x):
        return x @ params["layer"]["w"], params

    def init(key):
        return {"layer": {"w": jnp.ones(3), "count": jnp.zeros(())}}

    for where in ("layer/count", ["*/count"], lambda path, leaf: leaf.ndim == 0):
        model = Model.from_functions(
            init, apply, loss="squared_error", refreshes_buffers=True, buffer_keys=where
        )
        flags = model.is_buffer(model.init(jax.random.key(0)))
        assert flags == {"layer": {"w": False, "count": True}}


def test_evaluation_reads_the_frozen_part():
    whole, full, model, params = frozen()
    data = FederatedData.from_clients([{"x": IMAGES, "y": LABELS.astype(np.int32)}])
    one = shared_evaluator(model, data)(params)
    other = shared_evaluator(whole, data)(full)
    assert one.accuracy == other.accuracy
    assert one.loss == pytest.approx(other.loss, rel=1e-5)


def test_no_gradient_of_a_frozen_body_is_computed():
    whole, full, model, params = frozen()

    def products(model, params):
        def total(p):
            return jnp.sum(model.losses(p, batch(), is_training=True)[0])

        return str(jax.make_jaxpr(jax.grad(total))(params)).count("dot_general")

    losses = jax.make_jaxpr(lambda p: model.losses(p, batch())[0])(params)
    forwards = str(losses).count("dot_general")
    assert products(model, params) == forwards + 1
    assert products(whole, full) > forwards + 3


@telling
def test_frozen_values_are_an_argument_of_a_compiled_function():
    """Other values neither trace again nor are text of the program, in inner loops neither."""
    whole = whole_model("linen")
    full = whole.init(jax.random.key(0))
    full["params"]["body"]["bias"] = jnp.linspace(-1.0, 1.0, 5)
    model = whole.freeze(BODY[0], full).freeze(BODY[1], full)
    params = model.init(jax.random.key(0))

    def body(total, _):
        return total + model.predict(params, IMAGES), None

    @jax.jit
    def looped(constants):
        with model.given(constants):
            return jax.lax.scan(body, jnp.zeros((EXAMPLES, CLASSES)), None, length=2)[0]

    doubled = jax.tree.map(lambda x: 2 * x, model.constants)
    as_held, twice = looped(model.constants), looped(doubled)
    other = jax.tree.map(lambda x, f: 2 * x if f else x, full, kinds.marked(full, BODY))
    np.testing.assert_allclose(as_held, 2 * whole.predict(full, IMAGES), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(twice, 2 * whole.predict(other, IMAGES), rtol=1e-5, atol=1e-6)
    assert looped._cache_size() == 1
    # The same body in another program, and outside of both.
    np.testing.assert_allclose(jax.jit(lambda c: -looped(c))(doubled), -twice, rtol=1e-6)
    np.testing.assert_allclose(
        body(0.0, None)[0], whole.predict(full, IMAGES), rtol=1e-5, atol=1e-6
    )
    # The bias is text of a program only where the model holds it.
    assert "-5.000000e-01" in jax.jit(body).lower(0.0, None).as_text()
    assert "-5.000000e-01" not in looped.lower(model.constants).as_text()
