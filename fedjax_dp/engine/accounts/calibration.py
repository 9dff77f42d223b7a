"""Noise multipliers from budgets, for whole runs of any algorithm."""

from collections.abc import Callable
from typing import Any

import dp_accounting
import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing

from fedjax_dp.algorithms.base import FederatedAlgorithm, Hyper
from fedjax_dp.clients.base import LocalConfig
from fedjax_dp.core import checks
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.core.ranges import PositiveNumbers
from fedjax_dp.engine.cohort import typed
from fedjax_dp.privacy.accounting.calibration import (
    calibrate_noise_multiplier,
    calibrate_poisson,
    rounded_up,
)
from fedjax_dp.privacy.claims import OnceClaim

# A multiplier that no event would have otherwise.
_PROBE = 1.7320508


def _priced_stages(
    algorithm: FederatedAlgorithm, hyper: Hyper, num_rounds: int
) -> list[tuple[Callable[..., Any], int]]:
    """Pairs the event of each stage with how many rounds of it a run has."""
    checks.whole("num_rounds", num_rounds)
    claim = algorithm.training.record
    if claim is None:
        raise ValueError(f"algorithm must claim privacy for records, got {algorithm.name}")
    if len(claim.events) == 1:
        return [(claim.events[0], 1 if isinstance(claim, OnceClaim) else num_rounds)]

    @jax.jit
    def initial_stages(key: Any) -> Any:
        # Compiled, so that models on which no stage depends are never computed.
        server = algorithm.init(key)
        return jax.vmap(lambda r: algorithm.stages.stage_of(server, hyper, r))(
            jnp.arange(num_rounds)
        )

    stages = np.asarray(initial_stages(jax.random.key(0)))
    counts = zip(*np.unique(stages, return_counts=True), strict=True)
    return [(claim.at(stage), int(count)) for stage, count in counts]


def _composed(
    priced: list[tuple[Callable[..., Any], int]], size: int, hyper: Hyper
) -> dp_accounting.DpEvent:
    return dp_accounting.ComposedDpEvent(
        [dp_accounting.SelfComposedDpEvent(event(size, hyper), n) for event, n in priced]
    )


@checked
def calibrate(
    algorithm: FederatedAlgorithm,
    sizes: np.ndarray,
    epsilon: PositiveNumbers,
    dp_delta: numpy.typing.ArrayLike,
    num_rounds: int,
    *,
    accountant: str = "rdp",
    relation: str = "zero_out",
) -> Hyper:
    """Calibrates each client's noise multiplier, so that a whole run spends its budget.

    One multiplier for each client covers all rounds: those of other batch sizes and those with
    private selections are composed with the rest and converted to ε once. Clients with equal
    budgets and numbers share the search; those with only Poisson-sampled Gaussian steps are
    searched together.

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

    Source: Malekmohammadi and others 2025 (R-DPCFL), section 5; corrected: selections are composed
    with training before one conversion to ε, which the authors' code converts apart.
    """
    sizes = np.asarray(sizes)
    algorithm.check(algorithm.hyper, len(sizes))
    host = jax.tree.map(np.asarray, typed(algorithm.hyper))
    priced = _priced_stages(algorithm, host, num_rounds)
    promise = {"accountant": accountant, "relation": relation}
    noise = np.ones(len(sizes))
    plain: list[tuple[list[int], float, float, float, int]] = []
    for members, (size, target, delta, local) in _alike(host.local, sizes, epsilon, dp_delta):

        def whole_run(z: float, size: int = size, local: LocalConfig = local) -> Any:
            numbers = host._replace(local=local._replace(noise_multiplier=z))
            return _composed(priced, size, numbers)

        rates = _poisson_steps(whole_run(_PROBE)) if size > 0 else {}
        if rates is None or len(rates) > 1:
            noise[members] = calibrate_noise_multiplier(whole_run, target, delta, **promise)
        elif rates:
            [(rate, steps)] = rates.items()
            plain.append((members, target, delta, rate, steps))
    if plain:
        groups, *columns = zip(*plain, strict=True)
        found = calibrate_poisson(*map(np.asarray, columns), **promise)
        for members, multiplier in zip(groups, found, strict=True):
            noise[members] = multiplier
    return host._replace(local=host.local._replace(noise_multiplier=rounded_up(noise)))


def _alike(
    local: LocalConfig, sizes: np.ndarray, epsilon: Any, dp_delta: Any
) -> list[tuple[list[int], tuple[int, float, float, LocalConfig]]]:
    """Groups clients of equal size, budget and numbers."""
    for name, value in (("epsilon", epsilon), ("dp_delta", dp_delta)):
        checks.one_for_each(name, value, len(sizes))
    targets, deltas = (
        np.broadcast_to(np.asarray(x, np.float64), np.shape(sizes)) for x in (epsilon, dp_delta)
    )
    host = local._replace(noise_multiplier=None)
    groups: dict[Any, tuple[list[int], tuple[int, float, float, LocalConfig]]] = {}
    budgets = zip(sizes.tolist(), targets.tolist(), deltas.tolist(), strict=True)
    for client, budget in enumerate(budgets):
        own = jax.tree.map(lambda x, c=client: x if x.ndim == 0 else x[c], host)
        facts = (*budget, *(float(x) for x in jax.tree.leaves(own)))
        groups.setdefault(facts, ([], (*budget, own)))[0].append(client)
    return list(groups.values())


def _poisson_steps(event: dp_accounting.DpEvent) -> dict[float, int] | None:
    """Counts Poisson-sampled Gaussians of the probed multiplier by rate; None for others."""
    if isinstance(event, dp_accounting.NoOpDpEvent):
        return {}
    if isinstance(event, dp_accounting.GaussianDpEvent):
        return {1.0: 1} if np.isclose(event.noise_multiplier, _PROBE, rtol=1e-6) else None
    if isinstance(event, dp_accounting.PoissonSampledDpEvent):
        inner = _poisson_steps(event.event)
        is_one = inner == {1.0: 1}
        return {float(event.sampling_probability): 1} if is_one else None
    if isinstance(event, dp_accounting.SelfComposedDpEvent):
        parts, times = [event.event], int(event.count)
    elif isinstance(event, dp_accounting.ComposedDpEvent):
        parts, times = list(event.events), 1
    else:
        return None
    counts: dict[float, int] = {}
    for part in parts:
        inner = _poisson_steps(part)
        if inner is None:
            return None
        for rate, steps in inner.items():
            counts[rate] = counts.get(rate, 0) + steps * times
    return counts
