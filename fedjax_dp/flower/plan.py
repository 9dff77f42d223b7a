"""What server and nodes must agree on before a client's work can be added up."""

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_dp.algorithms.base import Averaged, FederatedAlgorithm, Hyper, one_stage
from fedjax_dp.core import checks, trees
from fedjax_dp.core.disclosure import GuardedError
from fedjax_dp.core.jaxprs import ClosedJaxpr
from fedjax_dp.core.marks import mark, marks_reaching
from fedjax_dp.core.messages import received
from fedjax_dp.core.packages import libraries
from fedjax_dp.core.trees import PyTree
from fedjax_dp.engine.cohort import traced, typed
from fedjax_dp.engine.facts import FederationFacts, Population
from fedjax_dp.flower.packets import fact_of
from fedjax_dp.privacy.events import to_dict
from fedjax_dp.privacy.mechanisms.gamma_shares import GammaSharesDpEvent
from fedjax_dp.server.base import Roster
from fedjax_dp.server.secure.aggregator import Masks, masks_of

# Beginnings of names of what a configuration adds to a plan.
SECTION, SOURCE = "section ", "source of "
# Libraries whose versions change the bits of a round.
_VERSIONS = ("fedjax-dp", "jax", "jaxlib", "optax", "flax")
# In the text of a traced function: addresses of objects, and numbers that are not whole.
_ADDRESS = re.compile(r"\b0x[0-9a-f]+")
_FLOAT = re.compile(r"\b\d+(\.\d+(e[-+]?\d+)?|e[-+]?\d+)")


class Plan:
    """An algorithm, and the public facts of the population that clients' rounds depend on."""

    def __init__(
        self,
        algorithm: FederatedAlgorithm,
        population: Population,
        described: Mapping[str, str] = {},
    ) -> None:
        """Traces one client's round; `described` is what neither numbers nor shapes show."""
        self.algorithm, self.num_clients = algorithm, population.num_clients
        self.hyper = jax.tree.map(jnp.asarray, traced(algorithm, typed(algorithm.hyper)))
        self.structure, second = population.structure, population.validation
        self.limit = population.limit  # Of the largest client, which fixes the shapes of batches.
        self.validation_limit = 0 if second is None else second.limit
        if second is not None:
            second = Population(np.array([self.validation_limit]), self.structure)
        facts = FederationFacts(
            algorithm, Population(np.array([self.limit]), self.structure, second)
        )
        self.targets, states, own = facts.targets, algorithm.client_state, facts.own
        message = jax.eval_shape(received, facts.down[0])
        index = jax.ShapeDtypeStruct((), jnp.int32)
        closed, sent = jax.make_jaxpr(
            lambda update, index: facts.sent(update, _marked(index)), return_shape=True
        )(facts.update, index)
        known = None
        if states is not None and states.known is not None:
            known = jax.eval_shape(states.known, own)
        self.shapes = Shapes(message, facts.down[1], own, known, sent)
        self.reads_roster = any(marks_reaching(closed).outputs)  # Clients must learn the cohort.
        events = () if algorithm.claims.record is None else algorithm.claims.record.events
        self.num_stages = len(events) if len(events) > 1 else None  # None: one price for all.
        self.stage_of = _stage_by_round(algorithm, facts.server, self.hyper)  # None: by its state.
        self.described = {**self._described(), "traced contribution": _traced(closed), **described}
        text = json.dumps(self.described, sort_keys=True)
        self.digest = hashlib.sha256(text.encode()).hexdigest()

    def _described(self) -> dict[str, str]:
        claims = self.algorithm.claims
        masks = masks_of(self.algorithm.aggregator)
        units = [u for u, c in zip(("client", "record"), claims, strict=True) if c is not None]
        return {
            "algorithm": self.algorithm.name,
            "clients": str(self.num_clients),
            "limit": f"{self.limit} and {self.validation_limit}",
            "privacy units": ", ".join(units),
            "privacy of a round": self._events(),
            "numbers": _shown(self.hyper),
            "masks": "" if masks is None else _masks(masks),
            **{f"shapes of {name}": _kinds(part) for name, part in self.shapes._asdict().items()},
            **{name: libraries().get(name, "") for name in _VERSIONS},
        }

    def _events(self) -> str:
        """Describes what a round of the first client costs, were it the largest."""
        hyper = jax.tree.map(np.asarray, self.hyper)
        local = jax.tree.map(lambda x: x if x.ndim == 0 else x[0], hyper.local)
        of_client, of_records = self.algorithm.claims
        events = [] if of_client is None else [of_client.event(hyper.aggregator)]
        for event in () if of_records is None else of_records.events:
            events.append(event(self.limit, hyper._replace(local=local)))
        return " and ".join(json.dumps(_shortened(to_dict(event))) for event in events)


def _stage_by_round(
    algorithm: FederatedAlgorithm, server: PyTree, hyper: Hyper
) -> Callable[[int], int | None]:
    """Makes the function from a round to its stage; to None where it depends on the server."""
    if algorithm.stages.stage_of is one_stage:
        return lambda round: 0

    def stage(server: PyTree, round: Any) -> jax.Array:
        return jnp.asarray(algorithm.stages.stage_of(server, hyper, round), jnp.int32)

    def marked(server: PyTree, round: Any) -> jax.Array:
        return stage(jax.tree.map(mark, server), round)

    closed = jax.make_jaxpr(marked)(server, jax.ShapeDtypeStruct((), jnp.int32))
    if any(marks_reaching(closed).outputs):
        return lambda round: None
    # Of a server's state that is not read.
    of_any = jax.jit(lambda round: stage(algorithm.init(jax.random.key(0)), round))
    return lambda round: int(of_any(jnp.int32(round)))


