"""The nodes of a Flower grid, as a server asks them; clients that register there."""

import math
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from flwr.app import Message
from flwr.serverapp import Grid

from fedjax_dp.core import checks, files
from fedjax_dp.experiment.assembly.own_data import Registered, require_kind, require_same_kind
from fedjax_dp.flower.log import LOG
from fedjax_dp.flower.node import CLIENTS, DATA, PRIVACY, SCORES, TRAIN
from fedjax_dp.flower.packets import Packet, counts_of, packet_of, whole_of
from fedjax_dp.flower.request import require_timeout

# Each question that has no answer costs the time of a round.
_MOST_SILENCES = 3
# Seconds between two looks for a node, as nodes ask for messages.
_PAUSE = 3.0


class GridNodes:
    """The nodes that a Flower grid reaches."""

    def __init__(
        self,
        grid: Grid,
        *,
        sizes: Iterable[int],
        timeout: float = 600.0,
        scores: Callable[[Sequence[int], str], None] | None = None,
    ) -> None:
        """Wraps a grid; `scores` gets clients and exact, unprotected reports of their scripts."""
        require_timeout(timeout)
        self._scores = scores
        self._grid, self._timeout = grid, timeout
        self._sizes = [int(size) for size in sizes]
        self._has_begun = False
        # What each node has answered; None for a node of another plan.
        self._known: dict[int, list[int]] = {}
        self._holder: dict[int, int] = {}
        # How often a node has let the time of a question pass.
        self._silent: dict[int, int] = {}
        self._plan: dict[str, Any] = {}
        # The nodes whose clients a script trains.
        self._scripted: set[int] = set()
        # How many reports of scores each node has sent.
        self._reports: dict[int, int] = {}

    def clients(self, question: Packet) -> Mapping[int, int]:
        """Finds the node of each client that is online; asks new nodes which they hold.

        Args:
          question: the plan of the server, which new nodes compare with their own.

        Returns:
          The node of each client that is online.

        Raises:
          ValueError: before the first round, if two nodes hold one client, or a node one that is
            not registered; if no node comes or answers in time; or if all answers are errors.
            Later such a node is left out. A client stays on its node while that is online; then it
            is on the one that came last, such as one that was started again.
        """
        online, is_start = self._online(), not self._has_begun
        self._plan = {n: x for n, x in question.facts.items() if not n.startswith("plan ")}
        self._silent = {node: times for node, times in self._silent.items() if node in online}
        new = {
            node: question
            for node in sorted(online.difference(self._known))
            if self._silent.get(node, 0) < _MOST_SILENCES
        }
        start = time.monotonic()
        replies, failures = answers(self._grid, CLIENTS, new, "set-up", self._timeout)
        if is_start and not replies:
            named = (f"from node {node}: {reason}" for node, reason in failures.items())
            silence = f"no answer in {self._timeout:g} seconds"
            raise ValueError(f"a node must accept the plan, got {next(named, silence)}")
        if time.monotonic() - start >= self._timeout:
            for node in sorted(set(new).difference(replies)):
                self._silent[node] = times = self._silent.get(node, 0) + 1
                if times == _MOST_SILENCES:
                    text = f"node {node} is asked no more: {times} questions had no answer in time"
                    warnings.warn(text, stacklevel=2)
        for node, reply in replies.items():
            try:
                self._known[node] = self._registered(node, reply)
            except ValueError as error:
                if is_start:
                    raise
                warnings.warn(f"node {node} is left out: {error}", stacklevel=2)
                self._known[node] = []
        newest: dict[int, int] = {}
        # In the order in which nodes came.
        for node, clients in self._known.items():
            for client in clients if node in online else ():
                rule = f"be on one node, but is on {newest.get(client)} already"
                is_new = client not in newest
                checks.require(is_new or not is_start, f"client {client}", rule, node)
                newest[client] = node
        moved: dict[tuple[int, int], list[int]] = {}
        for client, node in newest.items():
            before = self._holder.get(client, node)
            if before not in online:
                moved.setdefault((before, node), []).append(client)
                before = node
            self._holder[client] = before
        for (before, node), clients in moved.items():
            text = f"clients {clients} are now on node {node}: node {before} is offline"
            warnings.warn(text, stacklevel=2)
        self._has_begun = True
        return {client: self._holder[client] for client in newest}

    def _online(self) -> set[int]:
        """Lists the nodes that are online; before the first round, once there is one."""
        end, is_logged = time.monotonic() + self._timeout, False
        while not (online := set(self._grid.get_node_ids())) and not self._has_begun:
            rule = f"be connected within {self._timeout:g} seconds of the start"
            checks.require(time.monotonic() < end, "a node", rule, "none")
            if not is_logged:
                LOG.info("no node is connected yet: waiting for one, %g seconds", self._timeout)
            is_logged = True
            time.sleep(min(_PAUSE, self._timeout))
        return online

    def _registered(self, node: int, reply: Packet) -> list[int]:
        """Requires that a node holds registered clients, of the registered sizes."""
        clients, sizes = (counts_of(reply, name) for name in ("clients", "sizes"))
        rule = f"hold a size for each of its {len(clients)} clients"
        checks.require(len(sizes) == len(clients), f"node {node}", rule, sizes)
        for client, size in zip(clients, sizes, strict=True):
            rule = f"be one of the {len(self._sizes)} registered clients"
            checks.require(client < len(self._sizes), f"a client of node {node}", rule, client)
            rule = f"hold the {self._sizes[client]} records that are registered"
            checks.require(size == self._sizes[client], f"client {client}", rule, size)
        return clients

    def train(self, packets: Mapping[int, Packet], round: int) -> Mapping[int, Packet]:
        """Sends each node its packet and collects the replies that arrive in time.

        Args:
          packets: by node.
          round: rounds done before.

        Returns:
          The first reply of each node; none of a node that failed, is late, or sent no packet.
        """
        packets = {
            node: Packet(
                {**packet.facts, "timeout": self._timeout, **self._asked(node)}, packet.arrays
            )
            for node, packet in packets.items()
        }
        replies = ask(self._grid, TRAIN, packets, str(round), self._timeout)
        self._scripted |= {node for node, reply in replies.items() if "scores" in reply.facts}
        self._collect(replies)
        return replies

    def _asked(self, node: int) -> dict[str, Any]:
        """Says whether scores are collected, and how many reports of a node are here."""
        return {"scores": self._scores is not None, "scores from": self._reports.get(node, -1)}

    def _collect(self, replies: Mapping[int, Packet]) -> None:
        """Passes on the scores in replies."""
        for node, reply in replies.items():
            try:
                if "scores end" in reply.facts:
                    self._reports[node] = whole_of(reply.facts, "scores end")
            except ValueError as error:
                warnings.warn(f"the scores of node {node} are left out: {error}", stacklevel=2)
                continue
            if self._scores is not None and reply.facts.get("scores"):
                self._scores(self._known[node], str(reply.facts["scores"]))

    def collect_scores(self) -> None:
        """Asks for the scores that scripts have reported since the last reply of their node."""
        if self._scores is not None:
            online = self._scripted.intersection(self._grid.get_node_ids())
            asked = {node: Packet({**self._plan, **self._asked(node)}) for node in online}
            self._collect(ask(self._grid, SCORES, asked, "scores", self._timeout))

    def agree(self, step: str, packets: Mapping[int, Packet], round: int) -> Mapping[int, Packet]:
        """Sends the messages of a step in which clients agree on masks, or masks are removed.

        Args:
          step: the type of the messages.
          packets: by node.
          round: rounds done before.

        Returns:
          The first reply of each node, as from `train`.
        """
        return ask(self._grid, step, packets, str(round), self._timeout)

    def claims(self, dp_delta: float) -> dict[int, dict[str, float]]:
        """Asks the nodes that are online what their own ledgers of records claim.

        Args:
          dp_delta: δ, in (0, 1).

        Returns:
          By client ε and the number of releases that compose it, as its own node says; empty before
          the first round.
        """
        question = Packet({**self._plan, "dp_delta": dp_delta})
        holders = set(self._holder.values()).intersection(self._grid.get_node_ids())
        online = {node: question for node in holders}
        found: dict[int, dict[str, float]] = {}
        for node, reply in ask(self._grid, PRIVACY, online, "privacy", self._timeout).items():
            try:
                said = _claims(reply)
            except ValueError as error:
                warnings.warn(f"the claims of node {node} are left out: {error}", stacklevel=2)
                continue
            found |= {c: each for c, each in said.items() if self._holder.get(c) == node}
        return found


