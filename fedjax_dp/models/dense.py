"""Models of dense layers: linear ones, and the multilayer perceptron."""

import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from fedjax_dp.core import checks
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.core.ranges import Count, Decay, Index, Positive
from fedjax_dp.models import inputs
from fedjax_dp.models.base import Model
from fedjax_dp.models.inputs import NumClasses
from fedjax_dp.models.losses import LossFn, half_squared_error, resolve, targets_of


class _Above(nn.Module):
    """The log-odds of lying above each class but the last: one score, and thresholds in order."""

    num_thresholds: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        # At score 0 all classes start alike.
        below = np.arange(1, self.num_thresholds + 1)
        starts = np.log(below / below[::-1])
        raw = np.log(np.expm1(np.diff(starts)))
        first = self.param("threshold", nn.initializers.constant(starts[0]), (1,))
        gaps = self.param("gaps", lambda key: jnp.asarray(raw, jnp.float32))
        score = nn.Dense(1, use_bias=False)(x)
        return score - jnp.concatenate([first, first + jnp.cumsum(nn.softplus(gaps))])


class _Linear(nn.Module):
    num_outputs: int
    is_ordered: bool = False

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        last = _Above if self.is_ordered else nn.Dense
        return last(self.num_outputs)(inputs.features(x))


class LossBounds(NamedTuple):
    """Bounds on the loss of every record, as a function of the parameters.

    Attributes:
      gradient: the largest L2 norm of its gradient.
      curvature: the largest eigenvalue of its Hessian.
    """

    gradient: float
    curvature: float


class _ShortRows(NamedTuple):
    """Applies a linear model to rows that are scaled down to a norm, a constant 1 included."""

    max_norm: float
    bounds: LossBounds
    loss_fn: LossFn

    def __call__(self, params: Any, x: jax.Array, **unused: Any) -> tuple[jax.Array, Any]:
        del unused
        rows = inputs.features(x)
        rows = jnp.concatenate([rows, jnp.ones_like(rows[:, :1])], axis=1)
        # A little shorter than the bound, so that rounding makes no row longer.
        norm = jnp.linalg.norm(rows, axis=1, keepdims=True) * (1 + 1e-6)
        rows = rows * jnp.minimum(1.0, self.max_norm / norm)
        return rows[:, :-1] @ params["kernel"] + rows[:, -1:] * params["bias"], params


@checked
def logistic_regression(
    example_x: jax.ShapeDtypeStruct,
    num_classes: NumClasses,
    *,
    single_logit: bool = False,
    gradient_bound: Positive | None = None,
    loss: Literal["cross_entropy", "squared_error", "binary_cross_entropy"] = "cross_entropy",
) -> Model:
    """Builds softmax regression, or binary logistic regression.

    It has (features + 1) · classes parameters: 7,850 for 28×28 images of 10 classes; with
    `single_logit`, features + 1.

    Args:
      example_x: shape and type of one input, flattened to features.
      num_classes: the number of classes, at least 2.
      single_logit: one log-odds and the binary cross entropy instead of a logit for each class;
        for 2 classes only.
      gradient_bound: bounds the L2 norm of every record's gradient: rows, with a 1 for the
        intercept, are scaled down to a norm of the bound, or of 1/√2 of it for logits of all
        classes. Parameters then start at zero. None leaves rows as they are.
      loss: "cross_entropy"; "squared_error" for half the squared error of the probability, with
        `single_logit` alone and without a `gradient_bound`, which is for convex losses; or
        "binary_cross_entropy", a log-odds of each of several labels that do not exclude each other.

    Returns:
      The model; outputs are logits `[examples, classes]`, or `[examples, 1]`.

    Raises:
      ValueError: if there are too few classes, or more than 2 with `single_logit`, or the loss does
        not fit.
    """
    if loss == "binary_cross_entropy":
        rule = "be none for loss 'binary_cross_entropy'"
        checks.require(gradient_bound is None, "gradient_bound", rule, gradient_bound)
    of_classes = "cross_entropy" if loss == "squared_error" else loss
    num_outputs, name = head(of_classes, num_classes, single_logit=single_logit)
    if loss == "squared_error":
        rule = "be true for loss 'squared_error', which is of one probability"
        checks.require(single_logit, "single_logit", rule, single_logit)
        rule = "be none for loss 'squared_error', which is not convex"
        checks.require(gradient_bound is None, "gradient_bound", rule, gradient_bound)
        name = "sigmoid_half_squared_error"
    if gradient_bound is not None:
        return _bounded(math.prod(example_x.shape), num_outputs, name, gradient_bound)
    return Model.from_flax(_Linear(num_outputs), example_x, loss=name, name="logistic_regression")


