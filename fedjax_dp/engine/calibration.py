"""Noise multipliers from budgets, for whole runs whose rounds are of several kinds."""

from collections.abc import Callable
from typing import Any

import dp_accounting
import jax
import jax.numpy as jnp
import numpy as np

from fedjax_dp.algorithms.base import FederatedAlgorithm, Hyper
from fedjax_dp.core import checks
from fedjax_dp.engine.cohort import typed
from fedjax_dp.privacy.calibration import calibrate_noise_multiplier


def run_event(
    algorithm: FederatedAlgorithm, size: int, hyper: Hyper, num_rounds: int
) -> dp_accounting.DpEvent:
    """Composes what one record pays in a run in which its client joins every round.

    Args:
      algorithm: the declaration.
      size: examples of the client, at least 0.
      hyper: the client's numbers, those of local training scalars.
      num_rounds: rounds of the run, at least 1.

    Returns:
      The event of training and of all else that is charged, such as private selections.

    Raises:
      ValueError: if nothing is claimed for records.
    """
    return _composed(_priced_stages(algorithm, hyper, num_rounds), size, hyper)


def _priced_stages(
    algorithm: FederatedAlgorithm, hyper: Hyper, num_rounds: int
) -> list[tuple[Callable[..., Any], int]]:
    """Pairs the event of each stage with how many rounds of it a run has."""
    checks.whole("num_rounds", num_rounds)
    claim = algorithm.record
    if claim is None:
        raise ValueError(f"algorithm must claim privacy for records, got {algorithm.name}")
    if len(claim.events) == 1:
        return [(claim.events[0], num_rounds)]

    @jax.jit
    def initial_stages(key: Any) -> Any:
        # Compiled, so that models which the stages do not depend on are never made.
        server = algorithm.init(key)
        return jax.vmap(lambda r: algorithm.stage_of(server, hyper, r))(jnp.arange(num_rounds))

    stages = np.asarray(initial_stages(jax.random.key(0)))
    return [
        (claim.at(s), int(n)) for s, n in zip(*np.unique(stages, return_counts=True), strict=True)
    ]


def _composed(
    priced: list[tuple[Callable[..., Any], int]], size: int, hyper: Hyper
) -> dp_accounting.DpEvent:
    return dp_accounting.ComposedDpEvent(
        [dp_accounting.SelfComposedDpEvent(event(size, hyper), n) for event, n in priced]
    )


def calibrate(
    algorithm: FederatedAlgorithm,
    sizes: np.ndarray,
    epsilon: Any,
    dp_delta: Any,
    num_rounds: int,
    *,
    accountant: str = "rdp",
    relation: str = "zero_out",
) -> Hyper:
    """Gives every client the noise multiplier that spends its budget over a whole run.

    One multiplier a client covers all rounds: those of other batch sizes and those with private
    selections are composed with the rest and converted to ε once.

    Guarantee: ε of each client at its δ after `num_rounds` rounds is at most its budget.

    Args:
      algorithm: a declaration that claims privacy for records.
      sizes: examples of each client, `[num_clients]`.
      epsilon: budgets, above 0; a scalar or `[num_clients]`.
      dp_delta: δ in (0, 1); a scalar or `[num_clients]`.
      num_rounds: rounds of the run, at least 1.
      accountant: "rdp", "pld" or "rdp-classic-64".
      relation: "zero_out" or "replace_one".

    Returns:
      The declaration's numbers with `local.noise_multiplier` of `[num_clients]`, float32, rounded
      up.

    Raises:
      ValueError: if nothing is claimed for records, a budget cannot be reached, or there is not one
        for each client.

    Source: `clustered_dp` sections 4 and 5.
    """
    algorithm.check(algorithm.hyper, len(sizes))
    host = jax.tree.map(np.asarray, typed(algorithm.hyper))
    priced = _priced_stages(algorithm, host, num_rounds)
    rule = f"be one number or have one for each of the {len(sizes)} clients"
    for name, value in (("epsilon", epsilon), ("dp_delta", dp_delta)):
        checks.require(np.shape(value) in ((), np.shape(sizes)), name, rule, value)
    targets, deltas = (
        np.broadcast_to(np.asarray(x, np.float64), np.shape(sizes)) for x in (epsilon, dp_delta)
    )
    found: dict[Any, float] = {}
    noise = np.ones(len(sizes), np.float32)
    budgets = zip(sizes.tolist(), targets.tolist(), deltas.tolist(), strict=True)
    for client, (size, target, delta) in enumerate(budgets):
        row = jax.tree.map(lambda x, c=client: x if x.ndim == 0 else x[c], host.local)
        numbers = row._replace(noise_multiplier=None)
        facts = (size, target, delta, *(float(x) for x in jax.tree.leaves(numbers)))
        if facts not in found:
            found[facts] = 1.0
            if size > 0:

                def whole_run(z: float, size: int = size, row: Any = row) -> Any:
                    numbers = host._replace(local=row._replace(noise_multiplier=z))
                    return _composed(priced, size, numbers)

                found[facts] = calibrate_noise_multiplier(
                    whole_run, target, delta, accountant=accountant, relation=relation
                )
        noise[client] = np.nextafter(np.float32(found[facts]), np.float32(np.inf))
    return host._replace(local=host.local._replace(noise_multiplier=noise))
