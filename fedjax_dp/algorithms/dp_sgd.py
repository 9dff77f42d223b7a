"""DP-SGD at clients, and aggregation by the noise that their budgets allow: PFA, Robust-HDP."""

import warnings
from collections.abc import Callable
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike

from fedjax_dp.algorithms.base import FederatedAlgorithm
from fedjax_dp.algorithms.fedavg import fedavg
from fedjax_dp.clients.base import LocalConfig, LocalTrainer
from fedjax_dp.clients.client_data import ClientData
from fedjax_dp.core import checks, trees
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.core.ranges import Count, Positive
from fedjax_dp.models.base import Model
from fedjax_dp.server.noise_aware import blocks_of, noise_aware_mean, weighted_by_client
from fedjax_dp.server.stacked_means import projected_mean


@checked
def dp_sgd(
    model: Model,
    trainer: LocalTrainer,
    *,
    weight_of: Callable[[ClientData, LocalConfig], jax.Array] | None = None,
    **options: Any,
) -> FederatedAlgorithm:
    """Declares FedAvg whose clients run DP-SGD, each within its own budget.

    The server is not trusted: the noise is in every local step, so that an update is private before
    it leaves the client, and averaging is post-processing. Client sizes, by which the mean is
    weighted, are public.

    Guarantee: unit of privacy is one record of one client; zero-out, sizes being public; the event
    of a round is that of the trainer for the client's own size and numbers.

    Args:
      model: the model to train.
      trainer: a private trainer, such as `dp_sgd_trainer` builds.
      weight_of: `(client, config) -> weight`, at least 0, of a client with examples, instead of its
        size.
      **options: further options of `fedavg`.

    Returns:
      The algorithm.

    Raises:
      ValueError: if the trainer is not private.

    Source: Abadi and others 2016, algorithm 1.
    """
    trainer.private_claim()  # Refuses a trainer that is not private.
    algorithm = fedavg(model, trainer, name="dp_sgd", **options)
    if weight_of is None:
        return algorithm

    def client(message, own, client, hyper, key):
        output = algorithm.client(message, own, client, hyper, key)
        weight = jnp.where(client.size > 0, weight_of(client, hyper.local), 0.0)
        return output._replace(weight=weight)

    return algorithm._replace(client=client)


@checked
def record_dp_fedavg(
    model: Model, trainer: LocalTrainer, *, num_clients: Count, is_weighted: bool = True
) -> FederatedAlgorithm:
    """Declares DP-SGD at the clients with a mean that does not depend on their budgets.

    The model is that of `dp_sgd`; each client's weight is in the round's info, as for the other
    methods of the comparison.

    Guarantee: as `dp_sgd`.

    Args:
      model: the model to train.
      trainer: a private trainer, each client with its own noise multiplier.
      num_clients: the population, at least 1.
      is_weighted: weight clients by their number of examples N_i instead of equally.

    Returns:
      The algorithm.

    Raises:
      ValueError: if the trainer is not private.

    Source: Noble and others 2022 (DPFedAvg), as in Malekmohammadi and others 2024 (Robust-HDP).
    """

    def weight_of(client, config):
        return client.size.astype(jnp.float32) if is_weighted else jnp.float32(1)

    aggregator = weighted_by_client(num_clients)
    algorithm = dp_sgd(model, trainer, weight_of=weight_of, aggregator=aggregator)
    return algorithm.for_clients(num_clients, "record_dp_fedavg")


@checked
def minimum_epsilon(
    model: Model, trainer: LocalTrainer, *, num_clients: Count, is_weighted: bool = True
) -> FederatedAlgorithm:
    """Declares DPFedAvg for clients that are all calibrated to the smallest budget.

    This is `record_dp_fedavg` with a trainer whose noise is calibrated to `smallest_budget`.

    Guarantee: as `dp_sgd`.

    Args:
      model: the model to train.
      trainer: a private trainer, each client's noise multiplier calibrated to the smallest budget.
      num_clients: the population, at least 1.
      is_weighted: weight clients by their number of examples N_i instead of equally.

    Returns:
      The algorithm.

    Raises:
      ValueError: if the trainer is not private.

    Source: Liu and others 2021 (PFA), the baseline of a common minimum.
    """
    algorithm = record_dp_fedavg(model, trainer, num_clients=num_clients, is_weighted=is_weighted)
    return algorithm._replace(name="minimum_epsilon")


@checked
def smallest_budget(epsilon: ArrayLike) -> np.ndarray:
    """Replaces all budgets by the smallest.

    Args:
      epsilon: budgets, above 0, `[clients]`.

    Returns:
      The budgets to calibrate clients to, `[clients]`.
    """
    checks.positive("epsilon", epsilon)
    return np.full(np.shape(epsilon), np.min(epsilon))


