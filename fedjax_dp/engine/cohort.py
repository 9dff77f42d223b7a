"""Cohorts: the clients of a round, their slots and devices."""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple, get_args

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from chex import PRNGKey

from fedjax_dp.algorithms.base import FederatedAlgorithm, Hyper
from fedjax_dp.clients.client_data import ClientData, Rows
from fedjax_dp.core.backend import facts
from fedjax_dp.core.choices import choices
from fedjax_dp.core.keys import Purpose, fold
from fedjax_dp.core.trees import PyTree
from fedjax_dp.data.participants import Participation
from fedjax_dp.engine.layout import Layout
from fedjax_dp.engine.record import Fate


class Cohort(NamedTuple):
    """The clients of one round in a fixed number of slots, the real ones first on every device.

    Attributes:
      ids: client indices, `[slots]`, int32; arbitrary in empty slots.
      fate: the `Fate` of each slot as known before the round, `[slots]`, int8: empty, to
        contribute, or the reason why a drawn client will not contribute.
      overflow: the number of drawn clients without a slot, int32.
      num_split: the number of first slots whose clients all devices train together, int32.
    """

    ids: jax.Array
    fate: jax.Array
    overflow: jax.Array
    num_split: jax.typing.ArrayLike = 0

    @property
    def is_drawn(self) -> jax.Array:
        """The slots that hold a client, `[slots]`, bool."""
        return self.fate != Fate.EMPTY

    def of_process(self, layout: Layout) -> "Cohort":
        """Returns the slots of this process's devices.

        Args:
          layout: the devices.

        Returns:
          The same overflow, and these slots on the host.
        """

        def own(x: Any) -> Any:
            return np.asarray(x).reshape(layout.num_devices, -1)[layout.own_devices].reshape(-1)

        return self._replace(ids=own(self.ids), fate=own(self.fate))


