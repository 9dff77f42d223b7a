"""Rounds without a server: each client sends its message to all others, and all add them up."""

import jax.numpy as jnp

from fedjax_dp.core import checks
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.engine.federation import Federation
from fedjax_dp.engine.layout import Layout
from fedjax_dp.engine.record import Fate
from fedjax_dp.engine.wrapping import SERVERLESS
from fedjax_dp.server.secure.aggregator import masks_of


@checked
def serverless(federation: Federation) -> Federation:
    """Runs a federation without a server.

    Each client holds what the server would, sends its message to all others, and combines the
    messages of all, its own included, so that masks of `secure.masked` cancel. All clients then
    have the same model, the one that a server would have made; messages and simulated times differ.
    `communication` counts n (n − 1) messages in a round of n clients, and none down. A client that
    missed a round, under a clock, begins with the newest model all the same: that another client
    sends it, and how long this takes, is not simulated.

    Guarantee: that of records, whose noise clients add themselves. Claims for clients are refused:
    without a trusted server no party may know the noise, and a client that receives the sum knows
    its own share of it. Unless messages are masked, each client sees those of all others; masks
    hold against `colluders` of their graph together, of whom each client is one.

    Args:
      federation: the federation to run without a server, with full participation.

    Returns:
      The federation. Its info of the server gains `num_messages`.

    Raises:
      ValueError: for noise of a server or in shares, masks that hold against no colluder, cohorts
        of some clients, steps on the host, or messages of a server at the end of a round.

    Source: Mugunthan and others 2020 (PrivacyFL), serverless mode; corrected: each client's own
    masked message is in its sum.
    """
    algorithm, cohorts = federation.algorithm, federation.cohorts
    name, num_clients = algorithm.name, federation.population.num_clients
    rule = (
        "add no noise for clients without a server: no party is trusted with the noise, and each "
        "client that receives the sum knows its own share"
    )
    noise = algorithm.aggregator.claim
    checks.require(noise is None, "aggregator", rule, type(noise).__name__)
    rule = (
        "add no noise in shares without a server: each client that has the sum knows its own share"
    )
    has_shares = federation.claims.min_participants > 0
    checks.require(not has_shares, "federation", rule, name)
    masks = masks_of(algorithm.aggregator)
    rule = "have a graph of masks for 1 colluder or more: each client receives all messages"
    fits = masks is None or masks.graph.colluders > 0
    checks.require(fits, "aggregator", rule, 0)
    is_full = cohorts.min_drawn >= num_clients
    rule = "be full without a server, as with full_participation(): all clients hold the model"
    checks.require(is_full, "participation", rule, cohorts.name)
    steps = algorithm.stages.host_steps
    rule = f"have no steps of a server between rounds, as {name} has"
    checks.require(not steps, "federation", rule, len(steps))
    clients = algorithm.client_state
    has_finish = clients is not None and clients.finish is not None
    rule = f"have no message of a server at the end of a round, as {name} has"
    checks.require(not has_finish, "federation", rule, name)

    def step(state, hyper, examples, cohort, key, layout=Layout()):
        after, record, info = federation.step(state, hyper, examples, cohort, key, layout)
        has_sent = (record.fate == Fate.CONTRIBUTED) | (record.fate == Fate.NOT_FINITE)
        receives = has_sent | (record.fate == Fate.DROPPED)
        num_messages = jnp.sum(has_sent) * jnp.maximum(jnp.sum(receives) - 1, 0)
        return after, record, info._replace(server={**info.server, "num_messages": num_messages})

    return federation.wrapped(SERVERLESS, step=step)
