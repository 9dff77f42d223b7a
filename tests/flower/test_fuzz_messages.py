"""Messages of a server that is not trusted: none is charged less than it reads, and none stops
a later round."""

import json
import random
import re
from functools import cache, partial
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from flwr.app import Message
from marks import slow, telling
from small_problem import (
    NUM_CLIENTS,
    NUM_FEATURES,
    SIZES,
    make_data,
    make_model,
    plain_trainer,
    private_trainer,
)

from fedjax_dp import algorithms
from fedjax_dp.clients import LocalConfig, dp_sgd_trainer
from fedjax_dp.data import FederatedData, full_participation
from fedjax_dp.engine import Fate, population_of
from fedjax_dp.engine.sides import Work
from fedjax_dp.flower import Budget, Node, Script, Terms, client_app, node, request
from fedjax_dp.flower.agreement import KEYS, SHARES, UNMASK, Masking
from fedjax_dp.flower.exchange import Exchange, Task
from fedjax_dp.flower.node import CLIENTS, PRIVACY, SCORES
from fedjax_dp.flower.packets import Packet, arrays_of, packet_of
from fedjax_dp.flower.plan import Plan
from fedjax_dp.flower.testing import InProcess
from fedjax_dp.models import logistic_regression
from fedjax_dp.privacy.accounting.ledger import Ledger
from fedjax_dp.server import secure
from fedjax_dp.server.fixed_point import fixed_point
from fedjax_dp.server.mean import weighted_mean
from fedjax_dp.server.secure.aggregator import masks_of

NODE, OWN, ROUNDS, ROWS = 7, [2, 4, 5], 200, 1
SELECT, DELTA = 2, 1e-3


def clustered():
    """Rounds of five prices, whose stage the server decides, and states of clients."""
    model = make_model()
    clusters = algorithms.ClusterCount(2)
    options = {"num_rounds": ROUNDS, "clusters": clusters, "ends_with_choice": True}
    return algorithms.r_dpcfl(model, private_trainer(model), num_clients=NUM_CLIENTS, **options)


def growing():
    """Rounds that read records of their own, which pay once."""
    numbers = {"learning_rate": 1.0, "batch_size": 1, "num_steps": 2}
    config = LocalConfig(**numbers, clip_norm=1.0, noise_multiplier=1.0)
    shape = jax.ShapeDtypeStruct((NUM_FEATURES,), np.float32)
    model = logistic_regression(shape, 2, gradient_bound=1.0)
    whole = full_participation()._replace(name="full_batch")
    trainer = dp_sgd_trainer(model, config, sampler=whole)
    options = {"num_clients": NUM_CLIENTS, "rows_per_round": ROWS}
    options |= {"perturbation": algorithms.OutputPerturbation(regularizer=0.3)}
    return algorithms.warm_start_averaging(model, trainer, **options)


def data_of(kind):
    data = make_data()
    if kind is clustered:
        return data
    arrays = {"x": data.examples["x"], "y": np.asarray(data.examples["y"], np.int32)}
    return FederatedData(arrays, data.offsets)


@cache
def planned(kind):
    algorithm = kind()
    return algorithm, Plan(algorithm, population_of(data_of(kind)))


