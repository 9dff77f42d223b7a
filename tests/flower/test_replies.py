"""Replies that are lost, damaged or wrong count as zeros, and never stop a private round."""

import io

import jax
import numpy as np
import pytest
from cases import CASES
from dp_accounting import GaussianDpEvent
from federations import NODES, deploy, key
from flwr.app import Array, ConfigRecord, Context, Error, Message, RecordDict
from marks import telling
from small_problem import NUM_CLIENTS, make_data, make_model, plain_trainer

from fedjax_dp.algorithms.fedavg import fedavg
from fedjax_dp.data import sampling
from fedjax_dp.data.participants import participation
from fedjax_dp.engine import Fate, population_of
from fedjax_dp.engine import federation as federation_of
from fedjax_dp.engine.record import RoundRecord
from fedjax_dp.flower import GridNodes, deployed, server
from fedjax_dp.flower.grid import answers
from fedjax_dp.flower.packets import Packet, arrays_of
from fedjax_dp.flower.plan import Plan
from fedjax_dp.flower.testing import InProcess
from fedjax_dp.io import JournalFile
from fedjax_dp.privacy.claims import ClientClaim, OnceClaim
from fedjax_dp.privacy.sensitivities import sensitivity_of_sum
from fedjax_dp.server.mean import weighted_mean

FAILING = 11
quiet = pytest.mark.filterwarnings("ignore::UserWarning")


def lost(reply):
    return []


def failed(reply):
    return [Message(Error(0, "out of memory"), reply_to=reply)]


def twice(reply):
    return [reply, reply]


def with_arrays(change):
    def changed(reply):
        record = reply.content.array_records["arrays"]
        for name in list(record):
            if name.startswith("sent/"):
                record[name] = Array(change(record[name].numpy()))
        return [reply]

    return changed


def with_fact(name, value):
    def changed(reply):
        reply.content.config_records["facts"][name] = value
        return [reply]

    return changed


def without_arrays(reply):
    for name in list(reply.content.array_records["arrays"]):
        del reply.content.array_records["arrays"][name]
    return [reply]


def with_another(reply):
    reply.content.array_records["arrays"]["other/0"] = Array(np.zeros(1))
    return [reply]


def of_numbers(reply):
    reply.content["arrays"] = ConfigRecord({})
    return [reply]


def with_archive(reply):
    np.savez(archive := io.BytesIO(), a=np.zeros(3))
    record = reply.content.array_records["arrays"]
    name = next(each for each in record if each.startswith("sent/"))
    record[name] = Array("float32", (3,), "numpy.ndarray", archive.getvalue())
    return [reply]


WRONG = {
    "lost": lost,
    "an error": failed,
    "NaN": with_arrays(lambda x: np.full_like(x, np.nan)),
    "too large": with_arrays(lambda x: np.full_like(x, 1e38)),
    "of another shape": with_arrays(lambda x: np.zeros((2, *x.shape), x.dtype)),
    "of another type": with_arrays(lambda x: x.astype(np.float64)),
    "without arrays": without_arrays,
    "with more arrays": with_another,
    "of another plan": with_fact("digest", "0" * 64),
    "of another round": with_fact("round", 7),
    "of other clients": with_fact("clients", [1, 3]),
    "of an unknown fate": with_fact("fates", [5, 5, 5]),
    "with a number for fates": with_fact("fates", 5),
    "with numbers for arrays": of_numbers,
    "with an archive for an array": with_archive,
}


class Offline(InProcess):
    """Nodes that are offline: the SuperLink answers for each, as node 1."""

    def send_and_receive(self, messages, *, timeout=None):
        replies = []
        for number, message in enumerate(messages):
            message.metadata.__dict__["_message_id"] = f"message {number}"
            replies.append(Message(Error(3, "Node Unavailable"), reply_to=message))
            replies[-1].metadata.__dict__["_src_node_id"] = 1
        return replies


def test_a_node_that_is_offline_is_named():
    with pytest.warns(UserWarning, match="node 1[23] failed: Node Unavailable"):
        found, failures = answers(
            Offline(None, {}), "train", dict.fromkeys((12, 13), Packet()), "", 1
        )
    assert not found and set(failures) == {12, 13}


@pytest.fixture(scope="module")
def federation():
    """One deployment, whose compiled functions all tests share; `change` is replaced."""
    current = {"change": lambda reply: [reply], "node": FAILING}

    def change(sent, reply):
        is_train = sent.metadata.message_type == "train"
        if is_train and current["node"] in (None, sent.metadata.dst_node_id):
            return current["change"](reply)
        return [reply]

    return deploy("dp_fedavg", change=change).simulation, current


