"""A node of a federation: its clients train on the broadcast and send what the aggregator adds."""

import json
import pathlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from fedjax_dp.algorithms.base import FederatedAlgorithm
from fedjax_dp.core import checks, sums
from fedjax_dp.core.keys import secret_key
from fedjax_dp.core.trees import PyTree
from fedjax_dp.data.federated import FederatedData
from fedjax_dp.engine.cohort import Examples
from fedjax_dp.engine.population import Population, examples_of, population_of
from fedjax_dp.engine.sides import Received, Work, client_side
from fedjax_dp.flower.agreement import KEYS, SHARES, UNMASK, Agreement, with_seeds
from fedjax_dp.flower.ledger import Budget, NodeLedger
from fedjax_dp.flower.packets import Packet, arrays_of, packet_of, tree_of
from fedjax_dp.flower.plan import Plan, Shapes, require_own_scale, require_same
from fedjax_dp.flower.script import Script, prepare, reports, require_difference, trained_by
from fedjax_dp.flower.states import States, StatesInContext, StatesOnDisk, run_digest
from fedjax_dp.server.base import Diagnostic, Fate, Roster, Stacked
from fedjax_dp.server.secure.aggregator import masks_of
from fedjax_dp.server.secure.key_agreement import SeedTable

Keys = Literal["device", "parity"]
# The message types that a node answers.
TRAIN, CLIENTS = "train", "query.clients"
DATA, PRIVACY, SCORES = "query.data", "query.privacy", "query.scores"


# `(plans, node, packet, context) -> packet` of the reply.
_Answer = Callable[["_Plans", "Node", Packet, Context], Packet]


class Node(NamedTuple):
    """The clients of a node and their data.

    Attributes:
      clients: their indices in the population, which no other node has.
      train: their training examples, in the order of `clients`.
      validation: a second split of the same clients, or None.
      keys: "device" to draw keys on this node; "parity" to use those of the server, for tests.
      state_dir: a folder for client states, and for the ledger of records; None, which privacy of
        records refuses, to store states in Flower's context, which the end of the node's process
        deletes.
      kind: what the data of all nodes must have alike, for JSON; the server compares it if it has
        no data of its own.
      script: a script of the participant's own that trains the clients; None to train here.
      experiment: which algorithm `build` makes, where an app has several.
    """

    clients: Sequence[int]
    train: FederatedData
    validation: FederatedData | None = None
    keys: Keys = "device"
    state_dir: str | pathlib.Path | None = None
    kind: Mapping[str, Any] = {}
    script: Script | None = None
    experiment: str = ""


class Terms(NamedTuple):
    """What a node requires of the rounds that it takes part in, besides its algorithm.

    Attributes:
      budget: of the records of its clients; a round that would exceed it is refused. None for no
        bound.
      described: what neither numbers nor shapes of the algorithm show, by name; the server must
        have it alike.
    """

    budget: Budget | None = None
    described: Mapping[str, str] = {}


def client_app(
    build: Callable[[Node, Population], FederatedAlgorithm],
    data: Callable[[Context], Node],
    terms: Callable[[Node, Population], Terms] = lambda node, population: Terms(),
) -> ClientApp:
    """Builds the app that runs on a node.

    In each round the node gets the broadcast, runs the round of each of its clients that was drawn,
    with clipping, encoding and shares of noise, and replies with their sum, or with each message
    where the aggregator reads messages one by one. Clients of a node with a script are trained by
    it; clipping, encoding and noise stay here.

    Guarantee: exact figures, such as losses, never leave the node, except for scores that a script
    reports where the server collects them. With keys of its own every batch and every noise of a
    client is drawn from random bits of this machine, new in each round, which the server does not
    have. With parity keys the server has made them, so that it must be trusted, whatever the
    algorithm claims. The numbers of local training, such as clips and noise, are those of the
    node's own algorithm. Where privacy is claimed for records, a ledger on the node is charged
    before each round of a client.

    Args:
      build: `(node, population) -> FederatedAlgorithm`, the same that the server has; `population`
        has the sizes of all clients, as the server sent them, and the shapes of this node.
      data: `(context) -> Node`, the clients of this node; read again for each message.
      terms: `(node, population) -> Terms`, what this node requires besides; nothing by default.

    Returns:
      The app, without mods: those of Flower clip and add noise to parameters, not to updates.

    Raises:
      ValueError: in an error reply, for unknown keys, a plan that differs from the server's, a
        client state that was lost, privacy of records without a folder for its ledger, or a round
        that exceeds their budget.
    """
    app, plans = ClientApp(), _Plans(build, terms)

    def answers(answer: _Answer) -> Callable[[Message, Context], Message]:
        def answered(message: Message, context: Context) -> Message:
            node, packet = data(context), packet_of(message.content)
            return Message(answer(plans, node, packet, context).record(), reply_to=message)

        return answered

    app.train()(answers(_trained))
    for kind, step in (
        (KEYS, Agreement.keys),
        (SHARES, Agreement.shares),
        (UNMASK, Agreement.unmask),
    ):
        app.train(kind.removeprefix(f"{TRAIN}."))(answers(partial(_agreed, step)))
    for kind, answer in (
        (DATA, _described),
        (CLIENTS, _registered),
        (PRIVACY, _claimed),
        (SCORES, _scored),
    ):
        app.query(kind.removeprefix("query."))(answers(answer))
    return app


