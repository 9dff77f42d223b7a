"""TERM: clients are weighted by their loss, with an exponential tilt."""

import math
from typing import Annotated, Any, NamedTuple

import jax.numpy as jnp
import optax
from annotated_types import Ge, Le

from fedjax_dp.algorithms.base import ClientOutput, FederatedAlgorithm, Views, field, training_of
from fedjax_dp.clients.base import LocalTrainer
from fedjax_dp.clients.selection import mean_loss
from fedjax_dp.core import trees
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.core.ranges import Positive
from fedjax_dp.core.trees import PyTree
from fedjax_dp.models.base import Model
from fedjax_dp.server.mean import per_part, scaled_sum

# Beyond it, one client has all the weight for any losses.
Tilt = Annotated[float, Ge(-1000), Le(1000)]
# Weights up to e^60 can be summed in float32; a tilt below the second has no curvature.
_LARGEST, _SMALLEST_TILT = 60.0, 1e-3
# Most of a smaller mean weight is due to exponents that were clipped from below.
_LOST = math.exp(-50.0)


class ServerState(NamedTuple):
    """The model, and the best estimate of R of the last round, the origin of exponents."""

    params: PyTree
    risk: Any


@checked
def term(
    model: Model,
    trainer: LocalTrainer,
    *,
    tilt: Tilt = 0.1,
    is_weighted: bool = True,
    server_learning_rate: Positive = 1.0,
) -> FederatedAlgorithm:
    """Declares tilted empirical risk minimisation over clients.

    It minimises `R = (1/t) ln Σ p_i e^{t f_i}`: a client has the weight `p_i e^{t f_i}` for its
    loss f_i at the received model, and weights are normalised. A tilt near 0 is FedAvg, and from
    -1e-3 to 1e-3 R is the plain mean; a large one minimises the largest loss, a negative one
    reduces the weight of clients with large losses.

    Exponents are relative to R of the round before, which changes no weight and keeps `e^{t (f −
    R)}` below 1/p_i. They are clipped at 60, which only occurs in a first round or where losses
    change by more than 60/t: these clients have equal weight. `num_limited` counts them, and all
    clients where every exponent is clipped at -60. R is then estimated, between the mean loss and
    the largest one, or the smallest for a negative tilt, which it reaches within few rounds.

    Guarantee: none. Weights depend on exact losses, so private training is refused.

    Args:
      model: the model to train.
      trainer: local training, not a private one.
      tilt: t, from -1000 to 1000.
      is_weighted: make p_i proportional to the clients' sizes instead of equal.
      server_learning_rate: the server's step size.

    Returns:
      The algorithm; its info has `num_limited` and `tilted_loss`, which is R of the round if
      `num_limited` is 0, else its estimate.

    Raises:
      ValueError: for a private trainer, or a number out of its range.

    Source: Li and others 2021 (TERM), algorithm 4, with weights normalised in each round.
    """
    trainer.require_open("clients are weighted by exact losses, which no noise covers")

    def init(key):
        return ServerState(model.init(key), jnp.float32(0))

    def client(message, own, client, hyper, key):
        tilt = hyper.algorithm["tilt"]
        loss = mean_loss(model, message.params, client)
        result = trainer.train(message.params, client, hyper.local, key)
        share = result.weight if is_weighted else (result.weight > 0).astype(jnp.float32)
        exponent = tilt * (loss - message.risk)
        weight = share * jnp.exp(jnp.clip(exponent, -_LARGEST, _LARGEST))
        update = {
            "delta": trees.scale(result.delta, weight),
            "weight": weight,
            "share": share,
            "loss": share * loss,
            "above": jnp.float32((share > 0) & (exponent > _LARGEST)),
            "below": jnp.float32((share > 0) & (exponent < -_LARGEST)),
        }
        metrics = result.metrics.of_changed_update()
        return ClientOutput(update, result.weight, own, metrics)

    def server_step(server, total, hyper, round, key):
        tilt = hyper.algorithm["tilt"]
        mean = trees.scale(total["delta"], trees.reciprocal(total["weight"]))
        step = trees.scale(mean, hyper.algorithm["server_learning_rate"])
        inverse = trees.reciprocal(total["share"])
        average, spread = total["loss"] * inverse, total["weight"] * inverse
        is_curved = (jnp.abs(tilt) > _SMALLEST_TILT) & (spread > 0)
        of_tilt = jnp.log(jnp.where(is_curved, spread, 1.0)) / jnp.where(is_curved, tilt, 1.0)
        is_lost = (spread < _LOST) & (total["below"] > 0)
        estimate = jnp.where(is_curved & ~is_lost, server.risk + of_tilt, average)
        # R is never on the other side of the mean, by Jensen's inequality; clipping may hide that.
        risk = jnp.where(tilt > 0, jnp.maximum(estimate, average), jnp.minimum(estimate, average))
        risk = jnp.where(total["share"] > 0, risk, server.risk)
        limited = total["above"] + jnp.where(is_lost, total["below"], 0.0)
        info = {"tilted_loss": risk, "num_limited": limited}
        return ServerState(optax.apply_updates(server.params, step), risk), info

    parts = ("delta", "weight", "share", "loss", "above", "below")
    aggregator = per_part({part: scaled_sum(1.0) for part in parts})
    return FederatedAlgorithm(
        name="term",
        init=init,
        broadcast=lambda server, client: server,
        client=client,
        aggregator=aggregator,
        server_step=server_step,
        training=training_of(trainer),
        views=Views(shared=field("params")),
    ).with_numbers(
        {"tilt": tilt, "server_learning_rate": server_learning_rate},
        {"tilt": Tilt, "server_learning_rate": Positive},
    )
