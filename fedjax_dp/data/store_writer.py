"""Writes a store on disk from batches of examples in any order of clients."""

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
from fedjax_dp.data.disk_arrays import Blocks

OFFSETS, NAMES, DIGESTS = "offsets.npy", "client_names.txt", "digests.json"
# The folder in which a store is written that replaces another.
SAVING = ".saving"
# A table is read twice, for the clients and for the examples.
_SAME = "have the same clients and examples each time that they are read"
# Client ids `[rows]`, and named arrays `[rows, ...]`.
Batch = tuple[np.ndarray, Mapping[str, np.ndarray]]


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
