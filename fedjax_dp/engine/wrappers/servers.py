"""Rounds of several servers, each with clients of its own, or without one."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing

from fedjax_dp.algorithms.base import SharedModel, one_stage
from fedjax_dp.core import checks, trees
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.core.keys import Purpose, fold
from fedjax_dp.core.ranges import Count
from fedjax_dp.core.trees import PyTree
from fedjax_dp.engine.federation import Federation, StateViews, check_masks
from fedjax_dp.engine.layout import Layout
from fedjax_dp.engine.record import Fate, MessageCounts, RoundInfo, RoundRecord
from fedjax_dp.engine.round import Unpublished
from fedjax_dp.engine.wrapping import SERVERLESS, SEVERAL_SERVERS
from fedjax_dp.server.secure.aggregator import masks_of


@checked
def several_servers(
    federation: Federation, *, servers: np.typing.ArrayLike, exchange_every: Count
) -> Federation:
    """Runs a federation with several servers, each of which has clients of its own.

    In a round each server sends its model to those of its clients that were drawn, and takes its
    step with their updates. At the end of every `exchange_every` rounds all servers continue from
    the mean of their models. The shared model is that mean; a client's own model is, or is made
    with, that of its server. A round takes as long as those of all servers together.

    Guarantee: that of the federation: a client's update is in the sum of one server, each server
    draws noise of its own, and an exchange reads released models alone. A private mean divides by
    the expected number of one server's clients, which its `expected_cohort_size` has to be.

    Args:
      federation: the federation to run, without wrappers; its algorithm has a shared model and one
        stage.
      servers: the server of each client, `[num_clients]`, whole numbers from 0, each with a client
        or more, and at least 2 of them.
      exchange_every: rounds from one exchange to the next, at least 1.

    Returns:
      The federation; counts in its info are of all servers, other figures are means over servers.

    Raises:
      ValueError: for a number out of its range, or a federation with wrappers, without a shared
        model, with several stages or steps on the host, with a message to all clients at the end of
        a round, with noise in shares of the clients, of which each server needs enough, or with
        masks for more clients than a server has, or where secret cohorts amplify privacy of
        clients: a server's round is lost if few of its clients are drawn, which shows.
    """
    of_client = _servers(servers, federation.population.num_clients)
    _check_federation(federation)
    most = min(federation.cohorts.participation.capacity, int(np.bincount(of_client).min()))
    check_masks(federation.algorithm, most)
    return _Several(federation, of_client, int(of_client.max()) + 1, exchange_every).wrapped()


def _servers(servers: Any, num_clients: int) -> np.ndarray:
    """Reads the server of each client."""
    ids = np.asarray(servers)
    rule = f"be a whole number from 0 for each of the {num_clients} clients"
    fits = ids.shape == (num_clients,) and ids.dtype.kind in "iu" and bool(np.all(ids >= 0))
    checks.require(fits, "servers", rule, servers)
    check_servers(servers)
    return ids.astype(np.int32)


def check_servers(servers: Any) -> None:
    """Refuses servers without a client, and a single one."""
    numbers = np.unique(servers)
    is_used = len(numbers) > 1 and np.array_equal(numbers, np.arange(len(numbers)))
    rule = "be 0, 1 and so on, each with a client or more"
    checks.require(is_used, "servers", rule, servers)


def check_shares(min_participants: int) -> None:
    """Refuses noise in shares."""
    rule = "add no noise in shares of clients: a server may sum fewer shares than the claim assumes"
    checks.require(min_participants == 0, "aggregator", rule, min_participants)


def _check_federation(federation: Federation) -> None:
    """Refuses what has no meaning with several servers."""
    algorithm = federation.algorithm
    name, stages, clients = algorithm.name, algorithm.stages, algorithm.client_state
    rule = "draw cohorts that depend on no server's state, unlike leaving()"
    checks.require(not federation.cohorts.reads_state, "federation", rule, name)
    has_shared = federation.shared is not None
    checks.require(has_shared, "federation", "have a shared model to exchange", name)
    is_one = stages.stage_of is one_stage and not stages.host_steps
    checks.require(is_one, "federation", "have one stage, and no steps on the host", name)
    is_own = clients is None or not federation.facts.is_finished_for_all
    rule = "have no message to all clients at the end of a round"
    checks.require(is_own, "federation", rule, name)
    check_shares(federation.claims.min_participants)
    rule = (
        "have no masks where secret cohorts amplify privacy of clients: whether a server's sum is "
        "lost would depend on who was drawn; the nearest valid cohorts are of full_participation() "
        "and cyclic()"
    )
    fits = masks_of(algorithm.aggregator) is None or not federation.amplifies
    checks.require(fits, "aggregator", rule, federation.cohorts.name)


class OtherServers(NamedTuple):
    """The wrapper's state: all servers but the first, which is that of the state."""

    server: PyTree
    aggregator: Unpublished


