"""Weights of classes and of examples in the loss that a model is trained by."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_dp.core import checks
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.core.trees import PyTree
from fedjax_dp.models.base import Model
from fedjax_dp.models.losses import Allowed, Batch, Loss, LossFn, listed, targets_of

# The array of a data set that holds the weights of its examples.
EXAMPLE_WEIGHT = "example_weight"


@dataclasses.dataclass(frozen=True)
class Weighted:
    """A loss in training, times the weight of the class and of the example.

    Attributes:
      loss: the loss that is weighted, and that evaluations compute.
      class_weights: a weight for each class, or nothing.
      example_weights: the array of the examples that holds their weights, or None.
    """

    loss: LossFn
    class_weights: tuple[float, ...] = ()
    example_weights: str | None = None

    def __call__(self, outputs: PyTree, batch: Batch) -> jax.Array:
        """Computes the weighted losses, `[examples]`."""
        values = self.loss(outputs, batch)
        if self.class_weights:
            values *= self._of_classes(outputs, batch)
        if self.example_weights is not None:
            rule = f"hold the weights {self.example_weights!r} that the loss reads"
            checks.require(self.example_weights in batch, "examples", rule, sorted(batch))
            weights = batch[self.example_weights]
            rule = f"be one number for each example, {values.shape}"
            what = f"examples[{self.example_weights!r}]"
            checks.require(jnp.shape(weights) == values.shape, what, rule, jnp.shape(weights))
            listed(Allowed(self.example_weights, None, None, numbers="weights"))
            values *= jnp.asarray(weights, values.dtype)
        return values

    def _of_classes(self, outputs: PyTree, batch: Batch) -> jax.Array:
        """Looks up the weight of each example's class, `[examples]`; any if it has none."""
        loss, weights = declared(self.loss), jnp.asarray(self.class_weights, jnp.float32)
        assert loss is not None
        labels = targets_of(batch)
        rule = "have one label for each example with class weights"
        checks.require(labels.shape == labels.shape[:1], "targets", rule, labels.shape)
        num_classes = 2
        if loss.targets != "probabilities":
            num_classes = outputs.shape[-1] + (loss.targets == "ordered")
        rule = f"hold {num_classes} weights, one for each class"
        checks.require(len(weights) == num_classes, "class_weights", rule, len(weights))
        if loss.targets == "probabilities":
            # A label between 0 and 1 has a weight between those of both.
            return weights[0] + (weights[1] - weights[0]) * jnp.clip(labels, 0, 1)
        return weights[jnp.clip(labels.astype(jnp.int32), 0, num_classes - 1)]


def declared(loss: LossFn) -> Loss | None:
    """Returns a loss that declares its targets, without weights; None for any other function."""
    plain = unweighted(loss)
    return plain if isinstance(plain, Loss) and plain.targets is not None else None


def unweighted(loss: LossFn) -> LossFn:
    """Returns the loss that evaluations compute."""
    return loss.loss if isinstance(loss, Weighted) else loss


def of_classes_alone(model: Model) -> Model:
    """Returns a model for examples without weights of their own; weights of classes stay."""
    loss = model.loss_fn
    if not isinstance(loss, Weighted):
        return model
    kept = dataclasses.replace(loss, example_weights=None) if loss.class_weights else loss.loss
    return model._replace(loss_fn=kept)


@checked
def weighted(
    model: Model, *, class_weights: Sequence[float] = (), example_weights: str | None = None
) -> Model:
    """Weighs the losses that a model is trained by; evaluations stay unweighted.

    A loss is multiplied by the weight of its class and that of its example. Sums are divided by the
    number of examples, not by the sum of weights, so that one example's weight changes no other's
    part in a step; a factor for all is one of the learning rate.

    Guarantee: a gradient is clipped after it was weighted, so that every weight leaves the bound on
    what one record contributes as it is. Weights of examples are a part of their records. Weights
    of classes have to be public: computed from labels, they are not covered by any ε.

    Args:
      model: a model whose loss declares classes, ordered or not, or yes and no, where classes are
        weighted; any model, where examples are.
      class_weights: a finite weight of at least 0 for each class, not all of them 0.
      example_weights: the array of the examples that holds a finite weight of at least 0 for each,
        `[examples]`.

    Returns:
      The model; bounds on its gradient that were known (`loss_bounds`) are not.

    Raises:
      ValueError: for weights of classes of a loss without classes, weights out of range, or a model
        that is weighted already.

    Example:
      `weighted(models.logistic_regression(x, 2), class_weights=(1, 3))`
    """
    rule = "be a model whose loss is not weighted yet"
    checks.require(not isinstance(model.loss_fn, Weighted), "model", rule, model.name)
    weights = np.asarray(class_weights, np.float64)
    if weights.size:
        loss = declared(model.loss_fn)
        targets = "unknown" if loss is None else loss.targets
        rule = f"be left out for {model.name}, whose targets are no classes"
        is_of_classes = targets in ("classes", "ordered", "probabilities")
        checks.require(is_of_classes, "class_weights", rule, targets)
        fits = np.all(np.isfinite(weights) & (weights >= 0)) and bool(weights.any())
        rule = "be finite and at least 0, and one of them above 0"
        checks.require(bool(fits), "class_weights", rule, class_weights)
    elif example_weights is None:
        return model
    loss_fn = Weighted(model.loss_fn, tuple(weights.tolist()), example_weights)
    return model._replace(loss_fn=loss_fn)


def balanced(labels: np.ndarray, num_classes: int) -> tuple[float, ...]:
    """Computes n / (classes · n_c) from labels, which is exact and private to no one.

    Source: King and Zeng 2001, as scikit-learn's `class_weight="balanced"`.
    """
    known = labels[labels >= 0].astype(np.int64)
    counts = np.bincount(known, minlength=num_classes)
    rule = "be given as numbers where a class has no training example"
    checks.require(bool(np.all(counts > 0)), "class_weights", rule, "balanced")
    return tuple((len(known) / (num_classes * counts)).tolist())
