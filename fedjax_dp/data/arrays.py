"""Checks of examples, client ids and partitions: numbers of types that JAX supports."""

import re
import unicodedata
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from fedjax_dp.core import checks
from fedjax_dp.data.disk_arrays import DiskArray, is_on_disk, parts

# Kinds of NumPy types that no model reads: objects, strings, times.
_NO_NUMBERS = "OSUmM"
# A decimal number, without what else Python reads, such as 1_000.
NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")
# Up to here float64 holds every integer.
EXACT = 2**53
# Up to here float32 does.
_EXACT_32 = 2**24
_SMALLEST, _LARGEST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)

# The rule for numbers in tables and arrays.
APART = (
    "hold no numbers above 2^24 that float32 makes equal, such as times or identifiers (subtract "
    "an origin, or round to 6 digits)"
)


def example_array(what: str, value: Any) -> Any:
    """Validates `[num_examples, ...]` numbers of a type that JAX supports, in native byte order."""
    if isinstance(value, np.ma.MaskedArray):
        num_hidden = int(np.ma.count_masked(value))
        rule = "have no masked entries (fill them, or leave their rows out)"
        checks.require(num_hidden == 0, what, rule, f"{num_hidden} of {value.size}")
        value = value.data
    try:
        is_array = isinstance(value, np.ndarray | jax.Array | DiskArray)
        array = value if is_array else np.asarray(value)
    except ValueError:
        checks.require(False, what, "have rows of one shape", "lists of unequal lengths")
    dtype = array.dtype
    is_number = getattr(dtype, "kind", "O") not in _NO_NUMBERS and dtype.type is not np.void
    rule = "hold numbers (np.unique(…, return_inverse=True) makes numbers of names)"
    checks.require(is_number, what, rule, str(dtype))
    rule = "hold real numbers (real and imaginary parts as two columns)"
    checks.require(dtype.kind != "c", what, rule, str(dtype))
    checks.require(len(array.shape) > 0, what, "have one row for each example", "a single number")
    is_known = dtype.kind != "f" or dtype.itemsize <= 8
    rule = "hold numbers of a type that JAX supports, such as float32"
    checks.require(is_known, what, rule, str(dtype))
    if is_on_disk(array):
        rule = "be in the byte order of this computer, as an array on disk, which is not converted"
        checks.require(dtype.isnative, what, rule, str(dtype))
        return array
    if not isinstance(array, np.ndarray):
        return array
    if not dtype.isnative:
        array = array.astype(dtype.newbyteorder("="))
    require_32_bits(what, array)
    return array


def in_words(examples: Mapping[str, Any]) -> str:
    """Describes the type and shape of one example of each array."""
    return ", ".join(f"{name}: {x.dtype} {list(x.shape[1:])}" for name, x in examples.items())


def require_32_bits(what: str, array: Any) -> None:
    """Requires 64-bit numbers to fit the 32 bits to which JAX converts them."""
    dtype = array.dtype
    is_wide = dtype.kind in "iuf" and dtype.itemsize >= 8
    if not is_wide or not array.size or jax.dtypes.canonicalize_dtype(dtype) == dtype:
        return
    ends = np.array([_ends(np.asarray(part)) for part in parts(array)])
    if dtype.kind == "f":
        most = float(np.max(np.abs(ends)))
        fits = most <= _LARGEST and (most == 0 or most >= _SMALLEST)
        rule = f"hold numbers that float32 can represent, {_SMALLEST:.2g} to {_LARGEST:.2g}"
        checks.require(fits, what, f"{rule} (rescale them)", most)
        if most > _EXACT_32:
            for part in parts(array):
                column, pair = _mixed_up(what, np.asarray(part))
                checks.require(pair is None, column, APART, pair)
        return
    low, high = int(ends.min()), int(ends.max())
    bounds = np.iinfo(np.uint32 if dtype.kind == "u" else np.int32)
    rule = f"hold integers that {bounds.dtype} can represent, {bounds.min} to {bounds.max}"
    wrong = low if low < bounds.min else high
    fits = bounds.min <= wrong <= bounds.max
    checks.require(fits, what, f"{rule} (rescale them, or code them)", wrong)


def equal_in_float32(values: np.ndarray) -> tuple[float, float] | None:
    """Finds two different numbers that float32 makes equal."""
    ordered = np.unique(values)
    again = np.flatnonzero(np.diff(ordered.astype(np.float32)) == 0)
    return (ordered[again[0]].item(), ordered[again[0] + 1].item()) if len(again) else None


