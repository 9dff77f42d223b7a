"""Models that start from the shared one and learn new data, averaged: PrivacyFL's algorithm 2."""

from collections.abc import Sequence

from fedjax_dp.algorithms.base import FederatedAlgorithm
from fedjax_dp.algorithms.model_averaging import OutputPerturbation, Personal, averaged_models
from fedjax_dp.clients.base import LocalTrainer
from fedjax_dp.clients.client_data import Form
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.core.ranges import Count
from fedjax_dp.models.base import Model
from fedjax_dp.server.base import Aggregator


@checked
def warm_start_averaging(
    model: Model,
    trainer: LocalTrainer,
    *,
    num_clients: Count,
    rows_per_round: Count | Sequence[Count] | None = None,
    growth: Form = "disjoint",
    perturbation: OutputPerturbation = OutputPerturbation(),
    personal: Personal = "own",
    aggregator: Aggregator | None = None,
) -> FederatedAlgorithm:
    """Declares averages of models that start from the shared one, on data that are new by round.

    A client takes the steps of its trainer from the received model, adds noise to the result, and
    sends it; the server averages with equal weights.

    Guarantee: with a private trainer, that of `minimizer_noise` for one record of a client in each
    round that reads it: one round if data are disjoint, so that a client pays once, and all rounds
    from its first if they are cumulative. Of one record ε is √d times that of a coordinate for d
    parameters with Laplace noise.

    Args:
      model: the model to train; under privacy `logistic_regression` with a `gradient_bound`.
      trainer: local training; a private one takes steps on all records, and its noise multiplier is
        that of the noise on models, see `MinimizerNoise`. 1/ε of a coordinate under zero-out for
        Laplace noise, 2/ε under replace-one.
      num_clients: the population.
      rows_per_round: new records of each client a round, one number or one for each; None if every
        round reads all data. A client without as many takes no part in the round.
      growth: "disjoint" if a round reads its new records alone, "cumulative" if all so far.
      perturbation: the regulariser of models and the noise on them.
      personal: what a client uses itself: "own", its model without noise; "received", the shared
        one less its own noise over the number of clients; or "shared". Neither of the first two is
        ever sent or trained from.
      aggregator: an aggregator of `counted_mean`, such as one with masks; that itself if None.

    Returns:
      The algorithm; a client's state is the model that it sent, and that before noise.

    Raises:
      ValueError: for a number out of its range, or training whose sensitivity is unknown.

    Source: Mugunthan and others 2020 (PrivacyFL); Mugunthan 2022, chapter 5, algorithm 2.
    """
    return averaged_models(
        model,
        trainer,
        lambda received: received,
        num_clients,
        rows_per_round,
        growth,
        perturbation,
        personal,
        aggregator,
        name="warm_start_averaging",
    )
