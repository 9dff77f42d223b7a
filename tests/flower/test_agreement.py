"""The agreement on masks between nodes, on the host: seeds, drop-outs and what is refused."""

import itertools
import warnings
from dataclasses import replace

import jax
import numpy as np
import pytest
from flwr.app import RecordDict

from fedjax_dp.flower.agreement import KEYS, SHARES, UNMASK, Agreement, Masking
from fedjax_dp.flower.packets import Packet
from fedjax_dp.server import secure
from fedjax_dp.server.base import Fate
from fedjax_dp.server.mean import weighted_mean
from fedjax_dp.server.secure.aggregator import masks_of

# Of each node; one has several clients.
NODES = {11: (0, 3, 7), 12: (4,), 13: (5,), 14: (9,)}
PLACES = {client: node for node, clients in NODES.items() for client in clients}
# Slots of the cohort, one of them empty.
IDS = np.array([9, 0, -1, 7, 4, 3, 5], np.int32)
COHORT = sorted(PLACES)
FACTS = {"digest": "d" * 64, "round": 2}
ROUND_KEY = np.asarray(jax.random.key_data(jax.random.key(1)))
GRAPHS = {
    "all pairs": secure.all_pairs(5, colluders=1, dropouts=2),
    "random": secure.random_neighbors(6, num_neighbors=4, failure=0.9),
}


class Nodes:
    """Nodes in this process; `change(step, node, reply)` returns what arrives of a reply."""

    def __init__(self, graph=GRAPHS["all pairs"], change=lambda step, node, reply: reply):
        words = secure.fixed_point(max(10, graph.num_clients), integer_bits=4)
        self.masks = masks_of(secure.masked(weighted_mean(), words, graph))
        self.states = {node: RecordDict() for node in NODES}
        self.change, self.sent = change, []
        self.server = Masking(self.masks, PLACES, self.send)

    def at(self, node):
        return Agreement(self.masks, self.states[node])

    def send(self, step, packets):
        found = {}
        play = {KEYS: Agreement.keys, SHARES: Agreement.shares, UNMASK: Agreement.unmask}[step]
        for node, packet in packets.items():
            self.sent.append((step, node, packet))
            reply = self.change(step, node, play(self.at(node), packet))
            if reply is not None:
                found[node] = reply
        return found

    def set_up(self):
        return self.server.set_up(FACTS, IDS, ROUND_KEY)

    def train(self, set_up, node):
        return Packet(
            {**set_up.facts, "clients": list(NODES[node])},
            {
                "roster/clients": set_up.cohort.ids,
                "roster/is_announced": set_up.cohort.ids >= 0,
                "public_key": ROUND_KEY,
            },
        )

    def seeds(self, set_up):
        found = {}
        for node in sorted({PLACES[client] for client in set_up.cohort.slots}):
            found |= self.at(node).seeds(self.train(set_up, node))
        return found


def fates(set_up, *dropped):
    ids = set_up.cohort.ids
    fate = np.where(ids < 0, Fate.EMPTY, Fate.CONTRIBUTED)
    return np.where(np.isin(ids, dropped), Fate.DROPPED, fate).astype(np.int8)


def lost(at_step, *nodes):
    return lambda step, node, reply: None if step == at_step and node in nodes else reply


@pytest.mark.parametrize("graph", GRAPHS)
def test_neighbours_have_one_seed_and_drop_outs_are_recovered(graph):
    nodes = Nodes(GRAPHS[graph])
    set_up = nodes.set_up()
    tables, slots = nodes.seeds(set_up), set_up.cohort.slots
    assert sorted(tables) == sorted(slots) == COHORT
    seeds = set()
    for one, other in itertools.combinations(COHORT, 2):
        seed = tables[one].pair[0, slots[other]]
        np.testing.assert_array_equal(seed, tables[other].pair[0, slots[one]])
        assert np.any(seed) == (other in set_up.neighbors[one])
        seeds.add(tuple(seed))
    seeds |= {tuple(tables[client].own[slots[client]]) for client in COHORT}
    num_pairs = sum(map(len, set_up.neighbors.values())) // 2
    assert len(seeds - {(0, 0)}) == num_pairs + len(COHORT)

    dropped = (4,) if nodes.masks.graph.dropouts else ()
    table, fate = nodes.server.recovered(set_up, fates(set_up, *dropped))
    np.testing.assert_array_equal(fate, fates(set_up, *dropped))
    for client, slot in slots.items():
        if client in dropped:
            assert not np.any(table.own[slot])
            for other in set(set_up.neighbors[client]) - set(dropped):
                found = table.pair[table.rows[slot], slots[other]]
                np.testing.assert_array_equal(found, tables[client].pair[0, slots[other]])
        else:
            np.testing.assert_array_equal(table.own[slot], tables[client].own[slot])
    assert np.any(table.pair) == bool(dropped)


