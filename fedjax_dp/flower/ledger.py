"""The privacy of records on a node: charged where the noise is made, before anything leaves."""

import os
import pathlib
from collections.abc import Sequence

import numpy as np

from fedjax_dp.data import sampling
from fedjax_dp.data.participants import participation
from fedjax_dp.engine.accounts.privacy_accounting import PrivacyAccounting
from fedjax_dp.engine.federation import federation
from fedjax_dp.engine.population import Population
from fedjax_dp.engine.record import RoundRecord
from fedjax_dp.flower.plan import Plan
from fedjax_dp.server.base import Fate

_FILE = "ledger.json"


class NodeLedger:
    """The ledger of the records of a node's clients.

    A client pays for each round that it begins, with the numbers of the node's own plan, whether or
    not its reply arrives. The ledger is a file, which outlasts the node's process.
    """

    def __init__(
        self, plan: Plan, clients: Sequence[int], sizes: Sequence[int], folder: pathlib.Path
    ) -> None:
        """Opens the ledger in the folder of a node whose plan claims privacy for records."""
        self._clients, self._path = np.asarray(clients), folder / _FILE
        # Clients elsewhere have no records here, and pay nothing.
        of_all = np.zeros(plan.num_clients, np.int32)
        of_all[self._clients] = sizes
        second = None
        if plan.validation_limit:
            second = Population(np.minimum(of_all, 1), plan.structure)
        algorithm = plan.algorithm
        # The server charges what it adds itself.
        algorithm = algorithm._replace(aggregator=algorithm.aggregator._replace(claim=None))
        everyone = participation(sampling.full_participation(), plan.num_clients)
        bound = federation(algorithm, Population(of_all, plan.structure, second), everyone)
        self._accounting = PrivacyAccounting(bound)
        if self._path.exists():
            self._accounting.restore(self._path.read_text(encoding="utf-8"))

    def charge(self, clients: Sequence[int], stage: int) -> None:
        """Charges a round to clients, and writes that down."""
        ids = np.asarray(clients, np.int32)[None]
        fates = np.full(ids.shape, Fate.CONTRIBUTED, np.int8)
        whole: list[np.ndarray] = [np.zeros(1, np.int32), np.array([stage]), np.ones(1, bool)]
        self._accounting.charge(RoundRecord(ids, fates, *whole))  # type: ignore[arg-type]
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        unfinished = self._path.with_suffix(".unfinished")
        with unfinished.open("w", encoding="utf-8") as file:
            file.write(self._accounting.to_json())
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, self._path)

    def epsilon(self, dp_delta: float) -> list[float]:
        """Computes ε of each client of this node, in their order."""
        spent = self._accounting.epsilon({"record": dp_delta})["record"]
        return [float(each) for each in spent[self._clients]]

    def num_releases(self) -> list[int]:
        """Counts the releases of each client of this node."""
        counts = self._accounting.ledgers["record"].num_compositions
        return [int(each) for each in np.asarray(counts)[self._clients]]
