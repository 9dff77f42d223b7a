"""Loaders on small files made here, for the formats of which no real file is at hand."""

import gzip
import io
import json

import numpy as np
import pytest
from data_files import (
    IDS,
    archived,
    cifar100_files,
    cifar_batches,
    cifar_files,
    emnist_files,
    idx,
    write_mnist,
    write_tiny_imagenet,
    zipped,
)
from scipy import ndimage

from fedjax_dp.data import datasets, shifts
from fedjax_dp.data.datasets import image_files, shakespeare, tabular
from fedjax_dp.data.datasets.base import scaled_images
from fedjax_dp.data.datasets.formats import read_idx


@pytest.fixture
def rng():
    return np.random.default_rng(7)


class TestIdx:
    @pytest.mark.parametrize("dtype", ["uint8", "int32", "float64"])
    def test_packed_and_plain(self, tmp_path, rng, dtype):
        array = rng.integers(0, 200, (3, 4, 5)).astype(dtype)
        plain, packed = tmp_path / "a", tmp_path / "a.gz"
        plain.write_bytes(idx(array))
        packed.write_bytes(gzip.compress(idx(array)))
        for path in (plain, packed):
            result = read_idx(path)
            np.testing.assert_array_equal(result, array)
            assert result.dtype == np.dtype(dtype) and result.dtype.isnative


