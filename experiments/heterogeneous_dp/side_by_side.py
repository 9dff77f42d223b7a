"""Trains models of one population side by side, on the batches and noise that each has alone.

Points of a sweep that share a seed draw the same batches and the same noise. They differ in
learning rates, in how much noise clients add, and in what the server makes of the updates. Here
they take each local step together, so that batches and noise are drawn once. Every model ends
where a run of its own ends, up to rounding.
"""

import functools
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_dp.algorithms.base import ClientOutput, FederatedAlgorithm
from fedjax_dp.core.trees import PyTree
from fedjax_dp.data.federated import FederatedData
from fedjax_dp.engine import Layout, examples_of, federation
from fedjax_dp.experiment import load_config
from fedjax_dp.experiment.assembly.assemble import Parts, parts_of, population_of
from fedjax_dp.experiment.components.experiment import Population
from fedjax_dp.models.base import Model
from fedjax_dp.server.base import Aggregator, Close, Fate, Roster, Sender, Stacked, stateless


class Method(NamedTuple):
    """What tells a method from others: its aggregator, and numbers by client."""

    aggregator: Aggregator
    weights: np.ndarray  # `[clients]`, as clients send them.
    noise: np.ndarray  # Noise multipliers, `[clients]`.


class Lane(NamedTuple):
    """One of the models: the method that trains it, by name, and the learning rate."""

    method: str
    rate: float


# `(data) -> accuracies [lanes, clients]` of the models of a round.
Score = Callable[[FederatedData], np.ndarray]


class _Program(NamedTuple):
    init: Any  # `(key) -> state`.
    step: Any  # `(state, examples, key) -> state, whether all updates are finite`.
    model: Model


class _Server(NamedTuple):
    params: PyTree  # `[lanes, ...]`.
    rates: jax.Array  # `[lanes]`.
    noise: jax.Array  # `[lanes, clients]`.
    deltas: PyTree  # Of the last round, `[clients, lanes, ...]`.


def population(file: pathlib.Path, words: Sequence[str]) -> Population:
    """Builds the clients' data."""
    return population_of(load_config(file, words))


def methods_of(
    file: pathlib.Path, words: Mapping[str, Sequence[str]], data: Population
) -> dict[str, Method]:
    """Builds methods, by name, from the words of a configuration of each."""
    return {name: _method(parts_of(load_config(file, own), data)) for name, own in words.items()}


def _method(parts: Parts) -> Method:
    config, local = parts.config, parts.algorithm.hyper.local
    sizes = np.asarray(parts.population.train.sizes, np.float32)
    noise = np.broadcast_to(np.asarray(local.noise_multiplier, np.float32), sizes.shape)
    batch = np.broadcast_to(np.asarray(local.batch_size, np.float32), sizes.shape)
    steps = np.ceil(sizes / batch) * float(local.num_epochs)
    declared = config.algorithm.options.get("declared_epsilon", config.privacy.record.epsilon)
    weights = {
        "robust_hdp": np.ones_like(sizes),
        "weiavg": np.asarray(declared, np.float32),
        "pfa": np.asarray(declared, np.float32),
        "record_dp_fedavg": sizes,
        "minimum_epsilon": sizes,
        "noise_oracle": np.square(batch / noise) / steps,
    }[config.algorithm.name]
    return Method(parts.algorithm.aggregator, weights, noise)


def _together(one: FederatedAlgorithm, num_lanes: int, num_clients: int) -> FederatedAlgorithm:
    """Declares the clients' side of several models; a round ends with their updates at hand."""

    def init(key):
        params = one.init(key).params
        lanes = jax.tree.map(lambda x: jnp.broadcast_to(x, (num_lanes, *x.shape)), params)
        deltas = jax.tree.map(lambda x: jnp.zeros((num_clients, *x.shape), jnp.float32), lanes)
        return _Server(lanes, jnp.ones(num_lanes), jnp.ones((num_lanes, num_clients)), deltas)

    def by_client(stack, roster):
        order = jnp.argsort(roster.clients)
        return jax.tree.map(lambda x: x[order], stack)

    def client(message, own, client, hyper, key):
        def trained(params, rate, noise):
            local = hyper.local._replace(learning_rate=rate, noise_multiplier=noise)
            return one.client(params, own, client, hyper._replace(local=local), key).update

        return ClientOutput(jax.vmap(trained)(*message), jnp.float32(1), None)

    return one._replace(
        name="side_by_side",
        init=init,
        broadcast=lambda server, to: (server.params, server.rates, server.noise[:, to.index]),
        client=client,
        aggregator=Stacked(
            stateless,
            lambda state, numbers, update, sender: update,
            lambda state, numbers, stack, close: (state, by_client(stack, close.roster), {}),
        ),
        server_step=lambda server, deltas, hyper, round, key: (server._replace(deltas=deltas), {}),
        views=one.views._replace(shared=None),
    )


