"""Federations whose clients agree on masks: the sums of a simulation, and uniform messages."""

import jax
import numpy as np
import pytest
from federations import NODES, deploy, key
from flwr.app import Array
from marks import slow, telling
from scipy import stats
from small_problem import NUM_CLIENTS, NUM_FEATURES, ROUNDS, SIZES, make_data, make_model
from test_scripts import RATE, one_step, script_of

from fedjax_dp.algorithms import dp_fedavg, fedavg, scaffold
from fedjax_dp.clients.base import LocalConfig
from fedjax_dp.clients.sgd import local_trainer
from fedjax_dp.data import participants, sampling
from fedjax_dp.data.federated import FederatedData
from fedjax_dp.engine import Fate, PrivacyAccounting, federation, population_of, simulation
from fedjax_dp.experiment import load_config, run
from fedjax_dp.experiment.reading.config_files import to_toml
from fedjax_dp.flower import (
    GridNodes,
    Node,
    Script,
    client_app,
    client_app_of,
    deployed,
    run_on,
)
from fedjax_dp.flower.agreement import KEYS, SHARES, UNMASK
from fedjax_dp.flower.exchange import FOLDER
from fedjax_dp.flower.testing import InProcess
from fedjax_dp.io import JournalFile
from fedjax_dp.io.logbook import read_metrics
from fedjax_dp.privacy.mechanisms.distributed import make_plan
from fedjax_dp.server import secure
from fedjax_dp.server.fixed_point import fixed_point
from fedjax_dp.server.mean import weighted_mean
from fedjax_dp.server.private import discrete_mean, gaussian_mean

CLIP, TRAIN = 0.2, "train"
# Of six clients one may fail to agree; of those that agreed, two may drop out.
GRAPH = secure.all_pairs(NUM_CLIENTS - 1, colluders=1, dropouts=2)
RANDOM = secure.random_neighbors(NUM_CLIENTS, num_neighbors=4, dropouts=1)
WORDS = fixed_point(NUM_CLIENTS, integer_bits=4)
WIDE = fixed_point(NUM_CLIENTS, integer_bits=4, word_bits=64)
quiet = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.fixture(autouse=True)
def noise_of_the_root(monkeypatch):
    """Without the random bits of each attempt, so that noise is that of the simulation."""
    monkeypatch.setattr("fedjax_dp.flower.server._Server._attempt", lambda self, number: ())


class Case:
    """An algorithm of all clients under masks; training takes one step on all records."""

    def __init__(self, graph=GRAPH, encoding=WORDS, aggregator=None):
        self.data, self.validation = make_data, lambda: None
        plain = gaussian_mean(CLIP, 0.8, NUM_CLIENTS) if aggregator is None else aggregator
        self._build = fedavg if plain.claim is None else dp_fedavg
        self._aggregators = {
            form: secure.masked(plain, encoding, graph, form=form)
            for form in ("masked", "cancelled")
        }

    def make(self, model, form="masked"):
        trainer = local_trainer(model, LocalConfig(learning_rate=RATE, batch_size=max(SIZES)))
        return self._build(model, trainer, aggregator=self._aggregators[form])

    def participation(self):
        return participants.participation(sampling.full_participation(), NUM_CLIENTS)


class Federation:
    """A deployment whose messages a test may read or change."""

    def __init__(self, case=None, journal=None):
        self.change = self._unchanged

        def change(sent, reply):
            return self.change(sent, reply)

        case = Case() if case is None else case
        there = deploy("masks", case=case, keys="device", change=change, journal=journal)
        self.simulation, self.grid, _ = there
        self.start = jax.device_get(self.simulation.init(key()).server.params)

    @staticmethod
    def _unchanged(sent, reply):
        return [reply]

    def play(self, change=None, rounds=1):
        self.change = change or self._unchanged
        return self.simulation.run(self.simulation.init(key()), key(), rounds)

    def ask_again(self, sent):
        """Sends a node a message that it has had already."""
        node = sent.metadata.dst_node_id
        return self.grid._app(sent, self.grid.contexts[node])

    def mean_of(self, clients):
        """The start plus the mean of clipped updates, by the public number of clients."""
        after = dict(self.start)
        for client in clients:
            update = update_of(client, self.start)
            norm = np.sqrt(sum(np.sum(x**2) for x in update.values()))
            scale = min(1, CLIP / max(norm, 1e-30)) / NUM_CLIENTS
            after = {name: x + scale * update[name] for name, x in after.items()}
        return after


def update_of(client, start):
    """An update without noise, in NumPy."""
    records = make_data().client(client)
    after = one_step(start, records["x"], records["y"])
    return {name: after[name] - x for name, x in start.items()}


def difference(after, before):
    return {name: np.asarray(x - before[name]) for name, x in after.items()}


def same(found, expected):
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=1e-6)


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


