"""Columns of Arrow tables as arrays, whole or in batches, without a Python object for each cell."""

import contextlib
import glob
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import numpy as np

from fedjax_dp.core import checks, disclosure, files
from fedjax_dp.core.disclosure import GuardedError
from fedjax_dp.core.packages import needed_for
from fedjax_dp.data import arrays as array_checks
from fedjax_dp.data.cell_readers import Cells, Reader
from fedjax_dp.data.store_writer import Batch

# For each array of a store the column it is read from, or several of them side by side.
Columns = Mapping[str, str | Sequence[str]]
# For columns of lists of several lengths: the length of all, and the value at the end of shorter.
Padding = Mapping[str, Sequence[float]]
# What `save_to_disk` of the `datasets` library writes: Arrow streams, and a file that names them.
_ARROW, _STATE = ".arrow", "state.json"


class Part(NamedTuple):
    """Neighbouring rows of an Arrow table, from `first_row` on of a file, if they are of one."""

    table: Any
    origin: str
    first_row: int


class TableParts(NamedTuple):
    """A table that is read in parts; `parts(columns)` yields these columns from row 0 on."""

    names: Sequence[str]
    parts: Callable[[Sequence[str]], Iterator[Part]]


def parquet_parts(path: Any, batch_size: int, client_column: str | None) -> TableParts:
    """Opens Parquet files of one schema, or Arrow streams of folders that `datasets` saved.

    Their columns are read `batch_size` rows at a time.
    """
    with needed_for("Reading Parquet files", "table"):
        import pyarrow.parquet as pq

    paths = files_of(path)
    schemas = [schema_of(each) for each in paths]
    for each, schema in zip(paths, schemas, strict=True):
        for field in schemas[0]:
            checks.one_of(f"column of {each}", field.name, schema.names)
            kind, rule = schema.field(field.name).type, f"be {field.type}, as in {paths[0]}"
            public = "be of one type in all files"
            _Place(str(each), field.name).require(kind == field.type, rule, str(kind), public)

    def parts(columns: Sequence[str]) -> Iterator[Part]:
        for each in paths:
            row = 0
            with _intact(each), contextlib.ExitStack() as stack:
                if each.suffix == _ARROW:
                    batches = _arrow_batches(stack, each, batch_size, columns)
                else:
                    file = stack.enter_context(pq.ParquetFile(each))
                    batches = file.iter_batches(batch_size, columns=list(columns))
                for batch in batches:
                    yield Part(batch, str(each), row)
                    row += batch.num_rows

    if client_column is not None:
        checks.one_of("client_column", client_column, schemas[0].names)
    return TableParts(schemas[0].names, parts)


def schema_of(path: pathlib.Path) -> Any:
    """Reads the columns of a Parquet file or of an Arrow stream."""
    with needed_for("Reading Parquet files", "table"):
        import pyarrow as pa
        import pyarrow.parquet as pq

    with _intact(path):
        if path.suffix != _ARROW:
            return pq.read_schema(path)
        with pa.memory_map(os.fspath(path)) as source:
            return pa.ipc.open_stream(source).schema


def kind_of(schema: Any, name: str) -> str:
    """Returns what a column holds: "text", "image" (binary, or with a field of bytes), "other"."""
    import pyarrow as pa

    kind = schema.field(name).type
    kind = kind.storage_type if isinstance(kind, pa.BaseExtensionType) else kind
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    if is_text(kind):
        return "text"
    has_bytes = pa.types.is_struct(kind) and kind.get_field_index("bytes") >= 0
    is_binary = pa.types.is_binary(kind) or pa.types.is_large_binary(kind)
    return "image" if has_bytes or is_binary else "other"


