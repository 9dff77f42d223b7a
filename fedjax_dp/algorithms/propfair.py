"""PropFair: clients minimise a loss that is steep near a baseline, and models are averaged."""

from collections.abc import Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_dp.algorithms.base import ClientOutput, FederatedAlgorithm, Needs
from fedjax_dp.algorithms.fedavg import fedavg
from fedjax_dp.clients.base import LocalTrainer, Objective, Value
from fedjax_dp.core import checks, ranges
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.core.ranges import Positive
from fedjax_dp.models.base import Model

Extension = Literal["smooth", "released", "released_huber"]


def proportional(
    baseline: float | jax.Array, margin: float | jax.Array = 0.2, extension: Extension = "smooth"
) -> Value:
    """Builds `−ln(1 − ℓ/M)`, whose mean over clients proportional fairness minimises.

    Above M − ε it is linear: "smooth" with the slope 1/ε that it has there; "released" as `ℓ/M` and
    "released_huber" as `ℓ/ε`, the two forms of the authors' program, which are discontinuous.

    Source: Zhang and others 2022 (PropFair), equation 8.
    """
    checks.one_of("extension", extension, ("smooth", "released", "released_huber"))
    ranges.check({"baseline": baseline, "margin": margin}, {"baseline": Positive})
    _check_margin({"baseline": baseline, "margin": margin})

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
        lambda hyper: _check_margin(hyper.algorithm),
    )


def _check_margin(options: Mapping[str, Any]) -> None:
    """Requires a margin above 0 and below the baseline, unless traced."""
    baseline, margin = options["baseline"], options["margin"]
    if checks.is_traced(baseline) or checks.is_traced(margin):
        return
    rule = f"be above 0 and below the baseline {np.asarray(baseline).tolist()}"
    fits = bool(np.all((np.asarray(margin) > 0) & (np.asarray(margin) < np.asarray(baseline))))
    checks.require(fits, "margin", rule, margin)


def needs_of_propfair(options: Mapping[str, Any]) -> Needs:
    """Refuses a margin that is not below the baseline."""
    _check_margin(options)
    return Needs()