def _described(plans: "_Plans", node: Node, packet: Packet, context: Context) -> Packet:
    """Answers what the clients of a node are, and of what kind their data."""
    prepare(node.script)
    return Packet({"clients": list(node.clients), "kind": json.dumps(node.kind), **sizes_of(node)})


def _registered(plans: "_Plans", node: Node, packet: Packet, context: Context) -> Packet:
    """Requires the server's plan, and answers which clients a node holds."""
    plans.require(node, packet.facts)
    if node.script is not None:
        algorithm = plans.plan(node, packet.facts).algorithm
        require_difference(algorithm, population_of(node.train, node.validation))
        prepare(node.script)
    return Packet({"clients": list(node.clients), **sizes_of(node)})


def _trained(plans: "_Plans", node: Node, packet: Packet, context: Context) -> Packet:
    """Runs the round of the drawn clients of a node."""
    checks.one_of("keys", node.keys, get_args(Keys))
    run = run_digest(packet.facts["run"])
    stored: States = StatesInContext(context.state, run)
    if node.state_dir is not None:
        stored = StatesOnDisk(node.state_dir, run)
    agreement = plans.agreement(node, packet.facts, context)
    seeds = None if agreement is None else agreement.seeds(packet)
    # Before the work: a crash can only charge too much.
    ledger = plans.ledger(node, packet.facts)
    if ledger is not None:
        ledger.charge(*(packet.facts[name] for name in ("clients", "round", "stage", "run")))
    return plans.train(node, packet, stored, seeds)


def _agreed(
    step: Callable[[Agreement, Packet], Packet],
    plans: "_Plans",
    node: Node,
    packet: Packet,
    context: Context,
) -> Packet:
    """Takes a step of the agreement on masks."""
    agreement = plans.agreement(node, packet.facts, context)
    rule = "be 'device' for an algorithm under masks, to agree on them"
    checks.require(agreement is not None, "keys", rule, node.keys)
    assert agreement is not None
    return step(agreement, packet)


def _claimed(plans: "_Plans", node: Node, packet: Packet, context: Context) -> Packet:
    """Answers what the ledger of a node claims for the records of its clients."""
    ledger = plans.ledger(node, packet.facts)
    checks.require(ledger is not None, "algorithm", "claim privacy for records", None)
    assert ledger is not None
    epsilon, releases = ledger.epsilon(packet.facts["dp_delta"]), ledger.num_releases()
    return Packet({"clients": list(node.clients), "epsilon": epsilon, "releases": releases})


def _scored(plans: "_Plans", node: Node, packet: Packet, context: Context) -> Packet:
    """Answers the scores that a script has reported since the node's last reply."""
    if node.script is None:
        return Packet({"scores": ""})
    return Packet(reports(node.script, packet.facts["digest"], packet.facts))


def sizes_of(node: Node) -> dict[str, list[int]]:
    """Returns the sizes of a node's clients, as facts of a message."""
    second = [] if node.validation is None else node.validation.sizes.tolist()
    return {"sizes": node.train.sizes.tolist(), "validation sizes": second}