def words_in(sent, reply):
    """The words of a message to the sum; none in a message of another type."""
    if sent.metadata.message_type != TRAIN:
        return []
    found = [array.numpy().ravel() for array in arrays_in(reply).values()]
    return [x for x in found if x.dtype == np.uint32]


@pytest.fixture(scope="module")
def masks():
    return Federation()


@telling
def test_a_federation_under_masks_ends_where_its_simulation_ends(masks):
    case = Case()
    simulated = simulation(case.make(make_model(), "cancelled"), make_data(), case.participation())
    state, _, _ = simulated.run(simulated.init(key()), key(), ROUNDS)
    found, record, info = masks.play(rounds=ROUNDS)
    same(found.server, state.server)
    assert np.all(record.fate == Fate.CONTRIBUTED)
    assert np.all(info.aggregator["num_lost"] == 0)


@telling
def test_a_message_under_masks_is_uniform(masks):
    found = []

    def read(sent, reply):
        found.extend(words_in(sent, reply))
        return [reply]

    masks.play(read, rounds=40)
    words, count = np.concatenate(found), len(found) // 40
    assert len(words) >= 40 * len(NODES) * (NUM_FEATURES + 1)
    # The same round again: the same messages under other masks.
    masks.play(read)
    for first, again in zip(found[:count], found[-count:], strict=True):
        assert np.all(first != again)
    for shift in (0, 28):
        counts = np.bincount((words >> shift) & 15, minlength=16)
        assert stats.chisquare(counts).pvalue > 1e-4


@telling
@quiet
def test_drop_outs_are_recovered_and_too_many_lose_the_round(masks):
    # The step of a lost round is that of the noise alone.
    state, lost_record, info = masks.play(losing(11, step=TRAIN))
    noise = difference(state.server.params, masks.start)
    assert info.aggregator["num_lost"] == 1 and info.aggregator["num_recovered"] == 0
    assert all(np.all(np.isfinite(x) & (x != 0)) for x in noise.values())
    state, record, info = masks.play(losing(12, step=TRAIN))
    same(difference(state.server.params, noise), masks.mean_of((0, 2, 4, 5)))
    np.testing.assert_array_equal(record.fate == Fate.DROPPED, of_nodes(record, 12))
    assert info.aggregator["num_lost"] == 0 and info.aggregator["num_recovered"] == 2
    accounts = [PrivacyAccounting(masks.simulation) for _ in range(2)]
    for account, charged in zip(accounts, (lost_record, record), strict=True):
        account.charge(charged)
    first, second = (account.epsilon({"client": 1e-3})["client"] for account in accounts)
    np.testing.assert_array_equal(first, second)
    assert np.all(first > 0)


@telling
@quiet
def test_clients_that_do_not_agree_are_left_out_before_any_data_is_sent(masks):
    for step in (KEYS, SHARES):
        asked, lose = [], losing(13, step=step)

        def change(sent, reply, asked=asked, lose=lose):
            asked.append((sent.metadata.message_type, sent.metadata.dst_node_id))
            return lose(sent, reply)

        _, record, info = masks.play(change)
        is_left_out = of_nodes(record, 13)
        np.testing.assert_array_equal(record.fate == Fate.UNANNOUNCED, is_left_out)
        np.testing.assert_array_equal(record.fate == Fate.CONTRIBUTED, ~is_left_out)
        assert info.aggregator["num_lost"] == 0 and (TRAIN, 13) not in asked
        asked.clear()
        _, record, info = masks.play(losing(11, step=step))
        assert np.all(record.fate == Fate.UNANNOUNCED) and info.aggregator["num_lost"] == 1
        assert TRAIN not in {kind for kind, _ in asked}


@telling
@quiet
def test_shares_that_do_not_fit_lose_the_round(masks):
    def change(sent, reply):
        # Of one node alone they would do without.
        if sent.metadata.message_type == UNMASK and sent.metadata.dst_node_id in (11, 12):
            arrays = arrays_in(reply)
            arrays["given"] = Array(arrays["given"].numpy() ^ np.uint8(1))
        return [reply]

    state, record, info = masks.play(change)
    assert info.aggregator["num_lost"] == 1 and np.all(record.fate == Fate.DROPPED)
    assert all(np.all(np.isfinite(x)) for x in state.server.params.values())


@telling
@quiet
def test_a_node_answers_each_step_of_a_set_up_once(masks):
    for step in (SHARES, TRAIN, UNMASK):
        refused = []

        def change(sent, reply, step=step, refused=refused):
            if sent.metadata.message_type == step:
                if step == UNMASK:
                    # Asks for the other key of client 1.
                    arrays = arrays_in(sent)
                    arrays["sent"] = Array(arrays["sent"].numpy() ^ (np.arange(NUM_CLIENTS) == 1))
                with pytest.raises(ValueError, match="masks must be agreed on between the nodes"):
                    masks.ask_again(sent)
                refused.append(sent.metadata.dst_node_id)
            return [reply]

        masks.play(change)
        # Of shares there is a second set-up in vain, and so on.
        assert set(refused) == {*NODES}


