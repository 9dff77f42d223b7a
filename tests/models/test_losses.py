"""Losses against float64 NumPy, and what they do with labels that are not labels."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from marks import telling
from scipy.special import expit, gammaln
from scipy.stats import poisson

from fedjax_dp.models import losses
from fedjax_dp.models.losses import Loss

RNG = np.random.default_rng(7)
# A small loss is the difference of two logits of size 10, each rounded to float32.
ROUNDING = 10 * np.finfo(np.float32).eps
# Compiled as in a round, and once for all cases of a shape.
cross_entropy, correct_of = (
    jax.jit(f) for f in (losses.softmax_cross_entropy, losses.softmax_correct)
)
slope_of = jax.jit(
    jax.value_and_grad(lambda z, labels: jnp.sum(losses.softmax_cross_entropy(z, labels)))
)


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
    values, gradient = slope_of(logits, labels)
    np.testing.assert_allclose(values, cross_entropy_oracle(logits, np.array(labels)).sum(), 1e-6)
    assert np.all(gradient[0] == 0) and np.any(gradient[1] != 0)
    correct, weight = correct_of(logits, labels)
    assert correct[0] == 0 and weight.tolist() == [0, 1]


def test_cross_entropy_of_huge_logits_is_exact():
    values = cross_entropy(jnp.array([[1e4, 0.0], [1e4, 0.0]]), jnp.array([0, 1]))
    assert values.tolist() == [0.0, 1e4]


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_losses_of_narrow_outputs_are_computed_in_single_precision(dtype):
    logits = jnp.asarray(RNG.normal(size=(8, 5)), dtype)
    labels = RNG.integers(5, size=8)
    values = cross_entropy(logits, labels)
    assert values.dtype == jnp.float32
    oracle = cross_entropy_oracle(np.asarray(logits, np.float64), labels)
    np.testing.assert_allclose(values, oracle, rtol=1e-6)
    binary = jax.jit(losses.sigmoid_binary_cross_entropy)(logits[:, 0], labels > 2)
    oracle = binary_oracle(np.asarray(logits, np.float64)[:, 0], labels > 2)
    np.testing.assert_allclose(binary, oracle, rtol=1e-6)
    squares = jax.jit(losses.squared_error)(logits[:, 0], labels)
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


@telling
def test_squared_error_of_probabilities_equals_numpy_and_its_gradient_has_the_derived_bound():
    """½(y − σ(z))², with gradient (σ − y)σ(1 − σ) of at most 4/27, at σ = 2/3 for y = 0."""
    z = np.concatenate([RNG.normal(size=8) * 3, [np.log(2), -np.log(2), 400.0]]).astype(np.float32)
    y = np.concatenate([RNG.integers(2, size=8), [0, 1, 0]])
    chances = 1 / (1 + np.exp(-np.float64(z)))
    values = losses.sigmoid_half_squared_error(z[:, None], y)
    # A probability near 1 has the rounding of 1.
    np.testing.assert_allclose(values, (y - chances) ** 2 / 2, rtol=2e-6, atol=6e-8)
    gradient = jax.grad(lambda z: jnp.sum(losses.sigmoid_half_squared_error(z, y)))(jnp.asarray(z))
    np.testing.assert_allclose(gradient, (chances - y) * chances * (1 - chances), atol=1e-7)
    np.testing.assert_allclose(np.abs(gradient[8:10]), 4 / 27, rtol=1e-6)
    several = RNG.normal(size=(3, 4)).astype(np.float32)
    targets = np.array([[0.2, 1, 0, 0.7], [-1, 1, 2, 0], [-1, np.nan, 3, -1]], np.float32)
    is_valid = (targets >= 0) & (targets <= 1)
    squares = np.where(is_valid, (targets - 1 / (1 + np.exp(-np.float64(several)))) ** 2 / 2, 0)
    found = losses.sigmoid_half_squared_error(several, targets)
    expected = squares.sum(axis=1) / np.maximum(is_valid.sum(axis=1), 1)
    np.testing.assert_allclose(found, expected, rtol=2e-6, atol=6e-8)


def test_squared_error_equals_numpy_and_takes_a_column():
    outputs = RNG.normal(size=(5, 3)).astype(np.float32)
    targets = RNG.normal(size=(5, 3)).astype(np.float32)
    oracle = np.mean((np.float64(outputs) - targets) ** 2, axis=1)
    np.testing.assert_allclose(losses.squared_error(outputs, targets), oracle, rtol=1e-6)
    column = losses.squared_error(outputs[:, :1], targets[:, 0])
    np.testing.assert_allclose(column, (outputs[:, 0] - targets[:, 0]) ** 2, rtol=1e-6)


@telling
def test_ordinal_cross_entropy_is_that_of_differences_of_float64_chances_and_so_is_its_gradient():
    """P(y > k) = σ(z_k); log-odds up to 60, and neighbours as close as float32 tells apart."""
    z = np.array([[2, 0.5, -1], [-60, -61, -62], [60, 59, 58], [1, 1 - 2.0**-10, -3]], np.float32)
    z, y = np.repeat(z, 4, axis=0), np.tile(np.arange(4), 4)

    def oracle(z):
        # The tails by the smaller of P(y > k) and P(y ≤ k), so that float64 does not cancel.
        wide = np.float64(z)
        edges = np.concatenate([np.full((16, 1), np.inf), wide, np.full((16, 1), -np.inf)], 1)
        above, below = edges[np.arange(16), y], edges[np.arange(16), y + 1]
        upper = expit(above) - expit(below)
        lower = expit(-below) - expit(-above)
        return -np.log(np.where(above > 0, lower, upper))

    def total(z):
        return jnp.sum(losses.ordinal_cross_entropy(z, y))

    values = losses.ordinal_cross_entropy(z, y)
    np.testing.assert_allclose(values, oracle(z), rtol=2e-5, atol=1e-6)
    step = 1e-5
    for k in range(3):
        moved = [np.float64(z) + sign * step * np.eye(3)[k] for sign in (1, -1)]
        slope = (oracle(moved[0]) - oracle(moved[1])) / (2 * step)
        np.testing.assert_allclose(jax.grad(total)(z)[:, k], slope, rtol=1e-3, atol=1e-4)
    chances = np.exp(np.float64(losses.ordered_log_chances(z[::4])))
    np.testing.assert_allclose(chances.sum(axis=1), 1, rtol=1e-5)
    # Log-odds that cross have a loss and a gradient, and a label to leave out has neither.
    crossing = np.float32([[0, 1, 2]])
    assert np.isfinite(losses.ordinal_cross_entropy(crossing, np.array([1])))
    assert losses.ordinal_cross_entropy(crossing, np.array([-1])) == 0
    left_out = jax.grad(lambda z: losses.ordinal_cross_entropy(z, np.array([-1]))[0])(crossing)
    assert not np.any(left_out)


def test_ordinal_accuracy_is_that_of_the_most_probable_class():
    z = np.float32([[2, 1.9, -3], [-1, -2, -3], [4, 3, 2]])
    correct, weight = jax.jit(losses.ordinal_correct)(z, np.array([2, 0, -1]))
    assert correct.tolist() == [1, 1, 0] and weight.tolist() == [1, 1, 0]


def test_poisson_loss_is_that_of_scipy_but_for_a_constant():
    rates, counts = RNG.uniform(0.1, 30, (6, 2)), RNG.poisson(5, (6, 2))
    found = losses.poisson_nll(np.log(rates).astype(np.float32), counts)
    whole = -poisson.logpmf(counts, rates) - gammaln(counts + 1)
    np.testing.assert_allclose(found, whole.mean(axis=1), rtol=1e-5, atol=1e-5)
    one = losses.poisson_nll(np.float32([[0.5]]), np.array([3.0]))
    np.testing.assert_allclose(one, [np.exp(0.5) - 1.5], rtol=1e-6)


def test_ordered_classes_and_counts_are_known_before_any_work():
    (ordered,) = read("ordinal_cross_entropy", np.zeros((4, 3), np.float32), np.zeros(4, int))
    assert ordered.wrong(np.array([0, 3, 4, -1])).tolist() == [False, False, True, True]
    assert "from 0 to 3, as the model has 4 ordered classes" in ordered.rule
    (counts,) = read("poisson_nll", np.zeros((4, 1), np.float32), np.zeros(4, np.float32))
    given = np.array([0, 2, 0.5, -1, np.nan, np.inf])
    assert counts.wrong(given).tolist() == [False, False, True, True, True, True]
    with pytest.raises(ValueError, match="one label for each example"):
        losses.ordinal_cross_entropy(jnp.zeros((4, 3)), jnp.zeros((4, 3), int))
    with pytest.raises(ValueError, match="labels must be integers, the places"):
        losses.ordinal_cross_entropy(jnp.zeros((4, 3)), jnp.zeros(4))


def test_shapes_that_would_broadcast_are_errors():
    with pytest.raises(ValueError, match="labels must have shape"):
        losses.softmax_cross_entropy(jnp.zeros((4, 3)), jnp.zeros((4, 1), int))
    with pytest.raises(ValueError, match="targets must have shape"):
        losses.squared_error(jnp.zeros((4,)), jnp.zeros((4, 1)))


def read(loss, outputs, y):
    """The targets that a loss says it is for, from shapes alone."""
    shapes = [jax.ShapeDtypeStruct(np.shape(x), jnp.result_type(x)) for x in (outputs, y)]
    with losses.reads() as found:
        jax.eval_shape(lambda o, y: losses.resolve(loss)[0](o, {"x": o, "y": y}), *shapes)
    return found


def own_softmax(outputs, batch):
    return losses.softmax_cross_entropy(outputs, batch["y"])


def own_focal(outputs, batch):
    shares = jax.nn.softmax(outputs)
    return jnp.sum((1 - shares) ** 2 * -jnp.log(shares) * jax.nn.one_hot(batch["y"], 3), -1)


SOFTMAX, SIGMOID = "softmax_cross_entropy", "sigmoid_binary_cross_entropy"


@pytest.mark.parametrize(
    ("loss", "outputs", "right", "wrong"),
    [
        (SOFTMAX, (2, 3), [0, 2], [-1, 3, -100]),
        (own_softmax, (2, 3), [0, 2], [-1, 3]),
        (Loss(own_focal, "classes"), (2, 3), [0, 2], [-1, 3]),
        (Loss(SOFTMAX, ignore_label=-100), (2, 3), [0, 2, -100], [-1, 3]),
        (SOFTMAX, (2, 4, 3), [0, 2, -1], [-100, 3]),
        (Loss(SOFTMAX, ignore_label=-100), (2, 4, 3), [0, -100], [-1, 3]),
        (SIGMOID, (2, 1), [0, 1, 0.3], [-1, 2, np.nan, -0.1, 1.5]),
        (SIGMOID, (2, 5), [0, 1], [-1, 2]),
        (Loss(SIGMOID, ignore_label=-1), (2, 5), [0, 1, -1], [-2, 2]),
    ],
)
def test_a_loss_knows_its_targets_from_the_width_of_the_outputs(loss, outputs, right, wrong):
    shape = outputs[:-1] if outputs[-1] in (1, 3) else outputs
    (allowed,) = set(read(loss, np.zeros(outputs, np.float32), np.zeros(shape, int)))
    assert allowed.name == "y"
    for kind in (np.int32, np.int8, np.float32):
        values = np.asarray(right).astype(kind)
        assert np.array_equal(values, right) is not allowed.wrong(values).any()
    for value in wrong:
        assert allowed.wrong(np.array([right[0], value, right[-1]])).tolist() == [0, 1, 0]
    assert not allowed.wrong(np.array([True, False])).any()


def test_losses_of_numbers_are_for_finite_ones_and_unknown_losses_for_any_targets():
    outputs, y = np.zeros((4, 1), np.float32), np.zeros(4, np.float32)
    for loss in ("squared_error", "half_squared_error"):
        (allowed,) = read(loss, outputs, y)
        given = np.float32([np.nan, -3e38, 0, np.inf])
        assert allowed.wrong(given).tolist() == [True, False, False, True]
        assert not allowed.wrong(np.array([-(2**31), 5])).any()
    assert read(lambda o, b: o[:, 0] * b["y"], outputs, y) == []


def test_the_label_to_leave_out_may_be_a_class():
    logits = RNG.normal(size=(3, 4, 5)).astype(np.float32)
    padded = RNG.integers(1, 5, size=(3, 4)).astype(np.uint8)
    padded[1:, 2:] = 0
    loss_fn, correct_fn = losses.resolve(Loss("softmax_cross_entropy", ignore_label=0))
    with_none = np.where(padded == 0, -1, padded.astype(int))
    expected = cross_entropy_oracle(logits, with_none)
    found = jax.jit(loss_fn)(logits, {"y": padded})
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    hits = np.where(with_none >= 0, logits.argmax(-1) == with_none, 0).sum(1)
    correct, weight = jax.jit(correct_fn)(logits, {"y": padded})
    np.testing.assert_allclose(correct, hits / (with_none >= 0).sum(1), rtol=1e-6)
    assert weight.tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    ("declared", "match"),
    [
        (("softmax_cross_entropy", "numbers"), "be left out or be 'classes'"),
        (("squared_error", None, -1), "ignore_label must be left out"),
        ((own_focal, None, -1), "ignore_label must be left out"),
        ((own_focal, "labels"), "targets must be one of classes, counts, numbers, ordered, prob"),
        (("softmax", None), "loss must be one of"),
    ],
)
def test_a_wrong_declaration_is_refused(declared, match):
    with pytest.raises(ValueError, match=match):
        Loss(*declared)


def test_booleans_are_labels_and_other_kinds_are_refused():
    logits, y = RNG.normal(size=(6, 2)).astype(np.float32), np.arange(6) % 3 == 0
    for array in (y, jnp.asarray(y)):
        np.testing.assert_array_equal(
            cross_entropy(logits, array), cross_entropy(logits, y.astype(np.int32))
        )
        assert correct_of(logits, array)[0].tolist() == (logits.argmax(-1) == y).tolist()
    with pytest.raises(ValueError, match="labels must be integers or Booleans"):
        losses.softmax_cross_entropy(logits, y.astype(np.float32))
    with pytest.raises(ValueError, match="logits must have 2 classes or more"):
        losses.softmax_cross_entropy(logits[:, :1], y)


def test_outputs_that_are_no_numbers_are_never_correct():
    bad = np.array([[np.nan, np.nan], [0.0, np.nan], [1.0, 0.0]], np.float32)
    assert losses.softmax_correct(bad, np.array([0, 0, 0]))[0].tolist() == [0, 0, 1]
    assert losses.sigmoid_correct(bad[:, 0], np.array([0, 1, 1]))[0].tolist() == [0, 0, 1]


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
        (lambda x: (x, {"norm": x}), "a tuple of 2"),
        (lambda x: {"loss": x}, "a dict of 1"),
        (lambda x: None, "a NoneType"),
    ],
)
def test_a_loss_of_another_shape_than_one_number_for_each_example_is_refused(value, shape):
    """A mean, or what broadcasting made of a column and a row, would train to another model."""
    outputs, batch = jnp.ones(3), {"y": jnp.zeros(3)}
    loss_fn, _ = losses.resolve(lambda outputs, batch: value(outputs))
    with pytest.raises(ValueError, match=rf"one real number for each example, \[3\].*got '{shape}"):
        jax.eval_shape(loss_fn, outputs, batch)
    _, correct_fn = losses.resolve(
        "squared_error", lambda outputs, batch: (value(outputs), jnp.ones(3))
    )
    with pytest.raises(ValueError, match="the first result of correct_fn"):
        jax.eval_shape(correct_fn, outputs, batch)
    _, correct_fn = losses.resolve("squared_error", lambda outputs, batch: value(outputs))
    with pytest.raises(ValueError, match="result of correct_fn"):
        jax.eval_shape(correct_fn, outputs, batch)
