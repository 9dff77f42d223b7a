"""The server's part of an agreement on masks: it carries keys and shares, and recovers seeds."""

import secrets
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fedjax_dp.core import checks
from fedjax_dp.flower.agreement import (
    KEY_BYTES,
    KEYS,
    NUM_KEYS,
    OWN,
    PAIR,
    SEALED_BYTES,
    SHARE_BYTES,
    SHARES,
    UNMASK,
    Cohort,
    own_seed,
    require_bytes,
)
from fedjax_dp.flower.log import LOG
from fedjax_dp.flower.packets import Packet, require_echo
from fedjax_dp.server.base import Fate
from fedjax_dp.server.secure.aggregator import Masks
from fedjax_dp.server.secure.key_agreement import SeedTable, pair_seed, public_key_of
from fedjax_dp.server.secure.secret_sharing import recover_secret

_SETUP_BYTES = 16
# Sends packets of one type to nodes, and returns the replies.
Send = Callable[[str, Mapping[int, Packet]], Mapping[int, Packet]]


class SetUp(NamedTuple):
    """What the clients of a round have agreed on."""

    facts: Mapping[str, Any]  # Of each message of the round, among them the name of the set-up.
    cohort: Cohort  # The clients that completed it, and their public keys.
    neighbors: Mapping[int, Sequence[int]]  # Of each of them, in order.
    # What each of them has encrypted for its neighbours, `[neighbours, bytes]`.
    sealed: Mapping[int, np.ndarray]


