"""A client inside a compiled round: its records, those of its round, or only its public data."""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, NoReturn, Protocol

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from fedjax_dp.core import checks
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.core.ranges import Count
from fedjax_dp.core.trees import PyTree
from fedjax_dp.privacy.claims import RecordEvent


@flax.struct.dataclass
class Exact:
    """A number that no noise protects: it may be reported, but not computed with.

    Under a claim for records the metrics of local training are such numbers. The engine follows
    them through the round: an update, a weight or a client state that is computed from one is
    refused.

    Attributes:
      value: the number.
    """

    value: jax.Array

    def _refuse(self, *_others: Any) -> NoReturn:
        rule = (
            "leave as metrics alone, in `training` or `info` of a ClientOutput: nothing else may "
            "be computed from them under a claim for records, as they carry no noise"
        )
        raise ValueError(f"exact metrics of local training must {rule}")

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _refuse
    __truediv__ = __rtruediv__ = __pow__ = __rpow__ = __neg__ = _refuse
    __lt__ = __le__ = __gt__ = __ge__ = __float__ = __jax_array__ = _refuse


class Opener(Protocol):
    """Gives the records of a client to a reader whose event is charged, and refuses others."""

    def __call__(self, reader: str, event: RecordEvent | None) -> "ClientData":
        """Returns the client with its records, or raises a ValueError."""


class _Chunked:
    """A client vmapped with the others of its chunk."""

    chunk_axis: str | None

    def widest(self, count: jax.Array) -> jax.Array:
        """Returns the largest of a count, such as passes of a loop, in the chunk."""
        return count if self.chunk_axis is None else jax.lax.pmax(count, self.chunk_axis)


@flax.struct.dataclass
class PublicClient(_Chunked):
    """The public data of a client: its index and its size, but no records.

    A part that declares to read no records gets this. So does an algorithm that claims privacy for
    records, with an `opener` for charged readers.

    Attributes:
      size: how many records it owns, int32; 0 for a client without data; treated as public.
      index: the client's index in the population, int32.
      limit: the largest size in the population; static.
      chunk_axis: the name of the vmapped client axis, or None if clients run one by one; static.
      round: rounds done before this one, int32.
      stage: the stage of the round, int32.
      opener: gives the records to charged readers; None if nothing may read them; static.
    """

    size: jax.Array
    index: jax.Array
    limit: int = flax.struct.field(pytree_node=False)
    chunk_axis: str | None = flax.struct.field(pytree_node=False, default=None)
    round: jax.typing.ArrayLike = 0
    stage: jax.typing.ArrayLike = 0
    opener: Opener | None = flax.struct.field(pytree_node=False, default=None)

    @property
    def examples(self) -> PyTree:
        """Raises a ValueError: this client has no records."""
        raise _unread("client.examples")

    def gather(self, indices: jax.Array) -> PyTree:
        """Raises a ValueError: this client has no records.

        Args:
          indices: as for `ClientData.gather`.

        Returns:
          Nothing.
        """
        raise _unread("client.gather")

    def public(self) -> "PublicClient":
        """Returns the client without its opener."""
        return self.replace(opener=None)  # type: ignore[attr-defined]

    def read_by(self, reader: str, event: RecordEvent | None) -> "ClientData":
        """Gives the records to a reader that states its event.

        Args:
          reader: what is about to read, for the error.
          event: `(size, config) -> DpEvent` of what it reveals, or None.

        Returns:
          The client with its records.

        Raises:
          ValueError: if the claim for records does not cover that.
        """
        if self.opener is None:
            raise _unread(reader)
        return self.opener(reader, event)


def _unread(what: str) -> ValueError:
    return ValueError(
        "client must be used for its public data alone, since no records may be read: its size, "
        f"its index and the round, got {what}"
    )


# A TPU stores the last axis of an array in pieces of so many numbers.
_LANES = 128
# Padding of a row up to this share of its numbers costs less than a copy of all rows.
_MOST_PADDING = 1 / 3


