"""FedLTN: tickets by pruning after training, local batch norm, a server with momentum."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_type_hints

import jax
import jax.numpy as jnp
import numpy as np
from chex import PRNGKey

from fedjax_dp.algorithms.base import (
    ClientOutput,
    ClientState,
    FederatedAlgorithm,
    Hyper,
    Needs,
    Views,
    field,
    training_of,
)
from fedjax_dp.algorithms.lottery_fl import AS_TICKETS, UNPROTECTED, joins
from fedjax_dp.clients.base import LocalConfig, LocalTrainer, Objective, TrainingMetrics
from fedjax_dp.clients.client_data import ClientData
from fedjax_dp.clients.pruning import Scope, prune, pruned_share, weights_of
from fedjax_dp.clients.regularizers import proximal, proximal_norm
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
from fedjax_dp.server.mean import sparse_mean

Distance = Literal["norm", "squared"]
When = Literal["after", "before"]


class Tickets(NamedTuple):
    """How clients find and train tickets, and how the server mixes them.

    Attributes:
      prune_rate: share of the remaining weights that one pruning removes, in [0, 1).
      target: pruned share that is never exceeded, in [0, 1). It is reached up to rounding in
        `prune`, unless fewer than 1 / prune_rate weights of a tensor are left before that, of which
        the rate removes none.
      accuracy_threshold: accuracy above which a client prunes, in (0, 1).
      strength: β of the pull towards the start, at least 0; the source gives no value.
      mixing: τ, in (0, 1]; 1 is the plain mean of tickets.
      momentum: λ, at least 0 and below 1 / (1 − τ), above which the recursion diverges; the source
        gives no value.
      looks_ahead: whether Δ has the sign of the listing, so that the server continues in the
        direction of its last step; with that of the text, `Δ ← new θ − old θ`, it brakes, and λ
        must be below (1 + 1 / (1 − τ)) / 2.
      home: the local parameters, as for `fedbn`.
      rewinds: reset the weights that remain after pruning to their initial values, as LotteryFL
        does, and local parameters to those of the start of the round; "rewind" in the paper's
        tables.
      prunes: "after" training, as the listing does, or "before" it, as LotteryFL does, which
        evaluates the received ticket and trains once.
      is_masked_mean: average each weight over the clients that keep it; False for the listing's
        plain mean, which shrinks the weights that some have pruned.
      distance: "norm" for `β ‖x − x₀‖`, as printed, or "squared" for `β/2 ‖x − x₀‖²`.
      scope: as for `prune`.
      prunable: the weights that may be pruned, as for `weights_of`.
    """

    prune_rate: Decay = 0.1
    target: Decay = 0.9
    accuracy_threshold: ProperFraction = 0.6
    strength: NonNegative = 0.01
    mixing: Probability = 0.5
    momentum: NonNegative = 0.5
    looks_ahead: bool = True
    home: Where = BATCH_NORM
    rewinds: bool = False
    prunes: When = "after"
    is_masked_mean: bool = True
    distance: Distance = "norm"
    scope: Scope = "tensor"
    prunable: Where | None = None


RANGES = {
    name: kind
    for name, kind in get_type_hints(Tickets, include_extras=True).items()
    if isinstance(Tickets._field_defaults[name], float)
}


def check_momentum(options: Mapping[str, Any]) -> None:
    """Requires momentum with which the server converges under constant tickets."""
    mixing, momentum = options["mixing"], options["momentum"]
    if any(checks.is_traced(x) for x in (mixing, momentum)):
        return
    kept = 1 - np.asarray(mixing, np.float64)
    # Of z² − (1 − τ)(1 + λ) z + (1 − τ) λ, and of the same with −λ, roots lie within the circle.
    reach, bound = np.asarray(momentum) * kept, "1 / (1 - mixing)"
    if not options["looks_ahead"]:
        reach, bound = (2 * np.asarray(momentum) - 1) * kept, "(1 + 1 / (1 - mixing)) / 2"
    rule = f"be below {bound}, where mixing is {mixing}"
    checks.require(bool(np.all(reach < 1)), "momentum", rule, momentum)


def needs_of_tickets(options: Mapping[str, Any]) -> Needs:
    """Refuses momentum under which the server's recursion diverges."""
    check_momentum(options)
    return Needs()


class Message(NamedTuple):
    """The shared model under the client's mask, and the initial one, to rewind to, or None."""

    ticket: Sparse
    start: PyTree