class Masking:
    """The server's part in the masks of a round.

    Guarantee: the server learns public keys, shares that it cannot read, messages under masks, and
    one key at most of each client: of its own mask if its message has arrived, else of its pairs.
    """

    def __init__(self, masks: Masks, places: Mapping[int, int], send: Send) -> None:
        """Wraps masks, the node of each client, and what reaches the nodes."""
        self._graph, self._most = masks.graph, masks.encoding.max_clients
        self._places, self._send = places, send

    def set_up(self, facts: Mapping[str, Any], ids: np.ndarray, round_key: np.ndarray) -> SetUp:
        """Lets the clients of a round, `ids` by slot, agree; again without those that are silent.

        Without clients if they are too few for the graph or too many for the words.
        """
        num_drawn = np.sum(ids >= 0)
        facts = {**facts, "setup": ""}
        while self._graph.num_clients <= np.sum(ids >= 0) <= self._most:
            facts = {**facts, "setup": secrets.token_hex(_SETUP_BYTES)}
            made = self._public_keys(facts, ids[ids >= 0].tolist())
            ids = _only(ids, made)
            if np.sum(ids >= 0) < self._graph.num_clients:
                break
            public = np.zeros((len(ids), NUM_KEYS, KEY_BYTES), np.uint8)
            cohort = Cohort(ids, public, round_key)
            for client, slot in cohort.slots.items():
                public[slot] = made[client]
            neighbors = cohort.neighbors(self._graph)
            common = {
                "roster/clients": ids,
                "roster/is_announced": ids >= 0,
                "public": public,
                "public_key": round_key,
            }
            packets = self._packets(facts, neighbors, common)
            num = len(next(iter(neighbors.values())))
            sealed = self._answers(SHARES, packets, "shares", (num, SEALED_BYTES))
            if len(sealed) == len(neighbors):
                LOG.info("%d of %d clients agreed on masks", len(sealed), num_drawn)
                return SetUp(facts, cohort, neighbors, sealed)
            ids = _only(ids, sealed)
        LOG.info("too few clients for masks, or too many: the round has no sum")
        none = np.full_like(ids, -1)
        return SetUp(facts, Cohort(none, np.zeros(0, np.uint8), round_key), {}, {})

    def recovered(self, set_up: SetUp, fate: np.ndarray) -> tuple[SeedTable, np.ndarray]:
        """Recovers the seeds of the masks that are left in the sum of a round, and the fates.

        If they cannot be recovered, or messages are too few, no message counts: the round is lost.
        """
        cohort, graph, slots = set_up.cohort, self._graph, set_up.cohort.slots
        table = cohort.table(max(1, graph.dropouts))
        sent = {c for c, s in slots.items() if fate[s] in (Fate.CONTRIBUTED, Fate.NOT_FINITE)}
        dropped = sorted(set(slots) - sent)
        has_few = [len(sent.intersection(n)) < graph.threshold for n in set_up.neighbors.values()]
        if not slots or len(dropped) > graph.dropouts or any(has_few):
            # The aggregator finds the same, and loses the round.
            return table, fate
        shares = self._shares(set_up, sent)
        try:
            for client in sorted(sent):
                key = self._private_key(set_up, shares, client, OWN)
                table.own[slots[client]] = own_seed(key, client)
            for row, client in enumerate(dropped):
                key = self._private_key(set_up, shares, client, PAIR)
                table.rows[slots[client]] = row
                for other in sent.intersection(set_up.neighbors[client]):
                    seed = pair_seed(key, cohort.key_of(other, PAIR), client, other)
                    table.pair[row, slots[other]] = seed
        except ValueError as error:
            warnings.warn(f"the sum of the round is lost under its masks: {error}", stacklevel=2)
            fate = fate.copy()
            fate[sorted(slots.values())] = Fate.DROPPED
        return table, fate

    def _public_keys(self, facts: Mapping[str, Any], clients: list[int]) -> dict[int, np.ndarray]:
        """Collects the public keys of clients, without nodes some of whose keys are of no use."""
        packets = self._packets(facts, clients)
        made = self._answers(KEYS, packets, "public", (NUM_KEYS, KEY_BYTES))
        counts = Counter(key.tobytes() for keys in made.values() for key in keys)
        wrong = {
            self._places[client]
            for client, keys in made.items()
            if any(counts[key.tobytes()] > 1 or _is_of_low_order(key) for key in keys)
        }
        if wrong:
            rule = "a public key of theirs is repeated or of low order"
            warnings.warn(f"nodes {sorted(wrong)} are left out: {rule}", stacklevel=2)
        return {c: keys for c, keys in made.items() if self._places[c] not in wrong}

    def _shares(self, set_up: SetUp, sent: set[int]) -> dict[int, dict[int, int]]:
        """Collects the shares of each client by holder, from those whose messages have arrived."""
        neighbors, sealed = set_up.neighbors, set_up.sealed
        inbox = {
            client: np.stack(
                [sealed[other][neighbors[other].index(client)] for other in neighbors[client]]
            )
            for client in sent
        }
        common = {"sent": np.isin(set_up.cohort.ids, sorted(sent))}
        packets = self._packets(set_up.facts, sent, common, {"shares": inbox})
        num = len(next(iter(neighbors.values())))
        given = self._answers(UNMASK, packets, "given", (num, SHARE_BYTES))
        found: dict[int, dict[int, int]] = {client: {} for client in neighbors}
        for holder, rows in sorted(given.items()):
            for client, share in zip(neighbors[holder], rows, strict=True):
                found[client][holder] = int.from_bytes(share.tobytes(), "big")
        return found

    def _private_key(
        self, set_up: SetUp, shares: Mapping[int, Mapping[int, int]], client: int, purpose: int
    ) -> bytes:
        """Recovers a key of a client that fits its public one, whichever one node gives of it."""
        held, threshold = shares[client], self._graph.threshold
        public, nodes = set_up.cohort.key_of(client, purpose), {self._places[h] for h in held}
        for left_out in (None, *sorted(nodes)):
            given = {h: share for h, share in held.items() if self._places[h] != left_out}
            if len(given) >= threshold:
                secret = recover_secret(given, threshold)
                if secret < 2 ** (8 * KEY_BYTES):
                    key = secret.to_bytes(KEY_BYTES, "big")
                    if public_key_of(key) == public:
                        return key
        rule = f"be {threshold} that give its private key"
        raise ValueError(f"the shares of client {client} must {rule}, got {len(held)}")

    def _packets(
        self,
        facts: Mapping[str, Any],
        clients: Sequence[int] | Mapping[int, Any] | set[int],
        common: Mapping[str, np.ndarray] = {},
        of_clients: Mapping[str, Mapping[int, np.ndarray]] = {},
    ) -> dict[int, Packet]:
        """Makes a packet for each node of some clients."""
        groups: dict[int, list[int]] = {}
        for client in sorted(clients):
            groups.setdefault(self._places[client], []).append(client)
        packets = {}
        for node, group in sorted(groups.items()):
            own = {name: np.stack([of[c] for c in group]) for name, of in of_clients.items()}
            packets[node] = Packet({**facts, "clients": group}, {**common, **own})
        return packets

    def _answers(
        self, kind: str, packets: Mapping[int, Packet], name: str, shape: tuple[int, ...]
    ) -> dict[int, np.ndarray]:
        """Sends a step to the nodes; returns what fits, by client."""
        found: dict[int, np.ndarray] = {}
        for node, reply in sorted(self._send(kind, packets).items()):
            asked = packets[node].facts
            try:
                require_echo(reply.facts, asked, ("digest", "round", "setup", "clients"))
                checks.require(list(reply.arrays) == [name], "a reply", f"hold {name!r}", "others")
                require_bytes(reply.arrays[name], (len(asked["clients"]), *shape), name)
            except ValueError as error:
                warnings.warn(f"the reply of node {node} counts as lost: {error}", stacklevel=2)
                continue
            found |= dict(zip(asked["clients"], reply.arrays[name], strict=True))
        return found


def _is_of_low_order(key: np.ndarray) -> bool:
    """Whether a public key gives no secret with any private one, so that X25519 refuses it."""
    try:
        pair_seed(bytes(KEY_BYTES), key.tobytes(), 0, 1)
    except ValueError:
        return True
    return False


def _only(ids: np.ndarray, clients: Mapping[int, Any]) -> np.ndarray:
    """Leaves the slots of some clients."""
    return np.where(np.isin(ids, list(clients)), ids, -1).astype(np.int32)
