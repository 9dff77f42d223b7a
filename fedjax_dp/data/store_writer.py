"""Stores of examples by client: .npy files on disk, or chunks of the zarr 3 format anywhere."""

import contextlib
import io
import json
import pathlib
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from fedjax_dp.core import checks, files
from fedjax_dp.data import arrays as array_checks
from fedjax_dp.data.arrays import require_names
from fedjax_dp.data.disk_arrays import Blocks, DiskArray, checked, rows_of_block

OFFSETS, NAMES, DIGESTS = "offsets.npy", "client_names.txt", "digests.json"
# The folder in which a store is written that replaces another.
SAVING = ".saving"
# A table is read twice, for the clients and for the examples.
_SAME = "have the same clients and examples each time that they are read"
# Client ids `[rows]`, and named arrays `[rows, ...]`.
Batch = tuple[np.ndarray, Mapping[str, np.ndarray]]
_INDEX, _WRITTEN = "store.json", "written"
# How long an object store may take to answer a question, and to send or take examples.
_ANSWER_SECONDS, _EXAMPLES_SECONDS = 60.0, 600.0


def write_store(
    directory: pathlib.Path,
    client_ids: Iterable[np.ndarray],
    batches: Iterable[Batch],
    *,
    keep_order: bool = False,
) -> None:
    """Writes examples client after client; memory holds one batch and a number for each client.

    The first pass over `client_ids`, the client of each example in parts, counts and so places the
    examples of each client; the second writes each batch, in the same order with its client ids, to
    its places. Clients are numbered by sorted id, or with `keep_order` by first appearance. Numbers
    of 64 bits are stored in the 32 that JAX computes with. The folder must be new or empty; the
    offsets are written last, so that an interrupted store does not open.
    """
    directory.mkdir(parents=True, exist_ok=True)
    present = sorted(path.name for path in directory.iterdir())
    checks.require(not present, "directory", "be empty, or not exist yet", present)
    counts = _counts(client_ids)
    names = list(counts) if keep_order else sorted(counts)
    checks.require(bool(names), "the data", "hold at least one example", "none")
    array_checks.require_different("client ids", names)
    offsets = np.concatenate([[0], np.cumsum([counts[name] for name in names])])
    number, free = {name: i for i, name in enumerate(names)}, offsets[:-1].copy()
    stored: dict[str, np.memmap] = {}
    for ids, examples in batches:
        different, owner = np.unique(ids, return_inverse=True)
        known = [number.get(name, -1) for name in different.tolist()]
        checks.require(-1 not in known, "the data", _SAME, "other clients")
        owner = np.array(known, np.int64)[owner]
        order = np.argsort(owner, kind="stable")
        clients, first, sizes = np.unique(owner[order], return_index=True, return_counts=True)
        rows = np.repeat(free[clients] - first, sizes) + np.arange(len(order))
        free[clients] += sizes
        fits = bool(np.all(free <= offsets[1:]))
        checks.require(fits, "the data", _SAME, "more examples of a client")
        parts = {name: _narrow(name, array) for name, array in examples.items()}
        array_checks.warn_of_large_integers(parts)
        if not stored:
            stored = _created(directory, parts, int(offsets[-1]))
        for name, array in stored.items():
            _require_alike(name, parts[name], array)
            array[rows] = parts[name][order]
    num_written = int((free - offsets[:-1]).sum())
    shown = f"{num_written} of the {offsets[-1]} examples that were counted"
    checks.require(num_written == offsets[-1], "the data", _SAME, shown)
    for array in stored.values():
        array.flush()
    facts = {}
    for name, array in stored.items():
        blocks = Blocks(array)
        for _ in blocks:
            pass
        facts[name] = blocks.facts
    texts = [str(name) for name in names]
    broken = [text for text in texts if "\n" in text]
    checks.require(not broken, "client ids", "hold no line breaks", broken[:1])
    finish(directory, facts, offsets.astype(np.int64), texts)


