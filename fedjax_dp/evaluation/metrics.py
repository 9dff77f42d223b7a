"""Metrics besides loss and accuracy, computed from sums or rows of held-out examples."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedjax_dp.core import checks, trees
from fedjax_dp.core.registry import Registry
from fedjax_dp.models.base import Model
from fedjax_dp.models.losses import Batch, Loss, Targets, classes_from
from fedjax_dp.models.weights import declared, unweighted

_NUM_BINS = 15


class Metric(NamedTuple):
    """A metric that is computed from sums over examples.

    Attributes:
      contribute: `(outputs, batch) -> [examples, k]`, the terms of each example, float32.
      finish: `(sums [..., k]) -> values [...]`, NumPy in float64; NaN without examples.
      targets: the kinds of targets that it is for, as a `Loss` declares them, such as ("classes",);
        empty for a metric that is for any.
      largest_is_worst: whether larger values are worse, as those of errors are.
    """

    contribute: Callable[[Any, Batch], jax.Array]
    finish: Callable[[np.ndarray], np.ndarray]
    targets: tuple[Targets, ...] = ()
    largest_is_worst: bool = False


class RowsMetric(NamedTuple):
    """A metric that is computed from the rows of all examples, which no sum can stand for.

    Attributes:
      contribute: `(outputs, batch) -> [examples, k]`, the row of each example, float32.
      finish: `(rows [examples, k]) -> value`, from float64 NumPy; a number, NaN where it has no
        meaning, or a table of lists and dicts, which is written to files and not drawn.
      targets: as those of a `Metric`.
      largest_is_worst: as that of a `Metric`.
    """

    contribute: Callable[[Any, Batch], jax.Array]
    finish: Callable[[np.ndarray], Any]
    targets: tuple[Targets, ...] = ()
    largest_is_worst: bool = False


AnyMetric = Metric | RowsMetric

# Log-odds of yes or no are logits of two classes.
_CLASSES: tuple[Targets, ...] = ("classes", "ordered", "probabilities")
_NUMBERS: tuple[Targets, ...] = ("numbers", "counts")


def perplexity() -> Metric:
    """Computes the exponential of the mean cross entropy of all tokens, or of all examples.

    Logits are `[examples, ..., classes]` with classes `y`, or one log-odds of each example with `y`
    in [0, 1]. Targets outside of these are left out.
    """

    def contribute(outputs, batch):
        scores = _scores(outputs, batch["y"], "perplexity")
        losses = jnp.where(scores.is_valid, scores.losses, 0.0)
        return _by_example(losses[..., None], scores.is_valid[..., None])

    def finish(sums):
        return np.exp(_ratio(sums[..., 0], sums[..., 1]))

    return Metric(contribute, finish, _CLASSES, largest_is_worst=True)


def f1() -> Metric:
    """Computes the harmonic mean of precision and recall, averaged over the classes that occur.

    For logits `[examples, ..., classes]`, for one log-odds of each example, which is one of two
    classes, and for log-odds `[examples, labels]` of several labels, each of which is averaged over
    in place of classes. One occurs if it is a target or a prediction. Targets in (0, 1) are read as
    1 above one half.

    Source: macro-averaged F1, as in scikit-learn's `f1_score(average="macro")`.
    """

    def contribute(outputs, batch):
        outputs, y = jnp.asarray(outputs), jnp.asarray(batch["y"])
        if _has_labels(outputs, y):
            y = y.astype(jnp.float32)
            is_valid = (y >= 0) & (y <= 1)
            is_true, is_said = (y > 0.5) & is_valid, (outputs > 0) & is_valid
            counts = [part.astype(jnp.float32) for part in (is_true & is_said, is_true, is_said)]
            return _or_nan(jnp.concatenate(counts, axis=-1), outputs, is_valid)
        return _counts_by_class(outputs, y, "f1")

    def finish(sums):
        hits, true, said = np.split(sums, 3, axis=-1)
        each = _ratio(2 * hits, true + said)
        mean = _ratio(np.nansum(each, axis=-1), np.sum(~np.isnan(each), axis=-1))
        return np.where(np.isnan(sums).any(axis=-1), np.nan, mean)

    return Metric(contribute, finish, _CLASSES)


def mcc() -> Metric:
    """Computes Matthews's correlation coefficient between classes and predictions, in [-1, 1].

    It is 0 where all targets, or all predictions, are of one class. For logits as those of `f1`.

    Source: Gorodkin 2004, equation 8, as in scikit-learn's `matthews_corrcoef`.
    """

    def contribute(outputs, batch):
        return _counts_by_class(outputs, batch["y"], "mcc")

    def finish(sums):
        hits, true, said = np.split(np.asarray(sums, np.float64), 3, axis=-1)
        count = np.sum(true, axis=-1)
        covariance = np.sum(hits, axis=-1) * count - np.sum(true * said, axis=-1)
        # Of counts up to 2^26, squares are exact.
        spreads = [count**2 - np.sum(each**2, axis=-1) for each in (true, said)]
        correlation = _ratio(covariance, np.sqrt(spreads[0]) * np.sqrt(spreads[1]))
        return np.where(count > 0, np.nan_to_num(correlation), np.nan)

    return Metric(contribute, finish, _CLASSES)


def calibration_error() -> Metric:
    """Computes the mean distance between confidence and accuracy over 15 bins of confidence.

    Confidence is the largest probability, accuracy the share of correct predictions in a bin.
    Logits are `[examples, ..., classes]` or one log-odds of each example.

    Source: Guo and others 2017, expected calibration error.
    """

    def contribute(outputs, batch):
        scores = _scores(outputs, batch["y"], "calibration_error")
        sure = jnp.max(jax.nn.softmax(scores.logits), axis=-1)
        is_right = jnp.argmax(scores.logits, axis=-1) == scores.labels
        place = jnp.clip(jnp.ceil(sure * _NUM_BINS) - 1, 0, _NUM_BINS - 1).astype(jnp.int32)
        is_in = jax.nn.one_hot(place, _NUM_BINS) * scores.is_valid[..., None].astype(jnp.float32)
        sure = jnp.where(scores.is_valid, sure, 0.0)
        terms = _by_example(
            is_in * sure[..., None], is_in * is_right[..., None].astype(jnp.float32), is_in
        )
        return _or_nan(terms, scores.logits, scores.is_valid[..., None])

    def finish(sums):
        sure, right, count = np.split(sums, 3, axis=-1)
        return _ratio(np.sum(np.abs(sure - right), axis=-1), np.sum(count, axis=-1))

    return Metric(contribute, finish, _CLASSES, largest_is_worst=True)


def brier_score() -> Metric:
    """Computes the mean squared error of probabilities, summed over classes, in [0, 2].

    Of two classes it is twice the mean of `(y − p)²`. That of a run over that of another, less 1,
    is the relative loss by mean squared error. For logits as those of `perplexity`.

    Source: Brier 1950; Mugunthan 2022, section 2.5.3, which compares noise with its absence by it.
    """

    def contribute(outputs, batch):
        scores = _scores(outputs, batch["y"], "brier_score")
        chances = jax.nn.softmax(scores.logits)
        errors = chances - jax.nn.one_hot(scores.labels, chances.shape[-1])
        squares = jnp.where(scores.is_valid, jnp.sum(errors**2, axis=-1), 0.0)
        return _by_example(squares[..., None], scores.is_valid[..., None])

    return Metric(contribute, _mean, _CLASSES, largest_is_worst=True)


def auc() -> RowsMetric:
    """Computes the area under the ROC curve, exactly, with ties counting one half.

    It is the chance that an example of a class has a higher score for it than one of another class:
    for two classes of the second one, for several averaged over the classes that occur and are not
    all that does, by their probabilities. For log-odds `[examples, labels]` of several labels it is
    averaged over these. NaN if no class, or label, has both examples and others.

    Source: Mann and Whitney 1947; Hand and Till 2001 for several classes, each against the rest, as
    in scikit-learn's `roc_auc_score(multi_class="ovr", average="macro")`.
    """

    def contribute(outputs, batch):
        if _has_labels(outputs, batch["y"]):
            y = jnp.asarray(batch["y"]).astype(jnp.float32)
            known = jnp.where((y >= 0) & (y <= 1), (y > 0.5).astype(jnp.float32), -1.0)
            return jnp.concatenate([outputs.astype(jnp.float32), known], axis=-1)
        scores = _one_label(outputs, batch["y"], "auc")
        chances = jax.nn.log_softmax(scores.logits)
        if chances.shape[-1] == 2:
            # Of chances near 1 float32 would see ties.
            odds = scores.logits[:, 1] - scores.logits[:, 0]
            chances = jnp.stack([-odds, odds], axis=-1)
        classes = jnp.arange(chances.shape[-1])
        known = (scores.labels[:, None] == classes).astype(jnp.float32)
        known = jnp.where(scores.is_valid[:, None], known, -1.0)
        return jnp.concatenate([chances, known], axis=-1)

    def finish(rows):
        scores, known = np.split(rows, 2, axis=-1)
        each = [_area(s, k) for s, k in zip(scores.T, known.T, strict=True)]
        found = [area for area in each if area is not None]
        return float(np.mean(found)) if found else np.nan

    return RowsMetric(contribute, finish, _CLASSES)


def confusion(class_names: Sequence[str] = ()) -> RowsMetric:
    """Counts the examples of each class by the class that is predicted for them.

    The value is a table: `classes`, their names or numbers, and `counts`, a list for each class of
    how many of its examples are predicted as each. For logits as those of `f1`, but one label for
    each example; None without examples, or if an output is NaN.
    """

    def contribute(outputs, batch):
        return _labels_and_predictions(outputs, batch["y"], "confusion")

    def finish(rows):
        counts = _confusion(rows)
        if counts is None:
            return None
        return {"classes": _named(class_names, len(counts)), "counts": counts.tolist()}

    return RowsMetric(contribute, finish, _CLASSES)


def per_class(class_names: Sequence[str] = ()) -> RowsMetric:
    """Computes precision, recall and F1 of each class.

    The value is a table: for each class, by name or number, `precision` (the share of predictions
    of it that are right; None without any), `recall` (the share of its examples that are predicted
    as such; None without any), `f1` and `examples`. As for `confusion`.

    Source: as scikit-learn's `precision_recall_fscore_support`, with None in place of 0/0.
    """

    def contribute(outputs, batch):
        return _labels_and_predictions(outputs, batch["y"], "per_class")

    def finish(rows):
        counts = _confusion(rows)
        if counts is None:
            return None
        hits, true, said = np.diag(counts), counts.sum(axis=1), counts.sum(axis=0)
        shares = {
            "precision": _ratio(hits, said),
            "recall": _ratio(hits, true),
            "f1": _ratio(2 * hits, true + said),
        }
        return {
            name: {k: None if np.isnan(v[i]) else float(v[i]) for k, v in shares.items()}
            | {"examples": int(true[i])}
            for i, name in enumerate(_named(class_names, len(counts)))
        }

    return RowsMetric(contribute, finish, _CLASSES)


def mae() -> Metric:
    """Computes the mean absolute error of predicted numbers, or of the means of counts.

    Of several targets it is averaged over them.
    """

    def contribute(outputs, batch):
        said, true = _predictions(outputs, batch["y"], "mae")
        return _means(jnp.abs(said - true))

    return Metric(contribute, _mean, _NUMBERS, largest_is_worst=True)


def mse() -> Metric:
    """Computes the mean squared error of predicted numbers, or of the means of counts.

    Of several targets it is averaged over them.
    """

    def contribute(outputs, batch):
        said, true = _predictions(outputs, batch["y"], "mse")
        return _means(jnp.square(said - true))

    return Metric(contribute, _mean, _NUMBERS, largest_is_worst=True)


def r2() -> RowsMetric:
    """Computes the coefficient of determination, 1 − Σ(y − f)² / Σ(y − ȳ)², at most 1.

    Of several targets it is averaged over those that vary; NaN if none does, or for fewer than two
    examples.

    Source: as scikit-learn's `r2_score`, which has 0 or 1 in place of NaN.
    """

    def contribute(outputs, batch):
        said, true = _predictions(outputs, batch["y"], "r2")
        return jnp.concatenate([said, true], axis=-1)

    def finish(rows):
        if len(rows) < 2:
            return np.nan
        said, true = np.split(rows, 2, axis=-1)
        spread = np.sum((true - true.mean(axis=0)) ** 2, axis=0)
        each = 1 - _ratio(np.sum((true - said) ** 2, axis=0), spread)
        # Of a prediction that is NaN the result is NaN.
        return float(np.mean(each[spread > 0])) if np.any(spread > 0) else np.nan

    return RowsMetric(contribute, finish, _NUMBERS)


# What results have besides metrics.
_TAKEN = ("part", "client", "examples", "loss", "accuracy")


def metrics_of(names: Sequence[str], class_names: Sequence[str] = ()) -> dict[str, AnyMetric]:
    """Builds metrics by name; those by class have the names of classes."""
    made: dict[str, AnyMetric] = {}
    for name in names:
        factory = METRICS[name]
        is_named = "class_names" in inspect.signature(factory).parameters
        short = name.rpartition(":")[2]
        rule = f"have names of their own, besides {', '.join(_TAKEN)}"
        checks.require(short not in (*made, *_TAKEN), "metrics", rule, name)
        made[short] = factory(class_names) if is_named else factory()
    return made


def require_fits(metrics: Mapping[str, AnyMetric], model: Model) -> None:
    """Requires metrics for the targets of a model's loss, where it declares them."""
    loss = declared(model.loss_fn)
    if loss is None:
        return
    for name, metric in metrics.items():
        if metric.targets and loss.targets not in metric.targets:
            raise ValueError(
                f"metric {name} must be used with a loss of {' or '.join(metric.targets)}, got "
                f"{loss.name} of {model.name}, a loss of {loss.targets}"
            )


