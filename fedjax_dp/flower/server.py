"""The server of a federation: it draws, sends, adds up, adds noise and steps."""

import secrets
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple, Protocol, get_args

import jax
import jax.numpy as jnp
import numpy as np
from chex import PRNGKey

from fedjax_dp.algorithms.base import FederatedAlgorithm, Hyper, Recipient, Round
from fedjax_dp.core import checks, trees
from fedjax_dp.core.keys import Purpose, fold
from fedjax_dp.core.messages import received, tariff_of
from fedjax_dp.core.trees import PyTree
from fedjax_dp.engine.cohort import Cohort, traced, typed
from fedjax_dp.engine.execution.compile import Simulation
from fedjax_dp.engine.execution.round_loop import after_host_step, rounds_and_host_steps
from fedjax_dp.engine.federation import Federation
from fedjax_dp.engine.layout import Layout
from fedjax_dp.engine.record import (
    MessageCounts,
    RoundInfo,
    RoundRecord,
    compact,
    joined,
    joined_info,
)
from fedjax_dp.engine.record import digest_of as digest_of_numbers
from fedjax_dp.engine.round import SimulationState
from fedjax_dp.engine.sides import Closed, clients_at_server, server_side
from fedjax_dp.flower.agreement import Masking, SetUp, with_seeds
from fedjax_dp.flower.packets import Distinct, Packet, arrays_of
from fedjax_dp.flower.plan import Plan, require_own_scale
from fedjax_dp.flower.request import Replies
from fedjax_dp.flower.terms import Keys
from fedjax_dp.privacy.claims import OnceClaim
from fedjax_dp.server.base import Close, Fate, Roster, Stacked
from fedjax_dp.server.secure.aggregator import masks_of
from fedjax_dp.server.secure.key_agreement import SeedTable


class Journal(Protocol):
    """The rounds that were sent, in order."""

    @property
    def run(self) -> str:
        """A random name of the run, the same when it is resumed."""

    def append(self, round: int, record: RoundRecord) -> None:
        """Writes a round that is about to be sent.

        Args:
          round: rounds done before it.
          record: its record, as it is known before messages leave.
        """

    def num_attempts(self, round: int) -> int:
        """Counts the earlier attempts of a round.

        Args:
          round: rounds done before it.

        Returns:
          The number of attempts.
        """

    def num_released(self, round: int) -> int:
        """Counts the earlier attempts of a round whose aggregate was sent to nodes afterwards.

        Args:
          round: rounds done before it.

        Returns:
          The number of attempts.
        """


class Nodes(Protocol):
    """The nodes of a federation, however they are reached."""

    def clients(self, question: Packet) -> Mapping[int, int]:
        """Finds the node of each client that is online.

        Args:
          question: the plan of the server, which new nodes compare with their own.

        Returns:
          The node of each client that is online.
        """

    def train(self, packets: Mapping[int, Packet], round: int) -> Mapping[int, Packet]:
        """Sends each node its packet and collects the replies that arrive in time.

        Args:
          packets: by node.
          round: rounds done before.

        Returns:
          The reply of each node that has sent one.
        """

    def agree(self, step: str, packets: Mapping[int, Packet], round: int) -> Mapping[int, Packet]:
        """Sends the messages of a step in which clients agree on masks, or masks are removed.

        Args:
          step: the type of the messages.
          packets: by node.
          round: rounds done before.

        Returns:
          The reply of each node that has sent one.
        """


