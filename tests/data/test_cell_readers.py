"""Images, text and names of classes in Parquet files and in Hugging Face tables."""

import io
import json
import shutil
import zlib

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from fedjax_dp.data import FederatedData, Pictures, class_names, datasets, images, texts, tokenizer
from fedjax_dp.data.datasets import shakespeare

RNG = np.random.default_rng(0)
COLORED = RNG.integers(0, 256, (6, 5, 4, 3), np.uint8)
GREY = COLORED[..., 0]
USERS = ["b", "a", "b", "a", "b", "b"]
ORDER = [1, 3, 0, 2, 4, 5]
LABELS = ["dog", "cat", "dog", "cat", "owl", "cat"]
TEXTS = ["to be", "or", "not to be, that", "é", "is ", "the question"]


def png(pixels, form="PNG", **options):
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, form, **options)
    return file.getvalue()


def write(path, **columns):
    pq.write_table(pa.table({"user": USERS, **columns}), path, row_group_size=4)
    return str(path)


def in_cells(files):
    """Image files as Hugging Face tables hold them."""
    return pa.array([{"bytes": file, "path": None} for file in files])


def load(path, folder, **options):
    options = {"client": "user", "store": str(folder / "stores"), **options}
    return datasets.load("parquet", folder, path=str(path), **options)


def test_images_and_names_of_classes(tmp_path):
    path = write(tmp_path / "t.parquet", image=in_cells(map(png, COLORED)), label=LABELS)
    data = load(path, tmp_path, x=["image"], y="label", classes=["owl", "dog", "cat"])
    np.testing.assert_array_equal(data.train["x"], COLORED[ORDER])
    assert data.train["y"].tolist() == [["owl", "dog", "cat"].index(LABELS[i]) for i in ORDER]
    assert (data.class_names, data.num_classes) == (("owl", "dog", "cat"), 3)
    assert data.client_names == ("a", "b") and data.train_clients.tolist() == [0, 0, 1, 1, 1, 1]
    assert isinstance(data.train["x"], np.memmap) and not data.exact_statistics
    # Without declared classes, those that occur; without clients, the rows in their order.
    data = load(path, tmp_path, x=["image"], y="label", client=None)
    assert data.class_names == ("cat", "dog", "owl") and data.train_clients is None
    assert data.exact_statistics == (
        "which values occur in 'label', since no classes were declared",
    )
    np.testing.assert_array_equal(data.train["x"], COLORED)


def test_sizes_and_colours_are_converted_where_an_option_says_so(tmp_path):
    wide = np.repeat(COLORED[2], 2, 1)
    files = [png(COLORED[0]), png(GREY[1]), png(wide), *map(png, GREY[3:])]
    path = write(tmp_path / "t.parquet", image=files, label=LABELS)
    usual = {"x": ["image"], "y": "label", "image_size": [5, 4], "image_fit": "crop"}
    x = np.empty((6, 5, 4, 3), np.uint8)
    x[ORDER] = load(path, tmp_path, **usual, image_mode="RGB").train["x"]
    np.testing.assert_array_equal(x[0], COLORED[0])
    np.testing.assert_array_equal(x[1], np.repeat(GREY[1, ..., np.newaxis], 3, -1))
    # Columns 2 to 5 of 8 are the middle.
    np.testing.assert_array_equal(x[2], wide[:, 2:6])
    grey = load(path, tmp_path, **usual, image_mode="L").train["x"]
    # Luminance of ITU-R 601, within the rounding of its weights.
    luminance = COLORED[0] @ np.array([0.299, 0.587, 0.114])
    np.testing.assert_allclose(grey[ORDER.index(0), ..., 0], luminance, atol=1)
    for options, message in (
        ({"image_mode": "RGB"}, "row 2, the image must be of 4x5 in RGB like the first .*8x5"),
        ({}, "row 1, the image must be of 4x5 in RGB like the first .*4x5 in L"),
        ({**usual, "image_fit": "refuse"}, "row 1, the image must be of 4x5 in RGB like"),
        (
            {**usual, "image_fit": "refuse", "image_mode": "L"},
            "row 2, the image must be 4x5 pixels, got '8x5'",
        ),
        ({"image_fit": "crop"}, "image_size must be given, since image_fit is 'crop', got None"),
        ({"image_size": [5]}, "image_size must be a height and a width"),
        ({"x": ["label"], "y": "image"}, "text must be given, as x is a column of text"),
    ):
        with pytest.raises(ValueError, match=message):
            load(path, tmp_path, **{"x": ["image"], "y": "label", **options})


