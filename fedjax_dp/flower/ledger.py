"""The privacy of records on a node: charged where the noise is made, before anything leaves."""

import json
import pathlib
from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple

import numpy as np
from annotated_types import Gt, Lt
from filelock import FileLock
from numpy.typing import ArrayLike

from fedjax_dp.core import checks, disclosure, files
from fedjax_dp.core.argument_checks import check_fields
from fedjax_dp.core.decimals import shown
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
    not its reply arrives. Under an `OnceClaim` each round of a run reads records of its own: a
    client pays for a round once more whenever that was read more often than any other before;
    another run or plan may read all records again. The ledger is a file, which outlasts the node's
    process and is locked while a round is charged.
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
        # The server charges what it adds itself.
        aggregator = plan.algorithm.aggregator._replace(claim=None)
        claim = plan.algorithm.claims.record
        assert claim is not None
        self._reads_once = isinstance(claim, OnceClaim)
        # Which rounds have read a record is known here alone.
        training = plan.algorithm.training._replace(record=RecordClaim(*claim))
        algorithm = plan.algorithm._replace(aggregator=aggregator, training=training)
        everyone = participation(sampling.full_participation(), plan.num_clients)
        population = Population(of_all, plan.structure, second)
        terms = {} if budget is None else budget._asdict()
        terms = {name: terms[name] for name in ("relation", "accountant") if name in terms}

        self._accounting = PrivacyAccounting(federation(algorithm, population, everyone), **terms)
        # By client, and by run, plan and stage, how often each round was read.
        self._times = dict[str, dict[str, dict[str, int]]]()
        self._digest = plan.digest
        self._read()

    def charge(self, clients: Sequence[int], round: int, stage: int, run: str = "") -> None:
        """Charges a round to clients, and writes that down; refuses one that exceeds the budget."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with FileLock(self._folder / _LOCK):
            # Another process may have charged a round.
            self._read()
            own = run_digest(self._digest, run, str(stage))
            paying = [client for client in clients if self._must_pay(client, round, own)]
            ids = np.asarray(paying, np.int32)[None]
            fates = np.full(ids.shape, Fate.CONTRIBUTED, np.int8)
            whole: list[Any] = [np.zeros(1, np.int32), np.array([stage]), np.ones(1, bool)]
            self._accounting.charge(RoundRecord(ids, fates, *whole))  # type: ignore[arg-type]
            self._require_budget(clients)
            accounts = json.loads(self._accounting.to_json())
            content = {"times": self._times, "accounts": accounts}
            files.write_private(self._folder / _FILE, json.dumps(content).encode())

    def _must_pay(self, client: int, round: int, run: str) -> bool:
        """Counts a reading of a round; returns whether no round was paid for this often before."""
        if not self._reads_once:
            return True
        times = self._times.setdefault(str(client), {}).setdefault(run, {})
        before = max(times.values(), default=0)
        times[str(round)] = times.get(str(round), 0) + 1
        return times[str(round)] > before

    def _read(self) -> None:
        path = self._folder / _FILE
        if not path.exists():
            return
        saved = files.parse_json(files.read_text(path), path)
        self._times = saved.get("times", {})
        self._accounting.restore(json.dumps(saved["accounts"]))

    def _require_budget(self, clients: Sequence[int]) -> None:
        if self._budget is None:
            return
        spent = self._accounting.epsilon({"record": self._budget.dp_delta})["record"]
        budget = np.broadcast_to(np.asarray(self._budget.epsilon, np.float64), spent.shape)
        for client in clients:
            most = shown("budget", budget[client], 6)
            rule = f"be at most {most}, over all rounds of this node's ledger"
            fits = spent[client] <= budget[client] * (1 + _SLACK)
            what, where = f"ε of the records of client {client}", str(self._folder / _FILE)
            disclosure.require(fits, what, rule, spent[client], where=where)

    def epsilon(self, dp_delta: float) -> list[float]:
        """Computes ε of each client of this node, in their order."""
        spent = self._accounting.epsilon({"record": dp_delta})["record"]
        return [float(each) for each in spent[self._clients]]

    def num_releases(self) -> list[int]:
        """Counts the releases of each client of this node."""
        counts = self._accounting.ledgers["record"].num_compositions
        return [int(each) for each in np.asarray(counts)[self._clients]]