class ServerState(NamedTuple):
    """The shared model and its last step."""

    params: PyTree  # The model's parameters; for local ones, their initial values.
    change: PyTree  # Δ, minus the last step of shared parameters, or that step if it brakes.
    start: PyTree  # The parameters that tickets are rewound to; None without rewinding.


class Own(NamedTuple):
    """The state of a client: its mask, one bit per weight, and its local parameters."""

    mask: PyTree
    home: PyTree


class Ticket(NamedTuple):
    """The result of a client's update; `accuracy` determined whether to prune."""

    params: PyTree
    mask: PyTree
    accuracy: jax.Array
    metrics: TrainingMetrics


@dataclass(frozen=True)
class Scheme:
    """A client's work in FedLTN and in the first stage of Jump-Start."""

    model: Model
    trainer: LocalTrainer
    options: Tickets
    home: Home  # Which parameters are local.
    weights: PyTree  # Shapes of the weights that may be pruned.
    is_weight: PyTree  # Which parameters are not buffers.

    def first(self, server: ServerState) -> Own:
        """Makes a client's first state."""
        return Own(masks.packed(masks.full(self.weights)), self.home.own(server.params))

    def personal(self, server: ServerState, own: Own, client: Any = None) -> Sparse:
        """Reads a client's model."""
        mask = masks.unpacked(own.mask, self.weights)
        params = self.home.joined(masks.applied(mask, server.params), own.home)
        return Sparse(params, mask)

    def update(
        self,
        own: Own,
        params: PyTree,
        start: PyTree,
        client: Any,
        hyper: Hyper,
        target: Any,
        key: PRNGKey,
    ) -> Ticket:
        """Trains, prunes if due, and trains the rest again, rewound to `start` if there is one."""
        mask, strength = masks.unpacked(own.mask, self.weights), hyper.algorithm["strength"]
        squared = self.options.distance == "squared"
        pull = proximal(strength) if squared else proximal_norm(strength, self.is_weight)

        def train(params, config, key, mask, pull=None):
            return self.trainer.train(
                params, client, config, key, gradient_transform=pull, objective=Objective(mask=mask)
            )

        # Batch norm is no part of a ticket, and is rewound to the start of this round.
        rewound = None if start is None else self.home.joined(start, params)

        def pruned(params):
            """Prunes if due, and rewinds the remaining weights."""
            assert client.validation is not None  # Held by `reads_validation`.
            accuracy = accuracy_of(self.model, params, client.validation)
            left = self._pruned(params, mask, client, accuracy, hyper, target)
            has_pruned = masks.num_alive(left) < masks.num_alive(mask)
            ticket = params if rewound is None else rewound
            params = trees.where(has_pruned, masks.applied(left, ticket), params)
            return params, left, has_pruned, accuracy

        if self.options.prunes == "before":
            params, left, _, accuracy = pruned(params)
            result = train(params, hyper.local, key, left, pull)
            return Ticket(masks.applied(left, result.params), left, accuracy, result.metrics)

        first = train(params, hyper.local, key, mask, pull)
        ticket, left, has_pruned, accuracy = pruned(first.params)
        config = _where(has_pruned, hyper.local)
        second = train(ticket, config, fold(key, Purpose.PERSONAL), left)
        metrics = trees.add(first.metrics, second.metrics)
        moved = trees.l2_norm(trees.subtract(second.params, params))
        metrics = metrics._replace(update_norm=moved)
        return Ticket(masks.applied(left, second.params), left, accuracy, metrics)

    def _pruned(self, params, mask, client, accuracy, hyper, target):
        """Prunes a client that is accurate enough and has not reached the target."""
        is_due = (
            (client.size > 0)
            & (accuracy > hyper.algorithm["accuracy_threshold"])
            & (pruned_share(mask) < target)
        )
        rate, scope = hyper.algorithm["prune_rate"], self.options.scope
        return jax.lax.cond(
            is_due, lambda: prune(mask, params, rate, target, scope=scope), lambda: mask
        )

    def output(self, ticket: Ticket, client: ClientData) -> ClientOutput:
        """Sends a ticket except its local parameters."""
        own = Own(masks.packed(ticket.mask), self.home.own(ticket.params))
        info = {"pruned_share": pruned_share(ticket.mask), "validation_accuracy": ticket.accuracy}
        update = Sparse(self.home.sent(ticket.params), self.home.sent(ticket.mask))
        return ClientOutput(update, joins(client), own, ticket.metrics, info)


