"""Lets only those read a client's records whose price is charged."""

from typing import Any

import jax
import numpy as np
from chex import PRNGKey
from dp_accounting import DpEvent, NoOpDpEvent

from fedjax_dp.algorithms.base import ClientOutput, FederatedAlgorithm, Hyper
from fedjax_dp.clients.base import ClientData, Exact
from fedjax_dp.core import checks
from fedjax_dp.core.trees import PyTree
from fedjax_dp.privacy.claims import RecordEvent


def run_client(
    algorithm: FederatedAlgorithm,
    server: PyTree,
    own: PyTree,
    client: ClientData,
    hyper: Hyper,
    key: PRNGKey,
) -> ClientOutput:
    """Runs one client's round.

    Guarantee: where privacy is claimed for records, the algorithm itself is handed none. Local
    training and choices read them under their events, and what they cost must be of kinds that the
    algorithm charges; a reader without an event is admitted only where the algorithm says what it
    does not cover. Exact metrics are handed on as metrics alone.

    Args:
      algorithm: the declaration.
      server: the server's state.
      own: the client's state.
      client: the client with its records.
      hyper: the client's numbers.
      key: the client's key of this round.

    Returns:
      What the client's round ends with.

    Raises:
      ValueError: while the round is traced, if records are read that no event covers.
    """
    claim = algorithm.record
    if claim is None:
        return algorithm.client(server, own, client, hyper, key)
    costs: list[tuple[str, RecordEvent]] = []

    def opener(reader: str, event: RecordEvent | None) -> ClientData:
        rule = f"have an event in {algorithm.name}, which claims privacy for records"
        is_said = event is not None or claim.not_covered is not None
        checks.require(is_said, f"{reader}, which reads records,", rule, event)
        if event is not None:
            costs.append((reader, event))
        return client

    output = algorithm.client(server, own, client.public(opener), hyper, key)
    charged = _mechanisms(claim.events, algorithm.hyper, client.limit)
    for reader, event in costs:
        cost = _mechanisms([event], algorithm.hyper.local, client.limit)
        rule = f"be charged by {algorithm.name}, whose record events hold {sorted(charged)}"
        checks.require(cost <= charged, f"{reader}, which reads records,", rule, sorted(cost))
    return _without_exact(output, algorithm.name)


def _without_exact(output: ClientOutput, name: str) -> ClientOutput:
    """Opens metrics where they are metrics, and refuses them in all else."""

    def is_exact(part: Any) -> bool:
        return isinstance(part, Exact)

    sent = jax.tree.leaves((output.update, output.weight, output.state), is_leaf=is_exact)
    rule = f"stay metrics in {name}, which claims privacy for records that no noise protects here"
    checks.require(not any(map(is_exact, sent)), "metrics of local training", rule, "one sent")
    training, info = jax.tree.map(
        lambda m: m.value if is_exact(m) else m, (output.training, output.info), is_leaf=is_exact
    )
    return output._replace(training=training, info=info)


def _mechanisms(events: Any, numbers: Any, size: int) -> set[str]:
    """Names the mechanisms that events are composed of, for a client of some size."""
    row = jax.tree.map(lambda x: np.asarray(x).reshape(-1)[0], numbers)
    # Events are computed on the host, also while a round is traced.
    with jax.ensure_compile_time_eval():
        return set().union(*(_names(event(size, row)) for event in events))


def _names(event: DpEvent) -> set[str]:
    inner = [event.event] if hasattr(event, "event") else list(getattr(event, "events", ()))
    if not inner:
        return set() if isinstance(event, NoOpDpEvent) else {type(event).__name__}
    return set().union(*map(_names, inner))
