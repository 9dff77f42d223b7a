"""PFA: updates of clients with small budgets are projected on a subspace of the others'."""

import warnings
from typing import Literal, get_args

import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike

from fedjax_dp.algorithms.base import FederatedAlgorithm
from fedjax_dp.algorithms.dp_sgd import dp_sgd
from fedjax_dp.clients.base import LocalTrainer
from fedjax_dp.core import checks
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.core.ranges import Count
from fedjax_dp.models.base import Model
from fedjax_dp.server.stacked_means import projected_mean

Split = Literal["mixture", "kmeans", "agglomerative", "top_tenth"]
SPLITS = get_args(Split)


@checked
def pfa(
    model: Model,
    trainer: LocalTrainer,
    *,
    num_clients: Count,
    declared_epsilon: ArrayLike | None = None,
    split: Split = "mixture",
    num_components: Count = 1,
    is_standardized: bool = True,
) -> FederatedAlgorithm:
    """Declares DP-SGD at the clients, a projection by the server, and weights by budget.

    The declared budgets determine once which clients are public. In each round the leading
    principal components of the public clients' updates span a subspace; updates of the others are
    replaced by their projections into it; all are averaged with `w_i = ε_i / Σ ε_j`.

    Guarantee: as `dp_sgd`, for any declared budgets.

    Args:
      model: the model to train.
      trainer: a private trainer, each client with its own noise multiplier.
      num_clients: the population, at least 1.
      declared_epsilon: the budgets that clients declare, above 0, `[num_clients]`; a run by
        configuration uses the true ones by default.
      split: how public clients are found, see `public_clients`.
      num_components: dimensions of the subspace, at least 1.
      is_standardized: whether coordinates are standardised before the components are computed.

    Returns:
      The algorithm.

    Raises:
      ValueError: if the trainer is not private, budgets are missing, not positive or too few, or an
        option is not valid.

    Source: Liu and others 2021 (PFA); Malekmohammadi 2025, section 3.6. The former treat the tenth
    of the clients with the largest budgets as public and do not standardise.
    """
    declared = checks.positive_for_each_client("declared_epsilon", declared_epsilon, num_clients)
    epsilon = jnp.asarray(declared)
    aggregator = projected_mean(
        public_clients(declared, split),
        num_components=num_components,
        is_standardized=is_standardized,
    )
    algorithm = dp_sgd(
        model,
        trainer,
        weight_of=lambda client, config: epsilon[client.index],
        aggregator=aggregator,
    )
    return algorithm.for_clients(num_clients, "pfa")


@checked
def public_clients(epsilon: ArrayLike, split: Split = "mixture") -> np.ndarray:
    """Finds the clients with large budgets, on the host.

    Args:
      epsilon: budgets, above 0, `[clients]`.
      split: "mixture" fits two Gaussians to the budgets, scaled to [0, 1]; "kmeans" and
        "agglomerative" form two groups of them; the group with the larger mean is public.
        "top_tenth" takes a tenth of the clients, those of the largest budgets, and at least one.

    Returns:
      Whether a client is public, bool, `[clients]`; all true if all budgets are equal.

    Raises:
      ValueError: for an unknown split, or budgets that are not positive.

    Source: Malekmohammadi 2025, section 3.6; Liu and others 2021 (PFA) for the tenth.
    """
    checks.positive("epsilon", epsilon)
    budgets = np.asarray(epsilon, np.float64)
    if np.ptp(budgets) == 0:
        return np.ones(len(budgets), bool)
    if split == "top_tenth":
        # A stable sort of the negatives: the first clients of equal budgets are taken.
        first = np.argsort(-budgets, kind="stable")[: max(1, round(len(budgets) / 10))]
        return np.isin(np.arange(len(budgets)), first)
    scaled = ((budgets - budgets.min()) / np.ptp(budgets))[:, None]
    from sklearn.cluster import AgglomerativeClustering, KMeans
    from sklearn.mixture import GaussianMixture

    model = {
        "mixture": lambda: GaussianMixture(2, random_state=0),
        "kmeans": lambda: KMeans(2, n_init=10, random_state=0),
        "agglomerative": lambda: AgglomerativeClustering(2),
    }[split]()
    with warnings.catch_warnings():
        # The fit warns about few distinct budgets, which are valid.
        warnings.simplefilter("ignore")
        group = model.fit_predict(scaled)
    if len(np.unique(group)) < 2:
        return np.ones(len(budgets), bool)
    means = [scaled[group == g].mean() for g in (0, 1)]
    return group == int(np.argmax(means))
