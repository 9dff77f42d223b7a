"""Tells the ledgers what ran: the bridge from a simulation's rounds to its privacy accounts."""

import json
from typing import Any

import jax
import numpy as np

from fedjax_dp.core import checks
from fedjax_dp.engine.round import SimulationState
from fedjax_dp.engine.simulate import Simulation
from fedjax_dp.privacy.accounting import Ledger


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
        self, simulation: Simulation, state: SimulationState, relation: str = "add_remove"
    ):
        """Opens the ledgers of a simulation.

        Args:
          simulation: what will run.
          state: its state, which holds the numbers that the events depend on.
          relation: which data are neighbours, "add_remove" or "replace_one".

        Raises:
          ValueError: if a mechanism, its sampler and the relation have no joint analysis.
        """
        self.ledgers: dict[str, Ledger] = {}
        self._charges_everybody = simulation.participation.sampler.charges_everybody
        algorithm, num_clients = simulation.algorithm, simulation.participation.num_clients
        if algorithm.aggregator.event is not None:
            base = algorithm.aggregator.event(state.aggregator)
            self._client_event = simulation.participation.event(base)
            num_units = 1 if self._charges_everybody else num_clients
            self.ledgers["client"] = Ledger("client", relation, num_units)
            self.ledgers["client"].copy().charge(self._client_event)
        if algorithm.record_event is not None:
            config = jax.tree.map(np.asarray, state.config)
            self._record_events = _events_by_client(algorithm.record_event, simulation, config)
            self.ledgers["record"] = Ledger("record", relation, num_clients)
            trial = self.ledgers["record"].copy()
            for event, clients in self._record_events:
                trial.charge(event, units=clients)

    def charge(self, info: dict[str, np.ndarray]) -> None:
        """Charges rounds that ran.

        Args:
          info: as `Simulation.run` returned it, for one or more rounds.
        """
        participants = np.asarray(info["participants"])
        for unit, ledger in self.ledgers.items():
            if unit == "client" and self._charges_everybody:
                ledger.charge(self._client_event, count=len(participants))
                continue
            times = np.bincount(participants[participants >= 0].ravel(), minlength=ledger.num_units)
            groups = (
                [(self._client_event, np.arange(ledger.num_units))]
                if unit == "client"
                else self._record_events
            )
            for event, clients in groups:
                ledger.charge(event, units=clients, count=times[clients])

    def affordable_rounds(
        self,
        num_rounds: int,
        epsilon: dict[str, float],
        dp_delta: dict[str, float],
        accountant: str,
    ) -> int:
        """Counts the rounds that may still run before any unit's budget is exceeded.

        Who will be drawn is not known, so that every unit is taken to take part in every round.

        Args:
          num_rounds: how many rounds are wanted.
          epsilon: the budget of each unit; units that are not named are not bounded.
          dp_delta: δ of each unit.
          accountant: as for `Ledger.epsilon`.

        Returns:
          The number of rounds, from 0 to `num_rounds`.
        """
        for unit, ledger in self.ledgers.items():
            if unit not in epsilon or num_rounds == 0:
                continue
            groups = [(self._client_event, None)] if unit == "client" else self._record_events
            for event, clients in groups:
                budget = (event, epsilon[unit], dp_delta[unit])
                if ledger.would_exceed(
                    *budget, units=clients, count=num_rounds, accountant=accountant
                ):
                    num_rounds = ledger.max_rounds(
                        *budget, units=clients, accountant=accountant, limit=num_rounds
                    )
        return num_rounds

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


def _events_by_client(
    record_event: Any, simulation: Simulation, config: Any
) -> list[tuple[Any, np.ndarray]]:
    """Groups clients that pay the same for a round."""
    groups: dict[Any, list[int]] = {}
    events: dict[Any, Any] = {}
    for client, size in enumerate(simulation.sizes):
        row = config.row(client)
        facts = (int(size), *(float(x) for x in jax.tree.leaves(row)))
        if facts not in groups:
            groups[facts], events[facts] = [], record_event(int(size), row)
        groups[facts].append(client)
    return [(events[facts], np.array(clients)) for facts, clients in groups.items()]
