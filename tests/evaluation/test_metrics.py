"""Metrics against scikit-learn and against their definitions, whole and by client."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from marks import telling
from sklearn.metrics import f1_score, matthews_corrcoef

from fedjax_dp.data import FederatedData
from fedjax_dp.evaluation.evaluate import personal_evaluator, shared_evaluator
from fedjax_dp.evaluation.metrics import METRICS, calibration_error, f1, mcc, perplexity
from fedjax_dp.models import Model

CLASSES = 4


def value_of(metric, logits, labels):
    each = np.asarray(metric.contribute(logits, {"y": labels}), np.float64)
    assert each.ndim == 2 and len(each) == len(labels)
    return float(metric.finish(each.sum(axis=0)))


@pytest.fixture
def outputs():
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(200, CLASSES)).astype(np.float32) * 2
    return logits, rng.integers(0, CLASSES, 200)


def shares(logits):
    powers = np.exp(np.asarray(logits, np.float64))
    return powers / powers.sum(axis=-1, keepdims=True)


def test_f1_is_that_of_scikit_learn(outputs):
    logits, labels = outputs
    expected = f1_score(labels, logits.argmax(-1), average="macro")
    assert value_of(f1(), logits, labels) == pytest.approx(expected, rel=1e-6)
    few = labels % 2
    expected = f1_score(few, logits.argmax(-1), average="macro")
    assert value_of(f1(), logits, few) == pytest.approx(expected, rel=1e-6)


def test_mcc_is_that_of_scikit_learn(outputs):
    logits, labels = outputs
    said, cases = logits.argmax(-1), [labels, labels % 2, logits.argmax(-1), 0 * labels]
    for true in cases:
        expected = matthews_corrcoef(true, said)
        assert value_of(mcc(), logits, true) == pytest.approx(expected, rel=1e-6, abs=1e-12)
    assert matthews_corrcoef(0 * labels, said) == 0.0, "where one class alone is true"
    some = np.where(np.arange(len(labels)) < 50, labels, -1)
    expected = matthews_corrcoef(labels[:50], said[:50])
    assert value_of(mcc(), logits, some) == pytest.approx(expected, rel=1e-6)
    assert np.isnan(value_of(mcc(), logits, -1 + 0 * labels))


def test_perplexity_weighs_tokens_alike(outputs):
    logits, labels = outputs
    tokens, targets = logits.reshape(50, 4, CLASSES), labels.reshape(50, 4).copy()
    targets[:, 3] = -1
    targets[:10] = -1
    picked = np.take_along_axis(shares(tokens), np.maximum(targets, 0)[..., None], -1)[..., 0]
    expected = np.exp(-np.log(picked[targets >= 0]).mean())
    assert value_of(perplexity(), tokens, targets) == pytest.approx(expected, rel=1e-6)
    assert np.isnan(value_of(perplexity(), tokens, np.full_like(targets, -1)))


def test_calibration_error_follows_its_definition(outputs):
    logits, labels = outputs
    sure, is_right = shares(logits).max(-1), logits.argmax(-1) == labels
    expected = 0.0
    for low in np.arange(15) / 15:
        inside = (sure > low) & (sure <= low + 1 / 15)
        if inside.any():
            expected += inside.mean() * abs(sure[inside].mean() - is_right[inside].mean())
    assert value_of(calibration_error(), logits, labels) == pytest.approx(expected, rel=1e-5)


def test_targets_of_another_shape_are_refused(outputs):
    logits, labels = outputs
    for make in METRICS.values():
        with pytest.raises(ValueError, match="targets must have shape"):
            make().contribute(logits, {"y": labels[:, None]})


MODEL = Model.from_functions(
    lambda key: {"w": jax.random.normal(key, (3, CLASSES)), "b": jnp.zeros(CLASSES)},
    lambda params, x: x @ params["w"] + params["b"],
    loss="softmax_cross_entropy",
)


def clients_of(sizes):
    rng = np.random.default_rng(1)
    return FederatedData.from_clients(
        [
            {
                "x": rng.normal(size=(size, 3)).astype(np.float32),
                "y": rng.integers(0, CLASSES, size).astype(np.int32),
            }
            for size in sizes
        ]
    )


@telling
def test_shared_and_personal_evaluations_agree_with_the_outputs():
    """Blocks that overlap, clients of unequal sizes and one without examples."""
    model, data = MODEL, clients_of([7, 0, 3, 12])
    metrics = {name: make() for name, make in METRICS.items()}
    params = model.init(jax.random.key(1))
    logits = np.asarray(model.predict(params, data.examples["x"]))
    whole = shared_evaluator(model, data, block_size=5, metrics=metrics)(params)
    own = personal_evaluator(model, data, lambda i, p: p, block_size=4, metrics=metrics)(params)
    assert whole.metrics.keys() == whole.client_metrics.keys() == metrics.keys()
    for name, metric in metrics.items():
        expected = value_of(metric, logits, data.examples["y"])
        assert whole.metrics[name] == pytest.approx(expected, rel=1e-5)
        assert own.metrics[name] == pytest.approx(expected, rel=1e-5)
        for i, size in enumerate(data.sizes):
            rows = slice(data.offsets[i], data.offsets[i + 1])
            for found in (whole.client_metrics[name][i], own.client_metrics[name][i]):
                if size == 0:
                    assert np.isnan(found)
                else:
                    alone = value_of(metric, logits[rows], data.examples["y"][rows])
                    assert found == pytest.approx(alone, rel=1e-5)


def test_what_a_metric_adds_must_have_a_row_for_each_example():
    model, data = MODEL, clients_of([3, 2])
    broken = perplexity()._replace(contribute=lambda outputs, batch: outputs.sum())
    with pytest.raises(ValueError, match="the terms of metric odd must have a row for each of"):
        shared_evaluator(model, data, metrics={"odd": broken})(model.init(jax.random.key(0)))
