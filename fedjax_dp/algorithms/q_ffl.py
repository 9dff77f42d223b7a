"""q-FFL: clients are weighted by a power of their loss; step sizes are from curvature bounds."""

from typing import Annotated, Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import optax
from annotated_types import Ge, Le

from fedjax_dp.algorithms.base import (
    ClientOutput,
    FederatedAlgorithm,
    Needs,
    Views,
    field,
    training_of,
)
from fedjax_dp.clients.base import LocalTrainer
from fedjax_dp.clients.selection import mean_loss
from fedjax_dp.core import checks, trees
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.core.trees import PyTree
from fedjax_dp.models.base import Model
from fedjax_dp.server.mean import per_part, scaled_sum

# Powers of losses up to 80 do not overflow.
Q = Annotated[float, Ge(0), Le(20)]
# Prevents division by a loss of 0.
_SMALLEST_LOSS = 1e-10


def _check_rate(learning_rate: Any) -> None:
    """Refuses clients that do not move."""
    moves = bool(np.all(np.asarray(learning_rate) > 0))
    rule = "be above 0, since q-FedAvg divides by it"
    checks.require(moves, "learning_rate", rule, learning_rate)


NEEDS = Needs(
    "plain",
    reason="the curvature is bounded by its steps over the learning rate",
    check_rate=_check_rate,
)


class ServerState(NamedTuple):
    """The model's parameters."""

    params: PyTree


@checked
def q_ffl(
    model: Model, trainer: LocalTrainer, *, q: Q = 1.0, is_weighted: bool = False
) -> FederatedAlgorithm:
    """Declares q-FedAvg, which minimises `Σ p_i f_i^{q+1} / (q + 1)`.

    With L = 1 / learning rate, f the loss at the model θ that a client receives and θ_i the trained
    one, the client sends `Δ_i = f^q (θ − θ_i)` and a bound on the curvature of its objective,
    `h_i = q f^{q−1} L ‖θ − θ_i‖² + f^q`, both 1/L of the paper's; the server steps by
    `− Σ Δ_i / Σ h_i`. With q = 0 this is FedAvg with equal weights; the larger q, the more weight
    clients with large losses have, and the shorter the step.

    Losses must be at least 0: with q above 0 the update of a client with a negative one counts as
    not finite, and so does one whose `f^q` overflows. If all powers vanish, as for losses of 0.001
    and q = 20, the step is 0, and so is `step_size`.

    Guarantee: none. Updates are scaled by exact losses, so private training is refused.

    Args:
      model: the model to train.
      trainer: local training with `optax.sgd`, not a private one, at learning rates above 0: an
        update divided by them is read as a gradient.
      q: from 0, the plain mean, to 20; the paper uses 0.1 to 5.
      is_weighted: make p_i proportional to the clients' sizes; the paper draws clients by size
        instead, with equal weights.

    Returns:
      The algorithm; its info has `step_size`, `Σ f_i^q / Σ h_i`, which is 1 if q is 0, else less.

    Raises:
      ValueError: for a private trainer, one that does not take plain SGD steps, a learning rate of
        0, or a number out of its range.

    Source: Li and others 2020 (q-FFL), algorithm 2.
    """
    trainer.require_open("updates are scaled by exact losses, which no noise covers")
    trainer.require_plain_sgd(NEEDS.reason)
    NEEDS.check_rate(trainer.config.learning_rate)

    def client(message, own, client, hyper, key):
        q = hyper.algorithm["q"]
        loss = mean_loss(model, message, client)
        loss = jnp.where((loss < 0) & (q > 0), jnp.nan, loss + _SMALLEST_LOSS)
        result = trainer.train(message, client, hyper.local, key)
        share = result.weight if is_weighted else (result.weight > 0).astype(jnp.float32)
        scale = share * loss**q
        lipschitz = trees.reciprocal(hyper.local.learning_rate)
        square = trees.l2_norm(result.delta) ** 2
        update = {
            "delta": trees.scale(result.delta, scale),
            "scale": scale,
            "curvature": share * q * loss ** (q - 1) * lipschitz * square + scale,
        }
        return ClientOutput(update, result.weight, own, result.metrics)

    def server_step(server, total, hyper, round, key):
        inverse = trees.reciprocal(total["curvature"])
        step = trees.scale(total["delta"], inverse)
        info = {"step_size": total["scale"] * inverse}
        return ServerState(optax.apply_updates(server.params, step)), info

    aggregator = per_part({part: scaled_sum(1.0) for part in ("delta", "scale", "curvature")})
    return FederatedAlgorithm(
        name="q_ffl",
        init=lambda key: ServerState(model.init(key)),
        broadcast=lambda server, client: server.params,
        client=client,
        aggregator=aggregator,
        server_step=server_step,
        training=training_of(trainer),
        views=Views(shared=field("params")),
    ).with_numbers({"q": q}, {"q": Q})
