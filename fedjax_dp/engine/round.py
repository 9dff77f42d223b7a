"""One round as a pure function: gather, train, reduce, noise, step, scatter."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from chex import PRNGKey
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from fedjax_dp.algorithms.base import FederatedAlgorithm
from fedjax_dp.clients.base import ClientData, LocalConfig
from fedjax_dp.core import sums, trees
from fedjax_dp.core.keys import Purpose, fold
from fedjax_dp.core.trees import PyTree
from fedjax_dp.engine.cohort import Cohort
from fedjax_dp.engine.reads import run_client

AXIS = "clients"
_CHUNK_AXIS = "chunk"


class SimulationState(NamedTuple):
    """All that a run carries from round to round.

    Attributes:
      server: the algorithm's server state.
      aggregator: the aggregator's state.
      rows: client state, `[num_clients, ...]`, or None.
      config: the numbers of local training, scalars or `[num_clients]`.
      round: rounds done, int32.
    """

    server: PyTree
    aggregator: PyTree
    rows: PyTree
    config: LocalConfig
    round: jax.Array


class RoundShape(NamedTuple):
    """The static choices of a compiled round.

    Attributes:
      limit: the largest client.
      chunk: clients that are computed side by side.
      mesh: devices that share the cohort, or None for one device.
    """

    limit: int
    chunk: int
    mesh: Mesh | None


class _Slots(NamedTuple):
    """What each slot ends with, `[slots, ...]`; the contribution only where it is stacked."""

    row: PyTree
    metrics: dict[str, jax.Array]
    contribution: PyTree
    is_finite: jax.Array


def run_round(
    algorithm: FederatedAlgorithm,
    shape: RoundShape,
    state: SimulationState,
    examples: PyTree,
    cohort: Cohort,
    key: PRNGKey,
) -> tuple[SimulationState, dict[str, jax.Array]]:
    """Runs one round on a cohort that is already drawn.

    Args:
      algorithm: what is run.
      shape: the static choices.
      state: the state before the round.
      examples: the store that the cohort's rows point into, each array `[num_examples, ...]`.
      cohort: who takes part.
      key: the root key of the run, the same every round.

    Returns:
      The state after the round and its info: scalars, `update_norm_quantiles`, `participants`
      (client indices, -1 in empty slots), and `stage` where the algorithm has kinds of round.
    """
    mesh = shape.mesh
    if mesh is None:
        total, slots = _run_slots(algorithm, shape, state, examples, cohort, key)
    else:
        num_devices = mesh.size

        def on_each_device(state, examples, cohort, key):
            total, slots = _run_slots(algorithm, shape, state, examples, cohort, key)
            return _over_devices(total, num_devices), slots

        by_slot = Cohort(P(AXIS), P(AXIS), P(AXIS), P(AXIS), P())  # type: ignore[arg-type]
        total, slots = jax.shard_map(
            on_each_device,
            mesh=mesh,
            in_specs=(P(), P(), by_slot, P()),
            out_specs=(P(), P(AXIS)),
            check_vma=False,
        )(state, examples, cohort, key)

    contributes = cohort.is_real & slots.is_finite
    is_stacked = algorithm.aggregator.is_stacked
    gathered = (slots.contribution, contributes) if is_stacked else sums.value(total)
    aggregator, aggregate, info = algorithm.aggregator.combine(
        state.aggregator, gathered, _round_key(key, state)
    )
    # Finite contributions may overflow in their sum; then nobody has contributed.
    is_finite = trees.is_finite(aggregate)
    aggregate = trees.where(is_finite, aggregate, trees.zeros_like(aggregate))
    contributes = contributes & is_finite
    server = algorithm.server_step(state.server, aggregate, state.round)
    rows = state.rows
    if rows is not None:
        num_clients = jax.tree.leaves(rows)[0].shape[0]
        target = jnp.where(contributes, cohort.ids, num_clients)
        rows = jax.tree.map(lambda a, r: a.at[target].set(r, mode="drop"), rows, slots.row)
    if algorithm.stages is not None:
        info = info | {"stage": jnp.int32(algorithm.stages.of(state.server, state.round))}
    after = SimulationState(server, aggregator, rows, state.config, state.round + 1)
    return after, info | _round_info(shape, cohort, contributes, slots.metrics)


def _round_key(key: PRNGKey, state: SimulationState) -> PRNGKey:
    return fold(key, Purpose.CENTRAL_NOISE, state.round)


def _run_slots(
    algorithm: FederatedAlgorithm,
    shape: RoundShape,
    state: SimulationState,
    examples: PyTree,
    cohort: Cohort,
    key: PRNGKey,
) -> tuple[PyTree, _Slots]:
    """Streams over the chunks of a cohort; returns the sum of contributions and what slots keep."""
    chunk, aggregator = shape.chunk, algorithm.aggregator
    round_key = _round_key(key, state)
    chunk_axis = _CHUNK_AXIS if chunk > 1 else None

    def one_client(index, start, size, is_real):
        client = ClientData(
            examples, start, size, index, shape.limit, chunk_axis, round=state.round
        )
        row = None if state.rows is None else trees.take(state.rows, index)
        client_key = fold(key, Purpose.CLIENT, state.round, index)
        config = state.config.row(index)
        output = run_client(algorithm, state.server, row, client, config, client_key)
        contribution = aggregator.contribute(state.aggregator, output.update, output.weight)
        contribution = jax.tree.map(trees.at_least_float32, contribution)
        # A finite update can still overflow on its way into the sum, and clipping hides one that is
        # not finite: both ends are looked at.
        is_finite = trees.is_finite((output.update, output.weight, output.row, contribution))
        contributes = is_real & is_finite
        contribution = trees.where(contributes, contribution, trees.zeros_like(contribution))
        if aggregator.encode is not None:
            own_key = fold(client_key, Purpose.ENCODING)
            message = aggregator.encode(state.aggregator, contribution, round_key, own_key)
            contribution = trees.where(is_real, message, trees.zeros_like(message))
        kept = trees.where(contributes, output.row, row)
        metrics = jax.tree.map(lambda m: jnp.where(contributes, m, 0), output.metrics)
        return contribution, kept, metrics, is_finite

    def chunk_of(c):
        part = jax.tree.map(
            lambda a: jax.lax.dynamic_slice_in_dim(a, c * chunk, chunk),
            (cohort.ids, cohort.starts, cohort.sizes, cohort.is_real),
        )
        if chunk > 1:
            return jax.vmap(one_client, axis_name=_CHUNK_AXIS)(*part)
        return jax.tree.map(lambda a: a[None], one_client(*(a[0] for a in part)))

    def body(c, carry):
        total, slots = carry
        contribution, row, metrics, is_finite = chunk_of(c)
        if not aggregator.is_stacked:
            total = sums.merge(total, sums.over_first_axis(contribution))
            contribution = None
        written = jax.tree.map(
            lambda all_slots, new: jax.lax.dynamic_update_slice_in_dim(
                all_slots, new, c * chunk, axis=0
            ),
            slots,
            _Slots(row, metrics, contribution, is_finite),
        )
        return total, written

    contribution, row, metrics, is_finite = jax.eval_shape(chunk_of, 0)
    num_slots = cohort.ids.shape[0]

    def empty(tree):
        return jax.tree.map(lambda s: jnp.zeros((num_slots, *s.shape[1:]), s.dtype), tree)

    if aggregator.is_stacked:
        total = None
    else:
        one = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape[1:], s.dtype), contribution)
        total, contribution = sums.zeros_like(one), None
    carry = total, empty(_Slots(row, metrics, contribution, is_finite))
    # The real slots come first: chunks behind them are never computed.
    num_chunks = -(-jnp.sum(cohort.is_real) // chunk)
    return jax.lax.fori_loop(0, num_chunks, body, carry)


def _over_devices(total: PyTree, num_devices: int) -> PyTree:
    """Adds up the running sums of all devices, in the same order on each."""
    everywhere = jax.lax.all_gather(total, AXIS)
    first, *others = (trees.take(everywhere, i) for i in range(num_devices))
    for other in others:
        first = sums.merge(first, other)
    return first


def _round_info(
    shape: RoundShape, cohort: Cohort, contributes: jax.Array, metrics: dict[str, jax.Array]
) -> dict[str, jax.Array]:
    num_participants = jnp.sum(cohort.is_real)
    info = {
        "participants": jnp.where(cohort.is_real, cohort.ids, -1),
        "num_participants": num_participants,
        "num_non_finite": num_participants - jnp.sum(contributes),
        "num_overflow": cohort.overflow,
    }
    if "num_read" in metrics:
        read = jnp.sum(metrics["num_read"].astype(jnp.float32))
        computed = metrics["num_computed"].astype(jnp.float32).reshape(-1, shape.chunk)
        computed = jnp.sum(jnp.max(computed, axis=1) * shape.chunk)
        info["train_loss"] = jnp.sum(metrics["loss_sum"]) / jnp.maximum(read, 1.0)
        info["clipped_share"] = jnp.sum(metrics["num_clipped"]) / jnp.maximum(read, 1.0)
        info["num_examples"] = read
        info["padding_share"] = jnp.where(computed > 0, 1.0 - read / computed, 0.0)
        info["num_record_overflow"] = jnp.sum(metrics["overflow"])
    if "update_norm" in metrics:
        norms = jnp.where(contributes, metrics["update_norm"], jnp.nan)
        quantiles = jnp.nanquantile(norms, jnp.array([0.0, 0.1, 0.5, 0.9, 1.0]))
        info["update_norm_quantiles"] = jnp.where(jnp.isnan(quantiles), 0.0, quantiles)
    for name in sorted(set(metrics) - _TRAINER_METRICS):
        mean = jnp.sum(metrics[name]) / jnp.maximum(jnp.sum(contributes), 1)
        info[f"client_{name}"] = mean
    return info


_TRAINER_METRICS = {
    "loss_sum",
    "num_read",
    "num_clipped",
    "num_computed",
    "overflow",
    "update_norm",
}
