"""Each workload's round as one writes it in plain JAX: `vmap` over clients, `scan` over steps.

The yardstick for compiled rounds: the same network, data, batches, clipping and noise, with none of
the package's lowering, records, checks of finite updates or compensated sums. Native convolutions,
default precision, and for records `vmap(grad)`; "exact" computes these gradients with full
products, as the package does. Cohorts have their expected size, without the room for more that a
Poisson sampler needs.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_dp.core.products import Arithmetic, computed_with
from fedjax_dp.experiment.studies.workloads import Prepared, Workload

_RATE = 0.1
# The defaults of the package's methods.
_GMA_THRESHOLD, _PROPFAIR_BASELINE, _PROPFAIR_MARGIN = 0.4, 5.0, 0.2
_TILT, _Q, _DITTO_STRENGTH, _ADAM_DECAY = 0.1, 1.0, 1.0, (0.9, 0.99)
_NOISE_MULTIPLIER = 1.0
_LOCAL_LAYER = "Dense_1"
# The parts of a cohort that are computed side by side; the fastest counts.
_PARTS = (1, 4, 16)


class ByHand(NamedTuple):
    """Rounds in plain JAX.

    Attributes:
      rounds: `(state, examples, key, num_rounds) -> state`.
      start: `params -> state`.
      arguments: shapes of its arguments.
      steps: the local steps of a client, in all that it trains.
      chunks: the passes over clients in a round.
      side_by_side: the clients of one.
    """

    rounds: Callable[..., Any]
    start: Callable[..., Any]
    arguments: tuple[Any, ...]
    steps: float
    chunks: float
    side_by_side: int


class _Method(NamedTuple):
    """What differs between algorithms.

    Attributes:
      start: `(params, workload) -> server`.
      client: `(tools, server, row, data, key) -> update, row`; a row is a client's state.
      step: `(server, mean, workload) -> server`, of the mean update of the cohort.
      row: `params -> row`; None without client state.
    """

    start: Callable[[Any, Workload], Any]
    client: Callable[..., tuple[Any, Any]]
    step: Callable[..., Any]
    row: Callable[[Any], Any] | None = None


class _Tools(NamedTuple):
    """What clients compute with: `train(start, data, key, ...) -> params`, and the mean loss."""

    train: Callable[..., Any]
    loss: Callable[..., jax.Array]


def has_method(workload: Workload) -> bool:
    """Whether the round of a workload is written here: not masks, clocks and acceleration."""
    is_wrapped = workload.secure is not None or workload.is_timed or workload.memory is not None
    return not is_wrapped and _name(workload) in _METHODS


def widths(workload: Workload) -> list[int]:
    """Lists how many clients one may compute side by side: the cohort, and some parts of it."""
    cohort = workload.cohort or workload.num_clients
    divisors = [n for n in range(1, cohort + 1) if cohort % n == 0]
    found = {max((n for n in divisors if n * parts <= cohort), default=1) for parts in _PARTS}
    return sorted(found, reverse=True)


def rounds_by_hand(
    workload: Workload, parts: Prepared, side_by_side: int, *, is_exact: bool = False
) -> ByHand:
    """Writes the rounds of a workload that `has_method`.

    Args:
      workload: the workload, whose clients are of one size.
      parts: its parts.
      side_by_side: the clients of one pass, a divisor of the cohort.
      is_exact: computes gradients of records with full products.
    """
    method, population = _METHODS[_name(workload)], workload.num_clients
    size, batch = workload.examples_per_client, workload.batch_size
    cohort = workload.cohort or population
    num_steps = workload.num_steps or math.ceil(size / batch)
    chunks = cohort // side_by_side
    tools = _tools(workload, parts, num_steps, is_exact)

    def draw(key):
        if cohort == population:
            return jnp.arange(population)
        return jax.random.choice(key, population, (cohort,), replace=False)

    def client(server, row, data, key):
        update, row = method.client(tools, server, row, data, key)
        is_private = workload.unit == "client"
        return (_clipped(update, workload.clip_norm) if is_private else update), row

    def chunk(server, given, drawn, keys):
        examples, own = given if cohort == population else _taken(given, drawn)
        in_axes = None, None if own is None else 0, 0, 0
        updates, own = jax.vmap(client, in_axes)(server, own, examples, keys)
        return jax.tree.map(lambda x: jnp.sum(x, 0), updates), own

    def one_round(state, examples, key):
        server, rows = state
        of_draw, of_training, of_noise = jax.random.split(key, 3)
        given, slots = (examples, rows), (draw(of_draw), jax.random.split(of_training, cohort))
        if chunks == 1:
            total, own = chunk(server, given, *slots)
        elif cohort == population:
            total, own = _in_chunks(partial(chunk, server), (given, *slots), side_by_side)
        else:
            total, own = _in_chunks(partial(chunk, server, given), slots, side_by_side)
        if rows is not None:
            rows = own if cohort == population else _put(rows, slots[0], own)
        if workload.unit == "client":
            total = _noisy(of_noise, total, workload.clip_norm)
        return method.step(server, _scaled(total, 1 / cohort), workload), rows

    def rounds(state, examples, key, num_rounds):
        def body(i, state):
            with jax.named_scope("round"):
                return one_round(state, examples, jax.random.fold_in(key, i))

        return jax.lax.fori_loop(0, num_rounds, body, state)

    def start(params):
        server = method.start(params, workload)
        if method.row is None:
            return server, None
        own = method.row(params)
        return server, jax.tree.map(lambda x: jnp.stack([x] * population), own)

    examples = {
        name: jax.ShapeDtypeStruct(
            (population, size, *array.shape[1:]), jax.dtypes.canonicalize_dtype(array.dtype)
        )
        for name, array in parts.data.examples.items()
    }
    key = jax.eval_shape(jax.random.key, 0)
    state = jax.eval_shape(lambda key: start(parts.model.init(key)), key)
    arguments = state, examples, key, jax.ShapeDtypeStruct((), jnp.int32)
    trainings = 2 if method.client is _ditto_client else 1
    steps = float(trainings * num_steps)
    return ByHand(rounds, start, arguments, steps, float(chunks), side_by_side)


def _tools(workload: Workload, parts: Prepared, num_steps: int, is_exact: bool) -> _Tools:
    model, size = parts.model, workload.examples_per_client
    batch = min(workload.batch_size, size)

    def loss(params, examples, key=None):
        with computed_with(Arithmetic(convolutions="native")):
            losses = model.losses(params, examples, is_training=key is not None, key=key)[0]
        mean = jnp.mean(losses)
        if key is None or workload.algorithm != "propfair":
            return mean
        last = _PROPFAIR_BASELINE - _PROPFAIR_MARGIN
        inside = -jnp.log1p(-jnp.minimum(mean, last) / _PROPFAIR_BASELINE)
        return inside + jnp.maximum(mean - last, 0) / _PROPFAIR_MARGIN

    def gradient(params, examples, key):
        if workload.unit != "record":
            return jax.grad(loss)(params, examples, key)
        noise_key, loss_key = jax.random.split(key)

        def one(example):
            alone = jax.tree.map(lambda x: x[None], example)
            return _clipped(jax.grad(loss)(params, alone, loss_key), workload.clip_norm)

        with jax.default_matmul_precision("highest" if is_exact else "default"):
            total = jax.tree.map(lambda x: jnp.sum(x, 0), jax.vmap(one)(examples))
        return _scaled(_noisy(noise_key, total, workload.clip_norm), 1 / batch)

    def train(start, data, key, *, pull=None):
        """Trains from `start`; `pull` adds a term to each gradient."""
        order_key, step_key = jax.random.split(key)
        order = jax.random.permutation(order_key, size) if workload.num_steps is None else None

        def rows(i, key):
            if order is None:
                return jax.random.choice(key, size, (batch,), replace=False)
            return jax.lax.dynamic_slice_in_dim(order, i * batch, batch)

        @partial(jax.named_call, name="local_step")
        def step(now, i):
            draw_key, key = jax.random.split(jax.random.fold_in(step_key, i))
            read = data if batch == size else _taken(data, rows(i, draw_key))
            moved = gradient(now, read, key)
            if pull is not None:
                moved = _added(moved, pull(now))
            return _added(now, moved, -_RATE), None

        return jax.lax.scan(step, start, jnp.arange(num_steps))[0]

    return _Tools(train, loss)


def _in_chunks(one, slots, side_by_side):
    """Adds up chunks of clients."""
    chunks = jax.tree.map(lambda x: x.reshape(-1, side_by_side, *x.shape[1:]), slots)

    @partial(jax.named_call, name="chunk")
    def body(total, slots):
        found, own = one(*slots)
        return _added(total, found), own

    shapes = jax.eval_shape(one, *jax.tree.map(lambda x: x[0], chunks))[0]
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    total, own = jax.lax.scan(body, zeros, chunks)
    return total, jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), own)


def _taken(tree, rows):
    return jax.tree.map(lambda x: x[rows], tree)


def _put(tree, rows, values):
    return jax.tree.map(lambda x, new: x.at[rows].set(new), tree, values)


def _scaled(tree, factor):
    return jax.tree.map(lambda x: x * factor, tree)


def _added(tree, other, factor=1.0):
    return jax.tree.map(lambda x, y: x + factor * y, tree, other)


def _clipped(tree, bound):
    norm = jnp.sqrt(sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(tree)))
    return _scaled(tree, jnp.minimum(1, bound / norm))


def _noisy(key, tree, clip_norm):
    leaves, structure = jax.tree.flatten(tree)
    keys, scale = jax.random.split(key, len(leaves)), _NOISE_MULTIPLIER * clip_norm
    made = [x + scale * jax.random.normal(k, x.shape) for k, x in zip(keys, leaves, strict=True)]
    return jax.tree.unflatten(structure, made)


def _same(params, workload=None):
    return params


def _averaged(tools, server, row, data, key):
    return _added(tools.train(server, data, key), server, -1.0), row


def _stepped(server, mean, workload):
    return _added(server, mean)


def _gma_client(tools, server, row, data, key):
    delta, row = _averaged(tools, server, row, data, key)
    return (delta, jax.tree.map(jnp.sign, delta)), row


def _gma_step(server, mean, workload):
    def one(param, delta, agreement):
        share = jnp.abs(agreement)
        return param + delta * jnp.where(share >= _GMA_THRESHOLD, 1.0, share)

    return jax.tree.map(one, server, *mean)


def _adam_start(params, workload):
    floor = workload.options["adaptivity"] ** 2
    zeros = jax.tree.map(jnp.zeros_like, params)
    return params, zeros, jax.tree.map(lambda p: jnp.full_like(p, floor), params)


def _adam_step(server, mean, workload):
    (params, first, second), (one, two) = server, _ADAM_DECAY
    rate, floor = (workload.options[k] for k in ("server_learning_rate", "adaptivity"))
    first = jax.tree.map(lambda m, d: one * m + (1 - one) * d, first, mean)
    second = jax.tree.map(lambda v, d: two * v + (1 - two) * d * d, second, mean)
    moved = jax.tree.map(
        lambda p, m, v: p + rate * m / (jnp.sqrt(v) + floor), params, first, second
    )
    return moved, first, second


def _term_client(tools, server, row, data, key):
    params, risk = server
    weight = jnp.exp(_TILT * (tools.loss(params, data) - risk))
    delta, row = _averaged(tools, params, row, data, key)
    return (_scaled(delta, weight), weight), row


def _term_step(server, mean, workload):
    (params, risk), (delta, weight) = server, mean
    return _added(params, delta, 1 / weight), risk + jnp.log(weight) / _TILT


def _q_ffl_client(tools, server, row, data, key):
    loss = tools.loss(server, data)
    delta, row = _averaged(tools, server, row, data, key)
    square = sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(delta))
    curvature = _Q * loss ** (_Q - 1) * square / _RATE + loss**_Q
    return (_scaled(delta, loss**_Q), curvature), row


def _q_ffl_step(server, mean, workload):
    delta, curvature = mean
    return _added(server, delta, 1 / curvature)


def _ditto_client(tools, server, row, data, key):
    shared_key, own_key = jax.random.split(key)
    delta, _ = _averaged(tools, server, None, data, shared_key)

    def pull(now):
        return _scaled(_added(now, server, -1.0), _DITTO_STRENGTH)

    return delta, tools.train(row, data, own_key, pull=pull)


def _fedbn_client(tools, server, row, data, key):
    start = {"params": server["params"] | {_LOCAL_LAYER: row}}
    trained = tools.train(start, data, key)["params"]
    sent = {name: part for name, part in trained.items() if name != _LOCAL_LAYER}
    return _added({"params": sent}, server, -1.0), trained[_LOCAL_LAYER]


def _without_local(params, workload):
    return {"params": {k: v for k, v in params["params"].items() if k != _LOCAL_LAYER}}


def _splitting(share):
    """Makes FedSplit (1) and FedPi (½): a reflection at a proximal step, then at the mean of all.

    A row is the part of the next point that does not depend on the mean.
    """

    def client(tools, server, row, data, key):
        point = _added(row, server, 2 * share)
        near = tools.train(server, data, key, pull=lambda now: _added(now, point, -1.0))
        mirrored = _added(_scaled(near, 2.0), point, -1.0)
        row = _added(_scaled(point, 1 - share), mirrored, -share)
        return _added(mirrored, server, -1.0), row

    return _Method(_same, client, _stepped, lambda params: _scaled(params, 1 - 2 * share))


_METHODS = {
    "fedavg": _Method(_same, _averaged, _stepped),
    "gma": _Method(_same, _gma_client, _gma_step),
    "propfair": _Method(_same, _averaged, _stepped),
    "fedadam": _Method(
        _adam_start, lambda tools, server, *rest: _averaged(tools, server[0], *rest), _adam_step
    ),
    "term": _Method(lambda params, _: (params, jnp.float32(0)), _term_client, _term_step),
    "q_ffl": _Method(_same, _q_ffl_client, _q_ffl_step),
    "ditto": _Method(_same, _ditto_client, _stepped, _same),
    "fedbn": _Method(
        _without_local, _fedbn_client, _stepped, lambda params: params["params"][_LOCAL_LAYER]
    ),
    "fedsplit": _splitting(1.0),
    "fedpi": _splitting(0.5),
}


def _name(workload: Workload) -> str:
    return "gma" if workload.is_masked else workload.algorithm
