"""The store in chunks of the zarr 3 format, on disk or in an object store, through TensorStore."""

import io
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from fedjax_dp.core import checks, files
from fedjax_dp.data.arrays import require_names
from fedjax_dp.data.disk_arrays import Blocks, DiskArray, checked, rows_of_block

_INDEX, _OFFSETS, _FACTS = "store.json", "offsets.npy", "written"
# How long an object store may take to answer a question, and to send or take examples.
_ANSWER_SECONDS, _EXAMPLES_SECONDS = 60.0, 600.0


class StoredArray(DiskArray):
    """An array `[rows, ...]` in chunks."""

    def __init__(self, store: Any, place: str):
        """Takes a `tensorstore.TensorStore`, and where it is, for errors."""
        super().__init__(tuple(store.shape), store.dtype.numpy_dtype)
        self._store, self._place = store, place

    def _read(self, rows: slice | np.ndarray) -> np.ndarray:
        return np.asarray(_waited(self._store[rows].read(), self._place, _EXAMPLES_SECONDS))


def write(arrays: Mapping[str, Any], offsets: np.ndarray, names: Sequence[str], place: str) -> None:
    """Writes arrays chunk by chunk, and then the index that makes them a store."""
    import tensorstore as ts

    address = _address(place)
    keys = _waited(ts.KvStore.open(address), place)
    with files.reading(place, "be a place that can be written to", NotImplementedError):
        present = _waited(keys.list(), place)
    checks.require(not present, "place", "hold nothing yet", place)
    facts: dict[str, Any] = {}
    for name, array in arrays.items():
        rows, shape = rows_of_block(array), list(array.shape)
        opening = ts.open(
            {"driver": "zarr3", "kvstore": f"{address}{name}/"},
            create=True,
            dtype=jax.dtypes.canonicalize_dtype(array.dtype),
            shape=shape,
            chunk_layout=ts.ChunkLayout(chunk_shape=[rows, *(max(1, n) for n in shape[1:])]),
        )
        store = _waited(opening, place)
        # A chunk is a block.
        blocks = Blocks(array, store.dtype.numpy_dtype)
        for number, part in enumerate(blocks):
            here = store[number * rows : number * rows + len(part)]
            _waited(here.write(part), place, _EXAMPLES_SECONDS)
        facts[name] = blocks.facts
    buffer = io.BytesIO()
    np.save(buffer, np.asarray(offsets, np.int64))
    _waited(keys.write(_OFFSETS, buffer.getvalue()), place)
    index = {"arrays": list(arrays), "client_names": list(names), _FACTS: facts}
    index[_OFFSETS] = files.digest_of([buffer.getvalue()]).hex()
    _waited(keys.write(_INDEX, json.dumps(files.with_digest(index)).encode()), place)


def read(place: str) -> tuple[dict[str, Any], np.ndarray, tuple[str, ...]]:
    """Opens arrays without reading them; returns them with offsets and names of clients."""
    import tensorstore as ts

    address = _address(place)
    damage = (ValueError, LookupError, TypeError, OSError, EOFError)
    with files.reading(place, "hold a store that `save_zarr` wrote", *damage):
        keys = _waited(ts.KvStore.open(address), place)
        answers = [_waited(keys.read(key), place) for key in (_INDEX, _OFFSETS)]
        if any(each.state != "value" for each in answers):
            raise ValueError(f"there is no {_INDEX} or no {_OFFSETS}")
        index = files.without_digest(json.loads(answers[0].value), _INDEX)
        require_names(_INDEX, index["arrays"])
        # Stores of earlier versions have no digests.
        facts, digest = index.get(_FACTS, {}), files.digest_of([answers[1].value]).hex()
        if index.get(_OFFSETS, digest) != digest:
            raise ValueError(f"{_OFFSETS} was damaged")
        offsets = np.load(io.BytesIO(answers[1].value), allow_pickle=False)
        arrays = {
            name: StoredArray(
                _waited(
                    ts.open({"driver": "zarr3", "kvstore": f"{address}{name}/"}, read=True), place
                ),
                place,
            )
            for name in index["arrays"]
        }
        names = tuple(index["client_names"])
    for name, array in arrays.items():
        rule = "have a type that JAX computes with, as `save_zarr` writes it"
        fits = jax.dtypes.canonicalize_dtype(array.dtype) == array.dtype
        checks.require(fits, f"{name!r} in {place}", rule, str(array.dtype))
    # Nothing is read now, which may be far away.
    guarded = {n: checked(x, facts.get(n), f"{n!r} in {place}", 0) for n, x in arrays.items()}
    return guarded, offsets, names


def _waited(future: Any, place: str, seconds: float | None = None) -> Any:
    """Waits for an object store, which retries for ever where nothing answers."""
    seconds = _ANSWER_SECONDS if seconds is None else seconds
    try:
        return future.result(timeout=seconds)
    except TimeoutError:
        future.cancel()
        raise ValueError(f"{place} must answer within {seconds:g} seconds, got nothing") from None


def is_at(place: str) -> bool:
    """Whether a place is the address of an object store, or a folder with the index of a store."""
    return "://" in place or (pathlib.Path(place) / _INDEX).is_file()


def _address(place: str) -> str:
    """The address of a folder, or that of an object store, with a slash at the end."""
    address = place if "://" in place else pathlib.Path(place).absolute().as_uri()
    return address.rstrip("/") + "/"
