"""Robust-HDP: clients are weighted by the inverse noise that robust PCA finds in updates."""

from typing import Literal

import jax
import jax.numpy as jnp

from fedjax_dp.algorithms.base import FederatedAlgorithm
from fedjax_dp.algorithms.dp_sgd import dp_sgd
from fedjax_dp.clients.base import LocalTrainer
from fedjax_dp.core import trees
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.core.ranges import Count, Positive
from fedjax_dp.models.base import Model
from fedjax_dp.server.noise_aware import blocks_of, noise_aware_mean


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