def test_resizing_takes_the_mean_of_pixels(tmp_path):
    large = np.repeat(np.repeat(COLORED, 2, 1), 2, 2).astype(np.int16)
    large[:, ::2] = np.clip(large[:, ::2] + 20, 0, 255)
    files = [png(each.astype(np.uint8)) for each in large]
    path = write(tmp_path / "t.parquet", image=files, label=LABELS)
    data = load(
        path, tmp_path, x=["image"], y="label", image_size=[5, 4], image_fit="resize", client=None
    )
    means = large.reshape(6, 5, 2, 4, 2, 3).mean(axis=(2, 4))
    np.testing.assert_allclose(data.train["x"], means, atol=0.5 + 1e-6)


def test_photographs_are_upright(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6
    turned = png(COLORED[0], "PNG", exif=exif)
    path = write(tmp_path / "t.parquet", image=[turned] * 6, label=LABELS)
    data = load(path, tmp_path, x=["image"], y="label", image_size=[4, 5])
    np.testing.assert_array_equal(data.train["x"][0], np.rot90(COLORED[0], -1))


def bomb():
    """A PNG that claims 81 million pixels, fewer than pillow refuses by itself."""
    content = bytearray(png(GREY[0]))
    content[16:24] = (9000).to_bytes(4, "big") * 2
    content[29:33] = zlib.crc32(content[12:29]).to_bytes(4, "big")
    return bytes(content)


def animated():
    file = io.BytesIO()
    first, second = (Image.fromarray(x) for x in GREY[:2])
    first.save(file, "GIF", save_all=True, append_images=[second])
    return file.getvalue()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"secret", "row 5 must be an image"),
        (png(COLORED[0])[:-30], "row 5 must be an intact image"),
        (bomb(), "row 5, the image must have at most 67108864 pixels"),
        (animated(), "row 5, the image must be one image, not several"),
        (png(GREY[0].astype(np.uint16) * 256), "row 5, the image must be grey or RGB of 8 bits"),
        (png(COLORED[0, ..., :2].copy()), "row 5, the image must be grey or RGB.*got 'LA'"),
        (None, "row 5, the image must be in the table itself, not in a file that it names"),
    ],
    ids=["text", "cut off", "bomb", "several", "16 bits", "two channels", "path"],
)
def test_wrong_images_are_refused_with_file_and_row(tmp_path, content, message):
    good = [{"bytes": png(x), "path": None} for x in COLORED[:5]]
    cells = pa.array([*good, {"bytes": content, "path": "/etc/passwd"}])
    path = write(tmp_path / "t.parquet", image=cells, label=LABELS)
    with pytest.raises(ValueError, match=r"t\.parquet, column 'image', " + message) as raised:
        load(path, tmp_path, x=["image"], y="label")
    assert "secret" not in str(raised.value) and "passwd" not in str(raised.value)