class _Plans:
    """What a node's process computes once: the algorithm, its plan, its compiled round."""

    def __init__(
        self,
        build: Callable[[Node, Population], FederatedAlgorithm],
        terms: Callable[[Node, Population], Terms],
    ):
        self._build, self._terms = build, terms
        self._plans = dict[str, tuple[Plan, Terms]]()

    def plan(self, node: Node, facts: Mapping[str, Any]) -> Plan:
        """Makes the plan of the server's public facts and this node's data."""
        plan = self._planned(node, facts)[0]
        require_own_scale(plan.algorithm, node.keys)
        return plan

    def _planned(self, node: Node, facts: Mapping[str, Any]) -> tuple[Plan, Terms]:
        sizes = [facts[name] for name in sizes_of(node)]
        key = json.dumps([node.experiment, node.kind, *sizes])
        if key not in self._plans:
            own = population_of(node.train, node.validation)
            first, second = (np.array(each, np.int32) for each in sizes)
            validation = None
            if len(second):
                validation = Population(second, own.structure)
            population = Population(first, own.structure, validation)
            terms = self._terms(node, population)
            algorithm = self._build(node, population)
            self._plans[key] = Plan(algorithm, population, terms.described), terms
        return self._plans[key]

    def require(self, node: Node, facts: Mapping[str, Any]) -> None:
        """Requires the plan of the server, part by part."""
        names, texts = facts["plan names"], facts["plan texts"]
        require_same(self.plan(node, facts).described, dict(zip(names, texts, strict=True)))

    def ledger(self, node: Node, facts: Mapping[str, Any]) -> NodeLedger | None:
        """Opens the ledger of the node's records; None without a claim for them."""
        plan = self._agreed(node, facts)
        if plan.algorithm.claims.record is None:
            return None
        rule = "be a folder: the ledger of the records must outlast the node's process"
        checks.require(node.state_dir is not None, "state_dir", rule, node.state_dir)
        assert node.state_dir is not None
        folder = pathlib.Path(node.state_dir)
        budget = self._planned(node, facts)[1].budget
        return NodeLedger(plan, node.clients, node.train.sizes.tolist(), folder, budget)

    def agreement(self, node: Node, facts: Mapping[str, Any], context: Context) -> Agreement | None:
        """Returns the node's part in an agreement on masks; None where there is none."""
        masks = masks_of(self._agreed(node, facts).algorithm.aggregator)
        return None if masks is None or node.keys == "parity" else Agreement(masks, context.state)

    def _agreed(self, node: Node, facts: Mapping[str, Any]) -> Plan:
        """Requires a message of the same plan, for clients of this node."""
        plan = self.plan(node, facts)
        fits = facts["digest"] == plan.digest
        checks.require(fits, "digest", f"be {plan.digest}", facts["digest"])
        for client, size in zip(node.clients, node.train.sizes, strict=True):
            rule = f"hold the {size} records of this node, as when it registered"
            is_same = facts["sizes"][client] == size
            checks.require(is_same, f"client {client}", rule, facts["sizes"][client])
        others = sorted(set(facts.get("clients", ())) - set(node.clients))
        checks.require(not others, "clients", f"be of {list(node.clients)}", others)
        drawn = list(facts.get("clients", ()))
        checks.require(len(set(drawn)) == len(drawn), "clients", "differ", drawn)
        return plan

    def train(
        self, node: Node, packet: Packet, stored: States, seeds: Mapping[int, SeedTable] | None
    ) -> Packet:
        """Runs the rounds of the drawn clients of a node, under masks of these seeds if given."""
        facts = packet.facts
        plan = self._agreed(node, facts)
        shapes = plan.shapes
        algorithm, examples = plan.algorithm, examples_of(node.train, node.validation)
        examples = _limited(examples, plan)
        states = algorithm.client_state
        is_stacked, total = isinstance(algorithm.aggregator, Stacked), None
        stack: list[PyTree] = []
        known: list[PyTree] = []
        fates: list[int] = []
        trained = None
        if node.script is not None:
            rule = "be one for all clients of a node that a script trains"
            places = set(facts["messages"])
            checks.require(len(places) == 1, "the model of a round", rule, len(places))
            model = _received(packet, 0, plan).message
            trained = trained_by(node.script, plan, model, packet)
        for place, client in enumerate(facts["clients"]):
            received = _received(packet, place, plan)
            own = _own(packet, place, shapes, stored)
            key = _key(packet, place, node.keys)
            place_here = jnp.int32(list(node.clients).index(client))
            at = jnp.int32(client), jnp.int32(facts["round"]), jnp.int32(facts["stage"])
            table = None if seeds is None else seeds[client]
            if trained is None:
                work = self._work(plan, received, own, examples, place_here, at, key, table)
            else:
                size = node.train.sizes[place_here]
                work = trained.work(plan, received, client, size, key, table)
            is_finite = bool(work.is_finite)
            # Under masks, an update that is not finite is zeros like any other message.
            counts = is_finite or seeds is not None
            fate = Fate.CONTRIBUTED if counts else Fate.NOT_FINITE
            if trained is not None and client not in trained.params:
                fate = Fate.DROPPED
            fates.append(int(fate))
            if shapes.own is not None:
                after = work.output.state if is_finite else own
                if counts:
                    last = facts["last"][place]
                    stored.write(client, facts["round"], arrays_of(after, "own"), last)
                if states is not None and states.known is not None:
                    known.append(states.known(after))
            message = _without_figures(work.sent)
            if is_stacked:
                stack.append(message)
            else:
                part = sums.over_first_axis(jax.tree.map(lambda x: x[None], message))
                total = part if total is None else sums.merge(total, part)
        sent = _stacked(stack) if is_stacked else sums.value(total)
        arrays = arrays_of(sent, "sent") | (arrays_of(_stacked(known), "known") if known else {})
        answer = {name: facts[name] for name in ("digest", "round", "clients")}
        scores = trained.scores if trained is not None else {}
        return Packet({**answer, "fates": fates, **scores}, arrays)

    @staticmethod
    @partial(jax.jit, static_argnums=0)
    def _work(
        plan: Plan,
        received: Received,
        own: PyTree,
        examples: Examples,
        place: Any,
        at: Any,
        key: Any,
        seeds: SeedTable | None,
    ) -> Work:
        index, round, stage = at
        client = examples.client(place)
        named = {"index": index, "round": round, "stage": stage}
        second = client.validation
        if second is not None:
            second = second.replace(**named)  # type: ignore[attr-defined]
        client = client.replace(validation=second, **named)  # type: ignore[attr-defined]
        algorithm = plan.algorithm if seeds is None else with_seeds(plan.algorithm, seeds)
        return client_side(algorithm, received, own, client, key)


