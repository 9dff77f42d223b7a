"""Operator splitting: FedAvg, FedProx, FedSplit, FedPi, FedRP and two more as one scheme."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
from annotated_types import Ge, Le

from fedjax_dp.algorithms.base import (
    ClientOutput,
    ClientState,
    FederatedAlgorithm,
    FinishForAll,
    Hyper,
    Iterate,
    Needs,
    SharedModel,
    Views,
    training_of,
    weighted,
)
from fedjax_dp.clients.base import LocalTrainer, Objective
from fedjax_dp.clients.regularizers import (
    Quadratic,
    accelerated,
    factorise,
    proximal_move,
    towards,
    unread,
    watched,
)
from fedjax_dp.core import checks, trees
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.core.messages import Known
from fedjax_dp.core.ranges import (
    LARGEST,
    SMALLEST,
    Count,
    Fraction,
    NonNegative,
    Positive,
    fits_float32,
)
from fedjax_dp.core.trees import PyTree
from fedjax_dp.models.base import Model
from fedjax_dp.server.base import Summed
from fedjax_dp.server.mean import per_part, weighted_mean
from fedjax_dp.server.parts import public_divisor

# In [0, 2]: 1 is a projection or a proximal step, 2 the reflection at it.
Relaxation = Annotated[float, Ge(0), Le(2)]
_RANGES: Mapping[str, Any] = {
    "alpha": Relaxation,
    "beta": Relaxation,
    "gamma": Fraction,
    "step_size": Positive,
    "tolerance": NonNegative,
}
ClientMap = Literal["prox", "gradient"]
Solver = Literal["local", "exact"]
Form = Literal["decentralised", "centralised"]


class Average(NamedTuple):
    """The average of all models, weighted by step size, and the sum of step sizes."""

    mean: PyTree
    weight: jax.Array


class ServerState(NamedTuple):
    """The server's state."""

    params: PyTree  # z̄, the model.
    average: Average | None  # The ergodic average; None if absent.


class Closing(NamedTuple):
    """The message at the end of a centralised round: z̄, any clients."""

    params: PyTree
    any_client: jax.Array


@flax.struct.dataclass
class Own:
    """A client's point without z̄, and the share of z̄, in the decentralised form; float32."""

    # (1 − γ) u + γ (1 − β) z and γ β of the last participation; θ0 and 0 before the first.
    part: PyTree
    share: jax.Array


@flax.struct.dataclass
class Held:
    """A client's point u and its last z, θ0 before its first, at the server, float32."""

    point: PyTree
    answer: PyTree


@flax.struct.dataclass
class OwnState:
    """The state of one client; `quadratic` is its loss if proximal steps are exact."""

    of_point: Own | Held
    has_joined: jax.Array
    quadratic: Quadratic | None


class ProximalStep(NamedTuple):
    """The step of a client's Φ: its size, and how a proximal point is found.

    Attributes:
      step_size: η of the proximal step, 1 by default; FedProx's μ is 1/η. Local training as Φ has
        its learning rate instead.
      solver: the solver of proximal steps: local training, or exact for a model with a quadratic
        loss, whose decomposed Hessian is then in the client's state.
      tolerance: norm of the proximal objective's gradient at which local training stops early.
      smoothness: L of the clients' losses if known, else 0; steps of plain SGD must be below 2 / (L
        + 1/η) in every round.
      inner_memory: τ of Anderson acceleration of the steps to a proximal point, at each client; no
        acceleration by default. For plain SGD without noise; meant for whole batches.
    """

    step_size: Positive | None = None
    solver: Solver = "local"
    tolerance: NonNegative | None = None
    smoothness: NonNegative = 0.0
    inner_memory: Count | None = None


