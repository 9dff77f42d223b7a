"""Masks that clients agree on between nodes: the sum of the simulation, and nothing else of it."""

import jax
import numpy as np
import pytest
from federations import NODES, deploy, key
from flwr.app import Array
from marks import telling
from scipy import stats
from small_problem import NUM_CLIENTS, ROUNDS, SIZES, make_data, make_model
from test_scripts import RATE, one_step

from fedjax_dp.algorithms.dp_fedavg import dp_fedavg
from fedjax_dp.clients.base import LocalConfig
from fedjax_dp.clients.sgd import local_trainer
from fedjax_dp.data import participants, sampling
from fedjax_dp.engine import Fate, PrivacyAccounting, simulation
from fedjax_dp.flower.agreement import KEYS, SHARES, UNMASK
from fedjax_dp.server import secure
from fedjax_dp.server.fixed_point import fixed_point
from fedjax_dp.server.private import gaussian_mean

pytestmark = telling
CLIP = 0.2
# Of six clients one may fail to agree; of those that agreed, two may drop out.
GRAPH = secure.all_pairs(NUM_CLIENTS - 1, colluders=1, dropouts=2)
WORDS = fixed_point(NUM_CLIENTS, integer_bits=4)
quiet = pytest.mark.filterwarnings("ignore::UserWarning")


class Case:
    """DP-FedAvg of all clients under masks; training takes one step on all records."""

    def __init__(self, graph=GRAPH, encoding=WORDS, aggregator=None):
        self.data, self.validation = make_data, lambda: None
        plain = gaussian_mean(CLIP, 0.8, NUM_CLIENTS) if aggregator is None else aggregator
        self._masked = secure.masked(plain, encoding, graph)
        self._plain = secure.masked(plain, encoding, graph, form="cancelled")

    def make(self, model, is_simulated=False):
        trainer = local_trainer(model, LocalConfig(learning_rate=RATE, batch_size=max(SIZES)))
        return dp_fedavg(model, trainer, aggregator=self._plain if is_simulated else self._masked)

    def participation(self):
        return participants.participation(sampling.full_participation(), NUM_CLIENTS)

    def simulated(self):
        return simulation(self.make(make_model(), True), make_data(), self.participation())


def same(found, expected):
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=1e-6)


class Federation:
    """A deployment whose messages a test may read or change."""

    def __init__(self, case):
        self.change = self._unchanged
        self.there = deploy(
            "dp_fedavg", case=case, keys="device", change=lambda *pair: self.change(*pair)
        )
        self.simulation = self.there.simulation

    @staticmethod
    def _unchanged(sent, reply):
        return [reply]

    def play(self, change=None, rounds=1):
        self.change = change or self._unchanged
        return self.simulation.run(self.simulation.init(key()), key(), rounds)

    def ask_again(self, sent):
        """Sends a node a message that it has had already."""
        node = sent.metadata.dst_node_id
        return self.there.grid._app(sent, self.there.grid.contexts[node])


@pytest.fixture(scope="module")
def masks():
    return Federation(Case())


def losing(*nodes, step):
    """Loses the replies of nodes to messages of one type."""

    def change(sent, reply):
        is_lost = sent.metadata.message_type == step and sent.metadata.dst_node_id in nodes
        return [] if is_lost else [reply]

    return change


def of_nodes(record, *nodes):
    return np.isin(record.clients, [client for node in nodes for client in NODES[node]])


def arrays_in(message):
    return message.content.array_records["arrays"]


def mean_of(clients, start):
    """The mean of clipped updates, by the public number of clients, in NumPy."""
    data, total = make_data(), {name: np.zeros_like(x) for name, x in start.items()}
    for client in clients:
        records = data.client(client)
        after = one_step(start, records["x"], records["y"])
        update = {name: after[name] - start[name] for name in start}
        norm = np.sqrt(sum(np.sum(x**2) for x in update.values()))
        for name, x in update.items():
            total[name] = total[name] + x * min(1, CLIP / max(norm, 1e-30)) / NUM_CLIENTS
    return total


def test_a_federation_under_masks_ends_where_its_simulation_ends(masks):
    simulated = Case().simulated()
    state, _, _ = simulated.run(simulated.init(key()), key(), ROUNDS)
    found, record, info = masks.play(rounds=ROUNDS)
    same(found.server, state.server)
    assert np.all(record.fate == Fate.CONTRIBUTED)
    assert np.all(info.aggregator["num_lost"] == 0)


