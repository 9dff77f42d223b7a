"""Fair objectives in the place of the mean loss: AFL, q-FFL, TERM, PropFair."""

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple

import jax
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
from fedjax_dp.algorithms.fedavg import fedavg
from fedjax_dp.clients.base import LocalTrainer, Objective, Value
from fedjax_dp.clients.selection import mean_loss
from fedjax_dp.core import checks, ranges, trees
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.core.ranges import Count, NonNegative, Positive
from fedjax_dp.core.trees import PyTree
from fedjax_dp.models.base import Model
from fedjax_dp.server.mean import per_part, scaled_sum
from fedjax_dp.server.stacked_means import UpdateWithLoss, agnostic_mean


@checked
def afl(
    model: Model,
    trainer: LocalTrainer,
    *,
    num_clients: Count,
    step_size: NonNegative = 0.1,
    server_learning_rate: Positive = 1.0,
) -> FederatedAlgorithm:
    """Declares agnostic federated learning, `min_θ max_λ Σ λ_i f_i(θ)` over the simplex of λ.

    In each round clients send their loss at the model that they received, and train it; the server
    moves λ along the losses, projects it onto the simplex, and averages updates by the new λ. It is
    meant for full participation: λ of an absent client does not rise.

    Guarantee: none. Weights depend on exact losses, so private training is refused.

    Args:
      model: the model to train.
      trainer: local training, not a private one.
      num_clients: the population, at least 1; a cohort's updates are stacked.
      step_size: γ, the step of λ along losses; 0 is the mean with equal weights.
      server_learning_rate: the server's step size.

    Returns:
      The algorithm; its info has the `weights` of clients.

    Raises:
      ValueError: for a private trainer, or a number out of its range.

    Source: Mohri, Sivek, Suresh 2019 (AFL), algorithm 1, with local training in place of one
    gradient, the last model in place of the mean of all, and, as in PropFair's code, λ updated
    before it is used.
    """
    trainer.require_open("clients are weighted by exact losses, which no noise covers")
    algorithm: Any = fedavg(
        model,
        trainer,
        server_learning_rate=server_learning_rate,
        aggregator=agnostic_mean(num_clients, step_size),
        name="afl",
    )

    def client(message, own, client, hyper, key):
        loss = mean_loss(model, message, client)
        output = algorithm.client(message, own, client, hyper, key)
        return output._replace(update=UpdateWithLoss(output.update, loss))

    return algorithm._replace(client=client).for_clients(num_clients)


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


class ServerModel(NamedTuple):
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
      The algorithm; its info has `step_size`, `Σ f_i^q / Σ h_i`: 1 if q is 0, else less.

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
        return ServerModel(optax.apply_updates(server.params, step)), info

    aggregator = per_part({part: scaled_sum(1.0) for part in ("delta", "scale", "curvature")})
    return FederatedAlgorithm(
        name="q_ffl",
        init=lambda key: ServerModel(model.init(key)),
        broadcast=lambda server, client: server.params,
        client=client,
        aggregator=aggregator,
        server_step=server_step,
        training=training_of(trainer),
        views=Views(shared=field("params")),
    ).with_numbers({"q": q}, {"q": Q})


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


Extension = Literal["smooth", "released", "released_huber"]


def proportional(
    baseline: float | jax.Array,
    margin: float | jax.Array = 0.2,
    extension: Extension = "smooth",
) -> Value:
    """Builds `−ln(1 − ℓ/M)`, whose mean over clients proportional fairness minimises.

    Above M − ε it is linear: "smooth" with the slope 1/ε that it has there; "released" as `ℓ/M` and
    "released_huber" as `ℓ/ε`, the two forms of the authors' program, which are discontinuous.

    Source: Zhang and others 2022 (PropFair), equation 8.
    """
    checks.one_of("extension", extension, ("smooth", "released", "released_huber"))
    ranges.check({"baseline": baseline, "margin": margin}, {"baseline": Positive})
    _check_margin({"baseline": baseline, "margin": margin}, "")

    def value(loss, params):
        del params
        last = baseline - margin
        is_inside = loss <= last
        inside = -jnp.log1p(-jnp.where(is_inside, loss, 0.0) / baseline)
        beyond = {
            "smooth": (loss - last) / margin - jnp.log(margin / baseline),
            "released": loss / baseline,
            "released_huber": loss / margin,
        }[extension]
        return jnp.where(is_inside, inside, beyond)

    return value