def one_round(federation, change, node=FAILING):
    simulated, current = federation
    current["change"], current["node"] = change, node
    return simulated.run(simulated.init(key()), key(), 1)


def drawn_of(record: RoundRecord, node):
    return np.isin(record.clients, NODES[node])


@telling
@pytest.mark.parametrize("wrong", WRONG)
@quiet
def test_a_wrong_reply_counts_as_zeros(federation, wrong):
    state, record, info = one_round(federation, WRONG[wrong])
    silent, lost_record, _ = one_round(federation, lost)
    of_node = drawn_of(record, FAILING)
    assert np.any(of_node)
    assert np.all(record.fate[of_node] == Fate.DROPPED)
    others = (record.clients >= 0) & ~of_node
    assert np.any(others) and np.all(record.fate[others] == Fate.CONTRIBUTED)
    np.testing.assert_array_equal(record.clients, lost_record.clients)
    for x, y in zip(jax.tree.leaves(state.server), jax.tree.leaves(silent.server), strict=True):
        np.testing.assert_array_equal(x, y)
    assert info.aggregator["noise_stddev"][0] > 0


def test_a_repeated_reply_counts_once(federation):
    once, record, _ = one_round(federation, lambda reply: [reply])
    again, _, _ = one_round(federation, twice)
    assert np.any(drawn_of(record, FAILING))
    for x, y in zip(jax.tree.leaves(once.server), jax.tree.leaves(again.server), strict=True):
        np.testing.assert_array_equal(x, y)


@quiet
def test_a_round_without_replies_has_noise_and_steps(federation):
    simulated, current = federation
    before = jax.device_get(simulated.federation.shared(simulated.init(key())))
    current["change"] = lost
    nodes, current["node"] = current["node"], None
    state, record, _ = simulated.run(simulated.init(key()), key(), 1)
    current["node"] = nodes
    assert set(record.fate[record.clients >= 0]) == {Fate.DROPPED}
    after = jax.device_get(simulated.federation.shared(state))
    assert all(np.all(x != y) for x, y in zip(*map(jax.tree.leaves, (before, after)), strict=True))


@telling
@quiet
def test_a_round_that_is_played_again_has_fresh_noise(tmp_path, monkeypatch):
    monkeypatch.setattr(server, "_MOST_SILENT", 9)

    def only_noise(keys):
        """Plays round 0 three times without a reply, so that the model is noise alone."""

        def lost(sent, reply):
            return [] if sent.metadata.message_type == "train" else [reply]

        journal = JournalFile(tmp_path / keys)
        there = deploy("dp_fedavg", keys=keys, journal=journal, change=lost).simulation
        start = there.init(key())
        states = [there.run(start, key(), 1)[0] for _ in range(2)]
        # Restored from a copy that was made before the round.
        journal.__init__(tmp_path / f"{keys}-copy")
        states.append(there.run(start, key(), 1)[0])
        return zip(*(jax.tree.leaves(jax.device_get(each.server)) for each in states), strict=True)

    assert all(np.all(x != y) and np.all(x != z) for x, y, z in only_noise("device"))
    # The same bits with parity keys, since nothing of the first attempt was sent.
    assert all(np.all(x == y) and np.all(x == z) for x, y, z in only_noise("parity"))


def claiming(**more):
    """FedAvg with a claim, without its noise; and the population of its clients."""
    sensitivity, event = sensitivity_of_sum(0.5), GaussianDpEvent(4.0)
    claim = ClientClaim(lambda state, numbers: sensitivity, lambda numbers: event, **more)
    mean = weighted_mean()._replace(claim=claim)
    algorithm = fedavg(make_model(), plain_trainer(make_model()), aggregator=mean)
    return algorithm, population_of(make_data())


class Ones:
    """Nodes that reply with ones; some are offline, and the replies of some are lost."""

    def __init__(self, sent):
        self._sent = arrays_of(jax.tree.map(lambda s: np.ones(s.shape, s.dtype), sent), "sent")
        self.online, self.lost, self.asked = set(NODES), set(), []

    def clients(self, question):
        return {client: node for node in self.online for client in NODES[node]}

    def train(self, packets, round):
        self.asked += packets

        def reply(facts):
            same = {name: facts[name] for name in ("digest", "round", "clients")}
            return Packet({**same, "fates": [Fate.CONTRIBUTED] * len(facts["clients"])}, self._sent)

        return {node: reply(p.facts) for node, p in packets.items() if node not in self.lost}


