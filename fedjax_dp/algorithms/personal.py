"""Personal models: near a shared one (Ditto, MR-MTL), or partly local (FedBN, FedPer, FedRep)."""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_dp.algorithms.base import (
    ClientOutput,
    ClientState,
    FederatedAlgorithm,
    Numbers,
    Views,
    claim_of,
    field,
    training_of,
)
from fedjax_dp.algorithms.fedavg import averaged, fedavg
from fedjax_dp.clients.base import LocalTrainer, Objective
from fedjax_dp.clients.regularizers import distance_to, towards
from fedjax_dp.clients.selection import accuracy_of
from fedjax_dp.core import checks, ranges, trees
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.core.keys import Purpose, fold
from fedjax_dp.core.ranges import Amount, Count, NonNegative, Positive
from fedjax_dp.core.trees import PyTree
from fedjax_dp.models import kinds
from fedjax_dp.models.base import Model
from fedjax_dp.models.kinds import BATCH_NORM, Home, Where
from fedjax_dp.server.base import Aggregator
from fedjax_dp.server.mean import scaled_sum

Order = Literal["sequential", "interleaved"]
_RANGES = {
    "strength": NonNegative,
    "personal_epochs": Amount,
    "personal_learning_rate": NonNegative,
}


@checked
def ditto(
    model: Model,
    trainer: LocalTrainer,
    *,
    strength: NonNegative = 1.0,
    order: Order = "sequential",
    personal_epochs: Amount | None = None,
    personal_learning_rate: NonNegative | None = None,
    strengths: Sequence[NonNegative] | None = None,
    server_learning_rate: Positive = 1.0,
    aggregator: Aggregator | None = None,
) -> FederatedAlgorithm:
    """Declares Ditto: FedAvg whose clients also minimise `f_k(v) + strength/2 ‖v − θ‖²`.

    θ is the model received in this round, so nothing of the personal model v is sent. At strength
    0, v is trained locally; as strength grows it becomes the shared model, but plain SGD diverges
    if the learning rate times the strength is above 2. A personal model that is not finite is reset
    to the one before the round.

    Guarantee: for records that of the trainer, twice a round, since both trainings read the data.
    That of the aggregator for clients covers the shared model; the personal one stays with its
    client, and is not covered.

    Args:
      model: the model to train.
      trainer: local training of both models.
      strength: λ, at least 0.
      order: "sequential" draws separate batches for the personal model; "interleaved" takes both
        steps on one batch, as the authors' code does. Since θ is fixed, the order of the steps
        itself changes nothing. Private training must be sequential: two gradients of one batch
        would have to be analysed together.
      personal_epochs: passes over the data for the personal model, at least 0; by default as many
        steps as for the shared one.
      personal_learning_rate: at least 0; that of the shared one by default.
      strengths: values of λ, in place of `strength`, from which a client chooses in each round by
        the accuracy on its validation data, the first of equal ones. The choice is exact, so
        private training is refused.
      server_learning_rate: the server's step size.
      aggregator: combines deltas; the mean weighted by client size if None.

    Returns:
      The algorithm; a client's state is its own model.

    Raises:
      ValueError: for a number out of its range; interleaved or chosen strengths with a private
        trainer; a choice of strengths for a model without accuracy.

    Source: Li and others 2021 (Ditto), algorithm 1.
    """
    is_interleaved = order == "interleaved"
    if is_interleaved:
        trainer.require_open("two gradients of one batch have no event; order='sequential' has one")
    if strengths is not None:
        trainer.require_open("the choice between strengths reads validation data without noise")
        ranges.check({"strengths": jnp.asarray(strengths)}, {"strengths": NonNegative})
        checks.require(len(strengths) > 0, "strengths", "hold at least one", strengths)
        has_accuracy = model.correct_fn is not None
        checks.require(has_accuracy, "strengths", "be None for a model without accuracy", strengths)
    shared = fedavg(
        model,
        trainer,
        server_learning_rate=server_learning_rate,
        aggregator=aggregator,
        name="ditto",
    )

    def of_personal(hyper):
        local, numbers = hyper.local, hyper.algorithm
        if "personal_epochs" in numbers:
            local = local._replace(num_epochs=numbers["personal_epochs"], num_steps=None)
        if "personal_learning_rate" in numbers:
            local = local._replace(learning_rate=numbers["personal_learning_rate"])
        return local

    def client(message, own, client, hyper, key):
        sent = shared.client(message, None, client, hyper, key)

        def personal(strength):
            return trainer.train(
                own,
                client,
                of_personal(hyper),
                key if is_interleaved else fold(key, Purpose.PERSONAL),
                gradient_transform=towards(message, strength),
            ).params

        def finite_or_own(params):
            return trees.where(trees.can_be_summed(params), params, own)

        if strengths is None:
            return sent._replace(state=finite_or_own(personal(hyper.algorithm["strength"])))
        candidates = jax.lax.map(personal, jnp.asarray(strengths, jnp.float32))

        def score(params):
            accuracy = accuracy_of(model, params, client.validation)
            return jnp.where(trees.can_be_summed(params), accuracy, -1.0)

        best = jnp.argmax(jax.lax.map(score, candidates))
        info = {**sent.info, "strength": jnp.asarray(strengths, jnp.float32)[best]}
        return sent._replace(state=finite_or_own(trees.take(candidates, best)), info=info)

    numbers: dict[str, Any] = {} if strengths is not None else {"strength": strength}
    if personal_epochs is not None:
        numbers["personal_epochs"] = personal_epochs
    if personal_learning_rate is not None:
        numbers["personal_learning_rate"] = personal_learning_rate
    built = shared._replace(
        client=client,
        views=shared.views._replace(personal=lambda server, own, client: own),
        client_state=ClientState(init=lambda server: server.params),
    ).with_numbers(numbers, {name: _RANGES[name] for name in numbers})
    start = built.hyper

    def num_steps(size, config):
        both = config, of_personal(start._replace(local=config))
        return sum(trainer.num_steps(size, each) for each in both)

    return built._replace(
        training=training_of(
            trainer,
            num_steps=num_steps,
            record=claim_of(trainer, lambda hyper: hyper.local, of_personal),
            reads_validation=strengths is not None,
        )
    )


