"""The messages of a round: what one asks of a node, all checked, and what replies bring."""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flwr.app import DEFAULT_TTL

from fedjax_dp.core import checks, sums, trees
from fedjax_dp.core.trees import PyTree
from fedjax_dp.engine.sides import Received
from fedjax_dp.flower.packets import (
    Packet,
    counts_of,
    fact_of,
    require_echo,
    require_kind,
    text_of,
    tree_of,
    whole_of,
    wholes_of,
)
from fedjax_dp.flower.plan import Plan, Shapes
from fedjax_dp.flower.terms import Node, sizes_of
from fedjax_dp.server.base import Fate, Roster

# The longest that a node waits for a script, in seconds: no message of Flower lives longer.
LONGEST_WAIT = DEFAULT_TTL


class Request(NamedTuple):
    """A round of some clients of a node."""

    clients: Sequence[int]  # Their indices, which are distinct and of this node.
    places: Sequence[int]  # Where they are among the clients of the node.
    round: int  # Rounds done before.
    stage: int  # Of the round.
    run: str  # The name of the run.
    received: Sequence[Received]  # What reaches each of them; its numbers are those of the plan.
    last: Sequence[int]  # The round of each whose state it starts from; -1 for the first state.
    first: PyTree  # The first state of any client, if one of them starts from it; else None.
    keys: np.ndarray | None  # The words of each client's key, where the server makes them.
    is_one_model: bool  # Whether all clients receive the same model.
    wait: float  # How long the server waits, in seconds; 0 where no script trains the clients.
    scores_from: int | None  # As `scores_from`; None where no script trains the clients.


def request_of(
    packet: Packet, plan: Plan, node: Node, rounds: int | None, *, has_roster: bool
) -> Request:
    """Reads a message that asks for a round."""
    facts, arrays, shapes = packet.facts, packet.arrays, plan.shapes
    clients = clients_in(facts, node)
    round = round_in(facts, rounds)
    places = wholes_of(facts, "messages", end=len(clients), count=len(clients))
    models = {i: tree_of(arrays, f"message/{i}", shapes.message) for i in sorted(set(places))}
    aggregator = tree_of(arrays, "aggregator", shapes.aggregator)
    key = jax.random.wrap_key_data(jnp.asarray(words_in(arrays, "public_key")))
    roster = Roster(jnp.zeros(0, jnp.int32), jnp.zeros(0, bool))
    if has_roster:
        roster = Roster(*map(jnp.asarray, roster_in(arrays, plan.num_clients, clients)))
    last, first = [-1] * len(clients), None
    if shapes.own is not None:
        last = wholes_of(facts, "last", first=-1, end=round, count=len(clients))
        if min(last) < 0:
            first = tree_of(arrays, "own", shapes.own)
    keys = words_in(arrays, "keys", (len(clients),)) if node.keys == "parity" else None
    _require_no_others(arrays, places, has_roster, first is not None)
    own, wait = list(node.clients), 0.0
    if node.script is not None:
        require_timeout(fact_of(facts, "timeout"))
        wait = float(facts["timeout"])
    return Request(
        clients,
        [own.index(client) for client in clients],
        round,
        stage_in(facts, plan, round),
        text_of(facts, "run"),
        [
            Received(models[place], aggregator, plan.hyper.of_client(client), key, roster)
            for client, place in zip(clients, places, strict=True)
        ],
        last,
        first,
        keys,
        len(models) == 1,
        wait,
        None if node.script is None else scores_from(facts),
    )


def sizes_in(facts: Mapping[str, Any], node: Node) -> list[list[int]]:
    """Reads the registered sizes of all clients, which for those of this node must be its own."""
    found = [wholes_of(facts, name) for name in sizes_of(node)]
    num_clients, has_second = len(found[0]), node.validation is not None
    rule = "have the clients of this node among them"
    checks.require(max(node.clients, default=-1) < num_clients, "sizes", rule, num_clients)
    rule = "have one number for each client, or none where clients have no second split"
    fits = len(found[1]) == num_clients * has_second
    checks.require(fits, "validation sizes", rule, len(found[1]))
    for own, sizes in zip(sizes_of(node).values(), found, strict=True):
        for client, size in zip(node.clients, own, strict=bool(own)):
            rule = "hold as many records as when this node registered"
            checks.require(sizes[client] == size, f"client {client}", rule, "another number")
    return found