def _arrow_batches(
    stack: contextlib.ExitStack, path: pathlib.Path, batch_size: int, columns: Sequence[str]
) -> Iterator[Any]:
    """Reads an Arrow stream, whose own batches may have any size."""
    import pyarrow as pa

    reader = pa.ipc.open_stream(stack.enter_context(pa.memory_map(os.fspath(path))))
    for batch in reader:
        chosen = batch.select(list(dict.fromkeys(columns)))
        # Offsets of a damaged file would be read beyond their ends.
        chosen.validate(full=True)
        for start in range(0, chosen.num_rows, batch_size):
            yield chosen.slice(start, batch_size)


def _intact(path: pathlib.Path) -> contextlib.AbstractContextManager[None]:
    """Turns errors of pyarrow into one of a damaged file."""
    import pyarrow as pa

    kind = "Arrow stream" if path.suffix == _ARROW else "Parquet file"
    return files.reading(path, f"be an intact {kind}", pa.ArrowInvalid, OSError)


def saved_files(folder: pathlib.Path) -> list[pathlib.Path]:
    """Lists the files of a folder that `save_to_disk` of the `datasets` library wrote."""
    state = folder / _STATE
    rule = f"be a folder of one part that `save_to_disk` wrote, which has {_STATE}"
    parts = sorted(path.parent.name for path in folder.glob(f"*/{_STATE}"))
    found = f"a folder of {parts}" if parts else "none"
    checks.require(state.is_file(), str(folder), rule, found)
    content = files.parse_json(files.read_text(state), state)
    with files.reading(state, "name its files", TypeError, LookupError, AttributeError):
        names = [each["filename"] for each in content["_data_files"]]
        is_selection = bool(content.get("_indices_data_files"))
    # Other parties may have written the folder: no file outside of it is read.
    are_inside = bool(names) and all(
        isinstance(name, str) and name == os.path.basename(name) and name.endswith(_ARROW)
        for name in names
    )
    disclosure.require_of_file(are_inside, str(state), f"name {_ARROW} files of its folder", names)
    rule = "be of a whole table (`flatten_indices` makes one)"
    disclosure.require_of_file(not is_selection, str(state), rule, "a selection of rows")
    for name in names:
        files.require_file(folder / name, "path")
        is_link = (folder / name).is_symlink()
        disclosure.require_of_file(not is_link, str(folder / name), "be no link", "a link")
    return [folder / name for name in names]


def huggingface_parts(table: Any, batch_size: int) -> TableParts:
    """Reads a Hugging Face table, which may be one that streams, `batch_size` rows at a time."""
    if isinstance(table, Mapping):
        parts_of_it = ", ".join(f"table[{name!r}]" for name in table)
        checks.require(False, "table", f"be one part of the data: {parts_of_it}", "all of them")
    is_table = hasattr(table, "select_columns") and hasattr(table, "with_format")
    rule = (
        "be a table of the `datasets` library (datasets.Dataset.from_pandas makes one, for example)"
    )
    checks.require(is_table, "table", rule, type(table).__name__)
    names = table.column_names
    if names is None:
        # A table that streams from a function shows its columns in its rows.
        names = next(iter(table), None)
        checks.require(names is not None, "table", "hold at least one row", "none")

    def parts(columns: Sequence[str]) -> Iterator[Part]:
        row = 0
        chosen = table.select_columns(list(columns)).with_format("arrow")
        for each in chosen.iter(batch_size=batch_size):
            yield Part(each, "", row)
            row += each.num_rows

    return TableParts(list(names), parts)


def columns_of(names: Sequence[str], client_column: str | None, columns: Columns | None) -> Columns:
    """Chooses the columns of each array; by default each other column is one."""
    if client_column is not None:
        checks.one_of("client_column", client_column, names)
    columns = columns or {name: name for name in names if name != client_column}
    for column in columns.values():
        for name in _names(column):
            checks.one_of("columns", name, names)
    return columns


def client_ids_of(
    source: TableParts, client_column: str | None, columns: Columns
) -> Iterator[np.ndarray]:
    """Reads the client of each row, and no other column; 0 without such a column."""
    name = client_column or _names(list(columns.values())[-1])[0]
    for part in source.parts([name]):
        yield ids_of(part, client_column)


