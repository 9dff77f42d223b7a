"""Models that are linear in their parameters."""

import math

import flax.linen as nn
import jax
import jax.numpy as jnp

from fedjax_dp.core import checks
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.core.ranges import Count, Positive
from fedjax_dp.models import inputs
from fedjax_dp.models.base import Model
from fedjax_dp.models.losses import half_squared_error, targets_of


class _Linear(nn.Module):
    num_outputs: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.Dense(self.num_outputs)(inputs.features(x))


@checked
def logistic_regression(
    example_x: jax.ShapeDtypeStruct, num_classes: int, *, single_logit: bool = False
) -> Model:
    """Builds softmax regression, or binary logistic regression.

    It has (features + 1) · classes parameters: 7,850 for 28×28 images of 10 classes; with
    `single_logit`, features + 1.

    Args:
      example_x: shape and type of one input, flattened to features.
      num_classes: the number of classes, at least 2.
      single_logit: one log-odds and the binary cross entropy instead of a logit for each class;
        for 2 classes only.

    Returns:
      The model; outputs are logits `[examples, classes]`, or `[examples, 1]`.

    Raises:
      ValueError: if there are too few classes, or more than 2 with `single_logit`.
    """
    num_outputs, loss = head(num_classes, single_logit)
    return Model.from_flax(_Linear(num_outputs), example_x, loss=loss, name="logistic_regression")


@checked
def linear_regression(example_x: jax.ShapeDtypeStruct, *, num_outputs: Count = 1) -> Model:
    """Builds least-squares regression.

    It has (features + 1) · outputs parameters.

    Args:
      example_x: shape and type of one input, flattened to features.
      num_outputs: the number of targets of an example, at least 1.

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

    Source: Malekmohammadi and others 2021, section 2.4.1.
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


def head(num_classes: int, single_logit: bool) -> tuple[int, str]:
    """Chooses the size of the last layer and the loss of a classifier.

    Args:
      num_classes: the number of classes, at least 2.
      single_logit: whether 2 classes share one log-odds.

    Returns:
      The number of outputs and the name of the loss.

    Raises:
      ValueError: if there are too few classes, or more than 2 with `single_logit`.
    """
    checks.whole("num_classes", num_classes, at_least=2)
    if not single_logit:
        return num_classes, "softmax_cross_entropy"
    checks.require(num_classes == 2, "num_classes", "be 2 with single_logit", num_classes)
    return 1, "sigmoid_binary_cross_entropy"
