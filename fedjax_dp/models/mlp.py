"""The multilayer perceptron."""

from collections.abc import Sequence

import flax.linen as nn
import jax

from fedjax_dp.core import checks
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.core.ranges import Count, Decay
from fedjax_dp.models import inputs
from fedjax_dp.models.base import Model
from fedjax_dp.models.linear import head


class _Mlp(nn.Module):
    hidden_sizes: tuple[int, ...]
    num_outputs: int
    dropout: float

    @nn.compact
    def __call__(self, x: jax.Array, *, is_training: bool = False) -> jax.Array:
        x = inputs.features(x)
        for size in self.hidden_sizes:
            x = nn.relu(nn.Dense(size)(x))
            x = nn.Dropout(self.dropout, deterministic=not is_training)(x)
        return nn.Dense(self.num_outputs)(x)


@checked
def mlp(
    example_x: jax.ShapeDtypeStruct,
    num_classes: int,
    *,
    hidden_sizes: Sequence[Count] = (200, 200),
    dropout: Decay = 0.0,
    single_logit: bool = False,
) -> Model:
    """Builds a classifier of dense layers with ReLU between them.

    With sizes n₀ (features), n₁, …, n_L (classes) it has Σ (nᵢ + 1) · nᵢ₊₁ parameters: 199,210 for
    28×28 images of 10 classes and the default layers, the "2NN" of the source.

    Args:
      example_x: shape and type of one input, flattened to features.
      num_classes: the number of classes, at least 2.
      hidden_sizes: units of each hidden layer; none makes it logistic regression.
      dropout: share of hidden units dropped in training, in [0, 1).
      single_logit: one log-odds and the binary cross entropy instead of a logit for each class;
        for 2 classes only.

    Returns:
      The model; outputs are logits `[examples, classes]`, or `[examples, 1]`.

    Raises:
      ValueError: if an argument is out of its range.

    Source: McMahan and others 2017, section 3.
    """
    for size in hidden_sizes:
        checks.whole("hidden_sizes", size)
    inputs.check_dropout("dropout", dropout)
    num_outputs, loss = head(num_classes, single_logit)
    module = _Mlp(tuple(hidden_sizes), num_outputs, dropout)
    return Model.from_flax(module, example_x, loss=loss, name="mlp")
