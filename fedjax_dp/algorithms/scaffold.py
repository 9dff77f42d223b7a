"""SCAFFOLD: control variates at server and clients correct the drift of local training."""

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax

from fedjax_dp.algorithms.base import (
    ClientOutput,
    ClientState,
    FederatedAlgorithm,
    Needs,
    Numbers,
    Views,
    field,
    training_of,
    weighted,
)
from fedjax_dp.clients.base import LocalTrainer
from fedjax_dp.clients.gradients import mean_gradient
from fedjax_dp.clients.regularizers import shift
from fedjax_dp.clients.transforms import UpdateTransform
from fedjax_dp.core import checks, trees
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.core.keys import Purpose, fold
from fedjax_dp.core.ranges import Count, Positive
from fedjax_dp.core.trees import PyTree
from fedjax_dp.models.base import Model
from fedjax_dp.server.base import Aggregator, Summed
from fedjax_dp.server.mean import per_part, scaled_sum, uniform_mean, weighted_mean
from fedjax_dp.server.optimizers import apply_aggregate
from fedjax_dp.server.parts import public_divisor

Control: TypeAlias = Literal["steps", "gradient"]
_READ = "scaffold computes control variates from its steps and its delta"
_VOTES = "votes on control variates would take a part of the bound"


class ServerState(NamedTuple):
    """The model, x, and the mean of all clients' control variates, c."""

    params: PyTree
    control: PyTree


def _control_of(params: PyTree) -> PyTree:
    # Control variates are sums over many rounds, so they are float32 for any model.
    return jax.tree.map(lambda p: trees.zeros_like(trees.at_least_float32(p)), params)


