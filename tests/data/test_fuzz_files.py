"""Harmed data files for every reader: refused with file and place, or read as the valid ones."""

import collections
import gzip
import io
import json
import pickle
import re
import shutil
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
from marks import telling
from test_datasets_formats import binary, cifar_batches, femnist_writers, idx_bytes, pickled, planes

from fedjax_dp.data import FederatedData, datasets
from fedjax_dp.data.datasets import cifar
from fedjax_dp.data.federated import flat
from fedjax_dp.io.params import read_params, write_params

SEED = 20_261


class Case(NamedTuple):
    """A set of valid files, how it is read, and harm that its format can be done.

    `files` gives contents by path below the folder; `harms` gives, for each name of a harm,
    contents that take the place of some. `is_line` tells that errors name a line.
    """

    files: Callable[[np.random.Generator], dict[str, bytes]]
    read: Callable[[Any], Any]
    harms: Callable[[dict[str, bytes]], Iterator[tuple[str, dict[str, bytes]]]]
    is_line: bool = False


def loader(name: str, **options: Any) -> Callable[[Any], Any]:
    return lambda folder: datasets.load(name, folder, **options)


def no_harms(files):
    return iter(())


# MNIST and what is like it.


def mnist_files(rng, count=6):
    files = {}
    for part in ("train", "t10k"):
        x = rng.integers(0, 256, (count, 28, 28)).astype(np.uint8)
        y = rng.integers(0, 10, count).astype(np.uint8)
        files[f"mnist/{part}-images-idx3-ubyte.gz"] = gzip.compress(idx_bytes(x))
        files[f"mnist/{part}-labels-idx1-ubyte.gz"] = gzip.compress(idx_bytes(y))
    return files


def writer_files(rng):
    files = mnist_files(rng)
    for name, part in (("train", "train"), ("test", "t10k")):
        labels = np.frombuffer(gzip.decompress(files[f"mnist/{part}-labels-idx1-ubyte.gz"]), "u1")
        table = np.zeros((6, 8), np.int32)
        table[:, 0], table[:, 2] = labels[8:], np.arange(6) // 2
        files[f"mnist/qmnist-{name}-labels-idx2-int.gz"] = gzip.compress(idx_bytes(table))
    return files


def image_harms(images, labels, num_classes, first=0):
    """Images and labels of other shapes, types and ranges, for files that are packed IDX."""

    def harms(files):
        x = np.zeros((6, 28, 28), np.uint8)
        y = np.full(6, first, np.uint8)
        for name, array in {
            "images of 27 x 28": x[:, 1:],
            "images of 28 x 27": x[:, :, 1:],
            "images without an axis": x[0],
            "images in a row": x.reshape(6, -1),
            "images of another type": x.astype(np.float64),
            "no images": x[:0],
            "more images": np.zeros((7, 28, 28), np.uint8),
            "labels for images": y,
        }.items():
            yield name, {images: gzip.compress(idx_bytes(array))}
        for name, array in {
            "a label too large": np.where(np.arange(6) == 3, first + num_classes, y).astype("u1"),
            "a label below zero": np.where(np.arange(6) == 3, first - 1, y).astype(np.int32),
            "labels of two axes": y[:, None],
            "labels that are fractions": y + 0.5,
            "fewer labels": y[1:],
            "images for labels": x,
        }.items():
            yield name, {labels: gzip.compress(idx_bytes(array))}

    return harms


def writer_harms(files):
    name = "mnist/qmnist-train-labels-idx2-int.gz"
    labels = np.frombuffer(gzip.decompress(files["mnist/train-labels-idx1-ubyte.gz"]), "u1")[8:]
    table = np.zeros((6, 8), np.int32)
    table[:, 0] = labels
    for harm, array in {
        "7 columns": table[:, 1:],
        "fewer rows": table[:5],
        "one axis": table[:, 0],
        "other labels": np.where(np.arange(8) == 0, table + 1, table),
    }.items():
        yield harm, {name: gzip.compress(idx_bytes(np.ascontiguousarray(array)))}


