"""Damaged data files, one at a time: each is refused by name, or read as what it was."""

import contextlib
import functools
import gzip
import io
import json
import math
import pathlib
import pickle
import shutil
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from data_files import (
    IDS,
    IDX_CODES,
    archived,
    binary,
    cifar100_files,
    cifar_batches,
    cifar_files,
    emnist_files,
    idx,
    images_of,
    write_mnist,
    write_tiny_imagenet,
    zipped,
)
from marks import later, telling

from fedjax_dp.data import FederatedData, datasets
from fedjax_dp.data.datasets import public_tables
from fedjax_dp.data.datasets.tabular import Numeric
from fedjax_dp.io.params import read_params, write_params

SEED = 18


class Harm(NamedTuple):
    """A damaged file; `excuse` says why it may be read as other data, if it may."""

    what: str
    path: pathlib.Path
    # None where it is gone; a folder where it is "folder".
    content: bytes | str | None
    # The line that has to be named.
    line: int = 0
    excuse: str = ""
    # Other names that the refusal may give it.
    names: tuple[str, ...] = ()
    # Whether it may hold other data, which must be valid.
    is_any: bool = False


class Reader(NamedTuple):
    """One way to read data; strings name files that may be absent, doubled or exchanged."""

    write: Callable[[pathlib.Path, np.random.Generator], Any]
    read: Callable[[pathlib.Path], Any]
    harms: Callable[[pathlib.Path, np.random.Generator], Iterator[Harm]] = lambda f, r: iter(())
    # `(file, offset, new byte)` and `(file, bytes left)` to an excuse.
    may_flip: Callable[[pathlib.Path, int, int], str] = lambda path, at, new: ""
    may_cut: Callable[[pathlib.Path, int], str] = lambda path, left: ""
    may_go: str = ""
    may_double: str = ""
    alike: str = ""


def general_harms(
    reader: Reader, files: list[pathlib.Path], rng: np.random.Generator
) -> Iterator[Harm]:
    """What can happen to any file."""
    for path in files:
        data = path.read_bytes()
        for _ in range(3):
            left = int(rng.integers(1, len(data)))
            yield Harm("cut", path, data[:left], excuse=reader.may_cut(path, left))
        yield Harm("last byte gone", path, data[:-1], excuse=reader.may_cut(path, len(data) - 1))
        for _ in range(5):
            at, flip = int(rng.integers(len(data))), int(rng.integers(1, 256))
            flipped = data[:at] + bytes([data[at] ^ flip]) + data[at + 1 :]
            excuse = reader.may_flip(path, at, data[at] ^ flip)
            yield Harm(f"byte {at} flipped", path, flipped, excuse=excuse)
        gone = "may be absent" if _is_in(path, reader.may_go) else ""
        # Some folders have to hold any file.
        folder = (path.parent.name,) if path.parent.name in ("train", "test", "images") else ()
        yield Harm("gone", path, None, excuse=gone, names=folder)
        yield Harm("a folder", path, "folder", excuse=gone)
        yield Harm("empty", path, b"")
        yield Harm("noise", path, rng.bytes(len(data)))
        yield Harm("zeros", path, bytes(len(data)))
        yield Harm("a cut gzip file", path, gzip.compress(data)[:-3])
        double = "any number of rows" if _is_in(path, reader.may_double) else ""
        yield Harm("twice", path, data + data, excuse=double)
    for path, other in zip(files, files[1:] + files[:1], strict=True):
        if path != other and path.read_bytes() != other.read_bytes():
            alike = _is_in(path, reader.alike) and _is_in(other, reader.alike)
            excuse = "of one form" if alike else ""
            yield Harm("another's", path, other.read_bytes(), excuse=excuse)


