"""Metrics besides loss and accuracy, computed from sums over held-out examples."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedjax_dp.core import checks, trees
from fedjax_dp.core.registry import Registry
from fedjax_dp.models.losses import Batch

_NUM_BINS = 15


class Metric(NamedTuple):
    """A metric that is computed from sums over examples.

    Attributes:
      contribute: `(outputs, batch) -> [examples, k]`, the terms of each example, float32.
      finish: `(sums [..., k]) -> values [...]`, NumPy in float64; NaN without examples.
    """

    contribute: Callable[[Any, Batch], jax.Array]
    finish: Callable[[np.ndarray], np.ndarray]


def perplexity() -> Metric:
    """Computes the exponential of the mean cross entropy of all tokens, or of all examples.

    Returns:
      The metric, for models whose outputs are logits `[examples, ..., classes]` and whose targets
      `y` are classes; targets outside of these are left out.
    """

    def contribute(outputs, batch):
        logits, labels = trees.at_least_float32(jnp.asarray(outputs)), batch["y"]
        valid = _is_class(logits, labels)
        safe = jnp.where(valid, labels, 0)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, safe)
        return _by_example(jnp.where(valid, losses, 0.0)[..., None], valid[..., None])

    return Metric(contribute, lambda sums: np.exp(_ratio(sums[..., 0], sums[..., 1])))


def f1() -> Metric:
    """Computes the harmonic mean of precision and recall, averaged over the classes that occur.

    Returns:
      The metric, for models whose outputs are logits `[examples, ..., classes]`; a class occurs if
      it is a target or a prediction.

    Source: macro-averaged F1, as in scikit-learn's `f1_score(average="macro")`.
    """

    def contribute(outputs, batch):
        return _by_example(*_counts_by_class(outputs, batch["y"]))

    def finish(sums):
        hits, true, said = np.split(sums, 3, axis=-1)
        each = _ratio(2 * hits, true + said)
        return _ratio(np.nansum(each, axis=-1), np.sum(~np.isnan(each), axis=-1))

    return Metric(contribute, finish)


def mcc() -> Metric:
    """Computes Matthews's correlation coefficient between classes and predictions.

    Returns:
      The metric, in [-1, 1], for models whose outputs are logits `[examples, ..., classes]`, of two
      classes or more; 0 where all targets, or all predictions, are of one class.

    Source: Gorodkin 2004, equation 8, as in scikit-learn's `matthews_corrcoef`.
    """

    def contribute(outputs, batch):
        return _by_example(*_counts_by_class(outputs, batch["y"]))

    def finish(sums):
        hits, true, said = np.split(np.asarray(sums, np.float64), 3, axis=-1)
        count = np.sum(true, axis=-1)
        covariance = np.sum(hits, axis=-1) * count - np.sum(true * said, axis=-1)
        # Of counts up to 2^26, squares are exact.
        spreads = [count**2 - np.sum(each**2, axis=-1) for each in (true, said)]
        found = _ratio(covariance, np.sqrt(spreads[0]) * np.sqrt(spreads[1]))
        return np.where(count > 0, np.nan_to_num(found), np.nan)

    return Metric(contribute, finish)


def calibration_error() -> Metric:
    """Computes the distance between confidence and accuracy over 15 bins of confidence.

    Returns:
      The metric, for models whose outputs are logits `[examples, ..., classes]`: the mean distance
      between the largest probability and the share of correct predictions, by bin.

    Source: Guo and others 2017, expected calibration error.
    """

    def contribute(outputs, batch):
        logits, labels = trees.at_least_float32(jnp.asarray(outputs)), batch["y"]
        valid = _is_class(logits, labels)
        sure = jnp.max(jax.nn.softmax(logits), axis=-1)
        is_right = jnp.argmax(logits, axis=-1) == labels
        place = jnp.clip(jnp.ceil(sure * _NUM_BINS) - 1, 0, _NUM_BINS - 1).astype(jnp.int32)
        is_in = jax.nn.one_hot(place, _NUM_BINS) * valid[..., None]
        return _by_example(is_in * sure[..., None], is_in * is_right[..., None], is_in)

    def finish(sums):
        sure, right, count = np.split(sums, 3, axis=-1)
        return _ratio(np.sum(np.abs(sure - right), axis=-1), np.sum(count, axis=-1))

    return Metric(contribute, finish)


def _adopted(own: Any) -> Callable[[], Metric]:
    """Accepts a user's metric: a `Metric`, or a function that returns one."""
    made = own() if callable(own) and not isinstance(own, Metric) else own
    checks.require(isinstance(made, Metric), "metric", "be a Metric, or return one if called", own)
    return lambda: made


METRICS: Registry[Callable[[], Metric]] = Registry(
    {metric.__name__: metric for metric in (perplexity, f1, mcc, calibration_error)}, _adopted
)


def _is_class(logits: jax.Array, labels: jax.Array) -> jax.Array:
    rule = f"have shape {logits.shape[:-1]} for this metric, one class for each vector of logits"
    checks.require(labels.shape == logits.shape[:-1], "targets", rule, labels.shape)
    return (labels >= 0) & (labels < logits.shape[-1])


def _counts_by_class(outputs: jax.Array, labels: jax.Array) -> tuple[jax.Array, ...]:
    """Marks correct predictions, targets and predictions by class, `[examples, ..., classes]`."""
    valid = _is_class(outputs, labels)[..., None]
    is_true = jax.nn.one_hot(labels, outputs.shape[-1]) * valid
    is_said = jax.nn.one_hot(jnp.argmax(outputs, axis=-1), outputs.shape[-1]) * valid
    return is_true * is_said, is_true, is_said


def _by_example(*parts: jax.Array) -> jax.Array:
    """Sums over the axes between the first and the last, and concatenates the parts."""
    rows = [part.reshape(part.shape[0], -1, part.shape[-1]) for part in parts]
    return jnp.concatenate([jnp.sum(r, axis=1, dtype=jnp.float32) for r in rows], axis=-1)


def _ratio(numerator: np.ndarray, denominator: np.ndarray) -> np.ndarray:
    safe = np.where(denominator > 0, denominator, 1.0)
    return np.where(denominator > 0, numerator / safe, np.nan)
