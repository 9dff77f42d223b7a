"""Clients that register at a server which has no data of theirs."""

import time
import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

from flwr.serverapp import Grid

from fedjax_dp.core import checks, files
from fedjax_dp.experiment.assembly.own_data import Registered, require_kind, require_same_kind
from fedjax_dp.flower.grid import ask
from fedjax_dp.flower.log import LOG
from fedjax_dp.flower.node import DATA
from fedjax_dp.flower.packets import Packet, counts_of

# The most missing clients that a line of the log names.
_SHOWN = 10


def registered(
    grid: Grid, num_clients: int, *, timeout: float = 600.0, pause: float = 3.0
) -> Registered:
    """Waits until nodes hold all clients, and collects the sizes and the kind of their data.

    Nodes that fail, or send what does not fit, are asked again, so that data can be mended while
    the server waits.
    """
    known: dict[int, _Answer] = {}
    while True:
        online = sorted(grid.get_node_ids())
        new = {node: Packet() for node in online if node not in known}
        answers = dict[int, _Answer]()
        for node, packet in ask(grid, DATA, new, "registration", timeout).items():
            try:
                answers[node] = _answer(packet)
            except ValueError as error:
                warnings.warn(f"node {node} is asked again: {error}", stacklevel=2)
        known = {node: each for node, each in (known | answers).items() if node in online}
        merged = _merged({node: known[node] for node in sorted(known)}, num_clients)
        missing = [client for client in range(num_clients) if client not in merged]
        if not missing:
            break
        if answers or not known:
            some = ", ".join(map(str, missing[:_SHOWN])) + ", …" * (len(missing) > _SHOWN)
            there = num_clients - len(missing)
            LOG.info("%d of %d clients are registered; missing: %s", there, num_clients, some)
        time.sleep(pause)
    kind = known[min(known)].kind
    LOG.info("all %d clients are registered, on %d nodes", num_clients, len(known))
    by_client = [merged[client] for client in range(num_clients)]
    return Registered(kind, *zip(*by_client, strict=True))


class _Answer(NamedTuple):
    """What a node says of its data: their kind, and the size of each split of each client."""

    kind: Mapping[str, Any]
    sizes: Mapping[int, tuple[int, ...]]


def _answer(packet: Packet) -> _Answer:
    """Reads an answer, or raises a ValueError that says why it does not fit."""
    clients, sizes, second = (
        counts_of(packet, name) for name in ("clients", "sizes", "validation sizes")
    )
    rule = f"differ, with a size each, got the sizes {sizes} and {second}"
    fits = len(set(clients)) == len(clients) == len(sizes) and len(second) in (0, len(clients))
    checks.require(fits, "clients", rule, clients)
    kind = files.parse_json(str(packet.facts.get("kind")), "kind")
    require_kind(kind)
    rows = zip(sizes, second, strict=True) if second else ((size,) for size in sizes)
    return _Answer(kind, dict(zip(clients, rows, strict=True)))


def _merged(answers: Mapping[int, _Answer], num_clients: int) -> dict[int, tuple[int, ...]]:
    """Returns the size of each split of each client, from answers of nodes, which must agree."""
    clients: dict[int, tuple[int, ...]] = {}
    holder: dict[int, int] = {}
    first = min(answers, default=None)
    for node, (kind, sizes) in answers.items():
        assert first is not None
        expected = answers[first].kind
        require_same_kind(f"the data of node {node}, as of node {first},", kind, expected)
        for client, row in sizes.items():
            rule = f"be one of the {num_clients} clients of data.num_clients"
            checks.require(client < num_clients, f"a client of node {node}", rule, client)
            rule = f"be on one node, but is on {holder.get(client)} already"
            checks.require(client not in holder, f"client {client}", rule, node)
            holder[client] = node
            clients[client] = row
            splits = len(next(iter(clients.values())))
            rule = f"have {splits} splits of its data, as the first node has"
            checks.require(len(row) == splits, f"node {node}", rule, len(row))
    return clients
