"""Clients that register at a server which has no data of theirs."""

import json
import time
from collections.abc import Mapping
from typing import Any

from flwr.serverapp import Grid

from fedjax_dp.core import checks
from fedjax_dp.experiment.assembly.own_data import Registered, require_same_kind
from fedjax_dp.flower.grid import ask
from fedjax_dp.flower.log import LOG
from fedjax_dp.flower.node import DATA
from fedjax_dp.flower.packets import Packet

# The most missing clients that a line of the log names.
_SHOWN = 10


def registered(
    grid: Grid, num_clients: int, *, timeout: float = 600.0, pause: float = 3.0
) -> Registered:
    """Waits until nodes hold all clients, and collects the sizes and the kind of their data.

    Nodes that fail are asked again, so that data can be mended while the server waits.

    Args:
      grid: as Flower passes it to a server app.
      num_clients: the number of clients.
      timeout: seconds to wait for the replies to one question, above 0.
      pause: seconds between two questions.

    Returns:
      The facts, which are public.

    Raises:
      ValueError: if two nodes hold one client, a node holds one that is not expected, or data of
        two nodes are not alike.
    """
    known: dict[int, Packet] = {}
    while True:
        online = sorted(grid.get_node_ids())
        new = {node: Packet() for node in online if node not in known}
        answers = ask(grid, DATA, new, "registration", timeout)
        known = {node: each for node, each in (known | answers).items() if node in online}
        found = _merged({node: known[node].facts for node in sorted(known)}, num_clients)
        missing = [client for client in range(num_clients) if client not in found]
        if not missing:
            break
        if answers or not known:
            some = ", ".join(map(str, missing[:_SHOWN])) + ", …" * (len(missing) > _SHOWN)
            there = num_clients - len(missing)
            LOG.info("%d of %d clients are registered; missing: %s", there, num_clients, some)
        time.sleep(pause)
    kind = json.loads(known[min(known)].facts["kind"])
    LOG.info("all %d clients are registered, on %d nodes", num_clients, len(known))
    by_client = [found[client] for client in range(num_clients)]
    return Registered(kind, *zip(*by_client, strict=True))


def _merged(
    answers: Mapping[int, Mapping[str, Any]], num_clients: int
) -> dict[int, tuple[int, ...]]:
    """Returns the size of each split of each client, from answers of nodes, which must agree."""
    found: dict[int, tuple[int, ...]] = {}
    holder: dict[int, int] = {}
    first = min(answers, default=None)
    for node, facts in answers.items():
        assert first is not None
        kind, expected = (json.loads(each["kind"]) for each in (facts, answers[first]))
        checks.require(bool(kind), f"node {node}", "read data of its own, by node-config data", {})
        require_same_kind(f"the data of node {node}, as of node {first},", kind, expected)
        clients, sizes, second = (facts[n] for n in ("clients", "sizes", "validation sizes"))
        for place, client in enumerate(clients):
            rule = f"be one of the {num_clients} clients of data.num_clients"
            checks.require(0 <= client < num_clients, f"a client of node {node}", rule, client)
            rule = f"be on one node, and is on {holder.get(client)} already"
            checks.require(client not in holder, f"client {client}", rule, node)
            holder[client] = node
            found[client] = (sizes[place], second[place]) if second else (sizes[place],)
    return found
