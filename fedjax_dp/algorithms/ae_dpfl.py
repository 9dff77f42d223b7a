"""AE-DPFL: clients vote on public inputs, the server trains on the noised labels."""

from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
from annotated_types import Ge, Le

from fedjax_dp.algorithms.base import ClientOutput, FederatedAlgorithm, Views, field, training_of
from fedjax_dp.clients.base import LocalConfig, LocalTrainer
from fedjax_dp.clients.client_data import ClientData
from fedjax_dp.clients.sgd import local_trainer
from fedjax_dp.core import checks, trees
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.core.ranges import Count, NonNegative
from fedjax_dp.core.trees import PyTree
from fedjax_dp.models.base import Model
from fedjax_dp.models.weights import declared, of_classes_alone
from fedjax_dp.server.base import Aggregator, bound_of
from fedjax_dp.server.mean import scaled_sum

# Public inputs that a client classifies at once; affects memory only.
_BLOCK = 256
UNANSWERED = -1


class ServerState(NamedTuple):
    """The models, and the labels so far."""

    params: PyTree  # The server's model.
    start: PyTree  # The initial model of every client's training.
    labels: jax.Array  # The label of each public input, `[queries]`, int32; -1 if unlabelled.


@checked
def ae_dpfl(
    model: Model,
    trainer: LocalTrainer,
    *,
    public_x: jax.typing.ArrayLike,
    num_rounds: Count = 1,
    server_learning_rate: NonNegative = 0.1,
    server_batch_size: Count = 32,
    server_epochs: NonNegative = 10,
    aggregator: Aggregator | None = None,
) -> FederatedAlgorithm:
    """Declares AE-DPFL: agents vote with their own classifiers on unlabelled public data.

    A round labels the next block of public inputs. Every client of the cohort trains from the
    common start, votes for a class of each input, and sends its one-hot votes; their noised sum
    gives the labels. The server then trains further on all labelled inputs. No model leaves a
    client, so neither the model's size nor clipping matters.

    Guarantee: that of the aggregator. A client's votes of a round are one vector whose L2 norm is
    scaled to the aggregator's bound: Gaussian noise of `noise_multiplier` z is noise of z·√queries
    on counts of votes. Noise that is bounded in L1, such as Laplace, clips the same votes to an L1
    norm of the bound: a scale of z is one of z·queries on counts, so that Gaussian noise is the
    better choice for many queries. Removing a client moves the counts by √queries in L2, exchanging
    it by √2 times that, of which a replace-one account charges 2.

    Args:
      model: what clients and server train; its outputs are logits, `[examples, classes]`, or
        log-odds, `[examples]`.
      trainer: local training, usually of many epochs.
      public_x: public inputs without labels, `[queries, ...]`, from the distribution of the task.
      num_rounds: the number of rounds that share the queries.
      server_learning_rate: step size of the server's SGD.
      server_batch_size: public examples per step; a run may use fewer, not more.
      server_epochs: passes over the labelled inputs in a round.
      aggregator: sums the votes, such as `gaussian_mean` with any clip norm; an exact sum by
        default.

    Returns:
      The algorithm. An input whose classes all have the same count stays unlabelled.

    Raises:
      ValueError: for a number out of range, outputs of another shape, or a loss of numbers.

    Source: Zhu and others 2020 (AE-DPFL).
    """
    public_x = jnp.asarray(public_x)
    checks.require(public_x.ndim > 0, "public_x", "have an axis of queries", public_x)
    num_queries = public_x.shape[0]
    checks.whole("public_x", num_queries)
    block = -(-num_queries // num_rounds)
    num_classes = _num_classes(model, public_x)
    votes_of = _voter(model, public_x, block, num_classes)
    votes_shape = jax.ShapeDtypeStruct((block, num_classes), jnp.float32)
    # Refuses an aggregator without a bound.
    scale_of(aggregator, votes_shape, None if aggregator is None else aggregator.numbers)
    mean = aggregator or scaled_sum(1.0)
    numbers = {
        "server_learning_rate": server_learning_rate,
        "server_batch_size": server_batch_size,
        "server_epochs": server_epochs,
    }
    limits = {
        "server_learning_rate": NonNegative,
        "server_batch_size": Annotated[int, Ge(1), Le(server_batch_size)],
        "server_epochs": NonNegative,
    }
    # Public examples have no weights of their own.
    learner = local_trainer(of_classes_alone(model), LocalConfig(*numbers.values()))

    def init(key):
        params = model.init(key)
        return ServerState(params, params, jnp.full((num_queries,), UNANSWERED, jnp.int32))

    def queries_of(round_index):
        queries = round_index * block + jnp.arange(block)
        return queries, queries < num_queries

    def client(message, own, client, hyper, key):
        result = trainer.train(message, client, hyper.local, key)
        scale = scale_of(aggregator, votes_shape, hyper.aggregator)
        queries, is_query = queries_of(client.round)
        is_asked = (is_query & (client.size > 0)).astype(jnp.float32)
        votes = votes_of(result.params, queries) * is_asked[:, None]
        # Votes of a model that is not finite are finite, so the engine could not notice it.
        votes = jnp.where(trees.is_finite(result.params), scale * votes, jnp.nan)
        # The norm of the votes, which are what is clipped; the update is not sent.
        metrics = result.metrics._replace(update_norm=trees.l2_norm(votes), form=None)
        return ClientOutput(votes, result.weight, own, metrics)

    def server_step(server, votes, hyper, round, key):
        queries, is_query = queries_of(round.index)
        is_answered = jnp.max(votes, axis=1) > jnp.min(votes, axis=1)
        label = jnp.where(is_answered, jnp.argmax(votes, axis=1), UNANSWERED)
        labelled = jnp.where(is_query, queries, num_queries)
        labels = server.labels.at[labelled].set(label.astype(jnp.int32), mode="drop")
        num_labelled = jnp.minimum((round.index + 1) * block, num_queries).astype(jnp.int32)
        public = ClientData(
            {"x": public_x, "y": labels}, jnp.int32(0), num_labelled, jnp.int32(0), num_queries
        )
        values = [hyper.algorithm[name] for name in numbers]
        trained = learner.train(server.params, public, LocalConfig(*values), key)
        return ServerState(trained.params, server.start, labels), {}

    return FederatedAlgorithm(
        name="ae_dpfl",
        init=init,
        broadcast=lambda server, client: server.start,
        client=client,
        aggregator=mean,
        server_step=server_step,
        training=training_of(trainer, sends_models=False),
        views=Views(shared=field("params")),
    ).with_numbers(numbers, limits)


def _num_classes(model: Model, x: jax.Array) -> int:
    outputs = jax.eval_shape(lambda k: _votes(model, model.init(k), x[:1]), jax.random.key(0))
    shape: tuple[int, ...] = getattr(outputs, "shape", ())
    rule = "have logits [examples, classes] or log-odds [examples] as outputs"
    checks.require(len(shape) in (1, 2), "model", rule, shape)
    loss = declared(model.loss_fn)
    is_of_classes = loss is None or loss.targets not in ("numbers", "counts")
    rule = "have a loss of classes, which clients vote for"
    checks.require(is_of_classes, "model", rule, getattr(loss, "name", None))
    return 2 if len(shape) == 1 else max(2, shape[1])


def _votes(model: Model, params: Any, x: jax.Array) -> Any:
    """Computes logits of classes, those that are in order too, or log-odds."""
    loss, outputs = declared(model.loss_fn), model.predict(params, x)
    return outputs if loss is None else loss.decoded(outputs)


def _voter(model: Model, x: jax.Array, block: int, num_classes: int):
    """Builds `(params, queries) -> one-hot votes [queries, classes]`."""
    at_once = min(_BLOCK, block)
    num_parts = -(-block // at_once)

    def votes(params, queries):
        padded = jnp.pad(queries, (0, num_parts * at_once - block)).reshape(num_parts, at_once)

        def part(queries):
            outputs = _votes(model, params, x[jnp.clip(queries, 0, x.shape[0] - 1)])
            if outputs.ndim == 2 and outputs.shape[1] > 1:
                chosen = jnp.argmax(outputs, axis=1)
            else:
                chosen = (outputs.reshape(-1) > 0).astype(jnp.int32)
            return jax.nn.one_hot(chosen, num_classes, dtype=jnp.float32)

        return jax.lax.map(part, padded).reshape(-1, num_classes)[:block]

    return votes


def scale_of(aggregator: Aggregator | None, votes: PyTree, numbers: Any) -> Any:
    """Finds the size of a vote for which a round's votes have the norm of the bound."""
    bound = 1.0 if aggregator is None else bound_of(aggregator, votes, numbers)
    return bound / votes.shape[0] ** 0.5
