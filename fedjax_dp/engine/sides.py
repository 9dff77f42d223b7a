"""The two sides of a round, and the guard of a client's records in it."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from chex import PRNGKey
from dp_accounting import DpEvent, NoOpDpEvent

from fedjax_dp.algorithms.base import ClientOutput, FederatedAlgorithm, Hyper, Round
from fedjax_dp.clients.client_data import ClientData, Exact, PublicClient
from fedjax_dp.core import backend, checks, jaxprs, trees
from fedjax_dp.core.inspection import note_finite
from fedjax_dp.core.keys import Purpose, fold
from fedjax_dp.core.marks import marks_reaching
from fedjax_dp.core.materialize import as_stored, updates_stored
from fedjax_dp.core.trees import PyTree
from fedjax_dp.privacy.claims import ClientClaim, RecordEvent
from fedjax_dp.server.base import Close, Roster, Sender


def run_client(
    algorithm: FederatedAlgorithm,
    message: PyTree,
    own: PyTree,
    client: ClientData,
    hyper: Hyper,
    key: PRNGKey,
) -> ClientOutput:
    """Runs one client's round on the message that it receives.

    Guarantee: where privacy is claimed for records, the algorithm itself gets none. Local training
    and choices read them under their events, of kinds that the algorithm must charge; a reader
    without an event is admitted only where the claim says what it does not cover. Exact metrics,
    and what is computed from them, leave as metrics alone. Violations are refused while tracing.
    """
    claim = algorithm.training.record
    if claim is None:
        return algorithm.client(message, own, client, hyper, key)
    costs: list[tuple[str, RecordEvent]] = []

    def opener(reader: str, event: RecordEvent | None) -> ClientData:
        rule = f"have an event in {algorithm.name}, which claims privacy for records"
        is_covered = event is not None or claim.not_covered is not None
        checks.require(is_covered, f"{reader}, which reads records,", rule, event)
        if event is not None:
            costs.append((reader, event))
        return client

    # Numbers that are known stay so: as arguments they would be traced.
    def protected(message: PyTree, own: PyTree, public: PublicClient, key: PRNGKey):
        return _opened(algorithm.client(message, own, public, hyper, key), algorithm.name)

    public = client.public(opener)
    closed, shapes = jax.make_jaxpr(protected, return_shape=True)(message, own, public, key)
    _require_metrics_only(closed, shapes, algorithm.name)
    if backend.setting("jax_disable_jit"):
        # A debugger can step through Python alone.
        output = protected(message, own, public, key)
    else:
        inputs = jax.tree.leaves((message, own, public, key))
        output = jax.tree.unflatten(
            jax.tree.structure(shapes), jaxprs.jaxpr_as_fun(closed)(*inputs)
        )
    charged = _mechanisms(claim.events, algorithm.hyper, client.limit)
    for reader, event in costs:
        cost = _mechanisms([event], algorithm.hyper.local, client.limit)
        rule = f"be charged by {algorithm.name}, whose record events hold {sorted(charged)}"
        checks.require(cost <= charged, f"{reader}, which reads records,", rule, sorted(cost))
    return output


def _opened(output: ClientOutput, name: str) -> ClientOutput:
    """Opens exact metrics where they are metrics, and refuses them elsewhere."""

    def is_exact(part: Any) -> bool:
        return isinstance(part, Exact)

    sent = jax.tree.leaves((output.update, output.weight, output.state), is_leaf=is_exact)
    _require_metrics(not any(map(is_exact, sent)), name)
    training, info = jax.tree.map(
        lambda m: m.value if is_exact(m) else m, (output.training, output.info), is_leaf=is_exact
    )
    return output._replace(training=training, info=info)


def _require_metrics_only(closed: jaxprs.ClosedJaxpr, shapes: ClientOutput, name: str) -> None:
    """Requires that nothing but metrics depends on an exact metric, however it was opened."""
    reads = marks_reaching(closed)
    reached = jax.tree.unflatten(jax.tree.structure(shapes), reads.outputs)
    sent = (reached.update, reached.weight, reached.state)
    _require_metrics(not any(jax.tree.leaves(sent)), name, reads.unknown)


def _require_metrics(holds: bool, name: str, unknown: Sequence[str] = ()) -> None:
    rule = f"not flow into updates of {name}, which claims privacy for records: they carry no noise"
    value = "one that others are computed from"
    if unknown:
        value = (
            f"one that others may be computed from: JAX {jax.__version__} represents "
            f"{', '.join(unknown)} in a way that is not known here"
        )
    checks.require(holds, "metrics of local training", rule, value)


def _mechanisms(events: Any, numbers: Any, size: int) -> set[str]:
    """Lists the mechanisms that events are composed of, for a client of some size."""
    one = jax.tree.map(lambda x: np.asarray(x).reshape(-1)[0], numbers)
    # Events are computed on the host, also while a round is traced.
    with jax.ensure_compile_time_eval():
        return set().union(*(_names(event(size, one)) for event in events))


def _names(event: DpEvent) -> set[str]:
    inner = [event.event] if hasattr(event, "event") else list(getattr(event, "events", ()))
    if not inner:
        return set() if isinstance(event, NoOpDpEvent) else {type(event).__name__}
    return set().union(*map(_names, inner))


class Received(NamedTuple):
    """All that reaches a client in a round."""

    message: PyTree  # The algorithm's message, as `core.messages.received` returns it.
    aggregator: PyTree  # The aggregator's message.
    hyper: Hyper  # The numbers of this client.
    public_key: PRNGKey  # The key that all clients and the server share in this round.
    roster: Roster  # The cohort.


class Work(NamedTuple):
    """The result of one client's round."""

    output: ClientOutput  # The update, the next state and the metrics.
    sent: PyTree  # What the aggregator adds up or stacks; zeros where the client takes no part.
    is_finite: jax.Array  # If false, a contribution of zeros was sent.