@functools.cache
def _program(file: pathlib.Path, words: tuple[str, ...], num_lanes: int) -> _Program:
    """Compiles the clients' side for data of these sizes."""
    parts = parts_of(load_config(file, (*words, "--privacy.record.noise_multiplier=1")))
    num_clients = parts.population.train.num_clients
    algorithm = _together(parts.algorithm, num_lanes, num_clients)
    fed, layout = federation(algorithm, parts.population.train, parts.participation), Layout(1)

    def step(state, examples, key):
        state, record, _ = fed.run_round(state, fed.hyper, examples, key, layout)
        return state, jnp.all(record.fate == Fate.CONTRIBUTED)

    init = jax.jit(lambda key: fed.init(key, layout))
    return _Program(init, jax.jit(step, donate_argnums=0), parts.model)


def _server_side(method: Method) -> tuple[Any, Callable[..., Any]]:
    """Returns `(params) -> state` and `(state, params, deltas [clients, ...]) -> state, params`."""
    own, clients = method.aggregator, jnp.arange(len(method.weights))
    roster, key = Roster(clients, clients >= 0), jax.random.key(0)
    close = Close(roster, jnp.full(len(clients), Fate.CONTRIBUTED, jnp.int8), key, key)

    def message(state, delta, client, weight):
        return own.contribute(state, own.numbers, delta, Sender(client, weight, key, key, roster))

    @jax.jit
    def step(state, params, deltas):
        sent = jax.vmap(message, (None, 0, 0, 0))(state, deltas, clients, method.weights)
        if not isinstance(own, Stacked):
            sent = jax.tree.map(lambda x: x.sum(0), sent)
        state, update, _ = own.combine(state, own.numbers, sent, close)
        return state, jax.tree.map(jnp.add, params, update)

    return own.init, step


def train(
    file: pathlib.Path,
    words: Sequence[str],
    methods: Mapping[str, Method],
    lanes: Sequence[Lane],
    data: Population,
    seed: int,
    num_rounds: int,
    each_round: Callable[[int, PyTree, Score], None],
) -> None:
    """Trains one model a lane; `each_round` gets the round, from 1, its models and their scores.

    The words describe the clients' side, which is that of `record_dp_fedavg`; a program that was
    compiled for them serves all populations of the same sizes.
    """
    init, step, model = _program(file, ("--algorithm.name=record_dp_fedavg", *words), len(lanes))
    examples, key = jax.device_put(examples_of(data.train)), jax.random.key(seed)
    state = init(key)
    server = state.server._replace(
        rates=jnp.float32([lane.rate for lane in lanes]),
        noise=jnp.float32([methods[lane.method].noise for lane in lanes]),
    )
    state, sides = state._replace(server=server), {n: _server_side(m) for n, m in methods.items()}
    params = [jax.tree.map(lambda x, i=i: x[i], server.params) for i in range(len(lanes))]
    states = [sides[lane.method][0](params[0]) for lane in lanes]
    for number in range(1, num_rounds + 1):
        state, is_whole = step(state, examples, key)
        if not is_whole:
            raise SystemExit(f"round {number}: an update is not finite, which ends all lanes")
        for i, lane in enumerate(lanes):
            deltas = jax.tree.map(lambda x, i=i: x[:, i], state.server.deltas)
            states[i], params[i] = sides[lane.method][1](states[i], params[i], deltas)
        stacked = jax.tree.map(lambda *x: jnp.stack(x), *params)
        state = state._replace(server=state.server._replace(params=stacked))
        each_round(number, stacked, functools.partial(_accuracies, model, stacked))


def _accuracies(model: Model, params: PyTree, data: FederatedData) -> np.ndarray:
    """Computes the accuracy of each model on each client's examples, `[lanes, clients]`."""
    batch = {name: jnp.asarray(array) for name, array in data.examples.items()}
    correct = np.asarray(_correct(model)(params, batch))
    return np.add.reduceat(correct, data.offsets[:-1], axis=1) / data.sizes


@functools.cache
def _correct(model: Model) -> Any:
    def of_one(params, batch):
        outputs, _ = model.apply(params, batch["x"])
        return (outputs.argmax(-1) == batch["y"]).astype(jnp.float32)

    return jax.jit(jax.vmap(of_one, (0, None)))
