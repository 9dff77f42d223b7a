"""Data sets in a store on disk: written once and opened from there, or your own."""

import contextlib
import dataclasses
import hashlib
import itertools
import json
import os
import pathlib
import shutil
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from fedjax_dp.core import checks, disclosure, files
from fedjax_dp.core.argument_checks import checked
from fedjax_dp.core.ranges import Count, Index
from fedjax_dp.data import cell_readers, partition, tables
from fedjax_dp.data.cell_readers import Pictures, Reader
from fedjax_dp.data.datasets.base import Dataset, Task
from fedjax_dp.data.datasets.table import find_files
from fedjax_dp.data.federated import FederatedData
from fedjax_dp.data.store_writer import OFFSETS
from fedjax_dp.data.tokenizers import BYTES, Tokenizer, require_classes, tokenizer

# What describes a saved data set, and the fields of it.
_FACTS = "dataset.json"
_KINDS = {
    "task": str,
    "num_classes": int,
    "class_names": list,
    "feature_names": list,
    "origin": str,
    "exact_statistics": list,
}
# More names of classes than this are taken to be texts.
_MOST_CLASSES = 1000


class Source(NamedTuple):
    """What a store is written from: one of the same files and choices (for JSON) is reused."""

    files: Sequence[pathlib.Path]
    choices: Any


