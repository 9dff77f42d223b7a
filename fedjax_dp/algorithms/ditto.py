"""Ditto: every client also trains a personal model, pulled towards the shared one."""

from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp

from fedjax_dp.algorithms.base import ClientState, FederatedAlgorithm, claim_of, training_of
from fedjax_dp.algorithms.fedavg import fedavg
from fedjax_dp.clients.base import LocalTrainer
from fedjax_dp.clients.regularizers import towards
from fedjax_dp.clients.selection import accuracy_of
from fedjax_dp.core import checks, ranges, trees
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.core.keys import Purpose, fold
from fedjax_dp.core.ranges import Amount, NonNegative, Positive
from fedjax_dp.models.base import Model
from fedjax_dp.server.base import Aggregator

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
