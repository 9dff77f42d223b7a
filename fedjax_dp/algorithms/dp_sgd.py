"""DP-SGD at the clients: a record of one client is the unit of privacy."""

from typing import Any

from fedjax_dp.algorithms.base import FederatedAlgorithm
from fedjax_dp.algorithms.fedavg import fedavg
from fedjax_dp.clients.base import LocalTrainer
from fedjax_dp.core import checks
from fedjax_dp.models.base import Model


def dp_sgd(model: Model, trainer: LocalTrainer, **options: Any) -> FederatedAlgorithm:
    """Declares FedAvg whose clients run DP-SGD, each to its own budget.

    Nobody but the client is trusted: the noise is in every local step, so that what leaves the
    client is private already, and averaging is post-processing. Client sizes, by which the mean is
    weighted, are public.

    Guarantee: unit of privacy is one record of one client; add/remove; the event of a round is
    `FederatedAlgorithm.record_event` of the client's own size and numbers.

    Args:
      model: what is trained.
      trainer: a private trainer, such as `dp_sgd_trainer` builds.
      **options: further options of `fedavg`.

    Returns:
      The algorithm.

    Raises:
      ValueError: if the trainer is not private.

    Source: Abadi and others 2016, algorithm 1; `heterogeneous_dp` section 2.
    """
    checks.require(
        trainer.is_private, "trainer", "clip and noise every record's gradient", trainer.is_private
    )
    return fedavg(model, trainer, name="dp_sgd", **options)
