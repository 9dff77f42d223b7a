"""Metrics besides loss and accuracy, computed from sums over held-out examples."""

from collections.abc import Callable, Mapping
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
    """

    contribute: Callable[[Any, Batch], jax.Array]
    finish: Callable[[np.ndarray], np.ndarray]
    targets: tuple[Targets, ...] = ()


# Log-odds of yes or no are logits of two classes.
_CLASSES: tuple[Targets, ...] = ("classes", "ordered", "probabilities")


def perplexity() -> Metric:
    """Computes the exponential of the mean cross entropy of all tokens, or of all examples.

    Logits are `[examples, ..., classes]` with classes `y`, or one log-odds of each example with `y`
    in [0, 1]. Targets outside of these are left out.
    """

    def contribute(outputs, batch):
        scores = _scores(outputs, batch["y"], "perplexity")
        losses = jnp.where(scores.is_valid, scores.losses, 0.0)
        return _by_example(losses[..., None], scores.is_valid[..., None])

    return Metric(contribute, lambda sums: np.exp(_ratio(sums[..., 0], sums[..., 1])), _CLASSES)


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
        if outputs.shape == y.shape and y.ndim == 2 and y.shape[1] > 1:
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

    return Metric(contribute, finish, _CLASSES)


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

    return Metric(contribute, lambda sums: _ratio(sums[..., 0], sums[..., 1]), _CLASSES)


def require_fits(metrics: Mapping[str, Metric], model: Model) -> None:
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
    metrics: Mapping[str, Metric], model: Model, outputs: Any, batch: Batch
) -> dict[str, jax.Array]:
    """Computes the terms of metrics, each `[examples, k]`."""
    loss = unweighted(model.loss_fn)
    is_declared = declared(loss) is not None
    if isinstance(loss, Loss):
        batch, outputs = loss.marked(batch), loss.decoded(outputs)
    terms = {}
    for name, metric in metrics.items():
        if metric.targets and not is_declared:
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


def _adopted(own: Any) -> Callable[[], Metric]:
    """Accepts a user's metric: a `Metric`, or a function that returns one."""
    metric = own() if callable(own) and not isinstance(own, Metric) else own
    checks.require(
        isinstance(metric, Metric), "metric", "be a Metric, or return one if called", own
    )
    return lambda: metric


METRICS: Registry[Callable[[], Metric]] = Registry(
    {metric.__name__: metric for metric in (perplexity, f1, mcc, calibration_error, brier_score)},
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
