"""Clients that are left out of the rounds that their own budgets do not allow."""

import dataclasses
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from annotated_types import Gt, Le, Lt
from numpy.typing import ArrayLike

from fedjax_dp.core import checks
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.core.made import changed
from fedjax_dp.data.sampling import Draw, Sampler
from fedjax_dp.engine.accounts.privacy_accounting import PrivacyAccounting
from fedjax_dp.engine.federation import Federation
from fedjax_dp.engine.layout import Layout
from fedjax_dp.engine.round import SimulationState
from fedjax_dp.engine.wrapping import WITHIN_BUDGETS
from fedjax_dp.privacy.claims import OnceClaim, RecordClaim
from fedjax_dp.server.secure.aggregator import masks_of

# More rounds than a run has.
_MOST = 2**30


class RoundsLeft(NamedTuple):
    """The wrapper's state: the rounds that each client may still take part in."""

    by_client: jax.Array  # `[num_clients]`, int32.


@checked
def within_budgets(
    federation: Federation,
    *,
    epsilon: Annotated[ArrayLike, Gt(0), Le(np.inf)],
    dp_delta: Annotated[ArrayLike, Gt(0), Lt(1)],
    relation: str = "zero_out",
    accountant: str = "rdp",
) -> Federation:
    """Leaves a client out of each round that would take its records past their budget.

    Without it a run ends before the first round that one of its clients cannot pay for. With it
    that client is left out, and the others go on. Noise can then be calibrated for the number of
    rounds that most clients are drawn in (`Participation.quantile_of_draws`), which is less noise
    than for all rounds of a run: `calibrate(..., num_rounds=...)`.

    Guarantee: ε of no client's records exceeds its budget, with the numbers that the federation has
    now. Who is left out follows from draws, sizes and numbers, and from no record and no released
    model, so that neighbouring data leave out the same clients. A client that is left out sends
    nothing, and pays nothing. Of clients, that of the aggregator without amplification: a round
    costs those that are in it one release, and sums are divided by the expected size of a cohort,
    as before.

    Args:
      federation: one that claims privacy for records, whose rounds all cost a client the same.
      epsilon: the budget of each client, above 0, or inf; one number or `[num_clients]`.
      dp_delta: δ in (0, 1), one number or `[num_clients]`.
      relation: as for `PrivacyAccounting`.
      accountant: as for `Ledger.epsilon`.

    Returns:
      The federation; its info of the server gains `num_out_of_budget`, the clients that have no
      round left. With other numbers a round may cost more: its ledger shows that, and
      `PrivacyAccounting.affordable_rounds` ends a run in time.

    Raises:
      ValueError: for budgets that allow no client a round, or a federation whose guarantee does not
        hold then: with privacy of clients and cohorts that are secret or charge all clients, noise
        in shares or masks, of which a round needs all, or rounds of different cost.
    """
    claims, num_clients = federation.claims, federation.population.num_clients
    check_claim(claims.record, federation.algorithm.name)
    participation = federation.cohorts.participation
    check_cohorts(participation.sampler.charges_all, claims.client is not None)
    rule = "add no noise in shares of clients, of which a round needs all"
    checks.require(claims.min_participants == 0, "aggregator", rule, claims.min_participants)
    check_masks(masks_of(federation.algorithm.aggregator) is not None)
    for name, value in (("epsilon", epsilon), ("dp_delta", dp_delta)):
        checks.one_for_each(name, value, num_clients)
    accounting = PrivacyAccounting(federation, relation, accountant)
    left = accounting.rounds_by_client(epsilon, dp_delta, limit=_MOST)
    has_records = federation.population.sizes > 0
    rule = "allow a client one round or more with this noise"
    checks.require(bool(np.any(left[has_records] > 0)), "epsilon", rule, epsilon)
    num_inside = len(jax.eval_shape(lambda: federation.init(jax.random.key(0))).outer)
    wrapper = _WithinBudgets(federation, left.astype(np.int32))
    cohorts = dataclasses.replace(
        federation.cohorts,
        sampling=changed(participation, sampler=_limited(participation.sampler, wrapper.left)),
        start=lambda state: state.outer[-1 - num_inside].by_client,
    )
    parts = {"init": wrapper.init, "cohorts": cohorts, "step": wrapper.step}
    return federation.wrapped(WITHIN_BUDGETS, **parts)


