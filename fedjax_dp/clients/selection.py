"""Scores of models on a client's data, for clients that choose among models."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from chex import PRNGKey
from dp_accounting import ComposedDpEvent, DpEvent, NoOpDpEvent

from fedjax_dp.clients.base import LocalConfig
from fedjax_dp.clients.client_data import ClientData, PublicClient
from fedjax_dp.core import checks, sums
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.core.ranges import Positive, PositiveNumbers
from fedjax_dp.core.trees import PyTree
from fedjax_dp.models.base import Model
from fedjax_dp.privacy.claims import RecordEvent
from fedjax_dp.privacy.mechanisms.selection import (
    score_units,
    select,
    selection_event,
    summed_scores,
)

SCORES = ("accuracy", "loss")
# The numbers of a private choice.
RANGES: Mapping[str, Any] = {"selection_epsilon": Positive, "loss_bound": Positive}


@checked
def mean_loss(
    model: Model, params: PyTree, client: ClientData | PublicClient, *, block_size: int = 128
) -> jax.Array:
    """Computes the exact mean loss of a model over a client's examples.

    Args:
      model: the model.
      params: its parameters.
      client: the client's data.
      block_size: examples that are computed at once; bounds memory, changes nothing else.

    Returns:
      A float32 scalar; 0 for a client without examples. Not private.
    """
    total = _sum(lambda batch: model.losses(params, batch)[0], client, block_size, ())
    return total / jnp.maximum(client.size, 1).astype(total.dtype)


@checked
def accuracy_of(
    model: Model, params: PyTree, client: ClientData | PublicClient, *, block_size: int = 128
) -> jax.Array:
    """Computes a model's accuracy on a client's data as an evaluation does.

    That is correct predictions over all that count, of which an example may have several, such as
    the tokens of a text, or none, if its label is left out.

    Guarantee: none.

    Args:
      model: a model with an accuracy.
      params: its parameters.
      client: the client's data, such as its second split.
      block_size: examples that are computed at once; bounds memory, changes nothing else.

    Returns:
      A float32 scalar in [0, 1]; 0 if there is nothing to predict. Not private.

    Raises:
      ValueError: for a model without an accuracy.
    """
    predictions = _predictions(model, params)
    correct, weight = _sum(lambda batch: jnp.stack(predictions(batch)), client, block_size, (2,))
    return correct / jnp.where(weight > 0, weight, 1.0)


def require_accuracy(model: Model) -> None:
    """Requires a model with an accuracy."""
    rule = "have an accuracy, which clients compute on their validation data"
    checks.require(model.correct_fn is not None, "model", rule, model.name)


def _predictions(model: Model, params: PyTree) -> Callable[[PyTree], tuple[Any, Any]]:
    """Returns `(batch) -> (correct, weight)`, each `[examples]`, 0 in place of NaN."""
    correct_fn = model.correct_fn
    require_accuracy(model)
    assert correct_fn is not None

    def of_batch(batch: PyTree) -> tuple[Any, Any]:
        outputs, _ = model.apply(params, batch["x"])
        correct, weight = correct_fn(outputs, batch)
        return jnp.nan_to_num(correct), jnp.nan_to_num(weight)

    return of_batch


def _sum(
    values_of: Callable[[PyTree], jax.Array],
    client: ClientData | PublicClient,
    block_size: int,
    shape: tuple[int, ...],
) -> jax.Array:
    """Sums `values_of`, `[*shape, examples]` of a batch, over a client's examples."""

    def sum_of(values: jax.Array, is_real: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(is_real, values, 0.0), axis=-1)

    start = jnp.zeros(shape, jnp.float32)
    return _over_blocks(
        lambda *block: sum_of(values_of(block[0]), block[1]), client, block_size, start
    )