@checked
def propfair(
    model: Model,
    trainer: LocalTrainer,
    *,
    baseline: Positive = 5.0,
    margin: Positive = 0.2,
    extension: Extension = "smooth",
    server_learning_rate: Positive = 1.0,
    **options: Any,
) -> FederatedAlgorithm:
    """Declares PropFair: FedAvg on `−Σ p_i ln(1 − f_i / M)`.

    Each step descends the objective of its batch's mean loss, which scales the gradient by
    `1 / (M − ℓ)`. Above M − ε the objective continues as a straight line, and the metric
    `share_beyond` is the share of clients with such a mean loss. With a private trainer it is that
    of clients whose mean objective is above the one at M − ε; it is left out for the "released"
    objective, which falls there.

    Guarantee: that of trainer and aggregator. With a private trainer the objective is applied to
    each record's loss, before its gradient is clipped, at no further cost; reported losses are then
    those of the objective.

    Args:
      model: the model to train.
      trainer: local training, any.
      baseline: M, above all losses that should count differently; the paper uses 2 to 5.
      margin: ε, the distance below M at which the logarithm ends, less than M.
      extension: the objective beyond M − ε, "smooth", or "released" or "released_huber" as in the
        authors' program.
      server_learning_rate: the server's step size.
      **options: further options of `fedavg`.

    Returns:
      The algorithm.

    Raises:
      ValueError: for a number out of its range, a margin that is not below the baseline, or an
        unknown extension.

    Source: Zhang and others 2022 (PropFair), algorithm 1.
    """
    has_share = not (trainer.is_private and extension == "released")

    def client(message, own, client, hyper, key):
        baseline, margin = hyper.algorithm["baseline"], hyper.algorithm["margin"]
        value = proportional(jnp.asarray(baseline), jnp.asarray(margin), extension)
        objective = Objective(value)
        result = trainer.train(message, client, hyper.local, key, objective=objective)
        last = baseline - margin
        if trainer.is_private:
            last = -jnp.log(margin / baseline)
        metrics = result.metrics
        if not has_share:
            return ClientOutput(result.delta, result.weight, own, metrics)
        is_beyond = jax.tree.map(
            lambda s, n: s > last * n.astype(jnp.float32), metrics.loss_sum, metrics.num_read
        )
        info = {"share_beyond": jax.tree.map(jnp.float32, is_beyond)}
        return ClientOutput(result.delta, result.weight, own, metrics, info)

    own: dict[str, Any] = {"server_learning_rate": server_learning_rate, "name": "propfair"}
    algorithm = fedavg(model, trainer, **(own | options))
    return algorithm._replace(client=client).with_numbers(
        {"baseline": baseline, "margin": margin},
        {"baseline": Positive, "margin": Positive},
        _check_margin,
    )


def _check_margin(options: Mapping[str, Any], prefix: str) -> None:
    """Requires a margin above 0 and below the baseline, unless traced."""
    baseline, margin = options["baseline"], options["margin"]
    if checks.is_traced(baseline) or checks.is_traced(margin):
        return
    rule = f"be above 0 and below the baseline {np.asarray(baseline).tolist()}"
    fits = bool(np.all((np.asarray(margin) > 0) & (np.asarray(margin) < np.asarray(baseline))))
    checks.require(fits, f"{prefix}margin", rule, margin)


def needs_of_propfair(options: Mapping[str, Any]) -> Needs:
    """Refuses a margin that is not below the baseline."""
    _check_margin(options, "")
    return Needs()
