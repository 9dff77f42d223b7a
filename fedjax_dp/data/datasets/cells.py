"""Tables in CSV, Parquet and Arrow files as columns of numbers and strings."""

import functools
import os
import pathlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from fedjax_dp.core import checks, files
from fedjax_dp.core.packages import MissingPackageError
from fedjax_dp.core.ranges import LARGEST, SMALLEST, fits_float32

# How CSV files write a missing value.
MISSING_VALUES = ("", "NA", "N/A", "NaN", "nan", "null", "NULL")
_CSV, _PARQUET, _ARROW = (".csv", ".tsv", ".txt"), (".parquet", ".pq"), (".arrow", ".feather")
_ENDINGS = (*_CSV, *_PARQUET, *_ARROW)
_NUMBER = r"^[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?$"
# Up to here float64 holds every integer.
_EXACT = 2**53


class Column:
    """One column of a table: which cells are missing, and the others as numbers or strings."""

    def __init__(self, name: str, chunks: Sequence[Any], table: "Table", missing: Sequence[str]):
        """Reads the Arrow arrays of one column, one for each file."""
        import pyarrow as pa
        import pyarrow.compute as pc

        self.name, self._table = name, table
        self._arrays = []
        for array in chunks:
            if pa.types.is_dictionary(array.type):
                array = array.cast(array.type.value_type)
            kind = array.type
            if _is_text(kind):
                trimmed = pc.utf8_trim_whitespace(array.cast(pa.string()))
                is_in = pc.is_in(trimmed, value_set=pa.array(missing, pa.string()))
                array = pc.if_else(is_in, pa.scalar(None, pa.string()), trimmed)
            elif pa.types.is_floating(kind):
                array = pc.if_else(pc.is_nan(array), pa.scalar(None, kind), array)
            self._arrays.append(array)

    @functools.cached_property
    def is_missing(self) -> np.ndarray:
        """Which cells are missing, `[rows]`."""
        return np.concatenate([np.asarray(a.is_null(), bool) for a in self._arrays])

    @property
    def is_boolean(self) -> bool:
        """Whether the cells are booleans, read as the numbers 0 and 1."""
        import pyarrow as pa

        return all(pa.types.is_boolean(array.type) for array in self._arrays)

    @functools.cached_property
    def texts(self) -> np.ndarray:
        """The cells as strings, `[rows]`, objects; None for missing ones."""
        import pyarrow as pa

        found: list[Any] = []
        for array in self._arrays:
            if pa.types.is_floating(array.type):
                values = array.to_numpy(zero_copy_only=False)
                infinite = np.flatnonzero(np.isinf(values))
                if len(infinite):
                    self.refuse(len(found) + int(infinite[0]), "hold finite numbers", np.inf)
                found += [None if np.isnan(value) else _written(value) for value in values]
            else:
                found += array.cast(pa.string()).to_pylist()
        return np.asarray(found, object)

    @functools.cached_property
    def numbers(self) -> np.ndarray | None:
        """The cells as numbers, `[rows]`, float64, NaN for missing ones; None for strings."""
        import pyarrow as pa
        import pyarrow.compute as pc

        parts: list[np.ndarray] = []
        for array in self._arrays:
            is_text = _is_text(array.type)
            if is_text and pc.all(pc.match_substring_regex(array, _NUMBER)).as_py() is False:
                return None
            numbers = array.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)
            parts.append(np.asarray(numbers, np.float64))
            if is_text or pa.types.is_integer(array.type):
                self._require_exact(array, parts[-1], sum(map(len, parts[:-1])))
        return np.concatenate(parts)

    def _require_exact(self, array: Any, numbers: np.ndarray, start: int) -> None:
        """Refuses an integer that float64 would round, since it is usually an identifier."""
        for row in np.flatnonzero(np.abs(numbers) >= _EXACT):
            text = str(array[int(row)].as_py())
            if text.lstrip("+-").isdigit():
                rule = (
                    "hold integers below 2^53, so that float64 is exact; name a column of names in "
                    "categories, or leave it out of features"
                )
                self.refuse(start + int(row), rule, text)

    def require_readable(self) -> None:
        """Refuses cells that are neither numbers, strings nor booleans, such as dates."""
        rule = "hold numbers, strings or Booleans; else leave it out of features"
        for path, array in zip(self._table.files, self._arrays, strict=True):
            kind = array.type
            place = f"{path}, column {self.name!r},"
            checks.require(_is_readable(kind), place, rule, str(kind))

    def require_float32(self, rows: np.ndarray, numbers: np.ndarray) -> None:
        """Requires numbers `[rows]` that float32 can represent."""
        sizes = np.abs(numbers)
        most = np.nanmax(sizes, initial=0.0)
        if np.isinf(most) or not fits_float32(most):
            row = int(rows[np.argmax(np.where(np.isnan(sizes), 0.0, sizes))])
            rule = (
                f"hold finite numbers that float32 can represent, {SMALLEST:.2g} to {LARGEST:.2g} "
                "(rescale them)"
            )
            assert self.numbers is not None
            is_text = any(_is_text(array.type) for array in self._arrays)
            self.refuse(row, rule, self.texts[row] if is_text else self.numbers[row])

    def require_one_kind(self) -> None:
        """Refuses strings among numbers: typing errors, or markers of a missing value."""
        if self.numbers is not None:
            return
        known = np.flatnonzero(~self.is_missing)
        is_number = np.array([re.match(_NUMBER, self.texts[i]) is not None for i in known])
        if not is_number.any():
            return
        share = np.mean(is_number)
        row = int(known[np.argmin(is_number) if share >= 0.5 else np.argmax(is_number)])
        kind = f"numbers, as {share:.0%} of its cells do," if share >= 0.5 else "strings"
        rule = (
            f"hold {kind} throughout; list the markers of missing values in missing_values, or "
            "the values of the column in categories"
        )
        self.refuse(row, rule, self.texts[row])

    def refuse(self, row: int, rule: str, value: Any) -> None:
        """Raises an error that names file, row, column, rule and value."""
        checks.require(False, f"{self._table.place(row)}, column {self.name!r},", rule, value)

    def require_present(self, rows: np.ndarray, rule: str) -> None:
        """Requires that none of these cells is missing, or names how many and the first."""
        wrong = rows[self.is_missing[rows]]
        if len(wrong):
            found = f"{len(wrong)} missing cells of {len(rows)}"
            self.refuse(int(wrong[0]), rule, found)