def terms_of(
    metrics: Mapping[str, AnyMetric], model: Model, outputs: Any, batch: Batch
) -> dict[str, jax.Array]:
    """Computes the terms of metrics, each `[examples, k]`."""
    loss = unweighted(model.loss_fn)
    is_declared = declared(loss) is not None
    if isinstance(loss, Loss):
        batch, outputs = loss.marked(batch), loss.decoded(outputs)
    terms = {}
    for name, metric in metrics.items():
        if set(metric.targets) & set(_CLASSES) and not is_declared:
            # One number for each example may as well be a prediction of a number.
            shape = None if isinstance(outputs, Mapping | tuple | list) else jnp.shape(outputs)
            is_logits = shape and shape[:-1] == jnp.shape(batch["y"]) and shape[-1] > 1
            rule = (
                "be logits of classes, or those of a loss that says what its targets are, by "
                f'Loss(function, "classes"), for metric {name}'
            )
            if shape and shape == jnp.shape(batch["y"]) and len(shape) > 1 and shape[-1] > 1:
                rule = f"come with classes for metric {name}{classes_from(batch['y'], outputs)}"
            checks.require(bool(is_logits), f"outputs of {model.name}", rule, shape)
        terms[name] = metric.contribute(outputs, batch)
    return terms


def _adopted(own: Any) -> Callable[..., AnyMetric]:
    """Accepts a user's metric: a value, or a function that returns one."""
    metric = own if isinstance(own, AnyMetric) or not callable(own) else own()
    rule = "be a Metric or RowsMetric, or return one if called"
    checks.require(isinstance(metric, AnyMetric), "metric", rule, own)
    return lambda: metric


