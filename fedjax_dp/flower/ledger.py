"""The privacy of records on a node: charged where the noise is made, before anything leaves."""

import json
import pathlib
from collections.abc import Sequence
from typing import Annotated, NamedTuple

import numpy as np
from annotated_types import Gt, Lt
from filelock import FileLock
from numpy.typing import ArrayLike

from fedjax_dp.algorithms.base import FederatedAlgorithm
from fedjax_dp.core import checks, files
from fedjax_dp.core.argument_checks import check_fields
from fedjax_dp.core.ranges import PositiveNumbers
from fedjax_dp.data import sampling
from fedjax_dp.data.participants import participation
from fedjax_dp.engine.accounts.privacy_accounting import PrivacyAccounting
from fedjax_dp.engine.federation import federation
from fedjax_dp.engine.population import Population
from fedjax_dp.engine.record import RoundRecord
from fedjax_dp.flower.plan import Plan
from fedjax_dp.flower.states import run_digest
from fedjax_dp.privacy.claims import OnceClaim, RecordClaim
from fedjax_dp.server.base import Fate

_FILE, _LOCK = "ledger.json", "ledger.lock"
# A budget that was calibrated to the last bit must not be exceeded by rounding.
_SLACK = 1e-9


class Budget(NamedTuple):
    """The most that the records of a node's clients may pay, over all runs with one ledger.

    Attributes:
      epsilon: ε, one number or one for each client of the population.
      dp_delta: δ at which it is computed, one number or one for each client.
      relation: as for `PrivacyAccounting`.
      accountant: as for `Ledger.epsilon`.
    """

    epsilon: PositiveNumbers
    dp_delta: Annotated[ArrayLike, Gt(0), Lt(1)]
    relation: str = "zero_out"
    accountant: str | None = None

    def validate(self, num_clients: int) -> None:
        """Checks every field.

        Args:
          num_clients: the size of the population.

        Raises:
          ValueError: naming the field, the rule and the value.
        """
        check_fields(self, "budget.")
        for name in ("epsilon", "dp_delta"):
            given = getattr(self, name)
            rule = f"be one number or one for each of {num_clients} clients"
            checks.require(np.shape(given) in ((), (num_clients,)), f"budget.{name}", rule, given)


class NodeLedger:
    """The ledger of the records of a node's clients.

    A client pays for each round that it begins, with the numbers of the node's own plan, whether or
    not its reply arrives. Under an `OnceClaim` it pays again for a round that is not after all
    before, or is of another run or plan: its records are then read again. The ledger is a file,
    which outlasts the node's process and is locked while a round is charged.
    """

    def __init__(
        self,
        plan: Plan,
        clients: Sequence[int],
        sizes: Sequence[int],
        folder: pathlib.Path,
        budget: Budget | None = None,
    ) -> None:
        """Opens the ledger in the folder of a node whose plan claims privacy for records."""
        self._clients, self._folder, self._budget = np.asarray(clients), folder, budget
        if budget is not None:
            budget.validate(plan.num_clients)
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
        population = Population(of_all, plan.structure, second)
        terms = {} if budget is None else budget._asdict()
        terms = {name: terms[name] for name in ("relation", "accountant") if name in terms}

        def accounting(of: FederatedAlgorithm) -> PrivacyAccounting:
            return PrivacyAccounting(federation(of, population, everyone), **terms)

        self._accounting = self._again = accounting(algorithm)
        claim = algorithm.claims.record
        if isinstance(claim, OnceClaim):
            each = algorithm.training._replace(record=RecordClaim(*claim))
            self._again = accounting(algorithm._replace(training=each))
            self._again.ledgers = self._accounting.ledgers
        # The last round of each client, and the plan and run that it was of.
        self._last, self._of = dict[str, int](), dict[str, str]()
        self._digest = plan.digest
        self._read()

    def charge(self, clients: Sequence[int], round: int, stage: int, run: str = "") -> None:
        """Charges a round to clients, and writes that down; refuses one that exceeds the budget."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with FileLock(self._folder / _LOCK):
            # Another process may have charged a round.
            self._read()
            own = run_digest(self._digest, run)
            last = {client: self._last.get(str(client), -1) for client in clients}
            is_new = {c: round > last[c] and self._is_of(c, own) for c in clients}
            self._charge([c for c in clients if is_new[c]], stage, self._accounting)
            self._charge([c for c in clients if not is_new[c]], stage, self._again)
            self._require_budget(clients)
            for client in clients:
                before = last[client] if self._is_of(client, own) else -1
                self._last[str(client)] = max(round, before)
            self._of |= {str(client): own for client in clients}
            accounts = json.loads(self._accounting.to_json())
            content = {"last": self._last, "of": self._of, "accounts": accounts}
            files.write_private(self._folder / _FILE, json.dumps(content).encode())

    def _is_of(self, client: int, run: str) -> bool:
        """Whether all that a client has paid for before was of this run, or was nothing."""
        return str(client) not in self._last or self._of.get(str(client)) == run

    def _read(self) -> None:
        path = self._folder / _FILE
        if not path.exists():
            return
        found = files.parse_json(files.read_text(path), path)
        self._last, self._of = found["last"], found.get("of", {})
        self._accounting.restore(json.dumps(found["accounts"]))
        self._again.ledgers = self._accounting.ledgers

    @staticmethod
    def _charge(clients: Sequence[int], stage: int, accounting: PrivacyAccounting) -> None:
        ids = np.asarray(clients, np.int32)[None]
        fates = np.full(ids.shape, Fate.CONTRIBUTED, np.int8)
        whole: list[np.ndarray] = [np.zeros(1, np.int32), np.array([stage]), np.ones(1, bool)]
        accounting.charge(RoundRecord(ids, fates, *whole))  # type: ignore[arg-type]

    def _require_budget(self, clients: Sequence[int]) -> None:
        if self._budget is None:
            return
        spent = self._accounting.epsilon({"record": self._budget.dp_delta})["record"]
        budget = np.broadcast_to(np.asarray(self._budget.epsilon, np.float64), spent.shape)
        for client in clients:
            rule = f"be at most {budget[client]:.6g}, over all rounds in {self._folder / _FILE}"
            fits = spent[client] <= budget[client] * (1 + _SLACK)
            checks.require(fits, f"ε of the records of client {client}", rule, spent[client])

    def epsilon(self, dp_delta: float) -> list[float]:
        """Computes ε of each client of this node, in their order."""
        spent = self._accounting.epsilon({"record": dp_delta})["record"]
        return [float(each) for each in spent[self._clients]]

    def num_releases(self) -> list[int]:
        """Counts the releases of each client of this node."""
        counts = self._accounting.ledgers["record"].num_compositions
        return [int(each) for each in np.asarray(counts)[self._clients]]
