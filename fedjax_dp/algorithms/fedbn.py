"""FedBN, FedPer and FedRep: some parameters are local, the others are averaged."""

import jax
import optax

from fedjax_dp.algorithms.base import FederatedAlgorithm, claim_of, training_of
from fedjax_dp.algorithms.fedavg import averaged
from fedjax_dp.clients.base import LocalTrainer, Objective
from fedjax_dp.core import checks, trees
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.core.keys import Purpose, fold
from fedjax_dp.core.ranges import Amount, Positive
from fedjax_dp.models import kinds
from fedjax_dp.models.base import Model
from fedjax_dp.models.kinds import BATCH_NORM, Home, Where
from fedjax_dp.server.base import Aggregator


@checked
def fedbn(
    model: Model,
    trainer: LocalTrainer,
    *,
    home: Where = BATCH_NORM,
    server_learning_rate: Positive = 1.0,
    aggregator: Aggregator | None = None,
    name: str = "fedbn",
) -> FederatedAlgorithm:
    """Declares FedAvg with some parameters local to their clients.

    Local parameters are neither sent nor averaged nor received: a client trains the server's
    parameters and its own together, and is evaluated with both. A client that joins late begins
    with the initial ones. Without local parameters, as in a model without batch norm, this is
    FedAvg.

    Guarantee: that of the trainer for records, once, for all that the client computes. That of the
    aggregator for clients covers the shared parameters; local ones never leave their client, and
    are not covered.

    Args:
      model: the model to train.
      trainer: local training.
      home: the local parameters: "batch_norm", the scales, shifts and statistics of batch norm
        whose statistics are not frozen; a path such as "params/Dense_1", a pattern, a list of
        these, empty for none, or `(path, leaf) -> bool`.
      server_learning_rate: the server's step size.
      aggregator: combines deltas; by default the mean weighted by client size.
      name: the name in reports.

    Returns:
      The algorithm; a client's state is its local parameters.

    Raises:
      ValueError: for a number out of its range, a pattern that matches nothing, or if all
        parameters are local.

    Source: Li and others 2021 (FedBN), algorithm 1.
    """
    return averaged(
        model,
        trainer,
        lambda numbers: optax.sgd(numbers["server_learning_rate"]),
        numbers={"server_learning_rate": server_learning_rate},
        ranges_of={"server_learning_rate": Positive},
        aggregator=aggregator,
        home=_home(model, home, "home"),
        name=name,
    )


@checked
def fedper(
    model: Model,
    trainer: LocalTrainer,
    *,
    head: Where,
    server_learning_rate: Positive = 1.0,
    aggregator: Aggregator | None = None,
) -> FederatedAlgorithm:
    """Declares FedPer: clients share a body and have local heads, trained together.

    Guarantee: that of `fedbn`.

    Args:
      model: the model to train.
      trainer: local training.
      head: the local layers, as for `fedbn`, such as "params/Dense_1".
      server_learning_rate: the server's step size.
      aggregator: as for `fedbn`.

    Returns:
      The algorithm; a client's state is its head.

    Raises:
      ValueError: as for `fedbn`.

    Source: Arivazhagan and others 2019, algorithms 1 and 2.
    """
    _home(model, head, "head")
    return fedbn(
        model,
        trainer,
        home=head,
        server_learning_rate=server_learning_rate,
        aggregator=aggregator,
        name="fedper",
    )


@checked
def fedrep(
    model: Model,
    trainer: LocalTrainer,
    *,
    head: Where,
    head_epochs: Amount = 5,
    server_learning_rate: Positive = 1.0,
    aggregator: Aggregator | None = None,
) -> FederatedAlgorithm:
    """Declares FedRep: a client first fits its head to the shared body, then the body to its head.

    Guarantee: that of the trainer for records, twice a round, once for each fit. For clients as
    `fedbn`.

    Args:
      model: the model to train.
      trainer: local training of the body; the head is trained in the same way, for `head_epochs`.
      head: the local layers, as for `fedbn`.
      head_epochs: passes over the client's data that fit the head, at least 0; the authors use more
        than for the body.
      server_learning_rate: the server's step size.
      aggregator: as for `fedbn`.

    Returns:
      The algorithm; a client's state is its head.

    Raises:
      ValueError: as for `fedbn`.

    Source: Collins and others 2021, algorithm 1.
    """
    home = _home(model, head, "head")

    def of_head(hyper):
        epochs = hyper.algorithm["head_epochs"]
        return hyper.local._replace(num_epochs=epochs, num_steps=None)

    def train(start, client, hyper, key):
        is_head = jax.tree.map(lambda sent: None if not sent else False, home.is_sent)
        is_body = jax.tree.map(lambda sent: None if sent else False, home.is_sent)
        fitted = trainer.train(
            start,
            client,
            of_head(hyper),
            fold(key, Purpose.PERSONAL),
            objective=Objective(mask=is_head),
        )
        # The body was not trained, so its statistics of this fit are discarded.
        start = home.joined(start, home.own(fitted.params))
        result = trainer.train(start, client, hyper.local, key, objective=Objective(mask=is_body))
        metrics = trees.add(fitted.metrics, result.metrics)
        metrics = metrics._replace(update_norm=result.metrics.update_norm)
        return result._replace(metrics=metrics)

    algorithm = averaged(
        model,
        trainer,
        lambda numbers: optax.sgd(numbers["server_learning_rate"]),
        numbers={"server_learning_rate": server_learning_rate},
        ranges_of={"server_learning_rate": Positive},
        aggregator=aggregator,
        home=home,
        train=train,
        name="fedrep",
    ).with_numbers({"head_epochs": head_epochs}, {"head_epochs": Amount})
    start = algorithm.hyper

    def num_steps(size, config):
        of_both = start._replace(local=config)
        return trainer.num_steps(size, config) + trainer.num_steps(size, of_head(of_both))

    claim = claim_of(trainer, of_head, lambda hyper: hyper.local)
    return algorithm._replace(
        training=training_of(trainer, num_steps=num_steps, record=claim, sent=home.is_sent)
    )


def _home(model: Model, where: Where, name: str) -> Home:
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    home = kinds.home(shapes, where, model.buffer_keys, name=name)
    rule = f"match a parameter of {model.name}"
    checks.require(name == "home" or any(home.is_own), name, rule, where)
    return home
