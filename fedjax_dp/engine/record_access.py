"""Guards a client's records: only readers with an accounted DpEvent get them."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from chex import PRNGKey
from dp_accounting import DpEvent, NoOpDpEvent

from fedjax_dp.algorithms.base import ClientOutput, FederatedAlgorithm, Hyper
from fedjax_dp.clients.client_data import ClientData, Exact, PublicClient
from fedjax_dp.core import checks, jaxprs
from fedjax_dp.core.marks import marks_reaching
from fedjax_dp.core.trees import PyTree
from fedjax_dp.privacy.claims import RecordEvent


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
    if jax.config.jax_disable_jit:  # type: ignore[attr-defined]
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
