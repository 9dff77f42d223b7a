"""One round as a pure function: gather, train, reduce, add noise, step, scatter."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
from chex import PRNGKey
from jax.sharding import PartitionSpec as P

from fedjax_dp.algorithms.base import ClientOutput, FederatedAlgorithm, FinishForAll, Hyper, Round
from fedjax_dp.clients.base import TrainingMetrics
from fedjax_dp.clients.client_data import ClientData
from fedjax_dp.core import checks, messages, sums, trees
from fedjax_dp.core.keys import Purpose, fold
from fedjax_dp.core.products import computed_with
from fedjax_dp.core.trees import PyTree
from fedjax_dp.engine.cohort import Cohort, Examples
from fedjax_dp.engine.layout import AXIS, CHUNK_AXIS, Layout, require_on_each_device
from fedjax_dp.engine.record import (
    Fate,
    MessageCounts,
    RoundInfo,
    RoundRecord,
    digest_of,
    training_info,
)
from fedjax_dp.engine.sides import Closed, Received, client_side, server_side
from fedjax_dp.server.base import Aggregator, Close, Roster, Stacked


@flax.struct.dataclass
class ByClient:
    """The part of a wrapper's state that holds an entry for each client.

    Attributes:
      values: `[num_clients, ...]`, padded and placed as the clients' states are.
    """

    values: PyTree


@flax.struct.dataclass
class Unpublished:
    """The part of a wrapper's state that aggregators keep, such as noise of later rounds.

    Attributes:
      values: arrays, which the wrappers around it neither read nor change under a claim.
    """

    values: PyTree


class SimulationState(NamedTuple):
    """The state of a run between rounds.

    Attributes:
      server: the algorithm's server state.
      aggregator: the aggregator's state.
      clients: the clients' states, `[num_clients, ...]`, or None; with several devices padded to a
        multiple of them.
      round: rounds done, int32.
      outer: the states of wrappers, outermost first; arrays, some of them `ByClient` or
        `Unpublished`.
    """

    server: PyTree
    aggregator: PyTree
    clients: PyTree
    round: jax.Array
    outer: tuple[PyTree, ...] = ()


def innermost(state: Any, num_outer: int | None) -> Any:
    """Leaves out the states of wrappers but the innermost ones, of which there are `num_outer`."""
    first = 0 if num_outer is None else max(len(state.outer) - num_outer, 0)
    return state._replace(outer=state.outer[first:])


class _Slots(NamedTuple):
    """The inputs of each slot, `[slots]`."""

    ids: jax.Array
    starts: jax.Array
    sizes: jax.Array
    takes_part: jax.Array
    # The index of the client's state in the table of its device.
    places: jax.Array
    # Whether the client is trained alone, or by all devices.
    is_alone: jax.Array
    validation: tuple[jax.Array, jax.Array] | None


class _Outcome(NamedTuple):
    """The results of each slot, `[slots, ...]`; contribution and new state only where they wait."""

    own: PyTree
    metrics: TrainingMetrics | None
    info: Any
    has_info: jax.Array
    contribution: PyTree
    is_finite: jax.Array
    counts_up: tuple[jax.Array, ...]
    counts_down: tuple[jax.Array, ...]


class _Split(NamedTuple):
    """The slots whose clients all devices train together: the first `num` of some, `[slots]`."""

    slots: _Slots
    num: jax.Array


class _Context(NamedTuple):
    """The inputs that all slots of a round share."""

    state: SimulationState
    hyper: Hyper
    examples: Examples
    round: Round
    key: PRNGKey
    public_key: PRNGKey
    roster: Roster


def run_round(
    algorithm: FederatedAlgorithm,
    layout: Layout,
    state: SimulationState,
    hyper: Hyper,
    examples: Examples,
    cohort: Cohort,
    key: PRNGKey,
) -> tuple[SimulationState, RoundRecord, RoundInfo]:
    """Runs one round with a given cohort; states are `[slots, ...]` if examples are by slot."""
    rule = "be those of one round, as hyper.at(state.round) returns them"
    checks.require(not hyper.factors, "hyper", rule, f"factors of {sorted(hyper.factors)}")
    with computed_with(layout.arithmetic):
        stage = jnp.asarray(algorithm.stages.stage_of(state.server, hyper, state.round), jnp.int32)
        round = Round(state.round, stage)
        public_key = fold(key, Purpose.PUBLIC, state.round)
        roster = Roster(cohort.ids, cohort.is_drawn & (cohort.fate != Fate.UNANNOUNCED))
        context = _Context(state, hyper, examples, round, key, public_key, roster)
        slots = _slots_of(algorithm, layout, context, cohort)
        split = None
        if layout.splits_longest:
            require_on_each_device(algorithm, is_resident=not examples.is_by_slot)
            first = jax.tree.map(lambda a: a[: max(1, layout.num_devices - 1)], slots)
            split = _Split(first, jnp.asarray(cohort.num_split, jnp.int32))
        total, outcome, table = _over_devices(algorithm, layout, context, slots, split)

        contributes = slots.takes_part & outcome.is_finite

        def fates(contributes: jax.Array) -> jax.Array:
            fate = jnp.where(slots.takes_part & ~contributes, Fate.NOT_FINITE, cohort.fate)
            return fate.astype(jnp.int8)

        private_key = fold(key, Purpose.CENTRAL_NOISE, state.round)
        is_stacked = isinstance(algorithm.aggregator, Stacked)
        closed = server_side(
            algorithm,
            state.server,
            state.aggregator,
            hyper,
            outcome.contribution if is_stacked else sums.value(total),
            Close(roster, fates(contributes), public_key, private_key),
            round,
            fold(key, Purpose.SERVER_STEP, state.round),
        )
        server, contributes = closed.server, contributes & closed.is_finite
        clients = _finished(
            algorithm,
            layout,
            context,
            slots,
            table,
            outcome.own,
            contributes,
            server,
            closed.aggregate,
        )
        record = RoundRecord(
            clients=jnp.where(cohort.is_drawn, cohort.ids, -1),
            fate=fates(contributes),
            overflow=cohort.overflow,
            stage=stage,
            is_released=jnp.bool_(True),
            digest=digest_of(jax.tree.map(jnp.asarray, hyper)),
        )
        info = _info(layout, slots, outcome, contributes, closed)
        after = state._replace(
            server=server, aggregator=closed.aggregator, clients=clients, round=state.round + 1
        )
        return after, record, info


def _slots_of(
    algorithm: FederatedAlgorithm, layout: Layout, context: _Context, cohort: Cohort
) -> _Slots:
    examples, clients = context.examples, context.state.clients
    starts, sizes = examples.spans(cohort.ids, cohort.is_drawn)
    num_slots = len(cohort.ids)
    if examples.is_by_slot:
        places = jnp.arange(num_slots) % (num_slots // layout.num_devices)
    elif clients is None:
        places = cohort.ids
    else:
        places = cohort.ids % (len(jax.tree.leaves(clients)[0]) // layout.num_devices)
    validation = examples.validation
    local = context.hyper.local
    steps = jax.vmap(lambda i, size: algorithm.training.num_steps(size, local.row(i)))(
        cohort.ids, sizes
    )
    return _Slots(
        cohort.ids,
        starts,
        sizes,
        cohort.fate == Fate.CONTRIBUTED,
        places,
        cohort.is_drawn & (layout.is_alone(steps) | (jnp.arange(num_slots) < cohort.num_split)),
        None if validation is None else validation.spans(cohort.ids, cohort.is_drawn),
    )


def _waits(algorithm: FederatedAlgorithm) -> bool:
    """Checks whether client states are written at the end of the round, not with their chunk."""
    # A sum of finite contributions is finite, so that the round counts, unless the aggregator
    # itself makes something else of it; states are written all the same. An aggregate of a stack
    # may not be.
    return algorithm.client_state is not None and isinstance(algorithm.aggregator, Stacked)


def _over_devices(
    algorithm: FederatedAlgorithm,
    layout: Layout,
    context: _Context,
    slots: _Slots,
    split: _Split | None,
) -> tuple[PyTree, _Outcome, PyTree]:
    """Runs the slots of all devices; the sum is the same on each; waiting states are unwritten."""
    if layout.mesh is None:
        return _run_slots(algorithm, layout, context, slots)

    def on_each_device(context, clients, slots, split):
        own_part = context._replace(state=context.state._replace(clients=clients))
        total, outcome, table = _run_slots(algorithm, layout, own_part, slots, split)
        return sums.over_devices(total, AXIS), outcome, table

    shared = context._replace(state=context.state._replace(clients=None))
    is_by_slot = context.examples.is_by_slot
    of_shared = _Context._make(
        P(AXIS) if is_by_slot and name == "examples" else P() for name in _Context._fields
    )
    return jax.shard_map(
        on_each_device,
        mesh=layout.mesh,
        in_specs=(of_shared, P(AXIS), P(AXIS), P()),
        out_specs=(P(), P(AXIS), P(AXIS)),
        axis_names={AXIS},
        check_vma=False,
    )(shared, context.state.clients, slots, split)


def _run_slots(
    algorithm: FederatedAlgorithm,
    layout: Layout,
    context: _Context,
    slots: _Slots,
    split: _Split | None = None,
) -> tuple[PyTree, _Outcome, PyTree]:
    """Loops over the chunks of a cohort; returns the sum, the outcomes and the client states."""
    if layout.equal_work is not None:
        context = context._replace(hyper=layout.equal_work.fixed(context.hyper))
    chunk, is_stacked = layout.chunk, isinstance(algorithm.aggregator, Stacked)
    waits, num_slots = _waits(algorithm), len(slots.ids)
    chunk_of = partial(_chunk_outcome, algorithm, layout, context, slots=slots)

    @partial(jax.named_call, name="chunk")
    def body(width, c, carry, **of_chunk):
        total, outcome, table = carry
        is_whole = width == chunk and not of_chunk
        new = whole_chunk(table, c) if is_whole else chunk_of(table, c, width, **of_chunk)
        if not is_stacked:
            total = sums.merge(total, sums.over_first_axis(new.contribution))
            new = new._replace(contribution=None)
        if table is not None and not waits:
            table = _with_states(table, new.own, slots, c, width)
            new = new._replace(own=None)
        written = jax.tree.map(
            lambda all_slots, part: jax.lax.dynamic_update_slice_in_dim(
                all_slots, part, c * width, axis=0
            ),
            outcome,
            new,
        )
        return total, written, table

    table = context.state.clients
    # What a client does is traced once, for these shapes and for the loop.
    whole_chunk = jax.jit(partial(chunk_of, width=chunk), inline=True)
    shapes, total = jax.eval_shape(whole_chunk, table, jnp.int32(0)), None
    if not waits:
        shapes = shapes._replace(own=None)
    if not is_stacked:
        one = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape[1:], s.dtype), shapes)
        total, shapes = sums.zeros_like(one.contribution), shapes._replace(contribution=None)
    empty = jax.tree.map(lambda s: jnp.zeros((num_slots, *s.shape[1:]), s.dtype), shapes)
    return _over_chunks(layout, slots, split, body, (total, empty, table))


def _chunk_outcome(
    algorithm: FederatedAlgorithm,
    layout: Layout,
    context: _Context,
    table: PyTree,
    c: Any,
    width: int,
    slots: _Slots,
    batch_axis: str | None = None,
) -> _Outcome:
    """Runs the clients of the c-th chunk side by side, with client states of a table."""
    now = context._replace(state=context.state._replace(clients=table))
    part = jax.tree.map(lambda a: jax.lax.dynamic_slice_in_dim(a, c * width, width), slots)

    def run(slot):
        chunk_axis = CHUNK_AXIS if width > 1 else None
        client = _client(now, slot, layout, chunk_axis, batch_axis)
        return _run_slot(algorithm, now, slot, client)

    if width > 1:
        return jax.vmap(run, axis_name=CHUNK_AXIS)(part)
    return jax.tree.map(lambda a: a[None], run(jax.tree.map(lambda a: a[0], part)))


def _with_states(table: PyTree, own: PyTree, slots: _Slots, c: Any, width: int) -> PyTree:
    """Writes the client states of the c-th chunk; an empty slot has none."""
    places, is_drawn = (
        jax.lax.dynamic_slice_in_dim(a, c * width, width) for a in (slots.places, slots.takes_part)
    )
    target = jnp.where(is_drawn, places, len(jax.tree.leaves(table)[0]))
    return jax.tree.map(lambda a, r: a.at[target].set(r, mode="drop"), table, own)


_Carry = tuple[PyTree, _Outcome, PyTree]  # The sum, the outcomes and the client states.


def _over_chunks(
    layout: Layout, slots: _Slots, split: _Split | None, body: Callable[..., _Carry], carry: _Carry
) -> _Carry:
    """Runs `body(width, c, carry)`: clients that are split, those that run alone, then chunks."""
    chunk, num_slots = layout.chunk, len(slots.ids)
    # Participants come first: chunks after the last of them are never computed.
    after_last = jnp.max(jnp.where(slots.takes_part, jnp.arange(1, num_slots + 1), 0))
    first, num_done = jnp.int32(0), jnp.int32(0)
    if split is not None:
        # They are of the first device: elsewhere they contribute nothing, and the entries that they
        # leave are those of empty slots, or written again.
        is_own = jax.lax.axis_index(AXIS) == 0
        of_all = split.slots._replace(takes_part=split.slots.takes_part & is_own)
        together = partial(body, 1, slots=of_all, batch_axis=AXIS)
        carry = jax.lax.fori_loop(0, split.num, together, carry)
        num_done = jnp.where(is_own, split.num, 0)
    if layout.has_singles:
        after_alone = jnp.max(jnp.where(slots.is_alone, jnp.arange(1, num_slots + 1), 0))
        if layout.alone_above is not None:
            carry = jax.lax.fori_loop(num_done, after_alone, partial(body, 1), carry)
        first = -(-after_alone // chunk)
    elif layout.fills_chunks(num_slots):
        if num_slots == chunk:
            return body(chunk, jnp.int32(0), carry)
        return jax.lax.fori_loop(0, num_slots // chunk, partial(body, chunk), carry)
    return jax.lax.fori_loop(first, -(-after_last // chunk), partial(body, chunk), carry)


def _run_slot(
    algorithm: FederatedAlgorithm, context: _Context, slot: _Slots, client: ClientData
) -> _Outcome:
    """Runs one client and masks its contribution."""
    state, hyper, aggregator = context.state, context.hyper, algorithm.aggregator
    own = None if state.clients is None else trees.take(state.clients, slot.places)
    key = fold(context.key, Purpose.CLIENT, context.round.index, slot.ids)
    down = algorithm.message_to(state.server, own, client)
    received = Received(
        messages.received(down),
        aggregator.broadcast(state.aggregator),
        hyper.of_client(slot.ids),
        context.public_key,
        context.roster,
    )
    work = client_side(algorithm, received, own, client, key, slot.takes_part)
    output, contributes = work.output, slot.takes_part & work.is_finite
    training = jax.tree.map(lambda m: jnp.where(contributes, m, 0), output.training)
    # A client of weight 0, such as one without data, has no info.
    has_info = contributes & (output.weight > 0)
    info = jax.tree.map(lambda m: jnp.where(has_info, m, 0), dict(output.info))
    kept = trees.where(contributes, output.state, own)
    up = messages.counts_of(message_up(aggregator, output))
    counts_down = messages.counts_of(down)
    return _Outcome(kept, training, info, has_info, work.sent, work.is_finite, up, counts_down)


def message_up(aggregator: Aggregator, output: ClientOutput) -> PyTree:
    """Makes the message that a client sends; the weight is sent only with the update."""
    # What an aggregator encodes has a form of its own.
    update = output.message if aggregator.encode is None else output.update
    if isinstance(update, messages.Known):
        return ()
    if isinstance(update, messages.SentIf):
        whole = aggregator.message(update.values, output.weight)
        return messages.SentIf(whole, update.is_sent)
    return aggregator.message(update, output.weight)


def _client(
    context: _Context, slot: _Slots, layout: Layout, chunk_axis: str | None, batch_axis: str | None
) -> ClientData:
    def view(examples: Examples, start: jax.Array, size: jax.Array, **more: Any) -> ClientData:
        return ClientData(
            examples.arrays,
            start,
            size,
            slot.ids,
            examples.limit,
            chunk_axis,
            context.round.index,
            context.round.stage,
            batch_axis=batch_axis,
            **more,
        )

    second = None
    if slot.validation is not None:
        assert context.examples.validation is not None
        second = view(context.examples.validation, *slot.validation)
    common_size = None if layout.equal_work is None else layout.equal_work.size
    return view(
        context.examples, slot.starts, slot.sizes, validation=second, common_size=common_size
    )


def _finished(
    algorithm: FederatedAlgorithm,
    layout: Layout,
    context: _Context,
    slots: _Slots,
    table: PyTree,
    own: PyTree,
    contributes: jax.Array,
    server: PyTree,
    aggregate: PyTree,
) -> PyTree:
    """Writes client states that waited to the table, then applies the round's last message."""
    states = algorithm.client_state
    if states is None or (own is None and states.finish is None):
        return table
    finish = states.finish

    def rows(table: PyTree, slots: _Slots, contributes: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the clients to finish and their rows, one after the last for none."""
        num_rows = len(jax.tree.leaves(table)[0])
        if not isinstance(finish, FinishForAll):
            return slots.ids, jnp.where(contributes, slots.places, num_rows)
        if context.examples.is_by_slot:
            return slots.ids, slots.places
        first = 0 if layout.mesh is None else jax.lax.axis_index(AXIS) * num_rows
        return first + jnp.arange(num_rows), jnp.arange(num_rows)

    def written(table, own, slots, contributes):
        if own is not None:
            places = jnp.where(contributes, slots.places, len(jax.tree.leaves(table)[0]))
            table = jax.tree.map(lambda a, r: a.at[places].set(r, mode="drop"), table, own)
        if finish is None:
            return table
        message = messages.received(finish.broadcast(server, aggregate))

        def one(own, index):
            return finish.apply(message, own, context.hyper.of_client(index))

        return _in_place(one, table, *rows(table, slots, contributes), layout.chunk)

    if layout.mesh is not None:
        written = jax.shard_map(
            written,
            mesh=layout.mesh,
            in_specs=(P(AXIS),) * 4,
            out_specs=P(AXIS),
            axis_names={AXIS},
            check_vma=False,
        )
    return written(table, own, slots, contributes)


def _in_place(
    function: Callable[[PyTree, jax.Array], PyTree],
    table: PyTree,
    ids: jax.Array,
    places: jax.Array,
    chunk: int,
) -> PyTree:
    """Replaces rows of a table by `(row, id) -> row`, chunk by chunk; no row outside of it."""
    num_rows = len(jax.tree.leaves(table)[0])
    count = -(-len(places) // chunk)
    missing = (0, count * chunk - len(places))
    ids, places = jnp.pad(ids, missing), jnp.pad(places, missing, constant_values=num_rows)

    def body(c: Any, table: PyTree) -> PyTree:
        index, place = (jax.lax.dynamic_slice_in_dim(a, c * chunk, chunk) for a in (ids, places))
        new = jax.vmap(function)(trees.take(table, place), index)
        return jax.tree.map(lambda a, r: a.at[place].set(r, mode="drop"), table, new)

    return jax.lax.fori_loop(0, count, body, table)


def _info(
    layout: Layout, slots: _Slots, outcome: _Outcome, contributes: jax.Array, closed: Closed
) -> RoundInfo:
    training = None
    if outcome.metrics is not None:
        is_lost = jnp.any(slots.takes_part & ~outcome.is_finite)
        training = training_info(
            outcome.metrics, contributes, layout.chunk, slots.is_alone, is_lost
        )
    count = jnp.maximum(jnp.sum(outcome.has_info), 1)
    of_clients = {
        name: trees.ratio(jnp.sum(value, axis=0), count) for name, value in outcome.info.items()
    }
    counts = None
    if outcome.counts_up or outcome.counts_down:
        counts = MessageCounts(slots.takes_part, outcome.counts_up, outcome.counts_down)
    return RoundInfo(
        training, of_clients, dict(closed.of_aggregator), dict(closed.of_server), counts
    )