def check_claim(claim: RecordClaim | None, name: str) -> None:
    """Refuses rounds that cost a client different amounts, or nothing."""
    rule = "claim privacy for records, whose budgets leave a client out"
    checks.require(claim is not None, "federation", rule, name)
    assert claim is not None
    rule = "have rounds that all cost a client the same, of which its budget allows a number"
    checks.require(len(claim.events) == 1, "federation", rule, name)
    rule = "read records in more rounds than one, which a budget could not allow"
    checks.require(not isinstance(claim, OnceClaim), "federation", rule, name)


def check_cohorts(charges_all: bool, protects_clients: bool) -> None:
    """Refuses cohorts that a claim for clients keeps secret."""
    rule = (
        "charge those alone that are drawn, where privacy of clients is claimed: secret cohorts, "
        "and full participation, charge all clients for every round, and those that are left out "
        "would show who was drawn before; the nearest valid choices are cyclic(), min_separated() "
        "and without_amplification(...)"
    )
    fits = not (charges_all and protects_clients)
    checks.require(fits, "participation", rule, "one that charges all")


def check_masks(has_masks: bool) -> None:
    """Refuses masks, which lose a round that lacks the clients that are left out."""
    rule = "have no masks, with which a round is lost that lacks clients"
    checks.require(not has_masks, "aggregator", rule, "one with masks")


def is_spent(federation: Federation, state: SimulationState) -> bool:
    """Whether no client with records has a round left, by a wrapper that leaves them out."""
    found = [np.asarray(one.by_client) for one in state.outer if isinstance(one, RoundsLeft)]
    has_records = federation.population.sizes > 0
    return bool(found) and not np.any(found[0][has_records] > 0)


def _limited(sampler: Sampler, most: np.ndarray) -> Sampler:
    """Draws as another sampler does, without members that were drawn as often as they may be.

    Its state is how often each may still be drawn: earlier draws decide, and nothing is amplified.
    """

    def draw(left, key, step, size, batch_size, limit, capacity, any_of=None):
        state = sampler.init(limit)
        drawn = sampler.draw(state, key, step, size, batch_size, limit, capacity)[1]
        is_real = drawn.is_real & (left[drawn.indices] > 0)
        order = jnp.argsort(~is_real, stable=True)
        is_real = is_real[order]
        indices = jnp.where(is_real, drawn.indices[order], 0)
        taken = jnp.zeros_like(left).at[indices].add(is_real.astype(left.dtype))
        return left - taken, Draw(indices, is_real, drawn.overflow)

    return changed(
        sampler,
        name=f"{sampler.name}_limited",
        init=lambda limit: jnp.asarray(most, jnp.int32),
        draw=draw,
        analysis=lambda base, size, batch_size: base,
        charges_all=False,
        min_drawn=lambda size, batch_size: 0,
        law=None,
    )


class _WithinBudgets(NamedTuple):
    """The wrapper's functions; `left` has the rounds of each client at the start."""

    federation: Federation
    left: np.ndarray

    def init(self, key: Any, layout: Layout = Layout()) -> Any:
        """Makes the first state."""
        state = self.federation.init(key, layout)
        return state._replace(outer=(RoundsLeft(jnp.asarray(self.left)), *state.outer))

    def step(self, state, hyper, examples, cohort, key, layout=Layout()):
        """Runs the round, and takes it from those that are in its cohort."""
        left, *inside = state.outer
        inner = state._replace(outer=tuple(inside))
        after, record, info = self.federation.step(inner, hyper, examples, cohort, key, layout)
        # Slots without a client hold any index.
        drawn = jnp.where(cohort.is_drawn, cohort.ids, len(left.by_client))
        by_client = left.by_client.at[drawn].add(-1, mode="drop")
        metrics = {**info.server, "num_out_of_budget": jnp.sum(by_client <= 0, dtype=jnp.int32)}
        after = after._replace(outer=(RoundsLeft(by_client), *after.outer))
        return after, record, info._replace(server=metrics)