@flax.struct.dataclass
class Rows:
    """Examples as rows of bits, of which a TPU reads some without a copy of all.

    By itself it stores images with the axis of examples innermost, and copies all of them before
    batches are read. And where products round to bfloat16 it rounds all examples before it reads
    some, which it cannot do to bits.
    """

    bits: Any  # The examples, `[num_examples, numbers]`, padded; those of float32 as uint32.
    # The shape of one; static.
    example_shape: tuple[int, ...] = flax.struct.field(pytree_node=False)
    dtype: Any = flax.struct.field(pytree_node=False)  # The type of its numbers; static.

    @classmethod
    def of(cls, array: np.ndarray) -> "Rows | np.ndarray":
        """Arranges `[num_examples, ...]`; returns arrays that would be mostly padding unchanged."""
        width = int(np.prod(array.shape[1:]))
        missing = -width % _LANES
        if missing > _MOST_PADDING * width:
            return array
        dtype = jax.dtypes.canonicalize_dtype(array.dtype)
        bits = np.ascontiguousarray(array, dtype).reshape(len(array), width)
        bits = bits.view(np.uint32) if dtype == np.float32 else bits
        bits = np.pad(bits, ((0, 0), (0, missing))) if missing else bits
        return cls(bits, array.shape[1:], dtype)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array that these are."""
        return self.bits.shape[0], *self.example_shape

    def __getitem__(self, indices: jax.Array) -> jax.Array:
        """Reads examples, `[*indices.shape, ...]`."""
        rows = self.bits[indices][..., : int(np.prod(self.example_shape))]
        if rows.dtype != self.dtype:
            rows = jax.lax.bitcast_convert_type(rows, self.dtype)
        return rows.reshape(*indices.shape, *self.example_shape)


@flax.struct.dataclass
class ClientData(_Chunked):
    """One client's view of the flat store, inside a compiled round.

    Attributes:
      examples: the whole store, each array `[num_examples, ...]` or `Rows`.
      start: the client's first row, int32.
      size: as in `PublicClient`.
      index: as in `PublicClient`.
      limit: as in `PublicClient`.
      chunk_axis: as in `PublicClient`.
      round: as in `PublicClient`.
      stage: as in `PublicClient`.
      validation: a second split of the client's own data, or None if the population has none.
      batch_axis: the mesh axis of devices that divide each of its batches; None if one device
        trains it; static.
      common_size: the size of every client, if they have the same and the program may rely on it;
        None otherwise; static.
    """

    examples: PyTree
    start: jax.Array
    size: jax.Array
    index: jax.Array
    limit: int = flax.struct.field(pytree_node=False)
    chunk_axis: str | None = flax.struct.field(pytree_node=False, default=None)
    round: jax.typing.ArrayLike = 0
    stage: jax.typing.ArrayLike = 0
    validation: "ClientData | None" = None
    batch_axis: str | None = flax.struct.field(pytree_node=False, default=None)
    common_size: int | None = flax.struct.field(pytree_node=False, default=None)

    def gather(self, indices: jax.Array) -> PyTree:
        """Reads some of the client's examples.

        Args:
          indices: positions within the client, from 0 to `size - 1`; padding may hold anything.

        Returns:
          The examples, each array `[*indices.shape, ...]`.
        """
        return jax.tree.map(
            lambda a: a[jnp.clip(self.start + indices, 0, a.shape[0] - 1)],
            self.examples,
            is_leaf=lambda a: isinstance(a, Rows),
        )

    def public(self, opener: Opener | None = None) -> PublicClient:
        """Removes the records.

        Args:
          opener: gives the records to charged readers; None if nothing may read them.

        Returns:
          The public client.
        """
        return PublicClient(
            self.size, self.index, self.limit, self.chunk_axis, self.round, self.stage, opener
        )

    def read_by(self, reader: str, event: RecordEvent | None) -> "ClientData":
        """Returns the client, which holds its records.

        Args:
          reader: as for `PublicClient.read_by`.
          event: as for `PublicClient.read_by`.

        Returns:
          The client.
        """
        del reader, event
        return self


_replace = ClientData.replace  # type: ignore[attr-defined]


def _with_changes(self: ClientData, **changes: Any) -> ClientData:
    """Replaces fields; a client of another size is not of the common one.

    Args:
      **changes: the new values, by field.

    Returns:
      The client with them.
    """
    return _replace(self, **({"common_size": None} if "size" in changes else {}) | changes)


ClientData.replace = _with_changes  # type: ignore[attr-defined]


Form = Literal["cumulative", "disjoint"]


class Growth(NamedTuple):
    """How many of its records a client has in a round."""

    rows: np.ndarray  # Records that a round adds to each client, `[num_clients]`, int32.
    # "cumulative" if round r, from 0, reads the first `(r + 1)·rows` records of a client,
    # "disjoint" if it reads the `rows` records after those of earlier rounds.
    form: Form

    def view(self, client: ClientData) -> ClientData:
        """Restricts a client to its records of the round; none if it owns less than that needs."""
        rows, done = jnp.asarray(self.rows)[client.index], jnp.asarray(client.round, jnp.int32)
        # Before round 0 lie the records of another client.
        has_enough = (done >= 0) & (done < client.size // rows)
        first, size = (0, (done + 1) * rows) if self.form == "cumulative" else (done * rows, rows)
        first, size = (jnp.where(has_enough, number, 0) for number in (first, size))
        return client.replace(  # type: ignore[attr-defined]
            start=client.start + first, size=size
        )

    def smallest(self, is_active: jax.Array, round: jax.typing.ArrayLike) -> jax.Array:
        """Finds the size of the smallest active client in a round; of all if none is active."""
        rows = jnp.asarray(self.rows, jnp.float32)
        least = jnp.min(jnp.where(is_active | ~jnp.any(is_active), rows, jnp.inf))
        times = jnp.asarray(round, jnp.float32) + 1 if self.form == "cumulative" else 1.0
        return least * times


@checked
def growing(rows_per_round: Count | Sequence[Count], num_clients: Count, form: Form) -> Growth:
    """Lets the data of every client grow by `rows_per_round`, one number or one for each client.

    Records are taken in their order. A client without as many as a round needs has none in it.

    Source: Mugunthan and others 2020 (PrivacyFL); Mugunthan 2022, chapter 5, algorithms 2 and 3.
    """
    rows = rows_per_round if isinstance(rows_per_round, int) else list(rows_per_round)
    checks.one_for_each("rows_per_round", rows, num_clients)
    return Growth(np.broadcast_to(np.asarray(rows, np.int32), num_clients), form)