def scores_from(facts: Mapping[str, Any]) -> int | None:
    """Reads how many reports of scores the server has: -1 unknown, None if it collects none."""
    collects = fact_of(facts, "scores")
    checks.require(isinstance(collects, bool), "scores", "be true or false", collects)
    start = whole_of(facts, "scores from", first=-1)
    return start if collects else None


def clients_in(facts: Mapping[str, Any], node: Node) -> list[int]:
    """Reads the clients of a message: some of this node, each once."""
    clients = wholes_of(facts, "clients")
    others = sorted(set(clients) - set(node.clients))
    checks.require(not others, "clients", f"be of {list(node.clients)}", others)
    is_distinct = 0 < len(clients) == len(set(clients))
    checks.require(is_distinct, "clients", "be at least one, and differ", clients)
    return clients


def round_in(facts: Mapping[str, Any], rounds: int | None) -> int:
    """Reads the round of a message, one of the run's."""
    return whole_of(facts, "round", end=checks.COUNT_LIMIT if rounds is None else rounds)


def stage_in(facts: Mapping[str, Any], plan: Plan, round: int) -> int:
    """Reads the stage of a round: that of the plan, or one of its stages if the server decides."""
    stage = whole_of(facts, "stage", end=plan.num_stages or checks.COUNT_LIMIT)
    own = plan.stage_of(round)
    rule = f"be {own}, that of round {round}"
    checks.require(own is None or stage == own, "stage", rule, stage)
    return stage


def words_in(
    arrays: Mapping[str, np.ndarray], name: str, shape: tuple[int, ...] = ()
) -> np.ndarray:
    """Reads the words of random keys, `[*shape, words]`."""
    of_one = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0)))
    array = array_of(arrays, name)
    require_kind(array, (*shape, *of_one.shape), np.dtype(of_one.dtype), name)
    return array


def roster_in(
    arrays: Mapping[str, np.ndarray], num_clients: int, clients: Sequence[int] = ()
) -> tuple[np.ndarray, np.ndarray]:
    """Reads the clients of a cohort by slot, and which of them take part: these among others."""
    names = "roster/clients", "roster/is_announced"
    ids, is_there = (array_of(arrays, name) for name in names)
    for name, array, kind in zip(names, (ids, is_there), (np.int32, np.bool_), strict=True):
        require_kind(array, (np.size(ids),), np.dtype(kind), name)
    fits = bool(np.all((ids >= -1) & (ids < num_clients)) and np.all(ids[is_there] >= 0))
    rule = f"be from 0 to {num_clients - 1}, or -1 where none takes part"
    checks.require(fits, "the clients of a cohort", rule, ids)
    there = ids[is_there].tolist()
    checks.require(len(set(there)) == len(there), "the clients of a cohort", "differ", there)
    missing = sorted(set(clients) - set(there))
    checks.require(not missing, "the clients of a cohort", "have those of the message", missing)
    return ids, is_there


def array_of(arrays: Mapping[str, np.ndarray], name: str) -> np.ndarray:
    """Reads an array of a message, or refuses one without it."""
    checks.require(name in arrays, "a message", f"hold the array {name!r}", sorted(arrays)[:3])
    return arrays[name]


def require_timeout(timeout: Any) -> None:
    """Requires seconds to wait for a message."""
    is_number = isinstance(timeout, int | float) and not isinstance(timeout, bool)
    fits = is_number and 0 < timeout <= LONGEST_WAIT
    rule = f"be seconds above 0 and at most {LONGEST_WAIT}, as long as a message lives"
    checks.require(fits, "timeout", rule, timeout)


def _require_no_others(
    arrays: Mapping[str, np.ndarray], places: Sequence[int], has_roster: bool, has_first: bool
) -> None:
    """Refuses arrays that nothing reads."""
    known = [*(f"message/{place}/" for place in places), "aggregator/", "public_key"]
    known += ["roster/clients", "roster/is_announced"] * has_roster
    # Keys of the server, which a node with keys of its own does not read.
    known += ["own/"] * has_first + ["keys"]
    folders = tuple(name for name in known if name.endswith("/"))
    others = [n for n in sorted(arrays) if n not in known and not n.startswith(folders)]
    checks.require(not others, "a message", "hold the arrays of its plan alone", others[:3])


