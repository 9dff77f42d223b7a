"""A node of a federation: its clients, or a script of its own, train on the broadcast."""

import json
import pathlib
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from fedjax_dp.algorithms.base import ClientOutput, FederatedAlgorithm, Stages
from fedjax_dp.clients.client_data import ClientData
from fedjax_dp.core import checks, disclosure, sums, trees
from fedjax_dp.core.disclosure import in_public, public_text
from fedjax_dp.core.keys import secret_key
from fedjax_dp.core.marks import mark, marks_reaching
from fedjax_dp.core.messages import Form, received
from fedjax_dp.core.trees import PyTree
from fedjax_dp.engine.cohort import Examples, traced, typed
from fedjax_dp.engine.facts import FederationFacts, Population, examples_of, population_of
from fedjax_dp.engine.sides import Received, Work, client_side, contributed, run_client
from fedjax_dp.evaluation.evaluate import require_targets
from fedjax_dp.flower.agreement import KEYS, SHARES, UNMASK, Agreement, with_seeds
from fedjax_dp.flower.exchange import Exchange, Task, decoded, require_fit, until
from fedjax_dp.flower.ledger import NodeLedger, States, StatesInContext, StatesOnDisk, run_digest
from fedjax_dp.flower.log import LOG
from fedjax_dp.flower.packets import Packet, arrays_of, fact_of, packet_of, text_of, tree_of
from fedjax_dp.flower.plan import Plan, Shapes, described_in, require_own_scale, require_same
from fedjax_dp.flower.request import (
    Request,
    clients_in,
    request_of,
    round_in,
    scores_from,
    sizes_in,
)
from fedjax_dp.flower.terms import Keys, Node, Script, Terms, sizes_of
from fedjax_dp.server.base import Diagnostic, Fate, Stacked
from fedjax_dp.server.secure.aggregator import masks_of
from fedjax_dp.server.secure.key_agreement import SeedTable

# The part of the server's patience that a node waits for a script; the rest is for its reply.
_SHARE = 0.9


def require_difference(algorithm: FederatedAlgorithm, population: Population) -> None:
    """Requires clients without states, claims or choices, which send what training changed."""
    name = _offered(algorithm)
    message = jax.eval_shape(received, FederationFacts(algorithm, population).down[0])
    forms: list[Any] = []

    def one(message: PyTree, data: PyTree, index: jax.Array) -> ClientOutput:
        numbers = jax.tree.map(jnp.asarray, traced(algorithm, typed(algorithm.hyper)))
        hyper = numbers.of_client(index)
        # No training at all.
        num_steps = None if hyper.local.num_steps is None else jnp.int32(0)
        local = hyper.local._replace(num_epochs=jnp.float32(0), num_steps=num_steps)
        hyper = hyper._replace(local=local, algorithm=jax.tree.map(mark, hyper.algorithm))
        client = ClientData(data, index, index, index, population.limit, round=index, stage=index)
        output = run_client(algorithm, message, None, client, hyper, jax.random.key(0))
        forms.append(None if output.training is None else output.training.form)
        return output._replace(update=output.received, training=None, info={})

    arguments = message, population.structure, jax.ShapeDtypeStruct((), jnp.int32)
    closed, found = jax.make_jaxpr(one, return_shape=True)(*arguments)
    is_plain = _kinds(found.update) == _kinds(message) and forms[0] in (None, Form())
    checks.require(is_plain, name, "send the difference of two models", "another update")
    rule, own = "use its own numbers on the server alone", sorted(algorithm.numbers.values)
    checks.require(not any(marks_reaching(closed).outputs), name, rule, own)
    ones = [jax.tree.map(lambda x: jnp.ones(x.shape, x.dtype), each) for each in arguments[:2]]
    output = jax.jit(one)(*ones, jnp.int32(1))
    is_zero = not any(np.any(x) for x in jax.tree.leaves(output.update))
    checks.require(is_zero, name, "send zeros where nothing is trained", "another update")
    checks.require(float(output.weight) == 1, name, "weigh clients by size", output.weight)