def test_a_second_set_up_repeats_nothing():
    nodes = Nodes()
    first = nodes.set_up()
    before = nodes.seeds(first)
    second = nodes.set_up()
    after, slots = nodes.seeds(second), first.cohort.slots
    assert first.facts["setup"] != second.facts["setup"]
    for client in COHORT:
        assert not np.any(before[client].own[slots[client]] == after[client].own[slots[client]])
        there = before[client].pair[0] != 0
        assert not np.any((before[client].pair == after[client].pair)[0][there])


@pytest.mark.parametrize("step", [KEYS, SHARES])
def test_the_others_agree_again_without_a_node_that_does_not_answer(step):
    nodes = Nodes(change=lost(step, 13))
    set_up = nodes.set_up()
    assert sorted(set_up.cohort.slots) == [0, 3, 4, 7, 9]
    asked = [name for name, node, _ in nodes.sent if node == 11]
    assert asked == ([KEYS, SHARES] if step == KEYS else [KEYS, SHARES, KEYS, SHARES])
    assert sorted(nodes.seeds(set_up)) == [0, 3, 4, 7, 9]
    few = Nodes(change=lost(step, 11)).set_up()
    assert not few.cohort.slots


def test_too_few_clients_online_are_asked_for_nothing():
    nodes = Nodes()
    few = nodes.server.set_up(FACTS, np.where(IDS < 5, IDS, -1), ROUND_KEY)
    assert not few.cohort.slots and not nodes.sent
    assert few.facts == {**FACTS, "setup": ""}


def spoilt(name, change, *at):
    def changed(step, node, reply):
        if node not in (at or (11,)) or name not in reply.arrays:
            return reply
        return reply._replace(arrays={name: change(reply.arrays[name])})

    return changed


@pytest.mark.parametrize(
    "change",
    [
        lambda keys: keys[:, :2],
        lambda keys: keys.astype(np.int32),
        lambda keys: np.concatenate([keys[:1], keys[:1], keys[2:]]),
        lambda keys: np.concatenate([keys[:1] * np.uint8([[1], [1], [0]]), keys[1:]]),
    ],
    ids=["another shape", "another type", "repeated keys", "a key of low order"],
)
def test_public_keys_that_do_not_fit_are_left_out(change):
    nodes = Nodes(secure.all_pairs(3), change=spoilt("public", change))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        assert sorted(nodes.set_up().cohort.slots) == [4, 5, 9]


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_shares_that_are_wrong_or_missing_lose_the_round():
    def flipped(given):
        return given ^ np.uint8(1)

    # Of one node alone they would do without.
    for change in (spoilt("given", flipped, 11, 12), lost(UNMASK, 11, 12, 13)):
        nodes = Nodes(change=change)
        set_up = nodes.set_up()
        nodes.seeds(set_up)
        _, fate = nodes.server.recovered(set_up, fates(set_up))
        np.testing.assert_array_equal(fate, fates(set_up, *COHORT))
    nodes = Nodes()
    set_up = nodes.set_up()
    nodes.seeds(set_up)
    # The keys that are recovered are whole ones, and others than those of the public keys.
    others = replace(set_up.cohort, public=set_up.cohort.public[:, [1, 0, 2]])
    _, fate = nodes.server.recovered(set_up._replace(cohort=others), fates(set_up))
    np.testing.assert_array_equal(fate, fates(set_up, *COHORT))


@pytest.mark.parametrize(("node", "dropped"), [(11, ()), (13, (4,))])
def test_wrong_shares_of_one_node_lose_no_round(node, dropped):
    nodes = Nodes(change=spoilt("given", lambda given: given ^ np.uint8(1), node))
    set_up = nodes.set_up()
    tables, slots = nodes.seeds(set_up), set_up.cohort.slots
    table, fate = nodes.server.recovered(set_up, fates(set_up, *dropped))
    np.testing.assert_array_equal(fate, fates(set_up, *dropped))
    for client in set(COHORT) - set(dropped):
        slot = slots[client]
        np.testing.assert_array_equal(table.own[slot], tables[client].own[slot])


