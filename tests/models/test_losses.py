"""Losses against float64 NumPy, and what they do with labels that are not labels."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from marks import telling

from fedjax_dp.models import losses

RNG = np.random.default_rng(7)
# A small loss is the difference of two logits of size 10, each rounded to float32.
ROUNDING = 10 * np.finfo(np.float32).eps


def cross_entropy_oracle(logits, labels):
    """Mean over valid tokens of -log softmax, written out in float64."""
    result = []
    for rows, targets in zip(np.float64(logits), labels, strict=True):
        rows, targets = rows.reshape(-1, rows.shape[-1]), np.ravel(targets)
        values = [
            np.log(np.sum(np.exp(row - row.max()))) + row.max() - row[target]
            for row, target in zip(rows, targets, strict=True)
            if 0 <= target < len(row)
        ]
        result.append(np.mean(values) if values else 0.0)
    return np.array(result)


def binary_oracle(logits, labels):
    result = []
    for row, targets in zip(np.float64(logits), np.float64(labels), strict=True):
        row, targets = np.ravel(row), np.ravel(targets)
        keep = (targets >= 0) & (targets <= 1)
        p = 1 / (1 + np.exp(-row[keep]))
        values = -(targets[keep] * np.log(p) + (1 - targets[keep]) * np.log(1 - p))
        result.append(values.mean() if keep.any() else 0.0)
    return np.array(result)


@telling
def test_cross_entropy_equals_numpy_for_classes_and_for_sequences():
    logits = RNG.normal(size=(6, 5)).astype(np.float32) * 4
    labels = RNG.integers(5, size=6)
    values, oracle = (
        losses.softmax_cross_entropy(logits, labels),
        cross_entropy_oracle(logits, labels),
    )
    np.testing.assert_allclose(values, oracle, rtol=1e-6, atol=ROUNDING)
    logits = RNG.normal(size=(4, 7, 5)).astype(np.float32) * 4
    labels = RNG.integers(-1, 5, size=(4, 7))
    labels[2] = losses.IGNORE_LABEL
    values, oracle = (
        losses.softmax_cross_entropy(logits, labels),
        cross_entropy_oracle(logits, labels),
    )
    np.testing.assert_allclose(values, oracle, rtol=1e-6, atol=ROUNDING)
    assert values[2] == 0


@pytest.mark.parametrize("label", [-1, -7, 5, 2**31 - 1, -(2**31)])
def test_a_label_out_of_range_has_zero_loss_gradient_and_weight(label):
    logits = jnp.asarray(RNG.normal(size=(2, 5)), jnp.float32)
    labels = jnp.array([label, 3])
    values, gradient = jax.value_and_grad(
        lambda z: jnp.sum(losses.softmax_cross_entropy(z, labels)), argnums=0
    )(logits)
    np.testing.assert_allclose(values, cross_entropy_oracle(logits, np.array(labels)).sum(), 1e-6)
    assert np.all(gradient[0] == 0) and np.any(gradient[1] != 0)
    correct, weight = losses.softmax_correct(logits, labels)
    assert correct[0] == 0 and weight.tolist() == [0, 1]


def test_cross_entropy_of_huge_logits_is_exact():
    values = losses.softmax_cross_entropy(jnp.array([[1e4, 0.0], [1e4, 0.0]]), jnp.array([0, 1]))
    assert values.tolist() == [0.0, 1e4]


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_losses_of_narrow_outputs_are_computed_in_single_precision(dtype):
    logits = jnp.asarray(RNG.normal(size=(8, 5)), dtype)
    labels = RNG.integers(5, size=8)
    values = losses.softmax_cross_entropy(logits, labels)
    assert values.dtype == jnp.float32
    oracle = cross_entropy_oracle(np.asarray(logits, np.float64), labels)
    np.testing.assert_allclose(values, oracle, rtol=1e-6)
    binary = losses.sigmoid_binary_cross_entropy(logits[:, 0], labels > 2)
    oracle = binary_oracle(np.asarray(logits, np.float64)[:, 0], labels > 2)
    np.testing.assert_allclose(binary, oracle, rtol=1e-6)
    squares = losses.squared_error(logits[:, 0], jnp.asarray(labels))
    oracle = (np.asarray(logits, np.float64)[:, 0] - labels) ** 2
    np.testing.assert_allclose(squares, oracle, rtol=1e-6)


@telling
def test_binary_cross_entropy_equals_numpy():
    logits = RNG.normal(size=(9, 1)).astype(np.float32) * 3
    labels = RNG.integers(2, size=9)
    values = losses.sigmoid_binary_cross_entropy(logits, labels)
    np.testing.assert_allclose(values, binary_oracle(logits, labels), rtol=2e-6)
    several = RNG.normal(size=(5, 4)).astype(np.float32)
    targets = RNG.uniform(-0.5, 1.0, size=(5, 4)).astype(np.float32)
    targets[0], targets[1, 0] = -1, np.nan
    gradient = jax.grad(lambda z: jnp.sum(losses.sigmoid_binary_cross_entropy(z, targets)))(several)
    oracle = (1 / (1 + np.exp(-np.float64(several))) - targets) / (targets >= 0).sum(1).clip(1)[
        :, None
    ]
    np.testing.assert_allclose(gradient, np.where(targets >= 0, oracle, 0), rtol=1e-5, atol=1e-6)
    values = losses.sigmoid_binary_cross_entropy(several, targets)
    np.testing.assert_allclose(values, binary_oracle(several, targets), rtol=2e-6)
    assert values[0] == 0


def test_squared_error_equals_numpy_and_takes_a_column():
    outputs = RNG.normal(size=(5, 3)).astype(np.float32)
    targets = RNG.normal(size=(5, 3)).astype(np.float32)
    oracle = np.mean((np.float64(outputs) - targets) ** 2, axis=1)
    np.testing.assert_allclose(losses.squared_error(outputs, targets), oracle, rtol=1e-6)
    column = losses.squared_error(outputs[:, :1], targets[:, 0])
    np.testing.assert_allclose(column, (outputs[:, 0] - targets[:, 0]) ** 2, rtol=1e-6)


def test_shapes_that_would_broadcast_are_errors():
    with pytest.raises(ValueError, match="labels must have shape"):
        losses.softmax_cross_entropy(jnp.zeros((4, 3)), jnp.zeros((4, 1), int))
    with pytest.raises(ValueError, match="targets must have shape"):
        losses.squared_error(jnp.zeros((4,)), jnp.zeros((4, 1)))


def test_accuracy_counts_each_example_once_and_only_valid_tokens():
    logits = np.zeros((3, 4, 2), np.float32)
    logits[..., 1] = 1
    labels = np.array([[1, 0, -1, -1], [1, 1, 1, 0], [-1, -1, -1, -1]])
    correct, weight = losses.softmax_correct(logits, labels)
    np.testing.assert_allclose(correct, [0.5, 0.75, 0])
    np.testing.assert_allclose(weight, [1, 1, 0])
    correct, weight = losses.sigmoid_correct(np.array([[2.0], [-1.0], [3.0]]), np.array([1, 1, -1]))
    assert correct.tolist() == [1, 0, 0] and weight.tolist() == [1, 1, 0]


def test_resolve_suggests_the_nearest_loss_and_passes_functions_through():
    with pytest.raises(ValueError, match="softmax_cross_entropy"):
        losses.resolve("softmax_cros_entropy")

    def own(outputs, batch):
        return outputs - batch["target"]

    loss_fn, correct_fn = losses.resolve(own)
    batch = {"target": np.array([1.0, 2.0])}
    assert loss_fn(np.zeros(2), batch).tolist() == [-1.0, -2.0] and correct_fn is None
    assert losses.resolve("squared_error")[1] is None


@pytest.mark.parametrize(
    ("value", "shape"),
    [
        (lambda x: jnp.mean(x), r"float32\[\]"),
        (lambda x: x[:, None] - x, r"float32\[3, 3\]"),
        (lambda x: x[:, None], r"float32\[3, 1\]"),
        (lambda x: x * 1j, r"complex64\[3\]"),
    ],
)
def test_a_loss_of_another_shape_than_one_number_for_each_example_is_refused(value, shape):
    """A mean, or what broadcasting made of a column and a row, would train to another model."""
    outputs, batch = jnp.ones(3), {"y": jnp.zeros(3)}
    loss_fn, _ = losses.resolve(lambda outputs, batch: value(outputs))
    with pytest.raises(ValueError, match=rf"one real number for each example, \[3\], got '{shape}"):
        jax.eval_shape(loss_fn, outputs, batch)
    _, correct_fn = losses.resolve(
        "squared_error", lambda outputs, batch: (value(outputs), jnp.ones(3))
    )
    with pytest.raises(ValueError, match="the first result of correct_fn"):
        jax.eval_shape(correct_fn, outputs, batch)
