"""Messages: arrays that are sent, whole or in part, and the bytes that they take."""

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple, get_args

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from fedjax_dp.core import checks, masks
from fedjax_dp.core.masks import Sparse, applied
from fedjax_dp.core.trees import PyTree

Encoding = Literal["smallest", "dense", "bitmap", "index", "values"]
ENCODINGS = get_args(Encoding)
# Encodings that can be sent; "values" leaves out the positions, "smallest" chooses.
_SENDABLE = ("dense", "bitmap", "index")
_INDEX_BYTES = 4


@flax.struct.dataclass
class Coded:
    """Integers that are sent with fewer bits than their type has.

    Attributes:
      values: arrays, or their shapes.
      bits: of each entry; static.
    """

    values: PyTree
    bits: int = flax.struct.field(pytree_node=False)


@flax.struct.dataclass
class Choices:
    """Several models, of which one is sent, or all that are offered.

    Their indices take no bytes.

    Attributes:
      values: arrays of all models, `[models, ...]`, or their shapes.
      num_offered: the number of models offered, the first ones, int32.
      sends_all: whether all of these are sent, bool.
      index: the one that is sent if not all are, int32.
    """

    values: PyTree
    num_offered: Any
    sends_all: Any
    index: Any

    def take(self, index: jax.typing.ArrayLike) -> PyTree:
        """Reads one model.

        Args:
          index: of the model, int32.

        Returns:
          Its arrays, zeros if it was not sent.
        """
        is_sent = jnp.where(self.sends_all, index < self.num_offered, index == self.index)
        return jax.tree.map(
            lambda x: jnp.where(is_sent, x[index], jnp.zeros_like(x[0])), self.values
        )

    def offered(self) -> PyTree:
        """Reads all models, `[models, ...]`; zeros for one that was not sent."""

        def one(x: jax.Array) -> jax.Array:
            is_sent = self.sends_all & (jnp.arange(len(x)) < self.num_offered)
            return jnp.where(is_sent.reshape(-1, *[1] * (x.ndim - 1)), x, jnp.zeros_like(x))

        return jax.tree.map(one, self.values)


@flax.struct.dataclass
class Known:
    """Arrays that take no bytes, because the receiver has them, such as the first model.

    Attributes:
      values: arrays, or their shapes.
    """

    values: PyTree


@flax.struct.dataclass
class SentIf:
    """A part of a message that is sent under a condition.

    Attributes:
      values: the part, of which zeros arrive where it is not sent.
      is_sent: the condition, bool, which may be traced.
    """

    values: PyTree
    is_sent: Any


def received(message: PyTree) -> PyTree:
    """Returns a message as it arrives: zeros for what was not sent, `Known` as arrays."""

    def one(x: Any) -> Any:
        if isinstance(x, Known):
            return x.values
        if isinstance(x, SentIf):
            values = received(x.values)
            return jax.tree.map(lambda v: jnp.where(x.is_sent, v, jnp.zeros_like(v)), values)
        if isinstance(x, Sparse):
            return Sparse(applied(x.mask, x.values), x.mask, x.is_known)
        return x

    return jax.tree.map(one, message, is_leaf=is_part)


class Exchange(NamedTuple):
    """Bytes that a protocol takes in a round besides broadcasts and updates, by type.

    `(rounds, num_notified, num_sent) -> bytes by type`, from all clients up to the server and down
    to them, of rounds with these indices and counts of notified clients and messages, `[rounds]`.
    """

    up: Callable[[np.ndarray, np.ndarray, np.ndarray], dict[str, np.ndarray]]
    down: Callable[[np.ndarray, np.ndarray, np.ndarray], dict[str, np.ndarray]]


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Form:
    """The form in which an update of floats leaves its client; static.

    Attributes:
      is_sparse: whether entries were set to 0 so that they need not be sent.
      dtype: the name of the type that entries were rounded to, None if none.
      part: the entry of an update that is a dict; all others are whole. None for the whole update.
    """

    is_sparse: bool = False
    dtype: str | None = None
    part: str | None = None

    def sparse(self) -> "Form":
        """Builds the form in which zeros are not sent."""
        return dataclasses.replace(self, is_sparse=True)

    def of_type(self, dtype: str | None) -> "Form":
        """Builds the form whose entries have another type.

        Args:
          dtype: its name; None for their own.

        Returns:
          The form.
        """
        return dataclasses.replace(self, dtype=dtype)

    def of(self, update: PyTree) -> PyTree:
        """Builds the message that an update is sent as.

        Args:
          update: arrays, or their shapes.

        Returns:
          The message.
        """
        if self.part is not None:
            own = dataclasses.replace(self, part=None)
            return {**update, self.part: own.of(update[self.part])}

        def one(x: Any) -> Any:
            if is_part(x) or not jnp.issubdtype(x.dtype, jnp.floating) or not jnp.ndim(x):
                return x
            narrow = x if self.dtype is None else x.astype(self.dtype)
            return Sparse(narrow, x != 0) if self.is_sparse else narrow

        return jax.tree.map(one, update, is_leaf=is_part)