METRICS: Registry[Callable[..., AnyMetric]] = Registry(
    {
        metric.__name__: metric
        for metric in (
            perplexity,
            f1,
            mcc,
            calibration_error,
            brier_score,
            auc,
            confusion,
            per_class,
            mae,
            mse,
            r2,
        )
    },
    _adopted,
)


class _Scores(NamedTuple):
    """Logits of classes, `[examples, ..., classes]`, and the targets."""

    logits: jax.Array
    labels: jax.Array  # `[examples, ...]`; any where not valid.
    losses: jax.Array  # Cross entropies, `[examples, ...]`; any where not valid.
    is_valid: jax.Array  # `[examples, ...]`


def _scores(outputs: Any, targets: Any, name: str) -> _Scores:
    """Reads logits of classes, or the log-odds of each example as logits of two."""
    rule = f"be one array of logits, for metric {name}"
    is_array = isinstance(outputs, jax.Array | np.ndarray)
    checks.require(is_array, "outputs", rule, type(outputs).__name__)
    logits, y = trees.at_least_float32(jnp.asarray(outputs)), jnp.asarray(targets)
    count = logits.shape[0]
    # A last axis of size 1 holds no classes.
    if logits.size == count and y.size == count:
        z, y = logits.reshape(count), y.reshape(count).astype(jnp.float32)
        is_valid = (y >= 0) & (y <= 1)
        y = jnp.where(is_valid, y, 0.0)
        pair = jnp.stack([jnp.zeros_like(z), z], axis=-1)
        losses = optax.sigmoid_binary_cross_entropy(z, y)
        return _Scores(pair, (y > 0.5).astype(jnp.int32), losses, is_valid)
    rule = f"have shape {logits.shape[:-1]} for metric {name}, one class for each vector of logits"
    rule += classes_from(y, logits)
    fits = logits.ndim > 1 and logits.shape[-1] > 1 and y.shape == logits.shape[:-1]
    checks.require(fits, "targets", rule, y.shape)
    is_class = y.dtype == bool or jnp.issubdtype(y.dtype, jnp.integer)
    rule = f"be integers or Booleans for metric {name}, which name classes"
    checks.require(is_class, "targets", rule, y.dtype)
    y = y.astype(jnp.int32) if y.dtype == bool else y
    is_valid = (y >= 0) & (y < logits.shape[-1])
    labels = jnp.where(is_valid, y.astype(jnp.int32), 0)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return _Scores(logits, labels, losses, is_valid)