# CIFAR-10.


def cifar_files(source):
    def files(rng):
        batches = cifar_batches(rng, 2)
        write, suffix = (pickled, "") if "python" in source else (binary, ".bin")
        contents = {name + suffix: write(*batch) for name, batch in batches.items()}
        inner = "cifar-10-batches-py" if "python" in source else "cifar-10-batches-bin"
        if "archive" in source:
            return {
                f"cifar-10-{source.split()[0]}.tar.gz": tar(
                    {f"{inner}/{name}": content for name, content in contents.items()}, "w:gz"
                )
            }
        return {f"cifar10/{inner}/{name}": content for name, content in contents.items()}

    return files


def tar(contents, mode):
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode=mode) as archive:
        for name, content in contents.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return packed.getvalue()


def binary_harms(files):
    name = "cifar10/cifar-10-batches-bin/data_batch_2.bin"
    row = files[name][:3073]
    yield "a label too large", {name: b"\x0a" + row[1:]}
    yield "a byte too many", {name: row + b"\0"}
    yield "a short image", {name: row[:-32]}


def pickle_harms(files):
    name = "cifar10/cifar-10-batches-py/data_batch_2"
    images, labels = np.zeros((2, 32, 32, 3), np.uint8), [1, 2]
    x = planes(images)
    for harm, batch in {
        "a label too large": {b"data": x, b"labels": [1, 10]},
        "a label below zero": {b"data": x, b"labels": [1, -1]},
        "labels that are texts": {b"data": x, b"labels": ["cat", "dog"]},
        "labels that are fractions": {b"data": x, b"labels": [0.5, 1.5]},
        "fewer labels": {b"data": x, b"labels": [1]},
        "one label alone": {b"data": x, b"labels": 1},
        "no labels": {b"data": x},
        "no images": {b"labels": labels},
        "images of 31 x 32": {b"data": x[:, 96:], b"labels": labels},
        "images that are fractions": {b"data": x / 255, b"labels": labels},
        "images that are a text": {b"data": "none", b"labels": labels},
        "images without rows": {b"data": x[:0], b"labels": []},
        "a list": [x, labels],
        "nothing": None,
    }.items():
        yield harm, {name: pickle.dumps(batch, protocol=2)}


def image_files(rng):
    image = pytest.importorskip("PIL.Image")
    files = {}
    for part in ("train", "test"):
        for name in cifar.CLASS_NAMES[:2]:
            packed = io.BytesIO()
            pixels = rng.integers(0, 256, (32, 32, 3)).astype(np.uint8)
            image.fromarray(pixels).save(packed, "png")
            files[f"cifar10/{part}/{name}/0.png"] = packed.getvalue()
    return files


def tree_harms(files):
    image = pytest.importorskip("PIL.Image")
    name = "cifar10/train/airplane/0.png"
    for harm, shape in {"31 x 32": (31, 32, 3), "one pixel": (1, 1, 3)}.items():
        packed = io.BytesIO()
        image.fromarray(np.zeros(shape, np.uint8)).save(packed, "png")
        yield harm, {name: packed.getvalue()}
    yield "an unknown class", {"cifar10/train/katze/0.png": files[name]}


def image_archive(rng):
    files = {name.split("/", 1)[1]: content for name, content in image_files(rng).items()}
    return {"cifar10_jpeg/cifar10-jpeg-q75.tar.xz": tar(files, "w:xz")}


def archive_harms(files):
    (name,) = files
    yield "an empty archive", {name: tar({}, "w:gz")}
    yield "an archive of other files", {name: tar({"a/b/notes.txt": b"none"}, "w:gz")}


# EMNIST, FEMNIST.


def emnist_files(rng):
    files = {}
    for part in ("train", "test"):
        for kind, array in (
            ("images-idx3", rng.integers(0, 256, (6, 28, 28)).astype(np.uint8)),
            ("labels-idx1", rng.integers(1, 27, 6).astype(np.uint8)),
        ):
            name = f"emnist/emnist-letters-{part}-{kind}-ubyte.gz"
            files[name] = gzip.compress(idx_bytes(array))
    return files


