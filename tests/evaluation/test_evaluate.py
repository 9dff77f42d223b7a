"""Evaluation in compiled blocks against float64 NumPy, client by client."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from marks import later

from fedjax_dp.data.federated import FederatedData
from fedjax_dp.evaluation import evaluate, personal_evaluator, shared_evaluator
from fedjax_dp.models.base import Model

NUM_FEATURES, NUM_CLASSES = 4, 3
SIZES = (5, 0, 13, 1, 0, 7, 0)


def classifier():
    return Model.from_functions(
        lambda key: jnp.zeros((NUM_FEATURES, NUM_CLASSES)),
        lambda params, x: x @ params,
        loss="softmax_cross_entropy",
    )


def make_data(sizes=SIZES, seed=0):
    rng = np.random.default_rng(seed)
    clients = [
        {
            "x": rng.normal(size=(size, NUM_FEATURES)).astype(np.float32),
            "y": rng.integers(0, NUM_CLASSES, size).astype(np.int32),
        }
        for size in sizes
    ]
    return FederatedData.from_clients(clients)


def weights(seed=1, *lead):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(*lead, NUM_FEATURES, NUM_CLASSES)).astype(np.float32)


def by_hand(params, x, y):
    """Losses and hits of each example."""
    logits = np.asarray(x, np.float64) @ np.asarray(params, np.float64)
    top = logits.max(axis=-1)
    normaliser = top + np.log(np.exp(logits - top[:, None]).sum(axis=-1))
    return normaliser - logits[np.arange(len(y)), y], logits.argmax(axis=-1) == y


def expected(data, params_of):
    """Means over examples, of all and of each client; NaN for nothing."""
    each = [by_hand(params_of(i), **data.client(i)) for i in range(data.num_clients)]
    losses, hits = ([part[k] for part in each] for k in (0, 1))

    def mean(values):
        return np.mean(values) if len(values) else np.nan

    return (
        mean(np.concatenate(losses)),
        mean(np.concatenate(hits)),
        np.array([mean(part) for part in losses]),
        np.array([mean(part) for part in hits]),
    )


def check(evaluation, data, params_of):
    loss, accuracy, client_loss, client_accuracy = expected(data, params_of)
    assert evaluation.loss == pytest.approx(loss, rel=1e-6)
    assert evaluation.accuracy == pytest.approx(accuracy, rel=1e-12)
    np.testing.assert_allclose(evaluation.client_loss, client_loss, rtol=1e-6)
    np.testing.assert_allclose(evaluation.client_accuracy, client_accuracy, rtol=1e-12)
    np.testing.assert_array_equal(evaluation.client_sizes, data.sizes)
    assert np.isnan(evaluation.client_loss).sum() == (data.sizes == 0).sum()


BLOCKS = (1, 3, 7, 25, 26, 27, 512)


@pytest.mark.parametrize("share", later([1, 3, 20], but=[3]))
def test_data_beyond_what_is_placed_at_once_come_in_parts(share, monkeypatch):
    data, params, own = make_data(), weights(), weights(2, len(SIZES))
    placed, put = [], jax.device_put
    limit, of_row = data.num_bytes // share, data.num_bytes // data.num_examples
    monkeypatch.setattr(evaluate, "_PART_BYTES", limit)
    monkeypatch.setattr(jax, "device_put", lambda x: placed.append(x) or put(x))
    check(shared_evaluator(classifier(), data, block_size=4)(params), data, lambda i: params)
    largest = max(len(x["y"]) for x in placed if isinstance(x, dict))
    assert 0 < largest * of_row <= max(limit, 4 * of_row)
    found = personal_evaluator(classifier(), data, lambda i, all_: all_[i], block_size=4)(own)
    check(found, data, lambda i: own[i])


@pytest.mark.parametrize("block_size", BLOCKS)
def test_one_model_on_every_client(block_size):
    data, params = make_data(), weights()
    evaluate = shared_evaluator(classifier(), data, block_size=block_size)
    check(evaluate(params), data, lambda i: params)
    other = weights(5)
    check(evaluate(other), data, lambda i: other)


@pytest.mark.parametrize("block_size", BLOCKS)
def test_personal_models(block_size):
    data, rows = make_data(), weights(2, len(SIZES))
    shift = np.float32(0.5)

    def params_of(index, rows, shift):
        return rows[index] + shift

    evaluate = personal_evaluator(classifier(), data, params_of, block_size=block_size)
    check(evaluate(rows, shift), data, lambda i: rows[i] + shift)


def test_a_whole_is_a_store_of_one_client():
    data, params = make_data((31,)), weights()
    check(shared_evaluator(classifier(), data, block_size=8)(params), data, lambda i: params)


@pytest.mark.parametrize("sizes", [(0,), (0, 0, 0)])
def test_nothing_held_out_is_no_number(sizes):
    data = make_data(sizes)
    for evaluation in (
        shared_evaluator(classifier(), data)(weights()),
        personal_evaluator(classifier(), data, lambda index, params: params)(weights()),
    ):
        assert np.isnan(evaluation.loss) and np.isnan(evaluation.accuracy)
        assert np.isnan(evaluation.client_loss).all()
        assert np.isnan(evaluation.client_accuracy).all()
        assert evaluation.client_accuracy.shape == (len(sizes),)


def test_a_client_that_diverged_does_not_spoil_the_others():
    data = make_data()
    rows = weights(2, len(SIZES))
    rows[2] = np.nan
    evaluation = personal_evaluator(classifier(), data, lambda i, rows: rows[i])(rows)
    assert np.isnan(evaluation.client_loss[2]) and np.isnan(evaluation.loss)
    rows[2] = 0.0
    assert np.isfinite(evaluation.client_loss[[0, 3, 5]]).all()
    np.testing.assert_allclose(
        evaluation.client_loss[[0, 3, 5]],
        expected(data, lambda i: rows[i])[2][[0, 3, 5]],
        rtol=1e-6,
    )


def test_a_regression_has_a_loss_and_no_accuracy():
    model = Model.from_functions(
        lambda key: jnp.zeros(NUM_FEATURES),
        lambda params, x: x @ params,
        loss=lambda outputs, batch: (outputs - batch["y"]) ** 2,
    )
    data, params = make_data(), weights()[:, 0]
    evaluation = shared_evaluator(model, data)(params)
    x, y = (np.asarray(data.examples[name], np.float64) for name in ("x", "y"))
    assert evaluation.loss == pytest.approx(np.mean((x @ params.astype(np.float64) - y) ** 2))
    assert np.isnan(evaluation.accuracy) and np.isnan(evaluation.client_accuracy).all()
    assert np.isfinite(evaluation.client_loss[data.sizes > 0]).all()


def test_accuracy_weighs_predictions_where_an_example_has_several():
    """As for next characters: a row counts as many predictions as it has targets."""
    model = Model.from_functions(
        lambda key: jnp.float32(0),
        lambda params, x: x + params,
        loss=lambda outputs, batch: jnp.sum(outputs, axis=-1),
        correct_fn=lambda outputs, batch: (
            jnp.sum(jnp.where(batch["y"] >= 0, outputs == batch["y"], False), axis=-1),
            jnp.sum(batch["y"] >= 0, axis=-1),
        ),
    )
    data = FederatedData(
        {
            "x": np.array([[1, 2, 3], [4, 5, 6], [1, 1, 1], [7, 7, 7]], np.float32),
            "y": np.array([[1, 2, 0], [4, -1, -1], [-1, -1, -1], [0, 7, -1]], np.int32),
        },
        np.array([0, 2, 3, 4]),
    )
    evaluation = shared_evaluator(model, data, block_size=3)(np.float32(0))
    np.testing.assert_allclose(evaluation.client_accuracy, [3 / 4, np.nan, 1 / 2])
    assert evaluation.accuracy == pytest.approx(4 / 6)


def test_sums_stay_exact_over_many_examples():
    """A share is not lost where a float32 sum of examples would no longer count them."""
    size = 200_001
    model = Model.from_functions(
        lambda key: jnp.float32(0),
        lambda params, x: x + params,
        loss=lambda outputs, batch: outputs,
        correct_fn=lambda outputs, batch: (outputs > 1.0, jnp.ones_like(outputs)),
    )
    x = np.full(size, 0.1, np.float32)
    x[-1] = 2.0
    data = FederatedData({"x": x}, np.array([0, size]))
    for evaluation in (
        shared_evaluator(model, data)(np.float32(0)),
        personal_evaluator(model, data, lambda i, p: p, block_size=4096)(np.float32(0)),
    ):
        assert evaluation.accuracy == 1 / size
        assert evaluation.loss == pytest.approx(np.mean(x, dtype=np.float64), rel=1e-5)


def test_an_evaluation_is_traced_once():
    traces = 0

    def apply(params, x):
        nonlocal traces
        traces += 1
        return x @ params

    model = Model.from_functions(
        lambda key: jnp.zeros((NUM_FEATURES, NUM_CLASSES)),
        apply,
        loss="softmax_cross_entropy",
        lower=False,
    )
    evaluate = shared_evaluator(model, make_data())
    evaluate(weights())
    first = traces
    for seed in range(3):
        evaluate(jax.device_put(weights(seed)))
    assert traces == first