@checked
def splitting(
    model: Model,
    trainer: LocalTrainer,
    *,
    alpha: Relaxation = 1.0,
    beta: Relaxation = 1.0,
    gamma: Fraction = 1.0,
    client_map: ClientMap = "prox",
    step: ProximalStep = ProximalStep(),
    form: Form = "decentralised",
    is_averaged: bool = False,
    is_weighted: bool = False,
    dual_weight: float | None = None,
    private_mean: Summed | None = None,
) -> FederatedAlgorithm:
    """Declares operator splitting, of which many federated methods are special cases.

    Each client has a point u. A round is

        z_i = (1 − α) u_i + α Φ(u_i)        at the clients
        z̄   = Σ π_i z_i                     at the server; the model
        θ_i = (1 − β) z_i + β z̄
        u_i ← (1 − γ) u_i + γ θ_i

    with Φ the proximal step `argmin_x f_i(x) + ‖x − u_i‖² / (2 η)`, or local training, which is k
    gradient steps. f_i is the mean loss of the client's examples.

    | (α, β, γ) | prox | gradient |
    |---|---|---|
    | (1, 1, 1) | FedProx | FedAvg |
    | (2, 2, 1) | FedSplit | |
    | (2, 2, ½) | FedPi | |
    | (2, 1, 1) | FedRP | |
    | (1, 2, 1) | reflected FedProx | reflected FedAvg |

    z̄ is the mean over the clients that take part; an empty round changes nothing. All begin at the
    same θ0, and an absent client retains its last z_i, which is θ0 before its first round. In the
    centralised form its u_i moves in every round; in the decentralised form it moves once, by the
    newest z̄, when the client takes part again: a late client begins at (1 − γ β) θ0 + γ β z̄. The
    forms agree if all take part, or γ is 1 and β does not change.

    Guarantee: for records that of the trainer; all else is post-processing of updates. For clients
    that of the private mean, in the decentralised form: z̄ then moves by the noised mean of clipped
    `z_i − z̄`, also in a round without clients. A client's point is exact, never leaves it, and is
    not covered; nor is a personal model that is made of it.

    Args:
      model: the model to train; buffers, such as the statistics of batch norm, are only averaged.
      trainer: local training: Φ itself, or minimisation of the proximal objective from the server's
        model; a private one is record-level privacy inside Φ.
      alpha: α, the relaxation of a client's Φ, in [0, 2].
      beta: β, the relaxation of the step to the mean, in [0, 2].
      gamma: γ, the share of the new point in the next, in [0, 1].
      client_map: Φ, a proximal step or local training.
      step: the step of Φ.
      form: where u is stored: at each client, or all at the server.
      is_averaged: use the average of all models, weighted by step size, as the model.
      is_weighted: make π proportional to numbers of examples; else equal for clients with examples.
      dual_weight: the share of its dual variable, u_i − z̄, that a client adds to the model for a
        personal model: 1 gives the point u_i that its next round starts from, −1 the point on the
        other side, which at FedPi's limit is one step −η ∇f_i from the model. No personal models by
        default.
      private_mean: combines `z_i − z̄` if clients are protected, such as `gaussian_mean`.

    Returns:
      The algorithm. Its info holds `moved`, the distance that the model moved.

    Raises:
      ValueError: for a number out of its range, an inner step that is too long, also in a later
        round or run, an exact step of a model that is not quadratic or under a private trainer,
        accelerated inner steps with a trainer other than plain SGD without noise, a dual weight if
        all points equal the model, a private mean without a public divisor, or, with one, weights
        or the centralised form.

    Source: Malekmohammadi and others 2021 (operator splitting); Malekmohammadi 2025, equations 2.15
    to 2.17, with 2.12 and 2.13 for the reflected methods, section 2.4.4 for the dual variable, and
    2.4.5 for FedRP, which is not the random-projection method of the same name.
    """
    is_prox, is_exact = client_map == "prox", step.solver == "exact"
    step_size = 1.0 if is_prox and step.step_size is None else step.step_size
    numbers: dict[str, Any] = {"alpha": alpha, "beta": beta, "gamma": gamma}
    options = {"step_size": step_size, "tolerance": step.tolerance}
    numbers |= {option: value for option, value in options.items() if value is not None}
    _check_map(model, trainer, is_prox, step)
    has_rule = is_prox and not is_exact and trainer.is_plain_sgd
    check = partial(_check_inner_step, smoothness=step.smoothness) if has_rule else None
    if dual_weight is not None:
        _check_dual_weight(dual_weight, numbers)
    if not is_prox:
        mapped = _training(trainer)
    elif is_exact:
        mapped = _exact_prox
    else:
        mapped = _trained_prox(model, trainer, step.tolerance is not None, step.inner_memory)
    weight = 0.0 if dual_weight is None else dual_weight
    is_central, is_private = form == "centralised", private_mean is not None
    scheme = _Scheme(
        model, mapped, is_prox, is_exact, is_central, is_averaged, is_weighted, weight, is_private
    )
    weighted(is_weighted).check_weights(is_private)
    if private_mean is not None:
        public_divisor(private_mean)
        _check_form(form)
    aggregator = private_mean or per_part({"model": weighted_mean(), "any_client": weighted_mean()})
    return FederatedAlgorithm(
        name="splitting",
        init=scheme.init,
        broadcast=scheme.broadcast,
        client=scheme.client,
        aggregator=aggregator,
        server_step=scheme.server_step,
        training=training_of(trainer),
        views=Views(
            shared=SharedModel(_model_of, _with_model, is_start=not is_averaged),
            personal=None if dual_weight is None else scheme.personal,
        ),
        client_state=scheme.states(),
    ).with_numbers(numbers, {name: _RANGES[name] for name in numbers}, check)


