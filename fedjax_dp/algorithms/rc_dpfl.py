"""RC-DPFL: an earlier R-DPCFL, with a known number of clusters and exact choices."""

from typing import Any, Literal, NamedTuple

from fedjax_dp.algorithms.base import FederatedAlgorithm
from fedjax_dp.algorithms.r_dpcfl import (
    ClusterCount,
    FirstRound,
    SelectionRule,
    SoftClusters,
    r_dpcfl,
    rounds_of_training,
)
from fedjax_dp.clients.base import LocalTrainer
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.core.ranges import Count, Fraction, Positive
from fedjax_dp.models.base import Model


class SoftPhase(NamedTuple):
    """How long clusters stay soft, and when clients are assigned to them.

    Attributes:
      soft_share: E_c as a share of E, the rounds with training; the paper gives no value.
      assignment: when clusters are assigned, "start" of a round as in `r_dpcfl`, or "end" of the
        round before, as in the paper: soft clusters then last one round longer, until E_c + 1, and
        the last of E + 1 rounds is a choice among the trained models.
    """

    soft_share: Fraction = 0.5
    assignment: Literal["start", "end"] = "start"


@checked
def rc_dpfl(
    model: Model,
    trainer: LocalTrainer,
    *,
    num_clients: Count,
    num_rounds: Count,
    num_models: Count,
    soft_phase: SoftPhase = SoftPhase(),
    num_components: Count = 2,
    features: Literal["centred", "authors"] = "centred",
    num_copies: Count = 1,
    copy_stddev: Positive | None = None,
    **options: Any,
) -> FederatedAlgorithm:
    """Declares RC-DPFL: a mixture on the first round's updates, then exact choices by loss.

    Unlike in R-DPCFL, the number of clusters is given, soft clusters end after a fixed share of the
    rounds, clients choose the model of smallest exact training loss in every later round, and a
    cluster's mean is weighted by size.

    Guarantee: that of DP-SGD for the updates only. The choices read the data without noise and are
    not covered; the declaration says so.

    Args:
      model: the model to train.
      trainer: as for `r_dpcfl`.
      num_clients: the population, at least 1.
      num_rounds: rounds of the whole run, at least 1.
      num_models: number of clusters (M), at least 1.
      soft_phase: how long clusters stay soft, and when clients are assigned to them.
      num_components: principal components that are clustered.
      features: as for `r_dpcfl`.
      num_copies: as for `r_dpcfl`.
      copy_stddev: as for `r_dpcfl`.
      **options: further fields of `FirstRound`.

    Returns:
      The algorithm.

    Raises:
      ValueError: as `r_dpcfl`.

    Source: Malekmohammadi and others 2024 (RC-DPFL), algorithm 1.
    """
    is_at_end = soft_phase.assignment == "end"
    num_trained = rounds_of_training(num_rounds, is_at_end)
    soft_rounds = int(soft_phase.soft_share * num_trained) + int(is_at_end)
    return r_dpcfl(
        model,
        trainer,
        num_clients=num_clients,
        num_rounds=num_rounds,
        clusters=ClusterCount(num_models),
        selection_rule=SelectionRule("exact"),
        soft_clusters=SoftClusters(num_components, features, soft_rounds),
        ends_with_choice=is_at_end,
        is_weighted=True,
        first_round=FirstRound(num_copies=num_copies, copy_stddev=copy_stddev, **options),
        name="rc_dpfl",
    )
