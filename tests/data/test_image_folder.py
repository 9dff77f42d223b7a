"""Folders of images by class and by client."""

import numpy as np
import pytest
from PIL import Image

from fedjax_dp.data import datasets
from fedjax_dp.experiment import load_config
from fedjax_dp.experiment.assembly.own_data import own_population, public_test

RNG = np.random.default_rng(1)
PLACES = ["b/cat/2.png", "a/dog/x.PNG", "a/cat/1.png", "b/cat/1.jpeg"]
PIXELS = RNG.integers(0, 256, (4, 6, 5, 3), np.uint8)
SORTED = [2, 1, 3, 0]


@pytest.fixture
def folder(tmp_path):
    """Two clients, one of which lacks a class."""
    for place, pixels in zip(PLACES, PIXELS, strict=True):
        file = tmp_path / "scans" / place
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(file)
    (tmp_path / "scans" / ".hidden").write_text("")
    return tmp_path


def load(folder, **options):
    options = {"path": "scans", "clients_are_folders": True, "dtype": "uint8", **options}
    return datasets.load("image_folder", folder, **options)


def decoded(folder, place):
    return np.asarray(Image.open(folder / "scans" / place))


def test_images_are_numbered_by_their_folders(folder):
    data = load(folder)
    expected = [decoded(folder, PLACES[i]) for i in SORTED]
    np.testing.assert_array_equal(data.train["x"], expected)
    assert data.train["y"].tolist() == [0, 1, 0, 0] and data.class_names == ("cat", "dog")
    assert data.train_clients.tolist() == ["a", "a", "b", "b"]
    assert data.exact_statistics == (
        "which folders of classes there are, since no classes were declared",
    )
    data = load(folder, classes=["owl", "dog", "cat"], dtype="float32", test_path="scans")
    assert data.train["y"].tolist() == data.test["y"].tolist() == [2, 1, 2, 2]
    np.testing.assert_allclose(data.test["x"], np.asarray(expected) / 255, rtol=1e-6)
    assert data.num_classes == 3 and not data.exact_statistics
    alone = load(folder, path="scans/a", clients_are_folders=False)
    assert alone.train_clients is None and alone.train["y"].tolist() == [0, 1]
    assert load(folder, image_mode="L").train["x"].shape == (4, 6, 5, 1)


def test_what_is_no_image_of_a_class_is_refused(folder):
    def refused(message, **options):
        with pytest.raises(ValueError, match=message) as raised:
            load(folder, **options)
        assert str(folder) not in getattr(raised.value, "public", "")

    refused(r"a.dog, the folder of a class must be one of \['cat', 'owl'\]", classes=["cat", "owl"])
    refused("classes must be different names", classes=["cat", "cat"])
    refused("path must be a folder; there is none at", path="scan")
    refused("must be a folder of images, got 'a file'", path="scans/a")
    refused("must name two classes or more", path="scans/b", clients_are_folders=False)
    refused("image_size must be given", image_fit="resize")
    scans = folder / "scans"
    for name, make, message in (
        ("notes.txt", lambda p: p.write_text("secret"), "notes.txt must be an image, a file in"),
        ("9.png", lambda p: p.write_text("secret"), "9.png must be an image"),
        ("9.png", lambda p: Image.new("L", (5, 6)).save(p), "like the first .* got '5x6 in L'"),
        ("9.png", lambda p: p.symlink_to(scans / PLACES[1]), "9.png must be no link"),
        ("9.png", lambda p: p.mkdir(), "9.png must be an image, a file"),
    ):
        path = scans / "b" / "cat" / name
        make(path)
        refused(message)
        path.rmdir() if path.is_dir() else path.unlink()
    (scans / "c").symlink_to(scans / "a")
    refused("c must be no link")
    (scans / "c").unlink()
    (scans / "c").mkdir()
    refused("c must hold images in CLASS/, got 'none'")


def test_nodes_number_the_classes_that_they_lack_alike(folder):
    file = folder / "config.toml"
    file.write_text(
        """
[data]
name = "image_folder"
num_clients = 2
client_test_share = 0.0
partition = "natural"
options.path = "scans"
options.clients_are_folders = true
options.classes = ["owl", "dog", "cat"]
"""
    )
    kinds = []
    for client, labels in (("a", [2, 1]), ("b", [2, 2])):
        node = folder / client
        node.mkdir()
        (folder / "scans" / client).rename(node / client)
        population, kind = own_population(load_config(file), str(node))
        assert population.train.examples["y"].tolist() == labels
        kinds.append(kind)
    assert kinds[0] == kinds[1] and kinds[0]["class_names"] == ["owl", "dog", "cat"]
    assert public_test(load_config(file), kinds[0]) is None
    words = ["--data.options.classes=[]"]
    with pytest.raises(ValueError, match="encoded by public facts alone"):
        own_population(load_config(file, words), str(folder / "a"))
