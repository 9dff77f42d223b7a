"""Loaders against the real files: published counts, digests, means and orientation."""

import collections
import csv
import gzip
import hashlib
import json

import numpy as np
import pytest
from marks import telling

from fedjax_dp.data import datasets
from fedjax_dp.data.datasets import mnist
from fedjax_dp.data.datasets.base import stratified_split
from fedjax_dp.data.datasets.catalog import CATALOG, find
from fedjax_dp.data.datasets.shakespeare import VOCABULARY

# MD5 sums that the publishers give for the packed files.
MD5 = {
    ("mnist", "train-images-idx3-ubyte.gz"): "f68b3c2dcbeaaa9fbdd348bbdeb94873",
    ("mnist", "train-labels-idx1-ubyte.gz"): "d53e105ee54ea40749a09fcbcd1e9432",
    ("mnist", "t10k-images-idx3-ubyte.gz"): "9fb629c4189551a2d022fa330f9573f3",
    ("mnist", "t10k-labels-idx1-ubyte.gz"): "ec29112dd5afa0611ce80d1b7f02629c",
    ("fashion_mnist", "train-images-idx3-ubyte.gz"): "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
    ("fashion_mnist", "train-labels-idx1-ubyte.gz"): "25c81989df183df01b3e8a0aad5dffbe",
    ("fashion_mnist", "t10k-images-idx3-ubyte.gz"): "bef4ecab320f06d8554ea6380940ec79",
    ("fashion_mnist", "t10k-labels-idx1-ubyte.gz"): "bb300cfdad3c16e7a12a480ee83cd310",
    ("adult", "adult.data"): "5d7c39d7b8804f071cdd1f2a7c460872",
    ("adult", "adult.test"): "35238206dfdf7f1fe215bbb874adecdc",
}


@pytest.mark.parametrize("name", list(CATALOG))
def test_files_have_the_digests_of_the_table(data_dir, name):
    checked = 0
    for source in CATALOG[name].sources:
        found, _ = find(source, data_dir)
        for download in source.downloads:
            path = found.get(download.name)
            if path is not None and path.name == download.name:
                content = path.read_bytes()
                assert hashlib.sha256(content).hexdigest() == download.sha256
                if (name, download.name) in MD5:
                    assert hashlib.md5(content).hexdigest() == MD5[name, download.name]
                checked += 1
    if not checked:
        pytest.skip(f"no published file of {name} is here")


@telling
@pytest.mark.needs_data("mnist")
def test_mnist(data_dir):
    mnist = datasets.load("mnist", data_dir)
    assert mnist.train["x"].shape == (60000, 28, 28, 1)
    assert mnist.test["x"].shape == (10000, 28, 28, 1)
    assert mnist.train["x"].dtype == np.float32 and mnist.train["y"].dtype == np.int32
    assert np.bincount(mnist.train["y"]).tolist() == [
        *(5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949)
    ]
    assert np.bincount(mnist.test["y"]).tolist() == [
        *(980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009)
    ]
    # The constants by which the literature normalises MNIST.
    assert mnist.train["x"].mean(dtype=np.float64) == pytest.approx(0.1307, abs=5e-5)
    assert mnist.train["x"].std(dtype=np.float64) == pytest.approx(0.3081, abs=5e-5)
    assert mnist.train["x"].min() == 0 and mnist.train["x"].max() == 1
    assert mnist.train_clients is None
    # A 1 stands upright, and a 7 has its bar on top: neither is true of a transposed image.
    one = mnist.train["x"][mnist.train["y"] == 1].mean(axis=0)[..., 0]
    assert one.sum(axis=1).std() < one.sum(axis=0).std()
    seven = mnist.train["x"][mnist.train["y"] == 7].mean(axis=0)[..., 0]
    assert seven[6:12].sum() > 1.3 * seven[16:22].sum()


@telling
@pytest.mark.needs_data("mnist")
def test_uint8_is_the_same_images(data_dir):
    as_bytes = datasets.load("mnist", data_dir, dtype="uint8").test["x"]
    as_numbers = datasets.load("mnist", data_dir).test["x"]
    assert as_bytes.dtype == np.uint8 and as_bytes.nbytes * 4 == as_numbers.nbytes
    np.testing.assert_allclose(as_numbers, as_bytes / 255.0, rtol=1e-7)