def is_large(values: np.ndarray) -> np.ndarray:
    """Which numbers are above 2^24, where float32 does not hold every integer."""
    with np.errstate(invalid="ignore"):
        return (values > _EXACT_32) | (values < -_EXACT_32)


def _mixed_up(what: str, values: np.ndarray) -> tuple[str, tuple[float, float] | None]:
    """Finds a column of `[rows, ...]` with large numbers that float32 makes equal, and two."""
    rows = values.reshape(len(values), -1)
    for i in range(rows.shape[1]):
        large = rows[is_large(rows[:, i]), i]
        if _tells_apart(large) and (found := equal_in_float32(large)):
            return what + f", column {i}," * (rows.shape[1] > 1), found
    return what, None


def _tells_apart(large: np.ndarray) -> bool:
    """Whether large numbers are whole or close together, as are identifiers and times."""
    with np.errstate(invalid="ignore"):
        is_close = large.size > 0 and np.ptp(large) < np.max(np.abs(large)) / 16
        return bool(is_close or np.all(large == np.floor(large)))


def warn_of_large_integers(examples: Mapping[str, Any]) -> None:
    """Warns of integer inputs or targets in memory that float32 would make equal."""
    for name, array in examples.items():
        is_read = name.split("/")[0] in ("x", "y") and isinstance(array, np.ndarray)
        if not is_read or is_on_disk(array) or array.dtype.kind not in "iu" or not array.size:
            continue
        if array.dtype.itemsize >= 4 and is_large(np.array(_ends(array))).any():
            column, pair = _mixed_up(f"examples[{name!r}]", array)
            if pair is not None:
                warnings.warn(f"{column} should {APART}", stacklevel=3)


def _ends(part: np.ndarray) -> tuple[Any, Any]:
    """Returns the smallest and the largest number; of floats the finite ones and 0."""
    if part.dtype.kind != "f":
        return part.min(), part.max()
    is_finite = np.isfinite(part)
    return np.min(part, where=is_finite, initial=0.0), np.max(part, where=is_finite, initial=0.0)


def require_same_rows(
    what: str, part: Mapping[str, Any], other_what: str, other: Mapping[str, Any]
) -> None:
    """Requires two parts of the same data to hold inputs and targets of the same shapes."""
    names = sorted(name for name in other if name.split("/")[0] in ("x", "y"))
    rule = f"hold {', '.join(names)}, as the {other_what} part does"
    checks.require(set(names) <= set(part), f"the {what} part", rule, sorted(part))
    for name in names:
        shape, expected = np.shape(part[name])[1:], np.shape(other[name])[1:]
        rule = f"have rows of shape {expected}, as in the {other_what} part"
        checks.require(shape == expected, f"{name!r} of the {what} part", rule, shape)


def client_ids(what: str, ids: Any) -> np.ndarray:
    """Validates the client id of each example: sortable, of one kind, none missing."""
    if isinstance(ids, np.ma.MaskedArray):
        missing = np.flatnonzero(np.ma.getmaskarray(ids))
        _require_none_missing(what, missing)
        ids = ids.data
    # NumPy would turn everything in a mixed list into strings.
    values = np.asarray(ids) if hasattr(ids, "dtype") else np.asarray(ids, dtype=object)
    is_mixed = values.dtype == object
    rule = "be one column with the client of each example"
    checks.require(values.ndim == 1, what, rule, f"an array of shape {values.shape}")
    if is_mixed:
        _require_none_missing(what, np.flatnonzero([_is_missing(v) for v in values.tolist()]))
        kinds = sorted({_kind(v) for v in values.tolist()})
        checks.require(len(kinds) <= 1, what, "be all of one kind, such as text", kinds)
        # A NumPy type sorts faster; used if it loses nothing, such as a NUL at the end.
        packed = np.asarray(values.tolist())
        values = packed if packed.tolist() == values.tolist() else values
    if values.dtype.kind in "fcmM":
        _require_none_missing(what, np.flatnonzero(values != values))
    if values.dtype.kind == "f":
        is_finite = bool(np.all(np.isfinite(values)))
        checks.require(is_finite, what, "be finite, if they are numbers", "infinity")
        if np.all(values == np.rint(values)) and np.all(np.abs(values) < EXACT):
            # 1.0 names the client that 1 names.
            return values.astype(np.int64)
    return values