def test_labels_that_no_class_has_are_refused(tmp_path):
    path = write(tmp_path / "t.parquet", a=np.arange(6.0), label=LABELS)
    usual = {"x": ["a"], "y": "label"}
    for options, message in (
        ({"classes": ["dog", "cat"]}, r"column 'label', row 4, the label must be one of \['dog'"),
        ({"classes": ["dog", "dog"]}, "classes must be two different names or more"),
        ({"task": "regression"}, "y must hold numbers, as task is 'regression'"),
        ({"num_classes": 4}, "num_classes must be 3, the number of classes, got 4"),
        ({"y": None}, "y must be given, got None"),
        ({"y": "labl"}, "x, y and weight, a column of .*'label'"),
        ({"text": "bytes"}, r"x must be one column of text, got \['a'\]"),
        ({"sequence_length": 3}, "sequence_length and text_end must be given with text"),
        ({"image_mode": "L"}, "image_size, image_mode must be given for a column of images"),
    ):
        with pytest.raises(ValueError, match=message) as raised:
            load(path, tmp_path, **{**usual, **options})
        assert "owl" not in getattr(raised.value, "public", "")


def test_text_is_cut_to_examples_and_filled_up(tmp_path):
    path = write(tmp_path / "t.parquet", text=TEXTS, label=LABELS)
    options = {"x": ["text"], "text": "bytes", "sequence_length": 6, "client": None}
    data = load(path, tmp_path, task="next_token", **options)
    for i, text in enumerate(TEXTS):
        ids = list(text.encode())[:7]
        count = len(ids) - 1
        assert data.train["x"][i].tolist() == ids[:-1] + [0] * (6 - count)
        assert data.train["y"][i].tolist() == ids[1:] + [-1] * (6 - count)
    assert data.num_classes == 257 and data.task == "next_token"
    assert data.feature_names == (f"tokens of SHA-256 {tokenizer('bytes').digest}",)
    # One text, as the plays are read.
    ids, y = shakespeare.windows(np.frombuffer(TEXTS[2].encode(), np.uint8), 20)
    data = load(path, tmp_path, task="next_token", **{**options, "sequence_length": 20})
    np.testing.assert_array_equal(data.train["x"][2], ids[0])
    np.testing.assert_array_equal(data.train["y"][2], y[0])
    # Labels of whole texts.
    data = load(path, tmp_path, y="label", text_end=True, **options)
    for i, text in enumerate(TEXTS):
        ids = [*text.encode(), 256][:6]
        assert data.train["x"][i].tolist() == ids + [-1] * (6 - len(ids))
    assert data.train["y"].tolist() == [["cat", "dog", "owl"].index(label) for label in LABELS]


def test_a_tokenizer_file_is_part_of_the_data(tmp_path):
    package = pytest.importorskip("tokenizers")

    def write_file(vocabulary):
        own = package.Tokenizer(package.models.WordLevel(vocabulary, unk_token="?"))
        own.pre_tokenizer = package.pre_tokenizers.WhitespaceSplit()
        own.save(str(tmp_path / "tokenizer.json"))

    path = write(tmp_path / "t.parquet", text=TEXTS, label=LABELS)
    options = {"x": ["text"], "text": "tokenizer.json", "y": "label", "client": None}
    seen = []
    for vocabulary in ({"?": 0, "to": 1, "be": 2}, {"?": 0, "to": 2, "be": 1}):
        write_file(vocabulary)
        data = load(path, tmp_path, sequence_length=3, **options)
        for row, text in zip(data.train["x"].tolist(), TEXTS, strict=True):
            ids = [vocabulary.get(word, 0) for word in text.split()][:3]
            assert row == ids + [-1] * (3 - len(ids))
        seen.append(data.feature_names)
    assert seen[0] != seen[1]
    with pytest.raises(ValueError, match="num_classes must be at least 3, the ids of the token"):
        load(path, tmp_path, **{**options, "y": None}, task="next_token", num_classes=2)
    with pytest.raises(ValueError, match=r"text_end must be False, since .* names no end"):
        load(path, tmp_path, **options, text_end=True)
    with pytest.raises(ValueError, match="row 1, the text must have 2 tokens or more"):
        load(path, tmp_path, **{**options, "y": None}, task="next_token")
    with pytest.raises(ValueError, match="text must be a file"):
        load(path, tmp_path, **{**options, "text": "none.json"})