def needs_of_splitting(options: Mapping[str, Any]) -> Needs:
    """Declares whether there are local steps, weights, and a server that protects clients."""
    steps: Any = "none" if options.get("solver") == "exact" else "any"
    return weighted(options["is_weighted"])._replace(
        steps=steps, check_clients=partial(_check_form, options["form"])
    )


def _check_form(form: Form) -> None:
    """Refuses the centralised form if clients are protected."""
    rule = (
        "be 'decentralised' if clients are protected: in the other form the server has the point "
        "of each client, without noise"
    )
    checks.require(form == "decentralised", "form", rule, form)


# `(newest model, u, quadratic, client, hyper, key) -> (Φ(u) − u, metrics)`.
_Map = Callable[..., tuple[PyTree, Any]]


@dataclass(frozen=True)
class _Scheme:
    """The functions of the declaration, given the options of `splitting`."""

    model: Model
    mapped: _Map
    is_prox: bool
    is_exact: bool
    is_central: bool
    is_averaged: bool
    is_weighted: bool
    dual_weight: float
    is_private: bool

    def init(self, key):
        params = self.model.init(key)
        average = Average(params, jnp.float32(0)) if self.is_averaged else None
        return ServerState(params, average)

    def states(self) -> ClientState:
        if not self.is_central:
            return ClientState(self.first)
        iterate = Iterate(
            lambda own: own.of_point.point,
            lambda own, point: own.replace(of_point=own.of_point.replace(point=point)),
            lambda sizes: sizes if self.is_weighted else np.asarray(sizes) > 0,
        )
        return ClientState(self.first, FinishForAll(self.closing, self.finish), iterate)

    def first(self, server):
        point = jax.tree.map(trees.at_least_float32, server.params)
        quadratic = unread(server.params) if self.is_exact else None
        of_point = Held(point, point) if self.is_central else Own(point, jnp.float32(0))
        return OwnState(of_point, jnp.bool_(False), quadratic)

    def broadcast(self, server, client):
        # In the centralised form all clients received the model at the end of the last round.
        return Known(server.params) if self.is_central else server.params

    def client(self, newest, own, client, hyper, key):
        alpha, beta, gamma = _relaxations(hyper)
        quadratic = own.quadratic
        if self.is_exact:
            quadratic = _read_once(self.model, own, client, newest)
        u = self.point_of(newest, own, gamma * beta)
        move, metrics = self.mapped(newest, u, quadratic, client, hyper, key)
        z = self.on_weights(lambda u, d: u + alpha * d, lambda u, d: u + d, u, move)
        # A client without examples has weight 0 and its state is unchanged.
        is_known = client.size > 0
        now: Own | Held
        if self.is_central:
            now = Held(own.of_point.point, z)
        else:
            part = jax.tree.map(lambda u, z: (1 - gamma) * u + gamma * (1 - beta) * z, u, z)
            now = Own(part, jnp.float32(gamma * beta))
        of_point = trees.where(is_known, now, own.of_point)
        own = OwnState(of_point, own.has_joined | is_known, quadratic)
        weight = client.size if self.is_weighted else is_known
        update = trees.subtract(z, newest)
        if self.is_private:
            update = trees.where(is_known, update, trees.zeros_like(update))
        else:
            update = {"model": update, "any_client": Known(jnp.float32(1))}
        return ClientOutput(update, jnp.asarray(weight, jnp.float32), own, metrics)

    def server_step(self, server, aggregate, hyper, round, key):
        # Whether a client took part is no secret only where none is protected.
        any_client, move = jnp.bool_(True), aggregate
        if not self.is_private:
            any_client, move = aggregate["any_client"] > 0, aggregate["model"]
        params = optax.apply_updates(server.params, move)
        average = server.average
        if average is not None:
            # Rates of clients change over rounds by one factor.
            rate = jnp.mean(hyper.local.learning_rate)
            step = hyper.algorithm["step_size"] if self.is_prox else rate
            step = jnp.where(any_client, step, 0.0)
            weight = average.weight + step
            share = step * trees.reciprocal(weight)
            mean = jax.tree.map(
                lambda m, p: m + (share * (p - m)).astype(m.dtype), average.mean, params
            )
            average = Average(mean, weight)
        moved = trees.l2_norm(move)
        return ServerState(params, average), {"moved": moved}

    def closing(self, server, aggregate):
        return Closing(server.params, aggregate["any_client"])

    def finish(self, message, own, hyper):
        _, beta, gamma = _relaxations(hyper)

        def of_weight(u, z, mean):
            theta = (1 - beta) * z + beta * mean
            return (1 - gamma) * u + gamma * theta

        held = own.of_point
        moved = self.on_weights(
            of_weight, lambda u, z, mean: u, held.point, held.answer, message.params
        )
        point = trees.where(message.any_client > 0, moved, held.point)
        return own.replace(of_point=held.replace(point=point))

    def personal(self, server, own, client):
        """Adds a share of the client's dual variable to the model; buffers are the model's."""
        # A client that has not joined has no dual variable.
        weight = jnp.where(own.has_joined, self.dual_weight, 0.0)
        return self.on_weights(
            lambda m, u, z: (m + weight * (u - z)).astype(m.dtype),
            lambda m, u, z: m,
            _model_of(server),
            self.point_of(server.params, own, 1.0),
            server.params,
        )

    def on_weights(self, of_weight, of_buffer, *parts):
        """Applies one function to all weights, another to buffers, which are only averaged."""

        def one(is_buffer, *leaves):
            return (of_buffer if is_buffer else of_weight)(*leaves)

        return jax.tree.map(one, self.model.is_buffer(parts[0]), *parts)

    def point_of(self, newest, own, late):
        """Computes u; `late` is the share of z̄ in it for a client that has not joined yet."""
        if self.is_central:
            return self.on_weights(lambda u, z: u, lambda u, z: z, own.of_point.point, newest)
        share = jnp.where(own.has_joined, own.of_point.share, late)
        rest = jnp.where(own.has_joined, 1.0, 1.0 - late)
        part = own.of_point.part
        return self.on_weights(lambda w, z: rest * w + share * z, lambda w, z: z, part, newest)


