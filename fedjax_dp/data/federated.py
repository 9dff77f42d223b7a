"""The examples of every client in one flat, ragged store."""

import dataclasses
import pathlib
import tokenize
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from fedjax_dp.core import argument_checks, checks, files
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.core.disclosure import GuardedError
from fedjax_dp.core.ranges import Count
from fedjax_dp.data import arrays as array_checks
from fedjax_dp.data import disk_arrays, host_arrays, store_writer, tables
from fedjax_dp.data.arrays import example_array
from fedjax_dp.data.cell_readers import Reader
from fedjax_dp.data.disk_arrays import Blocks, is_on_disk
from fedjax_dp.data.store_writer import NAMES as _NAMES
from fedjax_dp.data.store_writer import OFFSETS as _OFFSETS
from fedjax_dp.data.store_writer import write_store

# What NumPy raises for an invalid header.
_DAMAGE = (
    ValueError,
    TypeError,
    EOFError,
    OSError,
    OverflowError,
    SyntaxError,
    tokenize.TokenError,
)


@dataclasses.dataclass(frozen=True)
class FederatedData:
    """The examples of all clients, flat, client after client.

    The store is ragged: client `i` owns rows `offsets[i]` to `offsets[i + 1]`. Nothing is padded
    here; padding happens where a compiled round gathers a batch. The arrays may be memory maps, so
    that a population larger than memory opens without being read. Do not write to the arrays: a
    simulation on a CPU may read them in place.

    Attributes:
      examples: named host arrays, each `[num_examples, ...]`; by convention `x` are inputs and `y`
        are targets. Inputs of several arrays may be given as a tree, such as {"x": {"ids": …,
        "mask": …}}; they are kept under their paths, such as "x/ids", and models see the tree.
      offsets: first row of each client and, last, the number of rows; `[num_clients + 1]`, int64.
      client_names: a different label for each client, or an empty tuple.
    """

    examples: Mapping[str, np.ndarray]
    offsets: np.ndarray
    client_names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Checks that offsets, arrays and names agree."""
        if isinstance(self.offsets, list | tuple):
            checks.numbers("offsets", "be integers", self.offsets)
            object.__setattr__(self, "offsets", np.asarray(self.offsets))
        argument_checks.check_fields(self)
        checks.require(bool(self.examples), "examples", "hold at least one array", self.examples)
        arrays = {
            name: example_array(f"examples[{name!r}]", array)
            for name, array in flat(self.examples).items()
        }
        array_checks.require_names("examples", arrays)
        array_checks.warn_of_large_integers(arrays)
        object.__setattr__(self, "examples", arrays)
        offsets = self.offsets
        is_whole = offsets.dtype.kind in "iu" or offsets.size == 0
        checks.require(is_whole, "offsets", "be integers", offsets.dtype)
        offsets = offsets.astype(np.int64)
        object.__setattr__(self, "offsets", offsets)
        fits = offsets.ndim == 1 and len(offsets) >= 2 and offsets[0] == 0
        rule = "be one-dimensional, start at 0 and have one entry more than there are clients"
        checks.require(fits, "offsets", rule, offsets.shape)
        checks.require(
            bool(np.all(np.diff(offsets) >= 0)), "offsets", "never decrease", "a decreasing row"
        )
        for name, array in self.examples.items():
            rule = f"have {offsets[-1]} rows, as the offsets say"
            shape = array.shape
            checks.require(shape[0] == offsets[-1], f"examples[{name!r}]", rule, shape)
        fits = len(self.client_names) in (0, self.num_clients)
        rule = f"name all {self.num_clients} clients or none"
        checks.require(fits, "client_names", rule, len(self.client_names))
        array_checks.require_different("client_names", self.client_names)

    def __repr__(self) -> str:
        """Describes the store, without its examples."""
        counts = f"{self.num_clients} clients, {self.num_examples} examples"
        return f"FederatedData({counts}, {array_checks.in_words(self.examples)})"

    @property
    def num_clients(self) -> int:
        """The number of clients, including those without examples."""
        return len(self.offsets) - 1

    @property
    def num_examples(self) -> int:
        """The number of examples of all clients."""
        return int(self.offsets[-1])

    @property
    def sizes(self) -> np.ndarray:
        """The number of examples of each client, `[num_clients]`."""
        return np.diff(self.offsets)

    @property
    def client_of_example(self) -> np.ndarray:
        """The client of each example, `[num_examples]`, int32."""
        return np.repeat(np.arange(self.num_clients, dtype=np.int32), self.sizes)

    @property
    def num_bytes(self) -> int:
        """The size of all examples in bytes."""
        return int(sum(array.nbytes for array in self.examples.values()))

    def slab(self, clients: np.ndarray) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """Copies the examples of neighbouring clients, in few sizes, so that few programs compile.

        Args:
          clients: indices of neighbouring clients, ascending.

        Returns:
          Arrays `[rows, ...]`, with a power of two of rows, and the first row of each client of the
          population, `[num_clients]`, int32, valid for these clients alone.

        Raises:
          ValueError: if they are not integers in range, in ascending order.
        """
        clients = array_checks.indices("clients", clients, self.num_clients, "clients")
        is_ascending = len(clients) > 0 and bool(np.all(np.diff(clients) > 0))
        checks.require(is_ascending, "clients", "be one or more, ascending", clients[:9].tolist())
        first, last = (int(self.offsets[i]) for i in (clients[0], clients[-1] + 1))
        num_rows = 1 << max(last - first - 1, 0).bit_length()

        def rows(array: np.ndarray) -> np.ndarray:
            part = np.zeros((num_rows, *array.shape[1:]), array.dtype)
            part[: last - first] = array[first:last]
            return part

        arrays = {name: rows(array) for name, array in self.examples.items()}
        return arrays, (self.offsets[:-1] - first).astype(np.int32)

    @checked
    def client(self, index: int) -> dict[str, Any]:
        """Reads the examples of one client.

        Args:
          index: which client, from 0 to `num_clients - 1`.

        Returns:
          Named arrays, each `[client size, ...]`, nested as a model sees them.

        Raises:
          ValueError: if there is no such client.
        """
        checks.require(
            0 <= index < self.num_clients, "index", f"be in [0, {self.num_clients})", index
        )
        rows = slice(int(self.offsets[index]), int(self.offsets[index + 1]))
        return nested({name: array[rows] for name, array in self.examples.items()})

    @checked
    def select(self, clients: Sequence[int] | np.ndarray) -> "FederatedData":
        """Copies some clients, in the order given, into a store of their own.

        Args:
          clients: different client indices, `[k]`.

        Returns:
          A store of `k` clients in memory.

        Raises:
          ValueError: if there are none, or one is no integer, out of range, as in a mask, or
            repeated.
        """
        clients = array_checks.indices("clients", clients, self.num_clients, "clients")
        checks.require(len(clients) > 0, "clients", "name at least one client", "none")
        ids, counts = np.unique(clients, return_counts=True)
        rule = (
            "be different, since a repeated client would be two units of privacy (from_clients "
            "takes copies as clients of their own)"
        )
        again = ids[counts > 1]
        checks.require(not len(again), "clients", rule, f"{again[:1].tolist()} twice")
        offsets = np.concatenate([[0], np.cumsum(self.sizes[clients])])
        names = tuple(self.client_names[i] for i in clients) if self.client_names else ()
        return FederatedData(self.examples_of(clients), offsets, names)

    def examples_of(self, clients: np.ndarray) -> dict[str, np.ndarray]:
        """Copies the examples of some clients, one client after another.

        Args:
          clients: client indices, `[k]`, int64, in range; a cohort's slots may repeat one.

        Returns:
          Named arrays `[rows, ...]`.
        """
        starts, sizes = self.offsets[clients], self.sizes[clients]
        ends = np.cumsum(sizes)
        rows = np.repeat(starts - ends + sizes, sizes) + np.arange(ends[-1])
        return {
            name: np.asarray(array[rows]) if is_on_disk(array) else host_arrays.take(array, rows)
            for name, array in self.examples.items()
        }

    def check_finite(self) -> None:
        """Requires every number of every floating array to be finite, and to fit 32 bits.

        Raises:
          ValueError: naming the array, the first client and the row that break the rule.
        """
        for name, array in self.examples.items():
            if is_on_disk(array):
                array_checks.require_32_bits(f"examples[{name!r}]", array)
            if not np.issubdtype(array.dtype, np.floating):
                continue
            axes = tuple(range(1, array.ndim))
            parts = (~np.isfinite(part).all(axis=axes) for part in disk_arrays.parts(array))
            rows = np.concatenate([[], *parts])
            if rows.any():
                row = int(np.argmax(rows))
                client = int(np.searchsorted(self.offsets, row, side="right")) - 1
                text = f"NaN or infinity in {int(rows.sum())} rows, the first at row {row}"
                public = f"examples[{name!r}] must be finite"
                raise GuardedError(f"{public}, got {text} (client {client})", public)

    @checked
    def save(self, directory: str | pathlib.Path) -> None:
        """Writes the store as a folder of NumPy `.npy` files that can be memory-mapped.

        The files are written beside those of a store that is there, which is replaced once they are
        whole. Digests of all of them are in `digests.json`.

        Args:
          directory: the folder, created if missing; a store in it is replaced.

        Raises:
          ValueError: if an array is named "offsets", or the folder holds other `.npy` files, which
            `open` would take for arrays of this store.
        """
        directory = pathlib.Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        own = {f"{name}.npy" for name in self.examples}
        checks.require(_OFFSETS not in own, "examples", "name no array 'offsets'", [*self.examples])
        others = {file for _, file in _files(directory)} - own - {_OFFSETS}
        checks.require(not others, "directory", "hold no other .npy files", sorted(others))
        with store_writer.replacing(directory) as place:
            facts = {}
            for name, array in self.examples.items():
                (place / name).parent.mkdir(parents=True, exist_ok=True)
                with (place / f"{name}.npy").open("wb") as file:
                    kind = np.lib.format.dtype_to_descr(array.dtype)
                    header = {"descr": kind, "fortran_order": False, "shape": tuple(array.shape)}
                    np.lib.format.write_array_header_1_0(file, header)
                    blocks = Blocks(array)
                    for block in blocks:
                        block.tofile(file)
                facts[name] = blocks.facts
            store_writer.finish(place, facts, self.offsets, self.client_names)

    @classmethod
    @checked
    def open(cls, directory: str | pathlib.Path) -> "FederatedData":
        """Opens a saved store, without reading the examples.

        Args:
          directory: a folder written by `save`, or any `.npy` files: one for each array, named
            `NAME.npy`, nested names in folders, and `offsets.npy`; these become memory maps. Or a
            folder or address that `save_zarr` wrote to, opened as by `open_zarr`.

        Returns:
          A store whose arrays are read from disk when they are indexed. With the digests that
          `save` writes, arrays of up to 64 MB are compared now, and larger ones a megabyte at a
          time when a row of it is first read; a ValueError then names what is damaged.

        Raises:
          ValueError: if the folder has no offsets or no arrays, or a file is damaged or does
            not fit the others.
        """
        if store_writer.is_zarr(str(directory)):
            return cls.open_zarr(directory)
        directory = pathlib.Path(directory)
        rule = f"hold a file {_OFFSETS} and one .npy file for each array"
        checks.require((directory / _OFFSETS).is_file(), "directory", rule, str(directory))
        facts = store_writer.facts_of(directory)
        arrays = {file.removesuffix(".npy"): _mapped(path) for path, file in _files(directory)}
        offsets = arrays.pop(_OFFSETS.removesuffix(".npy"))
        fits = offsets.dtype.kind in "iu"
        rule = "hold integers"
        checks.require(fits, str(directory / _OFFSETS), rule, str(offsets.dtype))
        names_file = directory / _NAMES
        names: list[str] = []
        if names_file.exists():
            names = files.read_text(names_file).removesuffix("\n").split("\n")
            num_clients = len(offsets) - 1
            rule = f"name the {num_clients} clients of {_OFFSETS}"
            checks.require(len(names) == num_clients, str(names_file), rule, len(names))
        lost = [name for name in facts if name not in arrays]
        checks.require(not lost, str(directory), "hold all arrays that were written", f"no {lost}")
        for name, array in arrays.items():
            place = str(directory / f"{name}.npy")
            arrays[name] = disk_arrays.checked(array, facts.get(name), place)
        with files.reading(directory / _OFFSETS, "fit the arrays beside it", ValueError):
            return cls(arrays, np.array(offsets), tuple(names))

    @checked
    def save_zarr(self, place: str | pathlib.Path) -> None:
        """Writes the store in the zarr 3 format, in chunks of about a megabyte.

        Args:
          place: a folder, or the address of an object store that TensorStore knows, such as
            "gs://bucket/notes" or "s3://bucket/notes"; empty or new.

        Raises:
          ValueError: if something is there, or 32 bits cannot hold a number.
        """
        for name, array in self.examples.items():
            array_checks.require_32_bits(f"examples[{name!r}]", array)
        store_writer.write_zarr(self.examples, self.offsets, self.client_names, str(place))

    @classmethod
    @checked
    def open_zarr(cls, place: str | pathlib.Path) -> "FederatedData":
        """Opens a store that `save_zarr` wrote, without reading the examples.

        Cohorts are read as from memory maps, and results are the same.

        Args:
          place: a folder, or the address of an object store, as for `save_zarr`.

        Returns:
          A store whose arrays are read when they are indexed. A chunk is compared with its digest
          when a row of it is first read; a ValueError then names what is damaged or missing.

        Raises:
          ValueError: if there is no store, or it is damaged.
        """
        arrays, offsets, names = store_writer.read_zarr(str(place))
        with files.reading(place, "hold arrays that fit each other", ValueError):
            return cls(arrays, offsets, names)

    @classmethod
    @checked
    def from_clients(
        cls, clients: Sequence[Mapping[str, Any]], client_names: Sequence[str] = ()
    ) -> "FederatedData":
        """Builds a store from one set of arrays for each client.

        Args:
          clients: for each client named arrays `[client size, ...]`, the same names everywhere.
          client_names: a label for each client, or nothing.

        Returns:
          The store, clients in the order given.

        Raises:
          ValueError: if there are no clients, their array names or lengths disagree, or two have
            one name.
        """
        checks.require(len(clients) > 0, "clients", "hold at least one client", len(clients))
        clients = [flat(client) for client in clients]
        names = list(clients[0])
        sizes = []
        for i, client in enumerate(clients):
            checks.require(
                sorted(client) == sorted(names), f"clients[{i}]", f"name {names}", list(client)
            )
            arrays = {
                name: example_array(f"clients[{i}][{name!r}]", client[name]) for name in names
            }
            clients[i] = arrays
            for name, array in arrays.items():
                expected = np.shape(clients[0][name])[1:]
                rule = f"have rows of shape {expected}, as those of client 0"
                fits = array.shape[1:] == expected
                checks.require(fits, f"clients[{i}][{name!r}]", rule, array.shape[1:])
            lengths = {len(array) for array in arrays.values()}
            checks.require(
                len(lengths) == 1, f"clients[{i}]", "have arrays of one length", sorted(lengths)
            )
            sizes.append(lengths.pop())
        examples = {
            name: host_arrays.joined([np.asarray(client[name]) for client in clients])
            for name in names
        }
        return cls(examples, np.concatenate([[0], np.cumsum(sizes)]), tuple(client_names))

    @classmethod
    @checked
    def from_client_ids(
        cls, examples: Mapping[str, Any], client_ids: Any, *, keep_order: bool = False
    ) -> "FederatedData":
        """Builds a store from examples with a column that names the client of each.

        Args:
          examples: named arrays `[num_examples, ...]`, in any order.
          client_ids: the client of each example, `[num_examples]`, of any sortable type.
          keep_order: number the clients by first appearance instead of by sorted id.

        Returns:
          The store; `client_names` holds the ids as text, and a client's examples keep their order.

        Raises:
          ValueError: if the number of ids is not the number of examples, an id is missing, or
            ids are of several kinds.
        """
        client_ids, examples = array_checks.client_ids("client_ids", client_ids), _arrays(examples)
        checks.require(len(client_ids) > 0, "client_ids", "name at least one client", "none")
        names, first, index = np.unique(client_ids, return_index=True, return_inverse=True)
        array_checks.require_different("client_ids", names.tolist())
        if keep_order:
            rank = np.argsort(np.argsort(first))
            names, index = names[np.argsort(first)], rank[index]
        order = np.argsort(index, kind="stable")
        for name, array in examples.items():
            rule = f"have one row for each of the {len(client_ids)} client ids"
            checks.require(len(array) == len(client_ids), f"examples[{name!r}]", rule, len(array))
        offsets = np.concatenate([[0], np.cumsum(np.bincount(index, minlength=len(names)))])
        arrays = {
            name: host_arrays.take(np.asarray(array), order) for name, array in examples.items()
        }
        return cls(arrays, offsets, tuple(str(name) for name in names))

    @classmethod
    @checked
    def from_indices(
        cls, examples: Mapping[str, Any], clients: Sequence[Any], client_names: Sequence[str] = ()
    ) -> "FederatedData":
        """Builds a store from a pool of examples and, for each client, the rows it owns.

        Args:
          examples: named arrays `[num_examples, ...]`.
          clients: for each client the rows of the pool that it holds, which no other holds.
          client_names: a label for each client, or nothing.

        Returns:
          The store, clients and rows in the order given. Arrays on disk stay there, and rows are
          read when they are indexed.

        Raises:
          ValueError: if there are no clients, or a row is not an integer, outside the pool, or
            there twice, in one client or in two: it would be two records. `from_clients` takes
            copies, for records that count as separate, or for clients with the same test data.
        """
        examples = _arrays(examples)
        size = len(next(iter(examples.values())))
        rows = array_checks.rows_of_clients("clients", clients, size)
        way = " (from_clients takes copies as records of their own)"
        array_checks.require_disjoint("clients", rows, way)
        all_rows = np.concatenate(rows)
        offsets = np.concatenate([[0], np.cumsum([len(r) for r in rows])])
        arrays = {name: disk_arrays.take(array, all_rows) for name, array in examples.items()}
        return cls(arrays, offsets, tuple(client_names))

    @classmethod
    @checked
    def from_huggingface(
        cls,
        table: Any,
        client_column: str,
        columns: Mapping[str, str] | None = None,
        *,
        directory: str | pathlib.Path | None = None,
        padding: Mapping[str, Sequence[float]] = {},
        readers: Mapping[str, Reader] = {},
        batch_size: Count = 4096,
    ) -> "FederatedData":
        """Builds a store from a Hugging Face `datasets` table.

        Args:
          table: a `datasets.Dataset`; with a directory an `IterableDataset` of known columns too.
          client_column: the column that names the client of each row.
          columns: for each array of the store the column it is read from; if None, all other
            columns under their own names.
          directory: an empty or new folder, into which a table larger than memory is written as
            by `from_parquet`; None for a store in memory.
          padding: for columns of lists of several lengths: the length, and the value that fills
            shorter lists at the end.
          readers: for arrays of columns that hold no numbers: `data.images`, `data.texts` or
            `data.class_names`.
          batch_size: how many rows are read at once into a directory.

        Returns:
          The store, clients by first appearance. In memory integers are int64 and others float32;
          on disk as by `from_parquet`.

        Raises:
          ValueError: if a column does not exist, holds nulls, or lists of unequal lengths without
            padding.
        """
        source = tables.huggingface_parts(table, batch_size)
        chosen = tables.columns_of(source.names, client_column, columns)
        tables.require_padding(padding, chosen)
        tables.require_readers(readers, chosen)
        if directory is not None:
            ids = tables.client_ids_of(source, client_column, chosen)
            batches = tables.batches_of(source, client_column, chosen, padding, readers)
            write_store(pathlib.Path(directory), ids, batches, keep_order=True)
            return cls.open(directory)
        examples: dict[str, Any] = {}
        read = {name: chosen[name] for name in readers}
        if read:
            parts = [a for _, a in tables.batches_of(source, client_column, read, {}, readers)]
            checks.require(bool(parts), "table", "hold at least one row", "none")
            examples |= {n: host_arrays.joined([part[n] for part in parts]) for n in parts[0]}
        for name, column in chosen.items():
            if name in readers:
                continue
            rule = "be one column, without a directory"
            checks.require(isinstance(column, str), f"columns[{name!r}]", rule, column)
            examples[name] = tables.column_of(table, str(column), padding.get(str(column)))
        owners = tables.column_of(table, client_column, is_client=True)
        return cls.from_client_ids(examples, owners, keep_order=True)

    @classmethod
    @checked
    def from_parquet(
        cls,
        path: str | pathlib.Path | Sequence[str | pathlib.Path],
        client_column: str | None,
        columns: Mapping[str, str | Sequence[str]] | None = None,
        *,
        directory: str | pathlib.Path,
        padding: Mapping[str, Sequence[float]] = {},
        readers: Mapping[str, Reader] = {},
        batch_size: Count = 4096,
    ) -> "FederatedData":
        """Imports Parquet files into a store on disk, without holding them in memory.

        Rows need not be sorted by client. Files are read twice: the client column, to place each
        client's examples, and then the columns that are used, which are written to their places.
        Memory holds a batch, the compressed row group that it is from, and a number and a name for
        each client. Needs the extra `table`.

        Args:
          path: a file, a pattern such as "part-*.parquet", a folder that `save_to_disk` of the
            `datasets` library wrote, or several; all of one schema.
          client_column: the column that names the client of each row: integers or strings; None
            makes one client of all rows.
          columns: for each array of the store the column that it is read from, or a list of columns
            of numbers, side by side as float32; if None, all other columns under their own names.
          directory: an empty or new folder for the store.
          padding: for columns of lists of several lengths: the length, and the value that fills
            shorter lists at the end; longer lists are refused.
          readers: for arrays of columns that hold no numbers: `data.images`, `data.texts` or
            `data.class_names`.
          batch_size: how many rows are read at once.

        Returns:
          The store, opened from disk. Clients are in the order of their ids, and each client's
          examples in that of the files. Numbers keep their types; 64 bits become 32.

        Raises:
          ValueError: naming file, column and row, if a column does not exist, is not of numbers,
            holds nulls, numbers that 32 bits cannot hold, or lists of unequal lengths without
            padding; or if the folder is not empty.
          ImportError: if pyarrow is not installed.

        Example:
          `FederatedData.from_parquet("notes-*.parquet", "user", {"x": "tokens", "y": "next"},
          directory="store", padding={"tokens": [20, 0], "next": [20, -1]})`
        """
        source = tables.parquet_parts(path, batch_size, client_column)
        chosen = tables.columns_of(source.names, client_column, columns)
        tables.require_padding(padding, chosen)
        tables.require_readers(readers, chosen)
        ids = tables.client_ids_of(source, client_column, chosen)
        batches = tables.batches_of(source, client_column, chosen, padding, readers)
        write_store(pathlib.Path(directory), ids, batches)
        return cls.open(directory)


@checked
def example_structure(data: FederatedData) -> Any:
    """Describes one example of a store, for tracing a model without touching the data.

    Args:
      data: the store.

    Returns:
      For each array a `jax.ShapeDtypeStruct` without the example axis, of the type that JAX makes
      of it, with 32 bits if the array has 64.
    """
    return nested(
        {
            name: jax.ShapeDtypeStruct(array.shape[1:], jax.dtypes.canonicalize_dtype(array.dtype))
            for name, array in data.examples.items()
        }
    )


def _arrays(examples: Mapping[str, Any]) -> dict[str, Any]:
    """Names the arrays of a tree by their paths, each checked before rows are taken from it."""
    checks.require(bool(examples), "examples", "hold at least one array", examples)
    return {
        name: example_array(f"examples[{name!r}]", array) for name, array in flat(examples).items()
    }


def flat(examples: Mapping[str, Any]) -> dict[str, Any]:
    """Names the arrays of a tree by their paths, such as "x/ids"."""
    arrays: dict[str, Any] = {}
    for name, value in examples.items():
        if isinstance(value, Mapping):
            arrays |= {f"{name}/{rest}": array for rest, array in flat(value).items()}
        else:
            arrays[name] = value
    return arrays


def nested(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Rebuilds the tree from paths: {"x": {"ids": …}} from "x/ids"."""
    tree: dict[str, Any] = {}
    for name, value in arrays.items():
        *folders, last = name.split("/")
        inner = tree
        for folder in folders:
            inner = inner.setdefault(folder, {})
            checks.require(isinstance(inner, dict), "examples", f"nest nothing in {folder!r}", name)
        checks.require(last not in inner, "examples", "name each array once", name)
        inner[last] = value
    return tree


def _mapped(path: pathlib.Path) -> np.ndarray:
    """Opens a `.npy` file as a memory map."""
    with files.reading(path, "be an intact .npy file", *_DAMAGE):
        array = np.lib.format.open_memmap(path, mode="r")
    kind, size = array.dtype.kind, path.stat().st_size
    fits = kind in "biuf" and array.ndim > 0
    rule = "hold rows of real numbers or Booleans"
    checks.require(fits, str(path), rule, f"{array.dtype}{list(array.shape)}")
    rule = "be in the byte order of this computer (`array.astype(array.dtype.newbyteorder('='))`)"
    checks.require(array.dtype.isnative, str(path), rule, array.dtype.str)
    whole = array.offset + array.nbytes
    checks.require(size == whole, str(path), f"hold {whole} bytes, as its header says", size)
    return array


def _files(directory: pathlib.Path) -> list[tuple[pathlib.Path, str]]:
    """Lists the `.npy` files of a store with the names of their arrays, as paths."""
    files_below = [(path, path.relative_to(directory)) for path in sorted(directory.rglob("*.npy"))]
    # What an interrupted `save` has left is no part of the store.
    return [
        (path, name.as_posix())
        for path, name in files_below
        if name.parts[0] != store_writer.SAVING
    ]
