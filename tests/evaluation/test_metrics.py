"""Metrics against scikit-learn and against their definitions, whole and by client."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from marks import telling
from sklearn.metrics import brier_score_loss, f1_score, matthews_corrcoef

from fedjax_dp.data import FederatedData
from fedjax_dp.evaluation.evaluate import personal_evaluator, shared_evaluator
from fedjax_dp.evaluation.metrics import (
    METRICS,
    brier_score,
    calibration_error,
    f1,
    mcc,
    perplexity,
)
from fedjax_dp.models import Loss, Model

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


def test_brier_score_is_that_of_numpy_and_of_two_classes_twice_that_of_scikit_learn(outputs):
    logits, labels = outputs
    known = labels.copy()
    known[:20] = -1
    errors = (shares(logits) - np.eye(CLASSES)[labels])[20:]
    expected = np.mean(np.sum(errors**2, axis=1))
    assert value_of(brier_score(), logits, known) == pytest.approx(expected, rel=1e-6)
    odds, yes = logits[:, 0], labels > 1
    expected = 2 * brier_score_loss(yes, 1 / (1 + np.exp(-np.float64(odds))))
    assert value_of(brier_score(), odds, yes.astype(int)) == pytest.approx(expected, rel=1e-6)


def test_targets_of_another_shape_are_refused(outputs):
    logits, labels = outputs
    for make in METRICS.values():
        with pytest.raises(ValueError, match="targets must have shape"):
            make().contribute(logits, {"y": labels[:, None]})


def oracle_of_classes(name, shares, labels):
    """Of probabilities by class and labels, in float64."""
    said = shares.argmax(-1)
    if name == "f1":
        return f1_score(labels, said, average="macro")
    if name == "mcc":
        return matthews_corrcoef(labels, said)
    if name == "brier_score":
        return np.mean(np.sum((shares - np.eye(shares.shape[1])[labels]) ** 2, axis=1))
    if name == "perplexity":
        return np.exp(-np.log(shares[np.arange(len(labels)), labels]).mean())
    sure, total = shares.max(-1), 0.0
    for low in np.arange(15) / 15:
        inside = (sure > low) & (sure <= low + 1 / 15)
        if inside.any():
            total += inside.mean() * abs(sure[inside].mean() - (said == labels)[inside].mean())
    return total


@pytest.mark.parametrize("name", METRICS)
@pytest.mark.parametrize("column", [False, True])
def test_one_log_odds_is_that_of_two_classes(name, column):
    rng = np.random.default_rng(3)
    odds, labels = rng.normal(size=300).astype(np.float32) * 2, rng.integers(0, 2, 300)
    labels = np.where(rng.uniform(size=300) < 0.6, odds > 0, labels).astype(int)
    yes = 1 / (1 + np.exp(-odds.astype(np.float64)))
    expected = oracle_of_classes(name, np.stack([1 - yes, yes], -1), labels)
    outputs, metric = odds[:, None], METRICS[name]()
    kinds = (int, bool, np.float32) if not column else (np.uint8,)
    for kind in kinds:
        y = labels[:, None].astype(kind) if column else labels.astype(kind)
        assert value_of(metric, outputs, y) == pytest.approx(expected, rel=2e-5)
    # Labels that mean none are left out.
    some = np.where(np.arange(300) < 200, labels, -1)
    few = oracle_of_classes(name, np.stack([1 - yes, yes], -1)[:200], labels[:200])
    assert value_of(metric, outputs, some) == pytest.approx(few, rel=2e-5)


@pytest.mark.parametrize("name", METRICS)
def test_tokens_are_weighed_alike(name):
    rng = np.random.default_rng(5)
    logits = rng.normal(size=(40, 6, CLASSES)).astype(np.float32)
    labels = rng.integers(-1, CLASSES, (40, 6))
    labels[:5] = -1
    expected = oracle_of_classes(name, shares(logits)[labels >= 0], labels[labels >= 0])
    assert value_of(METRICS[name](), logits, labels) == pytest.approx(expected, rel=1e-5)


def test_several_labels_have_the_f1_of_scikit_learn_and_no_other_metric():
    rng = np.random.default_rng(4)
    odds, labels = rng.normal(size=(100, 5)).astype(np.float32), rng.integers(0, 2, (100, 5))
    labels[:, 4] = 0
    odds[:, 4] = -1
    # A label that is never a target nor a prediction counts nothing.
    expected = f1_score(labels[:, :4], odds[:, :4] > 0, average="macro")
    assert value_of(f1(), odds, labels) == pytest.approx(expected, rel=1e-6)
    for name in ("perplexity", "mcc", "calibration_error", "brier_score"):
        with pytest.raises(ValueError, match=f"targets must have shape .* for metric {name}"):
            METRICS[name]().contribute(odds, {"y": labels})


def small(loss, width):
    return Model.from_functions(
        lambda key: {"w": jnp.zeros((3, width))}, lambda params, x: x @ params["w"], loss=loss
    )


@pytest.mark.parametrize("name", METRICS)
@pytest.mark.parametrize(
    ("loss", "width", "match"),
    [
        ("squared_error", 1, "metric {} must be used with a loss of classes or probabilities"),
        ("half_squared_error", 1, "metric {} must be used with a loss of classes or probab"),
        (Loss(lambda o, b: o[:, 0], "numbers"), 1, "metric {} must be used with a loss of"),
        (lambda o, b: jnp.abs(o[:, 0] - b["y"]), 1, "must be logits of classes, .* metric {}"),
        (lambda o, b: o["z"][:, 0], 1, "must be logits of classes, .* metric {}"),
    ],
)
def test_a_metric_refuses_other_losses_before_any_work(name, loss, width, match):
    data = FederatedData({"x": np.zeros((4, 3)), "y": np.zeros(4, np.float32)}, np.array([0, 4]))
    model = small(loss, width)
    if not isinstance(loss, str | Loss) and "z" in loss.__code__.co_consts:
        model = Model.from_functions(model.init, lambda p, x: {"z": x @ p["w"]}, loss=loss)
    for build in (shared_evaluator, lambda *a, **k: personal_evaluator(*a, lambda i: {}, **k)):
        with pytest.raises(ValueError, match=match.format(name)):
            build(model, data, metrics={name: METRICS[name]()})


def test_outputs_that_are_no_numbers_have_no_metrics(outputs):
    logits, labels = outputs
    bad = logits.copy()
    bad[7] = np.nan
    for make in METRICS.values():
        assert np.isnan(value_of(make(), bad, labels))
        assert np.isnan(value_of(make(), bad[:, :1], labels % 2))
        where_none = np.where(np.arange(len(labels)) == 7, -1, labels)
        assert np.isfinite(value_of(make(), bad, where_none))


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
