"""Tells the ledgers what ran: the bridge from a simulation's rounds to its privacy accounts."""

import json
from typing import Any

import jax
import numpy as np
from chex import PRNGKey

from fedjax_dp.core import checks
from fedjax_dp.core.keys import Purpose, fold
from fedjax_dp.engine.round import SimulationState
from fedjax_dp.engine.simulate import Simulation
from fedjax_dp.privacy.accounting import Ledger

# A budget that was calibrated to the last bit must not fail on the last bit.
_SLACK = 1e-9


class PrivacyAccounting:
    """Keeps one ledger for each unit of privacy that a simulation claims.

    What is charged comes from the parts that ran: the event of a round of clients from the
    aggregator's mechanism and the participation, the event of a client's local training from its
    trainer. Sampling of clients never amplifies record-level privacy here: a record pays for every
    round in which its client took part.

    Attributes:
      ledgers: by unit, "client" and "record"; empty where the simulation claims nothing.
    """

    def __init__(
        self,
        simulation: Simulation,
        state: SimulationState,
        relation: str = "add_remove",
        accountant: str | None = None,
    ):
        """Opens the ledgers of a simulation.

        Args:
          simulation: what will run.
          state: its state, which holds the numbers that the events depend on.
          relation: which data are neighbours, "add_remove" or "replace_one".
          accountant: who will be asked for ε, to be refused now and not after rounds ran; any one
            that has an analysis where it is None.

        Raises:
          ValueError: if a mechanism, its sampler, the relation and the accountant have no joint
            analysis.
        """
        self._participation = simulation.participation
        algorithm, num_clients = simulation.algorithm, simulation.participation.num_clients
        self.ledgers: dict[str, Ledger] = {}
        # By unit, what a round costs: events, and the accounts that pay each.
        self._events: dict[str, list[tuple[Any, np.ndarray]]] = {}
        if algorithm.aggregator.event is not None:
            event = simulation.participation.event(algorithm.aggregator.event(state.aggregator))
            num_units = 1 if self._charges_everybody else num_clients
            self.ledgers["client"] = Ledger("client", relation, num_units)
            self._events["client"] = [(event, np.arange(num_units))]
        if algorithm.record_event is not None:
            self.ledgers["record"] = Ledger("record", relation, num_clients)
            self._events["record"] = _events_by_client(algorithm.record_event, simulation, state)
        for unit, events in self._events.items():
            _require_analysis([event for event, _ in events], unit, relation, accountant)

    @property
    def _charges_everybody(self) -> bool:
        return self._participation.sampler.charges_everybody

    def charge(self, info: dict[str, np.ndarray]) -> None:
        """Charges rounds that ran.

        Args:
          info: as `Simulation.run` returned it, for one or more rounds.
        """
        participants = np.asarray(info["participants"])
        times = self._times(participants)
        for unit, ledger in self.ledgers.items():
            if unit == "client" and self._charges_everybody:
                times_of_unit = np.array([len(participants)])
            else:
                times_of_unit = times
            for event, accounts in self._events[unit]:
                paid = accounts[times_of_unit[accounts] > 0]
                # An event that nobody paid for would be an entry without units.
                if len(paid):
                    ledger.charge(event, units=paid, count=times_of_unit[paid])

    def _times(self, participants: np.ndarray) -> np.ndarray:
        """Counts the rounds of each client, `[num_clients]`; empty slots hold -1."""
        drawn = participants[participants >= 0].ravel()
        return np.bincount(drawn, minlength=self._participation.num_clients)

    def affordable_rounds(
        self,
        state: SimulationState,
        key: PRNGKey,
        num_rounds: int,
        epsilon: dict[str, float],
        dp_delta: dict[str, float],
        accountant: str,
    ) -> int:
        """Counts the rounds that may still run before any unit's budget is exceeded.

        Where the sampler of clients amplifies, who will be drawn is to stay unknown, so that every
        unit is taken to take part in every round; where it does not, the cohorts are looked up.

        Args:
          state: the state before those rounds.
          key: the root key of the run.
          num_rounds: how many rounds are wanted, at least 0.
          epsilon: the budget of each unit, a number or one for each account; units that are not
            named are not bounded.
          dp_delta: δ of each unit.
          accountant: as for `Ledger.epsilon`.

        Returns:
          The number of rounds, from 0 to `num_rounds`.
        """
        bounded = [unit for unit in self.ledgers if unit in epsilon]
        if not bounded or num_rounds == 0:
            return num_rounds
        cohorts = None if self._charges_everybody else self._cohorts(state, key, num_rounds)

        def exceeds(count: int) -> bool:
            for unit in bounded:
                after = self.ledgers[unit].copy()
                for event, accounts in self._events[unit]:
                    times = count if cohorts is None else self._times(cohorts[:count])[accounts]
                    after.charge(event, units=accounts, count=times)
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

    def _cohorts(self, state: SimulationState, key: PRNGKey, num_rounds: int) -> np.ndarray:
        """Looks up who will be drawn, `[num_rounds, slots]`, -1 in empty slots."""
        draw_key = fold(key, Purpose.PARTICIPATION)
        rounds = int(state.round) + np.arange(num_rounds)
        draws = jax.vmap(lambda r: self._participation.draw(draw_key, r))(rounds)
        return np.where(draws.is_real, draws.indices, -1)

    def epsilon(self, dp_delta: dict[str, float], accountant: str = "rdp") -> dict[str, np.ndarray]:
        """Computes ε spent so far.

        Args:
          dp_delta: δ of each unit.
          accountant: as for `Ledger.epsilon`.

        Returns:
          For each unit ε of every account, `[num_units]`.
        """
        return {
            unit: ledger.epsilon(dp_delta[unit], accountant)
            for unit, ledger in self.ledgers.items()
        }

    def to_json(self) -> str:
        """Writes all ledgers as text.

        Returns:
          JSON, which `restore` reads.
        """
        return json.dumps({unit: json.loads(v.to_json()) for unit, v in self.ledgers.items()})

    def restore(self, text: str) -> None:
        """Takes the accounts of an interrupted run.

        Args:
          text: what `to_json` wrote.

        Raises:
          ValueError: if it holds other units than this simulation claims.
        """
        saved = json.loads(text)
        checks.require(
            sorted(saved) == sorted(self.ledgers),
            "ledgers",
            f"be those of the units {sorted(self.ledgers)}",
            sorted(saved),
        )
        self.ledgers = {unit: Ledger.from_json(json.dumps(v)) for unit, v in saved.items()}


def _require_analysis(events: list[Any], unit: str, relation: str, accountant: str | None) -> None:
    is_asked = accountant is None
    for event in events:
        trial = Ledger(unit, relation)
        trial.charge(event)
        # A unit's events are of one kind, so that the first that costs something stands for all.
        if not is_asked and trial.num_compositions.any():
            trial.epsilon(0.5, str(accountant))
            is_asked = True


def _events_by_client(
    record_event: Any, simulation: Simulation, state: SimulationState
) -> list[tuple[Any, np.ndarray]]:
    """Groups clients that pay the same for a round."""
    config = jax.tree.map(np.asarray, state.config)
    groups: dict[Any, list[int]] = {}
    events: dict[Any, Any] = {}
    for client, size in enumerate(simulation.sizes):
        row = jax.tree.map(lambda x, c=client: x if x.ndim == 0 else x[c], config)
        facts = (int(size), *(float(x) for x in jax.tree.leaves(row)))
        if facts not in groups:
            groups[facts], events[facts] = [], record_event(int(size), row)
        groups[facts].append(client)
    return [(events[facts], np.array(clients)) for facts, clients in groups.items()]
