"""DP-FedAvg with BLUR and LUS: local training that fits its update to the clip norm."""

from collections.abc import Callable, Mapping
from typing import Any, Literal

import numpy as np

from fedjax_dp.algorithms.base import ClientOutput, FederatedAlgorithm, Needs
from fedjax_dp.algorithms.fedavg import fedavg
from fedjax_dp.algorithms.fedopt import fedadagrad, fedadam, fedavgm, fedyogi
from fedjax_dp.clients.base import LocalTrainer
from fedjax_dp.clients.regularizers import blur
from fedjax_dp.clients.transforms import Score, declared, declared_sparsification, sparsify
from fedjax_dp.core import checks
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.core.ranges import Bound, Decay, NonNegative
from fedjax_dp.models.base import Model
from fedjax_dp.privacy.claims import ClientClaim
from fedjax_dp.server.base import Aggregator, bound_of

SERVERS: Mapping[str, Callable[..., FederatedAlgorithm]] = {
    "fedavg": fedavg,
    "fedavgm": fedavgm,
    "fedadam": fedadam,
    "fedyogi": fedyogi,
    "fedadagrad": fedadagrad,
}


@checked
def blur_lus(
    model: Model,
    trainer: LocalTrainer,
    *,
    strength: NonNegative = 0.4,
    sparsity: Decay = 0.7,
    radius: Bound | None = None,
    score: Score = "cost",
    server: Literal["fedavg", "fedavgm", "fedadam", "fedyogi", "fedadagrad"] = "fedavg",
    server_options: Mapping[str, Any] = {},
    aggregator: Aggregator | None = None,
) -> FederatedAlgorithm:
    """Declares federated averaging with BLUR in local training and LUS of updates.

    BLUR pulls local models back towards the ball that the clip norm allows; LUS drops the entries
    of an update that matter least. The aim is that clipping removes less; neither bounds an update
    or changes the noise. Either is off at 0.

    Guarantee: that of the aggregator and of the trainer, unchanged: both parts happen at the client
    before clipping.

    Args:
      model: the model to train.
      trainer: local training; with plain SGD `strength` times the learning rate must be below 1.
      strength: λ of BLUR.
      sparsity: c of LUS, the share of each layer's entries to drop.
      radius: S of BLUR; by default the aggregator's bound on an update, at the start of the run if
        that bound adapts.
      score: the order in which LUS drops entries, see `sparsify`; "cost", which reads records
        without noise, is refused with a private trainer.
      server: the algorithm of the server's step, "fedavg", "fedavgm", "fedadam", "fedyogi" or
        "fedadagrad".
      server_options: options of that algorithm, such as its learning rate.
      aggregator: combines updates; `gaussian_mean` makes this the paper's algorithm.

    Returns:
      The algorithm.

    Raises:
      ValueError: for a number out of range, an unknown server, or a score that would leak.

    Source: Cheng and others 2022 (BLUR and LUS), algorithm 2.
    """
    if trainer.is_plain_sgd:
        largest = float(np.max(np.asarray(trainer.config.learning_rate)))
        rule = f"be below 1 / learning_rate, which is {largest:g} at most"
        checks.require(strength * largest < 1, "strength", rule, strength)
    (keep,) = declared(
        "update_transform", [sparsify(model, sparsity, score=score)], is_private=trainer.is_private
    )
    base = SERVERS[server](model, trainer, aggregator=aggregator, **server_options)
    given = {"strength": strength, "radius": radius, "sparsity": sparsity, "score": score}
    bounds = aggregator is not None and isinstance(aggregator.claim, ClientClaim)
    needs_of_blur_lus(given).check_bound(bounds)
    numbers = {"strength": strength} | ({} if radius is None else {"radius": radius})

    def client(message, own, client, hyper, key):
        pull = None
        if strength:
            radius = hyper.algorithm.get("radius")
            if radius is None:
                radius = bound_of(aggregator, message, hyper.aggregator)
            pull = blur(hyper.algorithm["strength"], radius)
        result = trainer.train(
            message, client, hyper.local, key, gradient_transform=pull, update_transform=keep
        )
        return ClientOutput(result.delta, result.weight, own, result.metrics)

    limits = {"strength": NonNegative, "radius": Bound}
    return base.with_numbers(numbers, limits)._replace(name="blur_lus", client=client)


def needs_of_blur_lus(options: Mapping[str, Any]) -> Needs:
    """Declares the transform of LUS, and the radius if no aggregator has a bound."""
    transform = declared_sparsification(options["sparsity"], options["score"])
    needs_radius = options["strength"] and options["radius"] is None
    return Needs(transforms=(transform,), option_for_bound="radius" if needs_radius else "")