@telling
def test_nodes_and_server_with_other_keys_exchange_nothing():
    for of_nodes, fate, match in (
        ("parity", Fate.UNANNOUNCED, "keys must be 'device' for an algorithm under masks"),
        ("device", Fate.DROPPED, "masks must be agreed on between the nodes"),
    ):
        there, nodes, _ = deploy("masks", case=Case(), keys=of_nodes)
        (of_server,) = {"device", "parity"} - {of_nodes}
        reached = GridNodes(nodes, sizes=SIZES)
        server = deployed(there.federation, reached, keys=of_server)
        with pytest.warns(UserWarning, match=match):
            _, record, info = server.run(server.init(key()), key(), 1)
        assert np.all(record.fate == fate) and info.aggregator["num_lost"] == 1


@slow
@quiet
@pytest.mark.parametrize("encoding", [WORDS, WIDE], ids=["32 bits", "64 bits"])
def test_random_neighbours_give_the_weighted_mean_of_those_that_sent(encoding):
    masks = Federation(Case(RANDOM, encoding, weighted_mean()))
    for lost, clients in (((), range(NUM_CLIENTS)), ((13,), range(NUM_CLIENTS - 1))):
        state, record, info = masks.play(losing(*lost, step=TRAIN))
        total, expected = sum(SIZES[client] for client in clients), dict(masks.start)
        for client in clients:
            update = update_of(client, masks.start)
            share = SIZES[client] / total
            expected = {name: x + share * update[name] for name, x in expected.items()}
        same(state.server.params, expected)
        assert info.aggregator["num_recovered"] == len(lost)
        np.testing.assert_array_equal(record.fate == Fate.DROPPED, of_nodes(record, *lost))


@slow
@quiet
def test_shares_of_noise_are_added_under_masks_and_never_the_same():
    multiplier = 0.01
    plan = make_plan(
        NUM_FEATURES + 1,
        CLIP,
        multiplier,
        num_clients=NUM_CLIENTS,
        num_shares=RANDOM.min_senders,
    )
    shapes = jax.eval_shape(make_model().init, key())
    masks = Federation(Case(RANDOM, WORDS, discrete_mean(shapes, plan, NUM_CLIENTS)))
    noises = []
    for lost, clients in (((), range(6)), ((), range(6)), ((13,), range(5))):
        state, _, info = masks.play(losing(*lost, step=TRAIN))
        assert info.aggregator["num_lost"] == 0
        noises.append(difference(state.server.params, masks.mean_of(clients)))
        stddev = multiplier * CLIP / NUM_CLIENTS
        for noise in noises[-1].values():
            assert np.all(np.abs(noise) < 8 * stddev) and np.any(noise != 0)
    assert all(np.any(noises[0][name] != x) for name, x in noises[1].items())


class WithStates(Case):
    """SCAFFOLD, whose clients have states; the records of one client are damaged."""

    def __init__(self):
        super().__init__()
        self.data = self._damaged

    @staticmethod
    def _damaged():
        clients = [make_data().client(client) for client in range(NUM_CLIENTS)]
        clients[4] = {**clients[4], "x": np.full_like(clients[4]["x"], np.nan)}
        return FederatedData.from_clients(clients)

    def make(self, model, form="masked"):
        trainer = local_trainer(model, LocalConfig(learning_rate=RATE, batch_size=max(SIZES)))
        algorithm = scaffold(model, trainer, num_clients=NUM_CLIENTS)
        mean = secure.masked(algorithm.aggregator, WORDS, GRAPH, form=form)
        return algorithm._replace(aggregator=mean)


@slow
def test_under_masks_a_node_says_of_no_client_that_its_update_was_not_finite():
    case, masks = WithStates(), Federation(WithStates())
    simulated = simulation(case.make(make_model(), "cancelled"), case.data(), case.participation())
    state, expected, _ = simulated.run(simulated.init(key()), key(), ROUNDS)
    is_damaged = expected.clients == 4
    np.testing.assert_array_equal(expected.fate == Fate.NOT_FINITE, is_damaged)
    # Its state of each round, which is the one before, is stored all the same.
    found, record, _ = masks.play(rounds=ROUNDS)
    assert np.all(record.fate == Fate.CONTRIBUTED)
    same(found.server, state.server)


