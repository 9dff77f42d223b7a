"""Local training: trainers, gradient rules, regularisers, transforms of updates."""

from fedjax_dp.clients.base import ClientData, LocalConfig, LocalResult, LocalTrainer
from fedjax_dp.clients.gradients import GradientRule, clipped, plain
from fedjax_dp.clients.regularizers import proximal, shift
from fedjax_dp.clients.selection import mean_loss
from fedjax_dp.clients.sgd import dp_sgd_trainer, local_trainer
from fedjax_dp.clients.transforms import (
    UpdateContext,
    add_client_noise,
    cast,
    clip_update,
    keep_largest,
    scale_update,
)

__all__ = [
    "ClientData",
    "GradientRule",
    "LocalConfig",
    "LocalResult",
    "LocalTrainer",
    "UpdateContext",
    "add_client_noise",
    "cast",
    "clip_update",
    "clipped",
    "dp_sgd_trainer",
    "keep_largest",
    "local_trainer",
    "mean_loss",
    "plain",
    "proximal",
    "scale_update",
    "shift",
]