class TestMnist:
    @pytest.mark.parametrize("folder", ["mnist", "MNIST/raw"])
    def test_folders_and_mixed_packing(self, tmp_path, rng, folder):
        parts = write_mnist(tmp_path / folder, rng)
        mnist = datasets.load("mnist", tmp_path, dtype="uint8")
        np.testing.assert_array_equal(mnist.train["x"][..., 0], parts["train"][0])
        np.testing.assert_array_equal(mnist.test["y"], parts["t10k"][1])

    def test_a_folder_named_like_the_data_set_is_taken_for_it(self, tmp_path, rng):
        write_mnist(tmp_path / "mnist", rng)
        assert len(datasets.load("mnist", tmp_path / "mnist").train["y"]) == 20
        with pytest.raises(datasets.MissingDataError):
            datasets.load("fashion_mnist", tmp_path / "mnist")

    def test_digits_in_colours_that_mislead(self, tmp_path, rng):
        """Train digits in colours d and d + 1; no test image in a colour of its own digit."""
        write_mnist(tmp_path / "mnist", rng)
        grey = datasets.load("mnist", tmp_path)
        for choice in ("of_others", "unseen"):
            shown = datasets.load("fedcmnist", tmp_path, test_colors=choice)
            for part, digits in (("train", grey.train), ("test", grey.test)):
                painted = getattr(shown, part)
                np.testing.assert_array_equal(painted["y"], digits["y"])
                for x, whole, y in zip(painted["x"], digits["x"], digits["y"], strict=True):
                    (row, column) = np.argwhere(whole[..., 0] > 0.5)[0]
                    color = x[row, column] / whole[row, column, 0]
                    np.testing.assert_allclose(x, whole * color, atol=1e-6)
                    apart = np.abs(shifts.PALETTE - color).max(axis=1)
                    own = [y, (y + 1) % 10]
                    if part == "train":
                        assert apart[own].min() < 1e-5
                    elif choice == "of_others":
                        assert np.argmin(apart) == (y + 5) % 10 and apart.min() < 1e-5
                    else:
                        assert apart.min() > 0.1
            again = datasets.load("fedcmnist", tmp_path, test_colors=choice)
            np.testing.assert_array_equal(again.train["x"], shown.train["x"])
        with pytest.raises(ValueError, match="test_colors must be one of"):
            datasets.load("fedcmnist", tmp_path, test_colors="pastel")

    def test_digits_turned_in_training_alone(self, tmp_path, rng):
        write_mnist(tmp_path / "mnist", rng)
        upright, turned = (datasets.load(n, tmp_path) for n in ("mnist", "fedrotmnist"))
        np.testing.assert_array_equal(turned.test["x"], upright.test["x"])
        # The middle of the image stays where it is, its rim does not.
        assert np.abs(turned.train["x"] - upright.train["x"]).max(axis=(1, 2, 3)).min() > 0.1
        for x, y, before in zip(
            turned.train["x"], turned.train["y"], upright.train["x"], strict=True
        ):
            expected = ndimage.rotate(
                before[..., 0], shifts.ANGLES[y], reshape=False, order=1, mode="grid-constant"
            )
            np.testing.assert_allclose(x[..., 0], expected, atol=1e-5)

    def test_writer_files_of_other_images_are_refused(self, tmp_path, rng):
        parts = write_mnist(tmp_path / "mnist", rng)
        for name, prefix, extra in (("train", "train", 0), ("test", "t10k", 5)):
            labels = np.concatenate([parts[prefix][1], np.zeros(extra, np.uint8)])
            table = np.zeros((len(labels), 8), dtype=np.int32)
            table[:, 0], table[:, 2] = labels, np.arange(len(labels)) // 4 + 100
            path = tmp_path / "mnist" / f"qmnist-{name}-labels-idx2-int.gz"
            path.write_bytes(gzip.compress(idx(table)))
        written = datasets.load("mnist_by_writer", tmp_path)
        np.testing.assert_array_equal(written.test_clients, np.arange(10) // 4 + 100)
        table[3, 0] = (table[3, 0] + 1) % 10
        path.write_bytes(gzip.compress(idx(table)))
        with pytest.raises(ValueError, match="same classes as the label file"):
            datasets.load("mnist_by_writer", tmp_path)


class TestCifar:
    def test_published_archive(self, tmp_path, rng):
        batches = cifar_batches(rng)
        contents = cifar_files(batches) | {"a/batches.meta.txt": b""}
        (tmp_path / "cifar-10-binary.tar.gz").write_bytes(archived(contents))
        loaded = datasets.load("cifar10", tmp_path, dtype="uint8")
        assert loaded.origin == "binary archive"
        train = [batches[f"data_batch_{i}"] for i in range(1, 6)]
        np.testing.assert_array_equal(loaded.train["x"], np.concatenate([x for x, _ in train]))
        np.testing.assert_array_equal(loaded.train["y"], np.concatenate([y for _, y in train]))
        np.testing.assert_array_equal(loaded.test["x"], batches["test_batch"][0])

    def test_archive_of_images(self, tmp_path, rng):
        image = pytest.importorskip("PIL.Image")
        contents, expected = {"train/cat/notes.txt": b"not an image"}, {"train": [], "test": []}
        for part, count in (("train", 2), ("test", 1)):
            for label, class_name in enumerate(image_files.CLASS_NAMES):
                for i in range(count):
                    pixels = rng.integers(0, 256, (32, 32, 3)).astype(np.uint8)
                    buffer = io.BytesIO()
                    image.fromarray(pixels).save(buffer, "png")
                    contents[f"{part}/{class_name}/{i:04d}.png"] = buffer.getvalue()
                    expected[part].append((pixels, label))
        (tmp_path / "cifar10_jpeg").mkdir()
        shuffled = dict(sorted(contents.items(), key=lambda item: hash(item[1])))
        path = tmp_path / "cifar10_jpeg" / "cifar10-jpeg-q75.tar.xz"
        path.write_bytes(archived(shuffled, "w:xz"))
        loaded = datasets.load("cifar10", tmp_path, dtype="uint8")
        for part, arrays in (("train", loaded.train), ("test", loaded.test)):
            np.testing.assert_array_equal(arrays["x"], [pixels for pixels, _ in expected[part]])
            np.testing.assert_array_equal(arrays["y"], [label for _, label in expected[part]])


class TestCifar100:
    @pytest.mark.parametrize(("labels", "column", "count"), [("coarse", 0, 20), ("fine", 1, 100)])
    def test_published_archive(self, tmp_path, rng, labels, column, count):
        contents, parts = cifar100_files(rng)
        (tmp_path / "cifar100").mkdir()
        (tmp_path / "cifar100" / "cifar-100-binary.tar.gz").write_bytes(archived(contents))
        loaded = datasets.load("cifar100", tmp_path, labels=labels, dtype="uint8")
        for part, arrays in (("train", loaded.train), ("test", loaded.test)):
            images, both = parts[part]
            np.testing.assert_array_equal(arrays["x"], images)
            np.testing.assert_array_equal(arrays["y"], both[:, column])
        assert loaded.num_classes == count
        assert loaded.class_names == tuple(f"{labels}_{i}" for i in range(count))

    def test_fine_labels_are_the_default(self, tmp_path, rng):
        contents, parts = cifar100_files(rng)
        (tmp_path / "cifar-100-binary.tar.gz").write_bytes(archived(contents))
        loaded = datasets.load("cifar100", tmp_path)
        np.testing.assert_array_equal(loaded.test["y"], parts["test"][1][:, 1])
        np.testing.assert_allclose(loaded.train["x"], parts["train"][0] / 255, rtol=1e-6)


class TestTinyImagenet:
    @pytest.fixture
    def folder(self, tmp_path):
        return tmp_path / "tiny-imagenet-200"

    def check(self, loaded, pixels, classes):
        assert loaded.class_names == tuple(f"name of {wnid}, other" for wnid in classes)
        for part, arrays in (("train", loaded.train), ("val", loaded.test)):
            expected = [p for wnid in classes for p in pixels[part][wnid]]
            labels = [c for c, wnid in enumerate(classes) for _ in pixels[part][wnid]]
            np.testing.assert_array_equal(arrays["y"], labels)
            assert arrays["x"].dtype == np.uint8 and arrays["x"].shape[1:] == (64, 64, 3)
            np.testing.assert_allclose(arrays["x"].astype(int), expected, atol=3)

    def test_published_folder(self, tmp_path, folder, rng):
        pixels = write_tiny_imagenet(folder, rng)
        self.check(datasets.load("tiny_imagenet", tmp_path, dtype="uint8"), pixels, IDS)

    def test_classes_are_drawn_once(self, tmp_path, folder, rng):
        pixels = write_tiny_imagenet(folder, rng)
        drawn = set()
        for seed in range(8):
            options = {"num_classes": 2, "class_seed": seed, "dtype": "uint8"}
            loaded, again = (datasets.load("tiny_imagenet", tmp_path, **options) for _ in "ab")
            own = tuple(wnid for wnid in IDS if f"name of {wnid}, other" in loaded.class_names)
            assert len(own) == loaded.num_classes == 2
            assert loaded.class_names == again.class_names
            self.check(loaded, pixels, own)
            drawn.add(own)
        assert len(drawn) > 1
        with pytest.raises(ValueError, match="num_classes must be at most 3"):
            datasets.load("tiny_imagenet", tmp_path, num_classes=4)


class TestEmnist:
    @pytest.mark.parametrize(
        ("split", "first", "classes"), [("byclass", 0, 62), ("letters", 1, 26)]
    )
    @pytest.mark.parametrize("in_zip", [False, True])
    def test_images_stand_upright(self, tmp_path, rng, split, first, classes, in_zip):
        contents, parts = emnist_files(rng, split, first, classes)
        folder = tmp_path / "emnist"
        folder.mkdir()
        if in_zip:
            (folder / "gzip.zip").write_bytes(zipped(contents))
        else:
            for name, content in contents.items():
                (folder / name).write_bytes(content)
        loaded = datasets.load("emnist", tmp_path, split=split, dtype="uint8")
        assert loaded.num_classes == classes
        for arrays, (upright, labels) in zip((loaded.train, loaded.test), parts, strict=True):
            np.testing.assert_array_equal(arrays["x"][..., 0], upright)
            np.testing.assert_array_equal(arrays["y"], labels)


def femnist_writers(rng):
    labels = {"f0001_41": [9, 10, 61], "f0000_14": [0, 36, 3, 12], "f0002_07": [10, 9]}
    return {
        name: (rng.integers(0, 256, (len(own), 28, 28)), np.array(own))
        for name, own in labels.items()
    }


class TestFemnist:
    def check(self, loaded, train, test):
        for arrays, clients, writers in (
            (loaded.train, loaded.train_clients, train),
            (loaded.test, loaded.test_clients, test),
        ):
            assert set(clients) == set(writers)
            for name, (pixels, labels) in writers.items():
                np.testing.assert_array_equal(arrays["x"][clients == name][..., 0], 255 - pixels)
                np.testing.assert_array_equal(arrays["y"][clients == name], labels)

    def write_leaf(self, folder, writers, per_file=2):
        folder.mkdir(parents=True)
        names = list(writers)
        for i in range(0, len(names), per_file):
            users = names[i : i + per_file]
            content = {
                "users": users,
                "num_samples": [len(writers[user][1]) for user in users],
                "user_data": {
                    user: {
                        "x": (writers[user][0].reshape(-1, 784) / 255).tolist(),
                        "y": writers[user][1].tolist(),
                    }
                    for user in users
                },
            }
            (folder / f"all_data_{i}.json").write_text(json.dumps(content))

    def test_leaf(self, tmp_path, rng):
        train, test = femnist_writers(rng), femnist_writers(rng)
        self.write_leaf(tmp_path / "femnist" / "train", train)
        self.write_leaf(tmp_path / "femnist" / "test", test)
        self.check(datasets.load("femnist", tmp_path, dtype="uint8"), train, test)
        digits = datasets.load("femnist", tmp_path, only_digits=True)
        assert digits.num_classes == 10
        assert len(digits.train["y"]) == sum((y < 10).sum() for _, y in train.values())
        dark = datasets.load("femnist", tmp_path, inverted=False)
        bright = datasets.load("femnist", tmp_path)
        np.testing.assert_allclose(dark.train["x"], 1 - bright.train["x"], atol=1e-6)

    def test_hdf5(self, tmp_path, rng):
        h5py = pytest.importorskip("h5py")
        parts = femnist_writers(rng), femnist_writers(rng)
        (tmp_path / "femnist").mkdir()
        for name, writers in zip(("train", "test"), parts, strict=True):
            with h5py.File(tmp_path / "femnist" / f"fed_emnist_{name}.h5", "w") as file:
                for writer, (pixels, labels) in writers.items():
                    group = file.create_group(f"examples/{writer}")
                    group["pixels"] = (pixels / 255).astype(np.float32)
                    group["label"] = labels.astype(np.int32)
        self.check(datasets.load("femnist", tmp_path, dtype="uint8"), *parts)


class TestShakespeare:
    def test_hdf5(self, tmp_path):
        h5py = pytest.importorskip("h5py")
        (tmp_path / "shakespeare").mkdir()
        texts = {
            "train": {"A|X": ["To be,", "or not"], "A|Y": ["Ay."]},
            "test": {"A|X": ["to be."]},
        }
        for part, roles in texts.items():
            with h5py.File(tmp_path / "shakespeare" / f"shakespeare_{part}.h5", "w") as file:
                for role, snippets in roles.items():
                    file.create_group(f"examples/{role}")["snippets"] = snippets
        loaded = datasets.load("shakespeare", tmp_path, sequence_length=8)
        assert set(loaded.train_clients) == {"A|X"}
        said = "".join(shakespeare.VOCABULARY[i] for i in loaded.train["y"].ravel() if i >= 0)
        assert said == "o be,\nor not"

    def test_windows(self):
        x, y = shakespeare.windows(np.array([5, 6, 7, 8, 9], np.int32), 3)
        np.testing.assert_array_equal(x, [[5, 6, 7], [8, 0, 0]])
        np.testing.assert_array_equal(y, [[6, 7, 8], [9, -1, -1]])
        for few in ([], [4]):
            x, y = shakespeare.windows(np.array(few, np.int32), 3)
            assert x.shape == y.shape == (0, 3)

    def test_unknown_characters_become_spaces(self):
        assert len(shakespeare.VOCABULARY) == len(set(shakespeare.VOCABULARY)) == 80
        tokens = shakespeare.encode_text("aZ$é€\n")
        assert "".join(shakespeare.VOCABULARY[t] for t in tokens)[:4] == "aZ  "
        assert tokens[-1] == 0

    @pytest.mark.parametrize(("count", "num_test"), [(2, 1), (3, 1), (5, 1), (10, 2), (100, 20)])
    def test_the_last_speeches_are_for_testing(self, tmp_path, count, num_test):
        speeches = [f"{i:04d}" for i in range(count)]
        (tmp_path / "shakespeare").mkdir()
        row = {"client": "p|R", "speeches": speeches}
        (tmp_path / "shakespeare" / "plays_by_role.jsonl").write_text(json.dumps(row) + "\n")
        loaded = datasets.load("shakespeare", tmp_path)
        assert (loaded.test["y"] >= 0).sum() == 5 * num_test - 2


class TestTables:
    columns = (
        tabular.Numeric("height", 0, 200),
        tabular.Categorical("colour", ("red", "blue")),
        tabular.Categorical("job", ("cook", "?")),
    )
    train = np.array(
        [["100", "red", "cook"], ["?", "blue", "?"], ["200", "blue", "cook"], ["300", "?", "cook"]]
    )
    test = np.array([["?", "?", "?"], ["-50", "red", "cook"]])

    def test_standard(self):
        train, test = tabular.encode(self.columns, self.train, self.test, "standard")
        z = 100 / np.std([100, 200, 300])
        np.testing.assert_allclose(
            train, [[-z, 1, 0, 1, 0], [0, 0, 1, 0, 1], [0, 0, 1, 1, 0], [z, 0, 1, 1, 0]], rtol=1e-6
        )
        np.testing.assert_allclose(test, [[0, 0, 1, 0, 1], [-2.5 * z, 1, 0, 1, 0]], rtol=1e-6)

    def test_range(self):
        train, test = tabular.encode(self.columns, self.train, self.test, "range")
        np.testing.assert_allclose(train[:, 0], [0.5, 0.5, 1, 1])
        np.testing.assert_allclose(train[3], [1, 0, 0, 1, 0])
        np.testing.assert_allclose(test, [[0.5, 0, 0, 0, 1], [0, 1, 0, 1, 0]])

    def test_names_and_refusals(self):
        assert tabular.feature_names(self.columns) == (
            *("height", "colour=red", "colour=blue", "job=cook", "job=?"),
        )
        with pytest.raises(ValueError, match="'colour' must hold one of red, blue, got 'green'"):
            tabular.encode(self.columns, np.array([["1", "green", "cook"]]), self.test, "range")
        with pytest.raises(ValueError, match="'height' must hold numbers"):
            tabular.encode(self.columns, np.array([["tall", "red", "cook"]]), self.test, "range")
        with pytest.raises(ValueError, match="did you mean 'standard'"):
            tabular.encode(self.columns, self.train, self.test, "standart")

    def test_a_constant_column_becomes_zero(self):
        cells = np.array([["7"], ["7"]])
        train, _ = tabular.encode((tabular.Numeric("n", 0, 10),), cells, cells, "standard")
        np.testing.assert_array_equal(train, 0)


class TestRegistry:
    def test_unknown_names_and_options_name_the_nearest(self, tmp_path):
        with pytest.raises(ValueError, match="did you mean 'fashion_mnist'"):
            datasets.load("fashon_mnist")
        with pytest.raises(ValueError, match="did you mean 'dtype'"):
            datasets.load("mnist", tmp_path, dtyp="uint8")

    def test_every_name_can_be_described(self, tmp_path):
        assert len(datasets.available()) == len(set(datasets.available())) >= 12
        for name in datasets.available():
            status = datasets.status(name, tmp_path)
            own = ("table", "instructions", "parquet", "image_folder", "store")
            has_none = name in ("digits", *own)
            assert status.is_present == has_none
            assert status.summary and status.licence
            assert bool(status.missing) == bool(status.how_to_get) == (not has_none)
            assert isinstance(datasets.options(name), dict)

    @pytest.mark.parametrize("name", [n for n in datasets.available() if datasets.info(n).sources])
    def test_a_missing_file_is_explained(self, tmp_path, name):
        with pytest.raises(datasets.MissingDataError) as caught:
            datasets.load(name, tmp_path)
        message = str(caught.value)
        for source in datasets.info(name).sources:
            for file in source.files:
                assert file in message
            assert str(tmp_path / source.folders[0]) in message
            for download in source.downloads:
                assert download.sha256 in message
                assert all(url in message for url in download.urls)
            assert source.downloads or source.note or len(datasets.info(name).sources) > 1
        can_fetch = any(source.downloads for source in datasets.info(name).sources)
        assert ("fedjax-dp data fetch" in message) == can_fetch

    def test_a_partly_missing_set_names_what_is_missing(self, tmp_path, rng):
        write_mnist(tmp_path / "mnist", rng)
        (tmp_path / "mnist" / "t10k-labels-idx1-ubyte").unlink()
        status = datasets.status("mnist", tmp_path)
        assert status.missing == ("t10k-labels-idx1-ubyte.gz",) and not status.is_present
        assert status.folder == tmp_path / "mnist" and status.can_fetch

    def test_data_directory(self, tmp_path, monkeypatch):
        monkeypatch.setenv("FEDJAX_DP_DATA", str(tmp_path))
        assert datasets.resolve_data_dir() == tmp_path
        assert datasets.resolve_data_dir(tmp_path / "x") == tmp_path / "x"
        monkeypatch.delenv("FEDJAX_DP_DATA")
        monkeypatch.setenv("HOME", str(tmp_path))
        assert datasets.resolve_data_dir() == tmp_path / ".cache" / "fedjax_dp"

    def test_lengths_of_a_data_set_agree(self):
        part = {"x": np.zeros((3, 2)), "y": np.zeros(3)}
        with pytest.raises(ValueError, match="train must have arrays and client ids of one length"):
            datasets.Dataset("d", part, part, 2, "classification", train_clients=np.zeros(2))


def test_scalings_of_images_put_figures_of_the_training_part_into_both():
    rng = np.random.default_rng(3)
    train, test = (rng.uniform(size=(n, 5, 4, 3)).astype(np.float32) for n in (9, 6))
    same = scaled_images(train, test, "unit")
    assert same[0] is train and same[1] is test and same[2] == ()
    first, second, exact = scaled_images(train, test, "symmetric")
    np.testing.assert_allclose(first, 2 * train.astype(float) - 1, rtol=0, atol=1e-6)
    np.testing.assert_allclose(second, 2 * test.astype(float) - 1, rtol=0, atol=1e-6)
    assert exact == ()
    first, second, exact = scaled_images(train, test, "standard")
    pixels = train.astype(float).reshape(-1, 3)
    mean, deviation = pixels.mean(axis=0), pixels.std(axis=0)
    np.testing.assert_allclose(first, (train - mean) / deviation, rtol=0, atol=1e-5)
    np.testing.assert_allclose(second, (test - mean) / deviation, rtol=0, atol=1e-5)
    assert first.dtype == np.float32 and "deviation of each channel" in exact[0]
    with pytest.raises(ValueError, match="dtype must be 'float32' for the scaling 'standard'"):
        scaled_images(train.astype(np.uint8), test, "standard")
