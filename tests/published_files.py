"""Small files in the published formats of Stack Overflow and FLAIR."""

import io
import json

import h5py
import numpy as np
from PIL import Image

SENTENCES = {
    "9": [b"how do i sort", b"the list is long and very old"],
    "10": [b"sort the list"],
    "800": [b"no"],
}


def write_stackoverflow(folder):
    folder.mkdir(parents=True)
    for part in ("train", "held_out", "test"):
        with h5py.File(folder / f"stackoverflow_{part}.h5", "w") as file:
            for user, sentences in SENTENCES.items():
                own = sentences if part == "train" else sentences[:1]
                group = file.create_group(f"examples/{user}")
                group["tokens"] = np.array(own, object)
                group["score"] = np.arange(len(own))
    # The most frequent word is not the first.
    (folder / "stackoverflow.word_count").write_text("sort 5\nthe 9\nlist 4\nold 1\n")


# image, user, part, labels, fine labels
IMAGES = [
    ("11", "b@N00", "train", ["plant", "food"], ["tree"]),
    ("12", "a@N01", "train", ["food"], ["bread", "waffle"]),
    ("13", "b@N00", "train", ["plant"], ["tree", "plant"]),
    ("14", "c@N02", "val", ["animal"], ["cat"]),
    ("15", "d@N03", "test", ["food", "animal"], ["cat", "bread"]),
]
COARSE = ("animal", "food", "plant")


def color_of(image_id):
    """Images of one colour, which JPEG nearly keeps."""
    return np.full((256, 256, 3), 10 * int(image_id) + 5, np.uint8)


def write_flair_files(folder):
    (folder / "small_images").mkdir(parents=True)
    entries = []
    for name, user, part, labels, fine in IMAGES:
        buffer = io.BytesIO()
        Image.fromarray(color_of(name)).save(buffer, "JPEG", quality=95)
        (folder / "small_images" / f"{name}.jpg").write_bytes(buffer.getvalue())
        entries.append(
            {
                "user_id": user,
                "image_id": name,
                "partition": part,
                "labels": labels,
                "fine_grained_labels": fine,
            }
        )
    (folder / "labels_and_metadata.json").write_text(json.dumps(entries))


def write_flair_hdf5(folder):
    """By pfl-research's `preprocess_federated_dataset`: users below parts, labels as pairs."""
    folder.mkdir(parents=True)
    numbers = {
        "label": {name: i for i, name in enumerate(COARSE)},
        "fine_grained_label": {
            name: i for i, name in enumerate(sorted({f for *_, fine in IMAGES for f in fine}))
        },
    }
    with h5py.File(folder / "flair_federated.hdf5", "w") as file:
        for part, user in sorted({(part, user) for _, user, part, *_ in IMAGES}):
            own = [image for image in IMAGES if image[1] == user]
            place = f"/{part}/{user}"
            for kind, at in (("label", 3), ("fine_grained_label", 4)):
                pairs = [(j, numbers[kind][n]) for j, image in enumerate(own) for n in image[at]]
                row, column = zip(*pairs, strict=True)
                file[f"{place}/{kind}s_row"] = np.asarray(row, np.uint16)
                file[f"{place}/{kind}s_col"] = np.asarray(column, np.uint16)
            file[f"{place}/image_ids"] = np.asarray([image[0] for image in own], "S")
            file.create_dataset(f"{place}/images", data=np.stack([color_of(i[0]) for i in own]))
        for kind, mapping in numbers.items():
            file[f"/metadata/{kind}_mapping"] = json.dumps(mapping)
