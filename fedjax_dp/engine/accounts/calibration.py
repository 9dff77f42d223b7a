"""Noise of records for the budgets of a whole run, and the prices that it depends on."""

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

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
from fedjax_dp.engine.record import priced
from fedjax_dp.privacy.accounting.calibration import (
    calibrate_noise_multiplier,
    calibrate_poisson,
    rounded_up,
)
from fedjax_dp.privacy.claims import OnceClaim, RecordEvent

# A multiplier that no event would have otherwise.
_PROBE = 1.7320508
# Numbers of which one client or another pays by its own.
_OF_STEPS = {f"local.{x}" for x in ("batch_size", "num_epochs", "num_steps", "noise_multiplier")}


class _Priced(NamedTuple):
    """Rounds of a run that cost a record the same."""

    event: RecordEvent
    round: int  # One of them, whose numbers are those of all.
    times: int  # How many there are.


def _priced_rounds(algorithm: FederatedAlgorithm, hyper: Hyper, num_rounds: int) -> list[_Priced]:
    """Counts the rounds of each stage and of each factor of a number that prices depend on."""
    checks.whole("num_rounds", num_rounds)
    claim = algorithm.training.record
    if claim is None:
        raise ValueError(f"algorithm must claim privacy for records, got {algorithm.name}")
    kinds = [(t, 0) for t in priced(hyper).alike(num_rounds)]
    if len(claim.events) > 1:

        @jax.jit
        def initial_stages(key: Any) -> Any:
            # Compiled, so that models on which no stage depends are never computed.
            server = algorithm.init(key)
            return jax.vmap(lambda r: algorithm.stages.stage_of(server, hyper.at(r), r))(
                jnp.arange(num_rounds)
            )

        stages = np.asarray(initial_stages(jax.random.key(0))).tolist()
        kinds = [(t, stage) for (t, _), stage in zip(kinds, stages, strict=True)]
    counts = Counter(kinds)
    once = isinstance(claim, OnceClaim)
    by_stage = sorted(counts, key=lambda kind: (kind[1], kind[0]))
    return [_Priced(claim.at(s), t, 1 if once else counts[t, s]) for t, s in by_stage]


def _composed(rounds: list[_Priced], size: int, hyper: Hyper) -> dp_accounting.DpEvent:
    return dp_accounting.ComposedDpEvent(
        [
            dp_accounting.SelfComposedDpEvent(each.event(size, hyper.at(each.round)), each.times)
            for each in rounds
        ]
    )


def _alike(
    local: LocalConfig, *columns: np.ndarray
) -> Iterator[tuple[int, np.ndarray, LocalConfig]]:
    """Groups clients of equal facts and numbers: the first of each, all of it, and its numbers."""
    facts = np.stack(
        [
            np.broadcast_to(np.asarray(x, float), np.shape(columns[0]))
            for x in (*columns, *jax.tree.leaves(local))
        ]
    )
    _, firsts, group = np.unique(facts, axis=1, return_index=True, return_inverse=True)
    # In the order of their first clients.
    for place in np.argsort(firsts):
        first = int(firsts[place])
        own = jax.tree.map(lambda x, c=first: x if x.ndim == 0 else x[c], local)
        yield first, np.flatnonzero(group.reshape(-1) == place), own


def events_by_client(
    event: RecordEvent, sizes: np.ndarray, hyper: Hyper
) -> list[tuple[dp_accounting.DpEvent, np.ndarray]]:
    """Groups clients that pay the same for a round."""
    return [
        (event(int(sizes[first]), hyper._replace(local=own)), clients)
        for first, clients, own in _alike(hyper.local, sizes)
    ]