class Closed(NamedTuple):
    """The server's part of a round, done."""

    server: PyTree  # The algorithm's state.
    aggregator: PyTree  # The aggregator's state.
    aggregate: PyTree  # What the server stepped along; zeros if it was not finite.
    is_finite: jax.Array  # Whether the aggregate was finite.
    of_aggregator: Any  # The aggregator's metrics.
    of_server: Any  # The server step's metrics.


def client_side(
    algorithm: FederatedAlgorithm,
    received: Received,
    own: PyTree,
    client: ClientData,
    key: PRNGKey,
    takes_part: Any = True,
) -> Work:
    """Runs one client's round; its state and metrics count only if `Work.is_finite`."""
    with updates_stored(_clips_whole(algorithm)):
        output = run_client(algorithm, received.message, own, client, received.hyper, key)
    return contributed(algorithm, received, output, client.index, key, takes_part)


def _clips_whole(algorithm: FederatedAlgorithm) -> bool:
    claim = algorithm.aggregator.claim
    return isinstance(claim, ClientClaim) and claim.clips_whole


def contributed(
    algorithm: FederatedAlgorithm,
    received: Received,
    output: ClientOutput,
    index: Any,
    key: PRNGKey,
    takes_part: Any = True,
) -> Work:
    """Makes what a client sends of its trained update: the contribution, encoded."""
    aggregator, numbers = algorithm.aggregator, received.hyper.aggregator
    own_key = fold(key, Purpose.ENCODING, 0)
    sender = Sender(index, output.weight, own_key, received.public_key, received.roster)
    contribution = aggregator.contribute(received.aggregator, numbers, output.received, sender)
    contribution = jax.tree.map(trees.at_least_float32, contribution)
    # A finite update may overflow in the contribution, except where that is the update scaled down.
    # The update is checked itself, because clipping hides values that are not finite.
    is_smaller = _clips_whole(algorithm)
    may_overflow = () if is_smaller else contribution
    with updates_stored(is_smaller):
        update = as_stored(output.received)
    note_finite("the update", output.received, counts=takes_part, client=index)
    note_finite("the contribution", contribution, counts=takes_part, client=index)
    checked = update, output.weight, output.state, may_overflow
    is_finite = trees.can_be_summed(checked)
    counts = takes_part & is_finite
    sent = trees.where(counts, contribution, trees.zeros_like(contribution))
    if aggregator.encode is not None:
        message = aggregator.encode(received.aggregator, numbers, sent, sender)
        # A message that is not sent adds no share of the noise either.
        sent = trees.where(takes_part, message, trees.zeros_like(message))
    return Work(output, sent, is_finite)


def clients_at_server(algorithm: FederatedAlgorithm, clients: PyTree) -> PyTree:
    """Returns what a server that runs no clients holds of their states before the first round.

    None, or the first state of any client, the part of each that the algorithm's server knows, and
    the round of each that counted last, -1 for none.
    """
    states = algorithm.client_state
    if states is None:
        return clients
    known = None if states.known is None else jax.vmap(states.known)(clients)
    last = jnp.full(len(jax.tree.leaves(clients)[0]), -1, jnp.int32)
    return trees.take(clients, 0), known, last


def server_side(
    algorithm: FederatedAlgorithm,
    server: PyTree,
    aggregator: PyTree,
    hyper: Hyper,
    total: PyTree,
    close: Close,
    round: Round,
    key: PRNGKey,
) -> Closed:
    """Combines a sum, or stack `[slots, ...]`, of messages and steps along the aggregate."""
    kept, aggregate, of_aggregator = algorithm.aggregator.combine(
        aggregator, hyper.aggregator, total, close
    )
    # An aggregate of finite contributions may overflow; then no client counts as contributing.
    note_finite("the aggregate", aggregate, round=round.index)
    is_finite = trees.is_finite(aggregate)
    aggregate = trees.where(is_finite, aggregate, trees.zeros_like(aggregate))
    server, of_server = algorithm.server_step(server, aggregate, hyper, round, key)
    note_finite("the server's state", server, round=round.index)
    return Closed(server, kept, aggregate, is_finite, of_aggregator, of_server)