class Played:
    """A node whose clients train nothing, and what each execution of a client would have read."""

    def __init__(self, kind, folder, monkeypatch, budget=None):
        data, (self.algorithm, self.plan) = data_of(kind), planned(kind)
        self.is_growing, self.folder = kind is growing, folder
        held = Node(OWN, data.select(OWN), state_dir=folder)
        terms = Terms(budget, rounds=ROUNDS)
        app = client_app(lambda *_: self.algorithm, lambda _: held, lambda *_: terms)
        self.grid, self.done = InProcess(app, {NODE: {}}), []
        monkeypatch.setattr(node._Plans, "_work", staticmethod(self.work))
        monkeypatch.setattr(node, "Plan", self.planned)

    def planned(self, algorithm, population, described):
        is_own = population.sizes.tolist() == list(SIZES) and population.validation is None
        return self.plan if is_own else Plan(algorithm, population, described)

    def work(self, plan, received, own, examples, place, at, key, table):
        client, round, stage = map(int, at)
        assert OWN[int(place)] == client
        self.done.append((client, round, stage))
        sent = jax.tree.map(lambda s: np.zeros(s.shape, s.dtype), plan.shapes.sent)
        return Work(SimpleNamespace(state=own), sent, np.bool_(True))

    def message(self, round, last, stage):
        """What a server sends to all clients of the node."""
        zeros = partial(jax.tree.map, lambda s: np.zeros(s.shape, s.dtype))
        shapes, count = self.plan.shapes, len(OWN)
        arrays = arrays_of(zeros(shapes.message), "message/0")
        arrays |= arrays_of(zeros(shapes.aggregator), "aggregator")
        arrays["public_key"] = np.zeros(2, np.uint32)
        facts = {"digest": self.plan.digest, "sizes": list(SIZES), "validation sizes": []}
        facts |= {"clients": OWN, "messages": [0] * count, "run": "r", "round": round}
        facts |= {"stage": stage, "timeout": 9.5, "scores": False, "scores from": -1}
        if shapes.own is not None:
            facts["last"] = [last] * count
            arrays |= arrays_of(zeros(shapes.own), "own") if last < 0 else {}
        return Packet(facts, arrays)

    def asked(self, packet, kind="train"):
        """Sends a message; returns the reason of an error, empty for a reply."""
        sent = Message(packet.record(), NODE, kind)
        (reply,) = self.grid.send_and_receive([sent])
        return reply.error.reason if reply.has_error() else ""

    def charged(self):
        """What the ledger has of each event and client."""
        if not (path := self.folder / "ledger.json").exists():
            return {}
        return counts_of(json.loads(path.read_text())["accounts"]["record"])

    def read(self):
        """A ledger of what the executions would have read."""
        ledger, claim = Ledger("record", "zero_out", NUM_CLIENTS), self.algorithm.claims.record
        hyper = jax.tree.map(np.asarray, self.plan.hyper)
        times = {each: self.done.count(each) for each in self.done}
        most = {}
        for (client, round, stage), count in times.items():
            # What is no stage trains, and chooses.
            dearest = stage if 0 <= stage < len(claim.events) else SELECT
            place = client, dearest
            before = most.get(place, 0)
            most[place] = max(before, count) if self.is_growing else before + count
            if self.is_growing:
                assert round >= 0, "the records of another client"
        for (client, stage), count in most.items():
            local = jax.tree.map(lambda x, c=client: x if x.ndim == 0 else x[c], hyper.local)
            event = claim.at(stage)(SIZES[client], hyper._replace(local=local))
            ledger.charge(event, units=[client], count=count)
        return ledger

    def require_paid(self):
        charged = self.charged()
        for place, count in counts_of(json.loads(self.read().to_json())).items():
            assert charged.get(place, 0) >= count, place


def counts_of(account):
    found = {}
    for entry in account["entries"]:
        units = entry.get("units", list(range(NUM_CLIENTS)))
        counts = np.broadcast_to(entry["count"], len(units)).tolist()
        for unit, count in zip(units, counts, strict=True):
            found[json.dumps(entry["event"], sort_keys=True), unit] = count
    return found


WHOLE = [-(2**63), -(2**31), -5, -4, -2, -1, 0, 1, 2, 3, 4, 5, 6, 199, 200, 2**31, 2**63 - 1]
FLOATS = [-1.0, 0.0, 1.0, 1.5, 1e300, float("nan"), float("inf"), -float("inf")]
PLAIN = [*WHOLE, *FLOATS, True, False, "", "1", "x" * 1000, b"", b"\0"]


def changed_fact(value, draw):
    """Another value of a fact: of another type, or one entry of its list."""
    if isinstance(value, list) and draw.random() < 0.7:
        whole = draw.choice([[], value * 2, value[::-1], value[:-1], [*value, 0]])
        if value and draw.random() < 0.7:
            place = draw.randrange(len(value))
            whole = [*value[:place], draw.choice(WHOLE), *value[place + 1 :]]
        return whole
    kind = draw.choice([WHOLE, FLOATS, [True], ["a"], [b"a"]])
    return draw.choice(PLAIN) if draw.random() < 0.6 else draw.choices(kind, k=draw.randrange(4))


