"""What a node stores: the states of its clients, and the privacy of its records."""

import hashlib
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, NamedTuple, Protocol

import numpy as np
from annotated_types import Gt, Lt
from filelock import FileLock
from flwr.app import Array, ArrayRecord, RecordDict
from numpy.typing import ArrayLike
from safetensors.numpy import load_file, save

from fedjax_dp.core import checks, disclosure, files
from fedjax_dp.core.argument_checks import check_fields
from fedjax_dp.core.decimals import shown
from fedjax_dp.core.disclosure import GuardedError
from fedjax_dp.core.ranges import PositiveNumbers
from fedjax_dp.data import sampling
from fedjax_dp.data.participants import participation
from fedjax_dp.engine.accounts.privacy_accounting import PrivacyAccounting
from fedjax_dp.engine.facts import Population
from fedjax_dp.engine.federation import federation
from fedjax_dp.engine.record import RoundRecord
from fedjax_dp.flower.plan import Plan
from fedjax_dp.io.node_ledger import LEDGER_FILE, read_ledger
from fedjax_dp.io.params import DIGEST, digest_of_arrays, require_undamaged
from fedjax_dp.privacy.claims import OnceClaim, RecordClaim
from fedjax_dp.server.base import Fate

_SUFFIX = ".safetensors"
# Enough that no two runs of a node share a name.
_DIGITS = 16


def run_digest(*names: str) -> str:
    """Computes the SHA-256 of a run's random name, or of its plan's digest and that name."""
    return hashlib.sha256(" ".join(names).encode()).hexdigest()


class States(Protocol):
    """The states of a node's clients in one run, as arrays by name."""

    def has(self, client: int, round: int) -> bool:
        """Whether a client's state as of a round is here."""

    def read(self, client: int, round: int) -> Mapping[str, np.ndarray] | None:
        """Reads a client's state as of a round, or None."""

    def write(self, client: int, round: int, arrays: Mapping[str, np.ndarray], last: int) -> None:
        """Writes a client's state after a round; deletes those of rounds before `last`.

        Those after it stay: a message that names an earlier round must not delete what the next one
        starts from.
        """


class StatesOnDisk:
    """States in files of a folder, which outlast the node's process."""

    def __init__(self, folder: str | pathlib.Path, run: str):
        """Opens a folder for a run; made, for its owner alone, where it is missing."""
        self._folder, self._run = pathlib.Path(folder), run
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def _of(self, client: int) -> dict[int, pathlib.Path]:
        prefix = _prefix(self._run, client)
        files = [(p.stem.removeprefix(prefix), p) for p in self._folder.glob(f"{prefix}*{_SUFFIX}")]
        # A file of another name is none of ours.
        return {int(number): path for number, path in files if number.isdecimal()}

    def has(self, client: int, round: int) -> bool:
        """Whether a client's state as of a round is here."""
        return round in self._of(client)

    def read(self, client: int, round: int) -> Mapping[str, np.ndarray] | None:
        """Reads a client's state as of a round, or None."""
        path = self._of(client).get(round)
        if path is None:
            return None
        try:
            arrays: dict[str, np.ndarray] = load_file(path)
            require_undamaged(path, arrays, path.name)
        except Exception as error:
            # The reader raises many types of errors for damaged files.
            rule = "must be as it was written: restore the node's folder of states from a copy"
            public = f"the state of a client {rule}"
            raise GuardedError(f"{path} {rule}: {error}", public) from error
        return arrays

    def write(self, client: int, round: int, arrays: Mapping[str, np.ndarray], last: int) -> None:
        """Writes a client's state after a round; deletes those of rounds before `last`."""
        path = self._folder / f"{_prefix(self._run, client)}{round}{_SUFFIX}"
        named = {name: np.asarray(x, order="C") for name, x in arrays.items()}
        content = save(named, {DIGEST: digest_of_arrays(named, path.name)})
        files.write_private(path, content)
        for old, place in self._of(client).items():
            if old < last:
                place.unlink()


class StatesInContext:
    """States in Flower's context of a node, which outlast a message but not the node's process."""

    def __init__(self, state: RecordDict, run: str):
        """Wraps `Context.state` for a run."""
        self._state, self._run = state, run

    def _of(self, client: int) -> dict[int, str]:
        prefix = _prefix(self._run, client)
        return {int(n.removeprefix(prefix)): n for n in self._state if n.startswith(prefix)}

    def has(self, client: int, round: int) -> bool:
        """Whether a client's state as of a round is here."""
        return round in self._of(client)

    def read(self, client: int, round: int) -> Mapping[str, np.ndarray] | None:
        """Reads a client's state as of a round, or None."""
        name = self._of(client).get(round)
        if name is None:
            return None
        return {n: array.numpy() for n, array in self._state.array_records[name].items()}

    def write(self, client: int, round: int, arrays: Mapping[str, np.ndarray], last: int) -> None:
        """Writes a client's state after a round; deletes those of rounds before `last`."""
        named = {name: Array(np.asarray(x, order="C")) for name, x in arrays.items()}
        self._state[f"{_prefix(self._run, client)}{round}"] = ArrayRecord(named)
        for old, name in self._of(client).items():
            if old < last:
                del self._state[name]


def _prefix(run: str, client: int) -> str:
    """Begins the names of a client's states in a run, which end with the round."""
    return f"run-{run[:_DIGITS]}-client-{client}-round-"


_LOCK = "ledger.lock"
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
        keys: str = "device",
    ) -> None:
        """Opens the ledger in the folder of a node whose plan claims privacy for records."""
        self._clients, self._folder, self._budget = np.asarray(clients), folder, budget
        # Of all runs, as statements have them: records by client, and who drew keys.
        self._sizes = dict(zip(map(str, clients), map(int, sizes), strict=True))
        self._keys = {keys}
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
            content = {"times": self._times, "accounts": accounts, "sizes": self._sizes}
            content = files.with_digest(content | {"keys": sorted(self._keys)})
            files.write_private(self._folder / LEDGER_FILE, json.dumps(content).encode())

    def _must_pay(self, client: int, round: int, run: str) -> bool:
        """Counts a reading of a round; returns whether no round was paid for this often before."""
        if not self._reads_once:
            return True
        times = self._times.setdefault(str(client), {}).setdefault(run, {})
        before = max(times.values(), default=0)
        times[str(round)] = times.get(str(round), 0) + 1
        return times[str(round)] > before

    def _read(self) -> None:
        path = self._folder / LEDGER_FILE
        if not path.exists():
            return
        saved = read_ledger(path)
        self._times = saved.get("times", {})
        self._sizes = saved.get("sizes", {}) | self._sizes
        # Where none are named, the server may have drawn them.
        self._keys |= set(saved.get("keys", ["parity"]))
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
            what, where = f"ε of the records of client {client}", str(self._folder / LEDGER_FILE)
            disclosure.require(fits, what, rule, spent[client], where=where)

    def epsilon(self, dp_delta: float) -> list[float]:
        """Computes ε of each client of this node, in their order."""
        spent = self._accounting.epsilon({"record": dp_delta})["record"]
        return [float(each) for each in spent[self._clients]]

    def num_releases(self) -> list[int]:
        """Counts the releases of each client of this node."""
        counts = self._accounting.ledgers["record"].num_compositions
        return [int(each) for each in np.asarray(counts)[self._clients]]
