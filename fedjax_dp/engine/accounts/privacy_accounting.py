"""Privacy accounting of a federation: prices, ledgers and budgets, and noise for a budget."""

import json
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias, overload

import dp_accounting
import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing
from chex import PRNGKey
from numpy.typing import ArrayLike

from fedjax_dp.algorithms.base import FederatedAlgorithm, Hyper
from fedjax_dp.clients.base import LocalConfig
from fedjax_dp.core import checks
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.core.ranges import Count, PositiveNumbers
from fedjax_dp.engine.cohort import typed
from fedjax_dp.engine.execution.compile import Simulation
from fedjax_dp.engine.federation import Federation, check_wrapped
from fedjax_dp.engine.record import RoundRecord, digest_of, require_chargeable
from fedjax_dp.engine.round import SimulationState
from fedjax_dp.privacy.accounting.calibration import (
    calibrate_noise_multiplier,
    calibrate_poisson,
    rounded_up,
)
from fedjax_dp.privacy.accounting.dp_accounting_adapter import require_analysis
from fedjax_dp.privacy.accounting.ledger import Ledger
from fedjax_dp.privacy.claims import OnceClaim, RecordEvent
from fedjax_dp.privacy.sensitivities import RELATIONS

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


# A budget that was calibrated to the last bit must not be exceeded by rounding.
_SLACK = 1e-9

# The costs of a round of one stage: events, and the accounts that pay each.
_Prices: TypeAlias = list[tuple[Any, np.ndarray]]


def unit_facts(federation: Federation) -> dict[str, dict[str, Any]]:
    """Returns, by unit, the arguments of `statement` that ledgers do not know."""
    once = {"reads_once": True} if isinstance(federation.claims.record, OnceClaim) else {}
    return {
        "client": {"num_units": federation.cohorts.participation.num_clients},
        "record": {"num_units": federation.population.sizes, **once},
    }


def require_public_sizes(relation: str, name: str = "relation") -> None:
    """Requires a relation that leaves the numbers of clients and records unchanged."""
    checks.one_of(name, relation, RELATIONS)
    rule = (
        "be 'zero_out' or 'replace_one': rates, steps and divisors are made from the exact numbers "
        "of clients and records, so that these are public and a unit cannot be missing; what holds "
        "at the same price is 'zero_out', its contributions replaced by zeros"
    )
    checks.require(relation != "add_remove", name, rule, relation)