def deployed(
    federation: Federation,
    nodes: Nodes,
    *,
    keys: Keys = "device",
    journal: Journal | None = None,
    described: Mapping[str, str] = {},
) -> Simulation:
    """Runs the rounds of a federation on nodes instead of a compiled program.

    The value stands where a compiled simulation does, so that accounting, checkpoints, callbacks
    and reports are the same. Cohorts are drawn from the registered population; a client whose node
    is offline contributes nothing, and so does one whose reply is late, damaged, or of another
    plan: noise is added and the server steps all the same. Where clients add the noise in shares,
    messages of fewer than the claim counts on are not used: the round adds zeros, and is charged.

    Guarantee: the root key never leaves the server; nodes get the public key of a round alone, and
    with parity keys their own. A round is in the journal before a message of it leaves. Each
    attempt of a round has fresh noise and, where secret cohorts amplify privacy, another cohort,
    whatever the journal holds; with parity keys only after its aggregate was sent. Correlated noise
    is released once. No node is asked in a round that is repeated under masks.
    Messages of `secure.masked` are under masks that clients agree on in each round, between their
    nodes: against a server that is honest but curious, carries the public keys between them, and
    has at most `graph.colluders` of the clients on its side, each message is uniform. Parity keys
    leave the masks simulated, which hides nothing from the server.

    Args:
      federation: algorithm, population and participation, without a wrapper.
      nodes: the nodes.
      keys: "device" or "parity", as for `client_app`.
      journal: the rounds that were sent; None to write none.
      described: what neither numbers nor shapes of the algorithm show, by name, as in `Terms`.

    Returns:
      The simulation; it holds one layout, of chunks of one client.

    Raises:
      ValueError: for a federation with a wrapper or schedules, an algorithm whose rounds end with
        a second message or whose host steps read client states, or whose noise at the clients has a
        scale that the server sends, unless keys are of parity; for masks, if secret cohorts amplify
        privacy of clients, if the server has a part of client states, or for parity keys with
        those that were agreed in this process.
    """
    checks.one_of("keys", keys, get_args(Keys))
    require_deployable(federation, keys)
    server = _Server(federation, nodes, keys, journal, described)
    return Simulation(
        init=server.init,
        run=server.run,
        compile=lambda state, key: state,
        portable=lambda state, *, copies=True: jax.device_get(state),
        for_checkpoint=jax.device_get,
        federation=federation,
        layout=Layout(),
        num_traces=lambda: 1,
    )


def require_deployable(federation: Federation, keys: Keys) -> None:
    """Refuses what nodes cannot run."""
    _require_plain_rounds(federation)
    require_own_scale(federation.algorithm, keys)
    _require_masks(federation, keys)


def _require_plain_rounds(federation: Federation) -> None:
    """Refuses rounds of more than one message, host steps that read client states, wrappers."""
    algorithm = federation.algorithm
    states = algorithm.client_state
    rule = f"have no second message at the end of a round to be deployed, as {algorithm.name} has"
    checks.require(states is None or states.finish is None, "algorithm", rule, algorithm.name)
    for step in algorithm.stages.host_steps:
        rule = "be false in a federation, where client states stay on their nodes"
        checks.require(not step.reads_clients, "host_steps.reads_clients", rule, True)
    wrapped = [wrapper.name for wrapper in federation.wrappers]
    rule = (
        "have no wrapper to be deployed: no acceleration, clock or asynchronous rounds, no clients "
        "that leave or that their budgets leave out, and one server"
    )
    checks.require(not wrapped, "federation", rule, wrapped)
    rule = "have no schedules to be deployed: nodes agree to numbers that hold in every round"
    changing = sorted(federation.hyper.factors)
    checks.require(not changing, "federation", rule, changing)


def _require_masks(federation: Federation, keys: str) -> None:
    """Refuses masks whose rounds would show more than their sums."""
    algorithm = federation.algorithm
    masks, states = masks_of(algorithm.aggregator), algorithm.client_state
    if masks is None:
        return
    rule = (
        "have no masks in a federation where secret cohorts amplify privacy of clients: whether a "
        "sum is lost would depend on which nodes are offline and on who was drawn; the nearest "
        "valid cohorts are of full_participation(), cyclic() and without_amplification(...)"
    )
    checks.require(not federation.amplifies, "the aggregator", rule, federation.cohorts.name)
    if keys == "parity":
        rule = "be simulated for parity keys, with which the server is trusted"
        is_simulated = masks.seeds.is_simulated
        checks.require(is_simulated, "the keys of masks", rule, "agreed ones, of one process")
        return
    rule = f"have no masks in {algorithm.name}, of whose client states the server has a part"
    checks.require(states is None or states.known is None, "the aggregator", rule, "some")


# As many random bits as a key of JAX holds, in words of 32.
_WORDS = 2
# Rounds in a row without any reply, after which a run ends.
_MOST_SILENT = 3
# Clients that have sent a message, and with it their share of the noise.
_SENT = (Fate.CONTRIBUTED, Fate.NOT_FINITE)


