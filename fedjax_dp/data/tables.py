"""Columns of Hugging Face tables as arrays, without a Python object for each cell."""

from typing import Any

import numpy as np


def column_of(table: Any, name: str) -> np.ndarray:
    """Reads a column as `[rows, ...]`: int64, float32, booleans or text; lists become axes."""
    import pyarrow as pa

    column = table.select_columns([name]).with_format("arrow")[:].column(0)
    array = pa.concat_arrays(column.chunks) if column.num_chunks else column.combine_chunks()
    shape = [len(array)]
    while True:
        if isinstance(array, pa.ExtensionArray):
            array = array.storage
        _require_no_null(name, array, shape)
        if not _is_list(array.type):
            break
        lengths = np.asarray(array.value_lengths())
        unequal = np.flatnonzero(lengths != lengths[:1])
        if len(unequal):
            row = int(unequal[0]) // max(1, int(np.prod(shape[1:])))
            raise ValueError(
                f"column {name!r} must hold lists of one length, got {lengths[0]} in the first and "
                f"{lengths[unequal[0]]} in row {row}; nearest valid choice: padding"
            )
        array = array.flatten()
        shape.append(int(lengths[0]) if len(lengths) else 0)
    if pa.types.is_string(array.type) or pa.types.is_large_string(array.type):
        return np.asarray(array.to_pylist(), dtype=str).reshape(shape)
    if not (pa.types.is_primitive(array.type) and not pa.types.is_temporal(array.type)):
        return np.stack(list(table.with_format("numpy")[name]))
    values = array.to_numpy(zero_copy_only=False).reshape(shape)
    as_plain = {"i": np.int64, "u": np.int64, "f": np.float32}.get(values.dtype.kind)
    return values if as_plain is None else values.astype(as_plain, copy=False)


def _is_list(kind: Any) -> bool:
    import pyarrow as pa

    types = pa.types
    return types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)


def _require_no_null(name: str, array: Any, shape: list[int]) -> None:
    if array.null_count:
        first = int(np.flatnonzero(np.asarray(array.is_null()))[0])
        row = first // max(1, int(np.prod(shape[1:])))
        raise ValueError(
            f"column {name!r} must hold no nulls, got {array.null_count}, the first in row {row}; "
            "nearest valid choices: leave the rows out, or fill them"
        )