def require_different(what: str, names: Sequence[Any]) -> None:
    """Requires clients' names to differ, as numbers if all are: two would be two privacy units."""
    seen: set[str] = set()
    for name in map(str, names):
        plain = name if name.isascii() else unicodedata.normalize("NFC", name)
        rule = "be different, since clients of one name would be two units of privacy"
        checks.require(plain not in seen, what, rule, f"{name!r} twice")
        seen.add(plain)
    spellings: dict[float, str] = {}
    if not all(isinstance(name, str) and NUMBER.fullmatch(name) for name in names):
        return
    for name in names:
        other = spellings.setdefault(float(name), name)
        if other != name and abs(float(name)) < EXACT:
            rule = "write each number in one way"
            checks.require(False, what, rule, f"{other!r} and {name!r}")


def _require_none_missing(what: str, rows: np.ndarray) -> None:
    rule = "name the client of every example"
    missing = f"none in {len(rows)} rows, the first in row {rows[0]}" if len(rows) else ""
    checks.require(not len(rows), what, rule, missing)


def _is_missing(value: Any) -> bool:
    # NaN and the like do not equal themselves; pandas' missing value has no truth value.
    if value is None or type(value).__name__ in ("NAType", "NaTType"):
        return True
    is_itself = value == value
    return isinstance(is_itself, bool | np.bool_) and not is_itself


def _kind(value: Any) -> str:
    if isinstance(value, bool | np.bool_):
        return "bool"
    if isinstance(value, int | float | np.integer | np.floating):
        return "number"
    return "text" if isinstance(value, str) else type(value).__name__


def rows_of_clients(what: str, clients: Sequence[Any], size: int) -> list[np.ndarray]:
    """Validates the example indices in [0, size) of each client and returns them as int64."""
    checks.require(len(clients) > 0, what, "hold at least one client", len(clients))
    return [indices(f"{what}[{i}]", rows, size, "rows") for i, rows in enumerate(clients)]


def indices(what: str, value: Any, size: int, noun: str) -> np.ndarray:
    """Validates integers in [0, size) and returns them as int64; refuses masks and fractions."""
    try:
        array = np.asarray(value)
    except ValueError:  # Lists of several lengths.
        array = np.asarray(None)
    is_list = array.ndim == 1 and (array.dtype.kind in "iu" or array.size == 0)
    mask = " (np.flatnonzero of a mask)" if array.dtype == bool else ""
    shown = f"{array.dtype}{list(array.shape)}"
    checks.require(is_list, what, f"list {noun} as integers{mask}", shown)
    outside = (array < 0) | (array >= size)
    if np.any(outside):
        is_in = f"{'name rows' if noun == 'rows' else 'be'} in [0, {size})"
        checks.require(False, what, is_in, int(array[np.argmax(outside)]))
    return array.astype(np.int64)


def require_names(what: str, names: Iterable[Any]) -> None:
    """Requires names of arrays, of which stores make files: paths that stay below a folder."""
    for name in names:
        parts = name.split("/") if isinstance(name, str) else [""]
        is_plain = not {"", ".", ".."} & set(parts) and not set("\\\0\r\n") & set(name)
        rule = "be a name, or names joined by '/', without '.', '..', backslashes or line breaks"
        checks.require(is_plain, f"a name in {what}", rule, name)


def require_once(what: str, rows: np.ndarray) -> None:
    """Requires that one client holds no example twice."""
    is_once = len(np.unique(rows)) == len(rows)
    checks.require(is_once, what, "hold each row once", "a row twice")


def require_disjoint(what: str, clients: Sequence[np.ndarray], other_way: str = "") -> None:
    """Requires that no example is used twice, by one client or by two; names another way."""
    rows = np.concatenate([np.asarray(own) for own in clients])
    is_used = np.zeros(int(rows.max(initial=-1)) + 1, bool)
    is_used[rows] = True
    if np.count_nonzero(is_used) == len(rows):
        return
    owner = np.repeat(np.arange(len(clients)), [len(own) for own in clients])
    order = np.argsort(rows, kind="stable")
    again = np.flatnonzero(np.diff(rows[order]) == 0)
    first, second = (int(owner[order[again[0] + i]]) for i in (0, 1))
    conflict = f"row {int(rows[order[again[0]]])} in client {first} and in client {second}"
    rule = f"give every example to one client, once{other_way}"
    checks.require(False, what, rule, f"{conflict}, {len(again)} in all")