class _Drawn(NamedTuple):
    """A round that is under way; under masks with what clients have agreed, and its end."""

    round: Round
    cohort: Cohort
    fate: np.ndarray
    public_key: PRNGKey
    set_up: SetUp | None = None
    recovered: Callable[[np.ndarray], tuple[SeedTable | None, np.ndarray]] | None = None


class _Gathered(NamedTuple):
    """What the replies of a round add up to, and whether they are too few to be used."""

    total: PyTree
    known: Mapping[int, PyTree]
    fate: np.ndarray
    seeds: SeedTable | None
    is_abandoned: bool


class _Server:
    """Runs rounds on nodes."""

    def __init__(
        self,
        federation: Federation,
        nodes: Nodes,
        keys: str,
        journal: Journal | None,
        described: Mapping[str, str],
    ) -> None:
        self._federation, self._nodes, self._keys, self._journal = federation, nodes, keys, journal
        algorithm, population = federation.algorithm, federation.population
        self._algorithm = algorithm
        masks = masks_of(algorithm.aggregator)
        # Under masks the aggregator itself loses a sum of fewer.
        self._least = federation.claims.min_participants if masks is None else 0
        second = population.validation
        sizes = {
            "sizes": population.sizes.tolist(),
            "validation sizes": [] if second is None else second.sizes.tolist(),
        }
        self._plan = plan = Plan(algorithm, population, described)
        is_stacked = isinstance(algorithm.aggregator, Stacked)
        self._replies = Replies(plan.shapes, is_stacked=is_stacked)
        texts = {"plan names": list(plan.described), "plan texts": list(plan.described.values())}
        self._facts = {**sizes, "digest": plan.digest}
        self._question = Packet({**self._facts, **texts})
        self._draw = jax.jit(federation.cohorts.draw)
        # Those of parity keys are simulated, in the encoder itself.
        self._masks = masks if keys == "device" else None
        self._close = jax.jit(partial(_closed, algorithm))
        self._message = jax.jit(self._message_to)
        self._run = secrets.token_hex(8)
        # Rounds in a row that no node has answered.
        self._num_silent = 0

    def init(self, key: PRNGKey) -> SimulationState:
        """Makes the state before the first round: of client states, the part that is known."""
        state = self._federation.init(key)
        return state._replace(clients=clients_at_server(self._algorithm, state.clients))

    def run(
        self, state: Any, key: PRNGKey, num_rounds: int = 1, hyper: Hyper | None = None
    ) -> tuple[SimulationState, RoundRecord, RoundInfo]:
        """Runs rounds, with the work on the host after them."""
        numbers = self._plan.hyper
        if hyper is not None:
            rule = "be the numbers of the plan, which nodes have agreed to"
            given = traced(self._algorithm, typed(hyper))
            pairs = (jax.tree.leaves_with_path(each) for each in (numbers, given))
            mine, others = ({jax.tree_util.keystr(p): x for p, x in each} for each in pairs)
            fits = mine.keys() == others.keys()
            fits = fits and all(np.array_equal(x, others[name]) for name, x in mine.items())
            checks.require(fits, "hyper", rule, "others")
        left = []
        host_steps = self._algorithm.stages.host_steps
        for block, steps in rounds_and_host_steps(host_steps, int(state.round), num_rounds):
            for _ in range(block):
                state, record, info = self._play(state, key, numbers)
                left.append((compact(record), info))
            for step in steps:
                after = after_host_step(step, state, numbers, key)
                state = jax.device_put(after)
        records, infos = zip(*left, strict=True)
        return state, joined(records), joined_info(infos)

    def _play(
        self, state: SimulationState, key: PRNGKey, hyper: Hyper
    ) -> tuple[SimulationState, RoundRecord, RoundInfo]:
        number, places = int(state.round), self._nodes.clients(self._question)
        attempt = self._attempt(number)
        if reason := self._reason_to_ask_none(number):
            # For people rounds count from 1.
            warnings.warn(f"round {number + 1}: {reason}: no node is asked", stacklevel=2)
            places = {}
        # Amplification counts on a cohort of its own for each release.
        is_secret = self._federation.cohorts.charges_all
        drawn = self._drawn(state, fold(key, *attempt * is_secret), hyper, places)
        record = _record(drawn, hyper)
        if self._journal is not None:
            self._journal.append(number, record)
        wire = _Wire()
        drawn = self._agreed(drawn, places, wire)
        packets = self._packets(state, key, drawn, places)
        replies = wire.counted(packets, self._nodes.train(packets, number) if packets else {})
        if packets:
            self._require_replies(number, len(packets), len(replies))
        gathered = self._gathered(drawn, packets, replies)
        private_key = fold(key, Purpose.CENTRAL_NOISE, number, *attempt)
        step_key = fold(key, Purpose.SERVER_STEP, number)
        after, closed, fate = self._stepped(state, hyper, drawn, gathered, private_key, step_key)
        round_metrics = wire.metrics()
        if self._least:
            round_metrics["is_abandoned"] = np.float32(gathered.is_abandoned)
        # Not in the log, which more people read.
        round_metrics["nodes_asked"] = np.int64(len(packets))
        round_metrics["nodes_replied"] = np.int64(len(replies))
        return after, record._replace(fate=_one(fate)), self._info(closed, fate, round_metrics)

    def _require_replies(self, number: int, num_asked: int, num_replied: int) -> None:
        """Ends a run that no node answers: each round is charged, and its step is noise."""
        self._num_silent = 0 if num_replied else self._num_silent + 1
        if num_replied:
            return
        text = f"round {number + 1}: of {num_asked} nodes that were asked, none has replied"
        if self._num_silent >= _MOST_SILENT:
            raise ValueError(
                f"{text}, {_MOST_SILENT} rounds in a row: see the nodes' logs; the run can be "
                "resumed once they answer"
            )
        warnings.warn(text, stacklevel=3)

    def _agreed(self, drawn: _Drawn, places: Mapping[int, int], wire: "_Wire") -> _Drawn:
        """Lets clients agree on masks, if there are any; those that do not are left out."""
        if self._masks is None:
            return drawn
        number = int(drawn.round.index)
        masking = Masking(self._masks, places, partial(self._agree, number, wire))
        ids = np.where(drawn.fate == Fate.CONTRIBUTED, drawn.cohort.ids, -1)
        facts = {**self._facts, "round": number}
        set_up = masking.set_up(facts, ids, _words(drawn.public_key))
        is_left = (drawn.fate != Fate.CONTRIBUTED) | (set_up.cohort.ids >= 0)
        fate = np.where(is_left, drawn.fate, Fate.UNANNOUNCED).astype(np.int8)
        recovered = partial(masking.recovered, set_up)
        return drawn._replace(fate=fate, set_up=set_up, recovered=recovered)

    def _gathered(
        self, drawn: _Drawn, packets: Mapping[int, Packet], replies: Mapping[int, Packet]
    ) -> _Gathered:
        """Adds up replies; zeros where fewer have come than a claim counts on."""
        ids, seeds = np.asarray(drawn.cohort.ids), None
        total, known, fate = self._replies.gathered(replies, packets, ids, drawn.fate)
        if drawn.recovered is not None:
            seeds, fate = drawn.recovered(fate)
        is_abandoned = bool(np.sum(np.isin(fate, _SENT)) < self._least)
        if is_abandoned:
            rule = f"the {self._least} clients whose shares of noise the claim counts"
            text = f"round {int(drawn.round.index) + 1} is lost: fewer have replied than {rule}"
            warnings.warn(text, stacklevel=3)
            total = jax.tree.map(np.zeros_like, total)
            fate = np.where(np.isin(fate, _SENT), Fate.LATE, fate).astype(np.int8)
        return _Gathered(total, known, fate, seeds, is_abandoned)

    def _stepped(
        self,
        state: SimulationState,
        hyper: Hyper,
        drawn: _Drawn,
        gathered: _Gathered,
        private_key: PRNGKey,
        step_key: PRNGKey,
    ) -> tuple[SimulationState, Closed, np.ndarray]:
        """Adds the noise and steps along the aggregate; returns the fates too."""
        fate = gathered.fate
        close = Close(self._roster(drawn), jnp.asarray(fate), drawn.public_key, private_key)
        of_server = state.server, state.aggregator, hyper, gathered.total, close
        closed = self._close(gathered.seeds, *of_server, drawn.round, step_key)
        if not closed.is_finite:
            fate = np.where(fate == Fate.CONTRIBUTED, Fate.NOT_FINITE, fate).astype(np.int8)
        after = state._replace(
            server=closed.server,
            aggregator=closed.aggregator,
            clients=self._counted(state, drawn, fate, gathered.known),
            round=state.round + 1,
        )
        return after, closed, fate

    def _attempt(self, number: int) -> tuple[int, ...]:
        """Makes what an attempt of a round folds into the keys that no other attempt may have."""
        released = 0
        if self._journal is not None:
            released, claim = self._journal.num_released(number), self._federation.claims.client
            rule = (
                "be released once, since correlated noise would share columns with the first "
                "release; nearest valid choices: the newest checkpoint, restored from a copy, or a "
                "new run"
            )
            is_fresh = claim is None or claim.min_separation == 1
            here = f"round {number + 1}"
            checks.require(is_fresh or not released, here, rule, "a second time")
        if self._keys == "device":
            # Not a count: a journal that was restored lacks the attempts after it.
            return Purpose.RUN, *(secrets.randbits(32) for _ in range(_WORDS))
        # The bits of an interrupted run are those of a whole one with parity keys alone.
        return (Purpose.RUN, released) if released else ()

    def _reason_to_ask_none(self, number: int) -> str:
        """Says why no node may be asked in a round that was sent before; empty if nodes may."""
        if self._journal is None or self._journal.num_attempts(number) == 0:
            return ""
        if isinstance(self._federation.claims.record, OnceClaim):
            return "its records are read once, and were when it was sent before"
        if self._masks is not None:
            return "it was sent before, and the difference of two masked sums could be one client's"
        return ""

    def _agree(
        self, number: int, wire: "_Wire", step: str, packets: Mapping[int, Packet]
    ) -> Mapping[int, Packet]:
        return wire.counted(packets, self._nodes.agree(step, packets, number))

    def _drawn(
        self, state: SimulationState, key: PRNGKey, hyper: Hyper, places: Mapping[int, int]
    ) -> _Drawn:
        """Draws the cohort from the whole population, whatever nodes are online."""
        cohort = jax.device_get(self._draw(state._replace(clients=None), hyper, key))
        online = np.isin(cohort.ids, np.array(sorted(places), np.int32))
        fate = np.where(
            (cohort.fate == Fate.CONTRIBUTED) & ~online, Fate.UNANNOUNCED, cohort.fate
        ).astype(np.int8)
        if np.sum(fate == Fate.CONTRIBUTED) < self._least:
            # Their sum would not be used.
            fate[fate == Fate.CONTRIBUTED] = Fate.UNANNOUNCED
        stage = self._algorithm.stages.stage_of(state.server, hyper, state.round)
        round = Round(jnp.asarray(state.round), jnp.asarray(stage, jnp.int32))
        return _Drawn(round, cohort, fate, fold(key, Purpose.PUBLIC, int(state.round)))

    @staticmethod
    def _roster(drawn: _Drawn) -> Roster:
        announced = (drawn.fate != Fate.EMPTY) & (drawn.fate != Fate.UNANNOUNCED)
        return Roster(jnp.asarray(drawn.cohort.ids), jnp.asarray(announced))

    def _message_to(
        self, server: PyTree, known: PyTree, client: Any, size: Any, round: Round
    ) -> PyTree:
        recipient = Recipient(client, size, round.index, round.stage, known)
        return received(self._algorithm.broadcast(server, recipient))

    def _packets(
        self, state: SimulationState, key: PRNGKey, drawn: _Drawn, places: Mapping[int, int]
    ) -> dict[int, Packet]:
        """Makes the message to each node that holds a drawn client."""
        groups: dict[int, list[int]] = {}
        for i in map(int, drawn.cohort.ids[drawn.fate == Fate.CONTRIBUTED]):
            groups.setdefault(places[i], []).append(i)
        of_aggregator = self._algorithm.aggregator.broadcast(state.aggregator)
        common = arrays_of(of_aggregator, "aggregator")
        common["public_key"] = _words(drawn.public_key)
        if self._plan.reads_roster or drawn.set_up is not None:
            common |= arrays_of(self._roster(drawn), "roster")
        first, known, last = state.clients if state.clients is not None else (None, None, None)
        sizes = self._federation.population.sizes
        facts = {
            **self._facts,
            "run": self._run if self._journal is None else self._journal.run,
            "round": int(state.round),
            "stage": int(drawn.round.stage),
        }
        if drawn.set_up is not None:
            facts["setup"] = drawn.set_up.facts["setup"]
        packets = {}
        for node, clients in sorted(groups.items()):
            arrays, of_own = dict(common), dict[str, Any]()
            messages = Distinct("message")
            for client in clients:
                own = None if known is None else trees.take(known, client)
                sent = self._message(
                    state.server, own, jnp.int32(client), jnp.int32(sizes[client]), drawn.round
                )
                messages.add(sent)
            if last is not None:
                of_own["last"] = [int(last[client]) for client in clients]
                if min(of_own["last"]) < 0:
                    arrays |= arrays_of(first, "own")
            if self._keys == "parity":
                made = [fold(key, Purpose.CLIENT, int(state.round), c) for c in clients]
                arrays["keys"] = np.stack([np.asarray(jax.random.key_data(k)) for k in made])
            arrays |= messages.arrays
            of_own |= {"clients": clients, "messages": messages.places}
            packets[node] = Packet({**facts, **of_own}, arrays)
        return packets

    def _counted(
        self, state: SimulationState, drawn: _Drawn, fate: np.ndarray, news: Mapping[int, PyTree]
    ) -> PyTree:
        """Notes whose round counted, and what the server knows of their states since."""
        if state.clients is None:
            return None
        first, known, last = state.clients
        counted = drawn.cohort.ids[fate == Fate.CONTRIBUTED]
        last = jnp.asarray(last).at[counted].set(int(state.round))
        for client in counted if known is not None else ():
            known = jax.tree.map(
                lambda all, new, c=int(client): jnp.asarray(all).at[c].set(new),
                known,
                news[int(client)],
            )
        return first, known, last

    def _info(self, closed: Closed, fate: np.ndarray, wire: Mapping[str, Any]) -> RoundInfo:
        """Collects the metrics of a round; a server knows no sizes that depend on a mask."""
        facts, num_slots = self._federation.facts, len(fate)
        up, down = (len(tariff_of(message).rates) for message in (facts.up, facts.down))
        messages = None
        if up or down:
            # None is counted: each then has its largest size.
            counts = (_one(np.zeros(num_slots, np.int32)) for _ in range(up + down))
            each = tuple(counts)
            messages = MessageCounts(_one(np.zeros(num_slots, bool)), each[:up], each[up:])
        of_server = {**closed.of_server, **wire}
        aggregator, server = (
            {name: _one(value) for name, value in of.items()}
            for of in (closed.of_aggregator, of_server)
        )
        return RoundInfo(None, {}, aggregator, server, messages)