def text_harms(path: pathlib.Path, rng: np.random.Generator) -> Iterator[Harm]:
    """What can happen to a text file."""
    data = path.read_bytes()
    for what, byte in (("a latin-1 letter", b"\xe9"), ("a NUL", b"\0")):
        at = int(rng.integers(len(data)))
        line = data.count(b"\n", 0, at) + 1
        yield Harm(what, path, data[:at] + byte + data[at:], line)
    text = data.decode("utf-8")
    yield Harm("UTF-16", path, text.encode("utf-16"))
    yield Harm("UTF-16 without mark", path, text.encode("utf-16-le"))
    yield Harm("a byte order mark", path, text.encode("utf-8-sig"))
    yield Harm("a blank line behind", path, data + b"\n")
    yield Harm("line ends of Windows", path, data.replace(b"\n", b"\r\n"))
    yield Harm("a word for it all", path, b"hello\n", 1)


def table_harms(
    path: pathlib.Path,
    rng: np.random.Generator,
    separator: str,
    numeric: list[int],
    words: list[int],
) -> Iterator[Harm]:
    """What can happen to a table; the last column holds the target."""
    lines = path.read_text(encoding="utf-8").splitlines()
    rows = [i for i, line in enumerate(lines) if not line.startswith("|")]

    def changed(what: str, row: int, cells: list[str]) -> Harm:
        new = [*lines[:row], separator.join(cells), *lines[row + 1 :]]
        return Harm(what, path, ("\n".join(new) + "\n").encode(), row + 1)

    for word in ("1e999", "-1e999", "1e39", "nan", "inf", "text", "", "1_0", "0x1f", "٣", "1 2"):
        row = int(rng.choice(rows))
        cells = lines[row].split(separator)
        cells[int(rng.choice(numeric))] = word
        yield changed(f"{word!r} for a number", row, cells)
    for column in words:
        for word in ("no such word", "", "x" * 40, "#"):
            row = int(rng.choice(rows))
            cells = lines[row].split(separator)
            cells[column] = word
            yield changed(f"{word!r} in column {column}", row, cells)
    for word in ("9", "-1", "nan", "?", "1e999"):
        row = int(rng.choice(rows))
        yield changed(f"{word!r} for the target", row, [*lines[row].split(separator)[:-1], word])
    row = int(rng.choice(rows))
    cells = lines[row].split(separator)
    yield changed("a short row", row, cells[:-2])
    yield changed("a long row", row, [*cells, cells[-1]])
    yield changed("a header", row, [f"c{i}" for i in range(len(cells))])
    yield changed("a remark", row, ["# no row"])
    yield changed("another separator", row, [";".join(cells)])


# What may stand where something else belongs.
JUNK = (
    *(None, True, -1, 1.5, 62, 10**40, 10**400, math.nan, math.inf, "3", "", [], [3], {}),
    {"a": 1},
)


def at_every_place(tree: Any, junk: Sequence[Any] = JUNK, place: str = "") -> Iterator[Any]:
    """Gives a tree with junk for each part, and without it; of a list its first and last entry."""
    yield from ((f"{place or 'all'} = {str(one)[:9]}", one) for one in junk)
    if isinstance(tree, dict):
        parts = list(tree)
    else:
        parts = sorted({0, len(tree) - 1}) if isinstance(tree, list) and tree else []
    for part in parts:
        rest = dict(tree) if isinstance(tree, dict) else list(tree)
        kept = rest.pop(part)
        yield f"no {place}/{part}", rest
        for what, inner in at_every_place(kept, junk, f"{place}/{part}"):
            changed = dict(tree) if isinstance(tree, dict) else list(tree)
            changed[part] = inner
            yield what, changed


