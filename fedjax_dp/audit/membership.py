"""Membership inference from the outputs of a model alone."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from numpy.typing import ArrayLike
from scipy import stats
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score, roc_curve
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from fedjax_dp.core import checks
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.core.trees import PyTree
from fedjax_dp.data.federated import FederatedData, flat, nested
from fedjax_dp.evaluation.evaluate import require_fitting
from fedjax_dp.models.base import Model

_FALSE_POSITIVE_RATE = 0.01
_BLOCK = 512
_SMALLEST_LOSS = 1e-6


class MembershipResult(NamedTuple):
    """The success of an attacker on examples that it was not trained on.

    Attributes:
      accuracy: share of right answers; 1/2 is guessing.
      accuracy_interval: the 95 % confidence interval of the true accuracy.
      auc: area under the ROC curve; 1/2 is guessing.
      true_positive_rate: share of members that are found at 1 % false positives.
      num_examples: number of test examples, half of them members.
    """

    accuracy: float
    accuracy_interval: tuple[float, float]
    auc: float
    true_positive_rate: float
    num_examples: int


@checked
def membership_attack(
    members: ArrayLike, others: ArrayLike, rng: np.random.Generator
) -> MembershipResult:
    """Trains a logistic attacker on half of the examples and tests it on the other half.

    Args:
      members: features of examples that were trained on, `[members, features]`.
      others: features of examples that were not, `[others, features]`; the larger side is
        subsampled to the size of the smaller.
      rng: draws the examples and the halves.

    Returns:
      The result. It bounds no ε, since members were not chosen at random.

    Raises:
      ValueError: if a side has fewer than four examples, or features are not finite.

    Source: Yeom and others 2018; Tenison and others 2022; Mugunthan 2022, appendix B.4.3.
    """
    sides = [np.asarray(side, float) for side in (members, others)]
    size = min(len(np.atleast_1d(side)) for side in sides)
    checks.require(size >= 4, "members, others", "hold four examples each", size)
    for side in sides:
        checks.require(bool(np.isfinite(side).all()), "features", "be finite", "NaN or infinity")
    inside, outside = (side[rng.permutation(len(side))[:size]] for side in sides)
    half = size // 2
    learn = np.concatenate([inside[:half], outside[:half]])
    attacker = make_pipeline(StandardScaler(), LogisticRegression(max_iter=5000))
    attacker.fit(learn, np.repeat([1, 0], half))
    truth = np.repeat([1, 0], size - half)
    scores = attacker.decision_function(np.concatenate([inside[half:], outside[half:]]))
    num_right = int(np.sum((scores > 0) == truth))
    interval = stats.binomtest(num_right, len(truth)).proportion_ci()
    rates = roc_curve(truth, scores, drop_intermediate=False)
    return MembershipResult(
        accuracy=num_right / len(truth),
        accuracy_interval=(float(interval.low), float(interval.high)),
        auc=float(roc_auc_score(truth, scores)),
        true_positive_rate=float(rates[1][rates[0] <= _FALSE_POSITIVE_RATE].max()),
        num_examples=len(truth),
    )


def attack_features(model: Model, params: PyTree, examples: Mapping[str, Any]) -> np.ndarray:
    """Computes the attacker's features of examples, `[examples, features]`.

    The loss, its logarithm, in which memorised examples stand apart, and the outputs in descending
    order where an example has a vector of them; values that are not finite are clipped.
    """

    @jax.jit
    def of_block(params, batch):
        outputs = model.predict(params, batch["x"])
        return outputs, model.loss_fn(outputs, batch)

    examples = flat(examples)
    size = len(next(iter(examples.values())))
    parts = []
    for first in range(0, size, _BLOCK):
        batch = nested({k: np.asarray(v[first : first + _BLOCK]) for k, v in examples.items()})
        outputs, losses = (np.asarray(part, float) for part in of_block(params, batch))
        losses = np.nan_to_num(losses.reshape(-1, 1))
        columns = [losses, np.log(np.abs(losses) + _SMALLEST_LOSS)]
        if outputs.ndim <= 2:
            columns.append(-np.sort(-outputs.reshape(len(outputs), -1), axis=1))
        parts.append(np.concatenate(columns, axis=1))
    return np.clip(np.nan_to_num(np.concatenate(parts)), -1e6, 1e6)


@checked
def attack_model(
    model: Model,
    params: PyTree,
    members: Mapping[str, Any],
    others: Mapping[str, Any],
    rng: np.random.Generator,
) -> MembershipResult:
    """Attacks a model through its outputs.

    Args:
      model: the model.
      params: its parameters after training.
      members: examples that it was trained on, named arrays `[examples, ...]`.
      others: examples of the same kind that it was not trained on.
      rng: draws the examples that are attacked.

    Returns:
      The result.

    Raises:
      ValueError: if a side has fewer than four examples, or targets that the loss is not for.
    """
    checks.require(bool(members), "members", "hold arrays", members)
    checks.require(bool(others), "others", "hold arrays", others)
    for what, side in (("members", members), ("others", others)):
        size = len(next(iter(flat(side).values())))
        store = FederatedData(side, np.array([0, size]))
        require_fitting(model, store, what=what, on_disk=True)
    inside, outside = (attack_features(model, params, side) for side in (members, others))
    return membership_attack(inside, outside, rng)
