"""Privacy accounting of a federation: prices, ledgers and budgets."""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeAlias, overload

import jax
import numpy as np
from chex import PRNGKey
from numpy.typing import ArrayLike

from fedjax_dp.algorithms.base import Hyper
from fedjax_dp.core import checks
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.core.ranges import Count
from fedjax_dp.engine.accounts.calibration import events_by_client
from fedjax_dp.engine.cohort import typed
from fedjax_dp.engine.execution.compile import Simulation
from fedjax_dp.engine.federation import Federation, check_wrapped
from fedjax_dp.engine.record import RoundRecord, digest_of, priced, require_chargeable
from fedjax_dp.engine.round import SimulationState
from fedjax_dp.engine.wrapping import WITHIN_BUDGETS
from fedjax_dp.evaluation.noised import NoisedAccuracy
from fedjax_dp.privacy.accounting.dp_accounting_adapter import require_analysis
from fedjax_dp.privacy.accounting.ledger import Ledger
from fedjax_dp.privacy.claims import OnceClaim
from fedjax_dp.privacy.sensitivities import RELATIONS

# A budget that was calibrated to the last bit must not be exceeded by rounding.
_SLACK = 1e-9

# The costs of a round of one stage: events, and the accounts that pay each.
_Prices: TypeAlias = list[tuple[Any, np.ndarray]]


