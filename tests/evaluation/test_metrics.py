"""Metrics against scikit-learn and against their definitions, whole and by client."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from marks import telling
from sklearn.metrics import (
    brier_score_loss,
    confusion_matrix,
    f1_score,
    matthews_corrcoef,
    mean_absolute_error,
    mean_squared_error,
    precision_recall_fscore_support,
    r2_score,
    roc_auc_score,
)

from fedjax_dp.data import FederatedData
from fedjax_dp.evaluation.evaluate import personal_evaluator, shared_evaluator, summarize
from fedjax_dp.evaluation.metrics import (
    METRICS,
    RowsMetric,
    auc,
    brier_score,
    calibration_error,
    confusion,
    f1,
    mae,
    mcc,
    metrics_of,
    mse,
    per_class,
    perplexity,
    r2,
)
from fedjax_dp.models import Loss, Model

CLASSES = 4
OF_SUMS = ("perplexity", "f1", "mcc", "calibration_error", "brier_score")
OF_NUMBERS = ("mae", "mse", "r2")
OF_CLASSES = tuple(name for name in METRICS if name not in OF_NUMBERS)


# By name: what an example adds depends on nothing else.
COMPILED = {}


def value_of(metric, logits, labels):
    contribute = COMPILED.setdefault(metric.contribute.__qualname__, jax.jit(metric.contribute))
    each = np.asarray(contribute(logits, {"y": labels}), np.float64)
    assert each.ndim == 2 and len(each) == len(labels)
    if isinstance(metric, RowsMetric):
        return metric.finish(each)
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
    for name in OF_CLASSES:
        with pytest.raises(ValueError, match="targets must have shape"):
            METRICS[name]().contribute(logits, {"y": labels[:, None]})
    for name in OF_NUMBERS:
        with pytest.raises(ValueError, match=f"targets must be as many as .* metric {name}"):
            METRICS[name]().contribute(logits, {"y": labels})


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


@pytest.mark.parametrize("name", OF_SUMS)
@pytest.mark.parametrize("column", [False, True])
def test_one_log_odds_is_that_of_two_classes(name, column):
    rng = np.random.default_rng(3)
    odds, labels = rng.normal(size=200).astype(np.float32) * 2, rng.integers(0, 2, 200)
    labels = np.where(rng.uniform(size=200) < 0.6, odds > 0, labels).astype(int)
    yes = 1 / (1 + np.exp(-odds.astype(np.float64)))
    expected = oracle_of_classes(name, np.stack([1 - yes, yes], -1), labels)
    outputs, metric = odds[:, None], METRICS[name]()
    kinds = (int, bool, np.float32) if not column else (np.uint8,)
    for kind in kinds:
        y = labels[:, None].astype(kind) if column else labels.astype(kind)
        assert value_of(metric, outputs, y) == pytest.approx(expected, rel=2e-5)
    # Labels that mean none are left out.
    some = np.where(np.arange(200) < 150, labels, -1)
    few = oracle_of_classes(name, np.stack([1 - yes, yes], -1)[:150], labels[:150])
    assert value_of(metric, outputs, some) == pytest.approx(few, rel=2e-5)


@pytest.mark.parametrize("name", OF_SUMS)
def test_tokens_are_weighed_alike(name):
    rng = np.random.default_rng(5)
    logits = rng.normal(size=(50, 4, CLASSES)).astype(np.float32)
    labels = rng.integers(-1, CLASSES, (50, 4))
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


@pytest.mark.parametrize("name", OF_CLASSES)
@pytest.mark.parametrize(
    ("loss", "width", "match"),
    [
        ("squared_error", 1, "metric {} must be used with a loss of classes or ordered or prob"),
        (
            "half_squared_error",
            1,
            "metric {} must be used with a loss of classes or ordered or prob",
        ),
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
    where_none = np.where(np.arange(len(labels)) == 7, -1, labels)
    for name in (*OF_SUMS, "auc"):
        assert np.isnan(value_of(METRICS[name](), bad, labels))
        assert np.isnan(value_of(METRICS[name](), bad[:, :1], labels % 2))
        assert np.isfinite(value_of(METRICS[name](), bad, where_none))
    for name in ("confusion", "per_class"):
        assert value_of(METRICS[name](), bad, labels) is None
        assert value_of(METRICS[name](), bad, where_none) is not None
    for name in OF_NUMBERS:
        assert np.isnan(value_of(METRICS[name](), bad, logits))


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


def same(found, expected):
    """Whether tables are equal, or numbers up to rounding."""
    if expected is None or isinstance(expected, dict):
        return found == expected
    return found == pytest.approx(expected, rel=1e-5, nan_ok=True)


@telling
def test_shared_and_personal_evaluations_agree_with_the_outputs():
    """Blocks that overlap, clients of unequal sizes, of one class, and one without examples."""
    model, data = MODEL, clients_of([7, 0, 3, 12, 2])
    data.examples["y"][-2:] = 1
    metrics = metrics_of(OF_CLASSES)
    params = model.init(jax.random.key(1))
    logits = np.asarray(model.predict(params, data.examples["x"]))
    whole = shared_evaluator(model, data, block_size=5, metrics=metrics)(params)
    own = personal_evaluator(model, data, lambda i, p: p, block_size=4, metrics=metrics)(params)

    def groups(params):
        yield np.arange(2), (params,)
        yield np.arange(2, 5), (params,)

    parts = personal_evaluator(
        model, data, lambda i, p: p, block_size=4, in_parts=groups, metrics=metrics
    )(params)
    assert whole.metrics.keys() == whole.client_metrics.keys() == metrics.keys()
    for name, metric in metrics.items():
        expected = value_of(metric, logits, data.examples["y"])
        for found in (whole, own, parts):
            assert same(found.metrics[name], expected)
        for i, size in enumerate(data.sizes):
            rows = slice(data.offsets[i], data.offsets[i + 1])
            alone = value_of(metric, logits[rows], data.examples["y"][rows]) if size else np.nan
            alone = None if not size and name in ("confusion", "per_class") else alone
            for found in (whole, own, parts):
                assert same(found.client_metrics[name][i], alone)
    own_labels = np.split(data.examples["y"], data.offsets[1:-1])
    is_mixed = np.array([len(np.unique(y)) > 1 for y in own_labels])
    known, summary = whole.client_metrics["auc"][is_mixed], summarize(whole)
    assert np.isfinite(known).all() and is_mixed.sum() == len(known) < 4
    assert summary["clients_without_auc"] == 4 - len(known), "one client has no examples"
    assert summary["mean_client_auc"] == pytest.approx(known.mean())
    assert summary["worst_tenth_auc"] == known.min()
    assert summary["worst_tenth_brier_score"] == np.nanmax(whole.client_metrics["brier_score"])
    assert not any("confusion" in name or "per_class" in name for name in summary)


def test_personal_models_have_rows_of_their_own():
    data = clients_of([4, 0, 6])

    def params_of(client, params):
        return jax.tree.map(lambda p: p * (client + 1), params)

    params = MODEL.init(jax.random.key(2))
    found = personal_evaluator(MODEL, data, params_of, block_size=4, metrics={"auc": auc()})(params)
    logits = [MODEL.predict(params_of(i, params), data.examples["x"]) for i in range(3)]
    joined = np.where(np.arange(10)[:, None] < 4, logits[0], logits[2])
    assert found.metrics["auc"] == pytest.approx(value_of(auc(), joined, data.examples["y"]))


def test_auc_is_that_of_scikit_learn_with_ties(outputs):
    logits, labels = outputs
    rounded = np.round(logits)
    expected = roc_auc_score(labels > 1, np.float64(rounded[:, 1]) - rounded[:, 0])
    assert value_of(auc(), rounded[:, :2], (labels > 1).astype(int)) == pytest.approx(expected)
    odds = rounded[:, :1]
    assert len(np.unique(odds)) < 20, "ties"
    expected = roc_auc_score(labels > 1, odds[:, 0])
    assert value_of(auc(), odds, labels > 1) == pytest.approx(expected)
    expected = roc_auc_score(labels, shares(logits), multi_class="ovr", average="macro")
    assert value_of(auc(), logits, labels) == pytest.approx(expected, rel=1e-6)
    # One class alone has none, labels to leave out count nothing, and a class may be absent.
    assert np.isnan(value_of(auc(), logits, 0 * labels))
    some = np.where(np.arange(200) < 90, labels, -1)
    expected = roc_auc_score(labels[:90], shares(logits[:90]), multi_class="ovr")
    assert value_of(auc(), logits, some) == pytest.approx(expected, rel=1e-6)
    few = labels % 2
    areas = [roc_auc_score(few == k, shares(logits)[:, k]) for k in (0, 1)]
    assert value_of(auc(), logits, few) == pytest.approx(np.mean(areas), rel=1e-6)
    # Scores that float32 probabilities would not tell apart.
    sure = np.float32([[40.0], [41.0], [42.0]])
    assert value_of(auc(), sure, np.array([0, 0, 1])) == 1
    several = (labels[:, None] >= [1, 2, 3]).astype(int)
    expected = roc_auc_score(several, logits[:, :3], average="macro")
    assert value_of(auc(), logits[:, :3], several) == pytest.approx(expected)


def test_confusion_and_figures_by_class_are_those_of_scikit_learn(outputs):
    logits, labels = outputs
    logits = logits - np.float32([0, 0, 0, 99])
    said, names = logits.argmax(-1), ("a", "b", "c", "d")
    table = value_of(confusion(names), logits, labels)
    assert table["classes"] == list(names)
    np.testing.assert_array_equal(table["counts"], confusion_matrix(labels, said))
    found = value_of(per_class(names), logits, labels)
    theirs = precision_recall_fscore_support(labels, said, zero_division=np.nan)
    assert list(found) == list(names) and found["d"]["precision"] is None
    for i, name in enumerate(names):
        own = [found[name][k] for k in ("precision", "recall", "f1", "examples")]
        own = [np.nan if x is None else x for x in own]
        np.testing.assert_allclose(own, [column[i] for column in theirs], equal_nan=True)
    odds = value_of(confusion(names), logits[:, :1], labels > 1)
    assert odds["classes"] == ["0", "1"]
    np.testing.assert_array_equal(odds["counts"], confusion_matrix(labels > 1, logits[:, 0] > 0))
    for name in ("auc", "confusion", "per_class"):
        tokens = logits.reshape(50, 4, CLASSES)
        with pytest.raises(ValueError, match=f"one label for each example for metric {name}"):
            METRICS[name]().contribute(tokens, {"y": labels.reshape(50, 4)})


def test_errors_of_numbers_are_those_of_scikit_learn_and_r2_needs_targets_that_vary():
    rng = np.random.default_rng(6)
    # A mean that is large beside the deviation, which sums of squares in float32 would lose.
    true = (rng.normal(size=(50, 2)) + np.array([5000, 0])).astype(np.float32)
    said = (true + rng.normal(size=(50, 2)) / 2).astype(np.float32)
    wide = np.float64(true), np.float64(said)
    for metric, theirs in ((mae, mean_absolute_error), (mse, mean_squared_error), (r2, r2_score)):
        assert value_of(metric(), said, true) == pytest.approx(theirs(*wide), rel=1e-5)
        one = theirs(wide[0][:, 0], wide[1][:, 0])
        assert value_of(metric(), said[:, :1], true[:, 0]) == pytest.approx(one, rel=1e-5)
    constant = np.stack([np.full(50, 3, np.float32), true[:, 1]], 1)
    alone = r2_score(wide[0][:, 1], wide[1][:, 1])
    assert value_of(r2(), said, constant) == pytest.approx(alone, rel=1e-6)
    assert np.isnan(value_of(r2(), said[:, :1], constant[:, 0]))
    assert np.isnan(value_of(r2(), said[:1], true[:1]))


def test_metrics_read_the_chances_of_ordered_classes_and_the_means_of_counts():
    rng = np.random.default_rng(8)
    odds = -np.sort(-rng.normal(size=(60, 3)).astype(np.float32) * 2, axis=1)
    labels, x = rng.integers(0, 4, 60), rng.normal(size=(60, 3)).astype(np.float32)
    above = 1 / (1 + np.exp(-np.float64(odds)))
    chances = -np.diff(np.concatenate([np.ones((60, 1)), above, np.zeros((60, 1))], 1), axis=1)
    data = FederatedData({"x": odds, "y": labels}, np.array([0, 20, 60]))
    as_given = Model.from_functions(
        lambda key: {"w": jnp.eye(3)}, lambda p, x: x @ p["w"], loss="ordinal_cross_entropy"
    )
    metrics = metrics_of(("auc", "brier_score", "confusion"))
    found = shared_evaluator(as_given, data, metrics=metrics)({"w": np.eye(3)})
    expected = roc_auc_score(labels, chances, multi_class="ovr")
    assert found.metrics["auc"] == pytest.approx(expected, rel=1e-4)
    brier = np.mean(np.sum((chances - np.eye(4)[labels]) ** 2, axis=1))
    assert found.metrics["brier_score"] == pytest.approx(brier, rel=1e-4)
    table = confusion_matrix(labels, chances.argmax(1), labels=range(4))
    np.testing.assert_array_equal(found.metrics["confusion"]["counts"], table)
    assert found.accuracy == pytest.approx(np.mean(chances.argmax(1) == labels))
    loss = -np.mean(np.log(chances[np.arange(60), labels]))
    assert found.loss == pytest.approx(loss, rel=1e-4)
    counts = FederatedData({"x": x, "y": rng.poisson(2, 60)}, np.array([0, 20, 60]))
    found = shared_evaluator(small("poisson_nll", 1), counts, metrics=metrics_of(OF_NUMBERS))
    found = found({"w": np.float32([[0.2], [0.1], [-0.3]])})
    means = np.exp(np.float64(x) @ [0.2, 0.1, -0.3])
    assert found.metrics["mae"] == pytest.approx(np.mean(np.abs(means - counts.examples["y"])))
    assert found.metrics["r2"] == pytest.approx(r2_score(counts.examples["y"], means), rel=1e-5)


@pytest.mark.parametrize("name", OF_NUMBERS)
def test_errors_of_numbers_are_refused_for_classes(name):
    data = FederatedData({"x": np.zeros((4, 3)), "y": np.zeros(4, np.int32)}, np.array([0, 4]))
    match = f"metric {name} must be used with a loss of numbers or counts, got softmax_cross_entr"
    with pytest.raises(ValueError, match=match):
        shared_evaluator(small("softmax_cross_entropy", 2), data, metrics=metrics_of([name]))


def test_what_a_metric_adds_must_have_a_row_for_each_example():
    model, data = MODEL, clients_of([3, 2])
    broken = perplexity()._replace(contribute=lambda outputs, batch: outputs.sum())
    with pytest.raises(ValueError, match="the terms of metric odd must have a row for each of"):
        shared_evaluator(model, data, metrics={"odd": broken})(model.init(jax.random.key(0)))
    broken = perplexity()._replace(contribute=lambda outputs, batch: 1j * outputs)
    with pytest.raises(ValueError, match=r"terms of metric odd must be real .*complex"):
        shared_evaluator(model, data, metrics={"odd": broken})


def test_metrics_have_names_that_no_other_result_has():
    with pytest.raises(ValueError, match=r"metrics must have names of their own, .* got 'f1'"):
        metrics_of(("f1", "auc", "f1"))