def changed_array(array, draw):
    """Another array: of another type, shape or values."""
    makers = [
        lambda: array.astype(draw.choice([np.float64, np.int64, np.bool_, np.float16, np.uint8])),
        lambda: np.zeros((*array.shape, 1), array.dtype),
        lambda: np.zeros(3, array.dtype),
        lambda: np.zeros((0, *array.shape), array.dtype),
        lambda: np.full(array.shape, draw.choice([-1, 7, 2**31 - 1])).astype(array.dtype),
        lambda: np.full(array.shape, draw.choice([np.nan, np.inf, 3e38]), np.float32),
        lambda: np.full(array.shape, "x"),
    ]
    return draw.choice(makers)()


def changed(packet, draw):
    """A message with one fact or array changed, left out or added."""
    facts, arrays = dict(packet.facts), dict(packet.arrays)
    if draw.random() < 0.75 or not arrays:
        name = draw.choice([*facts, "new"])
        facts[name] = changed_fact(facts.get(name, 0), draw)
        if draw.random() < 0.1:
            del facts[name]
    else:
        name = draw.choice([*arrays, "message/1/new", "roster/clients", "keys", "own/0"])
        arrays[name] = changed_array(arrays.get(name, np.zeros(2, np.int32)), draw)
        if draw.random() < 0.2:
            del arrays[name]
    return Packet(facts, arrays)


FORGED = [
    *(("stage", value) for value in (-1, -4, 5, 2**31, 1.0, 0.5, True, "1", [1], float("nan"))),
    *(("round", value) for value in (-1, 1.5, ROUNDS, 2**62, True, "1", float("inf"), [1])),
    *(("clients", value) for value in ([2, 2, 5], [2, 4, -1], [2, 4, 6], [2.0, 4.0, 5.0], [], 2)),
    *(("messages", value) for value in ([0, 0, 1], [0, 0, -1], [0, 0], [False] * 3, "000")),
    *(("last", value) for value in ([-2] * 3, [2] * 3, [0] * 3, [-1.0] * 3, [-1] * 2, -1)),
    *(("sizes", value) for value in ([], list(SIZES)[:-1], [0] * 6, [float(n) for n in SIZES])),
    *(("validation sizes", value) for value in ([0], list(SIZES), [-1] * 6, 0)),
    *(("digest", value) for value in ("", "d" * 64, 0, True)),
    *(("run", value) for value in ("", "x" * 101, 1, True, ["r"])),
]
NEEDED = ("stage", "round", "clients", "messages", "last", "sizes", "validation sizes", "digest")


def test_each_number_of_a_message_is_checked_before_ledger_and_data(tmp_path, monkeypatch):
    played = Played(clustered, tmp_path, monkeypatch)
    packet = played.message(1, -1, 1)
    for name, value in FORGED:
        why = played.asked(Packet({**packet.facts, name: value}, packet.arrays))
        rule = rf"RefusedError\(['\"](the |a )?({name}|client|array|message)\b.* must "
        assert re.match(rule, why), (name, value, why)
    for name in (*NEEDED, "run"):
        facts = {each: value for each, value in packet.facts.items() if each != name}
        why = played.asked(Packet(facts, packet.arrays))
        assert f"a message must hold the fact '{name}'" in why.replace("\\'", "'")
    for name in packet.arrays:
        arrays = {each: value for each, value in packet.arrays.items() if each != name}
        why = played.asked(Packet(packet.facts, arrays))
        assert "a message must hold the array" in why
    assert not played.done and not played.charged()
    assert played.asked(packet) == "" and len(played.done) == len(OWN)


QUESTIONS = {
    CLIENTS: {"plan names": ["a"], "plan texts": ["b"]},
    PRIVACY: {"dp_delta": DELTA},
    KEYS: {},
}
ODD = [-1, 0, 1.0, 1.5, float("nan"), True, "x", b"", [], [-1], [1.5], [True], ["x"], [2**62] * 6]