class Gathered(NamedTuple):
    """What the nodes of a round have sent."""

    total: PyTree  # The sum of the messages, or all of them, `[slots, ...]`, if they are stacked.
    known: Mapping[int, PyTree]  # The part of its state that the server has, by client.
    fate: np.ndarray  # The fate of each slot, `[slots]`, int8.


class Replies:
    """Reads replies of the shapes of a plan."""

    def __init__(self, shapes: Shapes, *, is_stacked: bool) -> None:
        """Takes the shapes, and whether messages are stacked."""
        self._shapes, self._is_stacked = shapes, is_stacked

    def gathered(
        self,
        replies: Mapping[int, Packet],
        packets: Mapping[int, Packet],
        ids: np.ndarray,
        fate: np.ndarray,
    ) -> Gathered:
        """Adds up, or stacks, the replies that fit; a client without one has dropped out."""
        fate = fate.copy()
        slot_of = {int(c): s for s, c in enumerate(ids) if fate[s] == Fate.CONTRIBUTED}
        for slot in slot_of.values():
            fate[slot] = Fate.DROPPED
        like, num_slots = self._shapes.sent, len(ids)
        if self._is_stacked:
            total = jax.tree.map(lambda s: np.zeros((num_slots, *s.shape), s.dtype), like)
        else:
            total = sums.zeros_like(like)
        known: dict[int, PyTree] = {}
        for node, packet in sorted(packets.items()):
            if node not in replies:
                continue
            clients = packet.facts["clients"]
            try:
                sent, own, fates = self._read(replies[node], packet)
            except ValueError as error:
                warnings.warn(f"the reply of node {node} counts as lost: {error}", stacklevel=2)
                continue
            for place, client in enumerate(clients):
                slot = slot_of[client]
                fate[slot] = fates[place]
                if own is not None:
                    known[client] = trees.take(own, place)
                if self._is_stacked and fates[place] == Fate.CONTRIBUTED:
                    for all_slots, part in zip(
                        jax.tree.leaves(total), jax.tree.leaves(sent), strict=True
                    ):
                        all_slots[slot] = part[place]
            if not self._is_stacked:
                total = _added(total, sent)
        return Gathered(total if self._is_stacked else sums.value(total), known, fate)

    def _read(self, reply: Packet, packet: Packet) -> tuple[PyTree, PyTree, list[int]]:
        """Reads a reply, or raises a ValueError that says why it does not fit."""
        require_echo(reply.facts, packet.facts, ("digest", "round", "clients"))
        num = len(packet.facts["clients"])
        fates = counts_of(reply, "fates")
        known_fates = (Fate.CONTRIBUTED, Fate.NOT_FINITE, Fate.DROPPED)
        rule = f"hold {num} of {[int(fate) for fate in known_fates]}"
        fits = len(fates) == num and set(fates) <= {*known_fates}
        checks.require(fits, "fates", rule, fates)

        def by_client(shapes: PyTree) -> PyTree:
            return jax.tree.map(lambda s: jax.ShapeDtypeStruct((num, *s.shape), s.dtype), shapes)

        like = by_client(self._shapes.sent) if self._is_stacked else self._shapes.sent
        sent = tree_of(reply.arrays, "sent", like)
        checks.require(bool(trees.can_be_summed(sent)), "a sum", "be finite", "NaN or too large")
        known = None
        if self._shapes.known is not None:
            known = tree_of(reply.arrays, "known", by_client(self._shapes.known))
        prefixes = {name.partition("/")[0] for name in reply.arrays}
        expected = {"sent"} | ({"known"} if known is not None else set())
        checks.require(
            prefixes <= expected, "a reply", f"hold {sorted(expected)}", sorted(prefixes)
        )
        return sent, known, fates


@jax.jit
def _added(total: PyTree, part: PyTree) -> PyTree:
    return sums.add(total, jax.tree.map(jnp.asarray, part))