@contextlib.contextmanager
def replacing(directory: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yields a folder whose files replace a store's, which does not open until the last has."""
    place = directory / SAVING
    if place.exists():
        shutil.rmtree(place)
    place.mkdir()
    try:
        yield place
        for name in (OFFSETS, NAMES, DIGESTS):
            (directory / name).unlink(missing_ok=True)
        paths = sorted(path for path in place.rglob("*") if path.is_file())
        for path in sorted(paths, key=lambda path: path.name == OFFSETS):
            target = directory / path.relative_to(place)
            target.parent.mkdir(parents=True, exist_ok=True)
            path.replace(target)
    finally:
        shutil.rmtree(place)


def finish(
    place: pathlib.Path, facts: Mapping[str, Any], offsets: np.ndarray, names: Sequence[str]
) -> None:
    """Writes what makes arrays a store: digests, names of clients, and last the offsets."""
    digests = {}
    if names:
        text = "\n".join(names) + "\n"
        digests[NAMES] = files.digest_of([text.encode()]).hex()
        files.write_text(place / NAMES, text)
    buffer = io.BytesIO()
    np.save(buffer, offsets)
    digests[OFFSETS] = files.digest_of([buffer.getvalue()]).hex()
    content = files.with_digest({"arrays": dict(facts), "files": digests})
    files.write_text(place / DIGESTS, json.dumps(content) + "\n")
    (place / OFFSETS).write_bytes(buffer.getvalue())


def facts_of(directory: pathlib.Path) -> dict[str, Any]:
    """Reads what was written of arrays, none for other files; compares the small files."""
    path = directory / DIGESTS
    if not path.is_file():
        return {}
    content = files.without_digest(files.parse_json(files.read_text(path), path), path)
    for name, digest in content["files"].items():
        place = directory / name
        is_whole = place.is_file() and files.digest_of_file(place) == digest
        checks.require(is_whole, str(place), "be as it was written", "a damaged or missing file")
    return dict(content["arrays"])


def _counts(client_ids: Iterable[np.ndarray]) -> dict[Any, int]:
    """Counts the examples of each client, by first appearance."""
    counts: dict[Any, int] = {}
    for ids in client_ids:
        names, first, sizes = np.unique(ids, return_index=True, return_counts=True)
        for i in np.argsort(first):
            name = names[i].item()
            counts[name] = counts.get(name, 0) + int(sizes[i])
    return counts


def _narrow(name: str, array: np.ndarray) -> np.ndarray:
    """Converts 64 bits to 32, after a check that all numbers fit."""
    array = array_checks.example_array(f"examples[{name!r}]", array)
    return np.asarray(array, jax.dtypes.canonicalize_dtype(array.dtype))


def _created(
    directory: pathlib.Path, parts: Mapping[str, np.ndarray], num_examples: int
) -> dict[str, np.memmap]:
    """Creates the files of all arrays, of the types and shapes of the first batch."""
    needed = sum(num_examples * part[:1].nbytes for part in parts.values())
    space = shutil.disk_usage(directory).free
    rule = f"be on a disk with {needed:,} bytes free"
    # A full disk would end a write to a memory map by a signal.
    checks.require(needed <= space, "directory", rule, f"{space:,} bytes free in {directory}")
    stored = {}
    array_checks.require_names("columns", parts)
    for name, part in parts.items():
        path = directory / f"{name}.npy"
        path.parent.mkdir(parents=True, exist_ok=True)
        stored[name] = np.lib.format.open_memmap(
            path, mode="w+", dtype=part.dtype, shape=(num_examples, *part.shape[1:])
        )
    return stored


def _require_alike(name: str, part: np.ndarray, array: np.ndarray) -> None:
    alike = part.dtype == array.dtype and part.shape[1:] == array.shape[1:]
    rule = f"have rows of {array.dtype}{list(array.shape[1:])}, as in the first batch"
    shown = f"{part.dtype}{list(part.shape[1:])}"
    checks.require(alike, f"examples[{name!r}]", rule, shown)


class StoredArray(DiskArray):
    """An array `[rows, ...]` in chunks."""

    def __init__(self, store: Any, place: str):
        """Takes a `tensorstore.TensorStore`, and where it is, for errors."""
        super().__init__(tuple(store.shape), store.dtype.numpy_dtype)
        self._store, self._place = store, place

    def _read(self, rows: slice | np.ndarray) -> np.ndarray:
        return np.asarray(_waited(self._store[rows].read(), self._place, _EXAMPLES_SECONDS))


def write_zarr(
    arrays: Mapping[str, Any], offsets: np.ndarray, names: Sequence[str], place: str
) -> None:
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
    _waited(keys.write(OFFSETS, buffer.getvalue()), place)
    index = {"arrays": list(arrays), "client_names": list(names), _WRITTEN: facts}
    index[OFFSETS] = files.digest_of([buffer.getvalue()]).hex()
    _waited(keys.write(_INDEX, json.dumps(files.with_digest(index)).encode()), place)


def read_zarr(place: str) -> tuple[dict[str, Any], np.ndarray, tuple[str, ...]]:
    """Opens arrays without reading them; returns them with offsets and names of clients."""
    import tensorstore as ts

    address = _address(place)
    damage = (ValueError, LookupError, TypeError, OSError, EOFError)
    with files.reading(place, "hold a store that `save_zarr` wrote", *damage):
        keys = _waited(ts.KvStore.open(address), place)
        answers = [_waited(keys.read(key), place) for key in (_INDEX, OFFSETS)]
        if any(each.state != "value" for each in answers):
            raise ValueError(f"there is no {_INDEX} or no {OFFSETS}")
        index = files.without_digest(json.loads(answers[0].value), _INDEX)
        require_names(_INDEX, index["arrays"])
        # Stores of earlier versions have no digests.
        facts, digest = index.get(_WRITTEN, {}), files.digest_of([answers[1].value]).hex()
        if index.get(OFFSETS, digest) != digest:
            raise ValueError(f"{OFFSETS} was damaged")
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


def is_zarr(place: str) -> bool:
    """Whether a place is the address of an object store, or a folder with the index of a store."""
    return "://" in place or (pathlib.Path(place) / _INDEX).is_file()


def _address(place: str) -> str:
    """The address of a folder, or that of an object store, with a slash at the end."""
    address = place if "://" in place else pathlib.Path(place).absolute().as_uri()
    return address.rstrip("/") + "/"
