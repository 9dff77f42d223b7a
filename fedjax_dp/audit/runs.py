"""Audits: attacks through canaries, and the ε that they prove, compared with the claimed ε."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import dp_accounting
import jax
import jax.numpy as jnp
import numpy as np
from chex import PRNGKey

from fedjax_dp.algorithms.base import FederatedAlgorithm, HostStep, Hyper
from fedjax_dp.audit.canaries import MARK, Planted
from fedjax_dp.core import checks
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.engine.accounts.privacy_accounting import PrivacyAccounting
from fedjax_dp.engine.cohort import typed
from fedjax_dp.engine.execution.compile import Simulation, simulation
from fedjax_dp.engine.execution.round_loop import after_host_step, rounds_and_host_steps
from fedjax_dp.engine.facts import examples_of
from fedjax_dp.engine.federation import Federation
from fedjax_dp.engine.layout import ExecutionConfig
from fedjax_dp.engine.record import RoundRecord, digest_of
from fedjax_dp.engine.round import SimulationState
from fedjax_dp.privacy.accounting.ledger import Ledger
from fedjax_dp.privacy.events import flatten
from fedjax_dp.privacy.reports import auditing
from fedjax_dp.privacy.reports.auditing import LowerBound

# A thousand runs suffice at a large δ; the ledger's claim holds at every δ.
_LARGE_DELTA = 0.1
# With fewer runs, no threshold proves anything.
_FEWEST_RUNS = 40


class AuditRuns(NamedTuple):
    """The auditor's coins and observations.

    Attributes:
      planted: the attacked population.
      seen: what an attacker saw of each canary in each round, `[runs, rounds, canaries]`; several
        numbers a round count as several rounds.
      is_included: the auditor's coins, `[runs, canaries]`, bool.
      record: of every round, `[runs, rounds, ...]`, on the host.
      federation: the federation that was run.
    """

    planted: Planted
    seen: np.ndarray
    is_included: np.ndarray
    record: RoundRecord
    federation: Federation


class AuditResult(NamedTuple):
    """A measured lower bound, and the claimed upper bound.

    Attributes:
      unit: the attacked unit of privacy, "client" or "record".
      method: "one_run", "threshold" or "gaussian", see `fedjax_dp.privacy.reports.auditing`.
      dp_delta: δ of both bounds.
      epsilon_lower: the ε that the attack proves.
      epsilon_claimed: the ε that the ledger reports for the most exposed canary.
      confidence: the least probability that such a lower bound is right.
      num_runs: the number of runs that it was computed from.
      num_canaries: the number of canaries that it was computed from.
    """

    unit: str
    method: str
    dp_delta: float
    epsilon_lower: float
    epsilon_claimed: float
    confidence: float
    num_runs: int
    num_canaries: int

    @property
    def is_violated(self) -> bool:
        """Whether the lower bound exceeds the claim."""
        return self.epsilon_lower > self.epsilon_claimed


@checked
def run_audit(
    planted: Planted,
    key: PRNGKey,
    *,
    num_runs: int,
    num_rounds: int,
    runs_at_once: int = 1,
    execution: ExecutionConfig = ExecutionConfig(),
    running: FederatedAlgorithm | None = None,
    wrapper: Callable[[Federation], Federation] | None = None,
) -> AuditRuns:
    """Runs a planted population, every canary included with probability 1/2 in every run.

    All runs are one program and start from the same parameters, with keys and coins of their own.
    A round is `Federation.step`, as in any simulation, on examples whose marks differ by run.

    Args:
      planted: algorithm and population.
      key: root of all draws.
      num_runs: at least 1.
      num_rounds: rounds of each run, at least 1.
      runs_at_once: runs that are computed together; memory grows with it.
      execution: how the rounds are laid out, on one device that holds all examples.
      running: the algorithm to run instead of `planted.algorithm`, whose claims still apply; the
        same algorithm with less noise shows what an audit can find.
      wrapper: of the federation that runs, such as one in which clients drop out.

    Returns:
      Observations and coins, on the host.

    Raises:
      ValueError: if an argument is not valid, or the population with its canaries has no privacy
        analysis.
    """
    counts = {"num_runs": num_runs, "num_rounds": num_rounds, "runs_at_once": runs_at_once}
    for name, count in counts.items():
        checks.whole(name, count)
    claimed = sim = _compiled(planted, execution, wrapper)
    if running is not None:
        sim = _compiled(planted._replace(algorithm=running), execution, wrapper)
    bound, layout = sim.federation, sim.layout
    coin_key, init_key, run_key = jax.random.split(key, 3)
    is_included = jax.random.bernoulli(coin_key, shape=(num_runs, len(planted.owners)))

    @partial(jax.jit, static_argnames=("num_rounds", "is_last"))
    def attack(keys, coins, states, hyper, examples, num_rounds, is_last):
        """Continues every run; `states` is the start of all, or has one for each run."""

        def one_run(run: tuple[Any, ...]):
            key, coin, *own = run
            held = examples.replace(arrays=examples.arrays | {MARK: planted.marks(coin)})

            def one_round(state, _):
                state, record, info = bound.run_round(state, hyper, held, key, layout)
                return state, (planted.scores(record, info), record)

            state, left = jax.lax.scan(one_round, own[0] if own else states, None, num_rounds)
            # The states of all runs are returned only if they are needed.
            return (None if is_last else state), left

        has_own = jnp.ndim(states.round) > 0
        runs = (keys, coins, states) if has_own else (keys, coins)
        return jax.lax.map(one_run, runs, batch_size=min(runs_at_once, num_runs))

    states, examples = (
        jax.jit(partial(bound.init, layout=layout))(init_key),
        jax.device_put(examples_of(planted.data)),
    )
    keys = jax.random.split(run_key, num_runs)
    parts = []
    blocks = rounds_and_host_steps(bound.algorithm.stages.host_steps, 0, num_rounds)
    for i, (length, steps) in enumerate(blocks):
        is_last = i == len(blocks) - 1
        states, part = attack(keys, is_included, states, bound.hyper, examples, length, is_last)
        parts.append(jax.device_get(part))
        if not is_last:
            states = _after_host_steps(states, steps, bound.hyper, keys)
    seen, record = jax.tree.map(lambda *x: np.concatenate(x, axis=1), *parts)
    if running is not None:
        # The claimed numbers are charged, not those that the rounds ran with.
        numbers = jax.tree.map(np.asarray, typed(claimed.hyper))
        digests = np.stack([digest_of(numbers.at(t)) for t in range(num_rounds)])
        record = record._replace(digest=np.broadcast_to(digests, (num_runs, *digests.shape)))
    seen = seen.astype(np.float64).reshape(num_runs, -1, seen.shape[-1])
    return AuditRuns(planted, seen, np.asarray(is_included), record, claimed.federation)


def _compiled(
    planted: Planted,
    execution: ExecutionConfig,
    wrapper: Callable[[Federation], Federation] | None = None,
) -> Simulation:
    """Builds the simulation of a planted population, on one device."""
    if execution.devices == "auto":
        execution = execution._replace(devices=None)
    sim = simulation(
        planted.algorithm, planted.data, planted.participation, execution, wrapper=wrapper
    )
    checks.require(sim.layout.mesh is None, "execution", "use one device", execution.devices)
    return sim


def _after_host_steps(
    states: SimulationState, steps: list[HostStep], hyper: Hyper, keys: PRNGKey
) -> SimulationState:
    """Runs the host steps of every run."""
    states = jax.device_get(states)
    ended = []
    for i, key in enumerate(keys):
        state = jax.tree.map(lambda x, i=i: x[i], states)
        for step in steps:
            state = after_host_step(step, state, hyper, key)
        ended.append(state)
    return jax.tree.map(lambda *x: jnp.stack([jnp.asarray(v) for v in x]), *ended)


@checked
def audit(
    runs: AuditRuns,
    dp_delta: float,
    *,
    accountant: str = "rdp",
    confidence: float = 0.95,
    audited_run: int = 0,
) -> list[AuditResult]:
    """Computes the lower bounds that the runs prove, by every valid method.

    One run's canaries together are audited in one run; the first canary over all runs by a
    threshold on its score, at the δ given and at 0.1, and, if the ledger holds only Gaussian
    releases without sampling, as a Gaussian mechanism. The weights of rounds in a score are learned
    from other runs than those that are counted, if there are enough.

    Guarantee: for a correct program, some bound exceeds its claim in at most `1 − confidence` of
    all audits; the bounds share this error probability.

    Args:
      runs: what `run_audit` returned.
      dp_delta: δ in (0, 1).
      accountant: as for `Ledger.epsilon`.
      confidence: of all results together, in (0, 1).
      audited_run: which run is audited alone.

    Returns:
      The results.

    Raises:
      ValueError: if an argument is not valid.
    """
    checks.require(0 < confidence < 1, "confidence", "be in (0, 1)", confidence)
    checks.require(0 < dp_delta < 1, "dp_delta", "be in (0, 1)", dp_delta)
    num_runs, _, num_canaries = runs.seen.shape
    checks.require(
        0 <= audited_run < num_runs, "audited_run", f"be in [0, {num_runs})", audited_run
    )
    claims: list[tuple[list[Ledger], np.ndarray]] = []
    plans: list[tuple[str, float, int]] = []
    if num_canaries > 1:
        only = slice(audited_run, audited_run + 1)
        claims.append(_claims(runs, only, runs.planted.owners))
        plans.append(("one_run", dp_delta, 0))
    if num_runs >= _FEWEST_RUNS:
        claims.append(_claims(runs, slice(None), runs.planted.owners[:1]))
        last = len(claims) - 1
        plans += [("threshold", delta, last) for delta in sorted({dp_delta, _LARGE_DELTA})]
        if _is_gaussian(*claims[last]):
            plans.append(("gaussian", dp_delta, last))
    each = 1 - (1 - confidence) / max(len(plans), 1)
    results = []
    for method, delta, index in plans:
        ledgers, accounts = claims[index]
        claimed = max(float(v.epsilon(delta, accountant)[accounts].max()) for v in ledgers)
        if method == "one_run":
            bound, used = _one_run_bound(runs, audited_run, delta, each), (1, num_canaries)
        else:
            bound, used = _many_runs_bound(runs, method, delta, each), (num_runs, 1)
        results.append(
            AuditResult(
                runs.planted.unit, method, delta, bound.epsilon, claimed, bound.confidence, *used
            )
        )
    return results


def _direction(runs: AuditRuns, learned: np.ndarray) -> np.ndarray:
    """Learns the weights of rounds in a score from all canaries of some runs."""
    by_canary = np.moveaxis(runs.seen[learned], 1, 2)
    included = runs.is_included[learned]
    return auditing.linear_direction(by_canary[included], by_canary[~included])


def _one_run_bound(
    runs: AuditRuns, audited_run: int, dp_delta: float, confidence: float
) -> LowerBound:
    others = np.arange(len(runs.seen)) != audited_run
    scores = _direction(runs, others) @ runs.seen[audited_run]
    included = runs.is_included[audited_run]
    return auditing.one_run_bound(scores, included, dp_delta, confidence=confidence)


def _many_runs_bound(
    runs: AuditRuns, method: str, dp_delta: float, confidence: float
) -> LowerBound:
    bound = {"threshold": auditing.threshold_bound, "gaussian": auditing.gaussian_bound}[method]
    included = runs.is_included[:, 0]
    (inside,), (outside,) = np.nonzero(included), np.nonzero(~included)
    # The bound chooses its threshold on every second run of a kind, so it may learn from these too.
    learned = np.concatenate([inside[::2], outside[::2]])
    scores = runs.seen[:, :, 0] @ _direction(runs, learned)
    return bound(scores[inside], scores[outside], dp_delta, confidence=confidence)


def _claims(runs: AuditRuns, which: slice, owners: np.ndarray) -> tuple[list[Ledger], np.ndarray]:
    """Charges the runs that cost an owner most; returns their ledgers and the owners' accounts.

    Where rounds differ in stage, a run is charged if no other took part more often in every stage.
    """
    planted = runs.planted
    record = jax.tree.map(lambda x: x[which], runs.record)
    takes_part = (record.clients[..., None] == np.unique(owners)).any(axis=2)
    is_stage = np.eye(1 + int(record.stage.max()), dtype=int)[record.stage]
    times = np.einsum("nro,nrk->nok", takes_part, is_stage).reshape(len(takes_part), -1)
    rows, first = np.unique(times, axis=0, return_index=True)
    is_above = (rows[None] >= rows[:, None]).all(axis=2) & (rows[None] != rows[:, None]).any(axis=2)
    ledgers = []
    for run in first[~is_above.any(axis=1)]:
        accounting = PrivacyAccounting(runs.federation, planted.relation)
        accounting.charge(jax.tree.map(lambda x, run=run: x[run], record))
        ledgers.append(accounting.ledgers[planted.unit])
    return ledgers, owners if ledgers[0].num_units > 1 else np.zeros(1, int)


def _is_gaussian(ledgers: list[Ledger], accounts: np.ndarray) -> bool:
    events = [ledger.events(int(account)) for ledger in ledgers for account in accounts]
    parts = [part for event in events for part, _ in flatten(event)]
    return bool(parts) and all(isinstance(part, dp_accounting.GaussianDpEvent) for part in parts)