def _has_labels(outputs: Any, targets: Any) -> bool:
    """Whether outputs are the log-odds of several labels, `[examples, labels]`."""
    is_array = isinstance(outputs, jax.Array | np.ndarray) and outputs.ndim == 2
    return is_array and outputs.shape == jnp.shape(targets) and outputs.shape[1] > 1


def _one_label(outputs: Any, targets: Any, name: str) -> _Scores:
    """Reads logits of one label for each example, `[examples, classes]`."""
    scores = _scores(outputs, targets, name)
    rule = f"be one label for each example for metric {name}"
    checks.require(scores.labels.ndim == 1, "targets", rule, jnp.shape(targets))
    return scores


def _labels_and_predictions(outputs: Any, targets: Any, name: str) -> jax.Array:
    """Lists label (-1 for none), prediction and the number of classes, `[examples, 3]`."""
    scores = _one_label(outputs, targets, name)
    said = jnp.argmax(scores.logits, axis=-1)
    labels = jnp.where(scores.is_valid, scores.labels, -1)
    rows = jnp.stack([labels, said, jnp.full_like(said, scores.logits.shape[-1])], axis=-1)
    return _or_nan(rows.astype(jnp.float32), scores.logits, scores.is_valid[..., None])


def _confusion(rows: np.ndarray) -> np.ndarray | None:
    """Counts labels by prediction, `[classes, classes]`; None without any, or with NaN."""
    known = rows[~(rows[:, 0] < 0)]
    if not len(known) or np.isnan(known).any():
        return None
    labels, said, num_classes = known.astype(np.int64).T
    size = int(num_classes[0])
    return np.bincount(labels * size + said, minlength=size**2).reshape(size, size)


