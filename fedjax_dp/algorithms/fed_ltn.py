"""FedLTN: tickets found by pruning after training, batch norm at home, a server with momentum."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_dp.algorithms.base import (
    ClientOutput,
    ClientState,
    FederatedAlgorithm,
    Numbers,
    Views,
    field,
    training_of,
)
from fedjax_dp.algorithms.lottery_fl import AS_TICKETS, UNPROTECTED, joins
from fedjax_dp.clients.base import LocalTrainer, TrainingMetrics
from fedjax_dp.clients.pruning import Scope, prune, pruned_share, weights_of
from fedjax_dp.clients.regularizers import drawn_back, proximal
from fedjax_dp.clients.selection import accuracy_of, require_accuracy
from fedjax_dp.core import checks, masks, trees
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.core.keys import Purpose, fold
from fedjax_dp.core.masks import Sparse
from fedjax_dp.core.messages import Known
from fedjax_dp.core.ranges import Decay, NonNegative, Probability, ProperFraction
from fedjax_dp.core.trees import PyTree
from fedjax_dp.models import kinds
from fedjax_dp.models.base import Model
from fedjax_dp.models.kinds import BATCH_NORM, Home, Where
from fedjax_dp.server.sparse_mean import sparse_mean

Distance = Literal["norm", "squared"]
When = Literal["after", "before"]
RANGES = {
    "prune_rate": Decay,
    "target": Decay,
    "accuracy_threshold": ProperFraction,
    "strength": NonNegative,
    "mixing": Probability,
    "momentum": NonNegative,
}


class Pruning(NamedTuple):
    """The options of `fed_ltn`, which `jump_start` has too."""

    prune_rate: Any
    target: Any
    accuracy_threshold: Any
    strength: Any
    mixing: Any
    momentum: Any
    looks_ahead: bool
    home: Where
    rewinds: bool
    prunes: When
    is_masked_mean: bool
    distance: Distance
    scope: Scope
    prunable: Where | None


def check_momentum(options: Mapping[str, Any], prefix: str) -> None:
    """Requires a recursion of the server that converges where tickets stay the same."""
    mixing, momentum = options["mixing"], options["momentum"]
    if any(isinstance(x, jax.core.Tracer) for x in (mixing, momentum)):
        return
    kept = 1 - np.asarray(mixing, np.float64)
    # Of z² − (1 − τ)(1 + λ) z + (1 − τ) λ, and of the same with −λ, roots lie within the circle.
    reach, bound = np.asarray(momentum) * kept, "1 / (1 - mixing)"
    if not options["looks_ahead"]:
        reach, bound = (2 * np.asarray(momentum) - 1) * kept, "(1 + 1 / (1 - mixing)) / 2"
    rule = f"be below {bound}, where mixing is {mixing}"
    checks.require(bool(np.all(reach < 1)), f"{prefix}momentum", rule, momentum)


class Message(NamedTuple):
    """What a client is sent.

    Attributes:
      ticket: what is shared of the model, under the client's mask.
      start: the initial model where tickets are rewound to it, which the client received first;
        else None.
    """

    ticket: Sparse
    start: PyTree


class ServerState(NamedTuple):
    """The shared model and where it came from.

    Attributes:
      params: the model's parameters; of those that stay at home, what clients start with.
      change: Δ, minus the last step of what is shared, or that step where it brakes.
      start: the parameters that tickets are rewound to; None where they are not.
    """

    params: PyTree
    change: PyTree
    start: PyTree


class Own(NamedTuple):
    """What a client keeps.

    Attributes:
      mask: one bit a weight.
      home: the parameters that stay at home.
    """

    mask: PyTree
    home: PyTree


class Ticket(NamedTuple):
    """What a client's update ends with.

    Attributes:
      params: its parameters, 0 where they are pruned.
      mask: which weights are left.
      accuracy: on its validation data, before it may have pruned.
      metrics: of both trainings.
    """

    params: PyTree
    mask: PyTree
    accuracy: jax.Array
    metrics: TrainingMetrics


class Scheme(NamedTuple):
    """What FedLTN and its first stage share.

    Attributes:
      weights: shapes of the weights that may be pruned.
      home: which parameters stay at home.
      update: `(params, mask, start, client, hyper, target, key) -> Ticket`: trains, prunes where
        that is due, and trains again; `start` is rewound to.
    """

    weights: PyTree
    home: Home
    update: Callable[..., Ticket]

    def first(self, server: ServerState) -> Own:
        """Starts a client's state."""
        return Own(masks.packed(masks.full(self.weights)), self.home.own(server.params))

    def personal(self, server: ServerState, own: Own, client: Any = None) -> Sparse:
        """Reads a client's model."""
        mask = masks.unpacked(own.mask, self.weights)
        params = self.home.joined(masks.applied(mask, server.params), own.home)
        return Sparse(params, mask)


