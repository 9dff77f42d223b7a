"""How clients differ: worst client, disparity, quantiles; how far they disagree about a model."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import scipy.special
from numpy.typing import ArrayLike

from fedjax_dp.core import checks, sums, trees
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.core.ranges import Count
from fedjax_dp.core.trees import PyTree
from fedjax_dp.data.federated import FederatedData, nested
from fedjax_dp.evaluation.evaluate import Evaluation, require_fitting
from fedjax_dp.models.base import Model


@checked
def summarize(
    evaluation: Evaluation, quantiles: Sequence[float] = (0.1, 0.25, 0.5, 0.75, 0.9)
) -> dict[str, float]:
    """Summarises accuracy and loss over clients, each client counting once.

    Clients without held-out examples are left out; those with a loss that is not finite are not.
    The numbers are exact and not private.

    Args:
      evaluation: results by client.
      quantiles: the quantiles of client accuracy to report, each in [0, 1].

    Returns:
      `worst_client_accuracy`, `worst_tenth_accuracy` (the mean over the worst tenth of the clients,
      rounded up), `best_client_accuracy`, `accuracy_disparity` (best minus worst),
      `mean_client_accuracy`, `std_client_accuracy`, `worst_client_loss`, and `client_accuracy_qNN`
      for each quantile; empty if no client has an accuracy.

    Source: Malekmohammadi and others 2024 (RC-DPFL), section 5, for the worst accuracy and the
    disparity.
    """
    checks.probability("quantiles", quantiles, allow_zero=True)
    summary = {}
    losses = evaluation.client_loss[evaluation.client_sizes > 0]
    if losses.size:
        summary["worst_client_loss"] = float(losses.max())
    accuracies = evaluation.client_accuracy[np.isfinite(evaluation.client_accuracy)]
    if not accuracies.size:
        return summary
    summary |= {
        "worst_client_accuracy": float(accuracies.min()),
        "worst_tenth_accuracy": float(np.sort(accuracies)[: -(-len(accuracies) // 10)].mean()),
        "best_client_accuracy": float(accuracies.max()),
        "accuracy_disparity": float(accuracies.max() - accuracies.min()),
        "mean_client_accuracy": float(accuracies.mean()),
        "std_client_accuracy": float(accuracies.std()),
    }
    for q in quantiles:
        summary[f"client_accuracy_q{round(100 * q):02d}"] = float(np.quantile(accuracies, q))
    return summary


@checked
def wilson_interval(
    shares: ArrayLike, counts: ArrayLike, *, confidence: float = 0.95
) -> tuple[np.ndarray, np.ndarray]:
    """Bounds a success rate from the share of successes among independent trials.

    Unlike a share ± a multiple of its standard error, the interval stays within [0, 1] and has a
    width if all trials succeeded: for one success in one trial it is 0.21 to 1.

    Args:
      shares: successes over trials, in [0, 1]; NaN without trials.
      counts: the number of trials, of the same shape or one for all.
      confidence: approximate coverage, in (0, 1).

    Returns:
      Lower and upper ends; NaN without trials.

    Raises:
      ValueError: for a share outside [0, 1], a count that is negative or not a number, shapes that
        do not broadcast, or a confidence out of range.

    Source: Wilson 1927.
    """
    checks.require(0 < confidence < 1, "confidence", "be in (0, 1)", confidence)
    p, n = np.asarray(shares, np.float64), np.asarray(counts, np.float64)
    checks.require(bool(np.all(n >= 0)), "counts", "be at least 0", counts)
    is_share = np.isnan(p) | ((p >= 0) & (p <= 1))
    checks.require(bool(np.all(is_share)), "shares", "be in [0, 1] or NaN", shares)
    rule = f"be a number or of shape {p.shape}, as shares"
    checks.require(n.shape in ((), p.shape), "counts", rule, n.shape)
    square = float(scipy.special.ndtri((1 + confidence) / 2)) ** 2
    n = np.where(n > 0, n, np.nan)
    middle = (p + square / (2 * n)) / (1 + square / n)
    half = np.sqrt(square * (p * (1 - p) + square / (4 * n)) / n) / (1 + square / n)
    return np.maximum(middle - half, 0.0), np.minimum(middle + half, 1.0)


class Heterogeneity(NamedTuple):
    """The mean over clients of ‖∇f_i(θ*)‖², in two published conventions.

    Attributes:
      value: as defined, with the gradient of each client's mean loss.
      doubled: 4 times that, with twice the gradient, as in the chapter's figures: its losses have a
        factor ½ that its gradients lack.
      by_client: each client's term of `value`, `[num_clients]`.
    """

    value: float
    doubled: float
    by_client: np.ndarray


@checked
def heterogeneity(
    model: Model, data: FederatedData, params: PyTree, *, block_size: Count = 1024
) -> Heterogeneity:
    """Measures heterogeneity exactly, so the result is not private.

    Args:
      model: defines the loss f_i of a client, the mean over its examples; `least_squares` with the
        clients' size as its scale makes it the sum.
      data: the clients' examples; those without any have the gradient zero.
      params: θ*, a minimiser of the mean over clients; elsewhere H measures the disagreement there.
      block_size: examples that are computed at once; bounds memory.

    Returns:
      H, 0 if one model is best for every client.

    Raises:
      ValueError: for a block without examples, a population without any, or targets that the loss
        is not for.

    Source: Malekmohammadi 2025, section 2.4.6.
    """
    checks.require(data.num_examples > 0, "data", "hold examples", data.num_examples)
    require_fitting(model, data, on_disk=True)
    examples = jax.device_put(nested({k: np.asarray(v) for k, v in data.examples.items()}))
    last = data.num_examples - 1

    @jax.jit
    def square_of(start, size):
        def of_block(i):
            rows = i * block_size + jnp.arange(block_size)
            batch = jax.tree.map(lambda a: a[jnp.clip(start + rows, 0, last)], examples)
            is_real = rows < size

            def loss(params):
                return jnp.sum(model.losses(params, batch, mask=is_real)[0])

            return jax.grad(loss)(params)

        with jax.default_matmul_precision("highest"):
            total = jax.lax.fori_loop(
                0,
                -(-size // block_size),
                lambda i, total: sums.add(total, of_block(i)),
                sums.zeros_like(jax.eval_shape(of_block, 0)),
            )
        return jnp.square(trees.l2_norm(trees.scale(sums.value(total), trees.reciprocal(size))))

    spans = zip(data.offsets[:-1], data.sizes, strict=True)
    by_client = np.array([square_of(np.int32(a), np.int32(n)) for a, n in spans], np.float64)
    value = float(by_client.mean())
    return Heterogeneity(value, 4 * value, by_client)