@checked
def weiavg(
    model: Model,
    trainer: LocalTrainer,
    *,
    num_clients: Count,
    declared_epsilon: ArrayLike | None = None,
) -> FederatedAlgorithm:
    """Declares DP-SGD at the clients and a mean with weights `w_i = ε_i / Σ ε_j`.

    Guarantee: as `dp_sgd`, for any declared budgets: the noise depends on the trainer, the weights
    on the declared budgets, which are public here and can mislead the server.

    Args:
      model: the model to train.
      trainer: a private trainer, each client with its own noise multiplier.
      num_clients: the population, at least 1.
      declared_epsilon: the budgets that clients declare, above 0, `[num_clients]`; a run by
        configuration uses the true ones by default.

    Returns:
      The algorithm.

    Raises:
      ValueError: if the trainer is not private, or budgets are missing, not positive or too few.

    Source: Liu and others 2021 (PFA), algorithm 5 (WeiAvg).
    """
    epsilon = jnp.asarray(
        checks.positive_for_each_client("declared_epsilon", declared_epsilon, num_clients)
    )
    algorithm = dp_sgd(
        model,
        trainer,
        weight_of=lambda client, config: epsilon[client.index],
        aggregator=weighted_by_client(num_clients),
    )
    return algorithm.for_clients(num_clients, "weiavg")


# Bounds the weight of a client without noise, or with a learning rate of 0.
_SMALLEST = 1e-20


@checked
def noise_oracle(model: Model, trainer: LocalTrainer, *, num_clients: Count) -> FederatedAlgorithm:
    """Declares DP-SGD at the clients and a mean with weights `w_i ∝ 1/σ_i²`.

    σ_i² is the variance of a client's update due to its own noise, `steps η² c² z² / b²` for each
    parameter. It is optimal for a server that knows every client's numbers; a real one does not.

    Guarantee: as `dp_sgd`.

    Args:
      model: the model to train.
      trainer: a private trainer, each client with its own noise multiplier.
      num_clients: the population, at least 1.

    Returns:
      The algorithm.

    Raises:
      ValueError: if the trainer is not private.

    Source: Malekmohammadi and others 2024 (Robust-HDP); Malekmohammadi 2025, equations 3.3 and 3.5.
    """

    def weight_of(client, config):
        steps = trainer.num_steps(client.size, config).astype(jnp.float32)
        stddev = trees.ratio(config.clip_norm * config.noise_multiplier, config.batch_size)
        variance = steps * jnp.square(config.learning_rate * stddev)
        return 1.0 / jnp.maximum(variance, _SMALLEST)

    aggregator = weighted_by_client(num_clients)
    algorithm = dp_sgd(model, trainer, weight_of=weight_of, aggregator=aggregator)
    return algorithm.for_clients(num_clients, "noise_oracle")


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


@checked
def robust_hdp(
    model: Model,
    trainer: LocalTrainer,
    *,
    num_clients: Count,
    reestimate: Literal["first", "every"] | Count = "first",
    block_size: Count = 200_000,
    num_blocks: Count | None = None,
    reads_tail: bool = False,
    mode: Literal["inexact", "fixed"] = "inexact",
    tolerance: Positive = 1e-6,
    max_iterations: Count = 1000,
) -> FederatedAlgorithm:
    """Declares Robust-HDP: local DP-SGD, robust PCA of the updates, weights `w_i ∝ 1/‖S_i‖²`.

    The matrix of the round's updates is split into a low-rank part, which the clients share, and a
    remainder S, whose rows hold each client's noise. The server reads no declared budget, so none
    can be falsified.

    Guarantee: as `dp_sgd`; robust PCA is post-processing.

    Args:
      model: the model to train.
      trainer: a private trainer, each client with its own noise multiplier.
      num_clients: the population, at least 1.
      reestimate: "first" keeps the levels of a client's first round, as the authors' program does;
        "every" estimates in each round, as algorithm 1 is written; a number k every k-th round.
      block_size: p', parameters that are decomposed together, at least 1.
      num_blocks: Q, blocks that are read, at least 1; all by default.
      reads_tail: read the parameters after the last block too, by one more block that overlaps it,
        as the thesis does; only without `num_blocks`.
      mode: "inexact" is fast, "fixed" follows the paper's pursuit; see
        `principal_component_pursuit`.
      tolerance: relative residual at which the pursuit stops, above 0.
      max_iterations: the pursuit's largest number of iterations, at least 1.

    Returns:
      The algorithm; weights, noise levels and diagnostics of the pursuit are in each round's info.

    Raises:
      ValueError: if the trainer is not private or an option is not valid.

    Source: Malekmohammadi and others 2024 (Robust-HDP), algorithm 1; Malekmohammadi 2025,
    section 3.5.5, for `reads_tail`.
    """
    aggregator = noise_aware_mean(
        num_clients,
        reestimate=reestimate,
        block_size=block_size,
        num_blocks=num_blocks,
        reads_tail=reads_tail,
        mode=mode,
        tolerance=tolerance,
        max_iterations=max_iterations,
    )
    # Refuses blocks that the model does not have.
    structure = jax.eval_shape(model.init, jax.random.key(0))
    blocks_of(trees.num_parameters(structure), block_size, num_blocks, reads_tail)
    # A weight above 0 marks a client with examples; sizes are not read.
    algorithm = dp_sgd(
        model, trainer, weight_of=lambda client, config: jnp.float32(1), aggregator=aggregator
    )
    return algorithm.for_clients(num_clients, "robust_hdp")