def test_no_client_takes_part_in_a_round_that_is_played_again_under_masks(tmp_path):
    class Stop(RuntimeError):
        """The round is in the journal, and no message has left."""

    def append(number, record):
        fates.append(set(record.fate.tolist()[0]))
        raise Stop

    fates, journal = [], JournalFile(tmp_path / "sent.jsonl")
    journal.append, journal.num_attempts = append, lambda number: 1
    masks = Federation(journal=journal)
    with pytest.raises(Stop), pytest.warns(UserWarning, match="round 1: .*: no node is asked"):
        masks.play()
    assert fates == [{Fate.UNANNOUNCED}]


@slow
def test_a_masked_round_that_a_crash_lost_is_noise_alone(tmp_path):
    journal, asked = JournalFile(tmp_path / "sent.jsonl"), []

    class Crash(RuntimeError):
        """The server's process ends."""

    def change(sent, reply):
        asked.append(sent.metadata.message_type)
        if asked[-1] == KEYS:
            raise Crash
        return [reply]

    masks = Federation(journal=journal)
    with pytest.raises(Crash):
        masks.play(change)
    asked.clear()
    with pytest.warns(UserWarning, match="round 1: .*: no node is asked"):
        state, record, info = masks.play(change)
    assert asked in ([], ["query.clients"]) and journal.num_attempts(0) == 2
    assert np.all(record.fate == Fate.UNANNOUNCED) and info.aggregator["num_lost"] == 1
    # The step is noise alone.
    noise = difference(state.server.params, masks.start)
    assert all(np.all(np.isfinite(x) & (x != 0)) for x in noise.values())


@slow
@quiet
def test_a_data_link_without_an_update_drops_out_of_its_masks(tmp_path):
    case, folder = Case(GRAPH, WORDS, weighted_mean()), tmp_path / FOLDER
    population = population_of(make_data())

    def data(context):
        ids = NODES[context.node_id]
        script = Script(folder, 1) if context.node_id == 11 else None
        return Node(ids, make_data().select(ids), state_dir=tmp_path, script=script)

    app = client_app(lambda node, population: case.make(make_model()), data)
    nodes = GridNodes(InProcess(app, {n: {} for n in NODES}), sizes=population.sizes, timeout=3.0)
    bound = federation(case.make(make_model()), population, case.participation())
    there = deployed(bound, nodes)

    def all_but_the_second(here, model, link, records):
        if link != 2:
            here.push(one_step(model, records["x"], records["y"]), datalink=link)

    with script_of(tmp_path, all_but_the_second):
        state, record, info = there.run(there.init(key()), key(), 1)
    np.testing.assert_array_equal(record.fate == Fate.DROPPED, record.clients == 2)
    assert info.aggregator["num_recovered"] == 1 and info.aggregator["num_lost"] == 0
    start = jax.device_get(there.init(key()).server.params)
    left = [client for client in range(NUM_CLIENTS) if client != 2]
    total, expected = sum(SIZES[client] for client in left), dict(start)
    for client in left:
        update = update_of(client, start)
        expected = {n: x + SIZES[client] / total * update[n] for n, x in expected.items()}
    same(state.server.params, expected)


@slow
def test_an_experiment_under_masks_has_the_privacy_of_its_simulation_and_says_whom_masks_stop(
    tmp_path,
):
    words = (
        *("--run.rounds", "2", "--run.evaluate_every", "1", "--run.checkpoint_every", "1"),
        *("--run.secret", "true", "--model.name", "logistic_regression"),
        *("--data.num_clients", "6"),
        *("--algorithm.name", "dp_fedavg", "--privacy.unit", "client"),
        *("--privacy.client.mechanism", "discrete_gaussian"),
        *("--secure_aggregation.form", "cancelled", "--secure_aggregation.keys", "agreed"),
        *("--secure_aggregation.colluders", "1", "--secure_aggregation.dropouts", "1"),
        *("--secure_aggregation.absent", "2"),
    )
    config = load_config(None, list(words))
    (tmp_path / "experiment.toml").write_text(to_toml(config))
    app = client_app_of(tmp_path / "experiment.toml")

    def change(sent, reply):
        # A node that never answers for its two clients.
        is_lost = sent.metadata.message_type == KEYS and sent.metadata.dst_node_id == 1
        return [] if is_lost else [reply]

    nodes = {i + 1: {"partition-id": i, "num-partitions": 3} for i in range(3)}
    outcome = run_on(InProcess(app, nodes, change), config, tmp_path / "there")
    simulated = run(config, tmp_path / "here")
    assert outcome.summary["epsilon"] == simulated.summary["epsilon"]
    said, other = ((tmp_path / place / "privacy.md").read_text() for place in ("there", "here"))
    for phrase in ("between the clients on their nodes", "every mask was made", "honest but curio"):
        assert phrase in said
    assert "Nodes agreed on no keys" not in said and "left out of the simulation" in other
    rows = read_metrics(tmp_path / "there")
    assert len(rows) == 2 and all(row["num_lost"] == 0 for row in rows), rows[0]