class _Costs(NamedTuple):
    """What rounds cost that run with some numbers."""

    # By unit and stage.
    events: dict[str, list[_Prices]]
    digest: Any  # Of these numbers.


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
        evaluations: NoisedAccuracy | None = None,
    ):
        """Opens the ledgers of a federation; refuses what has no joint analysis.

        "add_remove" never holds: a simulation takes rates, steps, divisors and weights from the
        exact numbers of clients and of their records, which are public. Rounds to come are planned
        with the releases of `evaluations`; those that ran are charged by `charge_evaluation`.
        """
        require_public_sizes(relation)
        bound = federation.federation if isinstance(federation, Simulation) else federation
        check_wrapped(bound)
        self._federation, self._cohorts = bound, bound.cohorts
        self._relation, self._accountant = relation, accountant
        num_clients = self._cohorts.participation.num_clients
        num_units = {"client": 1 if self._charges_all else num_clients, "record": num_clients}
        self._costs: list[_Costs] = []  # Of all rounds whose numbers differ.
        self._hyper: Any = None
        self._read_events(bound.hyper if hyper is None else hyper)
        units = self._costs[0].events
        self.ledgers = {unit: Ledger(unit, relation, num_units[unit]) for unit in units}
        self._evaluations = evaluations
        if evaluations is not None:
            rule = "be None unless clients are protected"
            checks.require("client" in units, "evaluations", rule, evaluations)
            require_analysis([evaluations.event()], relation, accountant)

    def _read_events(self, hyper: Hyper) -> None:
        """Computes a round's costs from numbers, unless these are the current ones."""
        hyper = jax.tree.map(np.asarray, typed(hyper))
        # With their structure: a number that takes the place of None changes what is charged.
        before, now = (jax.tree.flatten(numbers) for numbers in (self._hyper, hyper))
        if str(before[1]) == str(now[1]) and all(map(np.array_equal, before[0], now[0])):
            return
        self._federation.check_numbers(hyper)
        rounds = sorted(set(priced(hyper).alike()))
        found = [self._costs_of(hyper.at(t)) for t in rounds]
        if WITHIN_BUDGETS in self._federation.wrappers:
            rule = "have no factors of numbers that set what a round costs a record"
            prices = [[event for event, _ in costs.events["record"][0]] for costs in found]
            is_one = all(each == prices[0] for each in prices)
            checks.require(is_one, "hyper", rule, sorted(hyper.factors))
        self._costs, self._hyper = found, hyper

    def _costs_of(self, hyper: Hyper) -> "_Costs":
        """Computes what a round with these numbers costs."""
        claims, events = self._federation.claims, dict[str, list[_Prices]]()
        if claims.client is not None:
            event = self._cohorts.event(claims.client.event(hyper.aggregator))
            num_units = 1 if self._charges_all else self._cohorts.participation.num_clients
            events["client"] = [[(event, np.arange(num_units))]]
        if claims.record is not None:
            sizes = self._federation.population.sizes
            events["record"] = [events_by_client(e, sizes, hyper) for e in claims.record.events]
        for by_stage in events.values():
            round_events = [event for prices in by_stage for event, _ in prices]
            require_analysis(round_events, self._relation, self._accountant)
        return _Costs(events, digest_of(hyper))

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
        is charged all the same, since updates have left the clients. Where numbers change over
        rounds, a round is charged by those that its record has the digest of.

        Args:
          record: as `Simulation.run` returned it, for one or more rounds.
          hyper: the numbers that these rounds ran with, required if they are not those that were
            charged last or that the accounts were opened with.

        Raises:
          ValueError: if what ran has no analysis, the rounds ran with other numbers than those that
            would be charged, or clients or stages are not those of this federation; nothing is
            charged then.
        """
        num_prices = max((len(prices) for prices in self._costs[0].events.values()), default=1)
        num_stages = num_prices if num_prices > 1 else None
        require_chargeable(record, self._cohorts.participation.num_clients, num_stages)
        kept = self._costs, self._hyper
        if hyper is not None:
            self._read_events(hyper)
        try:
            which = self._costs_that_ran(record)
        except ValueError:
            self._costs, self._hyper = kept
            raise
        participants, stages = np.asarray(record.clients), np.asarray(record.stage)
        for unit, ledger in self.ledgers.items():
            cohorts = None if self._all_pay(unit) else participants
            self._charge(unit, ledger, which, stages, cohorts)

    def charge_evaluation(self) -> None:
        """Charges a release of `evaluations` that ran, in which all clients took part."""
        rule = "be given when the accounts are opened"
        checks.require(self._evaluations is not None, "evaluations", rule, None)
        assert self._evaluations is not None
        self.ledgers["client"].charge(self._evaluations.event())

    def _costs_that_ran(self, record: RoundRecord) -> np.ndarray:
        """Finds the costs of rounds by the numbers that they ran with, `[rounds]`."""
        if record.digest is None:
            rule = "have digests of its numbers, which change over rounds and set their costs"
            checks.require(len(self._costs) == 1, "record", rule, "one without")
            return np.zeros(len(np.asarray(record.stage)), np.int64)
        ran = np.asarray(record.digest).reshape(-1, 2)
        known = np.stack([costs.digest for costs in self._costs])
        is_of = np.all(ran[:, None] == known, axis=2)
        others = np.flatnonzero(~np.any(is_of, axis=1))
        rule = (
            "be the numbers that the rounds ran with, which determine their cost: call "
            "charge(record, hyper) with the hyper of these rounds, once for each hyper"
        )
        which = others[0] if len(others) else 0
        other_numbers = f"others than those of round {which} of this record"
        checks.require(not len(others), "hyper", rule, other_numbers)
        return np.argmax(is_of, axis=1)

    def _costs_to_come(self, first: int, num_rounds: int) -> np.ndarray:
        """Finds the costs of rounds from `first` on, `[num_rounds]`."""
        of_run = priced(self._hyper)
        known = sorted(set(of_run.alike()))
        return np.searchsorted(known, of_run.alike(first + num_rounds)[first:])

    def _all_pay(self, unit: str) -> bool:
        """Whether accounts must not reveal who took part, so that each unit pays for each round."""
        # Amplification of client-level privacy requires secret cohorts. Accounts of records that
        # follow them would reveal how often each client was drawn, also by stopping at a budget.
        is_secret = unit == "client" or "client" in self.ledgers
        return self._charges_all and (is_secret or self._cohorts.is_adaptive)

    def _charge(
        self,
        unit: str,
        ledger: Ledger,
        which: np.ndarray,
        stages: np.ndarray,
        cohorts: np.ndarray | None,
    ) -> None:
        """Charges rounds of some costs and stages to `cohorts`, or to all units if it is None."""
        for place in np.unique(which):
            is_of = which == place
            own = None if cohorts is None else cohorts[is_of]
            self._charge_alike(unit, ledger, self._costs[place], stages[is_of], own)

    def _charge_alike(
        self,
        unit: str,
        ledger: Ledger,
        costs: _Costs,
        stages: np.ndarray,
        cohorts: np.ndarray | None,
    ) -> None:
        """Charges rounds that ran with the same numbers."""
        for stage, prices in _by_stage(costs.events[unit], stages):
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
        kept = self._costs, self._hyper
        self._read_events(numbers)
        try:
            return self._affordable(
                bounded, state, key, num_rounds, epsilon, dp_delta, accountant, numbers
            )
        finally:
            # Nothing has run: the numbers that are charged next are unchanged.
            self._costs, self._hyper = kept

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
        first = int(state.round)
        which = self._costs_to_come(first, num_rounds)

        def exceeds(count: int) -> bool:
            for unit in bounded:
                drawn = None if coming.clients is None else coming.clients[:count]
                after = self._after(unit, first, which[:count], coming.stages[:count], drawn)
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
    def rounds_by_client(
        self,
        epsilon: ArrayLike,
        dp_delta: ArrayLike,
        accountant: str | None = None,
        *,
        limit: Count = 10**7,
    ) -> np.ndarray:
        """Counts the rounds that the records of each client may pay for, from the first on.

        Args:
          epsilon: the budget, above 0, or inf; one number or `[num_clients]`.
          dp_delta: δ in (0, 1), one number or `[num_clients]`.
          accountant: as for `epsilon`.
          limit: the largest answer, at least 1.

        Returns:
          `[num_clients]`, int64, with the numbers that are current.

        Raises:
          ValueError: where no records are protected, or rounds cost a client different amounts.
        """
        stages = [prices for each in self._costs for prices in each.events.get("record", ())]
        rule = "have one price for all rounds of a client's records"
        checks.require(len(stages) == 1, "federation", rule, f"{len(stages)} prices")
        ledger = self.ledgers["record"]
        once = Ledger("record", self._relation, ledger.num_units)
        for event, accounts in stages[0]:
            once.charge(event, units=accounts)
        by = accountant or self._accountant or "rdp"
        return once.max_repeats(epsilon, dp_delta, accountant=by, limit=limit)

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
        first = int(state.round)
        which = self._costs_to_come(first, num_rounds)
        return {
            unit: self._after(unit, first, which, coming.stages, coming.clients)
            for unit in self.ledgers
        }

    def _after(
        self,
        unit: str,
        first: int,
        which: np.ndarray,
        stages: np.ndarray,
        cohorts: np.ndarray | None,
    ) -> Ledger:
        """Charges rounds from `first` on, and the releases after them, to a copy of a ledger."""
        after = self.ledgers[unit].copy()
        self._charge(unit, after, which, stages, cohorts)
        if unit == "client" and self._evaluations is not None:
            count = self._evaluations.num_releases(first, first + len(which))
            after.charge(self._evaluations.event(), count=count)
        return after

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
          ValueError: for one number where several units are claimed, or none is; if a unit that is
            claimed is missing; for units where none is claimed.
        """
        if accountant is None:
            accountant = self._accountant or "rdp"
        if not isinstance(dp_delta, Mapping):
            rule = "be given for each unit, by its name"
            checks.require(len(self.ledgers) == 1, "dp_delta", rule, dp_delta)
            (ledger,) = self.ledgers.values()
            return float(np.max(ledger.epsilon(dp_delta, accountant)))
        claimed, rule = ", ".join(self.ledgers) or "none is", "have each unit that is claimed"
        has_all = self.ledgers.keys() <= dp_delta.keys() and (bool(self.ledgers) or not dp_delta)
        checks.require(has_all, "dp_delta", f"{rule}: {claimed}", [*dp_delta])
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