def opened(
    folder: pathlib.Path, source: Source, write: Callable[[pathlib.Path], object]
) -> FederatedData:
    """Opens the store of a source below a folder; `write(new folder)` makes a missing one."""
    stats = [(str(path.resolve()), path.stat()) for path in source.files]
    facts = [[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats]
    text = json.dumps([facts, source.choices], sort_keys=True)
    store = folder / hashlib.sha256(text.encode()).hexdigest()[:16]
    if not store.exists():
        unfinished = folder / f".{store.name}-{os.getpid()}"
        shutil.rmtree(unfinished, ignore_errors=True)
        try:
            write(unfinished)
            # Another process may have made it meanwhile.
            with contextlib.suppress(OSError):
                unfinished.rename(store)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    return FederatedData.open(store)


def as_dataset(
    name: str,
    train: FederatedData,
    test: FederatedData | None,
    *,
    num_classes: int,
    task: Task,
    class_names: tuple[str, ...] = (),
    feature_names: tuple[str, ...] = (),
    origin: str = "",
    exact_statistics: tuple[str, ...] = (),
) -> Dataset:
    """Makes a data set of stores, whose examples stay on disk."""
    empty = {key: array[:0] for key, array in train.examples.items()}
    names = list(train.client_names or map(str, range(train.num_clients)))
    number, test_clients = {name: i for i, name in enumerate(names)}, np.zeros(0, np.int32)
    if test is not None:
        of_test = test.client_names or tuple(map(str, range(test.num_clients)))
        for name_ in of_test:
            if name_ not in number:
                number[name_] = len(names)
                names.append(name_)
        test_clients = np.repeat(np.array([number[n] for n in of_test], np.int32), test.sizes)
    return Dataset(
        name,
        train.examples,
        empty if test is None else test.examples,
        num_classes=num_classes,
        task=task,
        train_clients=train.client_of_example,
        test_clients=test_clients,
        class_names=class_names,
        feature_names=feature_names,
        origin=origin,
        exact_statistics=exact_statistics,
        client_names=tuple(names),
    )


def require_same_arrays(train: FederatedData, test: FederatedData) -> None:
    """Requires the arrays of both parts to have the same types."""
    for name, array in train.examples.items():
        dtype, rule = test.examples[name].dtype, f"have the type {array.dtype} of the training part"
        checks.require(dtype == array.dtype, f"{name!r} of the test part", rule, dtype)


def require_counted(num_classes: int, task: str) -> None:
    """Requires a number of classes, unless the task is regression."""
    is_counted = (num_classes > 0) == (task != "regression")
    rule = "be 0" if task == "regression" else "be given, the number of classes or tokens,"
    checks.require(is_counted, "num_classes", f"{rule} for task={task!r}", num_classes)


@checked
def load(
    data_dir: pathlib.Path,
    *,
    path: str,
    test_path: str | None = None,
    num_classes: Index | None = None,
    task: Task | None = None,
    max_clients: Count | None = None,
) -> Dataset:
    """Opens a store without reading its examples: memory maps, or chunks of the zarr format.

    Clients are those of the store, for the partition "natural"; one without examples is left out.

    Guarantee: examples are as they were stored. If `save` wrote the folder, privacy statements name
    the exact statistics that entered them; a folder of `FederatedData.save` says nothing of any.

    Args:
      path: a folder that `fedjax-dp data store`, `FederatedData.save` or `FederatedData.save_zarr`
        wrote, with arrays x and y; or an address that `save_zarr` wrote to, such as "gs://…".
      test_path: a store of test examples; not with a folder of `fedjax-dp data store`, which has
        its own test part.
      num_classes: the number of classes or tokens, 0 for regression; known from a folder of
        `fedjax-dp data store`.
      task: what the target means; known from the same, or classification.
      max_clients: how many clients are used, the first of the store; None for all.

    Returns:
      The arrays of the store, read when they are indexed, with the clients' numbers and names.
    """
    place, facts = _place("path", path, data_dir), {}
    test: FederatedData | None = None
    if place.folder is not None and (place.folder / _FACTS).is_file():
        for key, given in (("test_path", test_path), ("num_classes", num_classes), ("task", task)):
            rule = f"be left out, since {place.folder / _FACTS} describes the data"
            checks.require(given is None, key, rule, given)
        facts = _read_facts(place.folder / _FACTS)
        train = FederatedData.open(place.folder / "train")
        if (place.folder / "test").exists():
            test = FederatedData.open(place.folder / "test")
    else:
        facts = {"task": task or "classification", "num_classes": num_classes or 0}
        train = _opened("path", place)
        require_counted(facts["num_classes"], facts["task"])
        if test_path is not None:
            test = _opened("test_path", _place("test_path", test_path, data_dir))
    if test is not None:
        require_same_arrays(train, test)
    if max_clients is not None and max_clients < train.num_clients:
        kept = [np.arange(a, b) for a, b in itertools.pairwise(train.offsets[: max_clients + 1])]
        names = train.client_names[:max_clients]
        train = FederatedData.from_indices(train.examples, kept, names)
    return as_dataset("store", train, test, **{"origin": place.text, **facts})


@checked
def save(
    data: Dataset, directory: str | pathlib.Path, *, format: Literal["npy", "zarr"] = "npy"
) -> None:
    """Writes a data set with natural clients as a store, for the data set "store".

    Both parts are written client after client, a few megabytes at a time, and last what describes
    them, so that an interrupted store does not open. The folder is as private as the data.

    Args:
      data: the data set; arrays on disk are not held in memory.
      directory: an empty or new folder.
      format: "npy" for memory maps, the faster ones; "zarr" for compressible chunks of about a
        megabyte.

    Raises:
      ValueError: if the data set names no clients, or the folder is not empty.
    """
    directory = pathlib.Path(directory)
    rule = f"name clients; {data.name} has none, and a partition spreads its examples over some"
    checks.require(data.train_clients is not None, "the data set", rule, None)
    files.require_folder(directory, "directory", writable=True)
    directory.mkdir(parents=True, exist_ok=True)
    present = sorted(path.name for path in directory.iterdir())
    checks.require(not present, "directory", "be empty, or not exist yet", present)
    for part in ("train", "test"):
        examples, ids = getattr(data, part), getattr(data, f"{part}_clients")
        if not len(examples["y"]):
            continue
        clients = [np.arange(len(examples["y"]))]
        names: tuple[str, ...] = (part,)
        if ids is not None:
            numbers = np.unique(ids).tolist()
            names = tuple(data.client_names[i] if data.client_names else str(i) for i in numbers)
            clients = partition.natural(ids)
        stored = FederatedData.from_indices(examples, clients, names)
        (stored.save if format == "npy" else stored.save_zarr)(directory / part)
    facts = {name: getattr(data, name) for name in _KINDS} | {"num_classes": int(data.num_classes)}
    files.write_text(directory / _FACTS, json.dumps(files.with_digest(facts)) + "\n")


class _Place(NamedTuple):
    """Where a store is: a folder, or the address of an object store."""

    text: str
    folder: pathlib.Path | None


def _place(name: str, path: str, data_dir: pathlib.Path) -> _Place:
    """Finds a folder, in the current one or in that of data files; an address is taken as it is."""
    if "://" in path:
        return _Place(path, None)
    path = os.path.expanduser(path)
    places = dict.fromkeys([pathlib.Path(path), data_dir / path])
    for folder in places:
        if files.kind_of(folder, name) != "missing":
            files.require_folder(folder, name)
            return _Place(str(folder), folder)
    rule = f"be the folder of a store; there is none at {' or '.join(map(str, places))}"
    checks.require(False, name, rule, path)
    raise AssertionError


def _opened(name: str, place: _Place) -> FederatedData:
    """Opens a store that `FederatedData` wrote."""
    if place.folder is not None:
        rule = f"hold a store: {_FACTS} of a finished `fedjax-dp data store`, or {OFFSETS}"
        checks.require((place.folder / OFFSETS).is_file(), name, rule, place.text)
    return FederatedData.open(place.text)


def _read_facts(path: pathlib.Path) -> dict[str, Any]:
    """Reads what describes a saved data set."""
    facts = files.without_digest(files.parse_json(files.read_text(path), path), path)
    rule = f"describe a data set by {', '.join(_KINDS)}"
    checks.require(facts.keys() == _KINDS.keys(), str(path), rule, facts)
    for name, kind in _KINDS.items():
        value = facts[name]
        is_kind = type(value) is kind if kind is not list else isinstance(value, list)
        is_kind = is_kind and (kind is not list or all(isinstance(each, str) for each in value))
        checks.require(is_kind, f"{name} in {path}", f"be a {kind.__name__}", value)
    checks.one_of(f"task in {path}", facts["task"], get_args(Task))
    return {name: tuple(x) if isinstance(x, list) else x for name, x in facts.items()}


class Text(NamedTuple):
    """How a column of text becomes tokens.

    Attributes:
      text: "bytes", or a `tokenizer.json` of the Hugging Face format (extra `text`), in the current
        folder or in that of data files; None if the input is no text.
      sequence_length: tokens of an example; longer texts are cut, shorter ones filled up.
      text_end: whether the tokenizer's end follows each text.
    """

    text: str | None = None
    sequence_length: Count = 128
    text_end: bool = False


@checked
def load_parquet(
    data_dir: pathlib.Path,
    *,
    path: str,
    x: Sequence[str],
    y: str | None = None,
    weight: str | None = None,
    client: str | None = None,
    num_classes: Index = 0,
    classes: Sequence[str] = (),
    task: Literal["classification", "next_token", "regression"] = "classification",
    test_path: str | None = None,
    padding: Mapping[str, Sequence[float]] = {},
    pictures: Pictures = Pictures(),
    texts: Text = Text(),
    store: str | None = None,
) -> Dataset:
    """Loads Parquet files or a saved Hugging Face table, through a store that is written once.

    The files are read in batches and never held in memory; a later run opens the store. With the
    partition "natural" and no test share of clients, training reads cohorts from it. Each row is
    one example, and so one record of the privacy claim: a text longer than `sequence_length` is
    cut, not divided.

    Guarantee: each example depends only on its own row and the options; which classes occur is an
    exact statistic, where labels are text and no classes are declared.

    Args:
      path: a Parquet file, a pattern such as part-*.parquet of several with one schema, or a folder
        that `save_to_disk` of the `datasets` library wrote.
      x: the input column, of numbers or of lists of one length; or several columns of numbers; or
        one of images or, with `text`, of texts.
      y: the target column: classes or tokens from 0, names of classes, or numbers for regression;
        left out if the target is the next token of a text.
      weight: the column of the weights of examples in the loss of training, numbers of at least 0;
        all weigh 1 without it.
      client: the column that names the client of each row, for the partition "natural"; without it
        a partition spreads rows over clients.
      num_classes: the number of classes or tokens, known without the data; 0 for regression, and
        where the classes or the tokenizer give it.
      classes: the names of classes in the order of their numbers; by default those that a Hugging
        Face table declares, or else those that occur, sorted.
      task: what the target means.
      test_path: files of test rows with the same columns.
      padding: for columns of lists of several lengths: the length, and the value that fills
        shorter lists at the end, such as { tokens = [20, 0] }.
      pictures: how images become bytes, see `Pictures`.
      texts: how text becomes tokens, see `Text`.
      store: the folder for stores; by default parquet/ in the data directory. It holds the
        examples, so it is as private as the files.

    Returns:
      Arrays `x` and `y`, memory-mapped, with the clients' ids. Images are bytes, `[height, width,
      channels]`; texts of a classification are filled up by -1.
    """
    checks.require(len(x) > 0, "x", "name at least one column", list(x))
    folder = data_dir / "parquet" if store is None else files.expanded(store)
    train_paths = _table_files("path", path, data_dir)
    test_paths = [] if test_path is None else _table_files("test_path", test_path, data_dir)
    schema = tables.schema_of(train_paths[0])
    for name in (*x, *filter(None, (y, weight))):
        disclosure.require_column("x, y and weight", name, str(train_paths[0]), schema.names)
    used = [*x, *filter(None, (y, weight, client))]
    twice = sorted({name for name in used if used.count(name) > 1})
    checks.require(not twice, "x, y, weight and client", "be different columns", twice)
    readers: dict[str, Reader] = {}
    columns: dict[str, Any] = {"x": list(x)}
    if weight is not None:
        columns["example_weight"] = weight
    facts: list[Any] = [list(classes), pictures._asdict()]
    feature_names: tuple[str, ...] = ()
    is_language = texts.text is not None and task == "next_token"
    rule = "be left out, since the targets are the next tokens" if is_language else "be given"
    checks.require((y is None) == is_language, "y", rule, y)
    kinds = [tables.kind_of(schema, name) for name in x]
    if texts.text is not None:
        checks.require(len(x) == 1 and kinds[0] == "text", "x", "be one column of text", list(x))
        chosen = _tokenizer(texts.text, data_dir)
        if is_language:
            num_classes = num_classes or chosen.size
            require_classes(chosen, num_classes)
        readers["x"] = cell_readers.texts(
            chosen, texts.sequence_length, text_end=texts.text_end, is_target=is_language
        )
        facts.append([chosen.digest, *texts[1:]])
        feature_names = (f"tokens of SHA-256 {chosen.digest}",)
    else:
        checks.require(texts == Text(), "sequence_length and text_end", "be given with text", texts)
        checks.require("text" not in kinds, "text", "be given, as x is a column of text", None)
    has_images = kinds == ["image"]
    rule = "be given for a column of images"
    checks.require(has_images or pictures == Pictures(), "image_size, image_mode", rule, kinds)
    if has_images:
        readers["x"] = cell_readers.images(pictures)
    exact: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    if y is not None:
        columns["y"] = y
        names, exact = _classes(schema, y, classes, task, [*train_paths, *test_paths])
        if names and tables.kind_of(schema, y) == "text":
            readers["y"] = cell_readers.class_names(names)
            facts.append(list(names))
    is_counted = not names or num_classes in (0, len(names))
    checks.require(
        is_counted, "num_classes", f"be {len(names)}, the number of classes", num_classes
    )
    num_classes = len(names) or num_classes
    require_counted(num_classes, task)

    def part(paths: list[pathlib.Path]) -> FederatedData:
        choices = {"client": client, "columns": columns, "padding": dict(padding), "read": facts}

        def write(directory: pathlib.Path) -> None:
            FederatedData.from_parquet(
                paths,
                client,
                columns,
                directory=directory,
                padding=padding,
                readers=readers,
                # Decoded images are large.
                batch_size=256 if has_images else 4096,
            )

        return opened(folder, Source(paths, choices), write)

    train, test = part(train_paths), None
    if test_paths:
        test = part(test_paths)
        require_same_arrays(train, test)
    data = as_dataset(
        "parquet",
        train,
        test,
        num_classes=num_classes,
        task=task,
        class_names=names,
        feature_names=feature_names,
        origin=", ".join(map(str, [*train_paths, *test_paths])),
        exact_statistics=exact,
    )
    if client is not None:
        return data
    return dataclasses.replace(data, train_clients=None, test_clients=None, client_names=())


def _table_files(name: str, where: str, data_dir: pathlib.Path) -> list[pathlib.Path]:
    """Finds the files of a path or pattern, or of a folder that `save_to_disk` wrote."""
    for place in (pathlib.Path(), data_dir):
        folder = place / os.path.expanduser(where)
        if files.kind_of(folder, name) == "folder":
            return tables.saved_files(folder)
    return find_files(name, where, data_dir)


def _tokenizer(text: str, data_dir: pathlib.Path) -> Tokenizer:
    """Reads a tokenizer file, in the current folder or in that of data files."""
    if text == BYTES:
        return tokenizer(text)
    return tokenizer(str(find_files("text", text, data_dir)[0]))


def _classes(
    schema: Any, y: str, classes: Sequence[str], task: str, paths: list[pathlib.Path]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Returns the names of classes, or none, and the exact statistics that they are of."""
    is_text, is_classified = tables.kind_of(schema, y) == "text", task == "classification"
    checks.require(is_classified or not is_text, "y", f"hold numbers, as task is {task!r}", y)
    checks.require(is_classified or not classes, "classes", "be left out", classes)
    declared = cell_readers.declared_classes(schema, y) if is_classified else ()
    fits = not classes or tuple(classes) == (declared or tuple(classes))
    rule = "be those that the table itself declares, in their order"
    disclosure.require(fits, "classes", rule, classes)
    if classes or declared or not is_text:
        return tuple(classes) or declared, ()
    found: set[str] = set()
    for part in tables.parquet_parts(paths, 4096, None).parts([y]):
        found |= set(cell_readers.texts_of(tables.cells_of(part, y)))
        rule = f"hold at most {_MOST_CLASSES} names, unless classes lists them"
        disclosure.require(len(found) <= _MOST_CLASSES, f"column {y!r}", rule, len(found))
    exact = f"which values occur in {y!r}, since no classes were declared"
    return tuple(sorted(found)), (exact,)