def _stacked(first: PyTree, others: PyTree) -> PyTree:
    """Puts the arrays of the first server before those of the others, `[servers, ...]`."""
    return jax.tree.map(
        lambda x, rest: jnp.concatenate([jnp.asarray(x)[None], rest]), first, others
    )


class _Several(NamedTuple):
    """The wrapper's functions."""

    federation: Federation
    of_client: np.ndarray
    num_servers: int
    exchange_every: int

    def wrapped(self) -> Federation:
        """Replaces the functions of the federation."""
        return self.federation.wrapped(
            SEVERAL_SERVERS,
            init=self.init,
            step=self.step,
            views=StateViews(SharedModel(self.shared, self.with_shared), self.personal),
        )

    def init(self, key: Any, layout: Layout = Layout()) -> Any:
        """Makes the first state, the same for all servers."""
        state = self.federation.init(key, layout)
        one = state.server, state.aggregator
        return self.joined(state, jax.tree.map(lambda x: jnp.stack([x] * self.num_servers), one))

    def servers(self, state: Any) -> PyTree:
        """Stacks the servers' states, `[servers, ...]`."""
        return _stacked(state.server, state.outer[0].server)

    def parts(self, state: Any) -> PyTree:
        """Stacks the states of servers and of their aggregators, `[servers, ...]`."""
        aggregators = _stacked(state.aggregator, state.outer[0].aggregator.values)
        return self.servers(state), aggregators

    def joined(self, state: Any, parts: PyTree) -> Any:
        """Puts stacked servers and aggregators into a state."""
        server, aggregator = trees.take(parts, 0)
        servers, aggregators = jax.tree.map(lambda x: x[1:], parts)
        others = OtherServers(servers, Unpublished(aggregators))
        return state._replace(server=server, aggregator=aggregator, outer=(others,))

    def of_server(self, state: Any, part: PyTree) -> Any:
        """Makes the state that one server has."""
        server, aggregator = part
        return state._replace(server=server, aggregator=aggregator, outer=())

    def shared(self, state: Any) -> PyTree:
        """Reads the mean of the servers' models."""
        return self.mean(state, self.servers(state))

    def mean(self, state: Any, servers: PyTree) -> PyTree:
        """Averages the models of stacked servers."""
        read = self.federation.shared
        assert read is not None
        models = jax.vmap(lambda server: read(state._replace(server=server, outer=())))(servers)
        return jax.tree.map(
            lambda x: jnp.mean(trees.at_least_float32(x), axis=0).astype(x.dtype), models
        )

    def with_shared(self, state: Any, params: PyTree) -> Any:
        """Gives all servers a model."""
        assert self.federation.views.shared is not None
        write = self.federation.views.shared.write

        def one(part: PyTree) -> PyTree:
            after = write(self.of_server(state, part), params)
            return after.server, after.aggregator

        return self.joined(state, jax.vmap(one)(self.parts(state)))

    def personal(self, state: Any, client: Any) -> PyTree:
        """Reads a client's own model, or that of its server."""
        part = trees.take(self.parts(state), jnp.asarray(self.of_client)[client.index])
        own, shared = self.of_server(state, part), self.federation.shared
        if self.federation.personal is not None:
            return self.federation.personal(own, client)
        assert shared is not None
        return shared(own)

    def step(self, state, hyper, examples, cohort, key, layout=Layout()):
        """Runs the round of one server after the other, and exchanges models when it is time."""
        server_of = jnp.asarray(self.of_client)[cohort.ids]

        def one(clients, server):
            part, index = server
            fate = jnp.where(server_of == index, cohort.fate, Fate.EMPTY).astype(cohort.fate.dtype)
            before = self.of_server(state, part)._replace(clients=clients)
            # No two servers share noise.
            own = fold(key, Purpose.SERVERS, index)
            own_cohort = cohort._replace(fate=fate)
            after, record, info = self.federation.step(
                before, hyper, examples, own_cohort, own, layout
            )
            return after.clients, ((after.server, after.aggregator), record, info)

        servers = self.parts(state), jnp.arange(self.num_servers)
        clients, (parts, records, infos) = jax.lax.scan(one, state.clients, servers)
        after = state._replace(clients=clients, round=state.round + 1)
        is_time = after.round % self.exchange_every == 0
        after = self.joined(after, parts)
        exchanged = self.parts(self.with_shared(after, self.mean(after, parts[0])))
        after = self.joined(after, trees.where(is_time, exchanged, parts))
        return after, _one_record(records, cohort), _one_info(infos)