def _without_figures(sent: PyTree) -> PyTree:
    """Zeroes the exact figures of a message, which are for those who simulate."""

    def one(x: Any) -> Any:
        return jax.tree.map(jnp.zeros_like, x) if isinstance(x, Diagnostic) else x

    return jax.tree.map(one, sent, is_leaf=lambda x: isinstance(x, Diagnostic))


def _limited(examples: Examples, plan: Plan) -> Examples:
    """Gives examples the limits of the whole population."""
    second = examples.validation
    if second is not None:
        second = second.replace(limit=plan.validation_limit)  # type: ignore[attr-defined]
    return examples.replace(limit=plan.limit, validation=second)  # type: ignore[attr-defined]


def _stacked(parts: Sequence[PyTree]) -> PyTree:
    return jax.tree.map(lambda *each: jnp.stack(each), *parts)


def _received(packet: Packet, place: int, plan: Plan) -> Received:
    """Reads all that reaches one client; its numbers are those of the plan, never the server's."""
    facts, arrays, shapes = packet.facts, packet.arrays, plan.shapes
    key = jax.random.wrap_key_data(jnp.asarray(arrays["public_key"]))
    roster = Roster(jnp.zeros(0, jnp.int32), jnp.zeros(0, bool))
    if "roster/clients" in arrays:
        roster = Roster(*(jnp.asarray(arrays[f"roster/{n}"]) for n in ("clients", "is_announced")))
    return Received(
        tree_of(arrays, f"message/{facts['messages'][place]}", shapes.message),
        tree_of(arrays, "aggregator", shapes.aggregator),
        plan.hyper.of_client(facts["clients"][place]),
        key,
        roster,
    )


def _own(packet: Packet, place: int, shapes: Shapes, stored: States) -> PyTree:
    """Reads the state that a client's round starts from: that of its last round that counted."""
    if shapes.own is None:
        return None
    client, last = packet.facts["clients"][place], packet.facts["last"][place]
    if last < 0:
        return tree_of(packet.arrays, "own", shapes.own)
    arrays = stored.read(client, last)
    rule = f"be stored on this node as of round {last}: restore its state folder"
    checks.require(arrays is not None, f"the state of client {client}", rule, None)
    assert arrays is not None
    return tree_of(arrays, "own", shapes.own)


def _key(packet: Packet, place: int, keys: Keys) -> Any:
    """Makes a client's key of the round."""
    if keys == "device":
        return secret_key()
    rule = "be in the message for parity keys"
    checks.require("keys" in packet.arrays, "keys", rule, sorted(packet.arrays)[:3])
    return jax.random.wrap_key_data(jnp.asarray(packet.arrays["keys"][place]))