class PrivacyAccounting:
    """Keeps one ledger for each unit of privacy that a simulation claims.

    Charges follow from the claims of the parts that ran and from the records of the rounds: for
    clients, the event of the aggregator's claim and the participation; for records, the event of
    local training. Sampling of clients never amplifies record-level privacy here: a record pays for
    every round in which its client took part, or for every round where secret cohorts amplify
    client-level privacy too.

    It is for one run: under an `OnceClaim` each record is charged for one round, and a second run,
    which reads all records again, would be charged nothing. Several runs compose: add up their ε
    and δ, or charge the events of each to one `Ledger`.

    Attributes:
      ledgers: by unit, "client" and "record"; empty where nothing is claimed.
    """

    @checked
    def __init__(
        self,
        federation: Federation | Simulation,
        relation: str = "zero_out",
        accountant: str | None = None,
        hyper: Hyper | None = None,
    ):
        """Opens the ledgers of a federation; refuses what has no joint analysis.

        "add_remove" never holds: a simulation takes rates, steps, divisors and weights from the
        exact numbers of clients and of their records, which are public.
        """
        require_public_sizes(relation)
        bound = federation.federation if isinstance(federation, Simulation) else federation
        check_wrapped(bound)
        self._federation, self._cohorts = bound, bound.cohorts
        self._relation, self._accountant = relation, accountant
        num_clients = self._cohorts.participation.num_clients
        num_units = {"client": 1 if self._charges_all else num_clients, "record": num_clients}
        # By unit and stage.
        self._events: dict[str, list[_Prices]] = {}
        self._numbers: Any = None
        self._digest: Any = None
        self._read_events(bound.hyper if hyper is None else hyper)
        self.ledgers = {unit: Ledger(unit, relation, num_units[unit]) for unit in self._events}

    def _read_events(self, hyper: Hyper) -> None:
        """Computes a round's costs from numbers, unless these are the current ones."""
        hyper = jax.tree.map(np.asarray, typed(hyper))
        # With their structure: a number that takes the place of None changes what is charged.
        numbers, before = jax.tree.flatten(hyper), self._numbers
        is_same = before is not None and before[1] == numbers[1]
        if is_same and all(map(np.array_equal, before[0], numbers[0])):
            return
        self._federation.check_numbers(hyper)
        claims, events = self._federation.claims, dict[str, list[_Prices]]()
        if claims.client is not None:
            event = self._cohorts.event(claims.client.event(hyper.aggregator))
            num_units = 1 if self._charges_all else self._cohorts.participation.num_clients
            events["client"] = [[(event, np.arange(num_units))]]
        if claims.record is not None:
            sizes = self._federation.population.sizes
            events["record"] = [_events_by_client(e, sizes, hyper) for e in claims.record.events]
        for priced in events.values():
            round_events = [event for prices in priced for event, _ in prices]
            require_analysis(round_events, self._relation, self._accountant)
        self._events, self._numbers, self._digest = events, numbers, digest_of(hyper)

    @property
    def facts(self) -> dict[str, dict[str, Any]]:
        """By unit, what a statement says that ledgers do not know.

        `statement(accounting.ledgers[unit], dp_delta, **accounting.facts[unit])` compares δ with
        the number of units, and says why an account has fewer releases than rounds.
        """
        return unit_facts(self._federation)

    @property
    def _charges_all(self) -> bool:
        return self._cohorts.charges_all

    def charge(self, record: RoundRecord, hyper: Hyper | None = None) -> None:
        """Charges rounds that ran.

        Every drawn client is charged, whatever its fate. A round whose aggregate was not released
        is charged all the same, since updates have left the clients.

        Args:
          record: as `Simulation.run` returned it, for one or more rounds.
          hyper: the numbers that these rounds ran with, required if they are not those that were
            charged last or that the accounts were opened with.

        Raises:
          ValueError: if what ran has no analysis, the rounds ran with other numbers than those that
            would be charged, or clients or stages are not those of this federation; nothing is
            charged then.
        """
        priced = max((len(prices) for prices in self._events.values()), default=1)
        num_stages = priced if priced > 1 else None
        require_chargeable(record, self._cohorts.participation.num_clients, num_stages)
        kept = self._events, self._numbers, self._digest
        if hyper is not None:
            self._read_events(hyper)
        try:
            self._require_numbers_of(record)
        except ValueError:
            self._events, self._numbers, self._digest = kept
            raise
        participants, stages = np.asarray(record.clients), np.asarray(record.stage)
        for unit, ledger in self.ledgers.items():
            cohorts = None if self._all_pay(unit) else participants
            self._charge(unit, ledger, stages, cohorts)

    def _require_numbers_of(self, record: RoundRecord) -> None:
        """Requires the current numbers to be those that rounds ran with."""
        if record.digest is None:
            return
        ran = np.asarray(record.digest).reshape(-1, 2)
        others = np.flatnonzero(np.any(ran != self._digest, axis=1))
        rule = (
            "be the numbers that the rounds ran with, which determine their cost: call "
            "charge(record, hyper) with the hyper of these rounds, once for each hyper"
        )
        which = others[0] if len(others) else 0
        other_numbers = f"others than those of round {which} of this record"
        checks.require(not len(others), "hyper", rule, other_numbers)

    def _all_pay(self, unit: str) -> bool:
        """Whether accounts must not reveal who took part, so that each unit pays for each round."""
        # Amplification of client-level privacy requires secret cohorts. Accounts of records that
        # follow them would reveal how often each client was drawn, also by stopping at a budget.
        is_secret = unit == "client" or "client" in self.ledgers
        return self._charges_all and (is_secret or self._cohorts.is_adaptive)

    def _charge(
        self, unit: str, ledger: Ledger, stages: np.ndarray, cohorts: np.ndarray | None
    ) -> None:
        """Charges rounds of these stages to `cohorts`, or to all units where that is None."""
        for stage, prices in _by_stage(self._events[unit], stages):
            is_charged = np.full(len(stages), True) if stage is None else stages == stage
            if cohorts is None:
                times = np.full(ledger.num_units, np.sum(is_charged))
            else:
                times = self._times(cohorts[is_charged])
            for event, accounts in prices:
                paid = accounts[times[accounts] > 0]
                if unit == "record" and isinstance(self._federation.claims.record, OnceClaim):
                    paid = paid[~ledger.was_charged(event)[paid]]
                    times = np.minimum(times, 1)
                # The ledger has no entries without units.
                if len(paid):
                    ledger.charge(event, units=paid, count=times[paid])

    def _times(self, participants: np.ndarray) -> np.ndarray:
        """Counts the rounds of each client, `[num_clients]`; empty slots hold -1."""
        drawn = participants[participants >= 0].ravel()
        return np.bincount(drawn, minlength=self._cohorts.participation.num_clients)

    def affordable_rounds(
        self,
        state: SimulationState,
        key: PRNGKey,
        num_rounds: int,
        epsilon: dict[str, float],
        dp_delta: Mapping[str, ArrayLike],
        accountant: str,
        hyper: Hyper | None = None,
    ) -> int:
        """Counts the rounds that may still run before any unit's budget is exceeded.

        Where the sampler of clients amplifies, cohorts stay secret, so that every unit is assumed
        to take part in every round; elsewhere the coming cohorts are drawn, by a wrapper's own draw
        if it has one.

        Args:
          state: the state before those rounds.
          key: the root key of the run.
          num_rounds: how many rounds are wanted, at least 0.
          epsilon: the budget of each unit, a number or one for each account; units that are not
            named are not bounded.
          dp_delta: δ of each unit, a number or one for each account.
          accountant: as for `Ledger.epsilon`.
          hyper: the numbers that they will run with; those of the federation if not given.

        Returns:
          The number of rounds, from 0 to `num_rounds`.
        """
        bounded = [unit for unit in self.ledgers if unit in epsilon]
        if not bounded or num_rounds == 0:
            return num_rounds
        numbers = self._federation.hyper if hyper is None else typed(hyper)
        kept = self._events, self._numbers, self._digest
        self._read_events(numbers)
        try:
            return self._affordable(
                bounded, state, key, num_rounds, epsilon, dp_delta, accountant, numbers
            )
        finally:
            # Nothing has run: the numbers that are charged next are unchanged.
            self._events, self._numbers, self._digest = kept

    def _affordable(
        self,
        bounded: list[str],
        state: SimulationState,
        key: PRNGKey,
        num_rounds: int,
        epsilon: dict[str, float],
        dp_delta: Mapping[str, ArrayLike],
        accountant: str,
        numbers: Hyper,
    ) -> int:
        coming = self._cohorts.coming(state, numbers, key, num_rounds)

        def exceeds(count: int) -> bool:
            for unit in bounded:
                after = self.ledgers[unit].copy()
                drawn = None if coming.clients is None else coming.clients[:count]
                self._charge(unit, after, coming.stages[:count], drawn)
                budget = np.asarray(epsilon[unit], dtype=np.float64) * (1 + _SLACK)
                if np.any(after.epsilon(dp_delta[unit], accountant) > budget):
                    return True
            return False

        if not exceeds(num_rounds):
            return num_rounds
        fits, too_many = 0, num_rounds
        while too_many - fits > 1:
            middle = (fits + too_many) // 2
            fits, too_many = (fits, middle) if exceeds(middle) else (middle, too_many)
        return fits

    @checked
    def planned(self, state: SimulationState, key: PRNGKey, num_rounds: Count) -> dict[str, Ledger]:
        """Computes the ledgers after rounds that are still to come, with the current numbers.

        Args:
          state: the state before those rounds.
          key: the root key of the run.
          num_rounds: how many, at least 1.

        Returns:
          Copies of the ledgers, charged for these rounds too.
        """
        coming = self._cohorts.coming(state, self._federation.hyper, key, num_rounds)
        ledgers = {unit: ledger.copy() for unit, ledger in self.ledgers.items()}
        for unit, ledger in ledgers.items():
            self._charge(unit, ledger, coming.stages, coming.clients)
        return ledgers

    @overload
    def epsilon(self, dp_delta: float, accountant: str | None = None) -> float: ...

    @overload
    def epsilon(
        self, dp_delta: Mapping[str, ArrayLike], accountant: str | None = None
    ) -> dict[str, np.ndarray]: ...

    @checked
    def epsilon(
        self, dp_delta: Mapping[str, ArrayLike] | float, accountant: str | None = None
    ) -> dict[str, np.ndarray] | float:
        """Computes ε spent so far.

        Args:
          dp_delta: δ of each unit by its name, a number or one for each account; or a number, for
            the only unit.
          accountant: as for `Ledger.epsilon`; if not given, the one that the accounts were opened
            with, or "rdp".

        Returns:
          For each unit ε of every account, `[num_units]`; where δ is a number, the largest of all
          accounts, a float.

        Raises:
          ValueError: for one number where several units are claimed, or none is.
        """
        if accountant is None:
            accountant = self._accountant or "rdp"
        if not isinstance(dp_delta, Mapping):
            rule = "be given for each unit, by its name"
            checks.require(len(self.ledgers) == 1, "dp_delta", rule, dp_delta)
            (ledger,) = self.ledgers.values()
            return float(np.max(ledger.epsilon(dp_delta, accountant)))
        return {unit: v.epsilon(dp_delta[unit], accountant) for unit, v in self.ledgers.items()}

    def to_json(self) -> str:
        """Returns all ledgers as JSON, which `restore` reads."""
        return json.dumps({unit: json.loads(v.to_json()) for unit, v in self.ledgers.items()})

    def restore(self, text: str) -> None:
        """Restores the accounts of an interrupted run.

        Args:
          text: the output of `to_json`.

        Raises:
          ValueError: if it holds other units than this simulation claims, or accounts of another
            number or relation.
        """
        saved = json.loads(text)
        checks.require(
            sorted(saved) == sorted(self.ledgers),
            "ledgers",
            f"be those of the units {sorted(self.ledgers)}",
            sorted(saved),
        )
        ledgers = {unit: Ledger.from_json(json.dumps(v)) for unit, v in saved.items()}
        for unit, ledger in ledgers.items():
            for fact in ("unit", "relation", "num_units"):
                own = getattr(self.ledgers[unit], fact)
                there = getattr(ledger, fact)
                rule = f"be {own!r} as in this simulation"
                checks.require(there == own, f"ledgers.{unit}.{fact}", rule, there)
        self.ledgers = ledgers


def _by_stage(priced: list[_Prices], stages: np.ndarray) -> list[tuple[int | None, _Prices]]:
    """Pairs the stages that occur with their prices; None if all rounds cost the same."""
    if len(priced) == 1:
        return [(None, priced[0])]
    return [(int(stage), priced[stage]) for stage in np.unique(stages)]


def _events_by_client(
    record_event: RecordEvent, sizes: np.ndarray, hyper: Hyper
) -> list[tuple[Any, np.ndarray]]:
    """Groups clients that pay the same for a round."""
    groups: dict[Any, list[int]] = {}
    events: dict[Any, Any] = {}
    for client, size in enumerate(sizes):
        local = jax.tree.map(lambda x, c=client: x if x.ndim == 0 else x[c], hyper.local)
        facts = (int(size), *(float(x) for x in jax.tree.leaves(local)))
        if facts not in groups:
            events[facts] = record_event(int(size), hyper._replace(local=local))
            groups[facts] = []
        groups[facts].append(client)
    return [(events[facts], np.array(clients)) for facts, clients in groups.items()]
