"""Small files of data sets as they are published, by which readers are tested."""

import gzip
import io
import struct
import tarfile
import zipfile

import numpy as np
import pytest

IDX_CODES = {"uint8": 0x08, "int8": 0x09, "int32": 0x0C, "float32": 0x0D, "float64": 0x0E}
IDS = ("n02124075", "n01443537", "n04067472")


def idx(array):
    shape = struct.pack(f">{array.ndim}I", *array.shape)
    big = array.astype(array.dtype.newbyteorder(">")).tobytes()
    return bytes([0, 0, IDX_CODES[str(array.dtype)], array.ndim]) + shape + big


def images_of(rng, count, *shape):
    return rng.integers(0, 256, (count, *(shape or (28, 28)))).astype(np.uint8)


def write_mnist(folder, rng, num_train=20, num_test=10):
    """Writes images and labels, those for training packed; gives both by part."""
    folder.mkdir(parents=True, exist_ok=True)
    parts = {}
    for prefix, count in (("train", num_train), ("t10k", num_test)):
        x, y = images_of(rng, count), np.arange(count, dtype=np.uint8)[::-1] % 10
        pack, end = (gzip.compress, ".gz") if prefix == "train" else (bytes, "")
        (folder / f"{prefix}-images-idx3-ubyte{end}").write_bytes(pack(idx(x)))
        (folder / f"{prefix}-labels-idx1-ubyte{end}").write_bytes(pack(idx(y)))
        parts[prefix] = x, y
    return parts


def emnist_files(rng, split="letters", first_label=1, num_classes=26):
    """Gives packed files by name, and upright images with labels from 0 by part."""
    contents, parts = {}, []
    for part in ("train", "test"):
        upright, labels = images_of(rng, 8), rng.integers(0, num_classes, 8)
        stored = np.ascontiguousarray(upright.transpose(0, 2, 1))
        numbers = (labels + first_label).astype(np.uint8)
        for kind, array in (("images-idx3", stored), ("labels-idx1", numbers)):
            contents[f"emnist-{split}-{part}-{kind}-ubyte.gz"] = gzip.compress(idx(array))
        parts.append((upright, labels))
    return contents, parts


def zipped(contents):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in contents.items():
            archive.writestr(f"gzip/{name}", content)
    return buffer.getvalue()


def archived(contents, mode="w:gz"):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=mode) as archive:
        for name, content in contents.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


def cifar_batches(rng, count=6):
    names = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]
    return {name: (images_of(rng, count, 32, 32, 3), rng.integers(0, 10, count)) for name in names}


def binary(images, labels):
    planes = images.transpose(0, 3, 1, 2).reshape(len(images), -1)
    return np.column_stack([np.array(labels, np.uint8), planes]).tobytes()


def cifar_files(batches):
    return {f"cifar-10/{name}.bin": binary(*batch) for name, batch in batches.items()}


def cifar100_files(rng, count=7):
    """The contents of a small archive, and by part its images and labels of both kinds."""
    groups, fine = np.arange(20), np.arange(100)
    files, parts = {}, {}
    for part in ("train", "test"):
        labels = np.column_stack([rng.integers(0, 20, count), rng.integers(0, 100, count)])
        labels[0] = 19, 99
        parts[part] = images_of(rng, count, 32, 32, 3), labels
        rows = [binary(image[None], [f])[1:] for image, (_, f) in zip(*parts[part], strict=True)]
        heads = [bytes([c, f]) for c, f in labels]
        files[f"cifar-100-binary/{part}.bin"] = b"".join(
            head + row for head, row in zip(heads, rows, strict=True)
        )
    for kind, numbers in (("coarse", groups), ("fine", fine)):
        text = "".join(f"{kind}_{i}\n" for i in numbers)
        files[f"cifar-100-binary/{kind}_label_names.txt"] = text.encode()
    return files, parts


def write_tiny_imagenet(folder, rng, num_train=3, num_test=2):
    """Writes the published layout; gives, by part and class, the pixels as they were encoded."""
    image = pytest.importorskip("PIL.Image")
    pixels = {"train": {}, "val": {}}

    def save(path, is_grey=False):
        path.parent.mkdir(parents=True, exist_ok=True)
        # Flat colours outlive JPEG but for rounding.
        color = rng.integers(0, 256, 1 if is_grey else 3).astype(np.uint8)
        flat = np.broadcast_to(color, (64, 64, len(color)))
        image.fromarray(flat[..., 0] if is_grey else np.array(flat)).save(path, "jpeg", quality=95)
        return np.broadcast_to(color, (64, 64, 3))

    annotations = []
    for c, wnid in enumerate(IDS):
        names = [f"{wnid}_{i}.JPEG" for i in range(num_train)]
        where = folder / "train" / wnid
        pixels["train"][wnid] = [save(where / "images" / n, is_grey=n == names[0]) for n in names]
        boxes = "".join(f"{name}\t0\t10\t63\t58\n" for name in names)
        (where / f"{wnid}_boxes.txt").write_text(boxes)
        held = [f"val_{num_test * c + i}.JPEG" for i in range(num_test)]
        pixels["val"][wnid] = [save(folder / "val" / "images" / name) for name in held]
        annotations += [f"{name}\t{wnid}\t0\t32\t44\t62\n" for name in held]
    (folder / "val" / "val_annotations.txt").write_text("".join(annotations))
    (folder / "wnids.txt").write_text("\n".join(IDS) + "\n")
    words = ["n00001740\tentity", *(f"{wnid}\tname of {wnid}, other" for wnid in sorted(IDS))]
    (folder / "words.txt").write_text("\n".join(words) + "\n")
    return pixels