def test_folders_that_the_datasets_library_saved(tmp_path, monkeypatch):
    import datasets as hf

    features = {"image": hf.Image(), "label": hf.ClassLabel(names=["cat", "dog"])}
    features |= {"user": hf.Value("string")}
    rows = {"image": [Image.fromarray(x) for x in COLORED], "label": [1, 0, 1, 0, 1, 1]}
    table = hf.Dataset.from_dict({**rows, "user": USERS}, features=hf.Features(features))
    table.save_to_disk(tmp_path / "saved", num_shards=2)
    table.to_parquet(tmp_path / "same.parquet")
    hf.DatasetDict(train=table).save_to_disk(tmp_path / "parts")
    store = FederatedData.from_huggingface(
        table, "user", {"x": "image", "y": "label"}, readers={"x": images()}
    )
    assert store.client_names == ("b", "a")
    np.testing.assert_array_equal(store.client(1)["x"], COLORED[ORDER[:2]])
    # Neither the folder nor the file needs the library.
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    for place in ("saved", "same.parquet", "parts/train"):
        data = load(tmp_path / place, tmp_path, x=["image"], y="label")
        np.testing.assert_array_equal(data.train["x"], COLORED[ORDER])
        assert data.train["y"].tolist() == [0, 0, 1, 1, 1, 1]
        assert data.class_names == ("cat", "dog") and not data.exact_statistics
    usual = {"x": ["image"], "y": "label"}
    with pytest.raises(ValueError, match="classes must be those that the table itself declares"):
        load(tmp_path / "saved", tmp_path, **usual, classes=["dog", "cat"])
    with pytest.raises(ValueError, match=r"be a folder of one part.*got \"a folder of \['train'\]"):
        load(tmp_path / "parts", tmp_path, **usual)

    def refused(message, content):
        shutil.copytree(tmp_path / "saved", tmp_path / "bad", dirs_exist_ok=True)
        (tmp_path / "bad" / "state.json").write_text(json.dumps(content))
        with pytest.raises(ValueError, match=message):
            load(tmp_path / "bad", tmp_path, **usual)

    first = "data-00000-of-00002.arrow"
    for name in ("../saved/" + first, "/etc/a.arrow", "dataset_info.json", 3):
        refused("must name .arrow files of its folder", {"_data_files": [{"filename": name}]})
    refused("must name its files", {"_data_files": [3]})
    refused("must name its files", [])
    some = [{"filename": first}]
    refused("must be of a whole table", {"_data_files": some, "_indices_data_files": some})
    (tmp_path / "bad" / "link.arrow").symlink_to(tmp_path / "saved" / first)
    refused("link.arrow must be no link", {"_data_files": [{"filename": "link.arrow"}]})
    (tmp_path / "bad" / first).write_bytes(b"no stream of Arrow")
    with pytest.raises(ValueError, match="must be an intact Arrow stream"):
        (tmp_path / "bad" / "state.json").write_text(json.dumps({"_data_files": some}))
        load(tmp_path / "bad", tmp_path, **usual)


def test_readers_of_python(tmp_path):
    path = write(tmp_path / "t.parquet", image=in_cells(map(png, COLORED)), label=LABELS)
    readers = {"x": images(Pictures((5, 4), "RGB")), "y": class_names(["cat", "dog", "owl"])}
    columns = {"x": "image", "y": "label"}
    store = FederatedData.from_parquet(
        path, "user", columns, directory=tmp_path / "store", readers=readers, batch_size=4
    )
    np.testing.assert_array_equal(store.client(0)["x"], COLORED[ORDER[:2]])
    with pytest.raises(ValueError, match="readers must be one of"):
        FederatedData.from_parquet(
            path, "user", columns, directory=tmp_path / "s", readers={"z": images()}
        )
    chosen = texts(tokenizer("bytes"), 2)
    with pytest.raises(ValueError, match="column 'image', row 0, the column must hold text"):
        FederatedData.from_parquet(
            path, "user", columns, directory=tmp_path / "s", readers={"x": chosen, "y": chosen}
        )