def test_questions_of_another_form_are_refused_by_name(tmp_path, monkeypatch):
    played = Played(clustered, tmp_path, monkeypatch)
    facts = {n: played.message(0, -1, 0).facts[n] for n in ("sizes", "validation sizes", "digest")}
    for kind, more in QUESTIONS.items():
        for name in (whole := {**facts, **more}):
            without = {each: value for each, value in whole.items() if each != name}
            for packet in (Packet(without), *(Packet({**whole, name: odd}) for odd in ODD)):
                why = played.asked(packet, kind)
                is_answer = kind == PRIVACY and packet.facts.get(name) == []
                assert is_answer or re.match(r"RefusedError\(['\"](?!\w+: ).* must ", why), why
    assert not played.done and not played.charged()


def test_a_question_of_another_plan_takes_no_scores(tmp_path):
    algorithm = algorithms.fedavg(make_model(), plain_trainer(make_model()))
    script = Script(tmp_path, sends_scores=True)
    held, plan = Node([0], make_data().select([0]), script=script), None
    plan = Plan(algorithm, population_of(make_data()))
    grid = InProcess(client_app(lambda *_: algorithm, lambda _: held), {NODE: {}})
    exchange = Exchange(tmp_path)
    exchange.open(Task(plan.digest, 0, None, [0], 0.0, True), {"x": np.zeros(1, np.float32)})
    exchange.report({"loss": 0.5}, 0, 0)
    facts = {"digest": plan.digest, "sizes": list(SIZES), "validation sizes": []}
    facts |= {"scores": True, "scores from": -1}
    ways = [{"digest": "d" * 64}, {"scores": 1}, {"scores from": 0.5}, {"scores from": -2}, {}]
    packets = [Packet({**facts, **way}).record() for way in ways]
    replies = grid.send_and_receive([Message(packet, NODE, SCORES) for packet in packets])
    *others, last = replies
    assert all(" must " in reply.error.reason for reply in others)
    assert '"loss": 0.5' in packet_of(last.content).facts["scores"]


def test_a_budget_holds_whatever_stages_and_rounds_a_server_names(tmp_path, monkeypatch):
    once = Played(clustered, tmp_path / "once", monkeypatch)
    assert once.asked(once.message(1, -1, SELECT)) == ""
    budget = 3 * once.read().epsilon(DELTA)
    budget[budget == 0] = 1.0
    played = Played(clustered, tmp_path / "more", monkeypatch, Budget(budget, DELTA))
    stages = (-1, -4, SELECT)
    whys = [played.asked(played.message(r, -1, stage)) for r in range(1, 9) for stage in stages]
    assert all(whys[0::3]) and all(whys[1::3])
    assert not whys[2] and "over all rounds of this node's ledger" in whys[-1]
    spent = played.read().epsilon(DELTA)
    assert np.all(spent <= budget) and np.all(spent[OWN] > 0)


@pytest.mark.parametrize("kind", [clustered, growing])
@pytest.mark.parametrize("count", [16, pytest.param(400, marks=[slow, telling])])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_no_message_is_charged_less_than_it_reads_or_stops_a_round(
    kind, count, tmp_path, monkeypatch
):
    played, draw = Played(kind, tmp_path, monkeypatch), random.Random(count)
    last, refused = -1, 0
    for number in range(count):
        round = last + 1
        stage = 0 if kind is growing else [0, 1, 2, 3][min(round, 3)]
        packet = played.message(round, last, stage)
        before = len(played.done)
        why = played.asked(changed(packet, draw))
        refused += bool(why)
        # By name, and before anything is read or charged.
        assert not re.match(r"RefusedError\(['\"]\w+: ", why), why
        assert not why or len(played.done) == before
        played.require_paid()
        if number % 4 == 3:
            assert played.asked(packet) == ""
            last = round
            played.require_paid()
    assert 0.5 * count < refused < count