def _masks(masks: Masks) -> str:
    # A bound whose last digits depend on the machine, and which no node reads.
    graph = {name: x for name, x in masks.graph._asdict().items() if name != "failure"}
    return f"{graph} and {masks.encoding._asdict()}"


def _traced(closed: ClosedJaxpr) -> str:
    """Computes the SHA-256 of a traced function, except for values in constant arrays."""
    text = _FLOAT.sub(lambda found: _shortened(float(found[0])), _ADDRESS.sub("", str(closed)))
    return hashlib.sha256(text.encode()).hexdigest()


def _shortened(value: Any) -> Any:
    """Rounds numbers, whose last digits depend on the machine."""
    if isinstance(value, Mapping):
        return {name: _shortened(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_shortened(each) for each in value]
    return f"{value:.6g}" if isinstance(value, float) else value


class Shapes(NamedTuple):
    """The shapes of what server and nodes exchange, as `jax.ShapeDtypeStruct`s."""

    message: PyTree  # The algorithm's message to a client, as it arrives.
    aggregator: PyTree  # The aggregator's message to a client.
    own: PyTree  # A client's state; None if it has none.
    known: PyTree  # The part of it that the server has; None for nothing.
    sent: PyTree  # What a client sends, as the aggregator adds it up.


def described_in(facts: Mapping[str, Any]) -> dict[str, str]:
    """Reads `Plan.described` of the server from the facts of its question."""
    names, texts = (fact_of(facts, f"plan {part}") for part in ("names", "texts"))
    for found in (names, texts):
        fits = isinstance(found, list) and all(isinstance(each, str) for each in found)
        checks.require(fits, "the plan of the server", "be of names and texts", found)
    rule = "have a text for each of its names"
    checks.require(len(set(names)) == len(texts), "the plan of the server", rule, names)
    return dict(zip(names, texts, strict=True))


def require_same(own: Mapping[str, str], others: Mapping[str, str]) -> None:
    """Requires the other side's plan to be described alike; names the first part that differs.

    Sections of a node's own file may name its clients, and imported files its folders: the server
    reads which keys differ.
    """
    # Sections first: what else differs may follow from them.
    for name in sorted({*own, *others}, key=lambda name: (not name.startswith(SECTION), name)):
        mine, theirs = own.get(name, ""), others.get(name, "")
        text = f"{name} of the server must be {mine!r} as here, got {checks.shown(theirs)}"
        public = text
        if name.startswith(SECTION):
            public = f"{name} of the server must be as here, in {', '.join(_unlike(mine, theirs))}"
        elif name.startswith(SOURCE):
            public = "files of imported parts must be the same on the server"
        if mine != theirs:
            raise GuardedError(text, public)


def _unlike(mine: str, theirs: str) -> list[str]:
    """Lists the keys of a node's section that differ; all of them where the other is none."""
    try:
        given = json.loads(theirs)
    except ValueError:
        given = None
    own = json.loads(mine) if mine else {}
    there = given if isinstance(given, dict) else {}
    return [key for key in own if key not in there or own[key] != there[key]]


def require_own_scale(algorithm: FederatedAlgorithm, keys: str) -> None:
    """Refuses noise of clients that does not hold against a server that must not be trusted.

    It sends the scale of some. Oblivious noise is hidden from it by masks that no node makes.
    """
    claim = algorithm.claims.client
    event = None if claim is None else claim.event(algorithm.hyper.aggregator)
    rule = (
        "be parity, which trusts the server: it receives each message, and the masks of oblivious "
        "noise are not made; nearest valid choices: mechanism 'discrete_gaussian' under masks"
    )
    fits = keys == "parity" or not isinstance(event, GammaSharesDpEvent)
    checks.require(fits, "keys", rule, keys)
    rule = (
        f"be parity, which trusts the server: it sends the scale of the noise of {algorithm.name}, "
        "of shares or printed; nearest valid choices: calibration 'corrected' and whole noise"
    )
    models = None if algorithm.client_state is None else algorithm.client_state.iterate
    is_common = isinstance(models, Averaged) and models.has_common_noise
    checks.require(keys == "parity" or not is_common, "keys", rule, keys)


def _kinds(tree: PyTree) -> str:
    leaves = jax.tree.leaves(tree)
    named = zip(trees.paths(tree), leaves, strict=True)
    return " ".join(f"{name}:{x.dtype}{list(x.shape)}" for name, x in named)


def _shown(hyper: PyTree) -> str:
    named = zip(trees.paths(hyper), jax.tree.leaves(hyper), strict=True)
    return " ".join(f"{name}={np.asarray(x).tolist()}" for name, x in named)


def _marked(index: jax.Array) -> Roster:
    """Makes the marked roster of a cohort of one."""
    return Roster(mark(index[None]), mark(jnp.ones(1, bool)))