def test_a_message_under_masks_is_uniform(masks):
    found = []

    def read(sent, reply):
        if sent.metadata.message_type == "train":
            found.extend(
                x.numpy().ravel() for x in arrays_in(reply).values() if x.dtype == "uint32"
            )
        return [reply]

    masks.play(read, rounds=40)
    words = np.concatenate(found)
    assert len(words) >= 40 * len(NODES) * 4
    for shift in (0, 28):
        counts = np.bincount((words >> shift) & 15, minlength=16)
        assert stats.chisquare(counts).pvalue > 1e-4


@quiet
def test_drop_outs_are_recovered_and_too_many_lose_the_round(masks):
    start = masks.simulation.init(key()).server.params
    # The step is that of the noise alone.
    state, lost_record, info = masks.play(losing(11, step="train"))
    noise = {name: x - start[name] for name, x in state.server.params.items()}
    assert info.aggregator["num_lost"] == 1 and info.aggregator["num_recovered"] == 0
    assert all(np.all(np.isfinite(x) & (x != 0)) for x in noise.values())
    state, record, info = masks.play(losing(12, step="train"))
    expected = mean_of((0, 2, 4, 5), jax.device_get(start))
    same(state.server.params, {n: start[n] + noise[n] + expected[n] for n in noise})
    np.testing.assert_array_equal(record.fate == Fate.DROPPED, of_nodes(record, 12))
    assert info.aggregator["num_lost"] == 0 and info.aggregator["num_recovered"] == 2
    accounts = [PrivacyAccounting(masks.simulation) for _ in range(2)]
    for account, charged in zip(accounts, (lost_record, record), strict=True):
        account.charge(charged)
    first, second = (account.epsilon({"client": 1e-3})["client"] for account in accounts)
    np.testing.assert_array_equal(first, second)
    assert np.all(first > 0)


@quiet
def test_clients_that_do_not_agree_are_left_out_before_any_data_is_sent(masks):
    for step in (KEYS, SHARES):
        asked, lose = [], losing(13, step=step)

        def change(sent, reply, asked=asked, lose=lose):
            asked.append((sent.metadata.message_type, sent.metadata.dst_node_id))
            return lose(sent, reply)

        _, record, info = masks.play(change)
        left_out = of_nodes(record, 13)
        np.testing.assert_array_equal(record.fate == Fate.UNANNOUNCED, left_out)
        np.testing.assert_array_equal(record.fate == Fate.CONTRIBUTED, ~left_out)
        assert info.aggregator["num_lost"] == 0
        assert ("train", 13) not in asked
        assert asked.count((KEYS, 11)) == (1 if step == KEYS else 2)
    _, record, info = masks.play(losing(11, step=SHARES))
    assert np.all(record.fate == Fate.UNANNOUNCED) and info.aggregator["num_lost"] == 1


def with_array(name, change):
    def changed(reply):
        arrays = arrays_in(reply)
        arrays[name] = Array(change(arrays[name].numpy()))
        return [reply]

    return changed


@quiet
def test_shares_that_do_not_fit_lose_the_round(masks):
    def change(sent, reply):
        # The shares of client 0 are used first.
        if sent.metadata.message_type == UNMASK and sent.metadata.dst_node_id == 11:
            return with_array("given", lambda x: x ^ 1)(reply)
        return [reply]

    _, record, info = masks.play(change)
    assert info.aggregator["num_lost"] == 1 and np.all(record.fate == Fate.DROPPED)


def test_a_set_up_serves_one_message_and_one_share_of_each_neighbour(masks):
    refused = []

    def change(sent, reply):
        kind = sent.metadata.message_type
        if kind == UNMASK and sent.metadata.dst_node_id == 13:
            # The other key of client 1.
            arrays = arrays_in(sent)
            flags = arrays["sent"].numpy().copy()
            flags[1] = ~flags[1]
            arrays["sent"] = Array(flags)
        if kind != KEYS:
            with pytest.raises(ValueError, match="masks must be agreed on between the nodes"):
                masks.ask_again(sent)
            refused.append(kind)
        return [reply]

    def again(sent, reply):
        # The set-up is spent by a second request, so that replies that came first are used.
        return change(sent, reply) if sent.metadata.message_type == UNMASK else [reply]

    masks.play(again)
    assert set(refused) == {UNMASK}

    def twice(sent, reply):
        return change(sent, reply) if sent.metadata.message_type == "train" else [reply]

    with pytest.warns(UserWarning, match="failed"):
        masks.play(twice)
    assert set(refused) == {UNMASK, "train"}