def batches_of(
    source: TableParts,
    client_column: str | None,
    columns: Columns,
    padding: Padding,
    readers: Mapping[str, Reader] = {},
) -> Iterator[Batch]:
    """Reads batches of examples with their client ids."""
    clients = [] if client_column is None else [client_column]
    used = [name for column in columns.values() for name in _names(column)]
    for part in source.parts(list(dict.fromkeys([*clients, *used]))):
        arrays: dict[str, np.ndarray] = {}
        for name, column in columns.items():
            if name in readers:
                arrays |= readers[name](name, cells_of(part, _names(column)[0]))
            else:
                arrays[name] = _array(part, column, padding)
        yield ids_of(part, client_column), arrays


def require_readers(readers: Mapping[str, Reader], columns: Columns) -> None:
    """Requires readers of arrays that are read from one column."""
    for name in readers:
        checks.one_of("readers", name, columns)
        is_one = len(_names(columns[name])) == 1
        checks.require(is_one, f"columns[{name!r}]", "be one column, for its reader", columns[name])


def cells_of(part: Part, name: str) -> Cells:
    """Returns the cells of a column, which must have no nulls."""
    import pyarrow as pa

    what, array = _Place(part.origin, name), _whole(part.table.column(name))
    if isinstance(array, pa.ExtensionArray):
        array = array.storage
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    _require_no_null(what, array, [len(array)], part.first_row)
    prefix = f"{part.origin}, " if part.origin else ""
    rule = "hold intact cells, text in UTF-8"
    with files.reading(f"{prefix}column {name!r},", rule, pa.ArrowInvalid):
        array.validate(full=True)
    return Cells(array, lambda i: f"{prefix}column {name!r}, row {part.first_row + i}")


def require_padding(padding: Padding, columns: Columns) -> None:
    """Requires `[length, value]` for columns that are read on their own."""
    known = [*map(_names, columns.values())]
    for name, rule in padding.items():
        checks.one_of("padding", name, [names[0] for names in known if len(names) == 1])
        fits = len(rule) == 2 and float(rule[0]).is_integer() and rule[0] >= 1
        checks.require(fits, f"padding[{name!r}]", "be a length of at least 1 and a value", rule)


def ids_of(part: Part, name: str | None) -> np.ndarray:
    """Reads the client ids of some rows: integers, text or Booleans; 0 without a column."""
    if name is None:
        return np.zeros(part.table.num_rows, np.int32)
    array = _whole(part.table.column(name))
    what = _Place(part.origin, name)
    _require_no_null(what, array, [len(array)], part.first_row)
    kind = _values(what, array, part.first_row, None)
    rule = "hold integers or strings, one for each row"
    what.require(kind.ndim == 1 and kind.dtype.kind in "iuUb", rule, str(array.type))
    return kind


def column_of(
    table: Any, name: str, padding: Sequence[float] | None = None, *, is_client: bool = False
) -> np.ndarray:
    """Reads a column as `[rows, ...]`, in which lists become axes, or as the ids of clients."""
    rule = "be given for a table that streams, which is read in batches"
    checks.require(hasattr(table, "num_rows"), "directory", rule, None)
    array = _whole(table.select_columns([name]).with_format("arrow")[:].column(0))
    if is_text(_innermost(array.type)) and not is_client:
        _require_numbers(_Place("", name), array.type)
    if _is_other(_innermost(array.type)):
        return np.stack(list(table.with_format("numpy")[name]))
    values = _values(_Place("", name), array, 0, padding)
    array_checks.require_32_bits(f"column {name!r}", values)
    as_plain = {"i": np.int64, "u": np.int64, "f": np.float32}.get(values.dtype.kind)
    return values if as_plain is None else values.astype(as_plain, copy=False)


