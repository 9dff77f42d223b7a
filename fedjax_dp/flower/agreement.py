"""An agreement on masks: keys, their shares, and the shares that are given back."""

import secrets
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from flwr.app import ConfigRecord, RecordDict

from fedjax_dp.algorithms.base import FederatedAlgorithm
from fedjax_dp.core import checks
from fedjax_dp.flower.log import LOG
from fedjax_dp.flower.packets import Packet, require_echo, require_kind
from fedjax_dp.flower.request import array_of, roster_in, words_in
from fedjax_dp.server.base import Fate, Roster
from fedjax_dp.server.secure.aggregator import Masks, masked, masks_of
from fedjax_dp.server.secure.graphs import MaskGraph, neighbors_of
from fedjax_dp.server.secure.key_agreement import SeedTable, pair_seed, public_key_of
from fedjax_dp.server.secure.secret_sharing import PRIME, HeldShares, recover_secret, share_secret

# Message types besides that of training, which comes between the last two.
KEYS, SHARES, UNMASK = "train.keys", "train.shares", "train.unmask"
# The key pairs of a client: for masks of pairs, for its own mask, for the encryption of shares.
PAIR, OWN, BOX = range(3)
NUM_KEYS = 3
KEY_BYTES, SHARE_BYTES = 32, -(-PRIME.bit_length() // 8)
_NONCE_BYTES, _TAG_BYTES = 12, 16
# A share of each of the first two keys, encrypted for one neighbour.
SEALED_BYTES = _NONCE_BYTES + 2 * SHARE_BYTES + _TAG_BYTES
# The name of what is held in Flower's context of a node.
_RECORD = "agreement"
_MASKING = "train"
_SETUP_BYTES = 16
# Sends packets of one type to nodes, and returns the replies.
Send = Callable[[str, Mapping[int, Packet]], Mapping[int, Packet]]


def with_seeds(algorithm: FederatedAlgorithm, table: SeedTable) -> FederatedAlgorithm:
    """Gives the masks of an algorithm's aggregator the seeds of a round; all masks are made."""
    masks = masks_of(algorithm.aggregator)
    assert masks is not None
    made = masked(masks.aggregator, masks.encoding, masks.graph, keys=table.keys())
    aggregator = algorithm.aggregator._replace(encode=made.encode, combine=made.combine)
    return algorithm._replace(aggregator=aggregator)


@dataclass(frozen=True)
class Cohort:
    """The clients that agree on masks, and what all of them know."""

    ids: np.ndarray  # The client of each slot, `[slots]`, int32; -1 where none takes part.
    public: np.ndarray  # Their public keys, `[slots, 3, 32]`, uint8.
    round_key: np.ndarray  # The words of the public key of the round, from which the graph follows.

    @cached_property
    def slots(self) -> dict[int, int]:
        """The slot of each client."""
        return {int(client): slot for slot, client in enumerate(self.ids) if client >= 0}

    def key_of(self, client: int, purpose: int) -> bytes:
        """Returns one of a client's public keys."""
        return self.public[self.slots[client], purpose].tobytes()

    def neighbors(self, graph: MaskGraph) -> dict[int, list[int]]:
        """Lists the neighbours of each client."""
        key = jax.random.wrap_key_data(jnp.asarray(self.round_key))
        return neighbors_of(graph, key, Roster(jnp.asarray(self.ids), jnp.asarray(self.ids >= 0)))

    def table(self, num_rows: int) -> SeedTable:
        """Makes an empty table of seeds."""
        num_slots = len(self.ids)
        pair = np.zeros((num_rows, num_slots, 2), np.uint32)
        rows, own = np.zeros(num_slots, np.int32), np.zeros((num_slots, 2), np.uint32)
        return SeedTable(self.ids, rows, pair, own)  # type: ignore[arg-type]

    def require(self, graph: MaskGraph) -> None:
        """Requires a cohort in which no message stands alone."""
        drawn = self.ids[self.ids >= 0]
        rule = f"be at least the {graph.num_clients} of the graph"
        checks.require(len(drawn) >= graph.num_clients, "the clients of masks", rule, len(drawn))
        is_distinct = len(set(drawn.tolist())) == len(drawn)
        checks.require(is_distinct, "the clients of masks", "differ", drawn.tolist())
        require_bytes(self.public, (len(self.ids), NUM_KEYS, KEY_BYTES), "public keys")
        keys = {key.tobytes() for key in self.public[self.ids >= 0].reshape(-1, KEY_BYTES)}
        is_distinct = len(keys) == NUM_KEYS * len(drawn)
        checks.require(is_distinct, "public keys", "differ", "repeated ones")


class Agreement:
    """The part of a node's clients in the agreement on the masks of a round.

    Guarantee: a set-up serves one message of each client. Its keys are from the operating system
    and in the memory of the node alone; each step deletes those that no later one needs. Whatever
    is asked, no client makes two messages under the same masks, or a mask in a cohort below that of
    the graph, and none gives shares of both keys of a neighbour, or any for the sum of fewer
    messages than the graph's drop-outs leave.

    Source: Bonawitz and others 2017, figure 4; Bell and others 2020, algorithm 2.
    """

    def __init__(self, masks: Masks, state: RecordDict) -> None:
        """Wraps the masks of an aggregator, and `Context.state`."""
        self._graph, self._state = masks.graph, state

    def keys(self, packet: Packet) -> Packet:
        """Makes the key pairs of each client, new ones in each set-up; the public keys leave."""
        clients = sorted(packet.facts["clients"])
        private = secrets.token_bytes(NUM_KEYS * KEY_BYTES * len(clients))
        held = _Held(clients, private)
        self._hold(packet, SHARES, held)
        public = [public_key_of(key) for _, keys in held.by_client() for key in keys]
        return answer(packet, "public", public, (len(clients), NUM_KEYS, KEY_BYTES))

    def shares(self, packet: Packet) -> Packet:
        """Divides two keys of each client among its neighbours, encrypted for each."""
        held = self._taken(packet, SHARES)
        public = array_of(packet.arrays, "public")
        cohort = Cohort(ids_of(packet), public, words_in(packet.arrays, "public_key"))
        cohort.require(self._graph)
        neighbors, sealed = cohort.neighbors(self._graph), list[bytes]()
        for client, keys in held.by_client():
            is_own = client in neighbors and all(
                cohort.key_of(client, i) == public_key_of(key) for i, key in enumerate(keys)
            )
            rule = "be those that this node has made for it"
            checks.require(is_own, f"the public keys of client {client}", rule, "others")
            both = [
                share_secret(
                    int.from_bytes(keys[i], "big"), neighbors[client], self._graph.threshold
                )
                for i in (PAIR, OWN)
            ]
            for other in neighbors[client]:
                text = b"".join(shares[other].to_bytes(SHARE_BYTES, "big") for shares in both)
                cipher = _cipher(packet, keys[BOX], cohort.key_of(other, BOX), client, other)
                nonce = secrets.token_bytes(_NONCE_BYTES)
                sealed.append(nonce + cipher.encrypt(nonce, text, None))
        self._hold(packet, _MASKING, held._replace(cohort=cohort))
        return answer(packet, "shares", sealed, (len(held.clients), -1, SEALED_BYTES))

    def seeds(self, packet: Packet) -> dict[int, SeedTable]:
        """Derives the seeds of the masks of each client, for its one message of this set-up."""
        held = self._taken(packet, _MASKING)
        assert held.cohort is not None
        cohort, clients = held.cohort, sorted(packet.facts["clients"])
        checks.require(clients == held.clients, "clients", f"be {held.clients}", clients)
        is_same = np.array_equal(ids_of(packet), cohort.ids)
        is_same &= np.array_equal(words_in(packet.arrays, "public_key"), cohort.round_key)
        checks.require(is_same, "the cohort", "be that which agreed on masks", "another")
        neighbors, slots, tables = cohort.neighbors(self._graph), cohort.slots, {}
        for client, keys in held.by_client():
            tables[client] = table = cohort.table(1)
            for other in neighbors[client]:
                seed = pair_seed(keys[PAIR], cohort.key_of(other, PAIR), client, other)
                table.pair[0, slots[other]] = seed
            table.own[slots[client]] = own_seed(keys[OWN], client)
        left = b"".join(keys[BOX] for _, keys in held.by_client())
        self._hold(packet, UNMASK, held._replace(private=left))
        return tables

    def unmask(self, packet: Packet) -> Packet:
        """Gives back one share of each neighbour: of its own mask if it sent, else of its pairs."""
        held = self._taken(packet, UNMASK)
        assert held.cohort is not None
        cohort, slots, boxes = held.cohort, held.cohort.slots, dict(held.by_client())
        neighbors, given = cohort.neighbors(self._graph), list[bytes]()
        clients, inboxes = packet.facts["clients"], array_of(packet.arrays, "shares")
        sent = array_of(packet.arrays, "sent")
        require_kind(sent, cohort.ids.shape, np.dtype(bool), "sent")
        num = len(next(iter(neighbors.values())))
        require_bytes(inboxes, (len(clients), num, SEALED_BYTES), "shares")
        least, num_sent = len(slots) - self._graph.dropouts, int(np.sum(sent & (cohort.ids >= 0)))
        checks.require(num_sent >= least, "the clients that sent", f"be at least {least}", num_sent)
        for client, inbox in zip(clients, inboxes, strict=True):
            fits = client in boxes and sent[slots[client]]
            rule = "be one of this node whose message has arrived"
            checks.require(fits, f"client {client}", rule, "another")
            pair, own = dict[int, int](), dict[int, int]()
            for other, sealed in zip(neighbors[client], inbox, strict=True):
                (box,) = boxes[client]
                cipher = _cipher(packet, box, cohort.key_of(other, BOX), other, client)
                text = _opened(cipher, sealed.tobytes(), other)
                pair[other] = int.from_bytes(text[:SHARE_BYTES], "big")
                own[other] = int.from_bytes(text[SHARE_BYTES:], "big")
            has_sent = {other for other in pair if sent[slots[other]]}
            shares = HeldShares(pair, own, self._graph.threshold)
            _, of_pairs, of_own = shares.give(sorted(set(pair) - has_sent), sorted(has_sent))
            both = of_pairs | of_own
            given += [both[other].to_bytes(SHARE_BYTES, "big") for other in neighbors[client]]
        return answer(packet, "given", given, (len(clients), -1, SHARE_BYTES))

    def _hold(self, packet: Packet, step: str, held: "_Held") -> None:
        """Stores what the next step needs, in place of all that was held."""
        record: dict[str, Any] = {name: packet.facts[name] for name in ("digest", "setup")}
        record |= {"step": step, "clients": held.clients, "private": held.private}
        if held.cohort is not None:
            cohort = held.cohort
            record |= {"ids": cohort.ids.tolist(), "public": cohort.public.tobytes()}
            record["round_key"] = cohort.round_key.tolist()
        self._state[_RECORD] = ConfigRecord(record)

    def _taken(self, packet: Packet, step: str) -> "_Held":
        """Takes what is held for a step, so that nothing is left for it to be asked again."""
        stored: dict[str, Any] = {}
        if _RECORD in self._state:
            stored = dict(self._state.config_records[_RECORD])
            del self._state[_RECORD]
        asked = {name: packet.facts.get(name) for name in ("digest", "setup")} | {"step": step}
        fits = all(stored.get(name) == value for name, value in asked.items())
        rule = "be agreed on between the nodes, for one message of each client"
        checks.require(fits, "masks", rule, f"a message {step!r} that no set-up waits for")
        cohort = None
        if "ids" in stored:
            ids, words = np.array(stored["ids"], np.int32), np.array(stored["round_key"], np.uint32)
            public = np.frombuffer(stored["public"], np.uint8)
            cohort = Cohort(ids, public.reshape(len(ids), NUM_KEYS, KEY_BYTES), words)
        return _Held(list(stored["clients"]), stored["private"], cohort)


class _Held(NamedTuple):
    """What a node holds between two messages."""

    clients: Sequence[int]  # Those of this node.
    # Of each, one after another; once masks are made, the last of each.
    private: bytes
    cohort: Cohort | None = None  # None before it is known.

    def by_client(self) -> Iterator[tuple[int, list[bytes]]]:
        """Iterates over the clients and their private keys."""
        size = len(self.private) // len(self.clients)
        for i, client in enumerate(self.clients):
            starts = range(i * size, (i + 1) * size, KEY_BYTES)
            yield client, [self.private[start : start + KEY_BYTES] for start in starts]


def own_seed(private_key: bytes, client: int) -> np.ndarray:
    """Derives the seed of a client's own mask: that of a pair with itself."""
    return pair_seed(private_key, public_key_of(private_key), client, client)


def ids_of(packet: Packet) -> np.ndarray:
    """Reads the client of each slot; -1 where none takes part."""
    ids, is_there = roster_in(packet.arrays, checks.COUNT_LIMIT)
    return np.where(is_there, ids, -1).astype(np.int32)


def require_bytes(array: np.ndarray, shape: tuple[int, ...], name: str) -> None:
    """Requires an array of bytes of a shape."""
    found = f"{array.dtype}{list(array.shape)}"
    fits = array.shape == shape and array.dtype == np.uint8
    checks.require(fits, name, f"be uint8{list(shape)}", found)


def answer(packet: Packet, name: str, parts: Sequence[bytes], shape: Sequence[int]) -> Packet:
    """Makes the reply to a step, of one array of bytes."""
    facts = {n: packet.facts[n] for n in ("digest", "round", "setup", "clients")}
    array = np.frombuffer(b"".join(parts), np.uint8).reshape(shape)
    return Packet(facts, {name: array})


def _cipher(
    packet: Packet, private: bytes, public: bytes, sender: int, receiver: int
) -> ChaCha20Poly1305:
    """Makes the cipher of what one client sends another in a set-up."""
    common = X25519PrivateKey.from_private_bytes(private).exchange(
        X25519PublicKey.from_public_bytes(public)
    )
    digest, round, setup = (packet.facts[name] for name in ("digest", "round", "setup"))
    info = f"fedjax_dp shares {digest} {round} {setup} {sender} {receiver}".encode()
    return ChaCha20Poly1305(HKDF(SHA256(), KEY_BYTES, salt=None, info=info).derive(common))


def _opened(cipher: ChaCha20Poly1305, sealed: bytes, sender: int) -> bytes:
    """Decrypts the shares of a neighbour."""
    try:
        return cipher.decrypt(sealed[:_NONCE_BYTES], sealed[_NONCE_BYTES:], None)
    except InvalidTag:
        rule = "be encrypted by it for this set-up"
        raise ValueError(f"the shares of client {sender} must {rule}, got others") from None


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
        shares: dict[int, dict[int, int]] = {client: {} for client in neighbors}
        for holder, rows in sorted(given.items()):
            for client, share in zip(neighbors[holder], rows, strict=True):
                shares[client][holder] = int.from_bytes(share.tobytes(), "big")
        return shares

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
        seeds: dict[int, np.ndarray] = {}
        for node, reply in sorted(self._send(kind, packets).items()):
            asked = packets[node].facts
            try:
                require_echo(reply.facts, asked, ("digest", "round", "setup", "clients"))
                checks.require(list(reply.arrays) == [name], "a reply", f"hold {name!r}", "others")
                require_bytes(reply.arrays[name], (len(asked["clients"]), *shape), name)
            except ValueError as error:
                warnings.warn(f"the reply of node {node} counts as lost: {error}", stacklevel=2)
                continue
            seeds |= dict(zip(asked["clients"], reply.arrays[name], strict=True))
        return seeds


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