def _claims(reply: Packet) -> dict[int, dict[str, float]]:
    """Reads ε and the number of releases of each client."""
    clients, releases = (counts_of(reply, name) for name in ("clients", "releases"))
    spent = reply.facts.get("epsilon")
    rule = f"be a list of {len(clients)} numbers"
    checks.require(isinstance(spent, list), "epsilon", rule, spent)
    assert isinstance(spent, list)
    for epsilon in spent:
        # An infinite ε is true where no noise was added.
        is_number = checks.is_finite_number(epsilon) or epsilon == math.inf
        is_epsilon = is_number and epsilon >= 0
        checks.require(is_epsilon, "epsilon", "be numbers of at least 0", epsilon)
    columns = zip(clients, spent, releases, strict=True)
    return {client: {"epsilon": float(e), "releases": n} for client, e, n in columns}


def ask(
    grid: Grid, kind: str, packets: Mapping[int, Packet], group: str, timeout: float
) -> dict[int, Packet]:
    """Sends messages of one kind and reads what comes back, the first reply of each node."""
    return answers(grid, kind, packets, group, timeout)[0]


def answers(
    grid: Grid, kind: str, packets: Mapping[int, Packet], group: str, timeout: float
) -> tuple[dict[int, Packet], dict[int, str]]:
    """Sends messages; returns the first reply of each node, and why others have failed."""
    if not packets:
        return {}, {}
    sent: list[Message] = [
        Message(packet.record(), node, kind, group_id=group)
        for node, packet in sorted(packets.items())
    ]
    found: dict[int, Packet] = {}
    failures: dict[int, str] = {}
    for reply in grid.send_and_receive(sent, timeout=timeout):
        node = reply.metadata.src_node_id
        if node not in packets:
            # Of a node that is offline the SuperLink answers in its own name.
            asked = {each.metadata.message_id: each.metadata.dst_node_id for each in sent}
            node = asked.get(reply.metadata.reply_to_message_id, node)
        if reply.has_error():
            failures[node] = str(reply.error.reason)
            warnings.warn(f"node {node} failed: {failures[node]}", stacklevel=2)
            continue
        if node in found or node not in packets:
            continue
        try:
            found[node] = packet_of(reply.content)
        except ValueError as error:
            failures[node] = f"a damaged reply: {error}"
            warnings.warn(f"the reply of node {node} is damaged: {error}", stacklevel=2)
    return found, failures


# The most missing clients that a line of the log names.
_SHOWN = 10


def registered(
    grid: Grid, num_clients: int, *, timeout: float = 600.0, pause: float = 3.0
) -> Registered:
    """Waits until nodes hold all clients; asks those again that fail or send what does not fit."""
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