def files_of(path: Any) -> list[pathlib.Path]:
    """Finds the files of a path, a pattern, a folder of the `datasets` library, or several."""
    paths: list[pathlib.Path] = []
    for named in [path] if isinstance(path, str | pathlib.Path) else path:
        each = os.path.expanduser(named)
        if any(mark in str(each) for mark in "*?["):
            matches = sorted(pathlib.Path(name) for name in glob.glob(str(each), recursive=True))
            checks.require(bool(matches), "path", "match files", str(each))
        else:
            matches = [pathlib.Path(each)]
        for match in matches:
            if files.kind_of(match, "path") == "folder":
                paths += saved_files(match)
            else:
                files.require_file(match, "path")
                paths.append(match)
    checks.require(bool(paths), "path", "name at least one file", path)
    return paths


def _names(column: str | Sequence[str]) -> list[str]:
    """Lists the columns of one array."""
    return [column] if isinstance(column, str) else list(column)


def _array(part: Part, column: str | Sequence[str], padding: Padding) -> np.ndarray:
    """Reads the columns of one array; several stand side by side, as float32."""

    def values(name: str) -> np.ndarray:
        what, array = _Place(part.origin, name), _whole(part.table.column(name))
        _require_numbers(what, array.type)
        return _values(what, array, part.first_row, padding.get(name))

    if isinstance(column, str):
        return values(column)
    arrays = [values(name) for name in column]
    if len(arrays) == 1 and arrays[0].ndim > 1:
        return arrays[0]
    for name, array in zip(column, arrays, strict=True):
        rule = "hold one number in each row, to stand beside others"
        given = f"lists {array.shape[1:]}"
        _Place(part.origin, name).require(array.ndim == 1, rule, given)
        what = f"{part.origin}, column {name!r}" if part.origin else f"column {name!r}"
        array_checks.require_32_bits(what, np.asarray(array, np.float64))
    return np.stack([np.asarray(array, np.float32) for array in arrays], axis=1)


def _values(
    what: "_Place", array: Any, first_row: int, padding: Sequence[float] | None
) -> np.ndarray:
    """Converts an Arrow array to `[rows, ...]`; lists become axes."""
    import pyarrow as pa

    shape = [len(array)]
    while True:
        if isinstance(array, pa.ExtensionArray):
            array = array.storage
        if pa.types.is_dictionary(array.type):
            array = array.cast(array.type.value_type)
        _require_no_null(what, array, shape, first_row)
        if not _is_list(array.type):
            break
        if padding is not None and len(shape) == 1:
            return _padded(what, array, first_row, padding)
        lengths = np.asarray(array.value_lengths())
        unequal = np.flatnonzero(lengths != lengths[:1])
        if len(unequal):
            row = first_row + int(unequal[0]) // max(1, int(np.prod(shape[1:])))
            text = f"{lengths[0]} in the first and {lengths[unequal[0]]} in row {row}"
            what.refuse("hold lists of one length", text, "choice: padding")
        array = array.flatten()
        shape.append(int(lengths[0]) if len(lengths) else 0)
    if is_text(array.type):
        return np.asarray(array.to_pylist(), dtype=str).reshape(shape)
    return array.to_numpy(zero_copy_only=False).reshape(shape)


def _require_numbers(what: "_Place", kind: Any) -> None:
    """Refuses what no model reads, and says what to make of it."""
    import pyarrow as pa

    kind = _innermost(kind)
    rule = "hold numbers, Booleans, or lists of them"
    if is_text(kind):
        rule += " (number labels, as `class_encode_column` of a Hugging Face table does, or tokens)"
    elif pa.types.is_struct(kind) or pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        rule += " (images and sounds as lists of numbers, by `map` of a Hugging Face table)"
    elif _is_other(kind):
        rule += " (dates as numbers, such as days since a date)"
    is_read = not (is_text(kind) or _is_other(kind))
    what.require(is_read, rule, str(kind))