def _bounded(num_features: int, num_outputs: int, loss: str, bound: float) -> Model:
    """Builds logistic regression on short rows.

    Of a row x the gradient is `(p − y) xᵀ`, with `‖p − y‖` at most √2, or 1 of a single logit; the
    Hessian is `(diag(p) − p pᵀ) ⊗ x xᵀ`, whose first factor has eigenvalues of at most 1/2, or 1/4.
    """
    is_single = num_outputs == 1
    max_norm = bound if is_single else bound / math.sqrt(2)
    bounds = LossBounds(bound, max_norm**2 / (4 if is_single else 2))

    def init(key: Any) -> Any:
        del key
        return {"bias": jnp.zeros(num_outputs), "kernel": jnp.zeros((num_features, num_outputs))}

    loss_fn, correct_fn = resolve(loss)
    apply = _ShortRows(max_norm, bounds, loss_fn)
    return Model("logistic_regression", init, apply, loss_fn, correct_fn, mixes_examples=False)


@checked
def loss_bounds(model: Model) -> LossBounds | None:
    """Returns the bounds on a model's loss; None if none are known.

    Args:
      model: any model; `logistic_regression` with a `gradient_bound` has bounds, of its own loss.

    Returns:
      The bounds, or None.
    """
    apply = model.apply
    if not isinstance(apply, _ShortRows) or model.loss_fn is not apply.loss_fn:
        return None
    return apply.bounds


@checked
def linear_regression(example_x: jax.ShapeDtypeStruct, num_outputs: Count = 1) -> Model:
    """Builds least-squares regression.

    It has (features + 1) · outputs parameters.

    Args:
      example_x: shape and type of one input, flattened to features.
      num_outputs: the number of targets of an example, at least 1; that of the data in a run.

    Returns:
      The model, without an accuracy; outputs are `[examples, outputs]`.

    Raises:
      ValueError: if `num_outputs` is below 1.
    """
    model = Model.from_flax(
        _Linear(num_outputs), example_x, loss="squared_error", name="linear_regression"
    )
    return model._replace(is_quadratic=True)


@checked
def poisson_regression(example_x: jax.ShapeDtypeStruct, num_outputs: Count = 1) -> Model:
    """Builds a linear model of the logarithms of the means of counts.

    It has (features + 1) · outputs parameters.

    Args:
      example_x: shape and type of one input, flattened to features.
      num_outputs: the number of counts of an example, at least 1; that of the data in a run.

    Returns:
      The model, without an accuracy; outputs are logarithms of means, `[examples, outputs]`.

    Raises:
      ValueError: if `num_outputs` is below 1.

    Source: McCullagh and Nelder 1989, chapter 6.
    """
    module = _Linear(num_outputs)
    return Model.from_flax(module, example_x, loss="poisson_nll", name="poisson_regression")


@checked
def ordinal_regression(example_x: jax.ShapeDtypeStruct, num_classes: NumClasses) -> Model:
    """Builds the proportional-odds model of ordered classes.

    The log-odds of lying above class k are a linear function of the features, the same for every
    class, minus a threshold that grows with k. It has features + classes - 1 parameters.

    Args:
      example_x: shape and type of one input, flattened to features.
      num_classes: the number of classes, at least 3.

    Returns:
      The model; outputs are log-odds in descending order, `[examples, classes - 1]`.

    Raises:
      ValueError: if there are too few classes.

    Source: McCullagh 1980, section 2.
    """
    num_outputs, loss = head("ordinal", num_classes)
    module = _Linear(num_outputs, is_ordered=True)
    return Model.from_flax(module, example_x, loss=loss, name="ordinal_regression")


@checked
def least_squares(example_x: jax.ShapeDtypeStruct, *, scale: Positive = 1.0) -> Model:
    """Builds least squares without an intercept, from a start at zero: `scale · ½ (xᵀw − y)²`.

    It has as many parameters as there are features.

    Args:
      example_x: shape and type of one input, flattened to features.
      scale: the factor of every loss, above 0; a client's number of examples makes the mean
        over its examples their sum, half of all squared errors.

    Returns:
      The model, without an accuracy; outputs are `[examples]`.

    Raises:
      ValueError: for a scale that is not above 0.

    Source: Malekmohammadi 2025, section 2.4.1.
    """

    def loss(outputs, batch):
        return scale * half_squared_error(outputs, targets_of(batch))

    num_features = math.prod(example_x.shape)
    model = Model.from_functions(
        lambda key: jnp.zeros(num_features),
        lambda params, x: inputs.features(x) @ params,
        loss=loss,
        name="least_squares",
    )
    return model._replace(is_quadratic=True)


