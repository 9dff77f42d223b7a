"""Models that are retrained on all data so far, averaged: PrivacyFL's algorithm 3."""

from collections.abc import Sequence

from fedjax_dp.algorithms.base import FederatedAlgorithm
from fedjax_dp.algorithms.model_averaging import OutputPerturbation, Personal, averaged_models
from fedjax_dp.clients.base import LocalTrainer
from fedjax_dp.clients.client_data import Form
from fedjax_dp.core import trees
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.core.ranges import Count
from fedjax_dp.models.base import Model
from fedjax_dp.server.base import Aggregator


@checked
def retrained_averaging(
    model: Model,
    trainer: LocalTrainer,
    *,
    num_clients: Count,
    rows_per_round: Count | Sequence[Count] | None = None,
    growth: Form = "cumulative",
    perturbation: OutputPerturbation = OutputPerturbation(),
    personal: Personal = "own",
    aggregator: Aggregator | None = None,
) -> FederatedAlgorithm:
    """Declares averages of models that are trained from zero in every round, on all data so far.

    The paper retrains if the shared model is worse than a client's own, by a comparison that it
    leaves open, and its code always. So does this: what a comparison decides shows in what is sent,
    and no event covers it.

    Guarantee: as `warm_start_averaging`. Cumulative data are read again in every round, so that a
    record pays for each.

    Args:
      model: as for `warm_start_averaging`.
      trainer: as for `warm_start_averaging`.
      num_clients: as for `warm_start_averaging`.
      rows_per_round: as for `warm_start_averaging`.
      growth: as for `warm_start_averaging`.
      perturbation: as for `warm_start_averaging`.
      personal: as for `warm_start_averaging`.
      aggregator: as for `warm_start_averaging`.

    Returns:
      The algorithm; a client's state is the model that it sent, and that before noise.

    Raises:
      ValueError: for a number out of its range, or training whose sensitivity is unknown.

    Source: Mugunthan and others 2020 (PrivacyFL); Mugunthan 2022, chapter 5, algorithm 3.
    """
    return averaged_models(
        model,
        trainer,
        trees.zeros_like,
        num_clients,
        rows_per_round,
        growth,
        perturbation,
        personal,
        aggregator,
        name="retrained_averaging",
    )