class Tariff(NamedTuple):
    """The bytes of messages of one shape, by encoding and by type of number.

    A message takes `fixed` bytes, and each of its `counts`, up to its `most`, times its `rates`.
    """

    fixed: dict[str, dict[str, int]]
    rates: tuple[dict[str, dict[str, int]], ...]
    most: tuple[int, ...]

    def bytes_of(self, counts: np.ndarray, encoding: Encoding) -> dict[str, np.ndarray]:
        """Computes bytes by type, int64, of messages with these `counts`, `[..., counts]`."""
        checks.one_of("encoding", encoding, ENCODINGS)
        if encoding != "smallest":
            return self._bytes_of(counts, encoding)
        each = [self._bytes_of(counts, e) for e in _SENDABLE]
        shape = np.shape(counts)[:-1]
        totals = [sum(found.values(), np.zeros(shape, np.int64)) for found in each]
        best = np.argmin(totals, axis=0)
        names = sorted({name for found in each for name in found})
        nothing = np.zeros(shape, np.int64)
        return {
            name: np.choose(best, [found.get(name, nothing) for found in each]) for name in names
        }

    def _bytes_of(self, counts: np.ndarray, encoding: str) -> dict[str, np.ndarray]:
        counts = np.asarray(counts, np.int64)
        totals: dict[str, np.ndarray] = {}

        def add(name: str, num_bytes: np.ndarray) -> None:
            totals[name] = totals.get(name, np.int64(0)) + num_bytes

        for name, num_bytes in self.fixed[encoding].items():
            add(name, np.full(counts.shape[:-1], num_bytes, np.int64))
        for i, rate in enumerate(self.rates):
            for name, num_bytes in rate[encoding].items():
                add(name, counts[..., i] * num_bytes)
        return totals


def counts_of(message: PyTree) -> tuple[jax.Array, ...]:
    """Counts, int32: entries kept by masks, choices sent, and 1 or 0 for each `SentIf`."""
    counts = []
    for part in _parts(message):
        if isinstance(part, Choices):
            num_sent = jnp.where(part.sends_all, part.num_offered, 1)
            counts.append(jnp.asarray(num_sent, jnp.int32))
        elif isinstance(part, SentIf):
            is_sent = jnp.asarray(part.is_sent, jnp.int32)
            counts += [is_sent, *(is_sent * count for count in counts_of(part.values))]
        elif isinstance(part, _Masked):
            # A mask may be smaller than what it masks, as one bit for each model of several.
            each = math.prod(part.values.shape) // math.prod(part.mask.shape)
            counts.append(masks.count(part.mask) * each)
    return tuple(counts)


def tariff_of(message: PyTree) -> Tariff:
    """Computes the tariff of messages of one shape, its counts in the order of `counts_of`."""
    fixed: dict[str, dict[str, int]] = {name: {} for name in (*_SENDABLE, "values")}
    rates: list[dict[str, dict[str, int]]] = []
    most: list[int] = []

    def add(name: str, num_bytes: int, encodings: tuple[str, ...] = tuple(fixed)) -> None:
        for encoding in encodings:
            fixed[encoding][name] = fixed[encoding].get(name, 0) + num_bytes

    for part in _parts(message):
        if isinstance(part, Choices):
            models = jax.tree.leaves(part.values, is_leaf=is_part)
            is_plain = not any(map(is_part, models))
            checks.require(is_plain, "values", "hold no part that is masked", "Sparse")
            one = tariff_of([jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in models])
            rates.append(one.fixed)
            most.append(models[0].shape[0])
        elif isinstance(part, SentIf):
            whole = tariff_of(part.values)
            rates += [whole.fixed, *whole.rates]
            most += [1, *whole.most]
        elif isinstance(part, Coded):
            size = sum(math.prod(x.shape) for x in jax.tree.leaves(part.values))
            add(f"uint{part.bits}", -(-size * part.bits // 8))
        elif isinstance(part, _Masked):
            size, name = math.prod(part.values.shape), part.values.dtype.name
            width = part.values.dtype.itemsize
            add(name, size * width, ("dense",))
            kept, places = {name: width}, {name: width}
            if not part.is_known:
                add("bool", -(-math.prod(part.mask.shape) // 8), ("bitmap",))
                places["int32"] = places.get("int32", 0) + _INDEX_BYTES
            rates.append({"dense": {}, "bitmap": kept, "index": places, "values": kept})
            most.append(size)
        else:
            add(_name_of(part), math.prod(part.shape) * _width_of(part))
    return Tariff(fixed, tuple(rates), tuple(most))


class _Masked(NamedTuple):
    """One array with its mask, which the receiver may have already."""

    values: Any
    mask: Any
    is_known: bool


def is_part(x: Any) -> bool:
    """Checks whether a node of a message is a part in a special form, not a plain array."""
    return isinstance(x, Sparse | Coded | Choices | Known | SentIf)


def _parts(message: PyTree) -> Iterator[Any]:
    """Iterates over a message: arrays, masked arrays, and parts in other forms."""
    for part in jax.tree.leaves(message, is_leaf=is_part):
        if isinstance(part, Known):
            continue
        if not isinstance(part, Sparse):
            yield part if is_part(part) else _with_type(part)
            continue
        for pair in _pairs(part):
            if pair.mask is None:
                yield from map(_with_type, jax.tree.leaves(pair.values))
            else:
                yield pair._replace(values=_with_type(pair.values))


def _pairs(part: Sparse) -> list[_Masked]:
    """Lists the arrays of a part, each with its mask, None if it is whole."""
    pairs = jax.tree.map(
        lambda mask, values: _Masked(values, mask, part.is_known),
        part.mask,
        part.values,
        is_leaf=lambda x: x is None,
    )
    return jax.tree.leaves(pairs, is_leaf=lambda x: isinstance(x, _Masked))


def _with_type(x: Any) -> Any:
    return x if hasattr(x, "dtype") else np.asarray(x, jax.dtypes.result_type(x))


def _width_of(x: Any) -> int:
    # A key is sent as the words that it is made of.
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        key_words = jax.eval_shape(jax.random.key_data, x)
        return math.prod(key_words.shape[len(x.shape) :]) * key_words.dtype.itemsize
    return int(x.dtype.itemsize)


def _name_of(x: Any) -> str:
    is_key = jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
    return "uint32" if is_key else str(x.dtype.name)