def _check_map(model: Model, trainer: LocalTrainer, is_prox: bool, step: ProximalStep) -> None:
    """Requires options that fit Φ and its solver."""

    def left_out(rule, *options):
        for option in options:
            value = getattr(step, option)
            checks.require(value is None, option, f"be left out {rule}", value)

    is_exact = step.solver == "exact"
    if not is_prox:
        rule = "if Φ is local training, whose step is its learning rate"
        left_out(rule, "step_size", "tolerance", "inner_memory")
        checks.require(not is_exact, "solver", "be 'local' if Φ is local training", step.solver)
    if is_exact:
        rule = "be one whose loss is quadratic in its parameters for an exact proximal step"
        checks.require(model.is_quadratic, "model", rule, model.name)
        rule = "be 'local' under a private trainer: an exact step reads records without noise"
        checks.require(not trainer.is_private, "solver", rule, "exact")
        left_out("for exact steps", "tolerance", "inner_memory")
    if step.inner_memory is not None:
        trainer.require_plain_sgd("accelerated steps reach points that plain ones would not")
        trainer.require_open("accelerated steps would amplify the noise of gradients")


def _training(trainer: LocalTrainer) -> _Map:
    """Makes Φ by local training from u."""

    def mapped(newest, u, quadratic, client, hyper, key):
        result = trainer.train(trees.cast_like(u, newest), client, hyper.local, key)
        return result.delta, result.metrics.of_changed_update()

    return mapped