@telling
@pytest.mark.needs_data("fashion_mnist")
def test_fashion_mnist(data_dir):
    fashion = datasets.load("fashion_mnist", data_dir)
    assert np.bincount(fashion.train["y"]).tolist() == [6000] * 10
    assert np.bincount(fashion.test["y"]).tolist() == [1000] * 10
    assert fashion.train["x"].mean(dtype=np.float64) == pytest.approx(0.2860, abs=5e-5)
    assert fashion.train["x"].std(dtype=np.float64) == pytest.approx(0.3530, abs=5e-5)
    trousers = fashion.train["x"][fashion.train["y"] == 1].mean(axis=0)[..., 0]
    assert fashion.class_names[1] == "trouser"
    assert np.sum(trousers.sum(axis=1) > 1) > np.sum(trousers.sum(axis=0) > 1)


@telling
@pytest.mark.needs_data("mnist_by_writer")
def test_mnist_by_writer(data_dir):
    written = datasets.load("mnist_by_writer", data_dir, dtype="uint8")
    plain = datasets.load("mnist", data_dir, dtype="uint8")
    np.testing.assert_array_equal(written.train["x"], plain.train["x"])
    for clients, number, smallest, largest, median in (
        (written.train_clients, 539, 19, 131, 116),
        (written.test_clients, 297, 8, 130, 21),
    ):
        _, sizes = np.unique(clients, return_counts=True)
        assert (len(sizes), sizes.min(), sizes.max(), np.median(sizes)) == (
            *(number, smallest, largest, median),
        )
    assert not set(written.train_clients) & set(written.test_clients)


@pytest.mark.slow
@pytest.mark.needs_data("cifar10")
def test_cifar10(data_dir):
    cifar = datasets.load("cifar10", data_dir, dtype="uint8")
    assert cifar.train["x"].shape == (50000, 32, 32, 3)
    assert np.bincount(cifar.train["y"]).tolist() == [5000] * 10
    assert np.bincount(cifar.test["y"]).tolist() == [1000] * 10
    # The channel constants of the literature; a lossy copy keeps the means, not quite the spread.
    mean = cifar.train["x"].mean(axis=(0, 1, 2), dtype=np.float64) / 255
    np.testing.assert_allclose(mean, [0.4914, 0.4822, 0.4465], atol=2e-3)
    std = cifar.train["x"].std(axis=(0, 1, 2), dtype=np.float64) / 255
    np.testing.assert_allclose(std, [0.2470, 0.2435, 0.2616], atol=6e-3)


def adult_rows(path):
    with path.open() as file:
        rows = [[cell.strip() for cell in row] for row in csv.reader(file)]
    return [row for row in rows if len(row) == 15]


@pytest.mark.needs_data("adult")
def test_adult(data_dir):
    adult = datasets.load("adult", data_dir)
    assert len(adult.train["y"]) == 32561 and adult.train["y"].sum() == 7841
    assert len(adult.test["y"]) == 16281 and adult.test["y"].sum() == 3846
    rows = adult_rows(data_dir / "adult" / "adult.data")
    test_rows = adult_rows(data_dir / "adult" / "adult.test")
    ages = np.array([float(row[0]) for row in rows])
    test_ages = np.array([float(row[0]) for row in test_rows])
    column = adult.feature_names.index("age")
    np.testing.assert_allclose(
        adult.test["x"][:, column], (test_ages - ages.mean()) / ages.std(), rtol=1e-5, atol=1e-6
    )
    married = adult.feature_names.index("marital-status=Divorced")
    expected = [row[5] == "Divorced" for row in test_rows]
    np.testing.assert_array_equal(adult.test["x"][:, married], expected)
    unknown = [i for i, name in enumerate(adult.feature_names) if name.endswith("=?")]
    assert np.any(adult.train["x"][:, unknown], axis=1).sum() == 2399
    assert np.any(adult.test["x"][:, unknown], axis=1).sum() == 1221
    # Eight categorical columns: each row has exactly one 1 in each.
    numeric = [i for i, name in enumerate(adult.feature_names) if "=" not in name]
    assert len(numeric) == 6
    np.testing.assert_array_equal(np.delete(adult.train["x"], numeric, axis=1).sum(axis=1), 8)


@telling
@pytest.mark.needs_data("adult")
def test_adult_without_missing_cells(data_dir):
    adult = datasets.load("adult", data_dir, drop_missing=True)
    assert (len(adult.train["y"]), len(adult.test["y"])) == (30162, 15060)


@telling
@pytest.mark.needs_data("adult")
def test_adult_in_fixed_ranges_does_not_depend_on_the_other_rows(data_dir):
    every = datasets.load("adult", data_dir, scaling="range")
    some = datasets.load("adult", data_dir, scaling="range", drop_missing=True)
    unknown = [i for i, name in enumerate(every.feature_names) if name.endswith("=?")]
    complete = ~np.any(every.train["x"][:, unknown], axis=1)
    np.testing.assert_array_equal(every.train["x"][complete], some.train["x"])
    assert every.train["x"].min() >= 0 and every.train["x"].max() <= 1