class Table:
    """The rows of one file, or of several with the same columns, one after another."""

    def __init__(
        self,
        paths: Sequence[pathlib.Path],
        missing: Sequence[str],
        separator: str,
        tests: Sequence[pathlib.Path] = (),
        inputs_of: Callable[[Sequence[str]], Sequence[str]] = lambda names: names,
    ):
        """Reads files, which must have the same columns; `tests` need only those of the inputs.

        Cells of a column that a file of test rows lacks are missing.
        """
        self.files = tuple(os.fspath(path) for path in (*paths, *tests))
        parts = [_read(path, separator) for path in (*paths, *tests)]
        names = parts[0].column_names
        for i, (path, part) in enumerate(zip(self.files, parts, strict=True)):
            found = part.column_names
            twice = sorted({n for n in found if found.count(n) > 1})
            checks.require(not twice, path, "name every column once", twice)
            needed, rule = set(names), f"have the columns of {paths[0]}, {names}"
            if i >= len(paths) and set(inputs_of(names)) < needed:
                needed = set(inputs_of(names))
                inputs = [name for name in names if name in needed]
                rule = f"have the input columns of {paths[0]}, {inputs}, and no unknown ones"
            checks.require(needed <= set(found) <= set(names), path, rule, found)
            checks.require(part.num_rows > 0, path, "hold rows", "none")
        self.starts = np.cumsum([0, *(part.num_rows for part in parts)])
        self.columns: Mapping[str, Column] = {
            name: Column(name, [_cells(part, name) for part in parts], self, missing)
            for name in names
        }

    @property
    def num_rows(self) -> int:
        """The number of rows of all files."""
        return int(self.starts[-1])

    def file_of(self, row: int) -> int:
        """Returns the number of the file that holds a row."""
        return int(np.searchsorted(self.starts, row, side="right")) - 1

    def place(self, row: int) -> str:
        """Names a row: its file, and its number below the header, from 1."""
        file = self.file_of(row)
        return f"{self.files[file]}, row {row - self.starts[file] + 1}"