def emnist_zip(rng):
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in emnist_files(rng).items():
            archive.writestr(f"gzip/{name.split('/')[1]}", content)
    return {"emnist/gzip.zip": packed.getvalue()}


def leaf_of(writers):
    return {
        "users": list(writers),
        "num_samples": [len(y) for _, y in writers.values()],
        "user_data": {
            user: {"x": (x.reshape(-1, 784) / 255).round(3).tolist(), "y": y.tolist()}
            for user, (x, y) in writers.items()
        },
    }


def leaf_files(rng):
    return {
        f"femnist/{part}/all_data_0.json": json.dumps(leaf_of(femnist_writers(rng))).encode()
        for part in ("train", "test")
    }


def leaf_harms(files):
    name, user = "femnist/train/all_data_0.json", "f0001_41"

    def changed(change):
        content = json.loads(files[name])
        found = change(content)
        return {name: json.dumps(content if found is None else found).encode()}

    yield "no users", changed(lambda c: c.pop("users") and None)
    yield "no user data", changed(lambda c: c.pop("user_data") and None)
    yield "a user without data", changed(lambda c: c["users"].append("nobody"))
    yield "users that are a number", changed(lambda c: c.update(users=3))
    yield "user data that is a list", changed(lambda c: c.update(user_data=[1]))
    yield "a user that is a number", changed(lambda c: c.update(users=[1]))
    yield "a list", changed(lambda c: [1, 2])
    yield "a text", changed(lambda c: "text")
    yield "no writers", changed(lambda c: c.update(users=[]))
    for key in ("x", "y"):
        yield f"no {key}", changed(lambda c, k=key: c["user_data"][user].pop(k) and None)
        yield f"a text as {key}", changed(lambda c, k=key: c["user_data"][user].update({k: "a"}))
        yield f"a table as {key}", changed(lambda c, k=key: c["user_data"][user].update({k: {}}))
        yield f"null as {key}", changed(lambda c, k=key: c["user_data"][user].update({k: None}))
        yield f"fewer {key}", changed(lambda c, k=key: c["user_data"][user][k].pop() and None)
    for wrong in (62, -1, 1.5, 1e30, "1"):
        yield (
            f"a label of {wrong}",
            changed(lambda c, w=wrong: c["user_data"][user]["y"].__setitem__(0, w)),
        )
    for wrong in (2.0, -0.5, float("nan"), float("inf"), None, "a", [1.0]):
        yield (
            f"a pixel of {wrong}",
            changed(lambda c, w=wrong: c["user_data"][user]["x"][0].__setitem__(5, w)),
        )
    yield "an image too short", changed(lambda c: c["user_data"][user]["x"][1].pop() and None)
    yield (
        "images too short",
        changed(lambda c: c["user_data"][user].update(x=[[0.5] * 783] * 3)),
    )


def hdf5(groups):
    h5py = pytest.importorskip("h5py")
    packed = io.BytesIO()
    with h5py.File(packed, "w") as file:
        for name, arrays in groups.items():
            group = file.require_group(name)
            for key, array in arrays.items():
                group[key] = array
    return packed.getvalue()


def femnist_groups(rng):
    return {
        f"examples/{name}": {"pixels": (x / 255).astype("f4"), "label": y.astype("i4")}
        for name, (x, y) in femnist_writers(rng).items()
    }


def hdf5_files(rng):
    return {
        f"femnist/fed_emnist_{part}.h5": hdf5(femnist_groups(rng)) for part in ("train", "test")
    }