@checked
def fed_ltn(
    model: Model,
    trainer: LocalTrainer,
    *,
    prune_rate: Decay = 0.1,
    target: Decay = 0.9,
    accuracy_threshold: ProperFraction = 0.6,
    strength: NonNegative = 0.01,
    mixing: Probability = 0.5,
    momentum: NonNegative = 0.5,
    looks_ahead: bool = True,
    home: Where = BATCH_NORM,
    rewinds: bool = False,
    prunes: When = "after",
    is_masked_mean: bool = True,
    distance: Distance = "norm",
    scope: Scope = "tensor",
    prunable: Where | None = None,
) -> FederatedAlgorithm:
    """Declares FedLTN.

    A client trains its ticket, drawn back to where it started. If it is then good enough on its
    validation data it prunes the smallest weights and trains what is left once more. It sends the
    ticket but for batch norm, which stays at home. The server mixes the mean of tickets with a
    look-ahead: `θ ← τ a + (1 − τ)(θ − λ Δ)`, `Δ ← −(new θ − old θ)`. Batch norm that is shared is
    averaged as it is.

    Guarantee: none; every upload is exact.

    Args:
      model: what is trained; it has an accuracy.
      trainer: local training, not a private one; pruned weights stay 0, whatever the optimiser.
      prune_rate: share of the weights alive that one pruning takes, in [0, 1).
      target: pruned share that is never exceeded, in [0, 1). It is reached as far as `prune`
        counts, unless fewer than 1 / prune_rate weights of a tensor are left before that, of which
        the rate takes none.
      accuracy_threshold: accuracy above which a client prunes, in (0, 1).
      strength: β of the pull back to the start, at least 0; the source gives no value.
      mixing: τ, in (0, 1]; 1 takes the mean of tickets as it is.
      momentum: λ, at least 0 and below 1 / (1 − τ), above which the recursion diverges; the source
        gives no value.
      looks_ahead: give Δ the sign of the listing, with which the server goes on in the direction of
        its last step; with that of the text, `Δ ← new θ − old θ`, it brakes, and λ must be below
        (1 + 1 / (1 − τ)) / 2.
      home: what stays at home, as for `fedbn`.
      rewinds: put the weights that are left after pruning back to the initial ones, as LotteryFL
        does, and what stays at home to what it was when the round began; what the tables call
        rewind.
      prunes: "after" training, as the listing does, or "before" it, as LotteryFL does: then the
        received ticket is tried, and there is one training.
      is_masked_mean: average each weight over the clients that keep it; the listing's plain mean,
        which shrinks what some have pruned, where it is False.
      distance: "norm" for `β ‖x − x₀‖`, as it is printed, or "squared" for `β/2 ‖x − x₀‖²`.
      scope: as for `prune`.
      prunable: the weights that may be pruned, as for `weights_of`.

    Returns:
      The algorithm; a client's state is its mask, one bit a weight, and what stays at home. It asks
      for validation data.

    Raises:
      ValueError: for a number out of its range, a private trainer, one with update transforms, a
        pattern that matches nothing, or a model that has nothing to prune or no accuracy.

    Source: Mugunthan 2022, chapter 4, algorithm 1 (FedLTN, ECCV 2022); `personalization` section 6.
    """
    given = locals()
    options = Pruning(**{name: given[name] for name in Pruning._fields})
    return on_tickets(model, trainer, options, scheme_of(model, trainer, options))