def test_messages_without_all_shares_of_the_noise_are_not_used():
    algorithm, population = claiming(min_participants=NUM_CLIENTS)
    everyone = participation(sampling.full_participation(), NUM_CLIENTS)
    nodes = Ones(Plan(algorithm, population).shapes.sent)
    simulated = deployed(federation_of(algorithm, population, everyone), nodes)
    start = simulated.init(key())

    def play():
        after, record, info = simulated.run(start, key(), 1)
        pairs = zip(*(jax.tree.leaves(each.server) for each in (start, after)), strict=True)
        stays = all(np.array_equal(x, y) for x, y in pairs)
        return stays, set(record.fate[0].tolist()), info.server["is_abandoned"].tolist()

    assert play() == (False, {Fate.CONTRIBUTED}, [0])
    nodes.lost = {11, 12}
    with pytest.warns(UserWarning, match="round 1 is lost: fewer have replied than the 6 clients"):
        assert play() == (True, {Fate.DROPPED, Fate.LATE}, [1])
    # Where too few are online at the start of a round, nothing is asked of them.
    nodes.online, nodes.asked = {13}, []
    with pytest.warns(UserWarning, match="round 1 is lost"):
        assert play() == (True, {Fate.UNANNOUNCED}, [1])
    assert not nodes.asked