def hdf5_harms(files):
    name, one = "femnist/fed_emnist_train.h5", "examples/f0001_41"

    def changed(**arrays):
        groups = femnist_groups(np.random.default_rng(0))
        groups[one] |= arrays
        groups[one] = {k: v for k, v in groups[one].items() if v is not None}
        return {name: hdf5(groups)}

    yield "no examples", {name: hdf5({"people/a": {"label": np.zeros(3)}})}
    yield "no writers", {name: hdf5({"examples": {}})}
    yield "examples that are an array", {name: hdf5({"/": {"examples": np.zeros(3)}})}
    yield "no labels", changed(label=None)
    yield "no pixels", changed(pixels=None)
    yield "a label too large", changed(label=np.array([1, 2, 62]))
    yield "labels that are fractions", changed(label=np.array([1, 2, 0.5]))
    yield "labels that are texts", changed(label=["a", "b", "c"])
    yield "fewer labels", changed(label=np.array([1, 2]))
    yield "pixels that are bytes", changed(pixels=np.full((3, 28, 28), 255))
    yield "pixels that are none", changed(pixels=np.full((3, 28, 28), np.nan))
    yield "images of 27 x 28", changed(pixels=np.zeros((3, 27, 28)))


# Tables.

ADULT = (
    "39, State-gov, 77516, Bachelors, 13, Never-married, Adm-clerical, Not-in-family, White, Male, "
    "2174, 0, 40, United-States, <=50K"
)
PERSON = "52, ?, 209642, HS-grad, 9, Married-civ-spouse, ?, Husband, White, Male, 0, 0, 45, ?, >50K"
HEART = "63.0,1.0,1.0,145.0,233.0,1.0,2.0,150.0,0.0,2.3,3.0,0.0,6.0,0"
ILL = "67,1,4,160,286,0,2,108,1,1.5,2,?,3,2"
KDD = "0,tcp,http,SF," + ",".join(["1"] * 37) + ",normal."
SMURF = "0,icmp,ecr_i,SF," + ",".join(["0.5"] * 37) + ",smurf."


def adult_files(rng):
    rows = ([ADULT, PERSON] * 4, [PERSON, ADULT])
    first = "|1x3 Cross validator\n"
    return {
        "adult/adult.data": ("\n".join(rows[0]) + "\n\n").encode(),
        "adult/adult.test": (first + ".\n".join(rows[1]) + ".\n").encode(),
    }


def heart_files(rng):
    text = "\n".join([HEART, ILL] * 6) + "\n"
    return {
        f"heart_disease/processed.{name}.data": text.encode()
        for name in ("cleveland", "hungarian", "switzerland", "va")
    }


def kdd_files(rng):
    text = "\n".join([KDD, SMURF] * 6) + "\n"
    return {"kddcup99/kddcup.data_10_percent.gz": gzip.compress(text.encode())}