def _over_blocks(
    sum_of: Callable[[PyTree, jax.Array], jax.Array],
    client: ClientData | PublicClient,
    block_size: int,
    start: jax.Array,
) -> jax.Array:
    """Adds up `sum_of`, `(batch, is_real) -> sum`, over blocks of a client's examples."""
    block = min(block_size, client.limit)

    def body(i, total):
        rows = i * block + jnp.arange(block)
        return sums.add(total, sum_of(client.gather(rows), rows < client.size))

    total = jax.lax.fori_loop(0, -(-client.size // block), body, sums.zeros_like(start))
    return sums.value(total)


class Choice(NamedTuple):
    """How a client chooses one of several models by its own data.

    Attributes:
      of: `(key, models, client, is_offered, numbers) -> index`; `is_offered` is `[models]`, bool.
        It opens the client's records under its event, so that an algorithm which does not charge
        that event is refused.
      event: `(numbers) -> DpEvent` of one choice, or None if it is exact, which nothing covers.

    Its numbers are `selection_epsilon`, ε of one choice, and `loss_bound`, the largest loss of one
    example that counts; an exact choice reads neither.
    """

    of: Callable[[PRNGKey, PyTree, ClientData | PublicClient, jax.Array, Any], jax.Array]
    event: Callable[[Any], DpEvent] | None


def trained_and_chosen(train_event: RecordEvent, choice: Choice) -> RecordEvent:
    """Adds the event of a private choice to that of training, unless the client has no data."""
    price = choice.event
    if price is None:
        return train_event

    def event(size, hyper):
        trained = train_event(size, hyper)
        return trained if size == 0 else ComposedDpEvent([trained, price(hyper.algorithm)])

    return event


def only_chosen(choice: Choice) -> RecordEvent:
    """Returns the event of a round in which clients choose and train nothing."""
    price = choice.event

    def event(size, hyper):
        return NoOpDpEvent() if price is None or size == 0 else price(hyper.algorithm)

    return event


def without_steps(config: LocalConfig, is_idle: jax.Array) -> LocalConfig:
    """Leaves out all local steps where a traced flag is set."""

    def none(count: Any) -> Any:
        return None if count is None else jnp.where(is_idle, 0, count)

    return config._replace(num_epochs=none(config.num_epochs), num_steps=none(config.num_steps))


@checked
def whole_score(
    model: Model,
    params: PyTree,
    client: ClientData | PublicClient,
    *,
    score: str = "accuracy",
    loss_bound: PositiveNumbers = 1.0,
    block_size: int = 128,
) -> jax.Array:
    """Sums a model's scores on a client's examples, in whole units, for a private choice.

    Guarantee: replacing one example moves the result by at most `score_units(client.limit)`,
    exactly, whatever the number of examples: scores are summed as integers. A choice by `select`
    computes its logits from such sums in float32.

    Args:
      model: the model.
      params: its parameters.
      client: the client's data.
      score: "accuracy", or "loss" for minus the sum of clipped losses.
      loss_bound: the largest loss that counts, above 0; ignored for accuracy.
      block_size: examples that are computed at once; bounds memory, changes nothing else.

    Returns:
      An int32 scalar, larger is better; the largest score of one example is
      `score_units(client.limit)`, or 0 for losses. 0 for a client without examples. Not private.

    Raises:
      ValueError: for an unknown score, or accuracy of a model that has none.
    """
    checks.one_of("score", score, SCORES)
    units = score_units(client.limit)
    is_accuracy = score == "accuracy"
    predictions = _predictions(model, params) if is_accuracy else None

    def scores_of(batch: PyTree) -> jax.Array:
        return model.losses(params, batch)[0] if predictions is None else predictions(batch)[0]

    largest = 1.0 if is_accuracy else loss_bound

    def sum_of(batch: PyTree, is_real: jax.Array) -> jax.Array:
        return summed_scores(scores_of(batch), is_real, largest, units)

    total = _over_blocks(sum_of, client, block_size, jnp.int32(0))
    return total if is_accuracy else -total


@checked
def exact_choice(model: Model) -> Choice:
    """Chooses the model of smallest exact training loss; the choice is not private.

    Args:
      model: the model to train.

    Returns:
      The choice.

    Source: Ghosh and others 2020 (IFCA), algorithm 1; Malekmohammadi and others 2024 (RC-DPFL),
    algorithm 1.
    """

    def choose(key, models, client, is_offered, numbers):
        del key, numbers
        client = client.read_by("a choice by exact loss", None)
        losses = jax.lax.map(lambda params: mean_loss(model, params, client), models)
        return jnp.argmin(jnp.where(is_offered, losses, jnp.inf)).astype(jnp.int32)

    return Choice(choose, None)


@checked
def private_choice(model: Model, *, score: str = "accuracy") -> Choice:
    """Chooses a model of good training accuracy or loss by the exponential mechanism.

    Guarantee: unit of privacy is one record of the client; ε-DP and ε²/8-zCDP under add/remove,
    zero-out and replace-one, since the sensitivity `1/(n - 1)`, or `loss_bound/(n - 1)`, bounds all
    three; n, the client's number of examples, is public. Scores are integers
    (`whole_score`).

    Args:
      model: the model to train.
      score: "accuracy", or "loss" for minus the mean of clipped losses.

    Returns:
      The choice.

    Raises:
      ValueError: for an unknown score, or accuracy of a model that has none.

    Source: Liu and others 2022, section 5; Malekmohammadi and others 2025 (R-DPCFL), equation 8.
    """
    checks.one_of("score", score, SCORES)
    has_accuracy = score == "loss" or model.correct_fn is not None
    checks.require(has_accuracy, "score", "be 'loss' for a model without accuracy", score)

    def event(numbers):
        return selection_event(numbers["selection_epsilon"])

    def choose(key, models, client, is_offered, numbers):
        # The kind of mechanism is compared with the charged one, whatever its ε.
        client = client.read_by("a private choice", lambda size, config: selection_event(1.0))
        score_of = partial(
            whole_score, model, score=score, loss_bound=numbers.get("loss_bound", 1.0)
        )
        scores = jax.lax.map(lambda params: score_of(params, client), models)
        # Of a mean over n examples, whose sensitivity is 1/(n - 1) of the largest score.
        size = client.size.astype(jnp.float32)
        sensitivity = score_units(client.limit) * size / jnp.maximum(size - 1, 1)
        epsilon = numbers["selection_epsilon"]
        return select(key, scores, epsilon, jnp.maximum(sensitivity, 1), is_offered=is_offered)

    return Choice(choose, event)


def make_choice(model: Model, selection: str, score: str) -> Choice:
    """Builds a choice by name, "private" or "exact"."""
    checks.one_of("selection", selection, ("private", "exact"))
    if selection == "exact":
        return exact_choice(model)
    return private_choice(model, score=score)