def _named(class_names: Sequence[str], num_classes: int) -> list[str]:
    fits = len(class_names) == num_classes
    return list(class_names) if fits else [str(i) for i in range(num_classes)]


def _area(scores: np.ndarray, known: np.ndarray) -> float | None:
    """Computes the area of one class, whose examples `known` marks by 1 and others by 0."""
    is_known = known >= 0
    scores, is_of = scores[is_known], known[is_known] > 0
    num_of, num_others = int(is_of.sum()), int((~is_of).sum())
    if not num_of or not num_others:
        return None
    if np.isnan(scores).any():
        return np.nan
    _, place, counts = np.unique(scores, return_inverse=True, return_counts=True)
    # Equal scores have the mean of their ranks.
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[place]
    return (ranks[is_of].sum() - num_of * (num_of + 1) / 2) / (num_of * num_others)


def _predictions(outputs: Any, targets: Any, name: str) -> tuple[jax.Array, jax.Array]:
    """Reads predictions and targets, both `[examples, targets]`."""
    is_array = isinstance(outputs, jax.Array | np.ndarray)
    rule = f"be one array of numbers, for metric {name}"
    checks.require(is_array, "outputs", rule, type(outputs).__name__)
    said, true = (trees.at_least_float32(jnp.asarray(x)) for x in (outputs, targets))
    said, true = (x.reshape(x.shape[0], -1) for x in (said, true))
    rule = f"be as many as the outputs for metric {name}"
    checks.require(said.shape == true.shape, "targets", rule, jnp.shape(targets))
    return said, true.astype(said.dtype)