@flax.struct.dataclass
class Examples:
    """The clients' examples, as a round reads them.

    Attributes:
      arrays: all examples, each array `[num_examples, ...]` or `Rows`; by slot, those of each
        device's slots, `[devices * rows, ...]`.
      starts: the first row of each client, or of each slot on its device, int32.
      sizes: the number of examples of each client or slot, int32.
      validation: a second split of the same clients' own data, or None.
      limit: the size of the largest client; static.
      is_by_slot: whether `starts` and `sizes` are `[slots]`, not `[num_clients]`; static.
    """

    arrays: PyTree
    starts: Any
    sizes: Any
    validation: "Examples | None" = None
    limit: int = flax.struct.field(pytree_node=False, default=1)
    is_by_slot: bool = flax.struct.field(pytree_node=False, default=False)

    def spans(self, ids: jax.Array, is_drawn: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Finds the rows of a cohort's examples.

        Args:
          ids: the client of each slot, `[slots]`.
          is_drawn: which slots hold a client, `[slots]`.

        Returns:
          First row and number of rows of each slot, `[slots]`; empty slots have no rows.
        """
        if self.is_by_slot:
            return self.starts, self.sizes
        return self.starts[ids], jnp.where(is_drawn, self.sizes[ids], 0)

    def stored(self, reads: float) -> "Examples":
        """Arranges examples on the host as a device reads them best.

        Args:
          reads: how often a call of a program reads each example, in the mean.

        Returns:
          The examples, as `Rows` where that saves a copy of them.
        """
        if reads >= choices(facts()).reads_of_a_copy:
            return self
        second = None if self.validation is None else self.validation.stored(reads)
        arrays = jax.tree.map(Rows.of, self.arrays)
        return dataclasses.replace(self, arrays=arrays, validation=second)

    def client(self, index: jax.typing.ArrayLike, stage: jax.typing.ArrayLike = 0) -> ClientData:
        """Selects one client outside a round.

        Args:
          index: the client's index; static or traced.
          stage: the stage that the client sees.

        Returns:
          The client, in round 0.
        """
        start, size = (jnp.asarray(x)[index] for x in (self.starts, self.sizes))
        own = jnp.asarray(index, jnp.int32)
        second = None if self.validation is None else self.validation.client(index, stage)
        return ClientData(self.arrays, start, size, own, self.limit, stage=stage, validation=second)


def draw_cohort(
    algorithm: FederatedAlgorithm,
    participation: Participation,
    layout: Layout,
    sizes: jax.Array,
    hyper: Hyper,
    round_index: jax.typing.ArrayLike,
    key: PRNGKey,
    start: Any = None,
) -> Cohort:
    """Draws the cohort of a round, from the sampler's state `start`, and places it in slots."""
    drawn = participation.draw(fold(key, Purpose.PARTICIPATION), round_index, start)
    facts = algorithm, participation, layout, sizes, hyper
    return placed(*facts, drawn.indices, drawn.is_real, drawn.overflow)


def placed(
    algorithm: FederatedAlgorithm,
    participation: Participation,
    layout: Layout,
    sizes: jax.Array,
    hyper: Hyper,
    ids: jax.Array,
    is_real: jax.Array,
    overflow: jax.Array,
    fates: jax.Array | None = None,
) -> Cohort:
    """Places clients in slots; they contribute unless they have other fates.

    Clients with similar numbers of steps get neighbouring slots, so that a chunk waits little for
    its slowest client. With several devices, the longest client goes to the device with the least
    work so far; a client with state goes to the device that holds it. The order changes no client's
    draws, which follow its index.
    """
    steps = algorithm.training.steps_of(ids, sizes, hyper.local)
    steps = jnp.where(is_real, steps, -1)
    order = jnp.argsort(-steps.astype(jnp.float32), stable=True)
    ids, is_real, steps = ids[order], is_real[order], steps[order]
    num_devices, is_owned = layout.num_devices, algorithm.client_state is not None
    per_device = layout.slots_per_device(participation, is_owned)
    num_split = layout.num_split(jnp.maximum(steps, 0))
    is_split = jnp.arange(len(ids)) < num_split
    is_alone = is_real & (layout.is_alone(steps) | is_split)
    # After the clients that are computed alone, slots stay empty up to the next chunk.
    available = per_device - (layout.chunk if layout.has_singles else 0)
    if num_devices == 1:
        slots = jnp.arange(len(ids))
        if layout.alone_above is not None:
            slots = slots + jnp.where(is_alone, 0, -jnp.sum(is_alone) % layout.chunk)
    else:
        if is_owned:
            device = ids // layout.clients_per_device(len(sizes))
            place = _place_among(jnp.where(is_real, device, num_devices), num_devices)
        else:
            # The load of clients that are split is the same on each device: the first has them.
            own_steps = jnp.where(is_split, 0, steps)
            device, place = _shared_out(own_steps, num_devices, available)
        if layout.has_singles:
            num_alone = jnp.zeros(num_devices + 1, jnp.int32).at[device].add(is_alone)
            place = place + jnp.where(is_alone, 0, -num_alone[device] % layout.chunk)
        slots = jnp.where(is_real, device * per_device + place, num_devices * per_device)
    empty = jnp.zeros(num_devices * per_device, jnp.int32)
    fate = jnp.where(is_real, Fate.CONTRIBUTED if fates is None else fates[order], Fate.EMPTY)
    return Cohort(
        empty.at[slots].set(ids, mode="drop"),
        empty.at[slots].set(fate, mode="drop").astype(jnp.int8),
        overflow,
        num_split,
    )


def _shared_out(steps: jax.Array, num_devices: int, per_device: int) -> tuple[jax.Array, jax.Array]:
    """Assigns clients to the device with the least work: `(device, place)`; Graham 1969, LPT."""

    def give(i, carry):
        load, count, device, place = carry
        chosen = jnp.argmin(jnp.where(count < per_device, load, jnp.inf))
        return (
            load.at[chosen].add(steps[i].astype(jnp.float32)),
            count.at[chosen].add(1),
            device.at[i].set(chosen.astype(jnp.int32)),
            place.at[i].set(count[chosen]),
        )

    zeros = jnp.zeros(len(steps), jnp.int32)
    start = jnp.zeros(num_devices), jnp.zeros(num_devices, jnp.int32), zeros, zeros
    num_real = jnp.sum(steps >= 0)
    return jax.lax.fori_loop(0, num_real, give, start)[2:]


def _place_among(group: jax.Array, num_groups: int) -> jax.Array:
    """Counts the earlier entries of the same group, for each entry."""
    order = jnp.argsort(group, stable=True)
    first = jnp.searchsorted(group[order], jnp.arange(num_groups + 1))
    rank = jnp.arange(len(group)) - first[group[order]]
    return jnp.zeros(len(group), jnp.int32).at[order].set(rank.astype(jnp.int32))


def typed(hyper: Hyper) -> Hyper:
    """Converts numbers to arrays of 32 bits, as a round is traced for; JAX arrays stay."""

    def of_32_bits(x):
        if isinstance(x, jax.Array):
            return x
        array = np.asarray(x)
        kind = {"f": np.float32, "i": np.int32, "u": np.int32}.get(array.dtype.kind)
        return array if kind is None else array.astype(kind)

    return jax.tree.map(of_32_bits, hyper)


def traced(algorithm: FederatedAlgorithm, hyper: Hyper) -> Hyper:
    """Converts typed numbers to float32 unless their range is one of whole numbers."""
    # Otherwise a number that starts as 1 and is swept to 0.5 would be traced twice.

    def real(numbers: Any, kinds: Mapping[str, Any]) -> Any:
        def one(name: str, value: Any) -> Any:
            kind = kinds.get(name)
            if isinstance(kind, Mapping):
                return real(value, kind) if value else value
            if value is None or kind is None or get_args(kind)[0] is int:
                return value
            return value.astype(np.float32)

        return {name: one(name, value) for name, value in numbers.items()}

    of_local = algorithm.training.ranges
    return hyper._replace(
        local=hyper.local._replace(**real(hyper.local._asdict(), of_local)),
        algorithm=real(hyper.algorithm, algorithm.numbers.ranges),
        aggregator=real(hyper.aggregator, algorithm.aggregator.ranges),
    )
