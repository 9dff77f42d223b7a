"""The small problem of every algorithm on nodes without a network."""

from typing import Any, NamedTuple

import jax
from cases import CASES, Case
from flwr.app import Message
from flwr.clientapp import ClientApp
from small_problem import make_model

from fedjax_dp.engine import federation, population_of
from fedjax_dp.flower import GridNodes, Node, client_app, deployed
from fedjax_dp.flower.packets import Packet
from fedjax_dp.flower.testing import InProcess

# One node with several clients, one with one, as hosts and silos are.
NODES = {11: (0, 2, 4), 12: (1, 3), 13: (5,)}


class Deployment(NamedTuple):
    """A deployed case."""

    simulation: Any
    grid: InProcess
    nodes: GridNodes


def nodes_of(case: Case, nodes=NODES, state_dir=None, **options):
    """Returns the function from a node's context to its clients and data."""
    train, validation = case.data(), case.validation()

    def data(context):
        clients = context.node_config["clients"]
        ids = [int(part) for part in clients.split(",")]
        second = None if validation is None else validation.select(ids)
        given = dict(options)
        if state_dir is not None:
            given["state_dir"] = f"{state_dir}/{context.node_id}"
        return Node(ids, train.select(ids), second, **given)

    return data, {node: {"clients": ",".join(map(str, ids))} for node, ids in nodes.items()}


def deploy(name, *, nodes=NODES, keys="parity", change=None, journal=None, case=None, **options):
    """Deploys a case on nodes in this process."""
    case = CASES[name] if case is None else case
    data, configs = nodes_of(case, nodes, keys=keys, **options)
    algorithm = case.make(make_model())
    app = client_app(lambda node, population: case.make(make_model()), data)
    grid = InProcess(app, configs) if change is None else InProcess(app, configs, change)
    population = population_of(case.data(), case.validation())
    bound = federation(algorithm, population, case.participation())
    reached = GridNodes(grid, sizes=population.sizes)
    return Deployment(deployed(bound, reached, keys=keys, journal=journal), grid, reached)


def idle_grid(refusal=None):
    """A grid of one node, which holds no client, or refuses every plan."""
    app = ClientApp()

    @app.query("clients")
    def clients(message, context):
        if refusal is not None:
            raise ValueError(refusal)
        return Message(Packet({"clients": [], "sizes": []}).record(), reply_to=message)

    return InProcess(app, {1: {}})


def key():
    return jax.random.key(3)