@checked
def scaffold(
    model: Model,
    trainer: LocalTrainer,
    *,
    num_clients: Count,
    server_learning_rate: Positive = 1.0,
    is_weighted: bool = False,
    control: Control = "steps",
    aggregator: Aggregator | None = None,
) -> FederatedAlgorithm:
    """Declares SCAFFOLD, whose control variates correct the drift of local training.

    A client adds `c − c_i` to every gradient. Afterwards its control variate becomes the mean
    gradient of its steps, `c_i − c + (x − y_i) / (K · learning rate)`, which is valid for plain SGD
    only (option II); or, at the cost of one more pass over its data, their gradient at x (option
    I), for any optimiser.

    Guarantee: for records that of the trainer. For clients that of a private mean as the
    aggregator: the delta and the change of the control variate are one update of two parts,
    "params" and "control", clipped together and released once. The server's control variate is then
    the sum of bounded changes, with the noise of every round in it; a client's own is exact, never
    leaves it, and is not covered.

    Args:
      model: the model to train.
      trainer: local training; with `control="steps"` plain `optax.sgd`, whose learning rate the
        control variate needs, else any optimiser, such as one with momentum, but not private.
      num_clients: the population; the server's control variate is the mean over all of it.
      server_learning_rate: the server's step size.
      is_weighted: weight deltas by client size; the paper weights all clients equally.
      control: what a client's control variate becomes: "steps", the mean gradient of its steps, or
        "gradient", the mean gradient over all of its data at the model that it received, exact.
      aggregator: a summed aggregator of deltas, instead of their mean; `gradient_mask()` weights
        them by size unless configured otherwise. Control variates are always averaged. Its numbers
        are those of the part "params", as `hyper.aggregator["params"]["threshold"]`. A private mean
        combines both parts, see `server.by_parts`, and its numbers are those of the run.

    Returns:
      The algorithm; a client's state is its control variate.

    Raises:
      ValueError: for a number out of its range, weights together with an aggregator, a trainer that
        is private or takes other steps than plain SGD if control variates do not allow it, or a
        private mean that is masked or has no public divisor.

    Source: Karimireddy and others 2020 (SCAFFOLD), algorithm 1.
    """
    if control == "steps":
        trainer.require_plain_sgd(_READ)
    else:
        trainer.require_open("control variates are gradients of all records, which no noise covers")
    weighted(is_weighted).check_weights(aggregator is not None)

    def init(key):
        params = model.init(key)
        return ServerState(params, _control_of(params))

    def of_steps(message, own, client, hyper, key, result):
        per_step = result.num_steps.astype(jnp.float32) * hyper.local.learning_rate
        inverse = trees.reciprocal(per_step)
        moved = jax.tree.map(lambda delta, c: -delta * inverse - c, result.delta, message.control)
        # A client that did not move has no new estimate of its gradient.
        return trees.where(per_step > 0, moved, trees.zeros_like(moved))

    def of_gradient(message, own, client, hyper, key, result):
        most = trainer.config.max_batch_size()
        own_key = fold(key, Purpose.PERSONAL)
        gradient = mean_gradient(model, message.params, client, most, own_key)
        moved = trees.subtract(gradient, own)
        return trees.where(client.size > 0, moved, trees.zeros_like(moved))

    change_of = of_steps if control == "steps" else of_gradient

    def client(message, own, client, hyper, key):
        correction = trees.subtract(message.control, own)
        result = trainer.train(
            message.params, client, hyper.local, key, gradient_transform=shift(correction)
        )
        moved = change_of(message, own, client, hyper, key, result)
        update = {"params": result.delta, "control": moved}
        metrics = result.metrics.of_part("params")
        if divisor is not None:
            metrics = metrics._replace(update_norm=trees.l2_norm(update))
        return ClientOutput(update, result.weight, trees.add(own, moved), metrics)

    def server_step(server, aggregate, hyper, round, key):
        optimizer = optax.sgd(hyper.algorithm["server_learning_rate"])
        is_buffer = model.is_buffer(server.params) if model.buffer_keys else None
        state, mean = optimizer.init(server.params), aggregate["params"]
        _, params = apply_aggregate(optimizer, state, server.params, mean, is_buffer)
        change = aggregate["control"]
        if divisor is not None:
            change = trees.scale(change, divisor(hyper.aggregator) / num_clients)
        return ServerState(params, trees.add(server.control, change)), {}

    mean = aggregator or (weighted_mean() if is_weighted else uniform_mean())
    rule = "be summed, as control variates are, not stacked"
    checks.require(isinstance(mean, Summed), "aggregator", rule, type(mean).__name__)
    assert isinstance(mean, Summed)
    divisor = None
    if mean.claim is None:
        mean = per_part({"params": mean, "control": scaled_sum(num_clients)})
    else:
        divisor = public_divisor(mean, "aggregator")
        rule = f"be unmasked if clients are protected: {_VOTES}"
        checks.require("vote_share" not in mean.numbers, "aggregator", rule, "a masked one")
    return FederatedAlgorithm(
        name="scaffold",
        init=init,
        broadcast=lambda server, client: server,
        client=client,
        aggregator=mean,
        server_step=server_step,
        training=training_of(trainer),
        numbers=Numbers(num_clients=num_clients),
        views=Views(shared=field("params")),
        client_state=ClientState(init=lambda server: server.control),
    ).with_numbers(
        {"server_learning_rate": server_learning_rate}, {"server_learning_rate": Positive}
    )


def update_of_scaffold(params: PyTree, options: Mapping[str, Any]) -> PyTree:
    """Returns the shapes of an update that a private mean combines."""
    del options
    return {"params": params, "control": jax.eval_shape(_control_of, params)}


def needs_of_scaffold(options: Mapping[str, Any]) -> Needs:
    """Declares plain steps, or a control variate that reads records."""
    needs = weighted(options["is_weighted"])
    if options["control"] == "steps":
        return needs._replace(steps="plain", reason=_READ)
    name, instead = "control=gradient", "take control=steps"
    declared = UpdateTransform(lambda delta, context: delta, True, name, instead)
    return needs._replace(transforms=(declared,))