def _closed(algorithm: FederatedAlgorithm, seeds: SeedTable | None, *rest: Any) -> Closed:
    """Computes the server's side, with the seeds of masks that clients have agreed on."""
    return server_side(algorithm if seeds is None else with_seeds(algorithm, seeds), *rest)


def _words(key: PRNGKey) -> np.ndarray:
    return np.asarray(jax.random.key_data(key))


class _Wire:
    """Counts the bytes of a round's messages."""

    def __init__(self) -> None:
        self._down = self._up = 0

    def counted(
        self, packets: Mapping[int, Packet], replies: Mapping[int, Packet]
    ) -> Mapping[int, Packet]:
        """Counts what was sent and what came back, and returns the latter."""
        self._down += sum(packet.num_bytes for packet in packets.values())
        self._up += sum(reply.num_bytes for reply in replies.values())
        return replies

    def metrics(self) -> dict[str, Any]:
        """Returns the bytes by name."""
        return {"wire_bytes_down": np.int64(self._down), "wire_bytes_up": np.int64(self._up)}


def _one(value: Any) -> Any:
    """Makes the host array of one round, `[1, ...]`."""
    return np.asarray(value)[None]


def _record(drawn: _Drawn, hyper: Hyper) -> RoundRecord:
    """Makes the record of a round, `[1, ...]`, as it is known before messages leave."""
    is_drawn = drawn.fate != Fate.EMPTY
    return RoundRecord(
        clients=_one(np.where(is_drawn, drawn.cohort.ids, -1)),
        fate=_one(drawn.fate),
        overflow=_one(drawn.cohort.overflow),
        stage=_one(drawn.round.stage),
        is_released=_one(True),
        digest=_one(digest_of_numbers(jax.tree.map(np.asarray, hyper))),
    )