def test_correlated_noise_is_released_once(tmp_path):
    algorithm, population = claiming(min_separation=2)
    halves = participation(sampling.cyclic(), NUM_CLIENTS, NUM_CLIENTS // 2)
    bound = federation_of(algorithm, population, halves)
    journal = JournalFile(tmp_path / "sent.jsonl")
    simulated = deployed(bound, Ones({}), journal=journal)
    start = simulated.init(key())
    none = RoundRecord(*(np.zeros((1, 1), int) for _ in RoundRecord._fields))
    for number in (0, 1):
        journal.append(number, none)
    with pytest.raises(ValueError, match="round 1 must be released once, since correlated noise"):
        simulated.run(start, key(), 1)


@pytest.fixture(scope="module")
def answering():
    """One deployment whose nodes say which clients they hold; its question."""
    there = deploy("dp_fedavg")
    return there, there.simulation.run.__self__._question


def asked(answering, change=lambda sent, reply: [reply], **options):
    """Returns new nodes of the same app, their grid, and the question."""
    there, question = answering
    configs = {node: {"clients": ",".join(map(str, ids))} for node, ids in NODES.items()}
    grid = InProcess(there.grid._app, configs, change)
    sizes = there.simulation.federation.population.sizes
    return GridNodes(grid, sizes=sizes, **options), grid, question


def context_of(node, clients):
    return Context(1, node, {"clients": clients}, RecordDict(), {})


LATER = {
    "of another size": ({"sizes": [99]}, "node 99 is left out: client 1 must hold"),
    "without sizes": ({"sizes": []}, "node 99 is left out: node 99 must hold a size for each"),
    "that holds texts": ({"clients": ["1"]}, "node 99 is left out: clients must be integers"),
    "that holds no list": ({"clients": 1}, "node 99 is left out: clients must be a list"),
}


@pytest.mark.parametrize("wrong", LATER)
def test_a_node_that_comes_later_never_stops_a_run(answering, wrong):
    facts, message = LATER[wrong]

    def change(sent, reply):
        if sent.metadata.dst_node_id == 99:
            reply.content.config_records["facts"].update(facts)
        return [reply]

    reached, grid, question = asked(answering, change)
    before = reached.clients(question)
    grid.contexts[99] = context_of(99, "1")
    with pytest.warns(UserWarning, match=message):
        assert reached.clients(question) == before
    # It is not asked again.
    assert reached.clients(question) == before


@quiet
def test_a_run_begins_once_one_node_accepts_its_plan(answering):
    failing = {11, 12, 13}

    def change(sent, reply):
        is_failing = sent.metadata.dst_node_id in failing
        return failed(sent) if is_failing else [reply]

    reached, _, question = asked(answering, change)
    for failing in ({11, 12, 13}, {11, 12}):
        if len(failing) == len(NODES):
            message = "a node must accept the plan, got from node 11: out of memory"
            with pytest.raises(ValueError, match=message):
                reached.clients(question)
        else:
            assert reached.clients(question) == {5: 13}
    # A later round is played, whatever nodes answer.
    reached._grid.contexts.pop(13)
    failing = {11, 12}
    assert reached.clients(question) == {}
    reached, _, _ = asked(answering, lambda sent, reply: [])
    with pytest.raises(ValueError, match=r"a node must accept the plan, got no answer in \d+ sec"):
        reached.clients(question)


def test_a_run_waits_for_its_first_node(answering, caplog, monkeypatch):
    reached, grid, question = asked(answering)
    seen = []

    def appearing():
        seen.append(len(seen))
        return list(grid.contexts) if len(seen) > 2 else []

    grid.get_node_ids = appearing
    monkeypatch.setattr("fedjax_dp.flower.grid._PAUSE", 0.0)
    with caplog.at_level("INFO", logger="flwr"):
        assert sorted(reached.clients(question)) == [*range(NUM_CLIENTS)]
    assert caplog.text.count("no node is connected yet: waiting for one, 600 seconds") == 1
    # Later rounds are played without any.
    grid.get_node_ids = lambda: []
    assert reached.clients(question) == {}


def test_a_client_stays_on_its_node_until_that_is_offline(answering):
    reached, grid, question = asked(answering)
    before = reached.clients(question)
    grid.contexts[66] = context_of(66, "0,1,2,3,4,5")
    assert reached.clients(question) == before
    context = grid.contexts.pop(13)
    with pytest.warns(UserWarning, match=r"clients \[5\] are now on node 66: node 13 is offline"):
        assert reached.clients(question) == before | {5: 66}
    grid.contexts[13] = context
    assert reached.clients(question) == before | {5: 66}
    del grid.contexts[13], grid.contexts[66]
    assert reached.clients(question) == {c: n for c, n in before.items() if c != 5}


def test_a_node_that_never_answers_costs_three_rounds_their_time(answering):
    questions = []

    def change(sent, reply):
        if sent.metadata.dst_node_id == 99:
            questions.append(99)
            return []
        return [reply]

    # Every answer takes longer than that.
    reached, grid, question = asked(answering, change, timeout=1e-9)
    before = reached.clients(question)
    grid.contexts[99] = context_of(99, "1")
    for _ in range(2):
        assert reached.clients(question) == before
    with pytest.warns(UserWarning, match="node 99 is asked no more: 3 questions"):
        reached.clients(question)
    reached.clients(question)
    assert questions == [99] * 3
    # One that was away is asked again.
    context = grid.contexts.pop(99)
    reached.clients(question)
    grid.contexts[99] = context
    reached.clients(question)
    assert questions == [99] * 4


def test_counts_of_replies_are_figures_of_the_run_and_not_in_the_log(federation, caplog):
    with caplog.at_level("INFO", logger="flwr"):
        _, _, info = one_round(federation, lost)
    counts = [int(info.server[name][0]) for name in ("nodes_asked", "nodes_replied")]
    assert counts[0] == counts[1] + 1 and not caplog.text


def test_a_run_that_no_node_answers_ends(federation, monkeypatch):
    simulated, current = federation
    current["change"], current["node"] = lambda reply: [reply], FAILING
    state = simulated.init(key())
    with monkeypatch.context() as silent, pytest.warns(UserWarning, match="none has replied") as of:
        silent.setattr(GridNodes, "train", lambda self, packets, number: {})
        for _ in range(2):
            state, *_ = simulated.run(state, key(), 1)
        with pytest.raises(ValueError, match="none has replied, 3 rounds in a row: see the nodes'"):
            simulated.run(state, key(), 1)
    assert len(of) == 2
    _, _, info = simulated.run(state, key(), 1)
    assert info.server["nodes_replied"][0] == info.server["nodes_asked"][0] > 0


class Once:
    """A case whose records are read in one round each."""

    def __init__(self):
        self._case = CASES["dp_sgd"]
        self.data, self.validation = self._case.data, self._case.validation
        self.participation = self._case.participation

    def make(self, model):
        algorithm = self._case.make(model)
        once = algorithm.training._replace(record=OnceClaim(*algorithm.claims.record))
        return algorithm._replace(training=once)


def test_records_that_are_read_once_are_not_read_in_a_round_that_is_played_again(tmp_path):
    asked = []

    def change(sent, reply):
        asked.append(sent.metadata.message_type)
        return [] if asked[-1] == "train" else [reply]

    journal = JournalFile(tmp_path / "journal")
    journal.num_attempts = lambda round: 1
    there = deploy("dp_sgd", case=Once(), journal=journal, change=change).simulation
    start = there.init(key())
    with pytest.warns(UserWarning, match="round 1: its records are read once"):
        state, record, _ = there.run(start, key(), 1)
    assert set(asked) == {"query.clients"} and int(state.round) == 1
    assert set(record.fate[record.clients >= 0]) == {Fate.UNANNOUNCED}