def _exact_prox(newest, u, quadratic, client, hyper, key):
    """Moves by the exact proximal step of a quadratic loss, which is Φ."""
    return proximal_move(quadratic, u, hyper.algorithm["step_size"]), None


def _trained_prox(
    model: Model, trainer: LocalTrainer, stops_early: bool, inner_memory: int | None
) -> _Map:
    """Makes Φ by local training on the proximal objective, from the server's model."""

    def mapped(newest, u, quadratic, client, hyper, key):
        local, numbers = hyper.local, hyper.algorithm
        pull = towards(trees.cast_like(u, newest), 1 / numbers["step_size"])
        if stops_early:
            pull = watched(pull)
        if inner_memory is not None:
            is_buffer = model.is_buffer if model.buffer_keys else None
            pull = accelerated(pull, local.learning_rate, memory=inner_memory, is_buffer=is_buffer)

        def is_solved(state):
            return (state.inner if inner_memory else state).norm <= numbers["tolerance"]

        result = trainer.train(
            newest,
            client,
            local,
            key,
            gradient_transform=pull,
            objective=Objective(until=is_solved if stops_early else None),
        )
        moved = trees.subtract(trees.add(newest, result.delta), u)
        return moved, result.metrics.of_changed_update()

    return mapped


def _check_inner_step(hyper: Hyper, *, smoothness: float) -> None:
    """Requires inner steps of plain SGD in a round that do not diverge."""
    rates, step_size = hyper.local.learning_rate, hyper.algorithm["step_size"]
    if checks.is_traced(rates) or checks.is_traced(step_size):
        return
    bounds = 2 / (smoothness + 1 / np.asarray(step_size, np.float64))
    pairs = zip(*map(np.ravel, np.broadcast_arrays(rates, bounds)), strict=True)
    for rate, bound in pairs:
        rule = f"be below 2 / (L + 1/step_size) = {bound:g} in an inner step, else it diverges"
        checks.require(rate < bound, "learning_rate", rule, float(rate))


def _relaxations(hyper: Hyper) -> list[Any]:
    """Reads α, β and γ."""
    return [hyper.algorithm[name] for name in ("alpha", "beta", "gamma")]


def _model_of(server: ServerState) -> PyTree:
    return server.params if server.average is None else server.average.mean


def _with_model(server: ServerState, params: PyTree) -> ServerState:
    average = None if server.average is None else server.average._replace(mean=params)
    return server._replace(params=params, average=average)


def _read_once(model: Model, own: OwnState, client: Any, params: PyTree) -> Quadratic:
    """Reads a client's loss from its records in its first round."""
    assert own.quadratic is not None
    is_new = ~own.quadratic.is_ready
    # Clients under vmap read together, so that none of them reads again.
    reads = client.widest(is_new.astype(jnp.int32)) > 0
    factors = jax.lax.cond(reads, lambda: factorise(model, client, params), lambda: own.quadratic)
    return trees.where(is_new, factors, own.quadratic)


