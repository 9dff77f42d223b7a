"""Local training: trainers, gradient rules, regularisers, transforms of updates."""

from fedjax_dp.clients.base import LocalConfig, LocalResult, LocalTrainer, Objective
from fedjax_dp.clients.client_data import ClientData, Exact, PublicClient
from fedjax_dp.clients.gradients import GradientRule, clipped, plain
from fedjax_dp.clients.pruning import prune, pruned_share
from fedjax_dp.clients.regularizers import (
    blur,
    distance_to,
    proximal,
    proximal_norm,
    shift,
    towards,
)
from fedjax_dp.clients.selection import (
    Choice,
    accuracy_of,
    exact_choice,
    mean_loss,
    private_choice,
    whole_score,
)
from fedjax_dp.clients.sgd import dp_sgd_trainer, local_trainer
from fedjax_dp.clients.transforms import (
    UpdateContext,
    UpdateTransform,
    add_client_noise,
    cast,
    clip_update,
    keep_largest,
    scale_update,
    sparsify,
    update_transform,
)

__all__ = [
    "Choice",
    "ClientData",
    "Exact",
    "GradientRule",
    "LocalConfig",
    "LocalResult",
    "LocalTrainer",
    "Objective",
    "PublicClient",
    "UpdateContext",
    "UpdateTransform",
    "accuracy_of",
    "add_client_noise",
    "blur",
    "cast",
    "clip_update",
    "clipped",
    "distance_to",
    "dp_sgd_trainer",
    "exact_choice",
    "keep_largest",
    "local_trainer",
    "mean_loss",
    "plain",
    "private_choice",
    "proximal",
    "proximal_norm",
    "prune",
    "pruned_share",
    "scale_update",
    "shift",
    "sparsify",
    "towards",
    "update_transform",
    "whole_score",
]