def _padded(what: "_Place", array: Any, first_row: int, padding: Sequence[float]) -> np.ndarray:
    """Fills lists up to one length with a value that their type can hold."""
    length, value = int(padding[0]), padding[1]
    lengths = np.asarray(array.value_lengths())
    longer = np.flatnonzero(lengths > length)
    if len(longer):
        longest = f"{lengths[longer[0]]} in row {first_row + longer[0]}"
        what.require(False, f"hold lists of at most {length} numbers, its padding", longest)
    numbers = array.flatten()
    rule = "hold lists of numbers, of one level, to be padded"
    is_flat = not (_is_list(numbers.type) or is_text(numbers.type) or _is_other(numbers.type))
    what.require(is_flat, rule, str(array.type))
    _require_no_null(what, numbers, [], first_row, np.repeat(np.arange(len(array)), lengths))
    values = numbers.to_numpy(zero_copy_only=False)
    kind, fits = values.dtype, value in (0, 1)
    if kind.kind in "iu":
        fits = float(value).is_integer() and np.iinfo(kind).min <= value <= np.iinfo(kind).max
    elif kind.kind == "f":
        fits = abs(float(value)) <= float(np.finfo(kind).max)
    checks.require(fits, f"padding of column {what.name!r}", f"be a value of type {kind}", value)
    filled = np.full((len(array), length), value, kind)
    filled[np.arange(length) < lengths[:, np.newaxis]] = values
    return filled


def _whole(column: Any) -> Any:
    """Joins the chunks of a column."""
    import pyarrow as pa

    if isinstance(column, pa.Array):
        return column
    return pa.concat_arrays(column.chunks) if column.num_chunks else column.combine_chunks()


class _Place(NamedTuple):
    """A column, and its file if there is one."""

    origin: str
    name: str

    def require(self, condition: bool, rule: str, value: Any, public: str | None = None) -> None:
        """Requires what is true of the column, by `disclosure.require`."""
        what = f"column {self.name!r}{',' * bool(self.origin)}"
        disclosure.require(condition, what, rule, value, where=self.origin, public=public)

    def refuse(self, rule: str, found: str, choices: str) -> NoReturn:
        """Raises an error with what was found, and the nearest valid choices."""
        hint, what = f"; nearest valid {choices}", f"column {self.name!r}"
        place = f"{self.origin}, {what}," if self.origin else what
        raise GuardedError(f"{place} must {rule}, got {found}{hint}", f"{what} must {rule}{hint}")


def _innermost(kind: Any) -> Any:
    """The type of the values in lists of lists."""
    import pyarrow as pa

    while True:
        if isinstance(kind, pa.BaseExtensionType):
            kind = kind.storage_type
        elif pa.types.is_dictionary(kind) or _is_list(kind):
            kind = kind.value_type
        else:
            return kind


def _is_other(kind: Any) -> bool:
    """Whether values are neither numbers, Booleans nor text."""
    import pyarrow as pa

    is_number = pa.types.is_primitive(kind) and not pa.types.is_temporal(kind)
    return not (is_number or is_text(kind) or pa.types.is_null(kind))


def is_text(kind: Any) -> bool:
    """Whether a type of Arrow is that of strings."""
    import pyarrow as pa

    return pa.types.is_string(kind) or pa.types.is_large_string(kind)


def _is_list(kind: Any) -> bool:
    import pyarrow as pa

    types = pa.types
    return types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)


def _require_no_null(
    what: _Place, array: Any, shape: list[int], first_row: int, rows: np.ndarray | None = None
) -> None:
    if array.null_count:
        first = int(np.flatnonzero(np.asarray(array.is_null()))[0])
        row = first // max(1, int(np.prod(shape[1:]))) if rows is None else int(rows[first])
        nulls = f"{array.null_count}, the first in row {first_row + row}"
        what.refuse("hold no nulls", nulls, "choices: leave the rows out, or fill them")