def _cells(part: Any, name: str) -> Any:
    """Returns a column of one file as an Arrow array, of missing cells if there is none."""
    import pyarrow as pa

    if name not in part.column_names:
        return pa.nulls(part.num_rows, pa.string())
    return part.column(name).combine_chunks()


def _read(path: pathlib.Path, separator: str) -> Any:
    """Reads one file as an Arrow table; all columns of CSV as strings."""
    pa = import_pyarrow(path)
    name = path.name.lower().removesuffix(".gz")
    mark = "\t" if name.endswith(".tsv") else separator
    readers = (
        (_CSV, lambda: _csv(path, mark), f"be a table whose cells are separated by {mark!r}"),
        (_PARQUET, lambda: _parquet(path), "be a Parquet file"),
        (_ARROW, lambda: _arrow(path), "be an Arrow file or stream"),
    )
    rule = f"have one of the suffixes {', '.join(_ENDINGS)}"
    checks.require(name.endswith(_ENDINGS), str(path), rule, path.suffix)
    ((read, rule),) = [(read, rule) for endings, read, rule in readers if name.endswith(endings)]
    with files.reading(path, rule, pa.ArrowException, UnicodeDecodeError, OSError):
        table = read()
        # Offsets and strings of a damaged file, which would be read beyond their ends.
        table.validate(full=True)
    return table


def without_ending(file: str) -> str:
    """Removes the suffixes of a table's format from the name of a file."""
    name = file[:-3] if file.lower().endswith(".gz") else file
    return next((name[: -len(e)] for e in _ENDINGS if name.lower().endswith(e)), name)


def _csv(path: pathlib.Path, mark: str) -> Any:
    import pyarrow as pa
    from pyarrow import csv

    parse = csv.ParseOptions(delimiter=mark, newlines_in_values=True)
    with csv.open_csv(path, parse_options=parse) as reader:
        names = reader.schema.names
    kinds = dict.fromkeys(names, pa.string())
    convert = csv.ConvertOptions(column_types=kinds, strings_can_be_null=False)
    return csv.read_csv(path, parse_options=parse, convert_options=convert)


def _parquet(path: pathlib.Path) -> Any:
    from pyarrow import parquet

    # Unlike in `read_table`, folders of the path are not columns.
    with parquet.ParquetFile(path) as file:
        return file.read()


def _arrow(path: pathlib.Path) -> Any:
    import pyarrow as pa
    from pyarrow import ipc

    with pa.memory_map(os.fspath(path)) as source:
        try:
            return ipc.open_file(source).read_all()
        except pa.ArrowInvalid:
            source.seek(0)
            return ipc.open_stream(source).read_all()


def import_pyarrow(path: pathlib.Path) -> Any:
    """Imports pyarrow for a file, or says how to install it."""
    try:
        import pyarrow
    except ImportError as error:
        message = f"reading {path} needs pyarrow: pip install 'fedjax-dp[table]'"
        raise MissingPackageError(message) from error
    return pyarrow


def _is_text(kind: Any) -> bool:
    import pyarrow as pa

    return pa.types.is_string(kind) or pa.types.is_large_string(kind)


def _is_readable(kind: Any) -> bool:
    import pyarrow as pa

    types = pa.types
    tests = (types.is_integer, types.is_floating, types.is_decimal, types.is_boolean, types.is_null)
    return _is_text(kind) or any(test(kind) for test in tests)


def _written(value: Any) -> str:
    """Formats a number: integers without a decimal point if float64 is exact."""
    return str(int(value)) if abs(value) < _EXACT and value == int(value) else str(value)