class ServerState(NamedTuple):
    """The mean of all clients' models over the population, and their common start."""

    mean: PyTree
    start: PyTree


@checked
def mr_mtl(
    model: Model,
    trainer: LocalTrainer,
    *,
    num_clients: Count,
    strength: NonNegative = 1.0,
    is_pull_clipped: bool = False,
) -> FederatedAlgorithm:
    """Declares mean-regularised multi-task learning.

    A client minimises its own loss plus `strength/2 ‖θ_i − θ̄‖²` from its last model. The pull
    towards the mean is added to the gradient after clipping and noise: it reads earlier uploads
    only and costs no privacy. Without it this is local training. Plain SGD diverges if the learning
    rate times the strength is above 2.

    Guarantee: that of the trainer.

    Args:
      model: the model to train.
      trainer: local training; a private one makes this MR-MTL under record-level privacy.
      num_clients: the population, at least 1.
      strength: λ.
      is_pull_clipped: add the pull to the gradient of every example before it is clipped, as the
        authors do, which leaves less of the clip norm for the examples.

    Returns:
      The algorithm; a client's state is its own model.

    Raises:
      ValueError: for a number out of its range, or a trainer with update transforms, after which
        the mean would not be that of the clients' models.

    Source: Liu and others 2022 (MR-MTL), algorithm 1; a pull after clipping is ours.
    """
    trainer.require_untransformed(
        "the server's model is the mean of the clients' models, unchanged"
    )

    def init(key):
        start = model.init(key)
        return ServerState(start, start)

    def client(message, own, client, hyper, key):
        strength = hyper.algorithm["strength"]
        if is_pull_clipped:
            distance = distance_to(message, strength)
            objective = Objective(lambda loss, params: loss + distance(params))
            how: dict[str, Any] = {"objective": objective}
        else:
            how = {"gradient_transform": towards(message, strength)}
        result = trainer.train(own, client, hyper.local, key, **how)
        return ClientOutput(result.delta, jnp.float32(1), result.params, result.metrics)

    def server_step(server, aggregate, hyper, round, key):
        return server._replace(mean=optax.apply_updates(server.mean, aggregate)), {}

    return FederatedAlgorithm(
        name="mr_mtl",
        init=init,
        broadcast=lambda server, client: server.mean,
        client=client,
        aggregator=scaled_sum(num_clients),
        server_step=server_step,
        training=training_of(trainer),
        numbers=Numbers(num_clients=num_clients),
        views=Views(shared=field("mean"), personal=lambda server, own, client: own),
        client_state=ClientState(init=lambda server: server.start),
    ).with_numbers({"strength": strength}, {"strength": NonNegative})


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