# Patients by degree of disease (0 to 4) as UCI's heart-disease.names lists them, and missing cells.
HEART = {
    "cleveland": ((164, 55, 36, 35, 13), 6),
    "hungarian": ((188, 37, 26, 28, 15), 782),
    "switzerland": ((8, 48, 32, 30, 5), 273),
    "va": ((51, 56, 41, 42, 10), 698),
}


@pytest.mark.needs_data("heart_disease")
def test_heart_disease_files_are_the_published_ones(data_dir):
    for hospital, (degrees, missing) in HEART.items():
        text = (data_dir / "heart_disease" / f"processed.{hospital}.data").read_text()
        rows = [line.split(",") for line in text.split()]
        counts = collections.Counter(row[-1] for row in rows)
        if hospital == "hungarian":  # published with the degrees joined into one
            degrees = (degrees[0], sum(degrees[1:]), 0, 0, 0)
        assert tuple(counts[str(i)] for i in range(5)) == degrees
        assert sum(row.count("?") for row in rows) == missing


@pytest.mark.needs_data("heart_disease")
def test_heart_disease(data_dir):
    heart = datasets.load("heart_disease", data_dir)
    clients = np.concatenate([heart.train_clients, heart.test_clients])
    labels = np.concatenate([heart.train["y"], heart.test["y"]])
    for hospital, (degrees, _) in HEART.items():
        here = clients == hospital
        assert here.sum() == sum(degrees) and labels[here].sum() == sum(degrees[1:])
        share = np.mean(heart.test_clients == hospital) / np.mean(clients == hospital)
        assert share == pytest.approx(1, abs=0.02)
    assert np.isfinite(heart.train["x"]).all() and np.isfinite(heart.test["x"]).all()


@pytest.mark.needs_data("heart_disease")
def test_heart_disease_fills_missing_cells_from_the_training_part(data_dir):
    heart = datasets.load("heart_disease", data_dir)
    ranged = datasets.load("heart_disease", data_dir, scaling="range")
    names = heart.feature_names
    # With fixed ranges a missing `ca` lies in the middle, where no known value (0 to 3) does.
    column = names.index("ca")
    missing = ranged.train["x"][:, column] == 0.5
    assert 300 < missing.sum() < 611
    known = np.rint(ranged.train["x"][~missing, column].astype(np.float64) * 3)
    scaled = heart.train["x"][:, column].astype(np.float64)
    np.testing.assert_allclose(scaled[missing], 0, atol=1e-6)
    np.testing.assert_allclose(scaled[~missing], (known - known.mean()) / known.std(), atol=1e-5)
    # A missing `thal` is left out with fixed ranges, and else becomes the most frequent one.
    thal = [names.index(f"thal={value}") for value in (3, 6, 7)]
    unknown = ranged.train["x"][:, thal].sum(axis=1) == 0
    frequent = int(np.argmax(ranged.train["x"][:, thal].sum(axis=0)))
    assert np.all(heart.train["x"][unknown][:, thal[frequent]] == 1)
    np.testing.assert_array_equal(heart.train["x"][:, thal].sum(axis=1), 1)


@pytest.mark.needs_data("shakespeare")
def test_shakespeare_by_role(data_dir):
    plays = datasets.load("shakespeare", data_dir, sequence_length=50)
    assert len(np.unique(plays.train_clients)) == 1130
    with gzip.open(data_dir / "shakespeare" / "plays_by_role.jsonl.gz", "rt") as file:
        rows = {row["client"]: row["speeches"] for row in map(json.loads, file)}
    assert len(rows) == 1347
    role = max(rows, key=lambda name: len(rows[name]))
    texts = {}
    for part, arrays, clients in (
        ("train", plays.train, plays.train_clients),
        ("test", plays.test, plays.test_clients),
    ):
        x, y = arrays["x"][clients == role], arrays["y"][clients == role].reshape(-1)
        tokens = [x[0, 0], *y[y >= 0]]
        texts[part] = "".join(VOCABULARY[token] for token in tokens)
        # Inputs are the targets one step before, within and across windows.
        np.testing.assert_array_equal(x.reshape(-1)[1 : (y >= 0).sum()], tokens[1:-1])
    assert texts["train"] + "\n" + texts["test"] == "\n".join(rows[role]).replace("$", " ")
    assert len(texts["test"]) / len(texts["train"]) == pytest.approx(0.25, abs=0.1)
    # A target for every character of every eligible role, but the first of each part.
    targets = (plays.train["y"] >= 0).sum() + (plays.test["y"] >= 0).sum()
    eligible = [speeches for speeches in rows.values() if len(speeches) >= 2]
    assert targets == sum(len("\n".join(speeches)) - 3 for speeches in eligible)