def _offered(algorithm: FederatedAlgorithm) -> str:
    """Refuses what is seen from a declaration alone; returns the subject of further errors."""
    name = f"a training script cannot take part in {algorithm.name}, which"
    rule = "claim no privacy for records, as the package did not clip their gradients"
    checks.require(algorithm.claims.record is None, name, rule, "a claim")
    checks.require(algorithm.client_state is None, name, "have no client state", "some")
    checks.require(algorithm.stages == Stages(), name, "have rounds of one kind", "several")
    return name


def _kinds(tree: PyTree) -> Any:
    leaves, structure = jax.tree.flatten(tree)
    return structure, [(tuple(x.shape), np.dtype(x.dtype).name) for x in leaves]


def prepare(script: Script | None) -> None:
    """Makes the folder in which node and script meet, which the script waits for."""
    if script is not None:
        Exchange(script.folder)


def trained_by(script: Script, plan: Plan, request: Request) -> "Trained":
    """Passes the model of a round to the script and waits for the trained parameters."""
    with in_public():
        _offered(plan.algorithm)
    exchange, message = Exchange(script.folder), request.received[0].message
    deadline = time.time() + _SHARE * request.wait
    links = list(request.clients)
    task = Task(plan.digest, request.round, script.rounds, links, deadline, True)
    model = named(message)
    exchange.open(task, model)
    until(lambda: not exchange.missing(task), deadline)
    params: dict[int, PyTree] = {}
    structure = jax.tree.structure(message)
    for link, content in exchange.close(task).items():
        try:
            # Checked by `push`; a file that something else wrote is not.
            arrays = decoded(content)
            require_fit(arrays, model)
        except ValueError as error:
            warnings.warn(f"the update of data link {link} counts as lost: {error}", stacklevel=2)
            continue
        params[link] = jax.tree.unflatten(structure, [arrays[name] for name in model])
    return Trained(params, reports(script, plan.digest, request.scores_from))


def reports(script: Script, digest: str, start: int | None) -> dict[str, Any]:
    """Takes the scores that no reply has carried, as facts, if they are asked for and sent."""
    if not script.sends_scores or start is None:
        return {"scores": ""}
    found, end = Exchange(script.folder).unsent_scores(digest, None if start < 0 else start)
    return {"scores": json.dumps(found) if found else "", "scores end": end}


class Trained(NamedTuple):
    """What a script has pushed in a round."""

    params: Mapping[int, PyTree]  # By client; none of a client that was not trained in time.
    scores: Mapping[str, Any]  # Facts of the reply, from `reports`.

    def work(
        self,
        plan: Plan,
        received: Received,
        client: int,
        size: int,
        key: Any,
        seeds: SeedTable | None,
    ) -> Work:
        """Makes what a client sends: clipped, encoded, with its share of noise, by the package."""
        takes_part = client in self.params
        params = self.params.get(client, received.message)
        at = jnp.int32(client), jnp.float32(size), jnp.bool_(takes_part)
        return _work(plan, received, params, *at, key, seeds)


@partial(jax.jit, static_argnums=0)
def _work(
    plan: Plan,
    received: Received,
    params: PyTree,
    client: Any,
    weight: Any,
    part: Any,
    key: Any,
    seeds: SeedTable | None,
) -> Work:
    output = ClientOutput(trees.subtract(params, received.message), weight, None)
    algorithm = plan.algorithm if seeds is None else with_seeds(plan.algorithm, seeds)
    return contributed(algorithm, received, output, client, key, part)


def named(message: PyTree) -> dict[str, np.ndarray]:
    """Names the leaves of a model by path, as exported parameters are."""
    leaves = jax.tree.leaves(message)
    return {name: np.asarray(x) for name, x in zip(trees.paths(message), leaves, strict=True)}


# The message types that a node answers.
TRAIN, CLIENTS = "train", "query.clients"
DATA, PRIVACY, SCORES = "query.data", "query.privacy", "query.scores"


# `(plans, node, packet, context) -> packet` of the reply.
_Answer = Callable[["_Plans", "Node", Packet, Context], Packet]