def priced_factors(
    algorithm: FederatedAlgorithm, sizes: np.ndarray, factors: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Selects the factors of numbers that set what a client's records pay for a round."""
    claim = algorithm.training.record
    if claim is None:
        return {}
    largest = int(np.argmax(sizes))
    host = jax.tree.map(np.asarray, typed(algorithm.hyper)).of_client(largest)

    def prices(numbers: Hyper) -> list[dp_accounting.DpEvent]:
        return [event(int(sizes[largest]), numbers) for event in claim.events]

    usual, found = prices(host), {}
    for name, table in priced(host._replace(factors=factors)).factors.items():
        numbers = host._replace(factors={name: table})
        # Wrappers have numbers that the algorithm does not have, and no record pays by.
        if host.number(name) is not None and (
            name in _OF_STEPS or any(prices(numbers.at(t)) != usual for t in set(numbers.alike()))
        ):
            found[name] = table
    return found


def with_factors(noise: np.ndarray, factors: Mapping[str, Any]) -> np.ndarray:
    """Rounds calibrated noise multipliers up, so that no product with a factor is below its own."""
    # A product of two floats of 24 bits is rounded by at most half of the last of them.
    return rounded_up(noise * (1 + 2.0**-23 * bool(factors)))


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
    factors: Mapping[str, np.ndarray] = {},
) -> Hyper:
    """Calibrates each client's noise multiplier, so that a whole run spends its budget.

    One multiplier for each client covers all rounds: those of other batch sizes and those with
    private selections are composed with the rest and converted to ε once. Clients with equal
    budgets and numbers share the search; those with only Poisson-sampled Gaussian steps are
    searched together. Where numbers change over rounds, all rounds are composed with their own, and
    the multiplier found is the one that the factors of noise multiply.

    Guarantee: ε of each client at its δ after `num_rounds` rounds is at most its budget.

    Args:
      algorithm: a declaration that claims privacy for records.
      sizes: examples of each client, `[num_clients]`.
      epsilon: budgets, above 0; a scalar or `[num_clients]`.
      dp_delta: δ in (0, 1); a scalar or `[num_clients]`.
      num_rounds: rounds of the run, at least 1.
      accountant: "rdp", "pld" or "rdp-classic-64".
      relation: "zero_out" or "replace_one".
      factors: as of `Hyper`, of numbers that change over rounds.

    Returns:
      The declaration's numbers with `local.noise_multiplier` of `[num_clients]`, float32, rounded
      up, without factors.

    Raises:
      ValueError: if nothing is claimed for records, a budget cannot be reached, or there is not one
        for each client.

    Source: Malekmohammadi and others 2025 (R-DPCFL), section 5; corrected: selections are composed
    with training before one conversion to ε, which the authors' code converts apart.
    """
    sizes = np.asarray(sizes)
    algorithm.check(algorithm.hyper, len(sizes))
    for name, value in (("epsilon", epsilon), ("dp_delta", dp_delta)):
        checks.one_for_each(name, value, len(sizes))
    factors = priced_factors(algorithm, sizes, factors)
    host = jax.tree.map(np.asarray, typed(algorithm.hyper._replace(factors=factors)))
    rounds = _priced_rounds(algorithm, host, num_rounds)
    promise = {"accountant": accountant, "relation": relation}
    noise = np.ones(len(sizes))
    plain: list[tuple[Any, ...]] = []
    targets, deltas = (
        np.broadcast_to(np.asarray(x, np.float64), sizes.shape) for x in (epsilon, dp_delta)
    )
    asked = host.local._replace(noise_multiplier=None)
    for first, members, local in _alike(asked, sizes, targets, deltas):
        size, target, delta = (x[first].item() for x in (sizes, targets, deltas))

        def whole_run(z: float, size: int = size, local: LocalConfig = local) -> Any:
            numbers = host._replace(local=local._replace(noise_multiplier=z))
            return _composed(rounds, size, numbers)

        probed = host._replace(local=local._replace(noise_multiplier=_PROBE))
        phases = _phases(rounds, size, probed) if size > 0 else []
        if phases is None:
            noise[members] = calibrate_noise_multiplier(whole_run, target, delta, **promise)
        elif phases:
            plain.append((members, target, delta, *zip(*phases, strict=True)))
    if plain:
        groups, *columns, noise_factor = zip(*plain, strict=True)
        found = calibrate_poisson(
            *map(np.asarray, columns), noise_factor=np.asarray(noise_factor), **promise
        )
        for members, multiplier in zip(groups, found, strict=True):
            noise[members] = multiplier
    noise = with_factors(noise, factors)
    return host._replace(local=host.local._replace(noise_multiplier=noise), factors={})


def _phases(
    rounds: list[_Priced], size: int, probed: Hyper
) -> list[tuple[float, int, float]] | None:
    """Describes rounds by rate, steps and factor of the noise; None if one is of another kind."""
    alike = [[each] for each in rounds]
    if "local.noise_multiplier" not in probed.factors:
        alike = [rounds]
    phases: list[tuple[float, int, float]] = []
    for some in alike:
        multiplier = float(probed.at(some[0].round).local.noise_multiplier)
        rates = _poisson_steps(_composed(some, size, probed), multiplier)
        if rates is None or len(rates) > 1:
            return None
        phases += [(rate, steps, multiplier / _PROBE) for rate, steps in rates.items()]
    # All clients that are searched together have as many phases.
    return phases + [(1.0, 0, 1.0)] * (len(alike) - len(phases)) if phases else []


def _poisson_steps(event: dp_accounting.DpEvent, probe: float = _PROBE) -> dict[float, int] | None:
    """Counts Poisson-sampled Gaussians of the probed multiplier by rate; None for others."""
    if isinstance(event, dp_accounting.NoOpDpEvent):
        return {}
    if isinstance(event, dp_accounting.GaussianDpEvent):
        return {1.0: 1} if np.isclose(event.noise_multiplier, probe, rtol=1e-6) else None
    if isinstance(event, dp_accounting.PoissonSampledDpEvent):
        inner = _poisson_steps(event.event, probe)
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
        inner = _poisson_steps(part, probe)
        if inner is None:
            return None
        for rate, steps in inner.items():
            counts[rate] = counts.get(rate, 0) + steps * times
    return counts
