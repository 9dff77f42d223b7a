"""Messages between server and nodes: arrays by name, and facts."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from fedjax_dp.core import checks, trees
from fedjax_dp.core.trees import PyTree

_ARRAYS, _FACTS = "arrays", "facts"
# The longest text that is one fact: digests and random names.
_LONGEST = 100


class Packet(NamedTuple):
    """The content of one message."""

    facts: Mapping[str, Any] = {}  # Numbers, texts, and lists of one of these, by name.
    arrays: Mapping[str, np.ndarray] = {}  # NumPy arrays by name.

    @property
    def num_bytes(self) -> int:
        """The bytes of the arrays."""
        return sum(array.nbytes for array in self.arrays.values())

    def record(self) -> RecordDict:
        """Builds the record that Flower sends."""
        # A new one for each message: Flower changes records that are shared.
        arrays = {name: Array(np.asarray(x, order="C")) for name, x in self.arrays.items()}
        facts = ConfigRecord({name: _plain(value) for name, value in self.facts.items()})
        return RecordDict({_FACTS: facts, _ARRAYS: ArrayRecord(arrays)})


def packet_of(record: RecordDict) -> Packet:
    """Reads a record."""
    names = sorted(record)
    rule = f"hold the records {_ARRAYS!r} and {_FACTS!r}"
    fits = [*record.array_records, *record.config_records] == [_ARRAYS, _FACTS]
    checks.require(fits and len(names) == 2, "a message", rule, names)
    arrays = {}
    for name, array in record.array_records[_ARRAYS].items():
        try:
            arrays[name] = array.numpy()
        except Exception as error:  # Of Flower and NumPy alone, which raise many for bad bytes.
            raise ValueError(f"array {name!r} must be readable, got {error!r}") from error
        # NumPy also reads archives of arrays.
        is_array = isinstance(arrays[name], np.ndarray)
        checks.require(is_array, f"array {name!r}", "be one array", type(arrays[name]).__name__)
    return Packet(dict(record.config_records[_FACTS]), arrays)


def counts_of(packet: Packet, name: str) -> list[int]:
    """Reads a fact that must be whole numbers from 0 and below 2^31, as `wholes_of`."""
    return wholes_of(packet.facts, name)


def wholes_of(
    facts: Mapping[str, Any],
    name: str,
    *,
    first: int = 0,
    end: int = checks.COUNT_LIMIT,
    count: int | None = None,
) -> list[int]:
    """Reads a fact that must be whole numbers from `first` to below `end`."""
    numbers = fact_of(facts, name)
    checks.require(isinstance(numbers, list), name, "be a list of whole numbers", numbers)
    rule = f"have {count} entries"
    checks.require(count is None or len(numbers) == count, name, rule, numbers)
    for each in numbers:
        _require_whole(name, each, first, end, "integers")
    return list(numbers)


def whole_of(
    facts: Mapping[str, Any], name: str, *, first: int = 0, end: int = checks.COUNT_LIMIT
) -> int:
    """Reads a fact that must be one whole number of a range, as `wholes_of`."""
    number = fact_of(facts, name)
    _require_whole(name, number, first, end, "an integer")
    return number


def _require_whole(name: str, value: Any, first: int, end: int, kind: str) -> None:
    # Not 1.0 or True, which equal a whole number.
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    fits = is_whole and first <= value < end
    checks.require(fits, name, f"be {kind} from {first} to {end - 1}", value)


def text_of(facts: Mapping[str, Any], name: str) -> str:
    """Reads a fact that must be a text, neither empty nor long."""
    text = fact_of(facts, name)
    fits = isinstance(text, str) and 0 < len(text) <= _LONGEST
    checks.require(fits, name, f"be a text of 1 to {_LONGEST} characters", text)
    return text


def fact_of(facts: Mapping[str, Any], name: str) -> Any:
    """Reads a fact, or refuses a message without it."""
    checks.require(name in facts, "a message", f"hold the fact {name!r}", sorted(facts))
    return facts[name]


def require_echo(facts: Mapping[str, Any], asked: Mapping[str, Any], names: Sequence[str]) -> None:
    """Requires that a reply repeats facts of its message, of the same types."""
    for name in names:
        found = facts.get(name)
        checks.require(repr(found) == repr(asked[name]), name, f"be {asked[name]!r}", found)


def _plain(value: Any) -> Any:
    """Converts NumPy numbers, which Flower refuses."""
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    return value


def arrays_of(tree: PyTree, prefix: str) -> dict[str, np.ndarray]:
    """Names the leaves of a tree, with keys and types that NumPy lacks as words: "own/1/kernel"."""
    names, leaves = trees.paths(tree), jax.tree.leaves(tree)
    return {f"{prefix}/{n}": _sendable(x) for n, x in zip(names, leaves, strict=True)}


def tree_of(arrays: Mapping[str, np.ndarray], prefix: str, like: PyTree) -> PyTree:
    """Rebuilds a tree from exactly the arrays of its shapes and types under a prefix."""
    leaves, structure = jax.tree.flatten(like)
    names = [f"{prefix}/{name}" for name in trees.paths(like)]
    found = {name for name in arrays if name.startswith(f"{prefix}/")}
    missing, extra = sorted(set(names) - found), sorted(found - set(names))
    checks.require(not missing, "a message", "hold the arrays of its plan", f"no {missing[:3]}")
    checks.require(not extra, "a message", "hold the arrays of its plan alone", extra[:3])
    rebuilt = [_as(arrays[n], x, n) for n, x in zip(names, leaves, strict=True)]
    return jax.tree.unflatten(structure, rebuilt)


def _is_key(x: Any) -> bool:
    return jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)


def _words(dtype: np.dtype) -> np.dtype | None:
    """Returns the type of words for a type that NumPy lacks, such as bfloat16."""
    return np.dtype(f"u{dtype.itemsize}") if dtype.kind == "V" else None


def _sendable(x: Any) -> np.ndarray:
    if isinstance(x, jax.Array) and _is_key(x):
        return np.asarray(jax.random.key_data(x))
    array = np.asarray(x)
    words = _words(array.dtype)
    return array if words is None else array.view(words)


def _as(array: np.ndarray, like: Any, name: str) -> Any:
    if _is_key(like):
        words = jax.eval_shape(jax.random.key_data, like)
        require_kind(array, words.shape, np.dtype(words.dtype), name)
        return jax.random.wrap_key_data(jnp.asarray(array))
    dtype = np.dtype(like.dtype)
    words = _words(dtype)
    require_kind(array, np.shape(like), words or dtype, name)
    return array if words is None else array.view(dtype)


def require_kind(array: np.ndarray, shape: Any, dtype: np.dtype, name: str) -> None:
    """Requires an array of a shape and a type."""
    fits = array.shape == tuple(shape) and array.dtype == dtype
    rule = f"be {dtype}{list(shape)}"
    checks.require(fits, f"array {name!r}", rule, f"{array.dtype}{list(array.shape)}")


class Distinct:
    """Trees for the clients of a node, of which equal ones are sent once."""

    def __init__(self, prefix: str) -> None:
        """Begins without trees; `prefix` is the first part of each name."""
        self._prefix, self.arrays = prefix, dict[str, np.ndarray]()
        self.places = list[int]()  # For each client the number of its tree.
        self._seen: list[dict[str, np.ndarray]] = []

    def add(self, tree: PyTree) -> None:
        """Adds the tree of the next client."""
        arrays = arrays_of(tree, "")
        for place, other in enumerate(self._seen):
            if all(np.array_equal(other[name], x) for name, x in arrays.items()):
                self.places.append(place)
                return
        self.places.append(len(self._seen))
        self.arrays |= {f"{self._prefix}/{len(self._seen)}{name}": x for name, x in arrays.items()}
        self._seen.append(arrays)
