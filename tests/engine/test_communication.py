"""Bytes that clients and server send each other: what messages hold, of every algorithm."""

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_dp.algorithms.base import ClientOutput, ClientState, FederatedAlgorithm, Hyper
from fedjax_dp.clients.base import LocalConfig
from fedjax_dp.data import participants, sampling
from fedjax_dp.data.federated import FederatedData
from fedjax_dp.engine import ExecutionConfig, simulation
from fedjax_dp.engine.communication import communication, meter_of
from fedjax_dp.server.base import Summed, stateless

MB = 1e6
KEY = jax.random.key(0)


def data(num_clients):
    return FederatedData.from_clients([{"x": np.zeros((2, 1), np.float32)}] * num_clients)


def sending(message_of, num_clients, *, own=None, execution=ExecutionConfig(), **declared):
    """Simulates an algorithm whose clients send what a function of their state and round gives."""

    def client(server, own, client, hyper, key):
        message, own = message_of(server, own, client)
        return ClientOutput(message, jnp.float32(1), own)

    def contribute(state, numbers, update, weight, sender):
        # Something of every array is read, so that all of it counts as sent.
        return sum((jnp.sum(x, dtype=jnp.float32) for x in jax.tree.leaves(update)), 0.0)

    aggregator = Summed(stateless, contribute, lambda s, n, total, key: (s, total, {}))
    algorithm = FederatedAlgorithm(
        name="sending",
        init=lambda key: {"model": jnp.zeros(3), "moment": jnp.zeros(3)},
        client=client,
        aggregator=aggregator,
        server_step=lambda server, total, hyper, round, key: (server, {}),
        hyper=Hyper(LocalConfig(0.1, 1, 1)),
        num_steps=lambda size, config: jnp.int32(1),
        clients=None if own is None else ClientState(lambda server: own),
        **declared,
    )
    everybody = participants.participation(sampling.everybody(), num_clients)
    return simulation(algorithm, data(num_clients), everybody, execution)


def counted(sim, rounds):
    _, record, info = sim.run(sim.init(KEY), KEY, rounds)
    return communication(sim, record, info)


def test_a_dense_model_of_the_published_size_costs_what_the_paper_says():
    zeros = {"w": jnp.zeros((1115, 10_000)), "unread": jnp.zeros(0)}
    sim = sending(lambda server, own, client: (zeros_of(zeros, client), own), 5)
    sent = meter_of(sim.federation).up.bytes_of(np.zeros(0), "dense")
    # 50 rounds of 5 clients at 44.6 MB.
    assert 50 * 5 * sent["float32"] / MB == 11_150.0


def zeros_of(shapes, client):
    """Zeros that nobody but the client can know."""
    return jax.tree.map(lambda x: x * client.start.astype(x.dtype), shapes)