class RefusedError(ValueError):
    """What the server learns of a message that failed; the node's log has the whole error."""


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
      The app, without Flower's mods, which clip and add noise to parameters and not to updates.

    Raises:
      RefusedError: in an error reply, for unknown keys, a plan that differs from the server's, a
        fact or array that is missing or out of its range, a client state that was lost, privacy of
        records without a folder for its ledger, or a round that exceeds their budget. It names what
        is wrong and the rule; values, rows, counts and paths of data are in the node's log alone.
    """
    app, plans = ClientApp(), _Plans(build, terms)

    def answers(answer: _Answer) -> Callable[[Message, Context], Message]:
        def answered(message: Message, context: Context) -> Message:
            try:
                node = data(context)
                with in_public():
                    packet = packet_of(message.content)
                reply = answer(plans, node, packet, context).record()
            except Exception as error:
                LOG.error("A message was refused", exc_info=error)
                text = public_text(error)
            else:
                return Message(reply, reply_to=message)
            # Outside of the handler: Flower sends the text, and no part of what it was raised from.
            raise RefusedError(text)

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
        with in_public():
            require_difference(algorithm, population_of(node.train, node.validation))
        prepare(node.script)
    return Packet({"clients": list(node.clients), **sizes_of(node)})


def _trained(plans: "_Plans", node: Node, packet: Packet, context: Context) -> Packet:
    """Runs the round of the drawn clients of a node."""
    agreement = plans.agreement(node, packet.facts, context)
    request = plans.request(node, packet, has_roster=agreement is not None)
    run = run_digest(request.run)
    stored: States = StatesInContext(context.state, run)
    if node.state_dir is not None:
        stored = StatesOnDisk(node.state_dir, run)
    for client, last in zip(request.clients, request.last, strict=True):
        rule = f"be stored on this node as of round {last}: restore its state folder"
        is_held = last < 0 or stored.has(client, last)
        disclosure.require(is_held, f"the state of client {client}", rule, None)
    ledger = plans.ledger(node, packet.facts)
    with in_public():
        seeds = None if agreement is None else agreement.seeds(packet)
    # Before the work: a crash can only charge too much.
    if ledger is not None:
        ledger.charge(request.clients, request.round, request.stage, request.run)
    return plans.train(node, plans.agreed(node, packet.facts), request, stored, seeds)


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
    disclosure.require(agreement is not None, "keys", rule, node.keys)
    assert agreement is not None
    plans.setting(node, packet.facts)
    with in_public():
        return step(agreement, packet)


def _claimed(plans: "_Plans", node: Node, packet: Packet, context: Context) -> Packet:
    """Answers what the ledger of a node claims for the records of its clients."""
    ledger = plans.ledger(node, packet.facts)
    disclosure.require(ledger is not None, "algorithm", "claim privacy for records", None)
    assert ledger is not None
    with in_public():
        dp_delta = fact_of(packet.facts, "dp_delta")
        fits = type(dp_delta) is float and 0 < dp_delta < 1
        checks.require(fits, "dp_delta", "be a number above 0 and below 1", dp_delta)
    epsilon, releases = ledger.epsilon(dp_delta), ledger.num_releases()
    return Packet({"clients": list(node.clients), "epsilon": epsilon, "releases": releases})


def _scored(plans: "_Plans", node: Node, packet: Packet, context: Context) -> Packet:
    """Answers the scores that a script has reported since the node's last reply."""
    if node.script is None:
        return Packet({"scores": ""})
    digest = plans.agreed(node, packet.facts).digest
    with in_public():
        start = scores_from(packet.facts)
    return Packet(reports(node.script, digest, start))


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
        with in_public():
            require_own_scale(plan.algorithm, node.keys)
        return plan

    def _planned(self, node: Node, facts: Mapping[str, Any]) -> tuple[Plan, Terms]:
        with in_public():
            sizes = sizes_in(facts, node)
        key = json.dumps([node.experiment, node.kind, *sizes])
        if key in self._plans:
            return self._plans[key]
        own = population_of(node.train, node.validation)
        first, second = (np.array(each, np.int32) for each in sizes)
        validation = None
        if len(second):
            validation = Population(second, own.structure)
        population = Population(first, own.structure, validation)
        terms = self._terms(node, population)
        algorithm = self._build(node, population)
        made = Plan(algorithm, population, terms.described), terms
        for what, split in (("data", node.train), ("validation", node.validation)):
            if split is not None:
                require_targets(what, split, made[0].targets, on_disk=True)
        # Plans of messages that are refused would fill the memory.
        if facts.get("digest") == made[0].digest:
            self._plans[key] = made
        return made

    def require(self, node: Node, facts: Mapping[str, Any]) -> None:
        """Requires the plan of the server, part by part."""
        own = self.plan(node, facts).described
        with in_public():
            require_same(own, described_in(facts))

    def ledger(self, node: Node, facts: Mapping[str, Any]) -> NodeLedger | None:
        """Opens the ledger of the node's records; None without a claim for them."""
        plan = self.agreed(node, facts)
        if plan.algorithm.claims.record is None:
            return None
        rule = "be a folder: the ledger of the records must outlast the node's process"
        disclosure.require(node.state_dir is not None, "state_dir", rule, node.state_dir)
        assert node.state_dir is not None
        folder = pathlib.Path(node.state_dir)
        budget = self._planned(node, facts)[1].budget
        sizes = node.train.sizes.tolist()
        return NodeLedger(plan, node.clients, sizes, folder, budget, node.keys)

    def agreement(self, node: Node, facts: Mapping[str, Any], context: Context) -> Agreement | None:
        """Returns the node's part in an agreement on masks; None where there is none."""
        masks = masks_of(self.agreed(node, facts).algorithm.aggregator)
        return None if masks is None or node.keys == "parity" else Agreement(masks, context.state)

    def agreed(self, node: Node, facts: Mapping[str, Any]) -> Plan:
        """Requires a message of the same plan."""
        disclosure.one_of("keys", node.keys, get_args(Keys))
        plan = self.plan(node, facts)
        with in_public():
            digest = text_of(facts, "digest")
            checks.require(digest == plan.digest, "digest", f"be {plan.digest}", digest)
        return plan

    def setting(self, node: Node, facts: Mapping[str, Any]) -> None:
        """Requires the facts of a step in which clients agree on masks."""
        with in_public():
            clients_in(facts, node)
            round_in(facts, self._planned(node, facts)[1].rounds)
            text_of(facts, "setup")

    def request(self, node: Node, packet: Packet, *, has_roster: bool) -> Request:
        """Reads a message that asks for a round; nothing else of it is read then."""
        plan, rounds = self.agreed(node, packet.facts), self._planned(node, packet.facts)[1].rounds
        with in_public():
            roster = has_roster or plan.reads_roster
            request = request_of(packet, plan, node, rounds, has_roster=roster)
            rule = "be one for all clients of a node that a script trains"
            is_one = node.script is None or request.is_one_model
            checks.require(is_one, "the model of a round", rule, "several")
        return request

    def train(
        self,
        node: Node,
        plan: Plan,
        request: Request,
        stored: States,
        seeds: Mapping[int, SeedTable] | None,
    ) -> Packet:
        """Runs the rounds of the drawn clients of a node, under masks of these seeds if given."""
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
            trained = trained_by(node.script, plan, request)
        for place, client in enumerate(request.clients):
            received, last = request.received[place], request.last[place]
            own = None if shapes.own is None else _own(request, place, shapes, stored)
            key = secret_key()
            if request.keys is not None:
                key = jax.random.wrap_key_data(jnp.asarray(request.keys[place]))
            place_here = jnp.int32(request.places[place])
            at = jnp.int32(client), jnp.int32(request.round), jnp.int32(request.stage)
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
                    stored.write(client, request.round, arrays_of(after, "own"), last)
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
        answer = {"digest": plan.digest, "round": request.round, "clients": request.clients}
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


def _own(request: Request, place: int, shapes: Shapes, stored: States) -> PyTree:
    """Reads the state that a client's round starts from: that of its last round that counted."""
    client, last = request.clients[place], request.last[place]
    if last < 0:
        return request.first
    arrays = stored.read(client, last)
    assert arrays is not None
    return tree_of(arrays, "own", shapes.own)
