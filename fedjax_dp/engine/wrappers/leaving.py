"""Clients that leave a run for good once their model agrees with the shared one."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_dp.algorithms.base import Averaged
from fedjax_dp.core import checks, trees
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.core.ranges import Count, Positive
from fedjax_dp.engine.federation import Federation
from fedjax_dp.engine.layout import Layout
from fedjax_dp.engine.record import Fate
from fedjax_dp.engine.wrapping import LEAVING
from fedjax_dp.server.secure.aggregator import masks_of

# A number of `Hyper.algorithm`, beside those of the algorithm itself.
_TOLERANCE = "leaving_tolerance"


# The algorithms of the package whose clients send models of their own.
METHODS = ("warm_start_averaging", "retrained_averaging")


@checked
def leaving(
    federation: Federation, *, tolerance: Positive = 10.0, min_active: Count = 2
) -> Federation:
    """Lets clients leave whose model agrees with the shared one in every parameter.

    After a round a client leaves if no parameter of the model that it sent is `tolerance` or more
    from that of the new mean. From the next round on it is not notified when it is drawn, its
    fate being `UNANNOUNCED`, and counts neither in the mean, nor among the active clients, nor for
    the smallest of them. With fewer than `min_active` clients left no client is notified any more,
    and nothing changes. Under masks a client compares the models itself, and pairs with one that
    has left share none.

    Guarantee: that of the federation: the decision to leave follows from the models that were sent,
    with their noise, and from their mean. A client that has left is charged as if it had stayed:
    when it leaves depends on its records, and with others it might have taken part in all rounds.

    Args:
      federation: of `warm_start_averaging` or `retrained_averaging`, and not with noise in shares,
        which does not protect a client's model by itself.
      tolerance: the largest difference, above 0, in units of the parameters. The source has 10,
        with which nearly every client leaves after its first round.
      min_active: how many clients a round needs, at least 1 and at most all. A graph of masks is
        for no more than the clients that each cohort then has.

    Returns:
      The federation; its info of the server gains `num_active`, the clients that have not left
      after the round. `tolerance` is a number of `hyper.algorithm`, as `leaving_tolerance`.

    Raises:
      ValueError: for a number out of its range, a federation whose clients send no models of their
        own, or masks whose rounds would be lost before fewer than `min_active` clients are left.

    Source: Mugunthan and others 2020 (PrivacyFL), configuration parameter CLIENT_DROPOUT.
    """
    states = federation.algorithm.client_state
    models = None if states is None else states.iterate
    check_method(isinstance(models, Averaged), federation.algorithm.name)
    assert isinstance(models, Averaged)
    check_noise(models.sent is None)
    num_clients = federation.population.num_clients
    check_min_active(min_active, num_clients)
    masks = masks_of(federation.algorithm.aggregator)
    if masks is not None:
        fewest = federation.cohorts.participation.min_drawn - (num_clients - min_active)
        needed = masks.graph.num_clients
        rule = (
            f"have a graph of masks for {fewest} or fewer, the clients of a round with min_active "
            f"= {min_active} left: masked sums of fewer than the graph's are lost"
        )
        checks.require(needed <= fewest, "aggregator", rule, f"one for {needed}")
    wrapper = _Leaving(federation, models, min_active)
    cohorts = federation.cohorts.with_fates(wrapper.fates, reads_state=True)
    wrapped = federation.wrapped(LEAVING, cohorts=cohorts, step=wrapper.step)
    return wrapped.with_numbers({_TOLERANCE: tolerance}, {_TOLERANCE: Positive})


def check_method(averages_models: bool, name: str) -> None:
    """Refuses an algorithm whose clients send no models of their own."""
    rule = f"average whole models, as {' and '.join(METHODS)} do"
    checks.require(averages_models, "federation", rule, name)


def check_noise(in_shares: bool) -> None:
    """Refuses noise that protects no client's model by itself."""
    rule = "have noise that protects each client's model by itself, which decides whether it leaves"
    checks.require(not in_shares, "federation", rule, "noise in shares")


def check_min_active(min_active: int, num_clients: int) -> None:
    """Refuses rounds that need more clients than there are."""
    rule = f"be at most {num_clients}, the number of clients"
    checks.require(min_active <= num_clients, "min_active", rule, min_active)


class _Leaving(NamedTuple):
    """The wrapper's functions; who is active is in the server's state."""

    federation: Federation
    models: Averaged
    min_active: int

    def fates(self, state: Any, hyper: Any, cohort: Any) -> Any:
        """Does not notify those that have left."""
        is_active = self.models.active(state.server)
        takes_part = is_active[cohort.ids] & (jnp.sum(is_active) >= self.min_active)
        return jnp.where(takes_part, cohort.fate, Fate.UNANNOUNCED)

    def step(self, state, hyper, examples, cohort, key, layout=Layout()):
        """Runs the round, and marks those that leave after it."""
        after, record, info = self.federation.step(state, hyper, examples, cohort, key, layout)
        own = after.clients
        if not examples.is_by_slot:
            own = trees.take(own, cohort.ids)
        models = self.models
        assert models.sent is not None
        took_part = (record.fate == Fate.CONTRIBUTED) & (models.sent_in(own) == state.round)
        has_mean = models.mean_in(after.server) == state.round
        tolerance = hyper.algorithm[_TOLERANCE]

        def is_near(sent: jax.Array, mean: jax.Array) -> jax.Array:
            axes = tuple(range(1, sent.ndim))
            return jnp.all(jnp.abs(sent - mean) < tolerance, axis=axes)

        near = jax.tree.map(is_near, models.sent(own), models.mean(after.server))
        leaves = took_part & has_mean & jnp.all(jnp.stack(jax.tree.leaves(near)), axis=0)
        was_active = models.active(after.server)
        # Slots without a client hold any index.
        target = jnp.where(leaves, cohort.ids, len(was_active))
        is_active = was_active.at[target].set(False, mode="drop")
        after = after._replace(server=models.with_active(after.server, is_active))
        metrics = {**info.server, "num_active": jnp.sum(is_active)}
        return after, record, info._replace(server=metrics)