def _means(values: jax.Array) -> jax.Array:
    """Averages over the targets of each example, and counts it, `[examples, 2]`."""
    values = jnp.mean(values, axis=-1)
    return jnp.stack([values, jnp.ones_like(values)], axis=-1)


def _mean(sums: np.ndarray) -> np.ndarray:
    return _ratio(sums[..., 0], sums[..., 1])


def _counts_by_class(outputs: Any, targets: Any, name: str) -> jax.Array:
    """Counts correct predictions, targets and predictions by class, `[examples, 3 classes]`."""
    scores = _scores(outputs, targets, name)
    is_valid = scores.is_valid[..., None]
    counted = is_valid.astype(jnp.float32)
    num_classes = scores.logits.shape[-1]
    is_true = jax.nn.one_hot(scores.labels, num_classes) * counted
    is_said = jax.nn.one_hot(jnp.argmax(scores.logits, axis=-1), num_classes) * counted
    return _or_nan(_by_example(is_true * is_said, is_true, is_said), scores.logits, is_valid)


def _or_nan(terms: jax.Array, outputs: jax.Array, is_valid: jax.Array) -> jax.Array:
    """Replaces the terms of an example by NaN if an output of a valid target is NaN."""
    is_nan = (jnp.isnan(outputs) & is_valid).reshape(len(terms), -1).any(axis=1)
    return jnp.where(is_nan[:, None], jnp.nan, terms)


def _by_example(*parts: jax.Array) -> jax.Array:
    """Sums over the axes between the first and the last, and concatenates the parts."""
    rows = [part.reshape(part.shape[0], -1, part.shape[-1]) for part in parts]
    return jnp.concatenate([jnp.sum(r, axis=1, dtype=jnp.float32) for r in rows], axis=-1)


def _ratio(numerator: np.ndarray, denominator: np.ndarray) -> np.ndarray:
    safe = np.where(denominator > 0, denominator, 1.0)
    return np.where(denominator > 0, numerator / safe, np.nan)