class Masked:
    """A node that agrees on masks with itself: it holds all clients."""

    def __init__(self, monkeypatch):
        graph, words = secure.all_pairs(NUM_CLIENTS, dropouts=1), fixed_point(NUM_CLIENTS)
        mean = secure.masked(weighted_mean(), words, graph)
        trainer = plain_trainer(make_model())
        algorithm = algorithms.fedavg(make_model(), trainer, aggregator=mean)
        data, held = make_data(), Node(range(NUM_CLIENTS), make_data())
        self.plan = Plan(algorithm, population_of(data))
        self.facts = {"digest": self.plan.digest, "sizes": list(SIZES), "validation sizes": []}
        app = client_app(lambda *_: algorithm, lambda _: held, lambda *_: Terms(rounds=ROUNDS))
        self.grid, self.masks = InProcess(app, {NODE: {}}), masks_of(mean)
        monkeypatch.setattr(node._Plans, "_work", staticmethod(self.work))

    def work(self, plan, *others):
        sent = jax.tree.map(lambda s: np.zeros(s.shape, s.dtype), plan.shapes.sent)
        return Work(SimpleNamespace(state=None), sent, np.bool_(True))

    def asked(self, kind, packet):
        sent = Message(packet.record(), NODE, kind)
        (reply,) = self.grid.send_and_receive([sent])
        return reply

    def play(self, round, change=None):
        """A whole round; `change(kind, packet)` is sent before a message, and its reply lost."""
        whys = []

        def send(kind, packets):
            packet = packets[NODE]
            if change is not None and (other := change(kind, packet)) is not None:
                reply = self.asked(kind, other)
                whys.append(reply.error.reason if reply.has_error() else "")
            reply = self.asked(kind, packet)
            return {} if reply.has_error() else {NODE: packet_of(reply.content)}

        there = Masking(self.masks, dict.fromkeys(range(NUM_CLIENTS), NODE), send)
        ids, key = np.arange(NUM_CLIENTS, dtype=np.int32), np.zeros(2, np.uint32)
        made = there.set_up({**self.facts, "round": round}, ids, key)
        facts = {"clients": [*range(NUM_CLIENTS)], "messages": [0] * NUM_CLIENTS, "run": "r"}
        zeros = partial(jax.tree.map, lambda s: np.zeros(s.shape, s.dtype))
        arrays = arrays_of(zeros(self.plan.shapes.message), "message/0")
        arrays |= arrays_of(zeros(self.plan.shapes.aggregator), "aggregator")
        arrays |= {"public_key": key, "roster/clients": ids, "roster/is_announced": ids >= 0}
        replies = send("train", {NODE: Packet({**made.facts, **facts, "stage": 0}, arrays)})
        fate = np.full(NUM_CLIENTS, Fate.CONTRIBUTED if replies else Fate.DROPPED, np.int8)
        _, fate = there.recovered(made, fate)
        return set(fate.tolist()) == {Fate.CONTRIBUTED}, whys


@pytest.mark.parametrize("count", [8, pytest.param(300, marks=[slow, telling])])
@pytest.mark.filterwarnings("ignore")
def test_no_message_under_masks_stops_the_next_round(count, monkeypatch):
    played, draw = Masked(monkeypatch), random.Random(count)
    kinds, refused = [KEYS, SHARES, "train", UNMASK], 0
    for number in range(count):

        def change(kind, packet, number=number):
            return changed(packet, draw) if kind == kinds[number % 4] else None

        for why in played.play(number % ROUNDS, change)[1]:
            assert not re.match(r"RefusedError\(['\"]\w+: ", why), why
            refused += bool(why)
        if number % 4 == 3:
            assert played.play(number % ROUNDS) == (True, [])
    assert refused > count / 3


@pytest.mark.parametrize(("round", "stage"), [(2, 0), (3, 1)])
def test_a_stage_that_the_plan_knows_is_that_of_the_plan(round, stage):
    """The server's word would otherwise choose the price of what the node runs."""
    plan = SimpleNamespace(num_stages=2, stage_of=lambda round: round % 2)
    assert request.stage_in({"stage": stage}, plan, round) == stage
    with pytest.raises(ValueError, match=f"stage must be {stage}, that of round {round}, got"):
        request.stage_in({"stage": 1 - stage}, plan, round)