# The loss of a network by its option: the loss of its outputs, and the fewest classes.
_HEADS = {
    "cross_entropy": ("softmax_cross_entropy", 2),
    "binary_cross_entropy": ("sigmoid_binary_cross_entropy", 2),
    "ordinal": ("ordinal_cross_entropy", 3),
    "squared_error": ("squared_error", 0),
    "poisson": ("poisson_nll", 0),
}


def head(
    loss: str, num_classes: int, num_outputs: int = 1, *, single_logit: bool = False
) -> tuple[int, str]:
    """Chooses the outputs of a network and their loss; 2 classes may share one log-odds."""
    name, fewest = _HEADS[loss]
    if fewest == 0:
        rule = f"be 0 for loss {loss!r}, which is for numbers, not classes"
        checks.require(num_classes == 0, "num_classes", rule, num_classes)
    else:
        why = f" for loss {loss!r}" if num_classes == 0 or loss == "ordinal" else ""
        rule = f"be an integer of at least {fewest}{why}"
        checks.require(num_classes >= fewest, "num_classes", rule, num_classes)
    if single_logit:
        rule = "be false unless loss is 'cross_entropy'"
        checks.require(loss == "cross_entropy", "single_logit", rule, single_logit)
        checks.require(num_classes == 2, "num_classes", "be 2 with single_logit", num_classes)
        return 1, "sigmoid_binary_cross_entropy"
    if loss == "ordinal":
        return num_classes - 1, name
    return num_outputs if fewest == 0 else num_classes, name


class _Mlp(nn.Module):
    hidden_sizes: tuple[int, ...]
    num_outputs: int
    dropout: float
    is_ordered: bool = False

    @nn.compact
    def __call__(self, x: jax.Array, *, is_training: bool = False) -> jax.Array:
        x = inputs.features(x)
        for size in self.hidden_sizes:
            x = nn.relu(nn.Dense(size)(x))
            x = nn.Dropout(self.dropout, deterministic=not is_training)(x)
        last = _Above if self.is_ordered else nn.Dense
        return last(self.num_outputs)(x)


@checked
def mlp(
    example_x: jax.ShapeDtypeStruct,
    num_classes: Index,
    num_outputs: Count = 1,
    *,
    hidden_sizes: Sequence[Count] = (200, 200),
    dropout: Decay = 0.0,
    single_logit: bool = False,
    loss: Literal[
        "cross_entropy", "binary_cross_entropy", "ordinal", "squared_error", "poisson"
    ] = "cross_entropy",
) -> Model:
    """Builds a network of dense layers with ReLU between them.

    With sizes n₀ (features), n₁, …, n_L (classes) it has Σ (nᵢ + 1) · nᵢ₊₁ parameters: 199,210 for
    28×28 images of 10 classes and the default layers, the "2NN" of the source.

    Args:
      example_x: shape and type of one input, flattened to features.
      num_classes: the number of classes, at least 2, or 3 in an order; 0 for numbers and counts.
      num_outputs: the number of targets of an example, where these are numbers or counts; that of
        the data in a run.
      hidden_sizes: units of each hidden layer; none makes it a linear model.
      dropout: share of hidden units dropped in training, in [0, 1).
      single_logit: one log-odds and the binary cross entropy instead of a logit for each class;
        for 2 classes only.
      loss: "cross_entropy" of classes; "binary_cross_entropy" of several labels, each yes or no;
        "ordinal", the proportional odds of ordered classes; or "squared_error" of numbers, or
        "poisson" of counts, one or several.

    Returns:
      The model; outputs are logits `[examples, classes]`, one log-odds `[examples, 1]`, log-odds of
      lying above each class but the last `[examples, classes - 1]`, or `[examples, outputs]`.

    Raises:
      ValueError: if an argument is out of its range.

    Source: McMahan and others 2017, section 3.
    """
    width, name = head(loss, num_classes, num_outputs, single_logit=single_logit)
    rate, is_ordered = inputs.dropout_rate(dropout), loss == "ordinal"
    module = _Mlp(tuple(hidden_sizes), width, rate, is_ordered)
    return Model.from_flax(module, example_x, loss=name, name="mlp")