def _one_record(records: RoundRecord, cohort: Any) -> RoundRecord:
    """Joins the records of servers, in each of which the slots of all others are empty."""
    first = trees.take(records, 0)
    return first._replace(
        clients=jnp.max(records.clients, axis=0),
        fate=jnp.max(records.fate, axis=0),
        overflow=cohort.overflow,
    )


def _one_info(infos: RoundInfo) -> RoundInfo:
    """Adds the counts of servers, and averages other figures."""

    def joined(path: Any, x: jax.Array) -> jax.Array:
        # Counts of examples and of clipped clients are floats.
        of, _, name = jax.tree_util.keystr(path, simple=True, separator=".").partition(".")
        is_named = name.startswith("num_") and of != "clients"
        is_count = is_named or jnp.issubdtype(x.dtype, jnp.integer)
        return jnp.sum(x, axis=0, dtype=x.dtype) if is_count else jnp.mean(x, axis=0)

    messages = infos.messages
    if messages is not None:
        is_counted, *counts = messages
        up, down = jax.tree.map(
            lambda x: jnp.sum(jnp.where(is_counted, x, 0), axis=0, dtype=x.dtype), tuple(counts)
        )
        messages = MessageCounts(jnp.any(is_counted, axis=0), up, down)
    figures = jax.tree.map_with_path(joined, infos._replace(messages=None))
    return figures._replace(messages=messages)


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
    check_noise(algorithm.aggregator.claim is not None, federation.claims.min_participants > 0)
    masks = masks_of(algorithm.aggregator)
    check_colluders(None if masks is None else masks.graph.colluders)
    is_full = cohorts.participation.min_drawn >= num_clients
    rule = "be full_participation(): without a server every client must hold the model"
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


def check_noise(is_for_clients: bool, in_shares: bool) -> None:
    """Refuses noise of a server, and noise in shares."""
    rule = (
        "add no noise for clients without a server: no party is trusted with the noise, and each "
        "client that receives the sum knows its own share"
    )
    checks.require(not is_for_clients, "aggregator", rule, "one with noise")
    rule = (
        "add no noise in shares without a server: each client that has the sum knows its own share"
    )
    checks.require(not in_shares, "federation", rule, "noise in shares")


def check_colluders(colluders: int | None) -> None:
    """Refuses a graph of masks that hides nothing from a client; None without masks."""
    rule = "have a graph of masks for 1 colluder or more: each client receives all messages"
    checks.require(colluders != 0, "aggregator", rule, colluders)