def row_harms(name, line, separator, number, word, label):
    """Changes of one cell and of one row; each column is named by its place."""

    def harms(files):
        packed = name.endswith(".gz")
        text = (gzip.decompress(files[name]) if packed else files[name]).decode()

        def changed(row):
            lines = text.split("\n")
            lines[2] = row
            harmed = "\n".join(lines).encode()
            return {name: gzip.compress(harmed) if packed else harmed}

        def cell(column, value):
            cells = line.split(separator)
            cells[column] = value
            return changed(separator.join(cells))

        for value in ("1e999", "-1e999", "nan", "inf", "x", "", "1,5", "1 2", "0x10", "½"):
            yield f"{value!r} as a number", cell(number, value)
        for value in ("none of these", "", "1e999"):
            if word is not None:
                yield f"{value!r} as a category", cell(word, value)
            yield f"{value!r} as a label", cell(label, value)
        yield "? as a label", cell(label, "?")
        yield "a cell too few", changed(line.rsplit(separator, 1)[0])
        yield "a cell too many", changed(line + separator + "1")
        yield "another separator", changed(line.replace(separator, ";"))
        yield "no cells", changed(separator * 3)
        yield "half a row", changed(line[: len(line) // 2])
        yield "no rows", {name: gzip.compress(b"") if packed else b"\n\n"}

    return harms


# Shakespeare.

PLAY = [
    {"client": "p|A", "speeches": ["To be,", "or not", "to be."]},
    {"client": "p|B", "speeches": ["Ay.", "No."]},
]
TINY = "A:\nTo be,\nor not\n\nB:\nAy.\n\nA:\nto be.\n\nB:\nNo.\n"


def play_files(rng):
    text = "\n".join(json.dumps(row) for row in PLAY) + "\n"
    return {"shakespeare/plays_by_role.jsonl.gz": gzip.compress(text.encode())}


def play_harms(files):
    (name,) = files
    for wrong in (
        {"client": "p|C"},
        {"speeches": ["a", "b"]},
        {"client": 3, "speeches": ["a", "b"]},
        {"client": "p|C", "speeches": "a"},
        {"client": "p|C", "speeches": ["a", 1]},
        {"client": "p|C", "speeches": None},
        {"client": "p|A", "speeches": ["a", "b"]},
        ["p|C", ["a"]],
        "text",
        None,
    ):
        text = "\n".join(json.dumps(row) for row in [*PLAY, wrong])
        yield f"{wrong!r} as a row", {name: gzip.compress(text.encode())}
    yield "half a row", {name: gzip.compress((json.dumps(PLAY[0]) + '\n{"client": ').encode())}
    yield (
        "roles with one speech",
        {name: gzip.compress(json.dumps({"client": "p|C", "speeches": ["a"]}).encode())},
    )


def snippet_files(rng):
    groups = {f"examples/{row['client']}": {"snippets": row["speeches"]} for row in PLAY}
    return {f"shakespeare/shakespeare_{part}.h5": hdf5(groups) for part in ("train", "test")}


def snippet_harms(files):
    name = "shakespeare/shakespeare_train.h5"
    yield "no examples", {name: hdf5({"people": {}})}
    yield "no roles", {name: hdf5({"examples": {}})}
    yield "no snippets", {name: hdf5({"examples/p|A": {"said": ["a", "b"]}})}
    yield "numbers as snippets", {name: hdf5({"examples/p|A": {"snippets": np.zeros(3)}})}
    text = np.array([b"\xff\xfe", b"\xe9"])
    yield "snippets of another encoding", {name: hdf5({"examples/p|A": {"snippets": text}})}


def tiny_files(rng):
    return {"shakespeare/input.txt": TINY.encode()}


def tiny_harms(files):
    (name,) = files
    yield "no roles", {name: b"All of this is said by nobody.\n\nThis too.\n"}
    yield "roles that say nothing", {name: b"A:\n\n\nB:\n\n\n"}


# Stores and parameters.


def npy(array, **options):
    packed = io.BytesIO()
    np.save(packed, array, **options)
    return packed.getvalue()


def store_files(rng):
    return {
        "x.npy": npy(rng.normal(size=(6, 3)).astype(np.float32)),
        "y.npy": npy(np.arange(6) % 3),
        "offsets.npy": npy(np.array([0, 2, 6])),
    }


def store_harms(files):
    for harm, offsets in {
        "offsets beyond the examples": [0, 2, 7],
        "offsets short of the examples": [0, 2, 5],
        "offsets that fall": [0, 4, 2, 6],
        "offsets below zero": [-1, 2, 6],
        "offsets that do not begin": [1, 2, 6],
        "one offset": [0],
        "no offsets": [],
        "offsets that are fractions": [0.0, 2.5, 6.0],
        "offsets that are texts": ["0", "6"],
        "offsets of two axes": [[0, 6]],
    }.items():
        yield harm, {"offsets.npy": npy(np.array(offsets))}
    yield "arrays of two lengths", {"y.npy": npy(np.arange(5))}
    yield "an array without an axis", {"y.npy": npy(np.array(1))}
    yield "an array of objects", {"y.npy": npy(np.array([None] * 6), allow_pickle=True)}
    yield "an array of texts", {"y.npy": npy(np.array(list("abcdef")))}


def params_files(form):
    def files(rng):
        with tempfile.TemporaryDirectory() as folder:
            path = f"{folder}/params.{form}"
            tree = {"a": rng.normal(size=(3, 2)).astype(np.float32), "b": np.zeros(2, np.float32)}
            write_params(path, tree, form)
            with open(path, "rb") as file:
                return {f"params.{form}": file.read()}

    return files


def objects_harm(files):
    packed = io.BytesIO()
    np.savez(packed, a=np.array([None, 1]), b=np.zeros(2))
    yield "an array of objects", {"params.npz": packed.getvalue()}


CASES = {
    "mnist": Case(
        mnist_files,
        loader("mnist"),
        image_harms("mnist/train-images-idx3-ubyte.gz", "mnist/train-labels-idx1-ubyte.gz", 10),
    ),
    "mnist_by_writer": Case(writer_files, loader("mnist_by_writer"), writer_harms),
    "cifar10 binary": Case(cifar_files("binary"), loader("cifar10"), binary_harms),
    "cifar10 binary archive": Case(cifar_files("binary archive"), loader("cifar10"), archive_harms),
    "cifar10 python": Case(cifar_files("python"), loader("cifar10"), pickle_harms),
    "cifar10 python archive": Case(cifar_files("python archive"), loader("cifar10"), archive_harms),
    "cifar10 images": Case(image_files, loader("cifar10"), tree_harms),
    "cifar10 image archive": Case(image_archive, loader("cifar10"), archive_harms),
    "emnist": Case(
        emnist_files,
        loader("emnist", split="letters"),
        image_harms(
            "emnist/emnist-letters-train-images-idx3-ubyte.gz",
            "emnist/emnist-letters-train-labels-idx1-ubyte.gz",
            26,
            first=1,
        ),
    ),
    "emnist zip": Case(emnist_zip, loader("emnist", split="letters"), no_harms),
    "femnist leaf": Case(leaf_files, loader("femnist"), leaf_harms),
    "femnist hdf5": Case(hdf5_files, loader("femnist"), hdf5_harms),
    "adult": Case(
        adult_files,
        loader("adult"),
        row_harms("adult/adult.data", ADULT, ", ", 0, 1, 14),
        is_line=True,
    ),
    "heart_disease": Case(
        heart_files,
        loader("heart_disease"),
        row_harms("heart_disease/processed.va.data", HEART, ",", 0, 2, 13),
        is_line=True,
    ),
    "kddcup99": Case(
        kdd_files,
        loader("kddcup99"),
        row_harms("kddcup99/kddcup.data_10_percent.gz", KDD, ",", 0, None, 41),
        is_line=True,
    ),
    "shakespeare plays": Case(play_files, loader("shakespeare"), play_harms),
    "shakespeare hdf5": Case(snippet_files, loader("shakespeare"), snippet_harms),
    "tiny_shakespeare": Case(tiny_files, loader("tiny_shakespeare"), tiny_harms),
    "store": Case(store_files, FederatedData.open, store_harms),
    "safetensors": Case(
        params_files("safetensors"), lambda f: read_params(f / "params.safetensors"), no_harms
    ),
    "npz": Case(params_files("npz"), lambda f: read_params(f / "params.npz"), objects_harm),
}
# Harm that nothing in a file need show: the rest of it may be a valid file of its own.
MAY_PASS = re.compile(r"byte \d+ flipped|cut|twice|in Latin-1")


def common_harms(files, rng):
    """Harm that any file can be done."""
    for name, content in files.items():
        for _ in range(3):
            harmed = bytearray(content)
            place = int(rng.integers(len(content)))
            harmed[place] ^= 1 << int(rng.integers(8))
            yield f"{name}: byte {place} flipped", {name: bytes(harmed)}
        for share in (0.02, 0.5, 0.98):
            yield f"{name}: cut to {share}", {name: content[: int(share * len(content))]}
        yield f"{name}: empty", {name: b""}
        yield f"{name}: random bytes", {name: rng.bytes(200)}
        yield f"{name}: a page of the web", {name: b"<!DOCTYPE html><html>404</html>\n"}
        yield f"{name}: twice", {name: content + content}
        yield f"{name}: in UTF-16", {name: "naïve text\n".encode("utf-16")}
        yield f"{name}: in Latin-1", {name: content[:50] + "é".encode("latin-1") + content[50:]}
        yield f"{name}: a folder", {name: None}


def contents_of(read):
    """What was read as arrays by name."""
    if isinstance(read, dict):
        return {name: np.asarray(array) for name, array in read.items()}
    if isinstance(read, FederatedData):
        return {n: np.asarray(a) for n, a in read.examples.items()} | {"offsets": read.offsets}
    found = {}
    for part in ("train", "test"):
        arrays = flat(getattr(read, part))
        found |= {f"{part} {name}": np.asarray(array) for name, array in arrays.items()}
        if (clients := getattr(read, f"{part}_clients")) is not None:
            found[f"{part} clients"] = np.asarray(clients)
    return found


def is_whole(read):
    """Whether what was read is a data set that can be trained on."""
    if not isinstance(read, datasets.Dataset):
        return True
    y = np.concatenate([np.ravel(read.train["y"]), np.ravel(read.test["y"])])
    x = [np.asarray(part["x"], np.float64) for part in (read.train, read.test)]
    low = -1 if read.task == "next_token" else 0
    return all(np.isfinite(a).all() for a in x) and bool(
        np.all((y >= low) & (y < read.num_classes))
    )


def outcome(case, files, harm, replaced, folder):
    """Tries one harm; gives a word for what came of it, and the words of the error."""
    shutil.rmtree(folder, ignore_errors=True)
    for name, content in (files | replaced).items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if content is None:
            path.mkdir()
        else:
            path.write_bytes(content)
    try:
        read = case.read(folder)
    except (ValueError, OSError) as error:
        text = str(error)
        (name, *_) = replaced
        is_named = name.rsplit("/", 1)[-1].removesuffix(".gz").removesuffix(".npy") in text
        is_named = is_named and str(folder) in text
        if not is_named:
            return "refused without the file", text
        if case.is_line and ": " not in harm and harm != "no rows" and ", line 3," not in text:
            return "refused without the line", text
        return "refused", text
    except Exception as error:
        return "another error", f"{type(error).__name__}: {error}"
    if not is_whole(read):
        return "taken though it cannot be", ""
    found, valid = contents_of(read), case.valid
    same = found.keys() == valid.keys() and all(
        np.array_equal(found[name], valid[name]) for name in valid
    )
    if same:
        return "taken as the valid file", ""
    return ("taken as another valid file" if MAY_PASS.search(harm) else "taken silently"), ""


class Run(NamedTuple):
    read: Callable[[Any], Any]
    is_line: bool
    valid: dict[str, np.ndarray]


FINE = ("refused", "taken as the valid file", "taken as another valid file")


@telling
@pytest.mark.parametrize("name", CASES)
def test_a_harmed_file_is_refused_with_its_name_or_read_as_it_is(name, tmp_path):
    case, rng = CASES[name], np.random.default_rng(SEED)
    files = case.files(rng)
    for path, content in files.items():
        (tmp_path / "valid" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "valid" / path).write_bytes(content)
    valid = contents_of(case.read(tmp_path / "valid"))
    run = Run(case.read, case.is_line, valid)
    wrong, counts = [], collections.Counter()
    for harm, replaced in [*case.harms(files), *common_harms(files, rng)]:
        found, text = outcome(run, files, harm, replaced, tmp_path / "harmed")
        counts[found] += 1
        if found not in FINE:
            wrong.append(f"{harm}: {found}: {text[:300]}")
    print(f"{name}: {sum(counts.values())} harms: {dict(counts)}")
    assert not wrong, "\n".join(wrong)
    assert counts["refused"] >= 0.4 * sum(counts.values())