def test_too_few_messages_ask_for_no_shares():
    nodes = Nodes()
    set_up = nodes.set_up()
    nodes.seeds(set_up)
    table, fate = nodes.server.recovered(set_up, fates(set_up, 0, 3, 7))
    assert not np.any(table.own) and UNMASK not in {step for step, _, _ in nodes.sent}
    np.testing.assert_array_equal(fate, fates(set_up, 0, 3, 7))


def test_a_set_up_serves_one_message():
    nodes = Nodes()
    set_up = nodes.set_up()
    packet = nodes.train(set_up, 11)
    before = RecordDict(dict(nodes.states[11]))
    nodes.at(11).seeds(packet)
    with pytest.raises(ValueError, match="masks must be agreed on between the nodes"):
        nodes.at(11).seeds(packet)
    wrong = {
        "setup": ({"setup": "0" * 32}, {}, "masks must be agreed on"),
        "digest": ({"digest": "0" * 64}, {}, "masks must be agreed on"),
        "clients": ({"clients": [0, 3]}, {}, "clients must be"),
        "graph": ({}, {"public_key": ROUND_KEY + np.uint32(1)}, "the cohort must be that"),
        "cohort": ({}, {"roster/is_announced": IDS > 0}, "the cohort must be that"),
    }
    for facts, arrays, match in wrong.values():
        state = RecordDict(dict(before))
        changed = Packet({**packet.facts, **facts}, {**packet.arrays, **arrays})
        with pytest.raises(ValueError, match=match):
            Agreement(nodes.masks, state).seeds(changed)
        # Nothing is left to try again with.
        with pytest.raises(ValueError, match="masks must be agreed on"):
            Agreement(nodes.masks, state).seeds(packet)


def test_a_node_gives_shares_once_and_of_one_key_of_a_neighbour():
    nodes = Nodes()
    set_up = nodes.set_up()
    nodes.seeds(set_up)
    before = {node: RecordDict(dict(state)) for node, state in nodes.states.items()}
    nodes.server.recovered(set_up, fates(set_up, 4))
    asked = {node: packet for step, node, packet in nodes.sent if step == UNMASK}
    assert sorted(asked) == [11, 13, 14]
    one = asked[13]
    with pytest.raises(ValueError, match="masks must be agreed on"):
        nodes.at(13).unmask(one)

    def with_sent(*clients):
        sent = np.isin(set_up.cohort.ids, clients)
        return Packet(one.facts, {**one.arrays, "sent": sent})

    cases = (
        (with_sent(0, 3, 7, 9), "client 5 must be one of this node whose message has arrived"),
        (with_sent(5, 9, 0), "the clients that sent must be at least 4"),
        (
            Packet(one.facts, {**one.arrays, "shares": one.arrays["shares"] ^ np.uint8(1)}),
            "the shares of client 0 must be encrypted by it",
        ),
        (
            Packet({**one.facts, "clients": [0]}, one.arrays),
            "client 0 must be one of this node",
        ),
    )
    for packet, match in cases:
        with pytest.raises(ValueError, match=match):
            Agreement(nodes.masks, RecordDict(dict(before[13]))).unmask(packet)


def test_clients_agree_in_no_cohort_that_would_bare_a_message():
    def refused(change, match):
        nodes = Nodes()
        nodes.set_up()
        packet = next(p for step, node, p in nodes.sent if (step, node) == (SHARES, 12))
        nodes.at(12).keys(Packet({**packet.facts, "clients": [4]}))
        with pytest.raises(ValueError, match=match):
            nodes.at(12).shares(packet._replace(arrays={**packet.arrays, **change(packet.arrays)}))

    refused(lambda a: {"roster/is_announced": np.isin(IDS, [0, 3, 4, 9])}, "at least the 5 of")
    refused(
        lambda a: {"roster/clients": np.where(IDS == 9, 0, IDS)}, "clients of a cohort must differ"
    )
    refused(
        lambda a: {"public": np.repeat(a["public"][1:2], len(IDS), 0)}, "public keys must differ"
    )
    refused(lambda a: {"public": a["public"][:, :2]}, "public keys must be uint8")
    refused(lambda a: {}, "the public keys of client 4 must be those that this node has made")