@pytest.mark.needs_data("tiny_shakespeare")
def test_tiny_shakespeare(data_dir):
    tiny = datasets.load("tiny_shakespeare", data_dir)
    text = (data_dir / "shakespeare" / "input.txt").read_text()
    speeches, before = [], ""
    for line in text.split("\n"):
        if before == "" and line.endswith(":"):
            speeches.append((line[:-1], []))
        else:
            speeches[-1][1].append(line)
        before = line
    assert len(speeches) == 7222 and len({role for role, _ in speeches}) == 309
    said = collections.defaultdict(list)
    for role, lines in speeches:
        if any(lines):
            said[role].append("\n".join(lines).strip("\n"))
    expected = {role: texts for role, texts in said.items() if len(texts) >= 2}
    assert set(tiny.train_clients) == set(tiny.test_clients) == set(expected)
    targets = (tiny.train["y"] >= 0).sum() + (tiny.test["y"] >= 0).sum()
    assert targets == sum(len("\n".join(texts)) - 3 for texts in expected.values())
    assert len(np.unique(tiny.train["x"])) <= 65


@telling
@pytest.mark.needs_data("kddcup99")
def test_kddcup99(data_dir):
    kdd = datasets.load("kddcup99", data_dir)
    labels = np.concatenate([kdd.train["y"], kdd.test["y"]])
    assert len(labels) == 494021 and np.sum(labels == 0) == 97278
    assert kdd.train["x"].shape[1] == 38 + 3 + 66 + 11
    np.testing.assert_allclose(kdd.train["x"][:, :38].mean(axis=0, dtype=np.float64), 0, atol=1e-4)


def test_digits_are_those_of_scikit_learn():
    from sklearn.datasets import load_digits

    source = load_digits()
    digits = datasets.load("digits")
    assert len(digits.train["y"]) == 1437 and len(digits.test["y"]) == 360
    x = np.concatenate([digits.train["x"], digits.test["x"]]).reshape(-1, 64)
    y = np.concatenate([digits.train["y"], digits.test["y"]])
    ours = np.column_stack([np.rint(x * 16), y])
    theirs = np.column_stack([source.data, source.target])
    np.testing.assert_array_equal(ours[np.lexsort(ours.T)], theirs[np.lexsort(theirs.T)])
    np.testing.assert_allclose(np.bincount(digits.test["y"]), np.bincount(y) * 0.2, atol=1.0)


def test_stratified_rows_are_those_of_scikit_learn():
    from sklearn.model_selection import train_test_split

    rng = np.random.default_rng(0)
    for seed in range(20):
        # Equal strata have equal rests, among which the draws decide.
        sizes = rng.integers(2, 9, 5) if seed % 2 else np.repeat(rng.integers(2, 9), 5)
        strata = rng.permutation(np.repeat(["a", "b", "c", "d", "e"], sizes))
        share, rows = rng.uniform(0.25, 0.75), np.arange(len(strata))
        if min(np.ceil(share * len(rows)), len(rows) - np.ceil(share * len(rows))) < 5:
            with pytest.raises(ValueError, match="test_fraction must leave both parts"):
                stratified_split(strata, share, seed)
            continue
        theirs = train_test_split(rows, test_size=share, random_state=seed, stratify=strata)
        for ours, expected in zip(stratified_split(strata, share, seed), theirs, strict=True):
            np.testing.assert_array_equal(ours, expected)
    with pytest.raises(ValueError, match="each stratum must have at least 2 records, got 1"):
        stratified_split(np.array([0, 0, 0, 0, 1]), 0.4, 0)


def test_a_changed_file_of_digits_is_refused(monkeypatch):
    monkeypatch.setattr(mnist, "_DIGITS", "another")
    with pytest.raises(ValueError, match=r"digits.csv.gz must have the unpacked SHA-256 another"):
        datasets.load("digits")


def test_digits_split_depends_on_the_seed_alone():
    first, again = datasets.load("digits"), datasets.load("digits")
    other = datasets.load("digits", seed=1, test_fraction=0.5)
    np.testing.assert_array_equal(first.test["x"], again.test["x"])
    assert len(other.test["y"]) == 899
    levels = np.unique(datasets.load("digits", dtype="uint8").train["x"])
    assert levels.min() == 0 and levels.max() == 255 and len(levels) == 17