def _check_dual_weight(weight: float, numbers: Mapping[str, Any]) -> None:
    rule = f"be 0 or of a size that float32 can represent, {SMALLEST:.2g} to {LARGEST:.2g}"
    checks.require(fits_float32(weight), "dual_weight", rule, weight)
    both = [numbers[name] for name in ("beta", "gamma")]
    is_model = not any(checks.is_traced(n) or np.any(np.not_equal(n, 1)) for n in both)
    rule = (
        "be left out if beta and gamma are 1: the point of each client is the model; "
        "one that a schedule moves to 1 begins with another number"
    )
    checks.require(not is_model, "dual_weight", rule, weight)


def fedsplit(
    model: Model,
    trainer: LocalTrainer,
    *,
    step: ProximalStep = ProximalStep(),
    form: Form = "decentralised",
    is_averaged: bool = False,
    is_weighted: bool = False,
    dual_weight: float | None = None,
    private_mean: Summed | None = None,
) -> FederatedAlgorithm:
    """Declares FedSplit: reflections at the proximal steps of clients, then at their mean.

    (α, β, γ) = (2, 2, 1) of `splitting`. It reaches the minimum of the mean loss with a constant
    step, if that loss is strongly convex. With a step that changes over rounds it has no guarantee.

    Guarantee: as `splitting`.

    Args:
      model: the model to train; buffers are only averaged.
      trainer: local training, which minimises the proximal objective.
      step: the proximal step, with the local training that approximates it.
      form: where u is stored: at each client, or all at the server.
      is_averaged: use the average of all models, weighted by step size, as the model.
      is_weighted: weight clients by number of examples instead of equally.
      dual_weight: share of u_i − z̄ that a client adds for its personal model, see `splitting`.
      private_mean: combines updates if clients are protected, see `splitting`.

    Returns:
      The algorithm; it raises the errors of `splitting`.

    Source: Pathak and Wainwright 2020 (FedSplit); Malekmohammadi 2025, section 2.4.3.
    """
    scheme = splitting(
        model,
        trainer,
        alpha=2.0,
        beta=2.0,
        step=step,
        form=form,
        is_averaged=is_averaged,
        is_weighted=is_weighted,
        dual_weight=dual_weight,
        private_mean=private_mean,
    )
    return scheme._replace(name="fedsplit")


def fedpi(
    model: Model,
    trainer: LocalTrainer,
    *,
    step: ProximalStep = ProximalStep(),
    form: Form = "decentralised",
    is_averaged: bool = False,
    is_weighted: bool = False,
    dual_weight: float | None = None,
    private_mean: Summed | None = None,
) -> FederatedAlgorithm:
    """Declares FedPi: half of FedSplit's step, which is ADMM with a dual variable for each client.

    (α, β, γ) = (2, 2, ½) of `splitting`. It reaches the minimum of the mean loss with a constant
    step, if losses are convex.

    Guarantee: as `splitting`.

    Args:
      model: the model to train; buffers are only averaged.
      trainer: local training, which minimises the proximal objective.
      step: the proximal step, with the local training that approximates it.
      form: where u is stored: at each client, or all at the server.
      is_averaged: use the average of all models, weighted by step size, as the model.
      is_weighted: weight clients by number of examples instead of equally.
      dual_weight: share of u_i − z̄ that a client adds for its personal model, see `splitting`.
      private_mean: combines updates if clients are protected, see `splitting`.

    Returns:
      The algorithm; it raises the errors of `splitting`.

    Source: Malekmohammadi and others 2021 (operator splitting); Malekmohammadi 2025, section 2.4.4.
    """
    scheme = splitting(
        model,
        trainer,
        alpha=2.0,
        beta=2.0,
        gamma=0.5,
        step=step,
        form=form,
        is_averaged=is_averaged,
        is_weighted=is_weighted,
        dual_weight=dual_weight,
        private_mean=private_mean,
    )
    return scheme._replace(name="fedpi")