@checked
def fed_ltn(
    model: Model, trainer: LocalTrainer, *, tickets: Tickets = Tickets()
) -> FederatedAlgorithm:
    """Declares FedLTN: tickets pruned after training, a server with momentum.

    A client trains its ticket with a pull towards its start. If it is then accurate enough on the
    validation data, the client prunes the smallest weights and trains the rest once more. It sends
    the ticket without batch norm, which stays local. The server mixes the mean of tickets with a
    look-ahead: `θ ← τ a + (1 − τ)(θ − λ Δ)`, `Δ ← −(new θ − old θ)`. Shared batch norm is plainly
    averaged.

    Guarantee: none; every upload is exact.

    Args:
      model: the model to train, a model with accuracy.
      trainer: local training, not a private one; pruned weights stay 0 under any optimiser.
      tickets: how clients find and train tickets, and how the server mixes them.

    Returns:
      The algorithm; a client's state is its mask, one bit per weight, and its local parameters. It
      needs validation data.

    Raises:
      ValueError: for a number out of its range, a private trainer, one with update transforms, a
        pattern that matches nothing, or a model without prunable weights or without accuracy.

    Source: Mugunthan 2022 (FedLTN), chapter 4, algorithm 1.
    """
    return on_tickets(scheme_of(model, trainer, tickets))


def scheme_of(model: Model, trainer: LocalTrainer, options: Tickets) -> Scheme:
    """Checks model and trainer, and finds which parameters are prunable and which are local."""
    trainer.require_open(UNPROTECTED)
    trainer.require_untransformed(AS_TICKETS)
    require_accuracy(model)
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    home = kinds.home(shapes, options.home, model.buffer_keys)
    is_weight = jax.tree.map(lambda flag: not flag, model.is_buffer(shapes))
    weights = weights_of(model, options.prunable, home)
    return Scheme(model, trainer, options, home, weights, is_weight)


def on_tickets(scheme: Scheme) -> FederatedAlgorithm:
    """Declares FedLTN for a scheme."""
    model, options, home = scheme.model, scheme.options, scheme.home
    looks_ahead = options.looks_ahead

    def init(key):
        params = model.init(key)
        change = trees.zeros_like(home.sent(params))
        return ServerState(params, change, params if options.rewinds else None)

    def broadcast(server, client):
        # If tickets are rewound to the initial model, it was received first.
        mask = home.sent(masks.unpacked(client.known, scheme.weights))
        ticket = Sparse(home.sent(server.params), mask, is_known=True)
        return Message(ticket, Known(server.start))

    def client(message, own, client, hyper, key):
        params, target = home.joined(message.ticket.values, own.home), hyper.algorithm["target"]
        ticket = scheme.update(own, params, message.start, client, hyper, target, key)
        return scheme.output(ticket, client)

    def server_step(server, aggregate, hyper, round, key):
        mixing, momentum = hyper.algorithm["mixing"], hyper.algorithm["momentum"]

        def mixed(kept, mean, old, change, is_norm):
            # A variance that continues in the direction of its last step may become negative.
            new = mean if is_norm else mixing * mean + (1 - mixing) * (old - momentum * change)
            return jnp.where(kept, new, old).astype(old.dtype)

        old = home.sent(server.params)
        is_norm = home.sent(kinds.batch_norm(server.params, model.buffer_keys))
        new = jax.tree.map(mixed, aggregate.mask, aggregate.values, old, server.change, is_norm)
        change = trees.subtract(old, new) if looks_ahead else trees.subtract(new, old)
        return server._replace(params=home.joined(new, server.params), change=change), {}

    return FederatedAlgorithm(
        name="fed_ltn",
        init=init,
        broadcast=broadcast,
        client=client,
        aggregator=sparse_mean(is_masked=options.is_masked_mean),
        server_step=server_step,
        training=training_of(scheme.trainer, reads_validation=True),
        views=Views(
            shared=field("params", is_whole=not any(home.is_own)), personal=scheme.personal
        ),
        client_state=ClientState(init=scheme.first, known=lambda own: own.mask),
    ).with_numbers(
        {name: getattr(options, name) for name in RANGES},
        RANGES,
        lambda hyper: check_momentum({**hyper.algorithm, "looks_ahead": looks_ahead}),
    )


def _where(condition: jax.Array, config: LocalConfig) -> LocalConfig:
    """Sets the number of steps to 0 unless a condition holds."""
    if config.num_steps is not None:
        return config._replace(num_steps=jnp.where(condition, config.num_steps, 0))
    return config._replace(num_epochs=jnp.where(condition, config.num_epochs, 0))