def other_arrays(array: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """Gives arrays of other shapes, types and values."""
    yield "one less", array[:-1]
    yield "none", array[:0]
    yield "one more", np.concatenate([array, array[:1]])
    yield "one axis", array.ravel()
    yield "another axis", array[None]
    yield "one number", np.array(array.ravel()[0])
    if array.ndim > 1:
        yield "less in each", np.ascontiguousarray(array[..., :-1])
    for dtype in ("bool", "int8", "int32", "float32", "complex64", "U3", "S3", "V2", "M8[D]"):
        with contextlib.suppress(TypeError, ValueError):
            yield f"of {dtype}", array.astype(dtype)
    for value in (-1, 10, 62, 255, 0.5, math.nan, math.inf, 1e300):
        changed = array.astype(float if isinstance(value, float) else int)
        changed.flat[-1] = value
        yield f"{value} at the end", changed
    for value in (None, {}):
        yield f"objects such as {value}", np.full(array.shape, value, object)


def are_whole(labels: Any) -> bool:
    """Whether labels are whole numbers of any type; truth values and texts are none."""

    def is_whole(label: Any) -> bool:
        if isinstance(label, float | np.floating):
            return float(label).is_integer()
        return isinstance(label, int | np.integer) and not isinstance(label, bool)

    return all(map(is_whole, np.asarray(labels, object).ravel()))


def _is_in(path: pathlib.Path, names: str) -> bool:
    return path.name in names.split()


def of_numbers(path: pathlib.Path, at: int, new: int) -> str:
    """A digit that becomes another leaves a table of valid cells."""
    is_digit = path.read_bytes()[at : at + 1] in b"0123456789.-?"
    return "a digit of a number" if is_digit else ""


def whole_rows(path: pathlib.Path, left: int) -> str:
    """Lines that are left whole are a table, a shorter one."""
    data = path.read_bytes()
    return "whole rows" if b"\n" in (data[left - 1 : left], data[left : left + 1]) else ""


def flip_idx(path: pathlib.Path, at: int, new: int) -> str:
    if path.suffix == ".gz":
        return ""
    if "images" in path.name:
        return "a pixel" if at >= 16 else ""
    return "a label" if at >= 8 and new <= 9 else ""


def idx_arrays(path: pathlib.Path, array: np.ndarray, names: tuple[str, ...]) -> Iterator[Harm]:
    """Other arrays in an IDX file, as far as the format has their types."""
    for what, other in other_arrays(array):
        if str(other.dtype) in IDX_CODES and other.ndim:
            yield Harm(what, path, idx(other), names=names, is_any=True)


def idx_harms(folder: pathlib.Path, rng: np.random.Generator) -> Iterator[Harm]:
    images = folder / "t10k-images-idx3-ubyte"
    labels = folder / "t10k-labels-idx1-ubyte"
    yield from idx_arrays(images, images_of(rng, 4), (labels.name,))
    yield from idx_arrays(labels, np.arange(4, dtype=np.uint8), (images.name,))
    for wrong in (10, 255):
        yield Harm(f"label {wrong}", labels, idx(np.array([0, 1, 2, wrong], np.uint8)))
    for head in (b"\0\0\x08\x00", b"\0\0\x08\xff" + bytes(4 * 255), b"\0\0\x07\x01\0\0\0\x04abcd"):
        yield Harm(f"header {head[:4]!r}", labels, head)
    huge = bytes([0, 0, 8, 4]) + struct.pack(">4I", 2**31, 2**31, 4, 1)
    yield Harm("a size that no integer holds", images, huge)


def write_zip(folder: pathlib.Path, rng: np.random.Generator) -> None:
    (folder / "gzip.zip").write_bytes(zipped(emnist_files(rng)[0]))


def zip_harms(folder: pathlib.Path, rng: np.random.Generator) -> Iterator[Harm]:
    path, whole = folder / "gzip.zip", emnist_files(rng)[0]
    data = path.read_bytes()
    for i, name in enumerate(whole):
        yield Harm(f"without {name}", path, zipped({k: v for k, v in whole.items() if k != name}))
        yield Harm(f"{name} damaged", path, zipped(whole | {name: whole[name][:-9]}))
        # The entry's flags, in both places: now it asks for a password.
        at, directory = 0, 0
        for _ in range(i + 1):
            at, directory = data.index(b"PK\3\4", at) + 6, data.index(b"PK\1\2", directory) + 8
        locked = bytearray(data)
        locked[at] |= 1
        locked[directory] |= 1
        yield Harm("a password", path, bytes(locked))
        method = bytearray(data)
        method[at + 2] = method[directory + 2] = 99
        yield Harm("a method that there is not", path, bytes(method))
    yield Harm("labels", path, zipped(emnist_files(rng, first_label=90)[0]))


def write_archive(folder: pathlib.Path, rng: np.random.Generator) -> None:
    (folder / "cifar-10-binary.tar.gz").write_bytes(archived(cifar_files(cifar_batches(rng, 2))))


def archive_harms(folder: pathlib.Path, rng: np.random.Generator) -> Iterator[Harm]:
    path, whole = folder / "cifar-10-binary.tar.gz", cifar_files(cifar_batches(rng, 2))
    for name in whole:
        some = {k: v for k, v in whole.items() if k != name}
        yield Harm(f"without {name}", path, archived(some))
    name, images = next(iter(whole)), np.zeros((2, 32, 32, 3), np.uint8)
    for what, batch in (
        ("a cut batch", whole[name][:-9]),
        ("label 10", binary(images, [0, 10])),
        ("label 255", binary(images, [255, 0])),
        ("images of 31x32", binary(images[:, 1:], [1, 2])),
        ("grey images", binary(images[..., :1], [1, 2])),
    ):
        yield Harm(what, path, archived(whole | {name: batch}))
    plain = archived(whole, "w:")
    # The header of the fourth member: there the archive would end.
    block = 512 * (1 + -(-len(whole[name]) // 512))
    bad = bytearray(plain)
    bad[3 * block + 3] ^= 1
    yield Harm("a damaged header", path, gzip.compress(bytes(bad)))
    yield Harm("a cut archive, packed whole", path, gzip.compress(plain[: 3 * block + 99]))
    yield Harm("a zip archive", path, zipped(whole))


def write_two_labels(folder: pathlib.Path, rng: np.random.Generator) -> None:
    (folder / "cifar-100-binary.tar.gz").write_bytes(archived(cifar100_files(rng, 2)[0]))


def two_labels_harms(folder: pathlib.Path, rng: np.random.Generator) -> Iterator[Harm]:
    path, whole = folder / "cifar-100-binary.tar.gz", cifar100_files(rng, 2)[0]
    for name in whole:
        # Names of the other kind of label are not read.
        if "coarse" not in name:
            yield Harm(f"without {name}", path, archived({k: whole[k] for k in whole if k != name}))
    row = whole[(name := "cifar-100-binary/train.bin")]
    for what, changed in (
        ("a cut batch", row[:-9]),
        ("coarse label 20", bytes([20]) + row[1:]),
        ("fine label 100", row[:1] + bytes([100]) + row[2:]),
        ("rows of one label", binary(np.zeros((2, 32, 32, 3), np.uint8), [1, 2])),
    ):
        yield Harm(what, path, archived(whole | {name: changed}))
    names = "cifar-100-binary/fine_label_names.txt"
    yield Harm("99 names", path, archived(whole | {names: whole[names].replace(b"fine_9\n", b"")}))
    yield Harm("names in Latin-1", path, archived(whole | {names: b"\xe9" + whole[names]}))


BOX = f"val_0.JPEG\t{IDS[0]}\t0\t0\t9\t".encode()


def flip_tiny(path: pathlib.Path, at: int, new: int) -> str:
    return "a pixel, a box or a name" if path.name != "wnids.txt" else ""


def tiny_harms(folder: pathlib.Path, rng: np.random.Generator) -> Iterator[Harm]:
    lists, ids, words = (folder / n for n in ("val/val_annotations.txt", "wnids.txt", "words.txt"))
    strange = b"val_0.JPEG\tn99999999\t0\t0\t9\t9\n"
    for line in (strange, BOX, BOX.replace(b"val_0", b"../a") + b"9", BOX + b"65", BOX + b"9"):
        yield Harm(f"the list {line!r}", lists, line)
    lines, names = ids.read_bytes().splitlines(), words.read_bytes().splitlines()
    for at, line in ((1, b"katze"), (0, lines[1])):
        yield Harm(f"the class {line!r}", ids, b"\n".join([*lines[:at], line, *lines[at + 1 :]]))
    for at, line in ((1, b""), (0, b"n02124075 cat")):
        yield Harm(f"the name {line!r}", words, b"\n".join([*names[:at], line, *names[at + 1 :]]))


def leaf(rng: np.random.Generator, users: tuple[str, ...] = ("f1", "f2")) -> dict[str, Any]:
    pixels = {user: rng.integers(0, 256, (2, 784)) / 255 for user in users}
    return {
        "users": list(users),
        "num_samples": [2 for _ in users],
        "user_data": {u: {"x": x.round(3).tolist(), "y": [3, 61]} for u, x in pixels.items()},
    }


def write_leaf(folder: pathlib.Path, rng: np.random.Generator) -> None:
    for part in ("train", "test"):
        (folder / part).mkdir(parents=True)
        (folder / part / "all_data_0.json").write_text(json.dumps(leaf(rng)))


def leaf_labels(content: Any) -> list[Any]:
    """Whatever stands where a file of LEAF has its labels."""
    users = content.get("user_data") if isinstance(content, dict) else None
    users = users.values() if isinstance(users, dict) else ()
    return [user["y"] for user in users if isinstance(user, dict) and "y" in user]


def leaf_harms(folder: pathlib.Path, rng: np.random.Generator) -> Iterator[Harm]:
    path = folder / "test" / "all_data_0.json"

    whole, row = leaf(rng), [0.5] * 784
    for what, content in at_every_place(whole):
        names = ("test",) if content == [] else ()
        is_any = all(map(are_whole, leaf_labels(content)))
        yield Harm(what, path, json.dumps(content).encode(), names=names, is_any=is_any)
    for x in ([row[1:], row[1:]], [row, row[1:]], row * 2, {"0": row}, [row, [255, *row[1:]]]):
        content = leaf(rng)
        content["user_data"]["f2"]["x"] = x
        yield Harm("other images", path, json.dumps(content).encode())
    for users in (["f1"], ["f1", "f2", "f3"], ["f1", "f1"], ["f2", 3], ["f1", "f2", "f2"]):
        yield Harm(f"users {users}", path, json.dumps(whole | {"users": users}).encode())
    twice = json.dumps(whole).replace('"f2": {', '"f1": {').encode()
    yield Harm("a user twice", path, twice)
    for content in (b"[]", b"3", b"null", b"{}", b"[" * 100_000, b"1" * 5000, b'{"users": 1e999}'):
        yield Harm(f"JSON {content[:9]!r}", path, content)
    gone = {"users": [], "num_samples": [], "user_data": {}}
    yield Harm("no users", path, json.dumps(gone).encode(), names=("test",))
    yield from text_harms(path, rng)


def row_of(columns: Any, rng: np.random.Generator) -> list[str]:
    return [
        str(rng.integers(c.low, c.high + 1))
        if isinstance(c, Numeric)
        else str(rng.choice(c.values))
        for c in columns
    ]


def write_adult(folder: pathlib.Path, rng: np.random.Generator) -> None:
    for name, head, stop in (("adult.data", "", ""), ("adult.test", "|1x3 Cross validator\n", ".")):
        rows = [
            ", ".join([*row_of(public_tables.ADULT, rng), ("<=50K", ">50K")[i % 2] + stop])
            for i in range(6)
        ]
        (folder / name).write_text(head + "\n".join(rows) + "\n")


def adult_harms(folder: pathlib.Path, rng: np.random.Generator) -> Iterator[Harm]:
    numeric = [i for i, c in enumerate(public_tables.ADULT) if isinstance(c, Numeric)]
    for name in ("adult.data", "adult.test"):
        yield from text_harms(folder / name, rng)
        yield from table_harms(folder / name, rng, ", ", numeric, [1, 9])


def write_store(folder: pathlib.Path, rng: np.random.Generator) -> None:
    examples = {
        "x": {"ids": rng.integers(0, 9, (7, 3)), "mask": rng.random((7, 3)) > 0.5},
        "y": rng.random(7).astype(np.float32),
    }
    FederatedData(examples, np.array([0, 2, 2, 7]), ("ann", "bob", "cé")).save(folder)
    # As files of others, whose damage no digest detects.
    (folder / "digests.json").unlink()


def read_store(folder: pathlib.Path) -> Any:
    store = FederatedData.open(folder)
    return {k: np.array(v) for k, v in store.examples.items()}, store.offsets, store.client_names


def flip_store(path: pathlib.Path, at: int, new: int) -> str:
    if path.name == "client_names.txt":
        return "a letter of a name"
    if path.name == "offsets.npy" and at >= 128:
        return "a border between two clients"
    head = path.read_bytes()[:128]
    descr = head.index(b"'descr': '") + len("'descr': '")
    is_type = descr <= at < head.index(b"'", descr)
    return "a value" if at >= 128 else "the type" if is_type else ""


def cut_store(path: pathlib.Path, left: int) -> str:
    is_last = path.name == "client_names.txt" and path.read_bytes()[:left].count(b"\n") == 2
    return "a shorter name" if is_last else ""


def saved(array: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=True)
    return buffer.getvalue()


def store_harms(folder: pathlib.Path, rng: np.random.Generator) -> Iterator[Harm]:
    y, offsets, names = (folder / n for n in ("y.npy", "offsets.npy", "client_names.txt"))
    store = (folder.name,)
    for what, array in other_arrays(np.zeros(7)):
        yield Harm(f"{what} in y", y, saved(array), names=store, is_any=True)
    for what, array in other_arrays(np.array([0, 2, 2, 7])):
        yield Harm(f"{what} in the offsets", offsets, saved(array), names=store, is_any=True)
    for what, array in (
        ("a decrease", np.array([0, 3, 2, 7])),
        ("no 0", np.array([1, 2, 2, 7])),
        ("huge ones", np.array([0, 2**63, 2**64 - 1, 7], np.uint64)),
    ):
        yield Harm(f"{what} in the offsets", offsets, saved(array), names=store)
    for text in ("ann\nbob\n", "ann\nbob\ncy\ndee\n", "\n"):
        yield Harm(f"the names {text!r}", names, text.encode(), names=store)
    yield Harm("latin-1 names", names, b"ann\nbob\nc\xe9\n", 3)
    yield Harm("UTF-16 names", names, "ann\nbob\ncy\n".encode("utf-16"), 1)
    buffer = io.BytesIO()
    np.savez(buffer, y=np.zeros(7))
    yield Harm("an archive for y", y, buffer.getvalue())
    yield Harm("a pickle for y", y, pickle.dumps(np.zeros(7)))
    yield Harm("text for y", y, b"1\n2\n3\n")


def write_parameters(form: Any) -> Callable[[pathlib.Path, np.random.Generator], None]:
    def write(folder: pathlib.Path, rng: np.random.Generator) -> None:
        params = {"w": rng.random((4, 3)).astype(np.float32), "b": np.zeros(3, np.float32)}
        write_params(folder / f"model.{form}", {"params": params}, form)

    return write


def flip_safetensors(path: pathlib.Path, at: int, new: int) -> str:
    data = path.read_bytes()
    if at >= 8 + int.from_bytes(data[:8], "little"):
        return "a value"
    is_name = any(
        data.index(name) <= at < data.index(name) + len(name) for name in (b"params/w", b"params/b")
    )
    return "a name" if is_name else ""


def npz_harms(folder: pathlib.Path, rng: np.random.Generator) -> Iterator[Harm]:
    path = folder / "model.npz"
    yield Harm("one array", path, saved(np.zeros(3)))
    yield Harm("a pickle", path, pickle.dumps({"a": np.zeros(3)}))
    yield Harm("objects", path, zipped({"a.npy": saved(np.array([None]))}))
    yield Harm("text in it", path, zipped({"a.txt": b"hello"}))
    yield Harm("text for an array", path, zipped({"a.npy": b"hello"}))
    yield Harm("a cut array", path, zipped({"a.npy": saved(np.zeros(9))[:-9]}))


def safetensors_harms(folder: pathlib.Path, rng: np.random.Generator) -> Iterator[Harm]:
    path = folder / "model.safetensors"
    for head in (b"{}", b"[]", b"3", b'{"a": 3}', b'{"a": {"dtype": "F32", "shape": [3]}}'):
        content = struct.pack("<Q", len(head)) + head
        yield Harm(f"the header {head!r}", path, content + bytes(12))
    for dtype, shape, offsets in (("F33", [3], [0, 12]), ("F32", [4], [0, 12]), ("F32", [-3], [0])):
        tensor = {"a": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}
        head = json.dumps(tensor).encode()
        yield Harm(f"{tensor}", path, struct.pack("<Q", len(head)) + head + bytes(12))
    yield Harm("a huge header", path, struct.pack("<Q", 2**62) + b"{}")


def named(name: str, **options: Any) -> Callable[[pathlib.Path], Any]:
    return lambda folder: datasets.load(name, folder, **options)


# By the folder in which the files are looked for.
READERS = {
    "mnist": Reader(
        functools.partial(write_mnist, num_train=6, num_test=4), named("mnist"), idx_harms, flip_idx
    ),
    "emnist/zip": Reader(write_zip, named("emnist", split="letters"), zip_harms),
    "cifar10": Reader(write_archive, named("cifar10"), archive_harms),
    "cifar100": Reader(write_two_labels, named("cifar100"), two_labels_harms),
    "tiny-imagenet-200": Reader(
        functools.partial(write_tiny_imagenet, num_train=1, num_test=1),
        named("tiny_imagenet"),
        tiny_harms,
        flip_tiny,
        lambda path, left: "an image" if path.suffix == ".JPEG" else "whole rows",
        may_double="words.txt",
        alike=" ".join(f"{wnid}_0.JPEG val_{i}.JPEG" for i, wnid in enumerate(IDS)),
    ),
    "femnist": Reader(
        write_leaf, named("femnist"), leaf_harms, of_numbers, alike="all_data_0.json"
    ),
    "adult": Reader(
        write_adult,
        named("adult"),
        adult_harms,
        of_numbers,
        whole_rows,
        may_double="adult.data adult.test",
    ),
    "store": Reader(
        write_store,
        read_store,
        store_harms,
        flip_store,
        cut_store,
        may_go="ids.npy mask.npy y.npy client_names.txt",
        alike="ids.npy mask.npy y.npy",
    ),
    "npz": Reader(
        write_parameters("npz"), lambda folder: read_params(folder / "model.npz"), npz_harms
    ),
    "safetensors": Reader(
        write_parameters("safetensors"),
        lambda folder: read_params(folder / "model.safetensors"),
        safetensors_harms,
        flip_safetensors,
    ),
}


def place(name: str, root: pathlib.Path) -> tuple[pathlib.Path, pathlib.Path]:
    """Gives the folder that a reader is given, and the one in which its files lie."""
    base = name.split("/")[0]
    root = root / name.replace("/", "-").replace(" ", "-")
    if base in ("store", "npz", "safetensors"):
        return root / base, root / base
    return root, root / base


def is_same(found: Any, whole: Any) -> bool:
    found, whole = (
        {f.name: getattr(v, f.name) for f in v.__dataclass_fields__.values()}
        if isinstance(v, datasets.Dataset)
        else v
        for v in (found, whole)
    )
    if jax.tree.structure(found) != jax.tree.structure(whole):
        return False
    return all(
        np.array_equal(a, b) and np.asarray(a).dtype == np.asarray(b).dtype
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(whole), strict=True)
    )


def is_valid(found: Any) -> bool:
    """Whether what was read is data that could be trained on; a store has checked itself."""
    if not isinstance(found, datasets.Dataset):
        return True
    parts = [(np.asarray(p["x"]), np.asarray(p["y"])) for p in (found.train, found.test)]
    return all(
        x.dtype == np.float32
        and x.shape[1:] == parts[0][0].shape[1:]
        and (x >= 0).all()
        and (x <= 1).all()
        and y.dtype.kind in "iu"
        and len(x) == len(y) > 0
        and (y >= 0).all()
        and (y < found.num_classes).all()
        for x, y in parts
    )


def outcome(reader: Reader, folder: pathlib.Path, harm: Harm, whole: Any) -> str:
    """Reads a harmed folder; what is no outcome to be had starts with "WRONG"."""
    try:
        found = reader.read(folder)
    except (ValueError, OSError) as error:
        message = str(error)
        has_rule = " must " in message or (isinstance(error, OSError) and error.errno)
        has_rule = has_rule or isinstance(error, datasets.MissingDataError)
        has_rule = has_rule or "there is no file" in message
        known = (harm.path.name.removesuffix(".gz"), *harm.names)
        if not any(name in message for name in known):
            return f"WRONG, no file is named: {message[:300]}"
        if not has_rule:
            return f"WRONG, no rule is named: {message[:300]}"
        if harm.line and f"line {harm.line}" not in message:
            return f"WRONG, line {harm.line} is not named: {message[:300]}"
        return "refused"
    except Exception as error:
        return f"WRONG, {type(error).__name__}: {str(error)[:300]}"
    if is_same(found, whole):
        return "read as what it was"
    if harm.is_any:
        return "read as other valid data" if is_valid(found) else "WRONG, read as no valid data"
    return f"not detectable: {harm.excuse}" if harm.excuse else "WRONG, read as something else"


def harmed(name: str, root: pathlib.Path) -> Iterator[tuple[Harm, str]]:
    """Harms the files of a reader one after another; gives each harm and its outcome."""
    reader, rng = READERS[name], np.random.default_rng([SEED, *name.encode()])
    given, folder = place(name, root)
    folder.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(folder)
    if name not in ("femnist", "store"):
        folder.mkdir(parents=True)
    reader.write(folder, rng)
    whole = reader.read(given)
    files = [p for p in sorted(folder.rglob("*")) if p.is_file()]
    for harm in [*general_harms(reader, files, rng), *reader.harms(folder, rng)]:
        before = harm.path.read_bytes() if harm.path.is_file() else None
        harm.path.parent.mkdir(parents=True, exist_ok=True)
        harm.path.unlink(missing_ok=True)
        if harm.content == "folder":
            harm.path.mkdir()
        elif isinstance(harm.content, bytes):
            harm.path.write_bytes(harm.content)
        yield harm, outcome(reader, given, harm, whole)
        if harm.path.is_dir():
            harm.path.rmdir()
        elif harm.path.exists():
            harm.path.unlink()
        if before is not None:
            harm.path.write_bytes(before)
        elif not any(harm.path.parent.iterdir()):
            harm.path.parent.rmdir()
    assert is_same(reader.read(given), whole)


@pytest.mark.parametrize(
    ("name", "content", "line"),
    [
        ("adult.data", b"39, Private\n", "line 1 must have 15 columns"),
        ("adult.test", b"\xff\xfe", "line 1 must be text in UTF-8"),
        ("adult.test", None, "missing: adult.test"),
    ],
)
def test_the_command_ends_in_words_and_status_2(tmp_path, fedjax_dp, name, content, line):
    (tmp_path / "adult").mkdir()
    write_adult(tmp_path / "adult", np.random.default_rng(SEED))
    (tmp_path / "adult" / name).unlink()
    if content is not None:
        (tmp_path / "adult" / name).write_bytes(content)
    words = [
        *("run", "--data.name=adult", "--data.options.scaling=range"),
        *(f"--data.data_dir={tmp_path}", "--model.name=logistic_regression"),
    ]
    status, _, said = fedjax_dp(*words, f"--output={tmp_path / 'run'}")
    assert status == 2 and "\nerror: " in said and "Traceback" not in said
    assert name in said and line in said


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", later(READERS, but=["mnist", "adult", "store"], mark=telling))
def test_damaged_files_are_refused_by_name_or_read_as_what_they_were(tmp_path, name):
    found = [
        (f"{h.path.name}, {h.what}: {outcome}", outcome) for h, outcome in harmed(name, tmp_path)
    ]
    wrong = [text for text, outcome in found if outcome.startswith("WRONG")]
    assert not wrong, f"{len(wrong)} of {len(found)}:\n" + "\n".join(wrong)
    # Of flipped bytes some are in parts of a file that nothing reads.
    assert sum(outcome == "refused" for _, outcome in found) >= min(20, 0.8 * len(found))