def fedrp(
    model: Model,
    trainer: LocalTrainer,
    *,
    step: ProximalStep = ProximalStep(),
    form: Form = "decentralised",
    is_averaged: bool = False,
    is_weighted: bool = False,
    private_mean: Summed | None = None,
) -> FederatedAlgorithm:
    """Declares FedRP: reflections at the proximal steps of clients, then their mean.

    (α, β, γ) = (2, 1, 1) of `splitting`. It reaches the point of FedProx in half the rounds; it is
    not the random-projection method of the same name.

    Guarantee: as `splitting`.

    Args:
      model: the model to train; buffers are only averaged.
      trainer: local training, which minimises the proximal objective.
      step: the proximal step, with the local training that approximates it.
      form: where u is stored: at each client, or all at the server.
      is_averaged: use the average of all models, weighted by step size, as the model.
      is_weighted: weight clients by number of examples instead of equally.
      private_mean: combines updates if clients are protected, see `splitting`.

    Returns:
      The algorithm; it raises the errors of `splitting`.

    Source: Malekmohammadi and others 2021 (operator splitting); Malekmohammadi 2025, section 2.4.5.
    """
    scheme = splitting(
        model,
        trainer,
        alpha=2.0,
        step=step,
        form=form,
        is_averaged=is_averaged,
        is_weighted=is_weighted,
        private_mean=private_mean,
    )
    return scheme._replace(name="fedrp")


def reflected_fedavg(
    model: Model,
    trainer: LocalTrainer,
    *,
    form: Form = "decentralised",
    is_averaged: bool = False,
    is_weighted: bool = False,
    dual_weight: float | None = None,
    private_mean: Summed | None = None,
) -> FederatedAlgorithm:
    """Declares FedAvg with a reflection at the mean of the clients' models instead of that mean.

    (α, β, γ) = (1, 2, 1) of `splitting` on local training. With one gradient step it reaches the
    point of FedProx with η replaced by −η/2.

    Guarantee: as `splitting`.

    Args:
      model: the model to train; buffers are only averaged.
      trainer: local training, Φ itself.
      form: where u is stored: at each client, or all at the server.
      is_averaged: use the average of all models, weighted by step size, as the model.
      is_weighted: weight clients by number of examples instead of equally.
      dual_weight: share of u_i − z̄ that a client adds for its personal model, see `splitting`.
      private_mean: combines updates if clients are protected, see `splitting`.

    Returns:
      The algorithm; it raises the errors of `splitting`.

    Source: Malekmohammadi and others 2021 (operator splitting); Malekmohammadi 2025, equation 2.12.
    """
    scheme = splitting(
        model,
        trainer,
        beta=2.0,
        client_map="gradient",
        form=form,
        is_averaged=is_averaged,
        is_weighted=is_weighted,
        dual_weight=dual_weight,
        private_mean=private_mean,
    )
    return scheme._replace(name="reflected_fedavg")


def reflected_fedprox(
    model: Model,
    trainer: LocalTrainer,
    *,
    step: ProximalStep = ProximalStep(),
    form: Form = "decentralised",
    is_averaged: bool = False,
    is_weighted: bool = False,
    dual_weight: float | None = None,
    private_mean: Summed | None = None,
) -> FederatedAlgorithm:
    """Declares FedProx with a reflection at the mean of the clients' models instead of that mean.

    (α, β, γ) = (1, 2, 1) of `splitting`. It reaches the point of FedProx with η halved.

    Guarantee: as `splitting`.

    Args:
      model: the model to train; buffers are only averaged.
      trainer: local training, which minimises the proximal objective.
      step: the proximal step, with the local training that approximates it.
      form: where u is stored: at each client, or all at the server.
      is_averaged: use the average of all models, weighted by step size, as the model.
      is_weighted: weight clients by number of examples instead of equally.
      dual_weight: share of u_i − z̄ that a client adds for its personal model, see `splitting`.
      private_mean: combines updates if clients are protected, see `splitting`.

    Returns:
      The algorithm; it raises the errors of `splitting`.

    Source: Malekmohammadi and others 2021 (operator splitting); Malekmohammadi 2025, equation 2.13.
    """
    scheme = splitting(
        model,
        trainer,
        beta=2.0,
        step=step,
        form=form,
        is_averaged=is_averaged,
        is_weighted=is_weighted,
        dual_weight=dual_weight,
        private_mean=private_mean,
    )
    return scheme._replace(name="reflected_fedprox")