def on_tickets(
    model: Model, trainer: LocalTrainer, options: Pruning, scheme: Scheme
) -> FederatedAlgorithm:
    """Declares FedLTN of a scheme that `scheme_of` built from the same options."""
    numbers = {name: getattr(options, name) for name in RANGES}
    weights, at_home, looks_ahead = scheme.weights, scheme.home, options.looks_ahead
    check_momentum({**numbers, "looks_ahead": looks_ahead}, "")

    def init(key):
        params = model.init(key)
        change = trees.zeros_like(at_home.sent(params))
        return ServerState(params, change, params if options.rewinds else None)

    def broadcast(server, client):
        # The initial model, where tickets are rewound to it, is what was received first.
        mask = at_home.sent(masks.unpacked(client.known, weights))
        ticket = Sparse(at_home.sent(server.params), mask, is_known=True)
        return Message(ticket, Known(server.start))

    def client(message, own, client, hyper, key):
        start = at_home.joined(message.ticket.values, own.home)
        mask = masks.unpacked(own.mask, weights)
        # Batch norm is no part of a ticket, and goes back no further than this round.
        rewound = None if message.start is None else at_home.joined(message.start, own.home)
        found = scheme.update(start, mask, rewound, client, hyper, hyper.algorithm["target"], key)
        info = {"pruned_share": pruned_share(found.mask), "validation_accuracy": found.accuracy}
        kept = Own(masks.packed(found.mask), at_home.own(found.params))
        update = Sparse(at_home.sent(found.params), at_home.sent(found.mask))
        return ClientOutput(update, joins(client), kept, found.metrics, info)

    def server_step(server, aggregate, hyper, round, key):
        mixing, momentum = hyper.algorithm["mixing"], hyper.algorithm["momentum"]

        def mixed(kept, mean, old, change, is_norm):
            # A variance that goes on in the direction of its last step may end below 0.
            new = mean if is_norm else mixing * mean + (1 - mixing) * (old - momentum * change)
            return jnp.where(kept, new, old).astype(old.dtype)

        old = at_home.sent(server.params)
        is_norm = at_home.sent(kinds.batch_norm(server.params, model.buffer_keys))
        new = jax.tree.map(mixed, aggregate.mask, aggregate.values, old, server.change, is_norm)
        params = at_home.joined(new, server.params)
        change = trees.subtract(old, new) if looks_ahead else trees.subtract(new, old)
        return server._replace(params=params, change=change), {}

    aggregator = sparse_mean(is_masked=options.is_masked_mean)
    return FederatedAlgorithm(
        name="fed_ltn",
        init=init,
        broadcast=broadcast,
        client=client,
        aggregator=aggregator,
        server_step=server_step,
        training=training_of(trainer, reads_validation=True),
        numbers=Numbers(
            check=lambda numbers, prefix: check_momentum(
                {**numbers, "looks_ahead": looks_ahead}, prefix
            )
        ),
        views=Views(
            shared=field("params", is_whole=not any(at_home.is_own)), personal=scheme.personal
        ),
        client_state=ClientState(init=scheme.first, known=lambda own: own.mask),
    ).with_numbers(numbers, RANGES)


def scheme_of(model: Model, trainer: LocalTrainer, options: Pruning) -> Scheme:
    """Builds what a client does, for FedLTN and for the first stage of Jump-Start."""
    trainer.require_open(UNPROTECTED)
    trainer.require_untransformed(AS_TICKETS)
    require_accuracy(model)
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    at_home = kinds.home(shapes, options.home, model.buffer_keys)
    weights = weights_of(model, options.prunable, at_home)
    is_weight = jax.tree.map(lambda flag: not flag, model.is_buffer(shapes))

    def pull(strength):
        if options.distance == "squared":
            return proximal(strength)
        return drawn_back(strength, is_weight)

    def pruned(params, mask, client, accuracy, hyper, target):
        numbers = hyper.algorithm
        is_due = (
            (client.size > 0)
            & (accuracy > numbers["accuracy_threshold"])
            & (pruned_share(mask) < target)
        )
        rate = numbers["prune_rate"]
        left = jax.lax.cond(
            is_due, lambda: prune(mask, params, rate, target, scope=options.scope), lambda: mask
        )
        return left, masks.num_alive(left) < masks.num_alive(mask)

    def update(params, mask, start, client, hyper, target, key):
        train = partial(trainer.train, client=client)
        back = pull(hyper.algorithm["strength"])

        def after(left, has_pruned, trained):
            ticket = start if options.rewinds else trained
            return trees.where(has_pruned, masks.applied(left, ticket), trained)

        if options.prunes == "before":
            accuracy = accuracy_of(model, params, client.validation)
            left, has_pruned = pruned(params, mask, client, accuracy, hyper, target)
            params = after(left, has_pruned, params)
            result = train(params, config=hyper.local, key=key, gradient_transform=back, mask=left)
            return Ticket(masks.applied(left, result.params), left, accuracy, result.metrics)

        first = train(params, config=hyper.local, key=key, gradient_transform=back, mask=mask)
        accuracy = accuracy_of(model, first.params, client.validation)
        left, has_pruned = pruned(first.params, mask, client, accuracy, hyper, target)
        second = train(
            after(left, has_pruned, first.params),
            config=_where(has_pruned, hyper.local),
            key=fold(key, Purpose.PERSONAL),
            mask=left,
        )
        metrics = trees.add(first.metrics, second.metrics)
        moved = trees.l2_norm(trees.subtract(second.params, params))
        metrics = metrics._replace(update_norm=moved)
        return Ticket(masks.applied(left, second.params), left, accuracy, metrics)

    return Scheme(weights, at_home, update)


def _where(condition: jax.Array, config: Any) -> Any:
    """Takes as many steps as a configuration says, or none."""
    if config.num_steps is not None:
        return config._replace(num_steps=jnp.where(condition, config.num_steps, 0))
    return config._replace(num_epochs=jnp.where(condition, config.num_epochs, 0))
