"""Losses per example and the counts for accuracy, in float32 or better."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import optax

from fedjax_dp.core import checks, trees
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.core.trees import PyTree

Batch = Mapping[str, Any]
IGNORE_LABEL = -1


class LossFn(Protocol):
    """A loss for each example."""

    def __call__(self, outputs: PyTree, batch: Batch, /) -> jax.Array:
        """Computes the losses, `[examples]`."""
        ...


class CorrectFn(Protocol):
    """The counts for accuracy."""

    def __call__(self, outputs: PyTree, batch: Batch, /) -> tuple[jax.Array, jax.Array]:
        """Computes correct answers and their weights, each `[examples]`."""
        ...


@checked
def softmax_cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Computes the cross entropy of integer labels, averaged over the tokens of each example.

    A label outside [0, classes), such as `IGNORE_LABEL`, is left out of the mean; an example with
    no valid label has loss 0 and gradient 0.

    Args:
      logits: unnormalised log-probabilities, `[examples, ..., classes]`.
      labels: integer classes, `[examples, ...]`.

    Returns:
      Losses in nats, `[examples]`, float32 or better.
    """
    logits = _widen(logits)
    valid = _is_class(logits, labels)
    values = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.where(valid, labels, 0))
    return _mean_where(values, valid)


@checked
def softmax_correct(logits: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Measures the share of an example's valid labels that have the largest logit.

    Args:
      logits: unnormalised log-probabilities, `[examples, ..., classes]`.
      labels: integer classes, `[examples, ...]`; values outside [0, classes) are left out.

    Returns:
      The share of correct labels times the weight, `[examples]`, and the weight, `[examples]`: 1 if
      an example has a valid label, else 0. The sum of the first over the sum of the second is the
      accuracy.
    """
    valid = _is_class(logits, labels)
    hits = (jnp.argmax(logits, axis=-1) == labels).astype(jnp.float32)
    return _mean_where(hits, valid), _any_valid(valid)


@checked
def sigmoid_binary_cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Computes the cross entropy of yes-or-no labels, averaged over the labels of each example.

    Args:
      logits: log-odds of label 1, `[examples, ...]`; a last axis of size 1 that the labels lack is
        dropped.
      labels: values in [0, 1], `[examples, ...]`; others, such as `IGNORE_LABEL`, are left out of
        the mean.

    Returns:
      Losses in nats, `[examples]`, float32 or better; 0 for an example with no valid label.
    """
    logits = _same_rank(_widen(logits), labels)
    valid = _is_probability(labels)
    targets = jnp.where(valid, labels, 0).astype(logits.dtype)
    return _mean_where(optax.sigmoid_binary_cross_entropy(logits, targets), valid)


@checked
def sigmoid_correct(logits: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Measures the share of an example's valid yes-or-no labels on the right side of log-odds 0.

    Args:
      logits: log-odds of label 1, `[examples, ...]`; 0 counts as label 0.
      labels: values in [0, 1], `[examples, ...]`, read as label 1 above one half; others are left
        out.

    Returns:
      The share of correct labels times the weight and the weight, as `softmax_correct` does.
    """
    logits = _same_rank(logits, labels)
    valid = _is_probability(labels)
    hits = ((logits > 0) == (labels > 0.5)).astype(jnp.float32)
    return _mean_where(hits, valid), _any_valid(valid)


@checked
def squared_error(outputs: jax.Array, targets: jax.Array) -> jax.Array:
    """Computes the squared error, without a factor one half, averaged over each example's targets.

    Args:
      outputs: predictions, `[examples, ...]`; a last axis of size 1 that the targets lack is
        dropped.
      targets: real values, `[examples, ...]`.

    Returns:
      Losses, `[examples]`, float32 or better.
    """
    outputs = _same_rank(_widen(outputs), targets)
    squares = jnp.square(outputs - targets.astype(outputs.dtype))
    return jnp.mean(squares.reshape(squares.shape[0], -1), axis=1)


@checked
def half_squared_error(outputs: jax.Array, targets: jax.Array) -> jax.Array:
    """Computes half the squared error, summed over each example's targets.

    Args:
      outputs: predictions, `[examples, ...]`; a last axis of size 1 that the targets lack is
        dropped.
      targets: real values, `[examples, ...]`.

    Returns:
      Losses, `[examples]`, float32 or better.
    """
    outputs = _same_rank(_widen(outputs), targets)
    squares = jnp.square(outputs - targets.astype(outputs.dtype))
    return jnp.sum(squares.reshape(squares.shape[0], -1), axis=1) / 2


_NAMED: dict[str, tuple[Callable[..., jax.Array], Callable[..., Any] | None]] = {
    "softmax_cross_entropy": (softmax_cross_entropy, softmax_correct),
    "sigmoid_binary_cross_entropy": (sigmoid_binary_cross_entropy, sigmoid_correct),
    "squared_error": (squared_error, None),
    "half_squared_error": (half_squared_error, None),
}
NAMES = tuple(_NAMED)


def resolve(
    loss: str | LossFn, correct_fn: CorrectFn | None = None
) -> tuple[LossFn, CorrectFn | None]:
    """Returns the loss function and the counting function, None if accuracy has no meaning."""
    own_correct_fn = None if correct_fn is None else _checked_counts(correct_fn)
    if callable(loss):
        return _checked_loss(loss), own_correct_fn
    checks.one_of("loss", loss, NAMES)
    values, counts = _NAMED[loss]

    def loss_fn(outputs: jax.Array, batch: Batch) -> jax.Array:
        return values(outputs, targets_of(batch))

    def named_correct_fn(outputs: jax.Array, batch: Batch) -> tuple[jax.Array, jax.Array]:
        assert counts is not None
        return counts(outputs, targets_of(batch))

    return loss_fn, own_correct_fn or (named_correct_fn if counts else None)


def targets_of(batch: Batch) -> jax.Array:
    """Reads the targets `y` of a batch."""
    checks.require("y" in batch, "examples", "hold targets 'y' for the loss to read", sorted(batch))
    return batch["y"]


def _checked_loss(loss: LossFn) -> LossFn:
    def loss_fn(outputs: PyTree, batch: Batch) -> jax.Array:
        values = loss(outputs, batch)
        _require_by_example("the result of loss", values, batch)
        return values

    return loss_fn


def _checked_counts(correct_fn: CorrectFn) -> CorrectFn:
    def checked(outputs: PyTree, batch: Batch) -> tuple[jax.Array, jax.Array]:
        correct, weight = correct_fn(outputs, batch)
        _require_by_example("the first result of correct_fn", correct, batch)
        _require_by_example("the second result of correct_fn", weight, batch)
        return correct, weight

    return checked


def _require_by_example(what: str, values: jax.Array, batch: Batch) -> None:
    """Requires one real number for each example: another shape would broadcast silently."""
    count = jnp.shape(jax.tree.leaves(batch)[0])[0]
    kind = jnp.result_type(values)
    fits = jnp.shape(values) == (count,) and not jnp.issubdtype(kind, jnp.complexfloating)
    rule = f"be one real number for each example, [{count}]"
    checks.require(fits, what, rule, f"{kind}{list(jnp.shape(values))}")


def _widen(x: jax.Array) -> jax.Array:
    return trees.at_least_float32(jnp.asarray(x))


def _same_rank(outputs: jax.Array, targets: jax.Array) -> jax.Array:
    if outputs.ndim == targets.ndim + 1 and outputs.shape[-1] == 1:
        outputs = outputs[..., 0]
    checks.require(
        outputs.shape == targets.shape, "targets", f"have shape {outputs.shape}", targets.shape
    )
    return outputs


def _is_class(logits: jax.Array, labels: jax.Array) -> jax.Array:
    checks.require(
        labels.shape == logits.shape[:-1], "labels", f"have shape {logits.shape[:-1]}", labels.shape
    )
    return (labels >= 0) & (labels < logits.shape[-1])


def _is_probability(labels: jax.Array) -> jax.Array:
    return (labels >= 0) & (labels <= 1)


def _rows(x: jax.Array) -> jax.Array:
    return x.reshape(x.shape[0], -1)


def _mean_where(values: jax.Array, valid: jax.Array) -> jax.Array:
    total = jnp.sum(_rows(jnp.where(valid, values, 0)), axis=1)
    return total / jnp.maximum(jnp.sum(_rows(valid), axis=1), 1)


def _any_valid(valid: jax.Array) -> jax.Array:
    return jnp.any(_rows(valid), axis=1).astype(jnp.float32)
