"""How well models fit a client, and choices among them by it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from marks import later
from oracles import logistic
from scipy.stats import chisquare
from small_problem import make_model, theta_of

from fedjax_dp.clients import (
    ClientData,
    accuracy_of,
    exact_choice,
    mean_loss,
    private_choice,
    whole_score,
)
from fedjax_dp.data import FederatedData
from fedjax_dp.evaluation.evaluate import shared_evaluator
from fedjax_dp.privacy import score_units


@pytest.mark.parametrize("block_size", [1, 3, 7, 128])
@pytest.mark.parametrize("size", [0, 1, 6, 7])
def test_mean_loss_whatever_the_block(block_size, size):
    model = make_model()
    params = model.init(jax.random.key(3))
    rng = np.random.default_rng(0)
    # Rows behind the client's own belong to others and must not enter.
    x = rng.normal(size=(30, 3)).astype(np.float32)
    x[4 + size :] = np.nan
    y = rng.integers(0, 2, 30).astype(np.float32)
    client = ClientData(
        {"x": jnp.asarray(x), "y": jnp.asarray(y)}, jnp.int32(4), jnp.int32(size), jnp.int32(0), 9
    )
    got = jax.jit(lambda p: mean_loss(model, p, client, block_size=block_size))(params)
    own = slice(4, 4 + size)
    losses = logistic.losses(theta_of(params), x[own].astype(float), y[own])
    np.testing.assert_allclose(got, losses.mean() if size else 0.0, rtol=1e-5)


def choosing_client(x, y, limit=12):
    return ClientData(
        {"x": jnp.asarray(x), "y": jnp.asarray(y)},
        jnp.int32(0),
        jnp.int32(len(y)),
        jnp.int32(0),
        limit,
    )


def three_models():
    """Planes that put 9, 6 and 3 of nine labels right."""
    rng = np.random.default_rng(4)
    x = rng.normal(size=(9, 3)).astype(np.float32)
    x[:, 1] = np.where(np.arange(9) < 6, 1, -1) * x[:, 0]
    y = (x[:, 0] > 0).astype(np.float32)
    models = {"b": jnp.zeros(3), "w": jnp.array([[1.0, 0, 0], [0, 1.0, 0], [0, -1.0, 0]])}
    return models, choosing_client(x, y)


@pytest.mark.parametrize("block_size", [2, 5, 128])
def test_accuracies_are_counted(block_size):
    models, client = three_models()
    model = make_model()
    params = [jax.tree.map(lambda p, m=m: p[m], models) for m in range(3)]
    found = [accuracy_of(model, p, client, block_size=block_size) for p in params]
    np.testing.assert_allclose(found, [1.0, 6 / 9, 3 / 9], rtol=1e-6)
    # With one prediction an example there is no difference.
    whole = [whole_score(model, p, client, block_size=block_size) for p in params]
    np.testing.assert_array_equal(whole, np.array([9, 6, 3]) * score_units(client.limit))
    empty = client.replace(size=jnp.int32(0))
    for count in (whole_score, accuracy_of):
        assert count(model, model.init(jax.random.key(0)), empty) == 0


@pytest.mark.parametrize("block_size", [2, 128])
def test_an_accuracy_is_that_of_predictions_and_that_of_evaluations(block_size):
    """By hand: 3 of 4, 0 of 0 and 1 of 6 predictions are right, which makes 4 of 10."""
    model = make_model()
    counts = np.array([[3, 4], [0, 0], [1, 6]], np.float32)

    def correct_fn(outputs, batch):
        return batch["y"][..., 0] + 0 * outputs, batch["y"][..., 1]

    model = model._replace(correct_fn=correct_fn, loss_fn=lambda outputs, batch: 0 * outputs)
    params, x = model.init(jax.random.key(0)), np.ones((3, 3), np.float32)
    found = accuracy_of(model, params, choosing_client(x, counts), block_size=block_size)
    np.testing.assert_allclose(found, 4 / 10, rtol=1e-6)
    data = FederatedData.from_clients([{"x": x, "y": counts}])
    assert shared_evaluator(model, data)(params).accuracy == pytest.approx(4 / 10)


@pytest.mark.parametrize("value", [0.0, 1e30, np.inf, np.nan])
@pytest.mark.parametrize("score", ["accuracy", "loss"])
def test_one_example_moves_a_score_by_no_more_than_its_sensitivity(score, value):
    """Replaced, added or removed, whatever the example is."""
    models, client = three_models()
    params, model = jax.tree.map(lambda p: p[0], models), make_model()
    x, y = (np.asarray(client.examples[k]) for k in ("x", "y"))
    replaced = x.copy()
    replaced[-1] = value

    def total(client):
        return int(whole_score(model, params, client, score=score, loss_bound=2.0))

    others = [(replaced, y), (x[:-1], y[:-1]), (replaced, np.append(y[:-1], 1 - y[-1]))]
    for other in others:
        assert abs(total(choosing_client(*other)) - total(client)) <= score_units(client.limit)


@pytest.mark.parametrize("num_examples", later([20_000, 1_000_000], but=[20_000]))
def test_one_of_many_examples_moves_a_score_by_no_more_than_its_sensitivity(num_examples):
    """Sums in float32 would move by 1.0013 and by 1.05 of it."""
    model = make_model()._replace(loss_fn=lambda outputs, batch: batch["y"] + 0 * outputs)
    params, x = model.init(jax.random.key(0)), jnp.zeros((num_examples, 3))
    y = np.random.default_rng(0).uniform(0.3, 1, num_examples).astype(np.float32)

    @jax.jit
    def total(y):
        client = choosing_client(x, y, num_examples)
        return whole_score(model, params, client, score="loss", loss_bound=1.0, block_size=4096)

    for place in range(0, num_examples, num_examples // 4):
        ends = [int(total(jnp.asarray(y).at[place].set(end))) for end in (0.0, 1.0)]
        assert ends[0] - ends[1] == score_units(num_examples)
    exact = -float(np.sum(y.astype(np.float64)))
    assert int(total(jnp.asarray(y))) / score_units(num_examples) == pytest.approx(exact, rel=1e-4)


def test_private_choices_have_the_frequencies_of_the_exponential_mechanism():
    """Oracle 5: softmax of ε s (n - 1)/2, and never a model that is not offered."""
    models, client = three_models()
    choice, numbers = private_choice(make_model()), {"selection_epsilon": 0.6}
    for offered in ([True, True, True], [True, False, True]):
        draw = jax.jit(
            jax.vmap(lambda key, o: choice.of(key, models, client, o, numbers), in_axes=(0, None))
        )
        keys = jax.random.split(jax.random.key(0), 4000)
        counts = np.bincount(np.asarray(draw(keys, jnp.asarray(offered))), minlength=3)
        logits = 0.6 * np.array([1.0, 6 / 9, 3 / 9]) * 8 / 2
        chance = np.exp(logits) * offered
        chance /= chance.sum()
        kept = np.asarray(offered)
        assert counts[~kept].sum() == 0
        assert chisquare(counts[kept], 4000 * chance[kept]).pvalue > 1e-3
        flat = 4000 * kept[kept] / kept.sum()
        assert chisquare(counts[kept], flat).pvalue < 1e-6, "the test would see another scale"


def test_exact_choices_take_the_smallest_loss_that_is_offered():
    models, client = three_models()
    model = make_model()
    losses = [mean_loss(model, jax.tree.map(lambda p, m=m: p[m], models), client) for m in range(3)]
    choice = exact_choice(model)
    key = jax.random.key(0)
    assert choice.of(key, models, client, jnp.ones(3, bool), {}) == np.argmin(losses) == 0
    assert choice.of(key, models, client, jnp.array([False, True, True]), {}) == 1
    assert choice.event is None
